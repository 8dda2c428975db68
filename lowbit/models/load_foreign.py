"""Loads another tool's quantized checkpoint into a model, layer by layer, without writing files.

Transformers loads the model as one that is quantized while loading, but gets codes instead of 16-bit numbers for quantized
layers. Therefore devices, dtypes, names, ties and buffers are the same as for a lowbit checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from lowbit.checkpoint import CheckpointError, LayerEntry, Manifest
from lowbit.formats import ExpertTensor
from lowbit.models.conversion_targets import NOTHING_QUANTIZED, converted_record, manifest_of
from lowbit.models.hf import LowbitConfig, Quantized
from lowbit.models.layer_importer import LayerImporter
from lowbit.models.source import QuantizedCheckpoint
from lowbit.progress import Progress

logger = logging.get_logger(__name__)

_GENERATION = "generation_config.json"


@dataclass
class _LazyTensor:
    """Stands for a tensor of the files; indexing it, as Transformers does, reads it."""

    read: Callable[[], Tensor | Quantized]

    def __getitem__(self, index: Any) -> Tensor | Quantized:
        return self.read()


def load_foreign(
    checkpoint: QuantizedCheckpoint, *, device: torch.device, dtype: torch.dtype, progress: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns the model of a checkpoint on `device`, computing in `dtype`, and the loading information of Transformers.

    The result equals `convert_checkpoint` followed by from_pretrained; one layer at a time is in memory twice. Logs a warning
    for everything that is not carried over unchanged. Raises CheckpointError for layers without a scheme or a module in the
    model, and for files of another model.
    """
    where, reader, importer = checkpoint.path, checkpoint.reader, LayerImporter(checkpoint)
    importer.require_complete()
    for name in reader.entries:
        if name not in importer.in_experts:
            importer.judge(name)
    for name in reader.experts:
        importer.judge_experts(name)
    if importer.refused:
        advice = "lowbit convert --to dequantized may write 16-bit weights of it, or load it with the tool that made it"
        raise CheckpointError(f"{where}: {importer.refusals()}. {advice}")
    loader = _Loader(importer, device)
    layers = len(loader.modules) + 2 * len(reader.experts)
    with Progress(total=layers, desc=f"{checkpoint.tool} weights", unit="layers", shown=progress) as bar:
        model, info = type(checkpoint.model).from_pretrained(
            None, config=checkpoint.config, state_dict=loader.tensors(bar.update), quantization_config=loader.expected(),
            dtype=dtype, device_map={"": device}, output_loading_info=True, generation_config=_generation(checkpoint),
            trust_remote_code=False,
        )  # fmt: skip
    stated = LowbitConfig.from_dict(loader.manifest().to_dict())
    model.hf_quantizer.quantization_config = model.config.quantization_config = stated
    model.hf_quantizer.pre_quantized = True
    model.name_or_path = model.config.name_or_path = str(where)
    for line in importer.notes():
        logger.warning(f"{where}: {line}")
    return model, info


class _Loader:
    """Provides the layers and tensors of a checkpoint to Transformers and records the entries of the layers."""

    def __init__(self, importer: LayerImporter, device: torch.device) -> None:
        self.importer, self.reader, self.device = importer, importer.reader, device
        linears = [name for name in self.reader.entries if name not in importer.in_experts]
        self.modules = {name: importer.module(name) or name for name in linears}
        self.expert_modules = {name: importer.expert_module(name) for name in self.reader.experts}
        self._experts: dict[str, dict[str, ExpertTensor | Tensor]] = {}
        self._lock = threading.Lock()
        self.entries: dict[str, LayerEntry] = {}

    def expected(self) -> LowbitConfig:
        """Returns the configuration for the quantizer. It lists the modules that get quantized weights, without their schemes,
        which are known when the layers are read."""
        layers = {module: {"shape": list(self.reader.entries[name].shape)} for name, module in self.modules.items()}
        schemes = [scheme.name for name in self.modules if (scheme := self.reader.entries[name].scheme) is not None]
        tied = self.importer.tied(layers)
        for name, module in self.expert_modules.items():
            assert module is not None
            entry = self.reader.experts[name]
            for parameter, each in ((module.first, entry.gate_up), (module.down, entry.down)):
                layers[parameter] = {"shape": [entry.experts, *each.shape]}
                schemes += [] if each.scheme is None else [each.scheme.name]
        if not schemes:
            raise CheckpointError(f"{self.importer.where}: {NOTHING_QUANTIZED}")
        return LowbitConfig(schemes[0], layers=layers, tied=tied)

    def tensors(self, done: Callable[[], object]) -> dict[str, _LazyTensor]:
        """Returns lazy tensors for the whole model by their names in the files; calls `done` after each layer is read."""

        def layer(name: str) -> Quantized:
            q = self.importer.layer(name, self.device)
            self.entries[self.modules[name]] = LayerEntry.of(q)
            done()
            return Quantized(q)

        layers = {f"{name}.weight": _LazyTensor(lambda name=name: layer(name)) for name in self.modules}  # type: ignore[misc]
        for name, module in self.expert_modules.items():
            assert module is not None
            parameters = module.parameters if self.reader.experts[name].biased else (module.first, module.down)
            for parameter in parameters:
                layers[parameter] = _LazyTensor(lambda name=name, own=parameter: self._of_experts(name, own, done))  # type: ignore[misc]
        plain = [name for name in self.reader.plain if not self.importer.left_out(name)]
        return layers | {name: _LazyTensor(lambda name=name: self.importer.plain(name)) for name in plain}  # type: ignore[misc]

    def _of_experts(self, name: str, parameter: str, done: Callable[[], object]) -> Tensor | Quantized:
        """Returns a parameter of an expert layer, which is read with the first of its parameters."""
        with self._lock:
            if parameter not in self._experts.get(name, {}):
                self._experts[name] = self.importer.expert_tensors(name, self.device)
            value = self._experts[name].pop(parameter)
        if isinstance(value, Tensor):
            return value
        self.entries[parameter] = LayerEntry.of(value)
        done()
        return Quantized(value)

    def manifest(self) -> Manifest:
        """Returns the manifest of the layers; all must have been read."""
        experts = [parameter for module in self.expert_modules.values() if module for parameter in (module.first, module.down)]
        entries = {module: self.entries[module] for module in (*self.modules.values(), *experts)}
        stated = manifest_of(entries, self.importer.unquantized_linears(), self.importer.tied(entries))
        return replace(stated, method=converted_record(self.importer.checkpoint.tool))


def _generation(checkpoint: QuantizedCheckpoint) -> GenerationConfig:
    """Returns the generation config from its file, or else from the model's configuration."""
    if (checkpoint.path / _GENERATION).is_file():
        return GenerationConfig.from_pretrained(checkpoint.path)
    return GenerationConfig.from_model_config(dict(checkpoint.stated))
