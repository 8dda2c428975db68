"""The range of activations: one scale for all inputs of a layer, from what calibration saw of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import Scheme


def static_scale(scheme: Scheme, abs_max: Tensor) -> Tensor | None:
    """The `activation_scale` float32 [1] for inputs whose largest magnitudes (of channels, or of all) are `abs_max`; None for a
    scheme whose activations are scaled token by token. The largest value seen becomes the largest of the format."""
    if not scheme.static_activations:
        return None
    assert scheme.activation is not None
    scale = abs_max.float().amax().reshape(1) / scheme.activation.max
    return torch.where(scale > 0, scale, 1.0)
