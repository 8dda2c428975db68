"""A stored model, resolved once: its path, the tool that quantized it, and readers of its config and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lowbit.checkpoint import CheckpointError, CheckpointReader, ForeignReader, Manifest, expected_tensors
from lowbit.checkpoint.detect import SCHEMAS, quantization_of
from lowbit.checkpoint.experts import ExpertEntry, ExpertTensors
from lowbit.checkpoint.foreign import ForeignEntry
from lowbit.checkpoint.gguf import GgufReader, gguf_file
from lowbit.checkpoint.gptq import Gptq
from lowbit.checkpoint.reader import read_json
from lowbit.formats import QuantTensor
from lowbit.models.expert_names import ExpertModule, expert_modules
from lowbit.models.gguf import GgufLayerReader
from lowbit.models.skeleton import build, config_of
from lowbit.models.tensorrt_llm import WEIGHTS, TensorrtLlmReader, is_tensorrt_llm
from lowbit.sources import FILES, local_model

_ONLY_DEQUANTIZED = "bitsandbytes"
"""A tool whose weights no scheme represents; Transformers loads its checkpoints with that tool's package."""


class LayerReader(Protocol):
    """Reads the layers of a quantized checkpoint under the names of Transformers' model.

    entries: quantized layers by name. experts: expert layers by name; experts that the files hold one by one are in `entries`
    and in `plain` (their biases) too. plain: names of all other tensors.
    """

    entries: dict[str, ForeignEntry]
    experts: dict[str, ExpertEntry]
    plain: list[str]

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor: ...

    def expert_layer(self, name: str, device: torch.device | str = "cpu") -> ExpertTensors: ...

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def get(self, name: str) -> Tensor: ...


class _LowbitLayerReader:
    """Reads one of lowbit's own checkpoints."""

    def __init__(self, reader: CheckpointReader, manifest: Manifest, modules: Mapping[str, ExpertModule]) -> None:
        self._reader, self._modules = reader, modules
        entries = {name: ForeignEntry(entry.shape, entry.scheme) for name, entry in manifest.layers.items()}
        count = {name: entry.experts for name, entry in manifest.layers.items() if entry.experts}
        self.entries = {name: entry for name, entry in entries.items() if name not in count}
        self.experts = {
            name: ExpertEntry(count[module.first], entries[module.first], entries[module.down], module.gated, module.biased)
            for name, module in modules.items()
            if module.first in count and module.down in count
        }
        quantized = {tensor for name, entry in manifest.layers.items() for tensor in expected_tensors(name, entry)}
        quantized |= {f"{part}_bias" for name in self.experts for part in (modules[name].first, modules[name].down)}
        self.plain = [name for name in reader.names() if name not in quantized]

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor:
        return self._reader.layer(name).to(device)

    def expert_layer(self, name: str, device: torch.device | str = "cpu") -> ExpertTensors:
        module = self._modules[name]
        first, down = (self._reader.experts(part).to(device) for part in (module.first, module.down))
        every = range(first.experts)
        biases = [
            self._reader.get(f"{part}_bias").to(device) if module.biased else None for part in (module.first, module.down)
        ]
        experts = ExpertTensors(tuple(map(first.expert, every)), tuple(map(down.expert, every)), biases[0], biases[1])
        return experts.gate_first() if module.alternating else experts

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._reader.layer(name).dequantize(dtype)

    def get(self, name: str) -> Tensor:
        return self._reader.get(name)


@dataclass
class QuantizedCheckpoint:
    """A quantized checkpoint with checked headers.

    tool: the tool that wrote the files. config: the model's configuration without quantization. stated: config.json without
    quantization. model: on the meta device. gptq_v2: for GPTQ files, whether they are of version 2. notes: lines about fields
    that the files lack.
    """

    path: Path
    tool: str
    reader: LayerReader
    config: PreTrainedConfig
    stated: dict[str, Any]
    model: PreTrainedModel
    gptq_v2: bool | None = None
    notes: list[str] = field(default_factory=list)

    def tokenizer_folder(self, scratch: Path) -> Path:
        """Returns the folder with the tokenizer's files: the checkpoint's, or `scratch` after writing a GGUF file's there."""
        if not isinstance(self.reader, GgufLayerReader):
            return self.path
        self.reader.save_tokenizer(scratch)
        return scratch


