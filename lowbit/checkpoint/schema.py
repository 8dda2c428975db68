"""The contents of `quantization_config` in config.json of a lowbit checkpoint, and the tensors of one layer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import (
    NO_PARTS,
    ExpertTensor,
    InputParts,
    InputTransform,
    LowRank,
    QuantTensor,
    Scheme,
    ZeroPoint,
    pack_words,
    packed_bytes,
    parse_scheme,
    scale_shape,
    unpack_words,
)
from lowbit.sources import CheckpointError as CheckpointError

METHOD = "lowbit"
FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)
"""Version 1 has neither `method` nor `calibration`."""
MAX_DIMENSION = 1 << 31
_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLAGS = {
    "order": "weight_order", "pre_quant_scale": "pre_quant_scale", "activation_scale": "activation_scale",
    "activation_zero": "activation_zero",
}  # fmt: skip
"""Key of a layer's entry -> suffix of a tensor. The layer has the tensor if the value of the key is true."""
OLD_NAMES = {"input_scale": "pre_quant_scale"}
"""Name from before the first release (a key of an entry, and a suffix of a tensor) -> current name. Both are read; only the
current name is written."""
_FACTORS = ("weight_up", "weight_down")
"""Tensors of a layer whose entry states a "low_rank"."""
_ENTRY_KEYS = {"shape", "scheme", "low_rank", "hadamard", *_FLAGS}
_KEYS = {
    "quant_method", "format_version", "scheme", "method", "calibration", "layers", "modules_to_not_convert", "tied", "rotation",
    "files", "sha256",
}  # fmt: skip
GUARD_KEY = "transformers_weights"
GUARD = "this checkpoint needs lowbit: install lowbit and run 'import lowbit' before from_pretrained"
"""Key and value in config.json of a lowbit checkpoint that make Transformers without lowbit fail with this text.

Transformers skips an unknown quantization method and would load random weights with a warning. It refuses a weights file whose
name does not end in .safetensors, before it reads or downloads any file, and prints the name."""


@dataclass(frozen=True)
class LayerEntry:
    """One quantized matrix: shape (N, K), scheme, parts of its input transform, and rank of its low-rank correction (or 0).

    experts: the number of experts, each with a matrix of this shape (`ExpertTensor`); 0 for a single matrix.
    """

    shape: tuple[int, int]
    scheme: Scheme
    input_parts: InputParts = NO_PARTS
    low_rank: int = 0
    experts: int = 0

    @classmethod
    def of(cls, q: QuantTensor | ExpertTensor) -> LayerEntry:
        """Returns the entry of one matrix, or of the matrices of a layer's experts."""
        if isinstance(q, ExpertTensor):
            return cls(q.shape, q.scheme, q.input_transform.parts, experts=q.experts)
        return cls(q.shape, q.scheme, q.input_transform.parts, 0 if q.low_rank is None else q.low_rank.rank)

    @property
    def stated_shape(self) -> list[int]:
        """The shape in config.json: [N, K], or [E, N, K] for experts, which older releases refuse."""
        return [self.experts, *self.shape] if self.experts else list(self.shape)

    @property
    def weights(self) -> int:
        """The number of weights, summed over all experts."""
        return max(self.experts, 1) * self.shape[0] * self.shape[1]

    def stated(self) -> dict[str, Any]:
        """Returns the keys of the entry in config.json other than shape and scheme."""
        named = {"low_rank": self.low_rank, "hadamard": self.input_parts.hadamard}
        named = {**{key: getattr(self.input_parts, key) for key in _FLAGS}, **named}
        return {key: value for key, value in named.items() if value}


