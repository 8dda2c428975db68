"""Shared by the readers and writers of other tools' checkpoints: checks of one layer's tensors, 32-bit words of codes, 8-bit
floats, power-of-two scales.

A schema is built from a tool's configuration. `read` converts the tensors of one layer to a QuantTensor; `write` converts it
back to the same bits. `entry` only checks names, dtypes and shapes, so a whole folder is checked before any tensor is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lowbit.checkpoint.reader import TensorInfo
from lowbit.checkpoint.schema import MAX_DIMENSION, CheckpointError, owner_of
from lowbit.formats import QuantTensor, Scheme, pack_words, unpack_words

if TYPE_CHECKING:
    from lowbit.checkpoint.experts import ExpertSchema

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_GROUP = 1 << 20

_CACHE = "scales of the KV cache, which stays in 16 bits"
_OUTPUT = "scales of the layer's output, which stays in 16 bits"
_INPUT = "scales of activations, which stay in 16 bits or are quantized dynamically"
_BESIDE_WEIGHTS = {
    **dict.fromkeys(("k_scale", "v_scale", "q_scale", "kv_scale"), _CACHE),
    **dict.fromkeys(("output_scale", "output_zero_point", "output_global_scale"), _OUTPUT),
    **dict.fromkeys(("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "input_scale_ub"), _INPUT),
}
"""Suffix -> description of tensors that do not affect a layer's weights."""

T = TypeVar("T")


