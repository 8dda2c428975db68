"""Known decoders of Transformers, as data: the parts of a loaded model, or the reasons why it has no decode program.

A family is a row of FAMILIES. Heads, scales, windows and norms are read from the model's modules. Tables of rotary angles are
computed by the model's own rotary embedding, so that every static scaling of positions is supported. Written against
transformers 5.17 to 5.23, models/<family>/modeling_<family>.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.engine.experts import activation_of, block_refusals, shared_linears
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.reference.elementwise import GATES, Gate, gate_reference
from lowbit.nn import QuantLinear
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.fused import AlternatingMLP, GatedMLP, QuantizingNorm
from lowbit.ops.elementwise import EmbeddingTable


@dataclass(frozen=True)
class Names:
    """Paths of a family's modules in the model, its decoder and its layers."""

    decoder: str = "model"
    final_norm: str = "norm"
    positions: str = ""
    """The position embedding; "" for rotary embeddings."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    o: str = "self_attn.o_proj"
    mlp: str = "mlp"
    """The module of the MLP; "" if its parts are modules of the layer."""
    up: str = ""
    """The product before the activation of an MLP without a gate."""
    down: str = "down_proj"


@dataclass(frozen=True)
class Family:
    """Properties of a family's models that their modules do not show.

    norm_offset: added to the weights of norms. scales_embedding: embeddings are multiplied by sqrt(hidden). normalises_deltas:
    norms follow attention and MLP. window_of_model: all layers have the config's window. ropes_by_type: rotary angles depend on
    the type of the layer. layer_norms: norms are torch's LayerNorm, else the family's RMSNorm. experts: end of the class name
    of blocks of experts, which some or all layers have for an MLP. norms_whole_heads: the norms of q and k are of all heads
    together. fixed: (option of the config,
    its only supported value, meaning of any other value).
    """

    name: str
    names: Names = Names()
    norm_offset: float = 0.0
    scales_embedding: bool = False
    normalises_deltas: bool = False
    window_of_model: bool = False
    softcaps_scores: bool = False
    ropes_by_type: bool = False
    layer_norms: bool = False
    experts: str = ""
    norms_whole_heads: bool = False
    fixed: tuple[tuple[str, object, str], ...] = ()


FAMILIES = {
    family.name: family
    for family in (
        Family("Llama"),
        Family("Mistral", window_of_model=True),
        Family("Qwen2"),
        Family("Qwen3"),
        Family("SmolLM3"),
        Family("Mixtral", window_of_model=True, experts="SparseMoeBlock"),
        Family("Qwen2Moe", experts="SparseMoeBlock"),
        Family("Qwen3Moe", experts="SparseMoeBlock"),
        Family(
            "Olmoe",
            experts="SparseMoeBlock",
            norms_whole_heads=True,
            fixed=(("clip_qkv", None, "q, k and v are clamped"),),
        ),
        Family("Phi3", window_of_model=True),
        Family("Gemma", norm_offset=1.0, scales_embedding=True),
        Family("Gemma2", norm_offset=1.0, scales_embedding=True, normalises_deltas=True, softcaps_scores=True),
        Family("Gemma3", norm_offset=1.0, scales_embedding=True, normalises_deltas=True, ropes_by_type=True),
        Family(
            "OPT",
            Names(
                decoder="model.decoder",
                final_norm="final_layer_norm",
                positions="embed_positions",
                norms=("self_attn_layer_norm", "final_layer_norm"),
                o="self_attn.out_proj",
                mlp="",
                up="fc1",
                down="fc2",
            ),
            layer_norms=True,
            fixed=(
                ("do_layer_norm_before", True, "norms stand after attention and MLP, not before"),
                ("_remove_final_layer_norm", False, "no norm stands before the head"),
            ),
        ),
    )
}
"""Families by the prefix of their class names: LlamaForCausalLM, LlamaDecoderLayer, .."""

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Scalings of positions whose angles do not depend on the length of the sequence."""


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The modules and weights of a decoder layer, `block`.

    qkv and gate_up: the modules whose outputs are concatenated to q, k, v and to gate, up; one module if the checkpoint has
    them fused. gate_up is empty after an engine replaced it by an `AlternatingMLP`, and up alone in an MLP without a gate.
    Gammas [H] are weights of norms, with a bias for LayerNorm: `input_gamma` before attention, `mlp_gamma` before the MLP, and
    those after attention and MLP, if any. q_gamma and k_gamma [head_dim] are of each head. window: tokens that a token attends
    to, itself included; 0 for all. rope: index into `Decoder.ropes`. experts: `down` is the whole MLP, a block of experts, and
    gate_up is empty. qk_norms: norms of whole q and k.
    """

    block: nn.Module
    qkv: tuple[nn.Module, ...]
    o: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    input_gamma: Tensor
    input_bias: Tensor | None
    mlp_gamma: Tensor
    mlp_bias: Tensor | None
    after_attention_gamma: Tensor | None
    after_mlp_gamma: Tensor | None
    q_gamma: Tensor | None
    k_gamma: Tensor | None
    window: int
    rope: int
    experts: bool = False
    qk_norms: tuple[nn.Module, ...] = ()

    def modules(self, product: str) -> tuple[nn.Module, ...]:
        """The modules of a product: "qkv", "o", "gate_up" or "down"."""
        found = getattr(self, product)
        return (found,) if isinstance(found, nn.Module) else found


@dataclass(frozen=True, eq=False)
class Decoder:
    """The computation of a decoder, as data; weights stay in the model.

    The embedding is multiplied by `embedding_scale` (in the model's dtype), and the row of its position in `position_table`
    [positions, hidden] is added, if there is one. Each layer computes h += attention(norm(h)), h += mlp(norm(h)), with norms of
    both outputs where the layer has them. Final norm and head follow. Norms are `ops.elementwise.add_norm` with `eps` and
    `norm_offset`. The MLP is down(activation(gate) * up), or down(activation(up)) unless `gated`. `ropes`: float32
    [positions, rotary_dim], cosines of half as many angles, then their sines. Logits x become
    final_softcap * tanh(x / final_softcap), unless final_softcap is 0.
    """

    family: str
    hidden: int
    vocab: int
    positions: int
    eps: float
    norm_offset: float
    embedding: nn.Module
    embedding_scale: float
    position_table: Tensor | None
    layers: tuple[LayerParts, ...]
    final_gamma: Tensor
    final_bias: Tensor | None
    head: nn.Module
    tied: bool
    activation: Gate
    gated: bool
    attention: AttentionShape
    ropes: tuple[Tensor, ...]
    final_softcap: float

    @property
    def table(self) -> Tensor | EmbeddingTable:
        """The embedding as `ops.elementwise.embed_norm` takes it: in 16 or 32 bits, or in 8 bits as stored. Embeddings of other
        bits are dequantized, at each call."""
        module = self.embedding
        if not isinstance(module, QuantEmbedding):
            assert isinstance(module.weight, Tensor)
            return module.weight.detach()
        if str(module.scheme) == "w8a16":
            return EmbeddingTable(module.weight_packed.data, module.weight_scale.data[:, 0].contiguous())
        ids = torch.arange(self.vocab, device=module.weight_packed.device)
        return torch.cat([module(part) for part in ids.split(4096)])

    def attention_shape(self, layer: LayerParts) -> AttentionShape:
        """The attention of a layer: that of the model, with the layer's window."""
        return AttentionShape(**{**vars(self.attention), "window": layer.window})


def recognise(model: nn.Module, positions: int | None = None) -> Decoder | tuple[str, ...]:
    """The decoder of a causal language model of Transformers, or the reasons why it is not supported.

    positions: tokens of a sequence (default: max_position_embeddings of the config).
    """
    family = _family_of(model)
    if family is None:
        known = ", ".join(FAMILIES)
        return (f"{type(model).__name__} is none of the families that a decode program is written for ({known})",)
    causal: Any = model
    positions = int(causal.config.max_position_embeddings) if positions is None else positions
    reasons = tuple(_other_models(causal, family)) or tuple(dict.fromkeys(_reasons(causal, family, positions)))
    return reasons or _decoder(causal, family, positions)


def _family_of(model: nn.Module) -> Family | None:
    """The family of a model whose class is Transformers' own; None for others, such as code of a checkpoint."""
    name = type(model).__name__
    family = FAMILIES.get(name.removesuffix("ForCausalLM"))
    own = type(model).__module__.startswith("transformers.models.")
    return family if own and family is not None and name == f"{family.name}ForCausalLM" else None


def _other_models(model: Any, family: Family) -> Iterator[str]:
    """Reasons why a model differs from its family; such a model may lack the family's modules."""
    for option, known, otherwise in family.fixed:
        if getattr(model.config, option) != known:
            yield f"{otherwise} ({option} is {getattr(model.config, option)})"
    hidden = model.config.hidden_size
    width = getattr(model.get_input_embeddings(), "embedding_dim", hidden)
    if width != hidden:
        yield f"embeddings of {width:,} elements are projected to rows of {hidden:,}"


def _reasons(model: Any, family: Family, positions: int) -> Iterator[str]:
    """Reasons why a model of a known family has no decode program."""
    config = model.config
    if getattr(config, "use_bidirectional_attention", False):
        yield "tokens see those after them (use_bidirectional_attention)"
    yield from _misplaced(model)
    yield from _unknown_positions(model, family, positions)
    final = _final_norm(model, family)
    yield from _wrong_norm("norm", final, family)
    yield from _wrong("embed_tokens", model.get_input_embeddings(), *_embedding_types(family))
    yield from _wrong("lm_head", model.lm_head, *_LINEARS)
    norms = [final]
    for i, layer in enumerate(_layers(model, family)):
        yield from _wrong("a decoder layer", layer, f"{family.name}DecoderLayer")
        yield from _wrong_parts(layer, family)
        kind = _layer_type(config, i)
        if kind not in ("full_attention", "sliding_attention"):
            yield f"layers of {kind}"
        if kind == "sliding_attention" and not getattr(layer.self_attn, "sliding_window", None):
            yield "layers of sliding_attention without a window"
        norms += _norms(layer, family)
    if len({_eps(norm) for norm in norms}) > 1:
        yield f"norms with different epsilons ({', '.join(map(str, sorted({_eps(norm) for norm in norms})))})"
    if _activation(model, family) is None:
        given = [getattr(config, name, None) for name in ("hidden_activation", "hidden_act", "activation_function")]
        yield f"an activation that is neither {' nor '.join(GATES)}: {next(name for name in given if name)}"


_OWN_HOOKS = ("transformers.", "lowbit.")
"""Modules whose hooks a decode program may skip: they record hidden states, or prepare a model on a GPU."""


def _misplaced(model: nn.Module) -> Iterator[str]:
    """Reasons about hooks on modules, and about weights that are not whole on one device."""
    for module in model.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not all(str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS) for hook in hooks):
            yield f"hooks on {type(module).__name__}, which a decode program would not call"
    parameters = [*model.parameters(), *model.buffers()]
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        yield f"weights on several devices ({', '.join(devices)})"
    if "meta" in devices:
        yield "weights that are not loaded"
    if any(hasattr(parameter, "placements") for parameter in parameters):
        yield "weights that are shared out among GPUs"


