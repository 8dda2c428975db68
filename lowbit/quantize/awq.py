"""AWQ: weights of input channels with large activations are scaled up before rounding, which reduces their relative error.

Source: J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv:2306.00978:
s = (mean |x|)^ratio with the ratio by grid search, then clipping, which is optional here. The second family of scales, divided
by the mean magnitude of the weights, is that of the authors' code. Here the error is the output error of all layers that share
the input, from the Hessian of all calibration inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme, scale_shape
from lowbit.quantize.fold import pooled
from lowbit.quantize.rtn import CLIP_FACTORS, check_weight, fit_columns, nearest, rtn, scale_dtype
from lowbit.quantize.statistics import InputStatistics, output_error
from lowbit.quantize.threads import one_thread

RATIOS = tuple(i / 10 for i in range(1, 11))
_CLIPS = CLIP_FACTORS[:26:2]


def search_scale(
    weights: Sequence[Tensor], schemes: Sequence[Scheme], statistics: InputStatistics, shared: Tensor | None = None
) -> Tensor | None:
    """Returns the scale s [K] float32, positive, of the input channels of `weights` [N_i, K], which read one input.

    The scale is the candidate for which quantizing W s and dividing by s has the least output error. None means that no
    candidate is better than s = 1. shared [K]: the output channel of the producer from which each input channel comes; input
    channels that come from one get the same scale.
    """
    weights = [w.float() for w in weights]
    least = sum(rounding_error(w, s, statistics.hessian) for w, s in zip(weights, schemes, strict=True))
    best = None
    for scale in candidates(statistics.abs_mean, relative_magnitude(weights)):
        scale = pooled(scale, shared)
        error = sum(rounding_error(w, s, statistics.hessian, scale) for w, s in zip(weights, schemes, strict=True))
        if error < least:
            least, best = error, scale
    return best


def clipped(
    weight: Tensor, scheme: Scheme, hessian: Tensor, stored: torch.dtype | None = None, scale_type: torch.dtype | None = None
) -> QuantTensor:
    """Returns `weight` [N, K] rounded to nearest. Each group takes the clip factor with the least error in the outputs of its
    own columns.

    hessian [K, K]: the sum of x^T x. stored, scale_type: as for `rtn`.
    """
    check_weight(weight, "awq")
    n, k = weight.shape
    dtype = scale_type or scale_dtype(scheme, weight, stored)
    width = scheme.granularity.block((n, k))[1]
    rows = torch.arange(n, device=weight.device) // scheme.granularity.block((n, k))[0]
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for start in range(0, k, width):
        part = weight.detach()[:, start : start + width].float()
        own = hessian[start : start + width, start : start + width]
        scale, zero = fit_columns(part, scheme, dtype, _CLIPS, lambda d, own=own: output_error(d, own))  # type: ignore[misc]
        with one_thread():
            codes[:, start : start + width] = nearest(part, scale[rows], None if zero is None else zero[rows], scheme)
        scales.append(scale)
        zeros += [] if zero is None else [zero]
    assert len(scales) == scale_shape(scheme.granularity, (n, k))[1]
    return QuantTensor(codes, torch.cat(scales, dim=1), torch.cat(zeros, dim=1) if zeros else None, scheme)


def relative_magnitude(weights: Sequence[Tensor]) -> Tensor:
    """Returns the mean over all rows of `weights` [N_i, K] of |w| relative to the row's largest, [K]."""
    return torch.cat([w.abs() / w.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) for w in weights]).mean(dim=0)


def candidates(abs_mean: Tensor, relative: Tensor) -> list[Tensor]:
    """Returns the candidates for the scale [K] of an input with the mean magnitudes `abs_mean` [K], read by weights with the
    relative magnitudes `relative` [K]."""
    x = abs_mean.clamp(min=1e-4 * float(abs_mean.max()) + 1e-12)
    relative = relative.clamp(min=1e-4 * float(relative.max()) + 1e-12)
    both = [(x.pow(r), x.pow(r) / relative.pow(1 - r)) for r in RATIOS]
    return [_centered(scale) for pair in both for scale in pair]


def _centered(scale: Tensor) -> Tensor:
    """Returns the scale normalised to largest times smallest = 1, clamped to 2^-10..2^10."""
    scale = scale / (scale.max() * scale.min()).sqrt()
    return scale.clamp(2.0**-10, 2.0**10)


def rounding_error(w: Tensor, scheme: Scheme, hessian: Tensor, scale: Tensor | None = None) -> float:
    """Returns the squared output error of rounding `w` [N, K], float32, to nearest, for inputs with this Hessian. With `scale`
    [K], the columns are multiplied by it before rounding and divided by it afterwards."""
    quantized = rtn(w, scheme).dequantize() if scale is None else rtn(w * scale, scheme).dequantize() / scale
    return float(output_error(quantized - w, hessian).double().sum())
