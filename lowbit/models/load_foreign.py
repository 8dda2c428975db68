"""Loads another tool's quantized checkpoint into a model, layer by layer, without files in between.

Transformers loads it as a model that is quantized on the way: it asks for each tensor in turn, and here a quantized layer comes
as codes instead of 16-bit numbers. So devices, types, names, ties and buffers are what they are for a checkpoint of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from lowbit.checkpoint import CheckpointError, LayerEntry, Manifest
from lowbit.models.conversion_targets import NOTHING_QUANTIZED, converted_record, manifest_of
from lowbit.models.hf import LowbitConfig, Quantized
from lowbit.models.source import Contents, Opened
from lowbit.progress import Progress

logger = logging.get_logger(__name__)

_GENERATION = "generation_config.json"


@dataclass
class _WhenAsked:
    """A tensor of the files in the place of one in memory: indexing it reads it."""

    read: Callable[[], Tensor | Quantized]

    def __getitem__(self, index: Any) -> Tensor | Quantized:
        return self.read()


def load_foreign(
    where: Path, opened: Opened, *, device: torch.device, dtype: torch.dtype, progress: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of the checkpoint `opened` at `where`, on `device`, computing in `dtype`, and what Transformers says of the
    loading.

    Its state is that of `convert_checkpoint` to a folder and from_pretrained of that; one layer is in memory beside it in
    another form. What is taken over in another way than the files say is a warning. Raises CheckpointError for layers that have
    no scheme or no place in the model, and for files that are not those of the model.
    """
    contents = Contents(where, opened)
    contents.require_complete()
    for name in opened.source.entries:
        contents.judge(name)
    if contents.refused:
        advice = "lowbit convert --to dequantized may write 16-bit weights of it, or load it with the tool that made it"
        raise CheckpointError(f"{where}: {contents.refusals()}. {advice}")
    loader = _Loader(contents, opened.tool, device)
    layers = len(opened.source.entries)
    with Progress(total=layers, desc=f"{opened.tool} weights", unit="layers", shown=progress) as bar:
        model, info = type(opened.model).from_pretrained(
            None, config=opened.config, state_dict=loader.tensors(bar.update), quantization_config=loader.expected(),
            dtype=dtype, device_map={"": device}, output_loading_info=True, generation_config=_generation(where, opened),
            trust_remote_code=False,
        )  # fmt: skip
    stated = LowbitConfig.from_dict(loader.manifest().to_dict())
    model.hf_quantizer.quantization_config = model.config.quantization_config = stated
    model.hf_quantizer.pre_quantized = True
    model.name_or_path = model.config.name_or_path = str(where)
    for line in contents.notes():
        logger.warning(f"{where}: {line}")
    return model, info


class _Loader:
    """Hands the layers and tensors of a checkpoint to Transformers and remembers what the layers are."""

    def __init__(self, contents: Contents, tool: str, device: torch.device) -> None:
        self.contents, self.source, self.tool, self.device = contents, contents.source, tool, device
        self.modules = {name: contents.module(name) or name for name in self.source.entries}
        self.entries: dict[str, LayerEntry] = {}

    def expected(self) -> LowbitConfig:
        """Which modules take up quantized weights, for the quantizer; their schemes show when they are read."""
        layers = {self.modules[name]: {"shape": list(entry.shape)} for name, entry in self.source.entries.items()}
        schemes = [entry.scheme.name for entry in self.source.entries.values() if entry.scheme is not None]
        if not schemes:
            raise CheckpointError(f"{self.contents.where}: {NOTHING_QUANTIZED}")
        return LowbitConfig(schemes[0], layers=layers, tied=self.contents.tied(layers))

    def tensors(self, done: Callable[[], object]) -> dict[str, _WhenAsked]:
        """All that the model needs, under the names of the files; `done` is called after each layer."""

        def layer(name: str) -> Quantized:
            q = self.contents.layer(name, self.device)
            self.entries[self.modules[name]] = LayerEntry.of(q)
            done()
            return Quantized(q)

        layers = {f"{name}.weight": _WhenAsked(lambda name=name: layer(name)) for name in self.source.entries}  # type: ignore[misc]
        plain = [name for name in self.source.plain if not self.contents.left_out(name)]
        return layers | {name: _WhenAsked(lambda name=name: self.contents.plain(name)) for name in plain}  # type: ignore[misc]

    def manifest(self) -> Manifest:
        """What config.json would state of the layers, once all are read."""
        entries = {module: self.entries[module] for module in self.modules.values()}
        stated = manifest_of(entries, self.contents.kept(), self.contents.tied(entries))
        return replace(stated, method=converted_record(self.tool))


def _generation(where: Path, opened: Opened) -> GenerationConfig:
    """How the model generates: what a file of its own says of it, else the model's configuration."""
    if (where / _GENERATION).is_file():
        return GenerationConfig.from_pretrained(where)
    return GenerationConfig.from_model_config(dict(opened.stated))