@dataclass(frozen=True)
class Manifest:
    """The quantized layers of a checkpoint by name, the default scheme, the modules in 16 bits, and ties.

    tied: module without own tensors -> layer whose tensors it shares. files: tensor file -> its SHA-256 (64 hexadecimal
    digits), empty if unknown; with it the manifest states its own SHA-256 too. rotation: seed of the rotations folded into the
    weights before quantization (`models.rotate`), or None. method: "name" of the algorithm and its options; calibration: name
    of the "text" with "samples", "length" and "seed"; both are informative, None if unknown.
    """

    scheme: Scheme
    layers: dict[str, LayerEntry] = field(default_factory=dict)
    modules_to_not_convert: tuple[str, ...] = ()
    tied: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    rotation: int | None = None
    method: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the value of `quantization_config`; a layer states its scheme only if it is not the default."""
        layers: dict[str, dict[str, Any]] = {}
        for name, entry in self.layers.items():
            layers[name] = {"shape": entry.stated_shape} | (
                {} if entry.scheme == self.scheme else {"scheme": entry.scheme.name}
            )
            layers[name] |= entry.stated()
        tied = {"tied": dict(self.tied)} if self.tied else {}
        files = {"files": {name: {"sha256": digest} for name, digest in self.files.items()}} if self.files else {}
        stated = {
            "quant_method": METHOD,
            "format_version": FORMAT_VERSION,
            "scheme": self.scheme.name,
            **({} if self.method is None else {"method": dict(self.method)}),
            **({} if self.calibration is None else {"calibration": dict(self.calibration)}),
            "modules_to_not_convert": list(self.modules_to_not_convert),
            "layers": layers,
            **tied,
            **({} if self.rotation is None else {"rotation": self.rotation}),
            **files,
        }
        return {**stated, "sha256": manifest_sha256(stated)} if self.files else stated

    @classmethod
    def from_dict(cls, value: Any, where: Path | str) -> Manifest:
        """Returns the manifest of a parsed `quantization_config`. Raises CheckpointError, with the path `where`, if invalid."""
        data = _mapping(value, where, "quantization_config")
        if data.get("quant_method") != METHOD:
            raise CheckpointError(f"{where}: quant_method is {data.get('quant_method')!r}, must be {METHOD!r}")
        version = data.get("format_version")
        if type(version) is not int or version not in READ_VERSIONS:
            read = " and ".join(map(str, READ_VERSIONS))
            raise CheckpointError(f"{where}: format_version is {version!r}, this release reads {read}; update lowbit")
        unknown = sorted(set(map(str, data)) - _KEYS)
        if unknown:
            raise CheckpointError(f"{where}: quantization_config has unknown keys {unknown}; known are {sorted(_KEYS)}")
        default = _scheme(data.get("scheme"), where, "quantization_config")
        layers = {}
        for name, entry in _mapping(data.get("layers"), where, "layers").items():
            entry = current_names(_mapping(entry, where, f"layer {name!r}"))
            unknown = sorted(set(map(str, entry)) - _ENTRY_KEYS)
            if unknown:
                raise CheckpointError(f"{where}: layer {name!r} has unknown keys {unknown}; known are {sorted(_ENTRY_KEYS)}")
            scheme = _scheme(entry["scheme"], where, f"layer {name!r}") if "scheme" in entry else default
            flags = {key: _flag(entry.get(key, False), where, f"layer {name!r}: {key!r}") for key in _FLAGS}
            experts, shape = _shape(entry.get("shape"), where, name)
            block = entry.get("hadamard", 0)
            if type(block) is not int:
                raise CheckpointError(f"{where}: layer {name!r}: hadamard is a number of channels, got {block!r}")
            parts = InputParts(**flags, hadamard=block)
            try:
                parts.check(scheme, shape[1])
            except ValueError as error:
                raise CheckpointError(f"{where}: layer {name!r}: {error}") from error
            rank = _rank(entry.get("low_rank", 0), shape, where, name)
            if experts and rank:
                raise CheckpointError(f"{where}: layer {name!r}: the weights of experts have no low_rank")
            layers[str(name)] = LayerEntry(shape, scheme, parts, rank, experts)
        kept = data.get("modules_to_not_convert", [])
        if not isinstance(kept, list) or not all(isinstance(k, str) for k in kept):
            raise CheckpointError(f"{where}: modules_to_not_convert is a list of names, got {kept!r}")
        tied = _mapping(data.get("tied", {}), where, "tied")
        for follower, owner in tied.items():
            if not isinstance(owner, str) or owner not in layers:
                raise CheckpointError(f"{where}: {follower!r} is tied to {owner!r}, which is not among the layers")
        rotation = data.get("rotation")
        if rotation is not None and type(rotation) is not int:
            raise CheckpointError(f"{where}: rotation must be a whole number, the seed of the rotations, got {rotation!r}")
        files = {
            str(name): _digest(entry, where, name) for name, entry in _mapping(data.get("files", {}), where, "files").items()
        }
        method = _record(data.get("method"), "name", where, "method")
        calibration = _record(data.get("calibration"), "text", where, "calibration")
        return cls(default, layers, tuple(kept), dict(tied), files, rotation, method, calibration)


def current_names(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a layer's entry with current key names. If an entry has both names of a key, the old one is kept, and refused
    later."""
    renamed = {old: new for old, new in OLD_NAMES.items() if new not in entry}
    return {renamed.get(key, key): value for key, value in entry.items()}


