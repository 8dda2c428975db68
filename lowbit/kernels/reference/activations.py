"""Quantization of activations by each rule, and the norms and gates that precede it, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, pad, silu

from lowbit.formats import ActivationRule, FloatFormat, NumberFormat

CODE_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Formats that activations are quantized to, and the dtype of their codes."""

SMALLEST_SCALE = 2.0**-126
"""Smallest scale of activations, and the scale of rows of zeros. Its reciprocal is finite."""

FLOORS = {ActivationRule.FINEGRAINED_FP8: 1e-12, ActivationRule.FBGEMM: 1 / (448 * 512)}
"""Smallest scale by rule, for the rules of other tools that have one."""

FBGEMM_CEILING = 1200.0
"""Clamp of max|x| in FBGEMM's rule: the default of Transformers' `activation_scale_ub`."""


def quantize_activations_reference(
    x: Tensor, fmt: NumberFormat, group: int = 0, scale: Tensor | None = None, symmetric: bool = True,
    zero: Tensor | None = None, rule: ActivationRule = ActivationRule.OWN,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns codes [.., K], scale float32 and zero int32 of x [.., K].

    The scale is [.., ceil(K / group)], or [.., 1] for group 0. If `scale` [1] is given, it is returned.

    Everything is computed in float32, and each operation rounds: scale = max|x| / largest value of `fmt`, code =
    nearest(x * (1 / scale)), saturating. Asymmetric codes: scale = (max - min) / 255, where the range includes 0, and x = (code
    - zero) * scale. That is this library's own rule; `_by_rule` has the others.
    """
    if rule is not ActivationRule.OWN:
        return _by_rule(x, fmt, group, scale, symmetric, zero, rule)
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


def _by_rule(
    x: Tensor, fmt: NumberFormat, group: int, scale: Tensor | None, symmetric: bool, zero: Tensor | None, rule: ActivationRule
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`quantize_activations_reference` by the rule of another tool. Each operation rounds: to x's dtype for compressed-tensors
    (calculate_qparams and _quantize_dequantize of versions 0.17 to 0.20), to float32 for the others (Transformers' kernel
    finegrained-fp8, act_quant.py; FBGEMM's quantize.cu, dynamicQuantizeMatrixRowwise)."""
    k, tool = x.shape[-1], rule is ActivationRule.COMPRESSED_TENSORS
    size = group or k
    values = pad(x if tool else x.float(), (0, -k % size)).unflatten(-1, (-1, size))
    low, high = values.amin(dim=-1).clamp(max=0), values.amax(dim=-1).clamp(min=0)
    if scale is not None:
        found = scale.to(values.dtype).expand(low.shape)
    elif tool:
        span, steps = (torch.maximum(-low, high), 2) if symmetric else (high - low, 1)
        found = span / span.new_full((), (fmt.max - fmt.min) / steps)
        if not symmetric:
            zero = (fmt.min - low / found).clamp(fmt.min, fmt.max).nan_to_num().round().to(torch.int32)
        found = torch.where(found == 0, torch.finfo(values.dtype).eps, found)
    else:
        largest = torch.maximum(-low, high)
        largest = largest.clamp(max=FBGEMM_CEILING) if rule is ActivationRule.FBGEMM else largest
        found = (largest / largest.new_full((), fmt.max)).clamp(min=FLOORS[rule])
    steps = values / found[..., None]
    if zero is not None:
        steps = steps + zero[..., None].to(values.dtype)
    elif tool and scale is None:
        steps = steps + 0.0  # the tool adds a zero point of 0, which turns -0 into 0
    codes = steps.clamp(fmt.min, fmt.max)
    codes = codes if isinstance(fmt, FloatFormat) else codes.round()
    given = scale if scale is None else scale.to(values.dtype).float()
    return codes.to(CODE_DTYPES[fmt.name]).flatten(-2)[..., :k].contiguous(), found.float() if given is None else given, zero


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) in float32, not rounded to another dtype."""
    values = x.float()
    return values * weight.float() * (values.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias in float32, not rounded to another dtype."""
    return layer_norm(x.float(), x.shape[-1:], weight.float(), None if bias is None else bias.float(), eps)


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float32, not rounded to another dtype."""
    return silu(gate.float()) * up.float()


def _scale(span: Tensor, steps: float) -> Tensor:
    """span / steps, at least SMALLEST_SCALE; keeps NaN. The divisor is a tensor, because on a GPU torch replaces the division
    by a number by a multiplication with its reciprocal."""
    scale = span / span.new_full((), steps)
    return torch.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
