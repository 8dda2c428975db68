"""y[M, N] = x[M, K] . w[N, K]^T with torch's own CPU product of bf16 activations and int8 weights.

The product takes two's complement weights and scales of x's type. Our codes are offset binary, so each call flips
their top bits (one pass over the bytes), and scales stay in float32 by multiplying the result.

Measured 2026-11-21, 2 cores of a Xeon with AMX, torch 2.13, N 1536 K 576 bf16, us: this 30 at M 1 and 158 at M 24;
the blocked kernel 100 at M 1. Torch's int4 product is faster still at M 1 (16), but takes weights in an order of its
own, and bringing them there takes 176 at each call or a second copy of the weights: not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

K_STEP = 16
"""Torch 2.13's product walks K in steps of 16 without a tail: wrong results or a crash for other K (seen: 1, 8, 17, 24, 72)."""

MAX_M = 16
"""Its time grows with M while decoding does not: the blocked kernel wins from about 24 rows on."""


def mixed_gemm_torch_int8(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """y [.., N] bf16 of x [.., K] bf16, packed uint8 [N, K] (int8 codes) and scale float [N, 1]."""
    weight = (packed ^ 0x80).view(torch.int8)
    ones = torch.ones(packed.shape[0], dtype=x.dtype)
    y = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), weight, ones).float() * scale.float().T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], packed.shape[0])
