"""Replaces quantized layers of a model in memory by plain ones, and lists the quantized layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lowbit.checkpoint import LayerEntry
from lowbit.models.fuse import undo_fusion
from lowbit.nn.convert import dequantized
from lowbit.nn.experts import QuantExperts
from lowbit.nn.fused import AlternatingMLP
from lowbit.nn.packed import PackedWeight
from lowbit.nn.parameters import PackedParameters
from lowbit.ops.table import UnsupportedProblem


def quantized_layers(model: nn.Module, ties: Mapping[str, str] | None = None) -> tuple[dict[str, LayerEntry], dict[str, str]]:
    """Returns the quantized layers of a model by name, and the modules that share a layer's weights, with that layer.

    Of modules that share weights, the first owns them, unless it is a key of `ties`.
    """
    packed = _packed(model)
    owners: dict[int, str] = {}
    for name in sorted(packed, key=lambda name: name in (ties or {})):
        owners.setdefault(id(packed[name].weight_scale), name)
    tied = {name: owner for name, module in packed.items() if (owner := owners[id(module.weight_scale)]) != name}
    entries = {name: _entry(module) for name, module in packed.items() if name not in tied}
    for name, experts in _experts(model).items():
        for part, module in experts.packed().items():
            parts = module.input_transform.parts
            entries[f"{name}.{part}"] = LayerEntry(module.shape, module.scheme, parts, experts=module.experts)
    return entries, tied


def dequantize_model(model: nn.Module, dtype: torch.dtype | None = None, ties: Mapping[str, str] | None = None) -> nn.Module:
    """Replaces the quantized layers of a Transformers model by plain ones, one at a time, and returns the model.

    The new weights, and all parameters in the model's dtype, get `dtype`; None keeps the model's dtype. ties: as for
    `quantized_layers`. Raises UnsupportedProblem before any change, naming the layer, for weights that are split over devices.
    """
    own = getattr(model, "dtype", torch.bfloat16)
    dtype = own if dtype is None else dtype
    if any(isinstance(module, AlternatingMLP) for module in model.modules()):
        raise UnsupportedProblem("an engine has packed the weights in a form of its own; load the model again to dequantize it")
    for name, packed in ((n, module) for n, module in model.named_modules() if isinstance(module, PackedParameters)):
        if reasons := packed.dequantize_refusals():
            raise UnsupportedProblem(f"{name}: {'; '.join(reasons)}")
    entries, tied = quantized_layers(model, ties)
    undo_fusion(model)
    for name, experts in _experts(model).items():
        model.set_submodule(name, experts.dequantized(dtype))
    for name in (*(name for name, entry in entries.items() if not entry.experts), *tied):
        layer = model.get_submodule(name)
        assert isinstance(layer, PackedWeight)
        shared = model.get_parameter(f"{tied[name]}.weight") if name in tied else None
        model.set_submodule(name, dequantized(layer, dtype, shared))
    for parameter in model.parameters():  # buffers keep their dtype: rotary frequencies in 16 bits give wrong positions
        if parameter.dtype == own:
            parameter.data = parameter.data.to(dtype)
    _restate_ties(model, {*entries, *tied}, tied)
    model.config.dtype = dtype  # type: ignore[union-attr]
    return model


def _restate_ties(model: nn.Module, names: set[str], tied: Mapping[str, str]) -> None:
    """Makes Transformers tie the `weight` of modules that shared packed tensors, and untie weights that no longer share."""
    mapping = dict(getattr(model, "all_tied_weights_keys", None) or {})
    mapping = {target: source for target, source in mapping.items() if target.rpartition(".")[0] not in names}
    mapping |= {f"{name}.weight": f"{owner}.weight" for name, owner in tied.items()}
    model.all_tied_weights_keys = mapping  # type: ignore[assignment]
    model.__dict__.pop("_tied_weights_keys", None)  # set when they shared packed tensors; the class has its own
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        model.config.tie_word_embeddings = False  # type: ignore[union-attr]


def _packed(model: nn.Module) -> dict[str, PackedWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedWeight)}


def _experts(model: nn.Module) -> dict[str, QuantExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantExperts)}


def _entry(module: PackedWeight) -> LayerEntry:
    """Returns the entry of a layer in config.json."""
    rank = 0 if module.weight_down is None else module.weight_down.shape[0]
    return LayerEntry(module.shape, module.scheme, module.input_transform.parts, rank)
