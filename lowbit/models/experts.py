"""Reads the weights of experts from the files of a 16-bit model one expert at a time.

Files hold either the model's own parameter, with a leading dimension E, or tensors of single experts, which Transformers stacks
and concatenates while loading.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.core_model_loading import MergeModulelist, WeightConverter

from lowbit.checkpoint import CheckpointError, CheckpointReader

if TYPE_CHECKING:
    from lowbit.models.names import TensorNames


@dataclass
class ExpertSource:
    """The tensors in the files that form one parameter of experts.

    tensors: for each pattern of `converter`, the names that match it, in order of the experts. Without a converter, the one
    name of the parameter in the files, under the pattern "".
    """

    parameter: str
    converter: WeightConverter | None
    tensors: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All tensors."""
        return [name for group in self.tensors.values() for name in group]

    @property
    def is_stacked(self) -> bool:
        """True if the files have a tensor for each expert, so that one expert is read at a time."""
        return self.converter is not None and isinstance(self.converter.operations[0], MergeModulelist)

    def fits(self, experts: int) -> bool:
        """Returns True if the files have all tensors of so many experts."""
        if self.converter is None:
            return len(self.names) == 1
        complete = set(self.tensors) == set(self.converter.source_patterns)
        return complete and (not self.is_stacked or all(len(group) == experts for group in self.tensors.values()))


def expert_sources(
    names: TensorNames, tensors: Iterable[str], weights: Mapping[str, tuple[int, int, int]]
) -> dict[str, ExpertSource]:
    """Returns the tensors in the files for each of `weights`, weights of experts (parameter -> (E, N, K)). Weights with missing
    tensors, and those that Transformers converts together with other parameters, are left out."""
    sources: dict[str, ExpertSource] = {}
    for tensor in sorted(tensors, key=_in_numbers):
        converted = names.converter(tensor)
        if converted is not None:
            parameter, pattern, converter = converted
        else:
            found = names.parameter(tensor)
            if found is None:
                continue
            parameter, pattern, converter = found, "", None
        if parameter in weights:
            source = sources.setdefault(parameter, ExpertSource(parameter, converter))
            source.tensors.setdefault(pattern, []).append(tensor)
    return {name: source for name, source in sources.items() if source.fits(weights[name][0])}


class ExpertReader:
    """Returns the weights of single experts as the model has them, from the tensors of an `ExpertSource`.

    Tensors of all experts are read at the first call and kept in memory, those of single experts one at a time.
    """

    def __init__(self, reader: CheckpointReader, source: ExpertSource) -> None:
        self.reader, self.source = reader, source
        self._all: Tensor | None = None

    def __call__(self, e: int) -> Tensor:
        """Returns the weight of expert `e`, without the leading dimension of the parameter."""
        if self.source.is_stacked:
            return self._converted({pattern: [group[e]] for pattern, group in self.source.tensors.items()})[0]
        if self._all is None:
            if self.source.converter is None:
                self._all = self.reader.get(self.source.names[0])
            else:
                self._all = self._converted(self.source.tensors)
        return self._all[e]

    @property
    def stored(self) -> torch.dtype:
        """The dtype in the files."""
        return self.reader.info(self.source.names[0]).dtype

    def _converted(self, groups: Mapping[str, list[str]]) -> Tensor:
        """Returns the parameter that Transformers' operations compute from these tensors."""
        converter = copy.copy(self.source.converter)
        assert converter is not None
        values: dict[str, list[Tensor]] = {p: [self.reader.get(name) for name in group] for p, group in groups.items()}
        for operation in converter.operations:
            values = operation.convert(
                values, source_patterns=converter.source_patterns, target_patterns=converter.target_patterns,
                full_layer_name=self.source.parameter, model=None, config=None, missing_keys=None,
            )  # fmt: skip
        if len(values) != 1:
            raise CheckpointError(f"{self.reader.folder}: {self.source.parameter}: made of {', '.join(self.source.names[:3])}")
        (value,) = values.values()
        return value[0] if isinstance(value, list) else value


def experts_per_token(config: Any) -> int:
    """Returns how many experts of a layer compute each token, by a model's configuration; 0 if it does not state it."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "num_experts_per_tok", None)
    return found if type(found) is int else 0


def expert_summary(experts: Iterable[tuple[int, int]], per_token: int) -> str:
    """Returns a line on weights of experts with the bytes of all and the bytes that a token reads. experts: for each weight,
    the number of experts and the bytes."""
    pairs = list(experts)
    total = sum(size for _, size in pairs)
    counts = sorted({count for count, _ in pairs})
    line = f"weights of experts: {total:,} bytes, {' or '.join(map(str, counts))} experts a layer"
    if not per_token:
        return line
    active = sum(size * min(per_token, count) // count for count, size in pairs)
    return f"{line}; a token reads those of {per_token}, {active:,} bytes"


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts names by the numbers in them: expert 2 before expert 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
