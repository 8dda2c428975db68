"""The stored size of a model: bytes of all tensors, and bits per weight of its linear layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from lowbit.checkpoint import CheckpointError, CheckpointReader, expected_tensors
from lowbit.models.source import ResolvedSource, resolve
from lowbit.nn.experts import PackedExperts, expert_weights
from lowbit.nn.packed import PackedWeight


@dataclass(frozen=True)
class Size:
    """The size of a checkpoint. bytes: of all tensors, embeddings and LM head included. linear_weights: number of weights of
    linear layers and experts, without embeddings and LM head. bits_per_weight: mean over these weights, with scales and zeros.

    For another tool's files, bits per weight are those of the layers that lowbit loads from them; None if Transformers loads
    them.
    """

    bytes: int
    linear_weights: int
    bits_per_weight: float | None
    scheme: str | None


def size_of(name: str, model: PreTrainedModel) -> Size | None:
    """Returns the size of the checkpoint from which `model` was loaded: the folder, GGUF file or hub name `name`. None if it
    has no safetensors files.
    """
    source = resolve(name)
    if source.is_foreign:
        return _foreign_size(source, model)
    try:
        with source.reader() as reader:
            return _size(reader, model)
    except CheckpointError:
        return None


def _size(reader: CheckpointReader, model: PreTrainedModel) -> Size:
    total = sum(_bytes(reader, name) for name in reader.names())
    foreign = reader.manifest is None and "quantization_config" in reader.config
    outside = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    layers = reader.manifest.layers if reader.manifest else {}
    weights = stored = 0
    for name, module in model.named_modules():
        if id(module) in outside:
            continue
        if name in layers:
            weights += layers[name].weights
            stored += sum(_bytes(reader, tensor) for tensor in expected_tensors(name, layers[name]))
        elif isinstance(module, nn.Linear):
            weights += module.weight.numel()
            stored += module.weight.numel() * _item_bytes(reader, f"{name}.weight")
        elif (experts := expert_weights(module)) is not None:
            plain = sum(p.numel() for part, p in module.named_parameters(recurse=False) if part in experts.shapes)
            weights += plain
            stored += plain * _item_bytes(reader, f"{name}.{experts.first}")
    scheme = reader.manifest.scheme.name if reader.manifest else None
    return Size(total, weights, None if foreign or not weights else 8 * stored / weights, scheme)


def _foreign_size(source: ResolvedSource, model: PreTrainedModel) -> Size:
    outside = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    weights = held = 0
    schemes: Counter[str] = Counter()
    for module in model.modules():
        if id(module) in outside:
            continue
        if isinstance(module, (PackedWeight, PackedExperts)):
            held += (module.quant_tensor() if isinstance(module, PackedWeight) else module.expert_tensor()).nbytes
            weights += module.count
            schemes[module.scheme.name] += 1
        elif isinstance(module, nn.Linear):
            weights += module.weight.numel()
            held += module.weight.nbytes
    return Size(
        source.stored_bytes(),
        weights,
        8 * held / weights if weights else None,
        next((scheme for scheme, _ in schemes.most_common(1)), None),
    )


def _bytes(reader: CheckpointReader, name: str) -> int:
    info = reader.info(name)
    return info.end - info.begin


def _item_bytes(reader: CheckpointReader, name: str) -> int:
    """Returns the bytes of one weight in the file; 2 if the file has the weight under another name."""
    try:
        return reader.info(name).dtype.itemsize
    except CheckpointError:
        return 2
