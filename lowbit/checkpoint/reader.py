"""Reads a checkpoint folder. All headers are checked before any tensor is used; pickles are never opened."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowbit.checkpoint.schema import (
    OLD_NAMES,
    CheckpointError,
    LayerEntry,
    Manifest,
    expected_tensors,
    expert_tensor,
    manifest_sha256,
    owner_of,
    quant_tensor,
    unstated_tensors,
)
from lowbit.formats import ExpertTensor, QuantTensor, ZeroPoint, is_permutation
from lowbit.sources import linked_inside, model_folder, regular_file

MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
MAX_DIMENSIONS = 64
MAX_JSON_BYTES = 64_000_000
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_CHECKED_PARTS = ("pre_quant_scale", "activation_scale", "activation_zero")
_SHARD = re.compile(r"(.*)-[0-9]{5}-of-([0-9]{5})\.safetensors")
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's file, dtype, shape, and byte range [begin, end) in the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class CheckpointReader:
    """A Transformers folder with safetensors files, quantized by lowbit or not; tensors are read one at a time.

    Opening it parses config.json and every file's header and reads the act-order permutations. It raises CheckpointError, with
    file and tensor, for truncated or inconsistent files. `manifest` is None for a checkpoint that lowbit did not quantize;
    tensors with old names (`schema.OLD_NAMES`) get their current ones. `weights` is the name of a single tensor file.
    `rotation` is the seed of the rotation applied while reading (`models.rotate`), or None.
    """

    def __init__(self, folder: str | Path, weights: str = SINGLE) -> None:
        self.rotation: int | None = None
        self.folder = model_folder(Path(folder))
        self.config: dict[str, Any] = read_json(self.folder / "config.json")
        self._tensors = _read_headers(self.folder, weights)
        self._open: dict[Path, Any] = {}
        self._stored: dict[str, str] = {}
        self.manifest = self._read_manifest()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.clear()

    def names(self) -> list[str]:
        """Returns the names of all tensors, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Returns file, dtype, shape and byte range of a tensor."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}")
        return self._tensors[name]

    def get(self, name: str) -> Tensor:
        """Returns a copy of one tensor."""
        info = self.info(name)
        try:
            if info.file not in self._open:
                self._open[info.file] = safe_open(str(info.file), framework="pt")
            tensor: Tensor = self._open[info.file].get_tensor(self._stored.get(name, name))
            return tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: {name}: cannot be read ({error})") from error

    def layer(self, name: str) -> QuantTensor:
        """Returns one quantized layer with a single matrix; raises CheckpointError for the weights of experts."""
        entry, tensors = self._layer_tensors(name)
        if entry.experts:
            raise CheckpointError(f"{self.folder}: {name} has the weights of {entry.experts} experts, which this does not read")
        return quant_tensor(tensors, entry)

    def experts(self, name: str) -> ExpertTensor:
        """Returns the quantized weights `name` of the experts of a layer; raises CheckpointError for a single matrix."""
        entry, tensors = self._layer_tensors(name)
        if not entry.experts:
            raise CheckpointError(f"{self.folder}: {name} has one matrix, it does not belong to experts")
        return expert_tensor(tensors, entry)

    def _layer_tensors(self, name: str) -> tuple[LayerEntry, dict[str, Tensor]]:
        """Returns the entry of a quantized layer and its tensors by suffix."""
        if self.manifest is None or name not in self.manifest.layers:
            raise CheckpointError(f"{self.folder}: {name!r} is not among its quantized layers")
        entry = self.manifest.layers[name]
        suffixes = [full.rpartition(".")[2] for full in expected_tensors(name, entry)]
        return entry, {suffix: self.get(f"{name}.{suffix}") for suffix in suffixes}

    def check(self) -> None:
        """Reads every quantized layer and raises CheckpointError for invalid values.

        Scales, zeros, pre_quant_scale and low-rank corrections must be finite, zeros in range, unused bits of a row 0.
        Negative scales (auto-round, GGUF) and zero scales (GGUF) are valid.
        """
        for name, entry in (self.manifest.layers if self.manifest else {}).items():
            q: QuantTensor | ExpertTensor = self.experts(name) if entry.experts else self.layer(name)
            file = self.info(f"{name}.weight_scale").file
            if not bool(q.scale.isfinite().all()):
                raise CheckpointError(f"{file}: {name}.weight_scale: some scales are not finite")
            if q.zero is not None and not bool(q.zero.isfinite().all()):
                raise CheckpointError(f"{file}: {name}.weight_zero: some zeros are not finite")
            factors, static, shift = (getattr(q.input_transform, part) for part in _CHECKED_PARTS)
            if factors is not None and not bool(factors.isfinite().all()):
                where = self.info(f"{name}.{_CHECKED_PARTS[0]}").file
                raise CheckpointError(f"{where}: {name}.{_CHECKED_PARTS[0]}: some values are not finite")
            if isinstance(q, QuantTensor) and q.low_rank is not None and not bool(q.low_rank.dense().isfinite().all()):
                raise CheckpointError(f"{self.info(f'{name}.weight_up').file}: {name}: its low-rank correction is not finite")
            if static is not None and not bool((static > 0) & static.isfinite()):
                where, value = self.info(f"{name}.activation_scale").file, static.item()
                raise CheckpointError(f"{where}: {name}.activation_scale: must be a positive number, got {value}")
            if shift is not None and not -128 <= int(shift) <= 127:
                where, value = self.info(f"{name}.activation_zero").file, shift.item()
                raise CheckpointError(f"{where}: {name}.activation_zero: must be from -128 to 127, got {value}")
            if entry.scheme.zero is ZeroPoint.INTEGER and q.zero is not None and int(q.zero.max()) > entry.scheme.weight.max:
                raise CheckpointError(
                    f"{file}: {name}.weight_zero: {int(q.zero.max())} is beyond {entry.scheme.weight.max:.0f}"
                )
            packed = self.get(f"{name}.weight_packed")
            used = entry.shape[1] * entry.scheme.weight.bits % 8
            if used and bool((packed[..., -1] >> used).any()):
                raise CheckpointError(f"{file}: {name}.weight_packed: unused bits after the last code are not zero")

    def verify_files(self, progress: Callable[[int], object] = lambda nbytes: None) -> tuple[str, ...]:
        """Compares the SHA-256 of every tensor file and of the manifest with config.json; returns the names of the files.

        Returns an empty tuple if config.json states no checksums. `progress` gets the number of bytes of each block read.
        Raises CheckpointError for a changed file.
        """
        manifest = self.config["quantization_config"] if self.manifest else {}
        if "sha256" in manifest and manifest["sha256"] != manifest_sha256(manifest):
            raise CheckpointError(
                f"{self.folder / 'config.json'}: quantization_config was changed after it was written: its SHA-256 is "
                f"{manifest_sha256(manifest)}, it states {manifest['sha256']!r}; copy or create the checkpoint again"
            )
        stated = self.manifest.files if self.manifest else {}
        for name, digest in stated.items():
            actual = file_sha256(self.folder / name, progress)
            if actual != digest:
                raise CheckpointError(
                    f"{self.folder / name}: was changed after it was written: its SHA-256 is {actual}, config.json states "
                    f"{digest}; copy or create it again"
                )
        return tuple(stated)

    def _read_manifest(self) -> Manifest | None:
        config = self.config.get("quantization_config")
        if not isinstance(config, dict) or config.get("quant_method") != "lowbit":
            return None
        manifest = Manifest.from_dict(config, self.folder / "config.json")
        files = {info.file.name for info in self._tensors.values()}
        if manifest.files and set(manifest.files) != files:
            raise CheckpointError(
                f"{self.folder / 'config.json'}: states checksums of {', '.join(sorted(manifest.files))}, the tensors are in "
                f"{', '.join(sorted(files))}"
            )
        for name, entry in manifest.layers.items():
            expected = expected_tensors(name, entry)
            self._rename(name, expected)
            for tensor, (shape, dtypes) in expected.items():
                if tensor not in self._tensors:
                    raise CheckpointError(f"{self.folder}: config.json lists the layer {name!r}, but no file has {tensor}")
                found = self._tensors[tensor]
                if found.shape != shape or found.dtype not in dtypes:
                    raise CheckpointError(
                        f"{found.file}: {tensor}: {entry.scheme} {entry.shape} has "
                        f"{' or '.join(str(d) for d in dtypes)} {shape}, the file has {found.dtype} {found.shape}"
                    )
            for tensor, key in unstated_tensors(name, entry).items():
                if tensor in self._tensors:
                    raise CheckpointError(
                        f"{self._tensors[tensor].file}: {tensor}: config.json does not say that the layer has it ({key})"
                    )
            # Checked on opening, since Transformers loads these tensors without `layer`, and kernels index memory with them.
            order = f"{name}.weight_order"
            if entry.input_parts.order and not is_permutation(self.get(order)):
                raise CheckpointError(
                    f"{self.info(order).file}: {order}: must contain each of 0 to {entry.shape[1] - 1} exactly once"
                )
        read = {tensor for name, entry in manifest.layers.items() for tensor in expected_tensors(name, entry)}
        for tensor, info in self._tensors.items():
            layer = None if tensor in read else owner_of(tensor, manifest.layers)
            if layer is not None and tensor != f"{layer}.bias":
                raise CheckpointError(
                    f"{info.file}: {tensor}: unknown tensor of a quantized layer, which may change its weights; a newer lowbit "
                    "may have written it: update lowbit"
                )
        return manifest

    def _rename(self, layer: str, expected: Container[str]) -> None:
        """Renames tensors of a layer from old names (`OLD_NAMES`) to the expected ones."""
        for old, new in OLD_NAMES.items():
            stored, name = f"{layer}.{old}", f"{layer}.{new}"
            if name in expected and name not in self._tensors and stored in self._tensors:
                self._tensors[name], self._stored[name] = self._tensors.pop(stored), stored


