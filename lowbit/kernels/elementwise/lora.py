"""What low-rank adapters (LoRA) add to a product: y = b (a x) + bias. Each row may have its own adapter, or none. Two launches,
plain Triton.

Reads   x fp16 or bf16 [M, K]; a [adapters, parts, R, K]; b [adapters, N, R] in x's type; adapter_of int32 [M], -1 for none;
        squares float32 [norm_parts, M] or None; bias [N] or None
Writes  shrink: t float32 [splits, M, parts, R], partial sums of a x; expand: y [M, N] in x's type
Grid    blocks of 16 rows x adapters; for shrink also x splits of K x parts, for expand x tiles of columns. A program returns at
        once if no row of its block has its adapter. So rows with the same adapter are one matrix product, and no row is sorted
        or counted on the host. The programs of adapter 0 also write the rows without an adapter
Overlap adapter_of and the weights are read before the wait for the previous kernel (programmatic dependent launch, sm_90), so
        the previous kernel must not write adapter_of. The next kernel may start when all blocks have passed the wait. When
        `expand` starts, all kernels before `shrink` are therefore complete: it reads their result `squares` before its wait
Exact   sums in float32; splits of K, which depend on K and the rank alone, are added in order. a x is divided by the RMS, then
        rounded to x's type, as PEFT rounds it; y is rounded once. A row's bits do not depend on other rows. Tested:
        tests/kernels/elementwise/test_lora.py
Source  LoRA: arXiv 2106.09685; groups of rows by adapter: Punica, arXiv 2310.18547
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.parts.gluon import source_digest
from lowbit.kernels.parts.launch import Launcher

ROWS = 16
"""Number of rows of x in a program: those of one mma.sync."""

COLUMNS, WIDE = 128, 8192
"""COLUMNS of y per program, or twice as many if y has WIDE or more columns, so that fewer programs read the sums of a x."""

CHUNK = 256
"""Number of columns of K that are multiplied at once."""

MOST_SPLITS = 16
"""Maximum number of splits of K, whose sums the second kernel adds."""

MOST_EARLY = 32
"""Maximum of rank * chunks for which a split loads all its weights into registers before the wait for the previous kernel. A
split has as many chunks as this allows, since the second kernel reads the sums of all splits. With one chunk per split, 16
splits were 117 MB (64 rows of 4 adapters, 28,672 columns), and a step of Llama-3-8B's shape took 1.5 times as long as without
adapters (H200, 2026-11-28)."""


@dataclass(frozen=True)
class Lora:
    """The compile-time configuration of both kernels. widths: number of columns of each part. Parts lie side by side, or with
    `alternates` two parts alternate every 8 columns. rank: a power of two, at least 16. norm_parts: number of rows of
    `squares`; 0: no norm."""

    widths: tuple[int, ...]
    alternates: bool
    adapters: int
    rank: int
    k: int
    norm_parts: int
    overlap: bool
    rows: int = ROWS
    chunk: int = CHUNK
    digest: str = source_digest()

    @property
    def parts(self) -> int:
        return len(self.widths)

    @property
    def n(self) -> int:
        return sum(self.widths)

    @property
    def columns(self) -> int:
        """Number of columns of y in a program."""
        return COLUMNS if self.n < WIDE else 2 * COLUMNS

    @property
    def chunks(self) -> int:
        """Number of chunks of a split of K."""
        few = min(max(MOST_EARLY // self.rank, 1), -(-self.k // self.chunk))
        return max(few, -(-self.k // (self.chunk * MOST_SPLITS)))

    @property
    def splits(self) -> int:
        """Number of splits of K."""
        return -(-self.k // (self.chunk * self.chunks))

    @property
    def early_chunks(self) -> int:
        """Number of chunks of a split whose weights are loaded before the wait for the previous kernel: all, or none."""
        return self.chunks if self.rank * self.chunks <= MOST_EARLY else 0

    @property
    def norm_block(self) -> int:
        """Number of partial sums of squares, rounded up to a power of two."""
        return triton.next_power_of_2(max(self.norm_parts, 1))

    @property
    def begins(self) -> tuple[int, ...]:
        """First column of each part, and the number of columns."""
        return tuple(sum(self.widths[:i]) for i in range(self.parts + 1))


@triton.jit
def rows_of(adapter_of, M, C: tl.constexpr):
    """Returns (rows of a program, its adapter, mask of the rows that have this adapter, mask of the rows that the program
    writes)."""
    block, adapter = tl.program_id(1) // C.adapters, tl.program_id(1) % C.adapters
    rows = block * C.rows + tl.arange(0, C.rows)
    own_adapter = tl.load(adapter_of + rows, mask=rows < M, other=-1)
    own = own_adapter == adapter
    return rows, adapter, own, (tl.maximum(own_adapter, 0) == adapter) & (rows < M)


@triton.jit
def weights_of_chunk(a, adapter, part, begin, end, C: tl.constexpr):
    """Loads a chunk of one part of an adapter's a, transposed, up to column `end` of K: [chunk, R]."""
    r, k = tl.arange(0, C.rank), begin + tl.arange(0, C.chunk)
    first = a + (adapter.to(tl.int64) * C.parts + part) * (C.rank * C.k)
    return tl.load(first + r[None, :] * C.k + k[:, None], mask=(k < end)[:, None], other=0.0)


