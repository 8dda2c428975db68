"""The matrices of a checkpoint: which tensors each has in the files, and how they are read."""

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
"""Suffix of the tensor of a 16-bit matrix."""


class Matrix(ABC):
    """A matrix [N, K] of a checkpoint, described before its tensors are loaded."""

    name: str
    is_plain = False
    """True if it stays in 16 bits."""

    @property
    @abstractmethod
    def suffixes(self) -> Mapping[str, torch.dtype]:
        """Returns suffix -> usual dtype of each tensor that the matrix can have."""

    @property
    def unstated(self) -> Mapping[str, str]:
        """Returns suffix -> missing key of config.json, for tensors that this matrix must not have."""
        return {}

    @abstractmethod
    def is_whole(self, tensors: Mapping[str, Tensor]) -> bool:
        """Returns True if `tensors` are certainly all tensors of the matrix."""

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], device: torch.device) -> QuantTensor | Tensor:
        """Returns the matrix. A quantized one is on `device`, a 16-bit one on the device of its tensor.

        Raises CheckpointError, naming the tensor, for missing or invalid tensors.
        """

    def stated_shape(self) -> tuple[int, int] | None:
        """Returns [N, K] if known without the tensors."""
        return None

    def scheme_of(self) -> Scheme | None:
        """Returns the scheme if known without the tensors; None for 16 bits."""
        return None

    def missing(self, tensors: Mapping[str, Tensor], required: Iterable[str]) -> CheckpointError:
        """Returns the error for missing tensors."""
        names = ", ".join(f"{self.name}.{suffix}" for suffix in required if suffix not in tensors)
        return CheckpointError(f"the checkpoint's files lack {names}; copy the folder again, or quantize the model again")


@dataclass(frozen=True)
class PackedMatrix(Matrix):
    """A quantized matrix of a lowbit checkpoint, described by config.json."""

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
    """A matrix that stays in 16 bits."""

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
    """A 16-bit matrix that is quantized while loading."""

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
    """A matrix of another tool's checkpoint. Only the files show whether it is quantized, so `is_whole` is never true."""

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
    """Returns the tensors on `device`. They are moved before their codes are unpacked: a GPU unpacks 8 billion weights in a
    second, a CPU in half a minute."""
    return {suffix: tensor.to(device) for suffix, tensor in tensors.items()}
