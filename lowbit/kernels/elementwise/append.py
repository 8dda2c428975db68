"""RoPE and append of prompt tokens: returns q after RoPE and stores k and v in the pages of their slots, with norms of heads.
Plain Triton.

Reads   qkv fp16 or bf16 [T, (heads + 2 kv_heads) head_dim]; tables, slots and positions of the tokens; cos and sin; gammas of
        norms of heads of q and k, or None
Writes  q [T, heads, head_dim]; k and v into pages [pages, kv_heads, 128, head_dim], or as codes and scales into packed pages
        (pack/kv_pages.py), which are rotated if their format is a rotated one
Grid    tokens x groups of HEADS heads, counted over q, k and v in order; a group may contain heads of all three
Overlap waits for the previous kernel, which may have written the positions, then lets the next kernel start (programmatic
        dependent launch, sm_90)
Exact   float32, rounded once; packed rows are then quantized in float32 as in formats/kv.py. Tested:
        tests/kernels/elementwise/test_append.py
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
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.kernels.parts.gluon import source_digest
from lowbit.kernels.parts.kv_rows import KVRows, store_rows
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rotary import angles, gammas, normed, pairs, turned
from lowbit.pack.kv_pages import KVPages

HEADS = 4
"""Number of heads per program."""


@dataclass(frozen=True)
class Append:
    """The kernel's compile-time configuration."""

    shape: AttentionShape
    kv: KVRows | None
    overlap: bool
    heads: int = HEADS
    page: int = PAGE
    digest: str = source_digest()


@triton.jit(do_not_specialize=["table_stride"])
def append_heads(
    q, qkv, k, v, k_scale, v_scale, tables, slot_of, position_of, cos_sin, q_norm, k_norm, table_stride, C: tl.constexpr
):  # fmt: skip
    """Processes some heads of one token."""
    S: tl.constexpr = C.shape
    if C.overlap:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * C.heads + tl.arange(0, C.heads)
    d = tl.arange(0, S.lanes)
    position = tl.load(position_of + token)
    page = tl.load(tables + tl.load(slot_of + token).to(tl.int64) * table_stride + position // C.page).to(tl.int64)
    cos, sin = angles(cos_sin, position, d, C)
    lanes = (d < S.head_dim)[None, :]
    exist = (head < S.heads + 2 * S.kv_heads)[:, None] & lanes
    is_q, is_v = (head < S.heads)[:, None], (head >= S.heads + S.kv_heads)[:, None]
    rows = qkv + token * S.features + head[:, None] * S.head_dim
    given, other = pairs(rows, (head < S.heads + 2 * S.kv_heads)[:, None], d, C, False)
    x = given
    if q_norm is not None:
        normed_x, normed_other = normed(x, other, gammas(q_norm, d, C), C)
        x, other = tl.where(is_q, normed_x, x), tl.where(is_q, normed_other, other)
    if k_norm is not None:
        normed_x, normed_other = normed(x, other, gammas(k_norm, d, C), C)
        x, other = tl.where(is_q | is_v, x, normed_x), tl.where(is_q | is_v, other, normed_other)
    x = turned(x, other, cos[None, :], sin[None, :], C).to(q.dtype.element_ty)
    tl.store(q + (token * S.heads + head[:, None]) * S.head_dim + d[None, :], x, mask=is_q & lanes)
    of_k = head - S.heads
    of_v = of_k - S.kv_heads
    if C.kv is not None:
        start, place = page * S.kv_heads, position % C.page
        turned_k = tl.where(lanes, x.to(tl.float32), 0.0)
        of_keys, of_values = (of_k >= 0) & (of_v < 0), (of_v >= 0) & (of_v < S.kv_heads)
        KV: tl.constexpr = C.kv
        K: tl.constexpr = C.kv.k
        V: tl.constexpr = C.kv.v
        K_ROTATED: tl.constexpr = C.kv.k_rotated
        V_ROTATED: tl.constexpr = C.kv.v_rotated
        store_rows(k, k_scale, turned_k, start + of_k, place, of_keys, K, K_ROTATED, False, KV)
        store_rows(v, v_scale, given, start + of_v, place, of_values, V, V_ROTATED, True, KV)
        return
    place = page * S.kv_heads * C.page + position % C.page
    to = (place + of_k[:, None] * C.page) * S.head_dim + d[None, :]
    tl.store(k + to, x, mask=((of_k >= 0) & (of_v < 0))[:, None] & lanes)
    to = (place + of_v[:, None] * C.page) * S.head_dim + d[None, :]
    tl.store(v + to, given.to(v.dtype.element_ty), mask=is_v & exist)


class AppendPlan:
    """The plan of a call for one shape: created once, called many times.

    A plan serves one GPU, one type of q, k and v and one type of gammas; all tensors are contiguous and start at multiples of
    16 bytes.
    """

    def __init__(self, tokens: int, shape: AttentionShape, kv: KVScheme, machine: Machine) -> None:
        self.tokens, self.shape = tokens, shape
        self.config = Append(shape, KVRows.of(kv, shape.head_dim), overlap=machine.arch.sm >= 90)
        grid = (tokens, -(-(shape.heads + 2 * shape.kv_heads) // HEADS), 1)
        self.launch = Launcher(append_heads, grid, 1 if shape.lanes <= 128 else 2, overlap=self.config.overlap)

    def __call__(
        self, qkv: Tensor, pages: KVPages, tables: Tensor, slot_of: Tensor, position_of: Tensor, cos_sin: Tensor,
        q_norm: Tensor | None, k_norm: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns q [T, heads, head_dim]; all tensors on the current device."""
        q = torch.empty((self.tokens, self.shape.heads, self.shape.head_dim), dtype=qkv.dtype, device=qkv.device)
        if self.tokens:
            self.launch(
                q, qkv, *pages.tensors, tables, slot_of, position_of, cos_sin, q_norm, k_norm, tables.stride(0), self.config
            )  # fmt: skip
        return q