@dataclass(frozen=True)
class ForeignLayer:
    """The tensors of one layer by suffix (or only their headers), and the path of their file or folder for messages."""

    name: str
    tensors: Mapping[str, Tensor | TensorInfo]
    where: Path | str = "tensors"

    def error(self, suffix: str, message: str) -> CheckpointError:
        """Returns an error that names the file, the tensor, and what is wrong."""
        tensor = self.tensors.get(suffix)
        where = tensor.file if isinstance(tensor, TensorInfo) else self.where
        return CheckpointError(f"{where}: {self.name}.{suffix}: {message}")

    def has(self, suffix: str) -> bool:
        """Returns whether the layer has this tensor."""
        return suffix in self.tensors

    def matrix(self, suffix: str, dtypes: Iterable[torch.dtype]) -> tuple[int, int]:
        """Returns the shape of a tensor. Raises CheckpointError unless it is a non-empty matrix of one of `dtypes`."""
        tensor, dtypes = self._get(suffix), tuple(dtypes)
        shape = tuple(tensor.shape)
        if tensor.dtype not in dtypes or len(shape) != 2 or not all(0 < extent < MAX_DIMENSION for extent in shape):
            raise self.error(suffix, f"a matrix of {_names(dtypes)} is expected, found {_name(tensor.dtype)} {shape}")
        return shape[0], shape[1]

    def shape(self, suffix: str, dtypes: Iterable[torch.dtype], dimensions: int) -> tuple[int, ...]:
        """Returns the shape of a tensor. Raises CheckpointError unless it has `dimensions` non-empty dimensions and one of
        `dtypes`."""
        tensor, dtypes = self._get(suffix), tuple(dtypes)
        shape = tuple(tensor.shape)
        if tensor.dtype not in dtypes or len(shape) != dimensions or not all(0 < extent < MAX_DIMENSION for extent in shape):
            what = f"{dimensions} dimensions of {_names(dtypes)}"
            raise self.error(suffix, f"{what} are expected, found {_name(tensor.dtype)} {shape}")
        return shape

    def expect(self, suffix: str, dtypes: Iterable[torch.dtype], *shapes: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the tensor has one of `dtypes` and one of `shapes`."""
        tensor, dtypes = self._get(suffix), tuple(dtypes)
        if tensor.dtype not in dtypes or tuple(tensor.shape) not in shapes:
            allowed = " or ".join(map(str, dict.fromkeys(shapes)))
            raise self.error(
                suffix, f"{_names(dtypes)} {allowed} is expected, found {_name(tensor.dtype)} {tuple(tensor.shape)}"
            )

    def tensor(self, suffix: str) -> Tensor:
        """Returns the tensor of a loaded layer."""
        tensor = self._get(suffix)
        assert isinstance(tensor, Tensor), f"{self.name}.{suffix} was not loaded"
        return tensor

    def scales(self, suffix: str) -> Tensor:
        """Returns scales. Raises CheckpointError unless all are finite."""
        values = self.tensor(suffix)
        if not bool(values.isfinite().all()):
            raise self.error(suffix, "some scales are not finite; the file is damaged or its producer failed")
        return values

    def _get(self, suffix: str) -> Tensor | TensorInfo:
        if suffix not in self.tensors:
            present = ", ".join(sorted(self.tensors)) or "none"
            raise CheckpointError(f"{self.where}: {self.name}.{suffix}: missing; the layer's tensors are: {present}")
        return self.tensors[suffix]


@dataclass(frozen=True)
class ForeignEntry:
    """One layer: its shape (N, K), its scheme, and `notes` on settings of the file that the scheme ignores. If no scheme
    represents the layer exactly, `scheme` is None and `refusal` has the reason and the remedy."""

    shape: tuple[int, int]
    scheme: Scheme | None
    refusal: str = ""
    notes: tuple[str, ...] = ()


class ForeignSchema(ABC):
    """The layout of quantized layers in one tool's files."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    """All tensors that a quantized layer can have, except its bias."""
    markers: ClassVar[tuple[str, ...]]
    """Suffixes that only a quantized layer has."""
    small: ClassVar[tuple[str, ...]] = ()
    """Suffixes of small tensors whose values `entry` reads."""

    @property
    def stacked(self) -> ExpertSchema | None:
        """The schema of experts that are stacked in one tensor per projection; None if the tool has no such files."""
        return None

    @abstractmethod
    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        """Returns shape and scheme of a layer. Raises CheckpointError for invalid names, dtypes or shapes."""

    def used(self, layer: ForeignLayer) -> frozenset[str]:
        """Returns the suffixes of the tensors that `read` uses or checks; by default all of `suffixes`."""
        return frozenset(self.suffixes)

    @abstractmethod
    def read(self, layer: ForeignLayer) -> QuantTensor:
        """Returns the layer as a QuantTensor. Raises CheckpointError for invalid values."""

    @abstractmethod
    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        """Returns the layer's tensors by suffix; call `refusals` of the schema's module first."""

    def dequantize(self, layer: ForeignLayer, dtype: torch.dtype) -> Tensor:
        """Returns the layer's weights [N, K] in `dtype`."""
        return self.read(layer).dequantize(dtype)


def checked_entry(schema: ForeignSchema, layer: ForeignLayer) -> ForeignEntry:
    """Returns `schema.entry(layer)` with a note for every unused tensor that does not affect the weights.

    Raises CheckpointError for an unused tensor that may affect them.
    """
    entry = schema.entry(layer)
    notes = []
    for suffix in sorted(set(layer.tensors) - schema.used(layer)):
        if suffix not in _BESIDE_WEIGHTS:
            raise layer.error(
                suffix, f"unknown tensor of a {schema.name} layer, which may change the weights; save the model again with the "
                "newest version of the tool that wrote it, or remove the tensor if you know that it has no effect",
            )  # fmt: skip
        notes.append(f"{suffix} is ignored: {_BESIDE_WEIGHTS[suffix]}")
    return replace(entry, notes=(*entry.notes, *notes))


def layers_of(schema: ForeignSchema, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns layer -> suffix -> tensor name for every layer with one of the schema's markers.

    It includes all tensors whose names begin with the layer's name, except the bias.
    """
    names = tuple(names)
    layers: dict[str, dict[str, str]] = {}
    by_length = sorted(schema.suffixes, key=len, reverse=True)
    for name in names:
        for suffix in by_length:
            if name.endswith(f".{suffix}"):
                layers.setdefault(name.removesuffix(f".{suffix}"), {})[suffix] = name
                break
    layers = {layer: parts for layer, parts in layers.items() if any(marker in parts for marker in schema.markers)}
    assigned = {name for parts in layers.values() for name in parts.values()}
    for name in names:
        layer = None if name in assigned else owner_of(name, layers)
        if layer is not None and name != f"{layer}.bias":
            layers[layer][name.removeprefix(f"{layer}.")] = name
    return layers


def words_to_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks little-endian words int32 [R, ceil(count * bits / 32)], dense across words, to codes uint8 [R, count]."""
    data = words.contiguous().view(torch.uint8)
    return unpack_words(data[:, : -(-count * bits // 8)], bits, count)


def codes_to_words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes uint8 [R, C] to words int32 [R, ceil(C * bits / 32)]; unused bits are 0. Inverse of `words_to_codes`."""
    data = pack_words(codes, bits)
    return torch.nn.functional.pad(data, (0, -data.shape[1] % 4)).view(torch.int32)


def read_fp8(layer: ForeignLayer, suffix: str) -> Tensor:
    """Returns the codes uint8 of a float8_e4m3fn tensor. Raises CheckpointError for NaN."""
    codes = layer.tensor(suffix).contiguous().view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise layer.error(suffix, "some weights are NaN; the file is damaged or its producer failed")
    return codes


def read_e8m0(layer: ForeignLayer, suffix: str) -> Tensor:
    """Returns the bf16 scales 2^(e - 127) of exponents uint8 e; they are exact."""
    scales = e8m0_scales(layer.tensor(suffix).view(torch.uint8))
    if not bool(scales.isfinite().all()):
        raise layer.error(suffix, "some power-of-two scales are NaN (255); the file is damaged or its producer failed")
    return scales


def e8m0_scales(exponents: Tensor) -> Tensor:
    """Returns the bf16 scales 2^(e - 127) of exponents uint8 e; infinity for 255, which stands for NaN."""
    exponent = exponents.to(torch.int16)
    return torch.where(exponent == 0, 0x0040, exponent << 7).view(torch.bfloat16)


def write_e8m0(scale: Tensor) -> Tensor:
    """Returns the exponents uint8 of positive powers of two; the inverse of `read_e8m0`."""
    bits = scale.to(torch.bfloat16).view(torch.int16)
    return torch.where(bits == 0x0040, 0, bits >> 7).to(torch.uint8)


def is_e8m0(scale: Tensor) -> bool:
    """Returns whether all scales are positive powers of two in the range of e8m0."""
    rounded = scale.to(torch.bfloat16)
    bits = rounded.view(torch.int16)
    powers = ((bits > 0) & (bits & 0x7F == 0)) | (bits == 0x0040)
    return bool((powers & (rounded.to(scale.dtype) == scale) & scale.isfinite()).all())


def config_value(config: Mapping[str, Any], where: Path | str, keys: Iterable[str], kind: type[T], default: Any = ...) -> T:
    """Returns the value of the first of `keys` in a configuration, or the default. Raises CheckpointError unless it has the
    type `kind`, or if there is neither."""
    keys = tuple(keys)
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not kind:
            raise CheckpointError(f"{where}: {key} must be {kind.__name__}, got {value!r}")
        return value  # type: ignore[no-any-return]
    if default is ...:
        raise CheckpointError(f"{where}: has no {' or '.join(keys)}, without which the tensors cannot be read")
    return default  # type: ignore[no-any-return]


def bit_width(value: int, where: Path | str, allowed: Iterable[int], tool: str) -> int:
    """Returns `value`. Raises CheckpointError unless it is among `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise CheckpointError(f"{where}: {tool} weights of {value!r} bits; supported are {', '.join(map(str, allowed))}")
    return value


def group_size(value: int, where: Path | str) -> int:
    """Returns a group size, positive or -1 for all of K. Raises CheckpointError for other values."""
    if value != -1 and not 0 < value <= MAX_GROUP:
        raise CheckpointError(f"{where}: the group size {value} must be positive, or -1 for one group")
    return value


def group_of(layer: ForeignLayer, groups: int, k: int, sizes: Iterable[int]) -> int:
    """Returns the group size of the configuration (-1: all of K) that divides K into `groups` groups.

    Raises CheckpointError if none does, or if several different ones do.
    """
    sizes = tuple(dict.fromkeys(sizes))
    fits = [size for size in sizes if groups == -(-k // (k if size == -1 else size))]
    if len({k if size == -1 else min(size, k) for size in fits}) != 1:
        if fits:
            why = f"{groups} groups of {k} input channels fit group sizes {' and '.join(map(str, fits))}: ambiguous"
        else:
            why = f"{groups} groups do not divide {k} input channels into groups of {' or '.join(map(str, sizes))}"
        raise layer.error("scales", why)
    return fits[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(_name(dtype) for dtype in dtypes)
