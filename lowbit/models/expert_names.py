"""Names of experts in files and in Transformers' model, both ways.

A model holds the experts of a layer in two parameters, `gate_up_proj` [E, 2 I, K] and `down_proj` [E, K, I]. Files name most
architectures' experts one by one. Transformers' mapping of names to parameters, which it has for every architecture, says which
tensors a parameter is made of and under which names it is saved; tests compare both with files that Transformers writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lowbit.checkpoint.experts import SPELLINGS, ExpertEntry, alternating, gate_first
from lowbit.models.names import TensorNames

_MERGED = (("MergeModulelist",), ("MergeModulelist", "Concatenate"))
"""Operations that stack the experts, with the rows of the gate before those of up."""
_EXPERT = re.compile(r".*\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")
_ROLES = ("gate", "up", "gate_up", "down")


@dataclass(frozen=True)
class ExpertModule:
    """The experts of one layer in Transformers' model.

    name: of the module. experts: E. alternating: rows of gate and up take turns, else those of the gate are first. transposed:
    the parameters are [E, K, N]. gated: experts have a gate, else `up_proj` takes the place of `gate_up_proj`. biased: every
    expert has biases.
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
        """Returns [E, N, K], or [E, N], with all rows of the gate first as the parameter is stored; inverse of `canonical`."""
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


class ExpertFiles:
    """The tensors of files that the experts of a model are made of, where the files hold them one by one.

    names: of the model. tensors: names of the tensors in the files. `parameters` maps a parameter of the model to the tensors
    of each expert, in the order of their rows.
    """

    def __init__(self, names: TensorNames, tensors: Iterable[str]) -> None:
        members: dict[str, dict[int, dict[str, str]]] = {}
        for tensor in tensors:
            match = _EXPERT.fullmatch(tensor)
            target = None if match is None or match["matrix"] not in SPELLINGS else names.target(tensor)
            if match is not None and target is not None and target.operations in _MERGED and len(target.parameters) == 1:
                own = members.setdefault(target.parameters[0], {}).setdefault(int(match["expert"]), {})
                own[SPELLINGS[match["matrix"]]] = tensor
        self.parameters: dict[str, tuple[tuple[str, ...], ...]] = {}
        for parameter, experts in members.items():
            alike = len({frozenset(own) for own in experts.values()}) == 1
            if alike and sorted(experts) == list(range(names.own[parameter].shape[0])):
                rows = (tuple(own[role] for role in _ROLES if role in own) for _, own in sorted(experts.items()))
                self.parameters[parameter] = tuple(rows)

    def read(self, parameter: str, get: Callable[[str], Tensor]) -> Tensor:
        """Returns a parameter [E, N, K] of the model; `get` returns a tensor of the files by name, one at a time."""
        experts = self.parameters[parameter]
        first = torch.cat([get(tensor) for tensor in experts[0]])
        value = first.new_empty((len(experts), *first.shape))
        value[0] = first
        for e, tensors in enumerate(experts[1:], 1):
            torch.cat([get(tensor) for tensor in tensors], out=value[e])
        return value


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
