"""Reads a model of Transformers as a `Decoder`, or gives the reasons why it has no decode program.

Tables of rotary angles are computed by the model's own rotary embedding. So every scaling of positions is supported, if its
angles do not depend on the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.engine.decoder import Decoder, DecoderLayer
from lowbit.engine.family import FAMILIES, Family
from lowbit.engine.family_model import NO_ROPE, FamilyModel, norm_bias, norm_eps
from lowbit.engine.family_refusals import family_refusals
from lowbit.kernels.choose.attention import AttentionShape


def recognise(model: nn.Module, positions: int | None = None) -> Decoder | tuple[str, ...]:
    """Returns the decoder of a causal language model of Transformers, or the reasons why it is not supported.

    positions: tokens of a sequence (default: max_position_embeddings of the config).
    """
    family = family_of(model)
    if family is None:
        known = ", ".join(FAMILIES)
        return (f"{type(model).__name__} is none of the families that a decode program is written for ({known})",)
    found = FamilyModel(model, family)
    positions = int(found.config.max_position_embeddings) if positions is None else positions
    return family_refusals(found, positions) or _decoder(found, positions)


def family_of(model: nn.Module) -> Family | None:
    """Returns the family of a model whose class is in Transformers; None for other classes, such as a checkpoint's own code."""
    name = type(model).__name__
    family = FAMILIES.get(name.removesuffix("ForCausalLM"))
    own = type(model).__module__.startswith("transformers.models.")
    return family if own and family is not None and name == f"{family.name}ForCausalLM" else None


def _decoder(model: FamilyModel, positions: int) -> Decoder:
    family, config, final_norm = model.family, model.config, model.final_norm
    activation = model.activation()
    assert activation is not None
    ropes = _rope_tables(model, positions)
    rope_types = list(ropes)
    return Decoder(
        family=family.name,
        hidden=config.hidden_size,
        vocab=model.embedding.num_embeddings,
        positions=positions,
        eps=norm_eps(final_norm),
        norm_offset=family.norm_offset,
        embedding=model.embedding,
        embedding_scale=config.hidden_size**0.5 if family.scales_embedding else 1.0,
        position_table=_position_table(model),
        layers=tuple(_layer(model, layer, rope_types.index(model.rope_type(i))) for i, layer in enumerate(model.layers)),
        final_gamma=final_norm.weight.detach(),
        final_bias=norm_bias(final_norm),
        head=model.head,
        tied=_weight(model.head).data_ptr() == _weight(model.embedding).data_ptr(),
        activation=activation,
        gated=family.paths.mlp.gated,
        attention=_attention_shape(model, rotary_dim=ropes[rope_types[0]].shape[1]),
        ropes=tuple(ropes.values()),
        final_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def _layer(model: FamilyModel, layer: Any, rope: int) -> DecoderLayer:
    family, attention = model.family, layer.self_attn
    before_attention, after_attention = (layer.get_submodule(path) for path in family.paths.norms)
    before_mlp = layer.pre_feedforward_layernorm if family.normalises_deltas else after_attention
    of_heads = hasattr(attention, "q_norm") and not family.norms_whole_heads
    window = model.config.sliding_window if family.window_of_model else getattr(attention, "sliding_window", None)
    return DecoderLayer(
        module=layer,
        qkv=model.qkv(layer),
        o=model.o(layer),
        mlp=model.mlp(layer),
        input_gamma=before_attention.weight.detach(),
        input_bias=norm_bias(before_attention),
        mlp_gamma=before_mlp.weight.detach(),
        mlp_bias=norm_bias(before_mlp),
        after_attention_gamma=after_attention.weight.detach() if family.normalises_deltas else None,
        after_mlp_gamma=layer.post_feedforward_layernorm.weight.detach() if family.normalises_deltas else None,
        q_gamma=attention.q_norm.weight.detach() if of_heads else None,
        k_gamma=attention.k_norm.weight.detach() if of_heads else None,
        window=int(window or 0),
        rope=rope,
        qk_norms=(attention.q_norm, attention.k_norm) if family.norms_whole_heads else (),
        sinks=attention.sinks.detach() if hasattr(attention, "sinks") else None,
    )


def _attention_shape(model: FamilyModel, rotary_dim: int) -> AttentionShape:
    """Returns the attention shape of all layers, without their windows."""
    family, first = model.family, model.layers[0].self_attn
    heads = model.config.num_attention_heads
    return AttentionShape(
        heads=heads,
        kv_heads=heads // getattr(first, "num_key_value_groups", 1),
        head_dim=first.head_dim,
        scale=float(first.scaling),
        rotary_dim=rotary_dim,
        softcap=float(first.attn_logit_softcapping or 0.0) if family.softcaps_scores else 0.0,
        norm_eps=norm_eps(first.q_norm) if hasattr(first, "q_norm") and not family.norms_whole_heads else 0.0,
        norm_offset=family.norm_offset,
    )


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight_packed if hasattr(module, "weight_packed") else module.weight
    return weight


def _position_table(model: FamilyModel) -> Tensor | None:
    """Returns the position embedding's rows from position 0 on, without its padding rows."""
    if not model.family.paths.positions:
        return None
    module = model.position_embedding
    table: Tensor = module.weight.detach()[module.offset :]
    return table


def _rope_tables(model: FamilyModel, positions: int) -> dict[str, Tensor]:
    """Returns the table [positions, rotary_dim] of each rotary type of the layers; NO_ROPE is last."""
    types = dict.fromkeys(model.rope_type(i) for i in range(len(model.layers)))
    return {kind: _rope_table(model, kind, positions) for kind in sorted(types, key=lambda kind: kind == NO_ROPE)}


def _rope_table(model: FamilyModel, kind: str, positions: int) -> Tensor:
    device = next(model.model.parameters()).device
    if model.family.paths.positions:
        return torch.empty(positions, 0, device=device)
    ids, like = torch.arange(positions, device=device)[None], torch.empty(0, device=device)
    types = (kind,) if model.family.ropes_by_type else ()
    values: Iterable[Tensor] = model.model.model.rotary_emb(like, ids, *types)
    cos, sin = (each[0].float() for each in values)
    if not model.family.single_angles:
        cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
    if kind == NO_ROPE:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    return torch.cat([cos, sin], dim=-1).contiguous()
