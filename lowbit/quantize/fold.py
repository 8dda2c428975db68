"""Moves a scale per channel from the input of linear layers into the module that computes that input: y = (x / s) (W s)^T."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Fold:
    """The norm or linear layer `producer` computes the input of the linear layers `consumers`.

    channels: int64 [K]; input channel k comes from output channel channels[k] of the producer. Several input channels may come
    from one (grouped-query attention).
    """

    producer: str
    consumers: tuple[str, ...]
    channels: Tensor

    @property
    def shared(self) -> Tensor | None:
        """`channels` if some input channels come from one output channel, else None."""
        return None if len(self.channels.unique()) == len(self.channels) else self.channels


@torch.no_grad()
def divide_outputs(module: nn.Module, channels: Tensor, scale: Tensor, types: Mapping[str, torch.dtype]) -> None:
    """Divides output channel channels[k] of `module`, a norm or linear layer, by scale[k].

    Equal channels[k] have equal scale[k]. Parameters named in `types` are rounded to that dtype, in which they will be stored.
    """
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
    """Returns `scale` [K] with the geometric mean over channels that have the same number in `shared` [K], if given."""
    if shared is None:
        return scale
    logs = torch.zeros(int(shared.max()) + 1, device=scale.device).index_add_(0, shared, scale.log())
    return (logs / torch.bincount(shared).clamp(min=1))[shared].exp()
