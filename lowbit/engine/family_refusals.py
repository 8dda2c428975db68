"""Reasons why a model of a known family has no decode program: its modules, options or weights are not those of the family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lowbit.engine.decoder import DenseMLP
from lowbit.engine.experts import block_refusals, shared_linears
from lowbit.engine.family import Family
from lowbit.engine.family_model import FamilyModel, norm_eps
from lowbit.kernels.reference.elementwise import GATES
from lowbit.nn import QuantLinear
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.fused import AlternatingMLP, GatedMLP, QuantizingNorm
from lowbit.nn.row_linear import RowLinear

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""RoPE scalings whose angles do not depend on the sequence length."""

ATTENTION_TYPES = ("full_attention", "sliding_attention")
LINEARS = (nn.Linear, QuantLinear, RowLinear)

OWN_HOOKS = ("transformers.", "lowbit.")
"""Python modules whose hooks a decode program may skip: such hooks record hidden states, or prepare a model on a GPU."""


def family_refusals(model: FamilyModel, positions: int) -> tuple[str, ...]:
    """Returns the reasons why a model has no decode program for sequences of `positions` tokens; empty if it has one."""
    reasons = tuple(_variants(model))
    if reasons:
        return reasons  # such a model may lack the modules checked below
    found = [*_attention_masks(model), *_hooks(model.model), *_devices(model.model), *_positions(model, positions)]
    found += [*_ends(model), *_layers(model), *_norm_epsilons(model), *_activation(model)]
    return tuple(dict.fromkeys(found))


def _variants(model: FamilyModel) -> Iterator[str]:
    """Yields reasons for config options that make the model different from its family."""
    config = model.config
    for option, known, otherwise in model.family.fixed:
        if getattr(config, option) != known:
            yield f"{otherwise} ({option} is {getattr(config, option)})"
    width = getattr(model.embedding, "embedding_dim", config.hidden_size)
    if width != config.hidden_size:
        yield f"embeddings of {width:,} elements are projected to rows of {config.hidden_size:,}"


def _attention_masks(model: FamilyModel) -> Iterator[str]:
    if getattr(model.config, "use_bidirectional_attention", False):
        yield "tokens see those after them (use_bidirectional_attention)"


def _hooks(model: nn.Module) -> Iterator[str]:
    """Yields reasons for hooks on modules, which a decode program does not call."""
    for module in model.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not all(str(getattr(hook, "__module__", "")).startswith(OWN_HOOKS) for hook in hooks):
            yield f"hooks on {type(module).__name__}, which a decode program would not call"


def _devices(model: nn.Module) -> Iterator[str]:
    """Yields reasons for weights that are not completely on one device."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        yield f"weights on several devices ({', '.join(devices)})"
    if "meta" in devices:
        yield "weights that are not loaded"
    if any(hasattr(tensor, "placements") for tensor in tensors):
        yield "weights that are shared out among GPUs"


def _positions(model: FamilyModel, positions: int) -> Iterator[str]:
    """Yields reasons for unknown RoPE scalings, and for a position embedding with fewer rows than the sequences need."""
    family, config = model.family, model.config
    if family.paths.positions:
        yield from _wrong_class(
            "the embedding of positions", model.position_embedding, f"{family.name}LearnedPositionalEmbedding"
        )
        have = config.max_position_embeddings
        if positions > have:
            yield f"its embedding has {have:,} positions, {positions:,} are asked for"
        return
    parameters = config.rope_parameters
    for rope in parameters.values() if family.ropes_by_type else (parameters,):
        kind = rope.get("rope_type", "default")
        if kind not in STATIC_ROPES:
            known = ", ".join(STATIC_ROPES)
            yield f"positions of type {kind!r}, whose angles may change with the length of a text (known: {known})"


def _ends(model: FamilyModel) -> Iterator[str]:
    """Yields reasons for modules of unknown classes before the first layer and after the last one."""
    family = model.family
    scaled = (f"{family.name}TextScaledWordEmbedding",) if family.scales_embedding else ()
    yield from _wrong_norm("norm", model.final_norm, family)
    yield from _wrong_class("embed_tokens", model.embedding, nn.Embedding, QuantEmbedding, *scaled)
    yield from _wrong_class("lm_head", model.head, *LINEARS)


def _layers(model: FamilyModel) -> Iterator[str]:
    family = model.family
    for i, layer in enumerate(model.layers):
        yield from _wrong_class("a decoder layer", layer, f"{family.name}DecoderLayer")
        yield from _wrong_class("self_attn", layer.self_attn, f"{family.name}Attention")
        for module in (*model.qkv(layer), model.o(layer)):
            yield from _wrong_class("a linear layer", module, *LINEARS)
        yield from _mlp(model, layer)
        for norm in model.norms(layer):
            yield from _wrong_norm("a norm", norm, family, QuantizingNorm)
        kind = model.attention_type(i)
        if kind not in ATTENTION_TYPES:
            yield f"layers of {kind}"
        if kind == "sliding_attention" and not getattr(layer.self_attn, "sliding_window", None):
            yield "layers of sliding_attention without a window"


def _mlp(model: FamilyModel, layer: Any) -> Iterator[str]:
    """Yields reasons for modules of a dense MLP that are of unknown classes, and for experts that have no kernel."""
    if model.has_experts(layer):
        block = model.mlp_module(layer)
        yield from block_refusals(block)
        linears = shared_linears(block)
        for module in linears:
            yield from _wrong_class("a linear layer", module, *LINEARS)
        if linears:
            yield from _wrong_class("the gate of the shared expert", block.shared_expert_gate, *LINEARS)
        return
    if model.family.paths.mlp.module:
        yield from _wrong_class("mlp", model.mlp_module(layer), f"{model.family.name}MLP", GatedMLP, AlternatingMLP)
    mlp = model.mlp(layer)
    assert isinstance(mlp, DenseMLP)
    for module in (*mlp.gate_up, mlp.down):
        yield from _wrong_class("a linear layer", module, *LINEARS)


def _norm_epsilons(model: FamilyModel) -> Iterator[str]:
    norms = [model.final_norm, *(norm for layer in model.layers for norm in model.norms(layer))]
    epsilons = sorted({norm_eps(norm) for norm in norms})
    if len(epsilons) > 1:
        yield f"norms with different epsilons ({', '.join(map(str, epsilons))})"


def _activation(model: FamilyModel) -> Iterator[str]:
    if model.activation() is None:
        given = [getattr(model.config, name, None) for name in ("hidden_activation", "hidden_act", "activation_function")]
        yield f"an activation that is neither {' nor '.join(GATES)}: {next(name for name in given if name)}"


def _wrong_class(what: str, module: nn.Module, *known: type | str) -> Iterator[str]:
    """Yields a reason if a module has none of the `known` classes, given as classes or as names of Transformers' classes."""
    kind = type(module)
    transformers_own = kind.__module__.startswith("transformers.models.") and kind.__name__ in known
    if not transformers_own and kind not in known:
        names = [each if isinstance(each, str) else each.__name__ for each in known]
        yield f"{what} is a {kind.__name__}, known {'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def _wrong_norm(what: str, norm: Any, family: Family, *replacements: type) -> Iterator[str]:
    """Yields a reason if a norm is not the family's; `replacements`: classes that replace RMSNorms."""
    if not family.layer_norms:
        yield from _wrong_class(what, norm, f"{family.name}RMSNorm", *replacements)
        return
    yield from _wrong_class(what, norm, nn.LayerNorm)
    if isinstance(norm, nn.LayerNorm) and (norm.weight is None or norm.bias is None):
        yield f"{what} is a LayerNorm without weights or without a bias"
