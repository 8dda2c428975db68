"""h[M, H] += the sum of all ranks' y[M, H]; x = h * gamma and the sum of squares of h. Plain Triton.

This is an all-reduce over peer memory which also adds the residual and applies the next norm's weight. Without h it returns the
sum alone.

Reads   y, h fp16 or bf16, contiguous; gamma [H] of 16 or 32 bits. places int64 [RANKS]: where each rank's memory begins
Writes  x [M, H]; h in place; fp32 sums of squares [1, M] of h as it is stored. In every other rank's memory: y at [PHASE, own
        rank, row]
Blocks  one row each, in chunks of 8 elements per thread, as in norm.py
Order   a block stores its row to all other ranks. Then it waits until no element of their rows in its own memory is EMPTY, a
        NaN that no rank stores. So the data are their own flag, and neither a fence nor a second message is needed. The block
        sets the elements that it read to EMPTY again, and adds the rows in the order of ranks, so that all ranks get the same
        bits
Phases  calls alternate between two phases of the memory, so that no rank overwrites a row that was not read yet. A rank that
        stores to a phase again has read the receiver's rows of the other phase. The receiver stored these after its kernel that
        emptied this phase had ended
Stop    a nonzero `stop` ends all waits, and the sums are then undefined
Overlap gamma is read before the wait for the previous kernel (programmatic dependent launch, sm_90); the next kernel may start
        once all blocks have passed it, and loads its weights while this kernel waits for rows
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

EMPTY = -1
"""The bits of a NaN, in fp16 and bf16, that stands for an element that has not arrived."""

_EMPTY, _NAN = tl.constexpr(EMPTY), tl.constexpr(0x7FFF)


@triton.jit
def row_at(places, rank, at, H: tl.constexpr):
    """The address of row `at`, as int16, in a rank's memory."""
    base = tl.load(places + rank).to(tl.pointer_type(tl.int16))
    return tl.multiple_of(base + at.to(tl.int64) * H, 16)  # bytes of alignment: H is a multiple of 8


@triton.jit
def seen(base, i, H: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Loads a row that another rank stores, which may not have arrived completely; 0 beyond H."""
    chunks = ()
    for c in tl.static_range(CHUNKS):
        if H == STEP * CHUNKS:
            chunks += (tl.load(base + c * STEP + i, volatile=True),)
        else:
            chunks += (tl.load(base + c * STEP + i, mask=c * STEP + i < H, other=0, volatile=True),)
    return chunks


@triton.jit
def lacks(chunks, CHUNKS: tl.constexpr):
    """True if some element has not arrived."""
    least = chunks[0].to(tl.uint16, bitcast=True)
    for c in tl.static_range(1, CHUNKS):
        least = tl.maximum(least, chunks[c].to(tl.uint16, bitcast=True))
    return tl.max(tl.max(least.to(tl.int32), axis=1), axis=0) == 0xFFFF


@triton.jit
def taken(base, stop, i, HALF: tl.constexpr, H: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Waits for a row of another rank, sets its place in memory to EMPTY again, and returns the row in float32."""
    chunks = seen(base, i, H, STEP, CHUNKS)
    waits = lacks(chunks, CHUNKS)
    while waits:
        chunks = seen(base, i, H, STEP, CHUNKS)
        waits = lacks(chunks, CHUNKS)
        if waits:
            waits = tl.load(stop, volatile=True) == 0
    values, emptied = (), ()
    for c in tl.static_range(CHUNKS):
        values += (chunks[c].to(HALF, bitcast=True).to(tl.float32),)
        emptied += (tl.full(chunks[c].shape, _EMPTY, tl.int16),)
    stored(base, tl.program_id(0) * 0, emptied, i, H, STEP, CHUNKS)
    return values


@triton.jit(do_not_specialize=["factor"])
def sum_ranks(
    x, squares, h, y, gamma, places, stop, factor, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    PHASE: tl.constexpr, H: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Processes one row."""
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    HALF: tl.constexpr = y.dtype.element_ty
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    if h is not None:
        weights = loaded(gamma, i, H, STEP, CHUNKS)
    there, here = (), ()
    for p in tl.static_range(RANKS):
        there += (row_at(places, p, (PHASE * RANKS + RANK) * ROWS + row, H),)
        here += (row_at(places, RANK, (PHASE * RANKS + p) * ROWS + row, H),)
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    own = loaded(row_of(y, row, H, False), i, H, STEP, CHUNKS)
    sent = ()
    for c in tl.static_range(CHUNKS):
        bits = own[c].to(tl.int16, bitcast=True)
        sent += (tl.where(bits == _EMPTY, _NAN, bits).to(tl.int16),)
    for p in tl.static_range(RANKS):
        if p != RANK:
            stored(there[p], row * 0, sent, i, H, STEP, CHUNKS)
    if h is not None:
        before = loaded(row_of(h, row, H, False), i, H, STEP, CHUNKS)
    if RANK == 0:
        total = floats(own, CHUNKS)
    else:
        total = taken(here[0], stop, i, HALF, H, STEP, CHUNKS)
    for p in tl.static_range(1, RANKS):
        if p == RANK:
            total = plus(total, floats(own, CHUNKS), CHUNKS)
        else:
            total = plus(total, taken(here[p], stop, i, HALF, H, STEP, CHUNKS), CHUNKS)
    if h is None:
        stored(x, row, rounded_to(total, HALF, CHUNKS), i, H, STEP, CHUNKS)
    else:
        halves = rounded_to(plus(total, floats(before, CHUNKS), CHUNKS), h.dtype.element_ty, CHUNKS)
        stored(h, row, halves, i, H, STEP, CHUNKS)
        finish(x, squares, row, halves, weights, None, i, 0.0, factor, H, STEP, CHUNKS, 2, 0)


class SumRanksPlan:
    """The plan of a call of `sum_ranks` for one shape, phase and rank: created once, called many times. `rows`: number of rows
    per phase that each rank's memory reserves for each rank."""

    def __init__(self, m: int, width: int, rank: int, ranks: int, rows: int, phase: int, machine: Machine) -> None:
        self.m = m
        threads, chunks = shape_of(width)
        overlap = machine.arch.sm >= 90
        self.constants = (rank, ranks, rows, phase, width, threads, VECTOR, chunks, overlap)
        # With h and without h the compiled kernels differ. A launcher reuses the kernel of its first call, so each has its own.
        self.launch, self.launch_alone = (Launcher(sum_ranks, (m, 1, 1), threads // 32, overlap=overlap) for _ in range(2))

    def __call__(
        self, h: Tensor | None, y: Tensor, gamma: Tensor | None, places: Tensor, stop: Tensor, factor: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Returns x [M, H] and squares [1, M], None without h; all tensors on the current device."""
        x = torch.empty_like(y)
        squares = None if h is None else y.new_empty((1, self.m), dtype=torch.float32)
        if self.m:
            launch = self.launch_alone if h is None else self.launch
            launch(x, squares, h, y, gamma, places, stop, factor, *self.constants)
        return x, squares
