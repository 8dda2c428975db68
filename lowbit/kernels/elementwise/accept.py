"""Accepts the tokens of a verified step that continue their sequences, and advances the slots. Plain Triton.

Reads   of each row: slot, input token, its position, its index `ahead` among the rows of its slot, and the token sampled after
        it; flags and counters of slots
Writes  of each slot: its next token, position and number of tokens, and the counts of accepted tokens if it has penalties.
        Nothing is written for the last slot, a dummy that padding rows map to
Grid    one program per row; a program does nothing unless its row is the first of a slot
Overlap none: the kernel starts after the kernels before it have ended, and the next kernel starts after this one has ended
Exact   integers. Tested: tests/kernels/elementwise/test_accept.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.reference import sampling
from lowbit.kernels.reference.sampling import AcceptInputs

_WORDS, _FLAGS = tl.constexpr(sampling.WORDS), tl.constexpr(sampling.FLAGS)
_GENERATED, _PENALIZED = tl.constexpr(sampling.GENERATED), tl.constexpr(sampling.PENALIZED)


@triton.jit
def accept_rows(
    rows, given, row_positions, ahead, sampled, settings, counts, tokens, positions, slots, V: tl.constexpr, B: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Advances the slot of row b, if that is the first row of its slot."""
    b = tl.program_id(0)
    slot = tl.load(rows + b)
    if (tl.load(ahead + b) == 0) & (slot < slots - 1):
        i = tl.arange(0, MOST)
        inside = b + i < B
        of_slot = tl.load(ahead + b + i, mask=inside, other=-1) == i
        before = tl.load(sampled + b + i - 1, mask=inside & (i > 0), other=-1)
        right = of_slot & ((i == 0) | (tl.load(given + b + i, mask=inside, other=-2) == before))
        wrong = tl.cumsum((~right).to(tl.int32), 0)
        count = tl.sum((wrong == 0).to(tl.int32), 0)
        tl.store(tokens + slot, tl.load(sampled + b + count - 1))
        tl.store(positions + slot, tl.load(row_positions + b) + count)
        words = settings + slot * _WORDS
        tl.store(words + _GENERATED, tl.load(words + _GENERATED) + count)
        if tl.load(words + _FLAGS) & _PENALIZED:
            token = tl.load(sampled + b + i, mask=wrong == 0, other=0)
            tl.atomic_add(counts + slot.to(tl.int64) * V + token, 1, mask=wrong == 0)


class AcceptPlan:
    """The plan of a call for one shape: created once, called many times. A plan serves one GPU."""

    def __init__(self, rows: int, slots: int, vocab: int) -> None:
        self.slots, self.constants = slots, (vocab, rows, triton.next_power_of_2(rows))
        self.launch = Launcher(accept_rows, (rows, 1, 1), 1)

    def __call__(self, a: AcceptInputs) -> None:
        """Advances the slots; all tensors on the current device."""
        self.launch(*a, self.slots, *self.constants)
