"""y[M, N] = x[M, K] . w[N, K]^T with torch's own CPU product of bf16 activations and int4 weights in groups.

Reads   x bf16; w in torch's order, which depends on the CPU, with bf16 scales and zeros (pack/cpu.py)
Exact   up to MAX_M rows: weights (code - 8) * scale + zero in float32, sums in float32, one rounding of y. More rows: each
        weight rounded once to bf16, then torch's product of 16-bit matrices (of float32 ones where the CPU has no bf16
        instructions)
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit.pack.cpu import block_rows, int4_columns, row_blocks

MAX_M = 40
"""Largest M of torch's int4 product, whose time is proportional to M. For more rows it is faster to dequantize the weights,
which takes the same time for every M."""

BLOCK_WEIGHTS = 1 << 20
"""Number of weights dequantized at once. With 2^16 / 2^18 / 2^20 / 2^22 a product took 12.1 / 10.3 / 9.2 / 9.9 ms (M 64,
measured with a slower look-up table)."""


def int4_gemm(x: Tensor, codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Returns y [M, N] bf16 of x [M, K] bf16 and weights in the form "int4", for up to `MAX_M` rows."""
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, scale)
    return y


def int4_gemm_decoding(x: Tensor, codes: Tensor, scale: Tensor, group: int, zeros: bool) -> Tensor:
    """`int4_gemm` for many rows: dequantizes some blocks of rows of w at a time, transposed, as they are stored. If `zeros` is
    False, the second number of each (scale, zero) pair is 0."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    y = torch.empty((x.shape[0], n), dtype=x.dtype)
    operand = product_dtype()
    x = x.to(operand)
    for start, end in row_blocks(n, max(1, BLOCK_WEIGHTS // (block_rows() * k))):
        order, pairs = int4_columns(codes, start, end)
        of_rows = scale[:, start:end].view(-1, len(pairs), len(order), 2)[:, :, order].to(operand)
        s, z = of_rows.permute(3, 1, 0, 2)[:, :, :, None].contiguous()
        values = torch.index_select(_values_of_bytes(operand), 0, pairs.reshape(-1).int()).view(operand)
        grouped = values.view(len(pairs), -1, group, len(order))
        weights = torch.addcmul(z, grouped, s) if zeros else grouped.mul_(s)
        product = torch.matmul(x, weights.view(len(pairs), k, -1)).to(y.dtype)  # [blocks of rows, M, rows of a block]
        y[:, start:end].unflatten(1, (len(pairs), -1))[:, :, order] = product.transpose(0, 1)
    return y


@functools.cache
def _values_of_bytes(dtype: torch.dtype) -> Tensor:
    """Returns a table of 256 integers. Entry b holds, as two numbers of `dtype`, the values code - 8 of byte b's two codes."""
    byte = torch.arange(256, device="cpu")
    values = (torch.stack((byte & 15, byte >> 4), dim=-1) - 8).to(dtype)
    return values.view(torch.int32 if dtype == torch.bfloat16 else torch.int64)[:, 0].contiguous()


@functools.cache
def product_dtype() -> torch.dtype:
    """The dtype in which this CPU multiplies bf16 matrices: bf16 where it has instructions for it, else float32, since torch's
    emulation takes 4 to 8 times as long (256 x 2048 x 2048: 57 ms with AVX-512, 116 with AVX2, float32 13)."""
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else torch.float32


def product_by_rows(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] . w [N, K]^T for many rows, rounded to x's dtype. Computed in `product_dtype`, some rows of w at a time."""
    operand = product_dtype()
    wide = x.to(operand)
    parts = w.split(max(1, BLOCK_WEIGHTS // w.shape[1]))
    return torch.cat([torch.nn.functional.linear(wide, part.to(operand)).to(x.dtype) for part in parts], dim=1)