def _unknown_positions(model: Any, family: Family, positions: int) -> Iterator[str]:
    """Reasons about positions: unknown scalings, or more positions than an embedding has."""
    if family.names.positions:
        yield from _wrong(
            "the embedding of positions", _positions_of(model, family), f"{family.name}LearnedPositionalEmbedding"
        )
        have = model.config.max_position_embeddings
        if positions > have:
            yield f"its embedding has {have:,} positions, {positions:,} are asked for"
        return
    parameters = model.config.rope_parameters
    for rope in parameters.values() if family.ropes_by_type else (parameters,):
        kind = rope.get("rope_type", "default")
        if kind not in STATIC_ROPES:
            known = ", ".join(STATIC_ROPES)
            yield f"positions of type {kind!r}, whose angles may change with the length of a text (known: {known})"


_LINEARS = (nn.Linear, QuantLinear)


def _embedding_types(family: Family) -> tuple[type | str, ...]:
    scaled = (f"{family.name}TextScaledWordEmbedding",) if family.scales_embedding else ()
    return (nn.Embedding, QuantEmbedding, *scaled)


def _wrong(what: str, module: nn.Module, *kinds: type | str) -> Iterator[str]:
    """A reason if a module is of none of the classes `kinds`, given as classes or as names of Transformers' classes."""
    kind = type(module)
    own = kind.__module__.startswith("transformers.models.") and kind.__name__ in kinds
    if not own and kind not in kinds:
        names = [known if isinstance(known, str) else known.__name__ for known in kinds]
        yield f"{what} is a {kind.__name__}, known {'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def _wrong_parts(layer: Any, family: Family) -> Iterator[str]:
    attention, mlp, names = layer.self_attn, _mlp(layer, family), family.names
    yield from _wrong("self_attn", attention, f"{family.name}Attention")
    linears: tuple[nn.Module, ...]
    if _has_experts(layer, family):
        yield from block_refusals(mlp)
        linears = (layer.get_submodule(names.o), *shared_linears(mlp))
    else:
        linears = (layer.get_submodule(names.o), *_gate_up(mlp, family), mlp.get_submodule(names.down))
    if names.mlp and not _has_experts(layer, family):
        yield from _wrong("mlp", mlp, f"{family.name}MLP", GatedMLP, AlternatingMLP)
    for module in (*_qkv(attention), *linears):
        yield from _wrong("a linear layer", module, *_LINEARS)
    for norm in _norms(layer, family):
        yield from _wrong_norm("a norm", norm, family, QuantizingNorm)


