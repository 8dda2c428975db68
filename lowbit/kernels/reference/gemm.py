"""GEMMs and the functions that may follow them, in as few lines of torch as possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from lowbit.formats import QuantTensor
from lowbit.pack.dense import DenseWeight

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y, "relu": relu, "gelu": partial(gelu, approximate="tanh"), "silu": silu,
}  # fmt: skip
"""Functions that may follow a GEMM of quantized activations; gelu uses the tanh formula."""


def mixed_gemm_reference(x: Tensor, w: QuantTensor | DenseWeight, bias: Tensor | None = None) -> Tensor:
    """y [.., N] float64 = x [.., K] . dequantize(w)[N, K]^T + bias[N], everything in float64."""
    y = x.double() @ w.dequantize(torch.float64).T
    return y if bias is None else y + bias.double()


def scaled_gemm_reference(
    x: Tensor, x_scale: Tensor, w: QuantTensor, bias: Tensor | None = None, x_zero: Tensor | None = None,
    function: str = "none",
) -> Tensor:  # fmt: skip
    """y [.., N] float64 = function(((x [.., K] - x_zero) * x_scale) . dequantize(w)[N, K]^T + bias[N]), all in float64.

    x_scale is [1], [.., 1] or [.., ceil(K / 128)], x_zero integers [1] or [.., 1].
    """
    values = x.double() if x_zero is None else x.double() - x_zero
    scale = x_scale.double()
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(128, -1)[..., : x.shape[-1]]
    return FUNCTIONS[function](mixed_gemm_reference(values * scale, w, bias))
