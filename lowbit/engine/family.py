"""Which decoders of Transformers are known, as data: what a loaded model is made of, or why no program can be made of it.

A family is a row of FAMILIES. What one of its models is, is read from the model's own modules: they say heads, scales, windows
and norms, and their rotary embeddings make the tables of angles, so that every scaling of positions that stays the same is
inherited. Written against transformers 5.17 to 5.23, models/<family>/modeling_<family>.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.reference.decode import GATES, Gate, gate_reference
from lowbit.nn import QuantLinear
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.fused import AlternatingMLP, GatedMLP, QuantizingNorm
from lowbit.ops.decode import EmbeddingTable


@dataclass(frozen=True)
class Family:
    """What the models of a family do that their modules do not say: `norm_offset` is added to the weights of norms,
    `scales_embedding` multiplies embeddings by sqrt(hidden), `normalises_deltas` has a norm after attention and after the MLP,
    `window_of_model` says that every layer has the config's window, `ropes_by_type` that layers of each type turn by angles of
    their own."""

    name: str
    norm_offset: float = 0.0
    scales_embedding: bool = False
    normalises_deltas: bool = False
    window_of_model: bool = False
    softcaps_scores: bool = False
    ropes_by_type: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family("Llama"),
        Family("Mistral", window_of_model=True),
        Family("Qwen2"),
        Family("Qwen3"),
        Family("SmolLM3"),
        Family("Phi3", window_of_model=True),
        Family("Gemma", norm_offset=1.0, scales_embedding=True),
        Family("Gemma2", norm_offset=1.0, scales_embedding=True, normalises_deltas=True, softcaps_scores=True),
        Family("Gemma3", norm_offset=1.0, scales_embedding=True, normalises_deltas=True, ropes_by_type=True),
    )
}
"""By the name that the classes of a family begin with: LlamaForCausalLM, LlamaDecoderLayer, .."""

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Scalings of positions whose angles do not depend on how long a text has become."""


@dataclass(frozen=True, eq=False)
class LayerParts:
    """The modules and weights of a decoder layer, which is `block`.

    qkv and gate_up are the modules whose outputs side by side are q, k, v and gate, up: one where a checkpoint has them fused,
    no gate_up where an engine has made an `AlternatingMLP` of it before.
    The gammas are weights of norms [H], `input_gamma` before attention, `mlp_gamma` before the MLP, the other two of what
    attention and MLP add, if that is normalised; q_gamma and k_gamma [head_dim] of each head. `window`: a token sees so many,
    itself included; 0: all. `rope` is an index into `Decoder.ropes`.
    """

    block: nn.Module
    qkv: tuple[nn.Module, ...]
    o: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    input_gamma: Tensor
    mlp_gamma: Tensor
    after_attention_gamma: Tensor | None
    after_mlp_gamma: Tensor | None
    q_gamma: Tensor | None
    k_gamma: Tensor | None
    window: int
    rope: int

    def modules(self, product: str) -> tuple[nn.Module, ...]:
        """The modules of a product: "qkv", "o", "gate_up" or "down"."""
        found = getattr(self, product)
        return (found,) if isinstance(found, nn.Module) else found


@dataclass(frozen=True, eq=False)
class Decoder:
    """All that a decoder computes, as data; weights stay where the model has them.

    Embedding, times `embedding_scale` rounded to the model's type; per layer h += attention(norm(h)), h += mlp(norm(h)), each
    normalised first where the layer says so; the final norm and the head. Norms are `ops.decode.add_norm` with `eps` and
    `norm_offset`. `ropes` are float32 [positions, rotary_dim], cosines of half as many angles, then their sines. Logits x
    become final_softcap * tanh(x / final_softcap), unless that is 0.
    """

    family: str
    hidden: int
    vocab: int
    positions: int
    eps: float
    norm_offset: float
    embedding: nn.Module
    embedding_scale: float
    layers: tuple[LayerParts, ...]
    final_gamma: Tensor
    head: nn.Module
    tied: bool
    activation: Gate
    attention: AttentionShape
    ropes: tuple[Tensor, ...]
    final_softcap: float

    @property
    def table(self) -> Tensor | EmbeddingTable:
        """The embedding as `ops.decode.embed_rows` takes it: in 16 or 32 bits, or as the 8 bits that it has. An embedding of
        other bits is decoded, anew at each call."""
        module = self.embedding
        if not isinstance(module, QuantEmbedding):
            assert isinstance(module.weight, Tensor)
            return module.weight.detach()
        if str(module.scheme) == "w8a16":
            return EmbeddingTable(module.weight_packed.data, module.weight_scale.data[:, 0].contiguous())
        ids = torch.arange(self.vocab, device=module.weight_packed.device)
        return torch.cat([module(part) for part in ids.split(4096)])

    def attention_shape(self, layer: LayerParts) -> AttentionShape:
        """What attention computes in a layer: that of all layers, with the layer's window."""
        return AttentionShape(**{**vars(self.attention), "window": layer.window})


