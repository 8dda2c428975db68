"""Attention of the pieces of prompts of a round: whole short prompts together, all else piece by piece."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.engine.batching import Piece
from lowbit.engine.slots import Slots, on_device
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.ops.attention import causal_attention, prompt_attention

LEAST = 16
"""Prompts of up to so many tokens are filled up to it, longer ones to the next power of two: half of what is computed may be
padding, whose cost is small beside that of a call for each prompt and layer."""


class PromptAttention:
    """How the attention of some pieces is computed, planned once for all layers.

    Pieces that begin a text see nothing but themselves: those of about one length are one call, each filled up at its end,
    where a causal mask hides it. slot_of and position_of int32 [T] are those of all tokens, in order. `invariant`: each piece
    is a call of its own, whose result cannot depend on others.
    """

    def __init__(self, pieces: Sequence[Piece], slots: Slots, slot_of: Tensor, position_of: Tensor, *, invariant: bool) -> None:
        self.pieces, self.tables = pieces, slots.tables
        self.begins = [0, *itertools.accumulate(len(piece.tokens) for piece in pieces)]
        of_length: defaultdict[int, list[int]] = defaultdict(list)
        if not invariant:
            for number, piece in enumerate(pieces):
                if piece.begin == 0:
                    of_length[max(LEAST, 1 << (len(piece.tokens) - 1).bit_length())].append(number)
        self.groups = [(length, numbers) for length, numbers in sorted(of_length.items()) if len(numbers) > 1]
        grouped = {number for _, numbers in self.groups for number in numbers}
        self.alone = [number for number in range(len(pieces)) if number not in grouped]
        self.longest = max((len(pieces[number].tokens) for number in grouped), default=0)
        if self.groups:
            self._index(slot_of, position_of)

    def _index(self, slot_of: Tensor, position_of: Tensor) -> None:
        """Where the tokens of groups lie among all, in q and in the pages, and where all are in what is computed."""
        taken, order, at = list[int](), [0] * len(slot_of), 0
        for length, numbers in self.groups:
            for number in numbers:
                begin, count = self.begins[number], len(self.pieces[number].tokens)
                taken += [*range(begin, begin + count), *[begin] * (length - count)]
                order[begin : begin + count] = range(at, at + count)
                at += length
        for number in self.alone:
            begin, count = self.begins[number], len(self.pieces[number].tokens)
            order[begin : begin + count] = range(at, at + count)
            at += count
        both = on_device([*taken, *order], slot_of.device).long()
        self.taken, self.order = both[: len(taken)], both[len(taken) :]
        slot, position = slot_of[self.taken].long(), position_of[self.taken].long()
        self.page, self.place = self.tables[slot, position // PAGE].long(), position % PAGE

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
        """[T, heads * head_dim] of q [T, heads, head_dim], with the keys and values of a layer, into which those of all pieces
        are written."""
        if not self.groups or shape.softcap or 0 < shape.window < self.longest:
            return _joined([self._alone(number, q, keys, values, shape) for number in range(len(self.pieces))])
        out, at = [], 0
        own = q[self.taken], keys[self.page, :, self.place], values[self.page, :, self.place]
        for length, numbers in self.groups:
            rows = slice(at, at := at + length * len(numbers))
            own_q, own_k, own_v = (x[rows].unflatten(0, (-1, length)) for x in own)
            out.append(causal_attention(own_q, own_k, own_v, shape))
        out += [self._alone(number, q, keys, values, shape) for number in self.alone]
        return _joined(out)[self.order]

    def _alone(self, number: int, q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
        piece, begin = self.pieces[number], self.begins[number]
        part = q[begin : begin + len(piece.tokens)]
        return prompt_attention(part, keys, values, self.tables[piece.request.row], piece.begin, shape)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
