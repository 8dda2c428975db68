"""What the readers and writers of other tools' checkpoints share: one layer's tensors with checks that name them, 32-bit
words of codes, 8-bit floats, power-of-two scales.

A schema is an object made from a tool's configuration. Given the tensors of one layer by suffix it returns a QuantTensor
(`read`), and given a QuantTensor the tensors (`write`), bit for bit the ones that were read. `entry` does the checks alone
and needs no more than names, dtypes and shapes, so that a whole folder is judged before any of it is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lowbit.checkpoint.reader import TensorInfo
from lowbit.checkpoint.schema import MAX_DIMENSION, CheckpointError, owner_of
from lowbit.formats import QuantTensor, Scheme, pack_words, unpack_words

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_GROUP = 1 << 20

_CACHE = "scales of the key and value cache, which stays in 16 bits"
_OUTPUT = "scales of the layer's output, which stays in 16 bits"
_INPUT = "scales of activations, which stay in 16 bits or are found while running"
_BESIDE_WEIGHTS = {
    **dict.fromkeys(("k_scale", "v_scale", "q_scale", "kv_scale"), _CACHE),
    **dict.fromkeys(("output_scale", "output_zero_point", "output_global_scale"), _OUTPUT),
    **dict.fromkeys(("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "input_scale_ub"), _INPUT),
}
"""Tensors of a layer that say nothing of its weights, and what they are."""

T = TypeVar("T")


@dataclass(frozen=True)
class ForeignLayer:
    """The tensors of one layer by suffix, or only what their file's header says of them, and the file or folder they are in."""

    name: str
    tensors: Mapping[str, Tensor | TensorInfo]
    where: Path | str = "tensors"

    def error(self, suffix: str, message: str) -> CheckpointError:
        """An error that names the file, the tensor, and what is wrong."""
        found = self.tensors.get(suffix)
        where = found.file if isinstance(found, TensorInfo) else self.where
        return CheckpointError(f"{where}: {self.name}.{suffix}: {message}")

    def has(self, suffix: str) -> bool:
        """Whether the layer has this tensor."""
        return suffix in self.tensors

    def matrix(self, suffix: str, dtypes: Iterable[torch.dtype]) -> tuple[int, int]:
        """Shape of a tensor that must be a matrix of one of `dtypes` with at least one element."""
        found, dtypes = self._found(suffix), tuple(dtypes)
        shape = tuple(found.shape)
        if found.dtype not in dtypes or len(shape) != 2 or not all(0 < extent < MAX_DIMENSION for extent in shape):
            raise self.error(suffix, f"a matrix of {_names(dtypes)} is expected, found {_name(found.dtype)} {shape}")
        return shape[0], shape[1]

    def expect(self, suffix: str, dtypes: Iterable[torch.dtype], *shapes: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the tensor has one of `dtypes` and one of `shapes`."""
        found, dtypes = self._found(suffix), tuple(dtypes)
        if found.dtype not in dtypes or tuple(found.shape) not in shapes:
            wanted = " or ".join(map(str, dict.fromkeys(shapes)))
            raise self.error(suffix, f"{_names(dtypes)} {wanted} is expected, found {_name(found.dtype)} {tuple(found.shape)}")

    def tensor(self, suffix: str) -> Tensor:
        """The tensor itself; the layer must have been loaded."""
        found = self._found(suffix)
        assert isinstance(found, Tensor), f"{self.name}.{suffix} was not loaded"
        return found

    def scales(self, suffix: str) -> Tensor:
        """Scales, which must be finite numbers."""
        values = self.tensor(suffix)
        if not bool(values.isfinite().all()):
            raise self.error(suffix, "scales are finite numbers, some here are not; the file is damaged or its producer failed")
        return values

    def _found(self, suffix: str) -> Tensor | TensorInfo:
        if suffix not in self.tensors:
            present = ", ".join(sorted(self.tensors)) or "none"
            raise CheckpointError(f"{self.where}: {self.name}.{suffix}: missing; the layer's tensors are: {present}")
        return self.tensors[suffix]


@dataclass(frozen=True)
class ForeignEntry:
    """One layer: its shape (N, K), its scheme (None where no scheme can say it exactly, then `refusal` says why and what to
    do), and `notes`, what the file says beyond the weights that a reader of the scheme would not know."""

    shape: tuple[int, int]
    scheme: Scheme | None
    refusal: str = ""
    notes: tuple[str, ...] = ()


class ForeignSchema(ABC):
    """How one tool lays out quantized layers."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    """All tensors a quantized layer can have, besides its bias."""
    markers: ClassVar[tuple[str, ...]]
    """Those of them that only a quantized layer has."""
    small: ClassVar[tuple[str, ...]] = ()
    """Those of a few bytes that `entry` looks into."""

    @abstractmethod
    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        """Checks names, dtypes and shapes of a layer; raises CheckpointError."""

    def used(self, layer: ForeignLayer) -> frozenset[str]:
        """The suffixes of the tensors that `read` makes this layer of, or looks at; all of `suffixes` unless a schema says
        otherwise."""
        return frozenset(self.suffixes)

    @abstractmethod
    def read(self, layer: ForeignLayer) -> QuantTensor:
        """The layer as codes, scales and zeros; raises CheckpointError."""

    @abstractmethod
    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        """The layer's tensors by suffix; the `refusals` of the schema's module say beforehand what it cannot hold."""

    def dequantize(self, layer: ForeignLayer, dtype: torch.dtype) -> Tensor:
        """The layer's weights [N, K] in `dtype`."""
        return self.read(layer).dequantize(dtype)


def checked_entry(schema: ForeignSchema, layer: ForeignLayer) -> ForeignEntry:
    """`schema.entry(layer)` with a note for every tensor that is not used and changes no weight; raises CheckpointError, naming
    it, for one that may."""
    entry = schema.entry(layer)
    notes = []
    for suffix in sorted(set(layer.tensors) - schema.used(layer)):
        if suffix not in _BESIDE_WEIGHTS:
            raise layer.error(
                suffix, f"nothing here reads this tensor of a {schema.name} layer, whose weights may mean something else "
                "without it; write the model again with the newest version of the tool that made it, or take the tensor "
                "away if you know that it says nothing",
            )  # fmt: skip
        notes.append(f"{suffix} is left out: {_BESIDE_WEIGHTS[suffix]}")
    return replace(entry, notes=(*entry.notes, *notes))


def layers_of(schema: ForeignSchema, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Layer -> suffix -> tensor name, for every layer that has one of the schema's markers: its suffixes, and what else but a
    bias has the layer's name in front."""
    names = tuple(names)
    found: dict[str, dict[str, str]] = {}
    by_length = sorted(schema.suffixes, key=len, reverse=True)
    for name in names:
        for suffix in by_length:
            if name.endswith(f".{suffix}"):
                found.setdefault(name.removesuffix(f".{suffix}"), {})[suffix] = name
                break
    found = {layer: parts for layer, parts in found.items() if any(marker in parts for marker in schema.markers)}
    taken = {name for parts in found.values() for name in parts.values()}
    for name in names:
        layer = None if name in taken else owner_of(name, found)
        if layer is not None and name != f"{layer}.bias":
            found[layer][name.removeprefix(f"{layer}.")] = name
    return found


def words_to_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes uint8 [R, count] of little-endian words int32 [R, ceil(count * bits / 32)], dense across words."""
    data = words.contiguous().view(torch.uint8)
    return unpack_words(data[:, : -(-count * bits // 8)], bits, count)


def codes_to_words(codes: Tensor, bits: int) -> Tensor:
    """Words int32 [R, ceil(C * bits / 32)] of codes uint8 [R, C]; unused high bits are zero. Inverse of `words_to_codes`."""
    data = pack_words(codes, bits)
    return torch.nn.functional.pad(data, (0, -data.shape[1] % 4)).view(torch.int32)


def read_fp8(layer: ForeignLayer, suffix: str) -> Tensor:
    """Codes uint8 of a float8_e4m3fn tensor, which must hold no NaN."""
    codes = layer.tensor(suffix).contiguous().view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise layer.error(suffix, "some weights are NaN; the file is damaged or its producer failed")
    return codes


def read_e8m0(layer: ForeignLayer, suffix: str) -> Tensor:
    """Scales bf16 of exponents uint8 e, each 2^(e - 127), which bf16 holds exactly."""
    exponent = layer.tensor(suffix).view(torch.uint8).to(torch.int16)
    if bool((exponent == 255).any()):
        raise layer.error(suffix, "some power-of-two scales are NaN (255); the file is damaged or its producer failed")
    return torch.where(exponent == 0, 0x0040, exponent << 7).view(torch.bfloat16)


def write_e8m0(scale: Tensor) -> Tensor:
    """Exponents uint8 of positive powers of two in bf16; the inverse of `read_e8m0`."""
    bits = scale.to(torch.bfloat16).view(torch.int16)
    return torch.where(bits == 0x0040, 0, bits >> 7).to(torch.uint8)


def is_e8m0(scale: Tensor) -> bool:
    """Whether all scales are positive powers of two that 8 exponent bits hold."""
    rounded = scale.to(torch.bfloat16)
    bits = rounded.view(torch.int16)
    powers = ((bits > 0) & (bits & 0x7F == 0)) | (bits == 0x0040)
    return bool((powers & (rounded.to(scale.dtype) == scale) & scale.isfinite()).all())


def config_value(config: Mapping[str, Any], where: Path | str, keys: Iterable[str], kind: type[T], default: Any = ...) -> T:
    """The first of `keys` that a configuration has, which must be of type `kind` (or equal the default)."""
    keys = tuple(keys)
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not kind:
            raise CheckpointError(f"{where}: {key} is {kind.__name__}, got {value!r}")
        return value  # type: ignore[no-any-return]
    if default is ...:
        raise CheckpointError(f"{where}: has no {' or '.join(keys)}, without which the tensors cannot be read")
    return default  # type: ignore[no-any-return]


def bit_width(value: int, where: Path | str, allowed: Iterable[int], tool: str) -> int:
    """`value` if it is among `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise CheckpointError(f"{where}: {tool} weights of {value!r} bits; supported are {', '.join(map(str, allowed))}")
    return value


def group_size(value: int, where: Path | str) -> int:
    """A group size: positive, or -1 for all of K."""
    if value != -1 and not 0 < value <= MAX_GROUP:
        raise CheckpointError(f"{where}: the group size is {value}; it is a positive number, or -1 for one group")
    return value


def group_of(layer: ForeignLayer, groups: int, k: int, sizes: Iterable[int]) -> int:
    """Which of the group sizes that a configuration names (-1: all of K) divides K into `groups` groups; an error if none does,
    or several that mean different weights."""
    sizes = tuple(dict.fromkeys(sizes))
    fits = [size for size in sizes if groups == -(-k // (k if size == -1 else size))]
    if len({k if size == -1 else min(size, k) for size in fits}) != 1:
        if fits:
            why = f"{groups} groups of {k} input channels can be of {' or '.join(map(str, fits))}; the files do not say which"
        else:
            why = f"{groups} groups do not divide {k} input channels into groups of {' or '.join(map(str, sizes))}"
        raise layer.error("scales", why)
    return fits[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(_name(dtype) for dtype in dtypes)
