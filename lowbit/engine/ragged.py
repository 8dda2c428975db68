"""The prefill chunks of a step, concatenated into tensors that are padded to one of a few sizes.

Padding tokens map to the dummy slot. So tensors of one shape can hold any chunks up to that size, as a CUDA graph requires.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import ALIGNED, Slots, on_device
from lowbit.kernels.choose.attention import PAGE

SMALL = (8, 16, 32, 48, 64, 96)
"""Sizes below 128 tokens. From 128 on, sizes are multiples of 64, and from 1,024 on multiples of 256. Padding to them costs
little, since large-M products compute whole tiles of 64 to 256 tokens anyway."""


def sizes(most: int) -> tuple[int, ...]:
    """Returns the padded numbers of tokens for up to `most` prompt tokens; the last one is at least `most`."""
    all_sizes = [*SMALL, *range(128, 1024, 64), *range(1024, most + 256, 256)]
    return tuple(all_sizes[: bisect.bisect_left(all_sizes, most) + 1])


@dataclass(frozen=True)
class RaggedShape:
    """Sizes of a ragged batch: numbers of tokens, of sequences, and of keys of all sequences."""

    tokens: int
    sequences: int
    keys: int

    @property
    def columns(self) -> int:
        """Length of a row of `numbers` with one int32 for each sequence and the dummy sequence, padded to an L2 line."""
        return -(-(self.sequences + 1) // ALIGNED) * ALIGNED

    def numbers(self, chunks: Sequence[PrefillChunk], dummy_slot: int) -> list[int]:
        """Returns the padded input of a `Ragged`. It has four rows with the slot, first position, token offset and key offset
        of each sequence, a row with the indices of the tokens after which a token is sampled, and then all tokens.
        """
        q_begins, k_begins = [0], [0]
        for chunk in chunks:
            q_begins.append(q_begins[-1] + len(chunk.tokens))
            k_begins.append(k_begins[-1] + chunk.end)
        assert len(chunks) <= self.sequences and q_begins[-1] <= self.tokens and k_begins[-1] <= self.keys
        ends = [end - 1 for end, chunk in zip(q_begins[1:], chunks, strict=True) if chunk.last]
        rows = (
            ([chunk.sequence.running_slot for chunk in chunks], dummy_slot),
            ([chunk.begin for chunk in chunks], 0),
            (q_begins, q_begins[-1]),
            (k_begins, k_begins[-1]),
            (ends, 0),
        )
        numbers = [number for row, filler in rows for number in (*row, *[filler] * (self.columns - len(row)))]
        for chunk in chunks:
            numbers += chunk.tokens
        return [*numbers, *[0] * (self.tokens - q_begins[-1])]


class Ragged:
    """Prefill chunks as tensors of one shape, made on the device from their `numbers`.

    `ids`, `slot_of` and `position_of` int32 [tokens] describe the tokens. `q_begins` and `k_begins` int32 [sequences + 1] are
    the offsets of each sequence's tokens and keys; its keys include those of earlier chunks. `last` int64 [sequences] has the
    indices of the tokens after which a token is sampled, followed by padding.
    """

    def __init__(self, shape: RaggedShape, numbers: Tensor, slots: Slots) -> None:
        self.shape, self.tables = shape, slots.tables
        rows = numbers[: 5 * shape.columns].view(5, shape.columns)
        self._slot, begin, self.q_begins, self.k_begins = (row[: shape.sequences + 1] for row in rows[:4])
        self.last = rows[4, : shape.sequences].long()
        self.ids = numbers[5 * shape.columns :]
        sequence, index = self._sequences(self.q_begins, shape.tokens)
        self.slot_of, self.position_of = self._slot[sequence], begin[sequence] + index

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], slots: Slots, tokens: int) -> Ragged:
        """Returns chunks padded to `tokens` tokens."""
        shape = RaggedShape(tokens, len(chunks), sum(chunk.end for chunk in chunks))
        return cls(shape, on_device(shape.numbers(chunks, slots.dummy_slot), slots.device), slots)

    def _sequences(self, begins: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns, for each of `count` tokens or keys, its sequence and its index in that sequence; 0 for padding."""
        each = torch.arange(count, dtype=torch.int32, device=begins.device)
        sequence = torch.searchsorted(begins[1:], each, right=True)
        return sequence, torch.where(sequence < self.shape.sequences, each - begins[sequence], 0)

    def keys(self, kv_heads: int) -> Tensor:
        """Returns where each key is in a layer's pages, int64 [keys]: the row of its first head, if the pages are seen as rows
        of one head and one token."""
        sequence, position = self._sequences(self.k_begins, self.shape.keys)
        page = self.tables[self._slot[sequence].long(), position // PAGE].long()
        return page * (kv_heads * PAGE) + position % PAGE
