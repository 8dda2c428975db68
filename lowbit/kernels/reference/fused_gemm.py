"""GEMMs of a decode step with norm, gate and residual in the epilogue, in plain torch: the reference of their kernels.

Sums in float64. y, h and x of the next norm are rounded once, each to its dtype; intermediate results are not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from lowbit.formats import QuantTensor
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.pack.dense import DenseWeight


def rms_reference(squares: Tensor, width: int, eps: float) -> Tensor:
    """Returns the RMS [M] float64 of rows of h of `width` elements, from partial sums of squares [parts, M]."""
    return torch.sqrt(squares.double().sum(0) / width + eps)


def norm_gemm_reference(
    x: Tensor, w: QuantTensor | DenseWeight, squares: Tensor, bias: Tensor | None = None, *, width: int, eps: float,
    gated: str = "none", x_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """y [M, N] float64 = x [M, K] . dequantize(w)[N, K]^T / (rms * x_factor) + bias [N], where x is h * gamma * x_factor.

    With `gated` "silu" or "gelu_tanh", rows of w and bias alternate (pack/gated.py) and y [M, N / 2] is act(gate) * up.
    """
    y = mixed_gemm_reference(x, w) / (rms_reference(squares, width, eps) * x_factor)[:, None]
    y = y if bias is None else y + bias.double()
    if gated == "none":
        return y
    gate, up = y.unflatten(1, (-1, 2, 8)).unbind(2)
    return ((silu(gate) if gated == "silu" else gelu(gate, approximate="tanh")) * up).flatten(1)


def residual_gemm_reference(
    x: Tensor, w: QuantTensor | DenseWeight, h: Tensor, gamma: Tensor, bias: Tensor | None = None, *, x_factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (h + y, x of the next norm, squares), where y [M, N] = x [M, K] . dequantize(w)[N, K]^T + bias [N].

    h + y [M, N] is rounded to h's dtype. From it come x = h * gamma [N] * x_factor, in x's dtype, and `squares` float32 [1, M],
    the sums of squares of its rows.
    """
    added = (h.double() + mixed_gemm_reference(x, w, bias)).to(h.dtype)
    following = (added.double() * gamma.double() * x_factor).to(x.dtype)
    return added, following, added.double().square().sum(1, keepdim=True).T.float()