def _wrong_norm(what: str, norm: Any, family: Family, *others: type) -> Iterator[str]:
    """A reason if a norm is not the family's; `others`: classes that replace RMSNorms."""
    if not family.layer_norms:
        yield from _wrong(what, norm, f"{family.name}RMSNorm", *others)
        return
    yield from _wrong(what, norm, nn.LayerNorm)
    if isinstance(norm, nn.LayerNorm) and (norm.weight is None or norm.bias is None):
        yield f"{what} is a LayerNorm without weights or without a bias"


def _layers(model: Any, family: Family) -> Sequence[Any]:
    return list(model.get_submodule(family.names.decoder).layers[: model.config.num_hidden_layers])


def _final_norm(model: Any, family: Family) -> Any:
    return model.get_submodule(f"{family.names.decoder}.{family.names.final_norm}")


def _positions_of(model: Any, family: Family) -> Any:
    return model.get_submodule(f"{family.names.decoder}.{family.names.positions}")


def _mlp(layer: Any, family: Family) -> Any:
    return layer.get_submodule(family.names.mlp)


def _has_experts(layer: Any, family: Family) -> bool:
    """True if the MLP of a layer is the family's block of experts."""
    return bool(family.experts) and type(_mlp(layer, family)).__name__ == f"{family.name}{family.experts}"


