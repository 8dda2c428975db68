"""One matrix of a checkpoint: which tensors it has there, and what they mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.checkpoint import CheckpointError, LayerEntry, expected_tensors
from lowbit.checkpoint.foreign import ForeignLayer, ForeignSchema, checked_entry
from lowbit.checkpoint.schema import quant_tensor, unstated_tensors
from lowbit.formats import QuantTensor, Scheme
from lowbit.methods import Search
from lowbit.quantize import rtn
from lowbit.quantize.rtn import scale_dtype

PLAIN = "weight"
"""The tensor of a matrix in 16 bits."""


class Matrix(ABC):
    """A matrix [N, K] of the files under a name, known before any of its tensors is there."""

    name: str
    is_plain = False
    """Whether it is in 16 bits and stays so."""

    @property
    @abstractmethod
    def suffixes(self) -> Mapping[str, torch.dtype]:
        """Tensors that it can have, by the end of their names, and the type that each most likely has."""

    @property
    def unstated(self) -> Mapping[str, str]:
        """Tensors that others like it have and it must not: each with what config.json would state if it had it."""
        return {}

    @abstractmethod
    def is_whole(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are all tensors that it has, as far as can be known."""

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], device: torch.device) -> QuantTensor | Tensor:
        """The matrix, quantized and then on `device`, which unpacks it, or in 16 bits and where its tensor is. Raises
        CheckpointError, naming the tensor, for what is missing or is not as it should be."""

    def stated_shape(self) -> tuple[int, int] | None:
        """[N, K] where it is known without its tensors."""
        return None

    def scheme_of(self) -> Scheme | None:
        """Its scheme where that is known without its tensors; None for 16 bits."""
        return None

    def missing(self, tensors: Mapping[str, Tensor], wanted: Iterable[str]) -> CheckpointError:
        """What to say of a matrix of which not all tensors came."""
        names = ", ".join(f"{self.name}.{suffix}" for suffix in wanted if suffix not in tensors)
        return CheckpointError(f"the checkpoint's files lack {names}; copy the folder again, or quantize the model again")


@dataclass(frozen=True)
class PackedMatrix(Matrix):
    """One of a checkpoint of ours, as its config.json states it."""

    name: str
    entry: LayerEntry

    @property
    def suffixes(self) -> Mapping[str, torch.dtype]:
        types = {
            name.removeprefix(f"{self.name}."): kinds for name, (_, kinds) in expected_tensors(self.name, self.entry).items()
        }
        own = scale_dtype(self.entry.scheme)
        return {suffix: own if own in kinds else kinds[0] for suffix, kinds in types.items()}

    @property
    def unstated(self) -> Mapping[str, str]:
        return {name.removeprefix(f"{self.name}."): key for name, key in unstated_tensors(self.name, self.entry).items()}

    def is_whole(self, tensors: Mapping[str, Tensor]) -> bool:
        return len(tensors) == len(self.suffixes)

    def read(self, tensors: Mapping[str, Tensor], device: torch.device) -> QuantTensor:
        for name, (shape, kinds) in expected_tensors(self.name, self.entry).items():
            found = tensors.get(name.removeprefix(f"{self.name}."))
            if found is None:
                raise self.missing(tensors, self.suffixes)
            if tuple(found.shape) != shape or found.dtype not in kinds:
                raise CheckpointError(
                    f"{name}: config.json states {' or '.join(map(str, kinds))} {shape}, the file has {found.dtype} "
                    f"{tuple(found.shape)}"
                )
        return quant_tensor(_on(device, tensors), self.entry)

    def stated_shape(self) -> tuple[int, int]:
        return self.entry.shape

    def scheme_of(self) -> Scheme:
        return self.entry.scheme


@dataclass(frozen=True)
class PlainMatrix(Matrix):
    """One that stays in 16 bits."""

    name: str
    dtype: torch.dtype
    is_plain = True

    @property
    def suffixes(self) -> Mapping[str, torch.dtype]:
        return {PLAIN: self.dtype}

    def is_whole(self, tensors: Mapping[str, Tensor]) -> bool:
        return PLAIN in tensors

    def read(self, tensors: Mapping[str, Tensor], device: torch.device) -> QuantTensor | Tensor:
        if PLAIN not in tensors:
            raise self.missing(tensors, (PLAIN,))
        return tensors[PLAIN].to(self.dtype)


@dataclass(frozen=True)
class RoundedMatrix(PlainMatrix):
    """One in 16 bits that is quantized as it comes."""

    scheme: Scheme
    search: Search = "max"
    is_plain = False

    def read(self, tensors: Mapping[str, Tensor], device: torch.device) -> QuantTensor:
        weight = super().read(tensors, device)
        assert isinstance(weight, Tensor)
        try:
            return rtn(weight.to(device), self.scheme, search=self.search)
        except ValueError as error:
            raise CheckpointError(f"{self.name}.{PLAIN}: {error}") from error

    def scheme_of(self) -> Scheme:
        return self.scheme


@dataclass(frozen=True)
class ForeignMatrix(Matrix):
    """One that another tool quantized, or left in 16 bits: its files alone say which, so it is whole when all are read."""

    name: str
    schema: ForeignSchema
    dtype: torch.dtype

    @property
    def suffixes(self) -> Mapping[str, torch.dtype]:
        return dict.fromkeys(self.schema.suffixes, torch.int32) | {PLAIN: self.dtype}

    def is_whole(self, tensors: Mapping[str, Tensor]) -> bool:
        return False

    def read(self, tensors: Mapping[str, Tensor], device: torch.device) -> QuantTensor | Tensor:
        if not any(marker in tensors for marker in self.schema.markers):
            return PlainMatrix(self.name, self.dtype).read(tensors, device)
        layer = ForeignLayer(self.name, _on(device, tensors), "the checkpoint's files")
        entry = checked_entry(self.schema, layer)
        if entry.scheme is None:
            raise CheckpointError(f"{self.name}: {entry.refusal}")
        return self.schema.read(layer)


def _on(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A GPU unpacks the codes of 8 billion weights in a second, a CPU in half a minute."""
    return {suffix: tensor.to(device) for suffix, tensor in tensors.items()}
