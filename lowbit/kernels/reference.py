"""What every kernel must compute, in as few lines of torch as possible. Tests and benchmarks import these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, pad, relu, silu

from lowbit.formats import FloatFormat, NumberFormat, QuantTensor

CODE_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Formats that activations are quantized to, and the type of their codes."""

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y, "relu": relu, "gelu": partial(gelu, approximate="tanh"), "silu": silu,
}  # fmt: skip
"""What a product of quantized activations can be followed by; gelu is the one with tanh."""

SMALLEST_SCALE = 2.0**-126
"""No scale of activations is smaller, so that its reciprocal is finite; rows of zeros have this one."""


def mixed_gemm_reference(x: Tensor, w: QuantTensor, bias: Tensor | None = None) -> Tensor:
    """y [.., N] float64 = x [.., K] . dequantize(w)[N, K]^T + bias[N], everything in float64."""
    y = x.double() @ w.dequantize(torch.float64).T
    return y if bias is None else y + bias.double()


def quantize_activations_reference(
    x: Tensor, fmt: NumberFormat, group: int = 0, scale: Tensor | None = None, symmetric: bool = True,
    zero: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Codes [.., K], scale float32 [.., ceil(K / group)] (group 0: [.., 1]; the given [1]) and zero int32 of x [.., K].

    In float32, each line one rounding: scale = max|x| / largest value of `fmt`, code = nearest(x * (1 / scale)), saturating.
    Asymmetric: scale = (max - min) / 255 with 0 in the range, x = (code - zero) * scale.
    """
    k = x.shape[-1]
    size = group or k
    values = pad(x.float(), (0, -k % size)).unflatten(-1, (-1, size))
    if scale is not None:
        inverse = scale.float().reciprocal()
    elif symmetric:
        scale = _scale(values.abs().amax(dim=-1), fmt.max)
        inverse = (1 / scale)[..., None]
    else:
        low, high = values.amin(dim=-1).clamp(max=0), values.amax(dim=-1).clamp(min=0)
        scale = _scale(high - low, 255.0)
        inverse = (1 / scale)[..., None]
        zero = (fmt.min - (low * inverse[..., 0]).round()).nan_to_num().to(torch.int32)
    steps = values * inverse
    if isinstance(fmt, FloatFormat):
        codes = steps.clamp(fmt.min, fmt.max)
    else:
        codes = (steps.round() + (0 if zero is None else zero[..., None])).clamp(fmt.min, fmt.max)
    return codes.to(CODE_DTYPES[fmt.name]).flatten(-2)[..., :k].contiguous(), scale, zero


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) in float32, rounded to no other type."""
    values = x.float()
    return values * weight.float() * (values.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias in float32, rounded to no other type."""
    return layer_norm(x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps)


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float32, rounded to no other type."""
    return silu(gate.float()) * up.float()


def _scale(span: Tensor, steps: float) -> Tensor:
    """span / steps, but no smaller than SMALLEST_SCALE; NaN stays. Divides by a tensor: by a number, torch multiplies by its
    reciprocal on a GPU."""
    scale = span / span.new_full((), steps)
    return torch.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