def _layer_type(config: Any, i: int) -> str:
    """The attention type of a layer, full_attention unless the config has layer_types."""
    types = getattr(config, "layer_types", None)
    return "full_attention" if types is None else str(types[i])


def _qkv(attention: Any) -> tuple[nn.Module, ...]:
    if hasattr(attention, "qkv_proj"):
        return (attention.qkv_proj,)
    return attention.q_proj, attention.k_proj, attention.v_proj


def _gate_up(mlp: Any, family: Family) -> tuple[nn.Module, ...]:
    if isinstance(mlp, AlternatingMLP):
        return ()
    if family.names.up:
        return (mlp.get_submodule(family.names.up),)
    return (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)


def _norms(layer: Any, family: Family) -> list[Any]:
    """All norms of a layer."""
    names = [*family.names.norms]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if family.normalises_deltas else []
    heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    return [*(getattr(layer, name) for name in names), *(norm for norm in heads if norm is not None)]


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _activation(model: Any, family: Family) -> Gate | None:
    """The activation of the MLPs, identified by its values; all MLPs share the config's."""
    mlps = (_mlp(layer, family) for layer in _layers(model, family))
    mlp = next((mlp for mlp in mlps if not isinstance(mlp, GatedMLP)), None)
    if mlp is None:
        return "silu"
    if isinstance(mlp, AlternatingMLP):
        return mlp.function
    if hasattr(mlp, "experts"):
        function = activation_of(mlp)
    else:
        function = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    x = torch.linspace(-8, 8, 65)
    found = [name for name in GATES if torch.allclose(function(x), gate_reference(x, None, name), 1e-4, 1e-6)]
    return found[0] if found else None


