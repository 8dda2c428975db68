"""Detects the tool that quantized a checkpoint, and reads the checkpoints of all supported tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint import auto_round, modelopt
from lowbit.checkpoint.awq import Awq
from lowbit.checkpoint.bitsandbytes import Bitsandbytes
from lowbit.checkpoint.compressed_tensors import CompressedTensors
from lowbit.checkpoint.experts import ExpertEntry, ExpertTensors, GroupedExperts
from lowbit.checkpoint.foreign import ForeignEntry, ForeignLayer, ForeignSchema, checked_entry, layers_of
from lowbit.checkpoint.fp8 import Fp8
from lowbit.checkpoint.gptq import Gptq
from lowbit.checkpoint.mxfp4 import Mxfp4
from lowbit.checkpoint.reader import CheckpointReader, TensorInfo, read_json
from lowbit.checkpoint.schema import METHOD, CheckpointError
from lowbit.checkpoint.torchao import Torchao
from lowbit.formats import QuantTensor

SCHEMAS: dict[str, Callable[[Mapping[str, Any], Path | str], ForeignSchema]] = {
    "gptq": Gptq.from_config,
    "awq": Awq.from_config,
    "auto-round": auto_round.schema,
    "compressed-tensors": CompressedTensors.from_config,
    "fp8": Fp8.from_config,
    "fbgemm_fp8": Fp8.from_config,
    "mxfp4": Mxfp4.from_config,
    "bitsandbytes": Bitsandbytes.from_config,
    "torchao": Torchao.from_config,
    "modelopt": modelopt.schema,
}
"""`quant_method` -> function that builds the schema from a configuration and the path of its file."""

_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Configuration files of older tool versions -> the method if the file does not state it."""

_SMALL_BYTES = 1 << 16


def quantization_of(folder: str | Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Path] | None:
    """Returns (quant_method, quantization configuration, its file) of a checkpoint folder whose config.json is `config`; None
    if it is not quantized."""
    folder = Path(folder)
    stated, where = config.get("quantization_config"), folder / "config.json"
    method = None
    if stated is None:
        present = [name for name in _OLD_FILES if (folder / name).is_file()]
        if not present:
            return None
        where = folder / present[0]
        stated, method = read_json(where), _OLD_FILES[present[0]]
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"{where}: quantization_config is a JSON object, got {type(stated).__name__}")
    method = stated.get("quant_method", method)
    if not isinstance(method, str):
        raise CheckpointError(f"{where}: quantization_config states no quant_method, so its tensors cannot be read")
    return method, stated, where


def detect(folder: str | Path, config: Mapping[str, Any]) -> ForeignSchema | None:
    """Returns the schema of a folder that another tool quantized; None for a lowbit or an unquantized one.

    `config` is the content of config.json. Raises CheckpointError for an unsupported tool or format.
    """
    quantization = quantization_of(folder, config)
    if quantization is None or quantization[0] == METHOD:
        return None
    method, stated, where = quantization
    if method not in SCHEMAS:
        raise CheckpointError(
            f"{where}: quant_method {method!r} is not supported; supported are {', '.join(SCHEMAS)}, lowbit and GGUF files. "
            "Export the model in one of these with the tool that wrote it, or quantize its 16-bit checkpoint"
        )
    return SCHEMAS[method](stated, where)


class ForeignReader:
    """A Transformers folder with safetensors files that another tool quantized.

    Opening it checks every file's header and the names, dtypes and shapes of every quantized layer, and loads only tensors of a
    few bytes. It raises CheckpointError with file and tensor. `entries` has the layers by name, `experts` the expert layers
    (`checkpoint.experts`), `plain` the other tensors' names. Experts that the files hold one by one are in `entries` too.
    """

    def __init__(self, folder: str | Path) -> None:
        self.files = CheckpointReader(folder)
        schema = detect(folder, self.files.config)
        if schema is None:
            own = self.files.manifest is not None
            plain = "is not quantized; quantize it with `lowbit quantize`"
            raise CheckpointError(f"{folder}: {'is a lowbit checkpoint already' if own else plain}")
        self.schema = schema
        self._layers = layers_of(schema, self.files.names())
        stacked = schema.stacked
        self._stacked = {} if stacked is None else stacked.layers_of(self.files.names())
        if not self._layers and not self._stacked:
            marker = (*schema.markers, *(() if stacked is None else stacked.markers))[0]
            raise CheckpointError(f"{folder}: config.json says {schema.name}, but no file has a tensor *.{marker}")
        self.entries: dict[str, ForeignEntry] = {}
        for name, tensors in self._layers.items():
            parts: dict[str, Tensor | TensorInfo] = {}
            for suffix, full in tensors.items():
                info = self.files.info(full)
                small = suffix in schema.small and info.end - info.begin <= _SMALL_BYTES
                parts[suffix] = self.files.get(full) if small else info
            self.entries[name] = checked_entry(schema, ForeignLayer(name, parts, folder))
        taken = {full for layers in (self._layers, self._stacked) for tensors in layers.values() for full in tensors.values()}
        self.plain = [name for name in self.files.names() if name not in taken]
        self._grouped = GroupedExperts(self.entries, self.plain, folder)
        self.experts: dict[str, ExpertEntry] = dict(self._grouped.experts)
        for name, tensors in self._stacked.items():
            assert stacked is not None
            headers = {suffix: self.files.info(full) for suffix, full in tensors.items()}
            self.experts[name] = stacked.entry(ForeignLayer(name, headers, folder))

    def __enter__(self) -> ForeignReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.files.__exit__(kind, error, trace)

    def loaded(self, name: str, device: torch.device | str = "cpu") -> ForeignLayer:
        """Returns one layer, or one layer of stacked experts, with its tensors on a device."""
        names = self._layers[name] if name in self._layers else self._stacked[name]
        tensors = {suffix: self.files.get(full).to(device) for suffix, full in names.items()}
        return ForeignLayer(name, tensors, self.files.info(next(iter(names.values()))).file)

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor:
        """Returns one layer as a QuantTensor on a device. Raises CheckpointError if no scheme represents it."""
        return self.schema.read(self.loaded(name, device))

    def expert_layer(self, name: str, device: torch.device | str = "cpu") -> ExpertTensors:
        """Returns the experts of one layer of `experts` on a device. Raises CheckpointError if `ExpertTensors` cannot hold
        them."""
        if name not in self._stacked:
            return self._grouped.read(name, lambda each: self.layer(each, device), lambda each: self.get(each).to(device))
        assert self.schema.stacked is not None
        return self.schema.stacked.read(self.loaded(name, device))

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns one layer's weights [N, K] in `dtype`."""
        return self.schema.dequantize(self.loaded(name), dtype)

    def get(self, name: str) -> Tensor:
        """Returns a tensor outside the quantized layers."""
        return self.files.get(name)
