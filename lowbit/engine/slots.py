"""The places that requests of an engine have on its device: the next token, its position, its pages, how tokens are sampled.

All of it stays where it is for the engine's life: CUDA graphs hold the addresses. Rows of a step name slots; the last slot is
nobody's, and rows that fill a step up to a size for which there is a graph name it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowbit.engine.block_pool import DUMMY_PAGE, pages_for
from lowbit.ops.sample import SamplingState

ALIGNED = 32
"""int32 in a line of the cache: kernels take tensors that start at multiples of 16 bytes."""


class Slots:
    """`count` slots for requests of at most `most_tokens` tokens, and one that is nobody's."""

    def __init__(self, count: int, most_tokens: int, vocab: int, stop_token_ids: Sequence[int], device: torch.device) -> None:
        self.count, self.device = count, device
        self.pages_per_slot = pages_for(most_tokens)
        # One chunk of memory, so that all that changes between two steps is one copy; each part starts at a line of the cache.
        self._apart = -(-(count + 1) // ALIGNED) * ALIGNED
        self._all = torch.zeros(2 * self._apart + (count + 1) * self.pages_per_slot, dtype=torch.int32, device=device)
        self.tokens = self._all[: count + 1]
        self.positions = self._all[self._apart : self._apart + count + 1]
        self.tables = self._all[2 * self._apart :].view(count + 1, self.pages_per_slot)
        self.tables[count] = DUMMY_PAGE
        self.sampling = SamplingState.make(count + 1, vocab, stop_token_ids, device)

    @property
    def dummy_slot(self) -> int:
        """The slot of rows that only fill a step up."""
        return self.count

    def update(self, pages: Iterable[tuple[int, int, int]], positions: Iterable[tuple[int, int]]) -> None:
        """Enters pages, each as (slot, place in its table, page), and positions of slots."""
        changes = [(2 * self._apart + slot * self.pages_per_slot + place, page) for slot, place, page in pages]
        changes += [(self._apart + slot, position) for slot, position in positions]
        if changes:
            where, values = on_device(list(zip(*changes, strict=True)), self.device)
            self._all.index_copy_(0, where.long(), values)


def on_device(values: object, device: torch.device) -> Tensor:
    """int32 of some numbers on a device; the host does not wait for it."""
    made = torch.tensor(values, dtype=torch.int32)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
