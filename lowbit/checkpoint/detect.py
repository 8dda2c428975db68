"""Which tool quantized a checkpoint, and a reader for all of them that have a schema here."""

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
from lowbit.checkpoint.foreign import ForeignEntry, ForeignLayer, ForeignSchema, checked_entry, layers_of
from lowbit.checkpoint.fp8 import Fp8
from lowbit.checkpoint.gptq import Gptq
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
    "bitsandbytes": Bitsandbytes.from_config,
    "torchao": Torchao.from_config,
    "modelopt": modelopt.schema,
}
"""What makes the schema of a configuration and the file that states it, by `quant_method` in quantization_config."""

_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where tools wrote their configuration before it moved into config.json, and the method if the file does not state it."""

_SMALL_BYTES = 1 << 16


def quantization_of(folder: str | Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Path] | None:
    """(quant_method, quantization configuration, file that states it) of a checkpoint folder whose config.json is `config`;
    None for one that is not quantized."""
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
        raise CheckpointError(f"{where}: quantization_config states no quant_method, so its tensors mean nothing")
    return method, stated, where


def detect(folder: str | Path, config: Mapping[str, Any]) -> ForeignSchema | None:
    """The schema of a folder that another tool quantized, whose config.json is `config`; None for one of lowbit's own or one
    that is not quantized. Raises CheckpointError for a tool or a variant that is not supported."""
    found = quantization_of(folder, config)
    if found is None or found[0] == METHOD:
        return None
    method, stated, where = found
    if method not in SCHEMAS:
        raise CheckpointError(
            f"{where}: quant_method {method!r} is not supported; supported are {', '.join(SCHEMAS)}, lowbit and GGUF files. Export the "
            "model in one of these with the tool that made it, or quantize its 16-bit checkpoint"
        )
    return SCHEMAS[method](stated, where)


class ForeignReader:
    """A Transformers folder with safetensors files that another tool quantized.

    Opening it checks the header of every file and the names, dtypes and shapes of every quantized layer, before any tensor of
    more than a few bytes is loaded; raises CheckpointError naming file and tensor. `entries` has the layers by name, `plain`
    the names of all other tensors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.files = CheckpointReader(folder)
        schema = detect(folder, self.files.config)
        if schema is None:
            own = self.files.manifest is not None
            plain = "is not quantized; lowbit quantize makes a quantized checkpoint of it"
            raise CheckpointError(f"{folder}: {'is a lowbit checkpoint already' if own else plain}")
        self.schema = schema
        self._layers = layers_of(schema, self.files.names())
        if not self._layers:
            raise CheckpointError(f"{folder}: config.json says {schema.name}, but no file has a tensor *.{schema.markers[0]}")
        self.entries: dict[str, ForeignEntry] = {}
        for name, tensors in self._layers.items():
            parts: dict[str, Tensor | TensorInfo] = {}
            for suffix, full in tensors.items():
                info = self.files.info(full)
                small = suffix in schema.small and info.end - info.begin <= _SMALL_BYTES
                parts[suffix] = self.files.get(full) if small else info
            self.entries[name] = checked_entry(schema, ForeignLayer(name, parts, folder))
        taken = {full for tensors in self._layers.values() for full in tensors.values()}
        self.plain = [name for name in self.files.names() if name not in taken]

    def __enter__(self) -> ForeignReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.files.__exit__(kind, error, trace)

    def loaded(self, name: str, device: torch.device | str = "cpu") -> ForeignLayer:
        """One layer with its tensors, on a device."""
        tensors = {suffix: self.files.get(full).to(device) for suffix, full in self._layers[name].items()}
        return ForeignLayer(name, tensors, self.files.info(next(iter(self._layers[name].values()))).file)

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor:
        """One layer as codes, scales and zeros, made on a device; raises CheckpointError where no scheme can say it."""
        return self.schema.read(self.loaded(name, device))

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        """One layer's weights [N, K]."""
        return self.schema.dequantize(self.loaded(name), dtype)

    def get(self, name: str) -> Tensor:
        """A tensor that belongs to no quantized layer."""
        return self.files.get(name)
