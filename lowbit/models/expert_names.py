"""Maps the names of experts in files to parameters of Transformers' model, and back.

A model holds the experts of a layer in two parameters, `gate_up_proj` [E, 2 I, K] and `down_proj` [E, K, I]. For most
architectures, files have tensors of single experts. Transformers has a mapping for every architecture, which states the
parameter to which a tensor belongs, and the names under which a parameter is saved. Tests compare both with files that
Transformers writes. `models.experts` reads 16-bit weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lowbit.checkpoint.experts import SPELLINGS, ExpertEntry, alternating, gate_first
from lowbit.models.names import TensorNames

_EXPERT = re.compile(r".*\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")


@dataclass(frozen=True)
class ExpertModule:
    """The experts of one layer in Transformers' model.

    name: the module's name. experts: E. alternating: rows of gate and up alternate; otherwise all rows of the gate come before
    those of up. transposed: the parameters are [E, K, N]. gated: experts have a gate; otherwise they have `up_proj` instead of
    `gate_up_proj`. biased: every expert has biases.
    """

    name: str
    experts: int
    alternating: bool
    transposed: bool
    gated: bool
    biased: bool

    @property
    def first(self) -> str:
        """The name of the parameter with the matrices that read x."""
        return f"{self.name}.{'gate_up_proj' if self.gated else 'up_proj'}"

    @property
    def down(self) -> str:
        """The name of the parameter with the matrices after the activation function."""
        return f"{self.name}.down_proj"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters: weights, then biases."""
        weights = (self.first, self.down)
        return (*weights, *(f"{name}_bias" for name in weights)) if self.biased else weights

    def canonical(self, parameter: str, value: Tensor) -> Tensor:
        """Returns a parameter of the model as [E, N, K], or [E, N] for a bias, with all rows of the gate first."""
        if self.transposed and value.dim() == 3:
            value = value.transpose(1, 2)
        return gate_first(value) if self._takes_turns(parameter) else value

    def stored(self, parameter: str, value: Tensor) -> Tensor:
        """Returns a parameter as the model stores it, given what `canonical` returns for it; the inverse of `canonical`."""
        value = alternating(value) if self._takes_turns(parameter) else value
        return value.transpose(1, 2).contiguous() if self.transposed and value.dim() == 3 else value

    def _takes_turns(self, parameter: str) -> bool:
        return self.alternating and self.gated and parameter.removesuffix("_bias") == self.first


def expert_modules(model: nn.Module) -> dict[str, ExpertModule]:
    """Returns the expert layers of a model by name: modules with Transformers' interface for experts."""
    modules = {}
    for name, module in model.named_modules():
        if not hasattr(module, "is_concatenated") or not hasattr(module, "down_proj"):
            continue
        modules[name] = ExpertModule(
            name, module.down_proj.shape[0], not module.is_concatenated, bool(module.is_transposed), bool(module.has_gate),
            bool(module.has_bias),
        )  # fmt: skip
    return modules


def module_of(names: TensorNames, layer: str, entry: ExpertEntry) -> str | None:
    """Returns the model's name of an expert layer of quantized files; None if the model has no such layer."""
    tensors = [f"{entry.layers[0]}.weight"] if entry.layers else [f"{layer}.gate_up_proj", f"{layer}.up_proj"]
    for target in map(names.target, tensors):
        if target is not None and len(target.parameters) == 1:
            return target.parameters[0].rpartition(".")[0]
    return None


def tensors_of(model: PreTrainedModel, module: ExpertModule) -> dict[str, tuple[str, int | None, str]]:
    """Returns the tensors that hold the experts of a layer in files of this architecture, as Transformers saves them.

    Each is mapped to its parameter in the model, its expert (None for all of them), and the role of its rows: "gate", "up",
    "down", or "gate_up" for the gate's rows before those of up.
    """
    own = model.state_dict()
    found: dict[str, tuple[str, int | None, str]] = {}
    for parameter in module.parameters:
        saved: Mapping[str, Tensor] = revert_weight_conversion(
            model, {parameter: torch.empty_like(own[parameter], device="meta")}
        )
        for tensor in saved:
            match = _EXPERT.fullmatch(tensor)
            if match is not None and match["matrix"] in SPELLINGS:
                found[tensor] = (parameter, int(match["expert"]), SPELLINGS[match["matrix"]])
            else:
                role = "down" if parameter.removesuffix("_bias") == module.down else "gate_up" if module.gated else "up"
                found[tensor] = (parameter, None, role)
    return found
