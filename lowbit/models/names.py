"""Maps the tensors of a model's files to its parameters, by the mapping that Transformers applies while loading."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lowbit.models.experts import expert_sources
from lowbit.nn.convert import Kept, Plan


@dataclass(frozen=True)
class TensorTarget:
    """The parameters into which a tensor of the files is loaded, several if it is split, and operations that convert it."""

    parameters: tuple[str, ...]
    operations: tuple[str, ...] = ()


class TensorNames:
    """Maps names of tensors in a model's files to names of its parameters and buffers.

    Files may have names of older releases, and those of a base model lack the prefix that a model with a head adds.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._prefix: str = model.base_model_prefix
        self.own = dict(model.state_dict())

    def target(self, tensor: str) -> TensorTarget | None:
        """Returns the target of a tensor; None if the model has none."""
        name, pattern = rename_source_key(tensor, self._renamings, self._converters, self._prefix, self.own)
        if name not in self.own and tensor in self.own:
            return TensorTarget((tensor,))
        if pattern is None:
            return TensorTarget((name,)) if name in self.own else None
        converter = self._by_pattern[pattern]
        first, *_ = converter.target_patterns
        targets = tuple(dict.fromkeys(name.replace(first, target) for target in converter.target_patterns))
        operations = tuple(type(operation).__name__ for operation in converter.operations)
        return TensorTarget(targets, operations) if all(target in self.own for target in targets) else None

    def converter(self, tensor: str) -> tuple[str, str, WeightConverter] | None:
        """Returns the one parameter that a tensor becomes by conversion, the pattern that its name matches, and the converter.

        Returns None for a tensor that is not converted, that becomes several parameters, or that the model does not have."""
        name, pattern = rename_source_key(tensor, self._renamings, self._converters, self._prefix, self.own)
        if pattern is None or name not in self.own or len(self._by_pattern[pattern].target_patterns) != 1:
            return None
        return name, pattern, self._by_pattern[pattern]

    def parameter(self, tensor: str) -> str | None:
        """Returns the parameter or buffer into which a tensor is loaded without conversion; None if there is none."""
        target = self.target(tensor)
        return None if target is None or target.operations else target.parameters[0]

    def written(self, tensor: str, packed: Container[str]) -> str:
        """Returns the name under which an unquantized tensor is written: the source's name, which servers expect.

        The model's own name is used for tensors of the modules `packed`, as for their codes. It is also used if the source has
        the names of a base model, which lack the prefix.
        """
        name = self.parameter(tensor)
        if name is None or self.parameter(name) != name:
            return tensor
        renamed, _ = rename_source_key(tensor, self._renamings, self._converters)
        return name if renamed != name or name.rpartition(".")[0] in packed else tensor

    def modules(self, plan: Plan, tensors: Iterable[str]) -> dict[str, str]:
        """Returns tensor name in the files -> module of the plan whose weight it is. The tensor of tied modules belongs to the
        module that owns the weight, under any of their names.
        """
        by_parameter = {f"{module}.weight": module for module in (*plan.shapes, *plan.tied)}
        own = {tensor: self.parameter(tensor) for tensor in tensors}
        modules = {tensor: by_parameter[name] for tensor, name in own.items() if name in by_parameter}
        for tensor, module in list(modules.items()):
            owner = plan.tied.get(module)
            if owner is not None and owner not in modules.values():
                modules[tensor] = owner
        return modules

    def followed(self, plan: Plan, tensors: Iterable[str]) -> Plan:
        """Returns the plan without modules whose weights Transformers converts from other tensors while loading; the plan
        states the reason."""
        tensors = list(tensors)
        whole = set(self.modules(plan, tensors).values())
        readable = set(expert_sources(self, tensors, plan.experts))
        incomplete = {name.rpartition(".")[0] for name in plan.experts if name not in readable}
        kept = [
            Kept(name, "weights of experts", math.prod(shape), self._made(name, tensors))
            for name, shape in plan.experts.items()
            if name.rpartition(".")[0] in incomplete
        ]
        for module, (n, k) in plan.shapes.items():
            if module not in whole:
                kind = "Embedding" if module in plan.embeddings else "Linear"
                kept.append(Kept(module, kind, n * k, self._made(f"{module}.weight", tensors)))
        left = {row.name for row in kept}
        return dataclasses.replace(
            plan,
            linears={n: s for n, s in plan.linears.items() if n not in left},
            embeddings={n: s for n, s in plan.embeddings.items() if n not in left},
            experts={n: s for n, s in plan.experts.items() if n not in left},
            tied={n: owner for n, owner in plan.tied.items() if owner not in left},
            kept=plan.kept + kept,
        )

    def _made(self, parameter: str, tensors: Iterable[str]) -> str:
        for tensor in tensors:
            target = self.target(tensor)
            if target is not None and parameter in target.parameters:
                how = ", ".join(target.operations)
                return f"Transformers makes its weight of {tensor}, which the files have instead, while loading ({how})"
        return f"the files have no tensor that is {parameter}"
