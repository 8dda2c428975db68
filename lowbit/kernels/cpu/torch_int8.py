"""y[M, N] = x[M, K] . w[N, K]^T with torch's own CPU products of int8 weights.

Reads   x bf16, or int8 with scales of tokens; w int8 [N, K], two's complement (pack/cpu.py)
Exact   bf16 x: sums in float32. Up to MAX_M rows, scales are rounded to bf16 and y is rounded once. For more rows, y is rounded
        to x's type before and after the multiplication by the scale. int8 x: sums of 32 bits, exact if `sums_are_exact` returns
        True; scales in float32, then one rounding of y.

Measured 2026-11-21, 2 cores of a Xeon with AMX, torch 2.13, N 1536 K 576 bf16, us: torch's product 30 at M 1 and 158 at M 24;
kernels/cpu/blocked.py 100 at M 1. For int8 x, `onednn.qlinear_pointwise` is faster at M 64 (158 us to 225 for 2048 x 2048), but
it takes weights in an order that cannot be converted back.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit.kernels.reference.activations import SMALLEST_SCALE

MAX_M = 16
"""Largest M of torch's int8 product: its time grows with M, so a product of 16-bit matrices wins from about 24 rows on."""


def int8_gemm(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Returns y [M, N] bf16 of x [M, K] bf16, codes int8 [N, K] and scale bf16 [N], for up to `MAX_M` rows; K must be a
    multiple of `pack.cpu.INT8_K_STEP`."""
    return torch._weight_int8pack_mm(x, codes, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row of x by its largest magnitude: codes int8 [.., K] and scale float32 [.., 1]. The result is bit-equal
    to reference/, with a third of its operator calls, whose overhead dominates for one token."""
    values = x.float()
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    scale = (torch.maximum(-low, high) / 127.0).clamp(min=SMALLEST_SCALE)
    return (values * scale.reciprocal()).round().clamp(-128, 127).to(torch.int8), scale


@functools.cache
def sums_are_exact() -> bool:
    """True if torch's int8 product is exact on this CPU. It is tested with the largest numbers of either sign: CPUs without
    VNNI add pairs of products in 16 bits, which saturate (seen with AVX2)."""
    k = 256
    codes = torch.full((64, k), 127, dtype=torch.int8)
    codes[::2], codes[::3, ::2] = -128, -128
    for m in (1, 7, 64):
        for value in (-128, 127):
            x = torch.full((m, k), value, dtype=torch.int8)
            if not torch.equal(torch._int_mm(x, codes.t()).double(), x.double() @ codes.double().T):
                return False
    return True


def scaled_int8_gemm(
    x: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, zero_of_x: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Returns y float32 [M, N] of x int8 [M, K] with x_scale float32 [M, 1] or [1], and codes int8 [N, K] with scale float32
    [N]: the exact sum times both scales. `zero_of_x` is a pair: the zeros of x, int32 of x_scale's shape, and the sum of each
    row of codes, int32 [N]."""
    total = torch._int_mm(x, codes.t())
    if zero_of_x is not None:
        zero, sums = zero_of_x
        total = total - zero.reshape(-1, 1) * sums
    return total.float().mul_(x_scale.reshape(-1, 1)).mul_(scale)
