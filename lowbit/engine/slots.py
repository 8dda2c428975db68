"""Device tensors of the running requests, with one row for each slot: next token, position, adapter, page table and sampling
settings.

They are allocated once, since CUDA graphs store their addresses. The last slot is a dummy, used by the rows that pad a step to
the size of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowbit.engine.block_pool import DUMMY_PAGE, pages_for
from lowbit.ops.sample import SamplingState

ALIGNED = 32
"""Number of int32 in an L2 line of 128 bytes; kernels require tensors aligned to 16 bytes."""


class Slots:
    """`count` slots for requests of at most `most_tokens` tokens, and a dummy slot. drafts: maximum number of guessed tokens
    that a step verifies for a slot."""

    def __init__(
        self, count: int, most_tokens: int, vocab: int, stop_token_ids: Sequence[int], device: torch.device, drafts: int = 0
    ) -> None:  # fmt: skip
        self.count, self.device = count, device
        self.pages_per_slot = pages_for(most_tokens)
        # All parts are one allocation, so that one copy makes all changes between two steps. Each part starts at an L2 line.
        self._stride = -(-(count + 1) // ALIGNED) * ALIGNED
        self._all = torch.zeros(3 * self._stride + (count + 1) * self.pages_per_slot, dtype=torch.int32, device=device)
        self.tokens = self._all[: count + 1]
        self.positions = self._all[self._stride : self._stride + count + 1]
        self.adapters = self._all[2 * self._stride : 2 * self._stride + count + 1].fill_(-1)  # no adapter
        self.tables = self._all[3 * self._stride :].view(count + 1, self.pages_per_slot)
        self.tables[count] = DUMMY_PAGE
        self.sampling = SamplingState.make(count + 1, vocab, stop_token_ids, device, 1 + drafts)

    @property
    def dummy_slot(self) -> int:
        """The slot of padding rows."""
        return self.count

    def start(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Writes the next token of each of `slots`, and its position."""
        where, *values = on_device([slots, tokens, positions], self.device)
        for state, value in zip((self.tokens, self.positions), values, strict=True):
            state.index_copy_(0, where.long(), value)

    def update(
        self, pages: Iterable[tuple[int, int, int]], positions: Iterable[tuple[int, int]],
        adapters: Iterable[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Writes page-table entries (slot, index, page), positions (slot, position), and adapters (slot, adapter)."""
        changes = [(3 * self._stride + slot * self.pages_per_slot + index, page) for slot, index, page in pages]
        changes += [(self._stride + slot, position) for slot, position in positions]
        changes += [(2 * self._stride + slot, adapter) for slot, adapter in adapters]
        if changes:
            where, values = on_device(list(zip(*changes, strict=True)), self.device)
            self._all.index_copy_(0, where.long(), values)


def on_device(values: object, device: torch.device) -> Tensor:
    """Returns an int32 tensor of `values` on a device, copied asynchronously."""
    tensor = torch.tensor(values, dtype=torch.int32)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