@dataclass(frozen=True)
class ResolvedSource:
    """A model on disk: the result of `resolve`.

    name: as given. path: its folder or GGUF file. gguf: the GGUF file, if it is one. fields: config.json, {} for a GGUF file.
    tool: the tool that quantized it, according to its files (lowbit, gptq, gguf, tensorrt-llm, ..); None for an unquantized
    model.
    """

    name: str
    path: Path
    gguf: Path | None
    fields: Mapping[str, Any]
    tool: str | None

    @property
    def is_foreign(self) -> bool:
        """True for a checkpoint of another tool whose weights have schemes here, so that lowbit reads its layers."""
        ours = self.tool in SCHEMAS and self.tool != _ONLY_DEQUANTIZED
        return ours or self.gguf is not None or self.tool == "tensorrt-llm"

    @property
    def quantized_to(self) -> str | None:
        """The scheme of a lowbit checkpoint, the tool of another quantized one; None for a model that is not quantized."""
        stated = self.fields.get("quantization_config")
        return str(stated["scheme"]) if isinstance(stated, Mapping) and "scheme" in stated else self.tool

    def require_unquantized(self, advice: str) -> None:
        """Raises CheckpointError for a quantized model; `advice` ends the message."""
        if self.tool is not None:
            raise CheckpointError(f"{self.path}: is quantized already ({self.tool}); {advice}")

    def reader(self) -> CheckpointReader:
        """Returns a reader of the folder's safetensors files."""
        return CheckpointReader(self.path, **({"weights": WEIGHTS} if self.tool == "tensorrt-llm" else {}))

    def stored_bytes(self) -> int:
        """Returns the bytes of all tensors in the files."""
        if self.gguf is not None:
            return sum(tensor.end - tensor.begin for tensor in GgufReader(self.gguf).tensors.values())
        with self.reader() as reader:
            return sum(info.end - info.begin for info in map(reader.info, reader.names()))

    def open_quantized(self) -> QuantizedCheckpoint:
        """Opens a quantized checkpoint; raises CheckpointError for other models, unsupported tools and damaged headers."""
        if self.gguf is not None:
            gguf = GgufLayerReader(self.gguf)
            return self._translated(gguf, gguf.config(), self.gguf)
        if self.tool == "tensorrt-llm":
            tensorrt = TensorrtLlmReader(self.path)
            return self._translated(tensorrt, tensorrt.model_config, self.path / "config.json", tensorrt.notes)
        files = CheckpointReader(self.path)
        tool, v2 = "lowbit", None
        config = config_of(self.path)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = build(config, self.path / "config.json")
        if files.manifest is not None:
            reader: LayerReader = _LowbitLayerReader(files, files.manifest, expert_modules(model))
        else:
            foreign = ForeignReader(self.path)
            reader, tool = foreign, foreign.schema.name
            v2 = foreign.schema.v2 if isinstance(foreign.schema, Gptq) else None
        stated = {key: value for key, value in files.config.items() if key != "quantization_config"}
        return QuantizedCheckpoint(self.path, tool, reader, config, stated, model, v2)

    def _translated(
        self, reader: LayerReader, config: PreTrainedConfig, where: Path, notes: list[str] | None = None
    ) -> QuantizedCheckpoint:
        """Returns a checkpoint whose configuration is translated from another format than config.json."""
        assert self.tool is not None
        model = build(config, where)
        config.architectures = [type(model).__name__]
        return QuantizedCheckpoint(self.path, self.tool, reader, config, config.to_dict(), model, notes=list(notes or []))


def resolve(source: str | Path | ResolvedSource, files: tuple[str, ...] = FILES, *, quantized: bool = False) -> ResolvedSource:
    """Returns the model of a path or of a name on the hub (`sources.local_model`) with the tool that quantized it.

    Reads config.json and no tensors. A given ResolvedSource is returned unchanged. Raises CheckpointError if there is no model,
    and for a damaged config.json.
    """
    if isinstance(source, ResolvedSource):
        return source
    path = local_model(source, files, quantized=quantized)
    gguf = gguf_file(path)
    if gguf is not None:
        return ResolvedSource(str(source), path, gguf, {}, "gguf")
    fields = read_json(path / "config.json")
    if (path / WEIGHTS).is_file() and is_tensorrt_llm(fields):
        return ResolvedSource(str(source), path, None, fields, "tensorrt-llm")
    stated = quantization_of(path, fields)
    return ResolvedSource(str(source), path, None, fields, None if stated is None else stated[0])
