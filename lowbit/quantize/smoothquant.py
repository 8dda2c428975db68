"""SmoothQuant: a scale per channel that moves the range of activations into the weights, so that both fit 8 bits.

Source: G. Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
arXiv:2211.10438, equation 4: s = max|x|^alpha / max|w|^(1 - alpha).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.formats import NumberFormat, PerChannel, Scheme, int_format
from lowbit.quantize.fold import pooled
from lowbit.quantize.rtn import rtn
from lowbit.quantize.statistics import InputStatistics

ALPHAS = tuple(0.05 * i for i in range(6, 19))
"""Migration strengths of the search, 0.3 to 0.9."""


def smoothing_scale(weights: Sequence[Tensor], abs_max: Tensor, alpha: float, shared: Tensor | None = None) -> Tensor:
    """Returns s [K] float32, by which the inputs of `weights` [N_i, K] are divided and the weights multiplied.

    abs_max [K]: the largest |x| of each channel. Channels with all-zero inputs or weights have s = 1. shared: as for
    `awq.search_scale`. Raises ValueError for alpha outside 0..1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is from 0 to 1, got {alpha}")
    w = torch.stack([weight.float().abs().amax(dim=0) for weight in weights]).amax(dim=0)
    scale = abs_max.float().pow(alpha) / w.clamp(min=1e-12).pow(1 - alpha)
    return pooled(torch.where((abs_max > 0) & (w > 0), scale, 1.0), shared)


def best_alpha(weights: Sequence[Tensor], scheme: Scheme, statistics: InputStatistics) -> float | None:
    """Returns the alpha of ALPHAS with the least output error on `statistics.sample`; None if the error is least without a
    scale.

    Weights are rounded by `scheme` and inputs, token by token, to its activation format (int8 without one).
    """
    x = statistics.sample
    weight_only = scheme.weight_only
    errors = []
    for alpha in (None, *ALPHAS):
        s = torch.ones_like(statistics.abs_max) if alpha is None else smoothing_scale(weights, statistics.abs_max, alpha)
        rounded = per_token(x / s, scheme.activation or int_format(8))
        error = 0.0
        for w in weights:
            difference = rounded @ rtn(w.float() * s, weight_only).dequantize().T - x @ w.float().T
            error += float(difference.double().square().sum())
        errors.append(error)
    return (None, *ALPHAS)[errors.index(min(errors))]


def per_token(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Returns x [M, K] rounded to the values of `fmt` with one scale per row, float32."""
    return rtn(x, Scheme(fmt, granularity=PerChannel())).dequantize()
