"""y[M, N] = (x[M, K] * x_scale) . dequant(w)[N, K]^T for 8-bit x in plain torch, on any device, a block of w at a time.

Reads   x int8, float8_e4m3fn or float8_e5m2 with its scales; packed uint8 [N, ceil(K * bits / 8)]; scales, zeros
Memory  never more than BLOCK_WEIGHTS dequantized weights and RANGE_K columns of x in float32 at once
Exact   ranges of K within which all scales are the same are multiplied in float32. Sums of integers are exact, since they stay
        below 2^24; sums of floats have the error of a float32 product of at most RANGE_K terms. Ranges are scaled and added in
        float64. The epilogue function is applied in float64. Its result is rounded once to y's type, or to float32 if y is
        quantized afterwards
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from lowbit.formats import PerBlock, PerGroup, PerTensor, Scheme, ZeroPoint, int_format, unpack_words
from lowbit.kernels.cpu.blocked import block_rows, decode_codes
from lowbit.kernels.reference.activations import quantize_activations_reference
from lowbit.kernels.reference.gemm import FUNCTIONS

RANGE_K = 512
"""Largest number of columns multiplied at once. |x - zero| <= 255 and |w| <= 128, so sums of this many products are exact in
float32."""

X_BLOCK = 128
"""Number of columns of x that share a scale where a token has several scales."""


def scaled_gemm_blocked(
    x: Tensor, x_scale: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: Scheme,
    dtype: torch.dtype, x_zero: Tensor | None, function: str = "none", y_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns y [.., N] of `dtype`. Shapes as in `lowbit.ops.scaled_gemm`, which checks them."""
    k, n = x.shape[-1], packed.shape[0]
    m = math.prod(x.shape[:-1])
    rows_of_x = x.reshape(m, k)
    token_scale = x_scale.reshape(-1, 1).expand(m, 1) if x_scale.numel() == 1 else x_scale.reshape(m, x_scale.shape[-1])
    token_zero = None if x_zero is None else x_zero.reshape(-1, 1).float()
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    ranges = _ranges(scheme, k, token_scale.shape[1] > 1)
    step = block_rows(scheme, k, x.device.type)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        codes = decode_codes(unpack_words(packed[rows], scheme.weight.bits, k), scheme.weight)
        total = torch.zeros((m, rows.stop - rows.start), dtype=torch.float64, device=x.device)
        for first, end in ranges:
            part = rows_of_x[:, first:end].float()
            if token_zero is not None:
                part = part - token_zero
            s = _at(scale, scheme, rows, first, k)
            w = codes[:, first:end]
            if zero is None:
                product = (part @ w.T).double() * s
            else:
                z = _at(zero, scheme, rows, first, k)
                if scheme.zero is ZeroPoint.INTEGER:
                    product = (part @ (w - z.float()[:, None]).T).double() * s
                else:
                    product = (part @ w.T).double() * s + part.sum(-1, dtype=torch.float64)[:, None] * z
            total += product * token_scale[:, first // X_BLOCK if token_scale.shape[1] > 1 else 0, None].double()
        made = FUNCTIONS[function](total if bias is None else total + bias[rows].double())
        if y_scale is None:
            y[:, rows] = made.to(dtype)
        else:
            y[:, rows] = quantize_activations_reference(made.float(), int_format(8), scale=y_scale)[0]
    return y.reshape(*x.shape[:-1], n)


def _ranges(scheme: Scheme, k: int, x_blocks: bool) -> list[tuple[int, int]]:
    """Returns ranges (first, end) that cover K. Each is at most RANGE_K long and has the same scales of w and x throughout."""
    sizes = [RANGE_K]
    if isinstance(scheme.granularity, (PerGroup, PerBlock)):
        sizes.append(scheme.granularity.block((1, k))[1])
    if x_blocks:
        sizes.append(X_BLOCK)
    edges = sorted({edge for size in sizes for edge in range(0, k, size)} | {k})
    return list(itertools.pairwise(edges))


def _at(values: Tensor, scheme: Scheme, rows: slice, column: int, k: int) -> Tensor:
    """Returns scales or zeros of some rows for the columns around `column`: float64 [rows] or [1]."""
    if isinstance(scheme.granularity, PerTensor):
        return values.reshape(1).double()
    n, size = scheme.granularity.block((rows.stop, k))
    part = values[rows.start // n : -(-rows.stop // n), column // size].double()
    return part.repeat_interleave(n)[: rows.stop - rows.start] if n > 1 else part
