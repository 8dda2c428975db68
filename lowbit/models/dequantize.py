"""Plain layers in the place of quantized ones, in a model in memory, and which layers of a model are quantized."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lowbit.checkpoint import LayerEntry
from lowbit.models.fuse import undo_fusion
from lowbit.nn.convert import dequantized
from lowbit.nn.fused import AlternatingMLP
from lowbit.nn.packed import PackedWeight
from lowbit.ops.table import UnsupportedProblem


def quantized_layers(model: nn.Module, ties: Mapping[str, str] | None = None) -> tuple[dict[str, LayerEntry], dict[str, str]]:
    """The layers of a model that are quantized now, by name, and the modules that share a layer's weights, with that layer. Of
    modules that share, the first has the weights, unless `ties` names it among those that follow."""
    packed = _packed(model)
    owners: dict[int, str] = {}
    for name in sorted(packed, key=lambda name: name in (ties or {})):
        owners.setdefault(id(packed[name].weight_scale), name)
    tied = {name: owner for name, module in packed.items() if (owner := owners[id(module.weight_scale)]) != name}
    return {name: _entry(module) for name, module in packed.items() if name not in tied}, tied


def dequantize_model(model: nn.Module, dtype: torch.dtype | None = None, ties: Mapping[str, str] | None = None) -> nn.Module:
    """The same Transformers model with plain layers in the place of the quantized ones, replaced one at a time; their weights,
    and parameters that had the model's type, are in `dtype`, by default that type. `ties` as for `quantized_layers`.

    Raises UnsupportedProblem, naming the layer and before anything is changed, for weights that are not here as a whole.
    """
    own = getattr(model, "dtype", torch.bfloat16)
    dtype = own if dtype is None else dtype
    if any(isinstance(module, AlternatingMLP) for module in model.modules()):
        raise UnsupportedProblem("an engine has packed the weights in a form of its own; load the model again to dequantize it")
    for name, module in _packed(model).items():
        if reasons := module.dequantize_refusals():
            raise UnsupportedProblem(f"{name}: {'; '.join(reasons)}")
    entries, tied = quantized_layers(model, ties)
    undo_fusion(model)
    for name in (*entries, *tied):
        packed = model.get_submodule(name)
        assert isinstance(packed, PackedWeight)
        shared = model.get_parameter(f"{tied[name]}.weight") if name in tied else None
        model.set_submodule(name, dequantized(packed, dtype, shared))
    for parameter in model.parameters():  # buffers keep their type: rotary frequencies in 16 bits are wrong positions
        if parameter.dtype == own:
            parameter.data = parameter.data.to(dtype)
    _restate_ties(model, {*entries, *tied}, tied)
    model.config.dtype = dtype  # type: ignore[union-attr]
    return model


def _restate_ties(model: nn.Module, names: set[str], tied: Mapping[str, str]) -> None:
    """Has Transformers tie the `weight` of modules that shared packed tensors, and no weights that come apart here."""
    mapping = dict(getattr(model, "all_tied_weights_keys", None) or {})
    mapping = {target: source for target, source in mapping.items() if target.rpartition(".")[0] not in names}
    mapping |= {f"{name}.weight": f"{owner}.weight" for name, owner in tied.items()}
    model.all_tied_weights_keys = mapping  # type: ignore[assignment]
    model.__dict__.pop("_tied_weights_keys", None)  # set where they shared packed tensors; the class has its own
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head is not None and getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        model.config.tie_word_embeddings = False  # type: ignore[union-attr]


def _packed(model: nn.Module) -> dict[str, PackedWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedWeight)}


def _entry(module: PackedWeight) -> LayerEntry:
    """What config.json states of a layer."""
    rank = 0 if module.weight_down is None else module.weight_down.shape[0]
    return LayerEntry(module.shape, module.scheme, module.input_transform.parts, rank)