def _decoder(model: Any, family: Family, positions: int) -> Decoder:
    config, embedding, layers = model.config, model.get_input_embeddings(), _layers(model, family)
    first, final = layers[0].self_attn, _final_norm(model, family)
    kinds, ropes = _ropes(model, family, positions)
    attention = AttentionShape(
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads // getattr(first, "num_key_value_groups", 1),
        head_dim=first.head_dim,
        scale=float(first.scaling),
        rotary_dim=ropes[0].shape[1],
        softcap=float(first.attn_logit_softcapping or 0.0) if family.softcaps_scores else 0.0,
        norm_eps=_eps(first.q_norm) if hasattr(first, "q_norm") and not family.norms_whole_heads else 0.0,
        norm_offset=family.norm_offset,
    )
    activation = _activation(model, family)
    assert activation is not None
    return Decoder(
        family=family.name,
        hidden=config.hidden_size,
        vocab=embedding.num_embeddings,
        positions=positions,
        eps=_eps(final),
        norm_offset=family.norm_offset,
        embedding=embedding,
        embedding_scale=config.hidden_size**0.5 if family.scales_embedding else 1.0,
        position_table=_position_table(model, family),
        layers=tuple(_parts(model, family, i, kinds.index(_rope_kind(model, family, i))) for i in range(len(layers))),
        final_gamma=final.weight.detach(),
        final_bias=_norm_bias(final),
        head=model.lm_head,
        tied=_weight(model.lm_head).data_ptr() == _weight(embedding).data_ptr(),
        activation=activation,
        gated=not family.names.up,
        attention=attention,
        ropes=ropes,
        final_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight_packed if hasattr(module, "weight_packed") else module.weight
    return weight


def _norm_bias(norm: Any) -> Tensor | None:
    return norm.bias.detach() if isinstance(norm, nn.LayerNorm) else None


def _position_table(model: Any, family: Family) -> Tensor | None:
    """The embedding's rows of positions 0, 1, ..; its first rows are padding."""
    if not family.names.positions:
        return None
    module = _positions_of(model, family)
    table: Tensor = module.weight.detach()[module.offset :]
    return table


def _parts(model: Any, family: Family, i: int, rope: int) -> LayerParts:
    layer, names = _layers(model, family)[i], family.names
    attention, mlp = layer.self_attn, _mlp(layer, family)
    before_attention, after_attention = (layer.get_submodule(name) for name in names.norms)
    window = model.config.sliding_window if family.window_of_model else getattr(attention, "sliding_window", None)
    before_mlp = layer.pre_feedforward_layernorm if family.normalises_deltas else after_attention
    experts, of_heads = _has_experts(layer, family), hasattr(attention, "q_norm") and not family.norms_whole_heads
    return LayerParts(
        block=layer,
        qkv=_qkv(attention),
        o=layer.get_submodule(names.o),
        gate_up=() if experts else _gate_up(mlp, family),
        down=mlp if experts else mlp.get_submodule(names.down),
        input_gamma=before_attention.weight.detach(),
        input_bias=_norm_bias(before_attention),
        mlp_gamma=before_mlp.weight.detach(),
        mlp_bias=_norm_bias(before_mlp),
        after_attention_gamma=after_attention.weight.detach() if family.normalises_deltas else None,
        after_mlp_gamma=layer.post_feedforward_layernorm.weight.detach() if family.normalises_deltas else None,
        q_gamma=attention.q_norm.weight.detach() if of_heads else None,
        k_gamma=attention.k_norm.weight.detach() if of_heads else None,
        window=int(window or 0),
        rope=rope,
        experts=experts,
        qk_norms=(attention.q_norm, attention.k_norm) if family.norms_whole_heads else (),
    )


NOPE = "none"
"""Kind of a layer without rotary embedding (SmolLM3): all angles are 0, with cosines 1 and sines 0."""


def _rope_kind(model: Any, family: Family, i: int) -> str:
    """The kind of rotary angles of a layer."""
    if family.names.positions or not getattr(_layers(model, family)[i].self_attn, "use_rope", True):
        return NOPE
    return _layer_type(model.config, i) if family.ropes_by_type else "default"


def _ropes(model: Any, family: Family, positions: int) -> tuple[list[str], tuple[Tensor, ...]]:
    """The kinds of rotary angles of all layers, and a table of each."""
    kinds = list(dict.fromkeys(_rope_kind(model, family, i) for i in range(len(_layers(model, family)))))
    device = next(model.parameters()).device
    if family.names.positions:
        return kinds, (torch.empty(positions, 0, device=device),)
    rotary = model.model.rotary_emb
    like, ids = torch.empty(0, device=device), torch.arange(positions, device=device)[None]
    tables = []
    for kind in sorted(kinds, key=lambda kind: kind == NOPE):  # the first table gives rotary_dim
        made: Iterable[Tensor] = rotary(like, ids, kind) if family.ropes_by_type else rotary(like, ids)
        cos, sin = (values[0].float().chunk(2, dim=-1)[0] for values in made)
        if kind == NOPE:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        tables.append(torch.cat([cos, sin], dim=-1).contiguous())
    return sorted(kinds, key=lambda kind: kind == NOPE), tuple(tables)