def recognise(model: nn.Module, positions: int | None = None) -> Decoder | tuple[str, ...]:
    """The decoder of a causal language model of Transformers, or the reasons why it is none that is known.

    `positions`: how many the tables of angles hold; without, as many as the config has (max_position_embeddings).
    """
    family = _family_of(model)
    if family is None:
        known = ", ".join(FAMILIES)
        return (f"{type(model).__name__} is none of the families that a decode program is written for ({known})",)
    reasons = tuple(dict.fromkeys(_reasons(model, family)))
    return reasons or _decoder(model, family, positions)


def _family_of(model: nn.Module) -> Family | None:
    """Its family, if the model's class is Transformers' own: code that a checkpoint brings may do anything."""
    name = type(model).__name__
    family = FAMILIES.get(name.removesuffix("ForCausalLM"))
    own = type(model).__module__.startswith("transformers.models.")
    return family if own and family is not None and name == f"{family.name}ForCausalLM" else None


def _reasons(model: Any, family: Family) -> Iterator[str]:
    """Why a program cannot be made of a model of a known family."""
    config = model.config
    if getattr(config, "use_bidirectional_attention", False):
        yield "tokens see those after them (use_bidirectional_attention)"
    yield from _misplaced(model)
    yield from _unknown_ropes(config.rope_parameters, family)
    inner = model.model
    yield from _wrong("norm", inner.norm, f"{family.name}RMSNorm")
    yield from _wrong("embed_tokens", inner.embed_tokens, *_embedding_types(family))
    yield from _wrong("lm_head", model.lm_head, *_LINEARS)
    norms = [inner.norm]
    for i, layer in enumerate(_layers(model)):
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
    if _activation(model) is None:
        yield f"a gate that is neither {' nor '.join(GATES)}: {getattr(config, 'hidden_activation', None) or config.hidden_act}"


_OWN_HOOKS = ("transformers.", "lowbit.")
"""Whose hooks do nothing when no hidden states are asked for, or prepare a model on a GPU."""


def _misplaced(model: nn.Module) -> Iterator[str]:
    """Modules that others watch, weights elsewhere or in parts."""
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


def _unknown_ropes(parameters: Any, family: Family) -> Iterator[str]:
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
    """Whether a module is of another class than those, given as classes or as names of Transformers' own."""
    kind = type(module)
    own = kind.__module__.startswith("transformers.models.") and kind.__name__ in kinds
    if not own and kind not in kinds:
        names = [known if isinstance(known, str) else known.__name__ for known in kinds]
        yield f"{what} is a {kind.__name__}, known {'is' if len(names) == 1 else 'are'} {', '.join(names)}"


def _wrong_parts(layer: Any, family: Family) -> Iterator[str]:
    attention, mlp = layer.self_attn, layer.mlp
    yield from _wrong("self_attn", attention, f"{family.name}Attention")
    yield from _wrong("mlp", mlp, f"{family.name}MLP", GatedMLP, AlternatingMLP)
    for module in (*_qkv(attention), attention.o_proj, *_gate_up(mlp), mlp.down_proj):
        yield from _wrong("a linear layer", module, *_LINEARS)
    for norm in _norms(layer, family):
        yield from _wrong("a norm", norm, f"{family.name}RMSNorm", QuantizingNorm)


def _layers(model: Any) -> Sequence[Any]:
    return list(model.model.layers[: model.config.num_hidden_layers])


def _layer_type(config: Any, i: int) -> str:
    """What a layer sees, where a family has layers of several types."""
    types = getattr(config, "layer_types", None)
    return "full_attention" if types is None else str(types[i])


def _qkv(attention: Any) -> tuple[nn.Module, ...]:
    if hasattr(attention, "qkv_proj"):
        return (attention.qkv_proj,)
    return attention.q_proj, attention.k_proj, attention.v_proj


def _gate_up(mlp: Any) -> tuple[nn.Module, ...]:
    if isinstance(mlp, AlternatingMLP):
        return ()
    return (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)