@triton.jit(do_not_specialize=["M"])
def shrink(t, x, a, adapter_of, M, x_stride, C: tl.constexpr):
    """Computes the partial sums of one split of K and one part."""
    ROWS: tl.constexpr = C.rows
    RANK: tl.constexpr = C.rank
    CHUNKS: tl.constexpr = C.chunks
    EARLY: tl.constexpr = C.early_chunks
    rows, adapter, own, written = rows_of(adapter_of, M, C)
    some = tl.max(written.to(tl.int32), axis=0) > 0
    split, part = tl.program_id(0), tl.program_id(2)
    begin, end = split * (C.chunks * C.chunk), tl.where(some, C.k, 0)  # a program without a row to write loads nothing
    weights = ()
    for c in tl.static_range(EARLY):
        weights += (weights_of_chunk(a, adapter, part, begin + c * C.chunk, end, C),)
    if C.overlap:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if some:
        total = tl.zeros((ROWS, RANK), tl.float32)
        for c in tl.static_range(CHUNKS):
            k = begin + c * C.chunk + tl.arange(0, C.chunk)
            of_x = x + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
            values = tl.load(of_x, mask=own[:, None] & (k < C.k)[None, :], other=0.0)
            if EARLY > 0:
                total = tl.dot(values, weights[c], total)
            else:
                total = tl.dot(values, weights_of_chunk(a, adapter, part, begin + c * C.chunk, end, C), total)
        r = tl.arange(0, C.rank)
        to = t + ((split * M + rows).to(tl.int64)[:, None] * C.parts + part) * C.rank + r[None, :]
        tl.store(to, total, mask=written[:, None])


@triton.jit
def inverse_rms(squares, rows, own, M, inverse_width, eps, factor, C: tl.constexpr):
    """Returns 1 / (rms * factor) of rows, from their partial sums of squares. These are read from L2, since L1 may have older
    values."""
    part = tl.arange(0, C.norm_block)
    exists = (part < C.norm_parts)[:, None] & own[None, :]
    sums = tl.load(squares + part[:, None] * M + rows[None, :], mask=exists, other=0.0, cache_modifier=".cg")
    return tl.rsqrt(tl.sum(sums, axis=0) * inverse_width + eps) / factor


@triton.jit
def add_part(total, at, weights, own, scale, M, dtype: tl.constexpr, C: tl.constexpr):
    """Adds one part's product: a x [rows, R], summed over the splits, times b. `at` are the addresses of the first split."""
    ROWS: tl.constexpr = C.rows
    RANK: tl.constexpr = C.rank
    SPLITS: tl.constexpr = C.splits
    inner = tl.zeros((ROWS, RANK), tl.float32)
    for split in tl.static_range(SPLITS):
        inner += tl.load(at + (split * M).to(tl.int64) * (C.parts * C.rank), mask=own[:, None], other=0.0)
    return tl.dot((inner * scale[:, None]).to(dtype), weights, total)


