"""The range of activations: one scale for all inputs of a layer, from what calibration saw of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.formats import ActivationRule, Scheme


def static_range(scheme: Scheme, low: Tensor, high: Tensor) -> dict[str, Any]:
    """`activation_scale` float32 [1] and, where activations have zero points, `activation_zero` int32 [1], for inputs between
    `low` and `high` (of channels, or of all; low <= 0 <= high); nothing for a scheme that scales activations token by token.

    The largest magnitude seen becomes the largest of the format; with zero points the whole range becomes -128..127, as
    `ops.quantize_activations` has it for a token. By compressed-tensors' rule the largest becomes half the range of codes.
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
