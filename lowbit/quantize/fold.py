"""Moves a factor per channel from the input of linear layers into what computes that input: y = (x / s) (W s)^T."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Fold:
    """`producer`, the name of a norm or linear layer, makes the input of the linear layers `consumers`: input channel k comes
    from its output channel `channels[k]` (int64 [K]). Several input channels may come from one (grouped-query attention)."""

    producer: str
    consumers: tuple[str, ...]
    channels: Tensor

    @property
    def shared(self) -> Tensor | None:
        """`channels` where some input channels have the same source, else None."""
        return None if len(self.channels.unique()) == len(self.channels) else self.channels


@torch.no_grad()
def divide_outputs(module: nn.Module, channels: Tensor, scale: Tensor, types: Mapping[str, torch.dtype]) -> None:
    """Divides the output channels of `module`, a norm or linear layer, by `scale` [K]: output channel channels[k] by scale[k],
    which is the same wherever channels[k] is. Parameters named in `types` are rounded to the type they will be stored in."""
    for name, parameter in module.named_parameters(recurse=False):
        factor = torch.ones(parameter.shape[0], device=parameter.device)
        factor[channels.to(parameter.device)] = scale.to(parameter.device).float()
        divided = parameter.float() / (factor if parameter.dim() == 1 else factor[:, None])
        parameter.copy_(divided.to(types.get(name, parameter.dtype)))


@torch.no_grad()
def multiply_inputs(module: nn.Module, scale: Tensor) -> None:
    """Multiplies the input channels of a linear layer by `scale` [K]."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    weight.copy_(weight.float() * scale.to(weight.device).float())


def pooled(scale: Tensor, shared: Tensor | None) -> Tensor:
    """`scale` [K] with the geometric mean of the factors that have the same number in `shared` [K]; as it is without."""
    if shared is None:
        return scale
    logs = torch.zeros(int(shared.max()) + 1, device=scale.device).index_add_(0, shared, scale.log())
    return (logs / torch.bincount(shared).clamp(min=1))[shared].exp()
