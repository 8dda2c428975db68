"""Gathers keys and values of some tokens from the pages of a layer into contiguous tensors. Plain Triton.

Reads   k and v fp16 or bf16 [pages, kv_heads, 128, head_dim], or packed pages (pack/kv_pages.py); `where` int64 [T], each
        token's row in the pages for kv head 0; the number of tokens, at most T
Writes  k and v [T, kv_heads, head_dim] of these tokens; rows beyond their number stay uninitialised
Grid    16 (packed pages: 8) tokens x kv heads: tokens of a page are contiguous per head; programs without a token exit at once
Overlap waits for the previous kernel, which may have written the pages, then lets the next kernel start (programmatic dependent
        launch, sm_90)
Exact   a copy; packed rows are dequantized in float32, with the rotation undone, and rounded once. Tested:
        tests/kernels/elementwise/test_gather_kv.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.formats.kv import KVScheme
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.attention import PAGE
from lowbit.kernels.parts.gluon import source_digest
from lowbit.kernels.parts.kv_rows import KVRows, load_rows
from lowbit.kernels.parts.launch import Launcher
from lowbit.pack.kv_pages import KVPages

TOKENS = 16
"""Number of tokens per program: with heads of 128 elements, 4 KiB of keys and 4 KiB of values."""

PACKED_TOKENS = 8
"""Number of tokens per program over packed pages. The program has one warp: rotations then need no barriers, and rows of 256
elements fit the registers. For int4 rows of 128 elements it takes 54 instructions per value; with two warps and 16 tokens it
would take 85 (SASS of sm_90)."""


@dataclass(frozen=True)
class GatherKv:
    """The kernel's compile-time configuration."""

    kv_heads: int
    head_dim: int
    kv: KVRows | None
    overlap: bool
    tokens: int = TOKENS
    page: int = PAGE
    digest: str = source_digest()

    @property
    def lanes(self) -> int:
        """Number of elements of a head, padded to a power of two."""
        return 1 << (self.head_dim - 1).bit_length()


@triton.jit(do_not_specialize_on_alignment=["count"])  # `count` is a view into a tensor, at any offset
def gather_heads(k_out, v_out, k, v, k_scale, v_scale, where, count, C: tl.constexpr):
    """Copies one kv head of some tokens."""
    if C.overlap:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    total = tl.load(count)
    first, head = tl.program_id(0) * C.tokens, tl.program_id(1)
    if first >= total:
        return
    token, d = first + tl.arange(0, C.tokens), tl.arange(0, C.lanes)
    exist = token < total
    row = tl.load(where + token, mask=exist, other=0)
    if C.kv is not None:
        start, place = row // (C.kv_heads * C.page) * C.kv_heads + head, row % C.page
        KV: tl.constexpr = C.kv
        LANES: tl.constexpr = C.lanes
        K: tl.constexpr = C.kv.k
        V: tl.constexpr = C.kv.v
        K_ROTATED: tl.constexpr = C.kv.k_rotated
        V_ROTATED: tl.constexpr = C.kv.v_rotated
        keys = load_rows(k, k_scale, start, place, exist, LANES, K, K_ROTATED, False, KV)
        values = load_rows(v, v_scale, start, place, exist, LANES, V, V_ROTATED, True, KV)
        to = (token[:, None].to(tl.int64) * C.kv_heads + head) * C.head_dim + d[None, :]
        mask = exist[:, None] & (d < C.head_dim)[None, :]
        tl.store(k_out + to, keys.to(k_out.dtype.element_ty), mask=mask)
        tl.store(v_out + to, values.to(v_out.dtype.element_ty), mask=mask)
        return
    row += head * C.page
    mask = exist[:, None] & (d < C.head_dim)[None, :]
    given = row[:, None] * C.head_dim + d[None, :]
    to = (token[:, None].to(tl.int64) * C.kv_heads + head) * C.head_dim + d[None, :]
    keys = tl.load(k + given, mask=mask, other=0.0)
    values = tl.load(v + given, mask=mask, other=0.0)
    tl.store(k_out + to, keys, mask=mask)
    tl.store(v_out + to, values, mask=mask)


class GatherKvPlan:
    """The plan of a call for one shape: created once, called many times.

    A plan serves one GPU and one type of the results, that of 16-bit pages; all tensors are contiguous and start at multiples
    of 16 bytes.
    """

    def __init__(
        self, tokens: int, kv_heads: int, head_dim: int, kv: KVScheme, dtype: torch.dtype, machine: Machine
    ) -> None:  # fmt: skip
        self.size, self.dtype = (tokens, kv_heads, head_dim), dtype
        each, warps = (PACKED_TOKENS, 1) if kv.quantized else (TOKENS, 2)
        self.config = GatherKv(kv_heads, head_dim, KVRows.of(kv, head_dim), overlap=machine.arch.sm >= 90, tokens=each)
        self.launch = Launcher(gather_heads, (-(-tokens // each), kv_heads, 1), warps, overlap=self.config.overlap)

    def __call__(self, pages: KVPages, where: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (k, v) [T, kv_heads, head_dim]; all tensors on the current device."""
        k_out, v_out = (torch.empty(self.size, dtype=self.dtype, device=where.device) for _ in range(2))
        if self.size[0]:
            self.launch(k_out, v_out, *pages.tensors, where, count, self.config)
        return k_out, v_out
