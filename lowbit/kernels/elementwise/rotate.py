"""y = x H: each block of channels times a Hadamard matrix, in one pass over memory. (quantize_rows.py has a fused rotation.)

Reads   x fp16, bf16 or fp32 [M, K], any row stride
Writes  y [M, K] in x's type
Blocks  TILE channels of one row each, in chunks of 8 elements per thread; no reduction across warps
Overlap lets the next kernel start at once (programmatic dependent launch, sm_90)
Exact   sums in float32 in the order of parts/rotation.py, one rounding. A row's bits do not depend on other rows. Plain Triton.
        Tested: tests/kernels/elementwise/test_rotate.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rotation import rotated
from lowbit.kernels.parts.rows import floats, loaded, rounded_to, row_of

VECTOR = 8
"""Number of 16-bit elements in 16 bytes, which a thread loads at once."""

THREADS = 128


@triton.jit(do_not_specialize=["x_stride"])
def rotate_rows(
    y, x, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, CHUNKS: tl.constexpr,
    VECTORS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rotates CHUNKS * THREADS * VECTOR channels of a row. VECTORS: rows start at multiples of 8 elements."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    TILE: tl.constexpr = STEP * CHUNKS
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    i += tl.program_id(1) * TILE
    END: tl.constexpr = TILE if K % TILE == 0 else K  # no masks if all tiles are whole
    if OVERLAP:
        cuda.gdc_wait()
    values = floats(loaded(row_of(x, row, x_stride, VECTORS), i, END, STEP, CHUNKS), CHUNKS)
    made = rounded_to(rotated(values, BLOCK, CHUNKS), y.dtype.element_ty, CHUNKS)
    for c in tl.static_range(CHUNKS):
        if END == TILE:
            tl.store(row_of(y, row, K, False) + c * STEP + i, made[c])
        else:
            tl.store(row_of(y, row, K, False) + c * STEP + i, made[c], mask=c * STEP + i < K)


class RotatePlan:
    """The plan of a call for one shape: created once, called many times.

    `vectors` promises that x and its rows start at multiples of 16 bytes. A plan serves one GPU, one alignment and one type.
    """

    def __init__(self, m: int, k: int, block: int, vectors: bool, machine: Machine) -> None:
        self.m, self.k = m, k
        self.unit = VECTOR if vectors else 1
        chunks = 1 if k <= THREADS * VECTOR else 2
        overlap = machine.arch.sm >= 90
        self.constants = (k, block, THREADS, VECTOR, chunks, vectors, overlap)
        grid = (m, -(-k // (THREADS * VECTOR * chunks)), 1)
        self.launch = Launcher(rotate_rows, grid, THREADS // 32, overlap=overlap)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns y [M, K] of x [M, K], on the current device."""
        y = torch.empty((self.m, self.k), dtype=x.dtype, device=x.device)
        if self.m:
            self.launch(y, x, x.stride(0) // self.unit, *self.constants)
        return y
