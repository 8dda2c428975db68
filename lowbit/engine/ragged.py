"""The chunks of prompts of a round as tensors, one after the other, filled up to one of a few sizes.

What only fills up belongs to nobody's slot, so that tensors of one shape, which a CUDA graph wants, hold any chunks that fit.
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
"""Numbers of tokens up to the first multiple of 64 that are computed at once; from 128 on they are multiples of 64, and from
1,024 of 256: products of many tokens take whole tiles of 64 to 256 anyway."""


def sizes(most: int) -> tuple[int, ...]:
    """Numbers of tokens that are computed at once, of up to `most` tokens of prompts: the last holds them all."""
    all_sizes = [*SMALL, *range(128, 1024, 64), *range(1024, most + 256, 256)]
    return tuple(all_sizes[: bisect.bisect_left(all_sizes, most) + 1])


@dataclass(frozen=True)
class RaggedShape:
    """How many tokens, sequences and keys of sequences some tensors have room for."""

    tokens: int
    sequences: int
    keys: int

    @property
    def columns(self) -> int:
        """int32 of each row of numbers of sequences, and of one more that is nobody's."""
        return -(-(self.sequences + 1) // ALIGNED) * ALIGNED

    def numbers(self, chunks: Sequence[PrefillChunk], dummy_slot: int) -> list[int]:
        """What a `Ragged` is made of: of each text its slot and the position where it begins, where its tokens and its keys
        begin among those of all, and its last token if one is sampled after it, these first; then the tokens."""
        q_begins, k_begins = [0], [0]
        for chunk in chunks:
            q_begins.append(q_begins[-1] + len(chunk.tokens))
            k_begins.append(k_begins[-1] + chunk.end)
        assert len(chunks) <= self.sequences and q_begins[-1] <= self.tokens and k_begins[-1] <= self.keys
        ends = [end - 1 for end, chunk in zip(q_begins[1:], chunks, strict=True) if chunk.last]
        rows = (
            ([chunk.request.row for chunk in chunks], dummy_slot),
            ([chunk.begin for chunk in chunks], 0),
            (q_begins, q_begins[-1]),
            (k_begins, k_begins[-1]),
            (ends, 0),
        )
        made = [number for row, filler in rows for number in (*row, *[filler] * (self.columns - len(row)))]
        for chunk in chunks:
            made += chunk.tokens
        return [*made, *[0] * (self.tokens - q_begins[-1])]


class Ragged:
    """Pieces of prompts in a shape, from their `numbers` on the device: nothing here depends on them but what tensors hold.

    `ids`, `slot_of` and `position_of` int32 [tokens] are of each token; `q_begins` and `k_begins` int32 [sequences + 1] say where
    the tokens of each text and their keys, all up to their own, begin among those of all; `last` int64 [sequences] names the tokens
    after which one is sampled, these first.
    """

    def __init__(self, shape: RaggedShape, numbers: Tensor, slots: Slots) -> None:
        self.shape, self.tables = shape, slots.tables
        rows = numbers[: 5 * shape.columns].view(5, shape.columns)
        self._slot, begin, self.q_begins, self.k_begins = (row[: shape.sequences + 1] for row in rows[:4])
        self.last = rows[4, : shape.sequences].long()
        self.ids = numbers[5 * shape.columns :]
        text, local = self._sequences(self.q_begins, shape.tokens)
        self.slot_of, self.position_of = self._slot[text], begin[text] + local

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], slots: Slots, tokens: int) -> Ragged:
        """Some chunks, filled up to so many tokens."""
        shape = RaggedShape(tokens, len(chunks), sum(chunk.end for chunk in chunks))
        return cls(shape, on_device(shape.numbers(chunks, slots.dummy_slot), slots.device), slots)

    def _sequences(self, begins: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Of each of `count` tokens or keys its text, and how many of its text are before it: none of what only fills up."""
        each = torch.arange(count, dtype=torch.int32, device=begins.device)
        text = torch.searchsorted(begins[1:], each, right=True)
        return text, torch.where(text < self.shape.sequences, each - begins[text], 0)

    def keys(self, kv_heads: int) -> Tensor:
        """Where the first heads of all keys lie among the rows of a layer's pages, int64 [keys]."""
        text, position = self._sequences(self.k_begins, self.shape.keys)
        page = self.tables[self._slot[text].long(), position // PAGE].long()
        return page * (kv_heads * PAGE) + position % PAGE