def _norms(layer: Any, family: Family) -> list[Any]:
    """All norms of a layer."""
    names = ["input_layernorm", "post_attention_layernorm"]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if family.normalises_deltas else []
    heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    return [*(getattr(layer, name) for name in names), *(norm for norm in heads if norm is not None)]


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _activation(model: Any) -> Gate | None:
    """The function of the gates, by what it computes; they share the config's."""
    mlp = next((layer.mlp for layer in _layers(model) if not isinstance(layer.mlp, GatedMLP)), None)
    if mlp is None:
        return "silu"
    if isinstance(mlp, AlternatingMLP):
        return mlp.function
    function = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    x = torch.linspace(-8, 8, 65)
    found = [name for name in GATES if torch.allclose(function(x), gate_reference(x, torch.ones(65), name), 1e-4, 1e-6)]
    return found[0] if found else None


def _decoder(model: Any, family: Family, positions: int | None) -> Decoder:
    config, inner, layers = model.config, model.model, _layers(model)
    first = layers[0].self_attn
    positions = int(config.max_position_embeddings) if positions is None else positions
    kinds, ropes = _ropes(model, family, positions)
    attention = AttentionShape(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        scale=float(first.scaling),
        rotary_dim=ropes[0].shape[1],
        softcap=float(first.attn_logit_softcapping or 0.0) if family.softcaps_scores else 0.0,
        norm_eps=_eps(first.q_norm) if hasattr(first, "q_norm") else 0.0,
        norm_offset=family.norm_offset,
    )
    activation = _activation(model)
    assert activation is not None
    return Decoder(
        family=family.name,
        hidden=config.hidden_size,
        vocab=inner.embed_tokens.num_embeddings,
        positions=positions,
        eps=_eps(inner.norm),
        norm_offset=family.norm_offset,
        embedding=inner.embed_tokens,
        embedding_scale=config.hidden_size**0.5 if family.scales_embedding else 1.0,
        layers=tuple(_parts(model, family, i, kinds.index(_rope_kind(model, family, i))) for i in range(len(layers))),
        final_gamma=inner.norm.weight.detach(),
        head=model.lm_head,
        tied=_weight(model.lm_head).data_ptr() == _weight(inner.embed_tokens).data_ptr(),
        activation=activation,
        attention=attention,
        ropes=ropes,
        final_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight_packed if hasattr(module, "weight_packed") else module.weight
    return weight


def _parts(model: Any, family: Family, i: int, rope: int) -> LayerParts:
    layer = _layers(model)[i]
    attention, mlp = layer.self_attn, layer.mlp
    window = model.config.sliding_window if family.window_of_model else getattr(attention, "sliding_window", None)
    before_mlp = layer.pre_feedforward_layernorm if family.normalises_deltas else layer.post_attention_layernorm
    return LayerParts(
        block=layer,
        qkv=_qkv(attention),
        o=attention.o_proj,
        gate_up=_gate_up(mlp),
        down=mlp.down_proj,
        input_gamma=layer.input_layernorm.weight.detach(),
        mlp_gamma=before_mlp.weight.detach(),
        after_attention_gamma=layer.post_attention_layernorm.weight.detach() if family.normalises_deltas else None,
        after_mlp_gamma=layer.post_feedforward_layernorm.weight.detach() if family.normalises_deltas else None,
        q_gamma=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        k_gamma=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        window=int(window or 0),
        rope=rope,
    )


NOPE = "none"
"""The angles of a layer that does not turn (SmolLM3): all 0, whose cosines are 1 and sines 0."""


def _rope_kind(model: Any, family: Family, i: int) -> str:
    """Which angles a layer turns by."""
    if not getattr(_layers(model)[i].self_attn, "use_rope", True):
        return NOPE
    return _layer_type(model.config, i) if family.ropes_by_type else "default"


def _ropes(model: Any, family: Family, positions: int) -> tuple[list[str], tuple[Tensor, ...]]:
    """The kinds of angles that layers turn by, and a table of each."""
    kinds = list(dict.fromkeys(_rope_kind(model, family, i) for i in range(len(_layers(model)))))
    rotary = model.model.rotary_emb
    device = next(model.parameters()).device
    like, ids = torch.empty(0, device=device), torch.arange(positions, device=device)[None]
    tables = []
    for kind in sorted(kinds, key=lambda kind: kind == NOPE):  # the first says how many elements turn
        made: Iterable[Tensor] = rotary(like, ids, kind) if family.ropes_by_type else rotary(like, ids)
        cos, sin = (values[0].float().chunk(2, dim=-1)[0] for values in made)
        if kind == NOPE:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        tables.append(torch.cat([cos, sin], dim=-1).contiguous())
    return sorted(kinds, key=lambda kind: kind == NOPE), tuple(tables)
