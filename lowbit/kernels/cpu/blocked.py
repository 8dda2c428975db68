"""y[M, N] = x[M, K] . dequant(w)[N, K]^T in plain torch, on any device, a block of rows of w at a time.

Reads   x fp16, bf16 or fp32; packed uint8 [N, ceil(K * bits / 8)], the dense rows of formats/words.py; scales, zeros.
Memory  at most BLOCK_WEIGHTS dequantized weights at once, for layers of any size.
Exact   dequantization in float32, one rounding of each weight to x's dtype, then torch's own matrix product. For fp16 x on a
        CPU the product is computed in float32, so that weights may exceed the range of fp16 (10 to 40 % slower).
Source  float codes become halves by moving their bits under a half's exponent, as FP6-LLM does (arXiv:2401.14112).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import (
    FloatFormat,
    IntFormat,
    NumberFormat,
    PerBlock,
    PerTensor,
    Scheme,
    ZeroPoint,
    decode,
    spread,
    unpack_words,
)

BLOCK_WEIGHTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Number of weights dequantized at once, by type of device. On a CPU they are 1 MiB of float32, which stays in the cache. A GPU
has more memory and needs few launches.

Times in ms, best of 7, with blocks of 2^18 / 2^20 / 2^23 / 2^25 weights: int4 in groups of 64 takes 18 / 40 / 59 / 102,
fp6_e3m2 35 / 34 / 76 / 198, int8 12 / 11 / 49 / 114 (2 cores of a Xeon with AMX, N 49152 K 576, M 1, float32 x, 2026-11-21)."""


def mixed_gemm_blocked(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    """Returns y [.., N] in x's dtype. Shapes as in `lowbit.ops.dequantize_gemm`, which checks them."""
    k, n = x.shape[-1], packed.shape[0]
    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    step = block_rows(scheme, k, x.device.type)
    wide = x.float() if x.dtype == torch.float16 and x.device.type == "cpu" else x
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        weights = decode_rows(packed[rows], scale, zero, scheme, rows, k, wide.dtype)
        part = None if bias is None else bias[rows].to(wide.dtype)
        y[..., rows] = torch.nn.functional.linear(wide, weights, part)
    return y


def block_rows(scheme: Scheme, k: int, device: str) -> int:
    """Number of rows of w dequantized at once: a multiple of the number of rows that share a scale."""
    rows = max(1, BLOCK_WEIGHTS[device] // max(k, 1))
    if isinstance(scheme.granularity, PerBlock):
        rows = max(1, rows // scheme.granularity.n) * scheme.granularity.n
    return rows


def decode_rows(
    packed: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, rows: slice, k: int, dtype: torch.dtype
) -> Tensor:
    """Returns weights [rows, K] of the packed rows `rows`, from the scales and zeros of the whole matrix."""
    values = decode_codes(unpack_words(packed, scheme.weight.bits, k), scheme.weight)
    s = _spread_rows(scale, scheme, rows, k)
    if zero is None:
        return (values * s).to(dtype)
    z = _spread_rows(zero, scheme, rows, k)
    return ((values - z) * s if scheme.zero is ZeroPoint.INTEGER else torch.addcmul(z, values, s)).to(dtype)


def decode_codes(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """Converts codes uint8 to float32: `formats.decode` without its table look-up, 5 to 10 times faster on a CPU."""
    if isinstance(fmt, IntFormat):
        return codes.to(torch.float32).sub_(fmt.offset) if fmt.offset else codes.to(torch.float32)
    if fmt.special == "none" and fmt.exponent < 5:
        return _decode_by_bias_shift(codes, fmt)
    return decode(codes, fmt)


def _decode_by_bias_shift(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Moves the sign to bit 15, and exponent and mantissa into those fields of an fp16. The fp16 is too small by a factor of
    2^(15 - bias), also for subnormals."""
    sign_bit = 1 << (fmt.bits - 1)
    wide = codes.to(torch.int16)
    half = ((wide & sign_bit) << (16 - fmt.bits)) | ((wide & (sign_bit - 1)) << (10 - fmt.mantissa))
    return half.view(torch.float16).to(torch.float32).mul_(2.0 ** (15 - fmt.bias))


def _spread_rows(scale: Tensor, scheme: Scheme, rows: slice, k: int) -> Tensor:
    """Returns scales or zeros of some rows as [rows, K] or something that broadcasts to it, float32."""
    count = rows.stop - rows.start
    if isinstance(scheme.granularity, PerTensor):
        return scale.to(torch.float32)
    n = scheme.granularity.block((count, k))[0]
    return spread(scale[rows.start // n : -(-rows.stop // n)].to(torch.float32), scheme.granularity, (count, k))
