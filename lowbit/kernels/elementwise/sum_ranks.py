"""h[M, H] += the sum of all ranks' y[M, H]; x = h * gamma and the sum of squares of h: an all-reduce over peer memory with the
residual and the next norm's weight where the partial sums arrive. Without h it is the sum alone. Plain Triton.

Reads   y, h fp16 or bf16, contiguous; gamma [H] of 16 or 32 bits. places int64 [2, RANKS]: where each rank's memory has the
        rows that arrive, and its flags
Writes  x [M, H]; h in place; fp32 sums of squares [1, M] of h as it is stored. In every other rank's memory: y at [PHASE, own
        rank, row], then the flag there. Own flags are left at the number of calls that their row has had in this phase
Blocks  one row each, in chunks of 8 elements per thread, as in norm.py
Order   a block stores its row to all other ranks, raises its flag there (release, system scope), waits for theirs in its own
        memory (acquire), and adds the rows in the order of ranks, so that all ranks get the same bits. Calls alternate between
        two phases. A rank that stores to a phase again has seen the flags of the other phase, which the receiver raised after
        its kernel that read this phase had ended. No wait lasts forever: `stop` ends all, with undefined sums
Overlap gamma is read before the wait for the previous kernel (programmatic dependent launch, sm_90); the next kernel may start
        once all blocks have passed it, and loads its weights while the rows are under way
Exact   sums in float32, then one rounding of their sum with h. x = h * gamma * factor, rounded once. Without h one rounding.
        Tested: tests/kernels/elementwise/test_sum_ranks.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.elementwise.norm import VECTOR, finish, shape_of, stored
from lowbit.kernels.elementwise.sum_norm import plus
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rows import floats, loaded, rounded_to, row_of


@triton.jit
def arrived(base, i, H: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Loads a row that another rank has stored, past the L1, which may hold what was there before."""
    chunks = ()
    for c in tl.static_range(CHUNKS):
        if H == STEP * CHUNKS:
            chunks += (tl.load(base + c * STEP + i, cache_modifier=".cg"),)
        else:
            chunks += (tl.load(base + c * STEP + i, mask=c * STEP + i < H, other=0.0, cache_modifier=".cg"),)
    return chunks


@triton.jit
def row_at(places, rank, at, H: tl.constexpr, y):
    """The address of row `at` in a rank's memory."""
    base = tl.load(places + rank).to(y.dtype)
    return tl.multiple_of(base + at.to(tl.int64) * H, 16)  # bytes: H is a multiple of 8


@triton.jit
def flag_at(places, rank, at, counts, RANKS: tl.constexpr):
    """The address of flag `at` in a rank's memory."""
    return tl.load(places + RANKS + rank).to(counts.dtype) + at


@triton.jit(do_not_specialize=["factor"])
def sum_ranks(
    x, squares, h, y, gamma, places, counts, stop, factor, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    PHASE: tl.constexpr, H: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Processes one row."""
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    mine = (PHASE * RANKS + RANK) * ROWS + row
    if h is not None:
        weights = loaded(gamma, i, H, STEP, CHUNKS)
    there, flags_there, flags_here = (), (), ()
    for p in tl.static_range(1, RANKS):
        there += (row_at(places, (RANK + p) % RANKS, mine, H, y),)
        flags_there += (flag_at(places, (RANK + p) % RANKS, mine, counts, RANKS),)
        flags_here += (flag_at(places, RANK, (PHASE * RANKS + (RANK + p) % RANKS) * ROWS + row, counts, RANKS),)
    # The last kernel that wrote it is not the previous one: a call in the other phase, and products, are between.
    count = tl.load(counts + PHASE * ROWS + row) + 1
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    own = loaded(row_of(y, row, H, False), i, H, STEP, CHUNKS)
    for p in tl.static_range(1, RANKS):
        stored(there[p - 1], row * 0, own, i, H, STEP, CHUNKS)
    if h is not None:
        before = loaded(row_of(h, row, H, False), i, H, STEP, CHUNKS)
    tl.debug_barrier()  # all threads have stored their part of the row
    for p in tl.static_range(1, RANKS):
        tl.atomic_xchg(flags_there[p - 1], count, sem="release", scope="sys")
    for p in tl.static_range(1, RANKS):
        waits = True
        while waits:
            waits = tl.atomic_add(flags_here[p - 1], 0, sem="acquire", scope="sys") != count
            if waits:
                waits = tl.load(stop, volatile=True) == 0
    tl.store(counts + PHASE * ROWS + row, count)
    total = floats(own, CHUNKS)
    if RANK != 0:
        total = floats(arrived(row_at(places, RANK, PHASE * RANKS * ROWS + row, H, y), i, H, STEP, CHUNKS), CHUNKS)
    for p in tl.static_range(1, RANKS):
        if p == RANK:
            total = plus(total, floats(own, CHUNKS), CHUNKS)
        else:
            place = row_at(places, RANK, (PHASE * RANKS + p) * ROWS + row, H, y)
            total = plus(total, floats(arrived(place, i, H, STEP, CHUNKS), CHUNKS), CHUNKS)
    if h is None:
        stored(x, row, rounded_to(total, y.dtype.element_ty, CHUNKS), i, H, STEP, CHUNKS)
    else:
        halves = rounded_to(plus(total, floats(before, CHUNKS), CHUNKS), h.dtype.element_ty, CHUNKS)
        stored(h, row, halves, i, H, STEP, CHUNKS)
        finish(x, squares, row, halves, weights, None, i, 0.0, factor, H, STEP, CHUNKS, 2, 0)


class SumRanksPlan:
    """A call of `sum_ranks` for one shape, phase and rank: made once, called many times. `rows`: rows that each rank's memory
    has in a phase for those of another rank."""

    def __init__(self, m: int, width: int, rank: int, ranks: int, rows: int, phase: int, machine: Machine) -> None:
        self.m = m
        threads, chunks = shape_of(width)
        overlap = machine.arch.sm >= 90
        self.constants = (rank, ranks, rows, phase, width, threads, VECTOR, chunks, overlap)
        self.launch = Launcher(sum_ranks, (m, 1, 1), threads // 32, overlap=overlap)

    def __call__(
        self, h: Tensor | None, y: Tensor, gamma: Tensor | None, places: Tensor, counts: Tensor, stop: Tensor,
        factor: float = 1.0,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Returns x [M, H] and squares [1, M], None without h; all tensors on the current device."""
        x = torch.empty_like(y)
        squares = None if h is None else y.new_empty((1, self.m), dtype=torch.float32)
        if self.m:
            self.launch(x, squares, h, y, gamma, places, counts, stop, factor, *self.constants)
        return x, squares