def read_text(path: Path, expected: str) -> str:
    """Returns the text of a regular UTF-8 file. Raises ValueError, with `expected` if the file does not exist."""
    try:
        return regular_file(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {expected}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error


def file_sha256(path: Path, progress: Callable[[int], object] = lambda nbytes: None) -> str:
    """Returns the SHA-256 of a file in hexadecimal; `progress` gets the number of bytes of each block."""
    digest = hashlib.sha256()
    try:
        with regular_file(path).open("rb", buffering=0) as file:
            while block := file.read(1 << 22):
                digest.update(block)
                progress(len(block))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a checkpoint. Raises CheckpointError, naming the file, for anything else."""
    try:
        regular_file(path)
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: {path.stat().st_size:,} bytes, more than the limit of {MAX_JSON_BYTES:,} for a checkpoint's JSON"
            )
        value = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; a checkpoint is a folder with config.json and *.safetensors") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError for a duplicate key, of which parsers may use either value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r} in an object")
    return value


def _read_headers(folder: Path, weights: str) -> dict[str, TensorInfo]:
    index = folder / INDEX
    if weights != SINGLE or not index.exists():
        single = folder / weights
        if not single.exists():
            raise CheckpointError(_no_weights(folder))
        return read_header(single)
    if (folder / SINGLE).exists():
        raise CheckpointError(
            f"{folder}: holds {SINGLE} and {INDEX}, two sets of weights, of which Transformers loads the first; remove one of "
            "them"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is an object of tensor names and file names")
    for file in sorted(set(weight_map.values())):
        prefix, total = match.groups() if (match := _SHARD.fullmatch(file)) else ("", "0")
        expected = {f"{prefix}-{i:05}-of-{total}.safetensors" for i in range(1, min(int(total), len(weight_map) + 1) + 1)}
        if lost := sorted(expected - set(weight_map.values())):
            raise CheckpointError(f"{index}: lists {file}, and no tensor in {lost[0]}")
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        for name, info in read_header(_inside(folder, file, index)).items():
            if name in tensors:
                raise CheckpointError(f"{info.file}: {name}: is also in {tensors[name].file.name}")
            if weight_map.get(name) != file:
                raise CheckpointError(f"{info.file}: {name}: {index.name} does not list it in this file")
            tensors[name] = info
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / file}: {name}: {index.name} lists it, the file does not have it")
    return tensors


def _inside(folder: Path, file: str, index: Path) -> Path:
    """Returns the path of a shard. Raises CheckpointError unless it is a plain file name inside the folder."""
    path = folder / file
    plain = file == os.path.basename(file) and not {"\\", "\0"} & set(file) and 0 < len(file.encode("utf-8", "replace")) < 256
    if not plain or file in (".", ".."):
        raise CheckpointError(f"{index}: names the file {file[:80]!r}; only plain file names inside the folder are allowed")
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, {index.name} lists it")
    return linked_inside(path, folder)


def pickle_refusal(name: str) -> str:
    """Returns why a file of pickled weights is not opened, and how to convert it."""
    return (
        f"{name}, a pickle, which can run code when it is read, so lowbit never opens it; convert it once with Transformers: "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) writes safetensors"
    )


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if pickles:
        return f"{folder}: holds {pickle_refusal(pickles[0])}"
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    if ggufs:
        return (
            f"{folder}: holds {ggufs[0]}; make a lowbit checkpoint of it (lowbit convert), or load it with Transformers "
            "(gguf_file=...)"
        )
    return f"{folder}: holds neither {SINGLE} nor {INDEX}"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Parses and checks one file's header: little-endian length, JSON, then the tensors' bytes without gap or overlap."""
    try:
        size = regular_file(path).stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file, or truncated ({size:,} bytes)")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is a {type(header).__name__}, expected a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor_info(path, name, entry, start, size) for name, entry in header.items()}
    position = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            raise CheckpointError(f"{path}: {name}: begins at byte {info.begin}, the data before it ends at {position}")
        position = info.end
    if position != size:
        raise CheckpointError(f"{path}: {size:,} bytes, its header accounts for {position:,}; truncated or damaged")
    return tensors


def _tensor_info(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {name}: dtype, shape or data_offsets missing or unknown ({error!r})") from error
    if not all(type(v) is int and v >= 0 for v in (*shape, begin, end)):
        raise CheckpointError(f"{path}: {name}: shape and data_offsets are lists of non-negative integers")
    # torch computes strides as 64-bit products of extents, even for tensors without elements.
    if len(shape) > MAX_DIMENSIONS or math.prod(max(1, extent) for extent in shape) * dtype.itemsize >= 1 << 63:
        raise CheckpointError(f"{path}: {name}: no tensor can have the shape {str(shape)[:80]}; the file is damaged")
    count = dtype.itemsize * math.prod(shape)
    if end - begin != count or start + end > size:
        raise CheckpointError(
            f"{path}: {name}: {dtype} {shape} takes {count:,} bytes, data_offsets give [{begin}, {end}) "
            f"of the {size - start:,} in the file"
        )
    return TensorInfo(path, dtype, shape, start + begin, start + end)
