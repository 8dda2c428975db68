"""Attention of the prefill chunks of a step. On a GPU one call computes all chunks, unless scores have a soft cap. Otherwise
chunks of similar length share a call where that is possible."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.engine.ragged import Ragged
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.ops.attention import causal_attention, prompt_attention
from lowbit.ops.ragged_attention import gather_kv, ragged_attention
from lowbit.pack.kv_pages import KVPages

LEAST = 16
"""Shorter chunks are padded to this length, longer ones to the next power of two. Up to half of the work may then be padding.
That is cheap compared with a call for each chunk and layer.
"""

MOST_KEYS = 1 << 15
"""Maximum number of tokens whose keys and values one call gathers: 128 MiB with 8 heads of 128 in 16 bits."""


@dataclass(frozen=True)
class Group:
    """Chunks that begin at the same position and are padded to `length` tokens. numbers: their indices. page, place
    [B, begin + length]: page of each key, and its index in the page; padding repeats the first key."""

    length: int
    numbers: list[int]
    page: Tensor
    place: Tensor


class RaggedAttention:
    """Attention of all sequences of a `Ragged` in one call. Soft caps are not supported. Results of a sequence do not depend on
    the others."""

    def __init__(self, ragged: Ragged, kv_heads: int) -> None:
        self.ragged, self.where = ragged, ragged.keys(kv_heads)

    def __call__(
        self, q: Tensor, pages: KVPages, shape: AttentionShape, sinks: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Returns the attention output [T, heads * head_dim] of q [T, heads, head_dim] over a layer's pages, which hold the
        keys and values of all chunks. Padding rows are undefined. `sinks` [heads]: the layer's sinks, if any.
        """
        k, v = gather_kv(pages, self.where, self.ragged.k_begins[-1:], q.dtype)
        return ragged_attention(q, k, v, self.ragged.q_begins, self.ragged.k_begins, shape, sinks)


class PromptAttention:
    """Attention of some chunks, planned once for all layers.

    One call computes chunks of similar length that begin at the same position (0, or after a common prefix). They are padded at
    the end, where the causal mask hides the padding. `invariant`: each chunk has a call of its own, so that results do not
    depend on other chunks.
    """

    def __init__(self, chunks: Sequence[PrefillChunk], slots: Slots, *, invariant: bool) -> None:
        self.chunks, self.tables = chunks, slots.tables
        self.begins = [0, *itertools.accumulate(len(chunk.tokens) for chunk in chunks)]
        alike: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for number, chunk in enumerate(() if invariant else chunks):
            alike[chunk.begin, max(LEAST, 1 << (len(chunk.tokens) - 1).bit_length())].append(number)
        self.groups: list[Group] = []
        for (begin, length), numbers in sorted(alike.items()):
            most = max(1, MOST_KEYS // (begin + length))  # chunks in one call
            for at in range(0, len(numbers), most):
                if len(part := numbers[at : at + most]) > 1:
                    self.groups.append(self._group(begin, length, part))
        grouped = {number for group in self.groups for number in group.numbers}
        self.alone = [number for number in range(len(chunks)) if number not in grouped]
        self.longest = max((chunks[number].end for number in grouped), default=0)
        if self.groups:
            self._order()

    def _group(self, begin: int, length: int, numbers: list[int]) -> Group:
        chunks, device = [self.chunks[number] for number in numbers], self.tables.device
        slot, end = on_device(
            [[chunk.sequence.running_slot for chunk in chunks], [chunk.end for chunk in chunks]], device
        ).long()
        position = torch.arange(begin + length, device=device).expand(len(chunks), -1)
        position = torch.where(position < end[:, None], position, 0)
        return Group(length, numbers, self.tables[slot[:, None], position // PAGE].long(), position % PAGE)

    def _order(self) -> None:
        """Computes the padded rows of q of all groups, and the index of each token in the output."""
        taken, order, at = list[int](), [0] * self.begins[-1], 0
        for length, number in (
            *((group.length, n) for group in self.groups for n in group.numbers),
            *((0, n) for n in self.alone),
        ):
            begin, end = self.begins[number], self.begins[number + 1]
            order[begin:end] = range(at, at + end - begin)
            at += length or end - begin
            if length:
                taken += [*range(begin, end), *[begin] * (length - (end - begin))]
        both = on_device([*taken, *order], self.tables.device).long()
        self.taken, self.order = both[: len(taken)], both[len(taken) :]

    def __call__(
        self, q: Tensor, pages: KVPages, shape: AttentionShape, sinks: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Returns the attention output [T, heads * head_dim] of q [T, heads, head_dim] over a layer's pages, which hold the
        keys and values of all chunks. Padding rows are 0. `sinks` [heads]: the layer's sinks, if any.
        """
        out = self._of_chunks(q, pages, shape, sinks)
        return out if len(out) == len(q) else pad(out, (0, 0, 0, len(q) - len(out)))

    def _of_chunks(
        self, q: Tensor, pages: KVPages, shape: AttentionShape, sinks: Tensor | None
    ) -> Tensor:  # fmt: skip
        if not self.groups or shape.softcap or sinks is not None or 0 < shape.window < self.longest:
            return _joined([self._alone(number, q, pages, shape, sinks) for number in range(len(self.chunks))])
        out = []
        of_groups = q[self.taken].split([group.length * len(group.numbers) for group in self.groups])
        for group, own in zip(self.groups, of_groups, strict=True):
            seen = pages.read(group.page, group.place, q.dtype)
            out.append(causal_attention(own.unflatten(0, (-1, group.length)), *seen, shape))
        out += [self._alone(number, q, pages, shape, sinks) for number in self.alone]
        return _joined(out)[self.order]

    def _alone(
        self, number: int, q: Tensor, pages: KVPages, shape: AttentionShape, sinks: Tensor | None
    ) -> Tensor:  # fmt: skip
        chunk = self.chunks[number]
        part = q[self.begins[number] : self.begins[number + 1]]
        table = self.tables[chunk.sequence.running_slot]
        return prompt_attention(part, pages, table, chunk.begin, shape, sinks)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