@triton.jit(do_not_specialize=["M"])
def expand(y, t, b, adapter_of, squares, bias, M, inverse_width, eps, factor, C: tl.constexpr):
    """Computes a tile of columns from the partial sums of all splits."""
    BEGINS: tl.constexpr = C.begins
    PARTS: tl.constexpr = C.parts
    ROWS: tl.constexpr = C.rows
    COLUMNS: tl.constexpr = C.columns
    rows, adapter, own, written = rows_of(adapter_of, M, C)
    some = tl.max(written.to(tl.int32), axis=0) > 0
    first_column = tl.program_id(0) * C.columns
    column, r = first_column + tl.arange(0, C.columns), tl.arange(0, C.rank)
    first = b + (adapter.to(tl.int64) * C.n + column[None, :]) * C.rank + r[:, None]
    end = tl.where(some, C.n, 0)  # a program without a row to write loads nothing
    weights = ()
    for p in tl.static_range(PARTS):
        if C.alternates:
            of_part = column // 8 % 2 == p
        else:
            of_part = (column >= BEGINS[p]) & (column < BEGINS[p + 1])
        weights += (tl.load(first, mask=(of_part & (column < end))[None, :], other=0.0),)
    scale = tl.full((ROWS,), 1.0, tl.float32)
    if squares is not None:
        scale = tl.where(own, inverse_rms(squares, rows, own, M, inverse_width, eps, factor, C), 0.0)
    if C.overlap:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if some:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        of_row = rows.to(tl.int64)[:, None] * (C.parts * C.rank) + r[None, :]
        for p in tl.static_range(PARTS):
            if C.alternates or (first_column < BEGINS[p + 1]) & (first_column + C.columns > BEGINS[p]):
                total = add_part(total, t + p * C.rank + of_row, weights[p], own, scale, M, y.dtype.element_ty, C)
        if bias is not None:
            total += tl.load(bias + column, mask=column < C.n, other=0.0).to(tl.float32)[None, :]
        to = y + rows.to(tl.int64)[:, None] * C.n + column[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=written[:, None] & (column < C.n)[None, :])


class ShrinkPlan:
    """The first launch of a call for `m` rows."""

    def __init__(self, m: int, config: Lora) -> None:
        self.m, self.config = m, config
        grid = (config.splits, -(-m // ROWS) * config.adapters, config.parts)
        self.launch = Launcher(shrink, grid, 4, overlap=config.overlap)

    def __call__(self, x: Tensor, a: Tensor, adapter_of: Tensor) -> Tensor:
        """Returns t [splits, M, parts, R]; all tensors on the current device."""
        c = self.config
        t = torch.empty((c.splits, self.m, c.parts, c.rank), dtype=torch.float32, device=x.device)
        self.launch(t, x, a, adapter_of, self.m, x.stride(0), c)
        return t


class ExpandPlan:
    """The second launch of a call for `m` rows."""

    def __init__(self, m: int, config: Lora) -> None:
        self.m, self.config = m, config
        grid = (-(-config.n // config.columns), -(-m // ROWS) * config.adapters, 1)
        self.launch = Launcher(expand, grid, 4, overlap=config.overlap)

    def __call__(
        self, t: Tensor, b: Tensor, adapter_of: Tensor, squares: Tensor | None, bias: Tensor | None, inverse_width: float,
        eps: float, factor: float,
    ) -> Tensor:  # fmt: skip
        """Returns y [M, N]; all tensors on the current device."""
        y = torch.empty((self.m, self.config.n), dtype=b.dtype, device=b.device)
        self.launch(y, t, b, adapter_of, squares, bias, self.m, inverse_width, eps, factor, self.config)
        return y


class LoraPlan:
    """The plan of a call for one shape: created once, called many times.

    A plan serves one GPU, one type and alignment of the tensors, and calls either with or without a bias.
    """

    def __init__(
        self, m: int, k: int, widths: tuple[int, ...], alternates: bool, adapters: int, rank: int, norm_parts: int,
        machine: Machine,
    ) -> None:  # fmt: skip
        self.m = m
        config = Lora(widths, alternates, adapters, rank, k, norm_parts, machine.arch.sm >= 90)
        self.shrink, self.expand = ShrinkPlan(m, config), ExpandPlan(m, config)

    def __call__(
        self, x: Tensor, a: Tensor, b: Tensor, adapter_of: Tensor, squares: Tensor | None, bias: Tensor | None,
        inverse_width: float, eps: float, factor: float,
    ) -> Tensor:  # fmt: skip
        """Returns y [M, N]; all tensors on the current device."""
        if not self.m:
            return x.new_empty((0, b.shape[1]))
        return self.expand(self.shrink(x, a, adapter_of), b, adapter_of, squares, bias, inverse_width, eps, factor)
