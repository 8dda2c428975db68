"""out[m, i] = x[m, order[i]] * factors[order[i]]: act-order permutation and factors of the channels of x. Plain Triton.

Reads   x fp16 or bf16 [M, K], any row stride; order int32 [K] or None; factors fp32, fp16 or bf16 [K] or None
Writes  rows that start at multiples of 16 bytes, with zeros from K up to the next multiple, as the GEMM kernels require
Few     `gather_elements`, for low latency: a block reads some columns of one token directly from memory
Many    `gather_rows`: two tokens per block, with 16-byte loads and stores. The permutation is done in shared memory, where the
        elements of a column of both tokens are one word, so that a random read fetches two elements
Overlap lets the next kernel start at once, so that a GEMM kernel loads its weights meanwhile; reads order and scale before the
        previous kernel has finished (programmatic dependent launch, sm_90)
Exact   the product in float32, rounded once to x's type. Tested: tests/kernels/elementwise/test_gather.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rows import row_of

VECTOR = 8
"""Number of 16-bit elements in 16 bytes; rows of the result start at multiples of it."""

FEW_TOKENS = 32
"""Largest M of `gather_elements`. With K 8192 it takes 2.3 us at 32 tokens (`gather_rows`: 2.2) and 3.8 us at 64 (2.4) (H200,
2026-11-21)."""

MOST_COLUMNS = 32768
"""Widest row that fits the registers of a block of `gather_rows` (compiled for sm_90 by Triton 3.6 and 3.9)."""


# With VECTORS strides are given in 16-byte vectors. They are multiplied by 8 in the kernel, so that the compiler can prove
# alignment.
@triton.jit
def existing(i, K, VECTORS: tl.constexpr):
    """Returns a mask of columns that exist; if K is a multiple of 8 it is the same for all elements of a vector."""
    if VECTORS:
        exist = i // 8 < K // 8
    else:
        exist = i < K
    return exist


@triton.jit
def scaled(value, factor):
    """Returns the product in float32. LLVM would narrow a plain `*` of fp16 and a bf16 factor to fp16, which loses the factor's
    range."""
    return tl.fma(value.to(tl.float32), factor, 0.0)


@triton.jit(do_not_specialize=["K", "x_stride", "y_vectors"])
def gather_elements(
    y, x, order, scale, K, x_stride, y_vectors, COLUMNS: tl.constexpr, VECTORS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Computes some columns of one token, reading each element directly."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exist = existing(i, K, VECTORS)
    source = i
    if order is not None:
        source = tl.load(order + i, mask=exist, other=0)
    if scale is not None:
        factor = tl.load(scale + source, mask=exist, other=0.0).to(tl.float32)
    if OVERLAP:
        cuda.gdc_wait()
    value = tl.load(row_of(x, tl.program_id(0), x_stride, VECTORS) + source, mask=exist, other=0.0)
    if scale is not None:
        value = scaled(value, factor).to(x.dtype.element_ty)
    tl.store(row_of(y, tl.program_id(0), y_vectors, True) + i, value, mask=i // 8 < y_vectors)


@triton.jit(do_not_specialize=["M", "K", "x_stride", "y_vectors"])
def gather_rows(
    y, x, order, scale, M, K, x_stride, y_vectors, COLUMNS: tl.constexpr, VECTORS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Computes all columns, at most COLUMNS, of two tokens."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    i = tl.arange(0, COLUMNS)
    exist = existing(i, K, VECTORS)
    source = tl.load(order + i, mask=exist, other=0)
    if scale is not None:
        factor = tl.load(scale + i, mask=exist, other=0.0).to(tl.float32)
    if OVERLAP:
        cuda.gdc_wait()
    first = tl.program_id(0) * 2
    second = tl.minimum(first + 1, M - 1)  # with an odd number of tokens, the last one is computed twice
    low = tl.load(row_of(x, first, x_stride, VECTORS) + i, mask=exist, other=0.0)
    high = tl.load(row_of(x, second, x_stride, VECTORS) + i, mask=exist, other=0.0)
    if scale is not None:
        low = scaled(low, factor).to(x.dtype.element_ty)
        high = scaled(high, factor).to(x.dtype.element_ty)
    words = (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    words = tl.where(exist, tl.gather(words, source, 0), 0)
    half = y.dtype.element_ty
    kept = i // 8 < y_vectors
    tl.store(row_of(y, first, y_vectors, True) + i, words.to(tl.int16).to(half, bitcast=True), mask=kept)
    tl.store(row_of(y, second, y_vectors, True) + i, (words >> 16).to(tl.int16).to(half, bitcast=True), mask=kept)


class GatherPlan:
    """The plan of a call for one shape: created once, called many times.

    `order`: True if columns are permuted. `vectors` promises that K and the row stride of x are multiples of 8 and that all
    tensors start at multiples of 16 bytes. A plan serves one GPU and one alignment of the tensors.
    """

    def __init__(self, m: int, k: int, order: bool, vectors: bool, machine: Machine) -> None:
        self.m, self.k = m, k
        self.y_stride = -(-k // VECTOR) * VECTOR
        self.x_unit = VECTOR if vectors else 1
        overlap = machine.arch.sm >= 90
        few = m <= FEW_TOKENS
        columns = max(256, triton.next_power_of_2(self.y_stride))
        if order and not few and columns <= min(MOST_COLUMNS, machine.arch.shared_per_block_bytes // 4):
            function, grid, self.sizes = gather_rows, (-(-m // 2), 1, 1), (m, k)
            warps = min(max(columns // 512, 4), 32 if columns > MOST_COLUMNS // 2 else 16)
        else:
            columns, warps = 256 if few else 1024, 4
            function, grid, self.sizes = gather_elements, (m, -(-self.y_stride // columns), 1), (k,)
        self.constants = (columns, vectors, overlap)
        self.launch = Launcher(function, grid, warps, overlap=overlap)

    def __call__(self, x: Tensor, order: Tensor | None, factors: Tensor | None) -> Tensor:
        """Returns out [M, K] with a row stride of K rounded up to a multiple of 8; all tensors on the current device."""
        y = torch.empty((self.m, self.y_stride), dtype=x.dtype, device=x.device)
        if self.m:
            strides = x.stride(0) // self.x_unit, self.y_stride // VECTOR
            self.launch(y, x, order, factors, *self.sizes, *strides, *self.constants)
        return y if self.y_stride == self.k else y[:, : self.k]