def manifest_sha256(stated: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a `quantization_config` without "sha256", as JSON with sorted keys and no spaces."""
    rest = {key: value for key, value in stated.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def layer_tensors(q: QuantTensor | ExpertTensor) -> dict[str, Tensor]:
    """Returns the tensors of a layer by suffix: weight_packed, weight_scale and, if present, weight_zero, weight_order,
    pre_quant_scale, activation_scale, activation_zero, weight_up and weight_down.

    The tensors of experts have a leading dimension E, except those of the input transform."""
    if isinstance(q, ExpertTensor):
        tensors = {"weight_packed": q.packed.contiguous(), "weight_scale": q.scale.contiguous()}
        if q.zero is not None:
            tensors["weight_zero"] = q.zero.contiguous()
        return tensors | {_FLAGS[name]: t.contiguous() for name, t in q.input_transform.tensors().items()}
    tensors = {"weight_packed": pack_words(q.codes, q.scheme.weight.bits), "weight_scale": q.scale.contiguous()}
    if q.zero is not None:
        tensors["weight_zero"] = q.zero.contiguous()
    tensors |= {_FLAGS[name]: t.contiguous() for name, t in q.input_transform.tensors().items()}
    if q.low_rank is not None:
        tensors |= dict(zip(_FACTORS, (q.low_rank.up.contiguous(), q.low_rank.down.contiguous()), strict=True))
    return tensors


def expert_tensor(tensors: Mapping[str, Tensor], entry: LayerEntry) -> ExpertTensor:
    """Returns the weights of experts with these tensors; the inverse of `layer_tensors`."""
    parts = {key: tensors.get(suffix) for key, suffix in _FLAGS.items()}
    transform = InputTransform(**parts, hadamard=entry.input_parts.hadamard)
    zero = tensors.get("weight_zero")
    return ExpertTensor(tensors["weight_packed"], tensors["weight_scale"], zero, entry.scheme, entry.shape, transform)


def quant_tensor(tensors: Mapping[str, Tensor], entry: LayerEntry) -> QuantTensor:
    """Returns the layer with these tensors; the inverse of `layer_tensors`."""
    codes = unpack_words(tensors["weight_packed"], entry.scheme.weight.bits, entry.shape[1])
    parts = {key: tensors.get(suffix) for key, suffix in _FLAGS.items()}
    transform = InputTransform(**parts, hadamard=entry.input_parts.hadamard)
    correction = LowRank(*(tensors[suffix] for suffix in _FACTORS)) if entry.low_rank else None
    return QuantTensor(codes, tensors["weight_scale"], tensors.get("weight_zero"), entry.scheme, transform, correction)


def expected_tensors(name: str, entry: LayerEntry) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
    """Returns full tensor name -> (shape, allowed dtypes) of one layer."""
    (n, k), scheme = entry.shape, entry.scheme
    leading = (entry.experts,) if entry.experts else ()
    grid = (*leading, *scale_shape(scheme.granularity, entry.shape))
    expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        f"{name}.weight_packed": ((*leading, n, packed_bytes(k, scheme.weight.bits)), (torch.uint8,)),
        f"{name}.weight_scale": (grid, _SCALE_DTYPES),
    }
    if scheme.zero is ZeroPoint.INTEGER:
        expected[f"{name}.weight_zero"] = (grid, (torch.uint8,))
    elif scheme.zero is ZeroPoint.FLOAT:
        expected[f"{name}.weight_zero"] = (grid, _SCALE_DTYPES)
    of_input: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "order": ((k,), (torch.int32,)), "pre_quant_scale": ((k,), _SCALE_DTYPES), "activation_scale": ((1,), (torch.float32,)),
        "activation_zero": ((1,), (torch.int32,)),
    }  # fmt: skip
    expected |= {f"{name}.{_FLAGS[key]}": allowed for key, allowed in of_input.items() if getattr(entry.input_parts, key)}
    if entry.low_rank:
        shapes = ((n, entry.low_rank), (entry.low_rank, k))
        expected |= {f"{name}.{suffix}": (shape, (torch.float16,)) for suffix, shape in zip(_FACTORS, shapes, strict=True)}
    return expected


def unstated_tensors(name: str, entry: LayerEntry) -> dict[str, str]:
    """Returns the tensors that the layer must not have: full name -> the key of config.json that would allow it."""
    unstated = {f"{name}.{suffix}": f'"{key}": true' for key, suffix in _FLAGS.items() if not getattr(entry.input_parts, key)}
    return unstated | ({} if entry.low_rank else {f"{name}.{suffix}": '"low_rank": its rank' for suffix in _FACTORS})


def owner_of(name: str, layers: Container[str]) -> str | None:
    """Returns the innermost of `layers` that contains the tensor `name`; None if there is none."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in layers:
            return name
    return None


def _mapping(value: Any, where: Path | str, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {what} is a JSON object, got {type(value).__name__}")
    return value


def _record(value: Any, key: str, where: Path | str, what: str) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get(key), str):
        raise CheckpointError(f"{where}: {what} is a JSON object with a string {key!r}, got {value!r}")
    return dict(value)


def _flag(value: Any, where: Path | str, what: str) -> bool:
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {what} is true or false, got {value!r}")
    return value


def _digest(entry: Any, where: Path | str, name: Any) -> str:
    digest = entry.get("sha256") if isinstance(entry, Mapping) and set(entry) == {"sha256"} else None
    if not isinstance(digest, str) or re.fullmatch("[0-9a-f]{64}", digest) is None:
        raise CheckpointError(f'{where}: the file {name!r} has a {{"sha256": 64 lower-case hexadecimal digits}}, got {entry!r}')
    return digest


def _rank(value: Any, shape: tuple[int, int], where: Path | str, name: Any) -> int:
    if type(value) is not int or not 0 <= value <= min(shape):
        raise CheckpointError(f"{where}: layer {name!r}: the low_rank of {list(shape)} is 1 to {min(shape)}, got {value!r}")
    return value


def _scheme(value: Any, where: Path | str, what: str) -> Scheme:
    if not isinstance(value, str):
        raise CheckpointError(f"{where}: {what} needs a scheme's name, got {value!r}")
    try:
        return parse_scheme(value)
    except ValueError as error:
        raise CheckpointError(f"{where}: {what}: {error}") from error


def _shape(value: Any, where: Path | str, name: Any) -> tuple[int, tuple[int, int]]:
    """Returns the number of experts, 0 for a single matrix, and (N, K)."""
    good = isinstance(value, list) and len(value) in (2, 3) and all(type(v) is int and 0 < v < MAX_DIMENSION for v in value)
    if not good:
        raise CheckpointError(
            f"{where}: layer {name!r} has the shape {value!r}, expected [N, K], or [E, N, K] for experts, of positive integers"
        )
    return (value[0] if len(value) == 3 else 0), (value[-2], value[-1])
