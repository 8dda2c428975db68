"""Loads another tool's quantized checkpoint into a model, layer by layer, without files in between.

Transformers loads it as a model that is quantized on the way: it asks for each tensor in turn, and here a quantized layer comes
as codes instead of 16-bit numbers. So devices, types, names, ties and buffers are what they are for a checkpoint of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from lowbit.checkpoint import CheckpointError, LayerEntry, Manifest
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

    Its state is that of `convert_checkpoint` to a folder and from_pretrained of that; one layer is in memory beside it in
    another form. What is taken over in another way than the files say is a warning. Raises CheckpointError for layers that have
    no scheme or no place in the model, and for files that are not those of the model.
    """
    where, reader, importer = checkpoint.path, checkpoint.reader, LayerImporter(checkpoint)
    importer.require_complete()
    for name in reader.entries:
        importer.judge(name)
    if importer.refused:
        advice = "lowbit convert --to dequantized may write 16-bit weights of it, or load it with the tool that made it"
        raise CheckpointError(f"{where}: {importer.refusals()}. {advice}")
    loader = _Loader(importer, device)
    layers = len(reader.entries)
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
    """Hands the layers and tensors of a checkpoint to Transformers and remembers what the layers are."""

    def __init__(self, importer: LayerImporter, device: torch.device) -> None:
        self.importer, self.reader, self.device = importer, importer.reader, device
        self.modules = {name: importer.module(name) or name for name in self.reader.entries}
        self.entries: dict[str, LayerEntry] = {}

    def expected(self) -> LowbitConfig:
        """Which modules take up quantized weights, for the quantizer; their schemes show when they are read."""
        layers = {self.modules[name]: {"shape": list(entry.shape)} for name, entry in self.reader.entries.items()}
        schemes = [entry.scheme.name for entry in self.reader.entries.values() if entry.scheme is not None]
        if not schemes:
            raise CheckpointError(f"{self.importer.where}: {NOTHING_QUANTIZED}")
        return LowbitConfig(schemes[0], layers=layers, tied=self.importer.tied(layers))

    def tensors(self, done: Callable[[], object]) -> dict[str, _LazyTensor]:
        """All that the model needs, under the names of the files; `done` is called after each layer."""

        def layer(name: str) -> Quantized:
            q = self.importer.layer(name, self.device)
            self.entries[self.modules[name]] = LayerEntry.of(q)
            done()
            return Quantized(q)

        layers = {f"{name}.weight": _LazyTensor(lambda name=name: layer(name)) for name in self.reader.entries}  # type: ignore[misc]
        plain = [name for name in self.reader.plain if not self.importer.left_out(name)]
        return layers | {name: _LazyTensor(lambda name=name: self.importer.plain(name)) for name in plain}  # type: ignore[misc]

    def manifest(self) -> Manifest:
        """What config.json would state of the layers, once all are read."""
        entries = {module: self.entries[module] for module in self.modules.values()}
        stated = manifest_of(entries, self.importer.unquantized_linears(), self.importer.tied(entries))
        return replace(stated, method=converted_record(self.importer.checkpoint.tool))


def _generation(checkpoint: QuantizedCheckpoint) -> GenerationConfig:
    """How the model generates: what a file of its own says of it, else the model's configuration."""
    if (checkpoint.path / _GENERATION).is_file():
        return GenerationConfig.from_pretrained(checkpoint.path)
    return GenerationConfig.from_model_config(dict(checkpoint.stated))
