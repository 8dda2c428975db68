"""Static activation scales: one scale for all inputs of a layer, from the range of its calibration inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.formats import ActivationRule, Scheme


def static_range(scheme: Scheme, low: Tensor, high: Tensor) -> dict[str, Any]:
    """Returns `activation_scale` float32 [1] and, with activation zero points, `activation_zero` int32 [1].

    low, high: the range of the inputs, per channel or in all, with low <= 0 <= high. The largest magnitude maps to the largest
    value of the format; with zero points the range maps to -128..127, as in `ops.quantize_activations`. By compressed-tensors'
    rule it maps to half the range of codes. Returns {} for a scheme that scales activations token by token.
    """
    if not scheme.static_activations:
        return {}
    fmt = scheme.activation
    assert fmt is not None
    low, high = low.float().amin().reshape(1), high.float().amax().reshape(1)
    if not scheme.activation_zero:
        halved = scheme.rule is ActivationRule.COMPRESSED_TENSORS
        scale = torch.maximum(-low, high) / ((fmt.max - fmt.min) / 2 if halved else fmt.max)
        return {"activation_scale": torch.where(scale > 0, scale, 1.0)}
    scale = (high - low) / (fmt.max - fmt.min)
    scale = torch.where(scale > 0, scale, 1.0)
    return {"activation_scale": scale, "activation_zero": (fmt.min - (low / scale).round()).to(torch.int32)}
