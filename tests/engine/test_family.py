"""Decoders as data: a forward that is written from the data alone has the model's logits. Unsupported models get a reason."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from lowbit import convert
from lowbit.engine.check import difference_to, kernel_refusals
from lowbit.engine.decoder import Decoder, ExpertsMLP
from lowbit.engine.family import FAMILIES
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.models.cpu import plan_on_cpu
from lowbit.models.fuse import fuse_quantization, prepare_on_gpu
from lowbit.nn.fused import GatedMLP, QuantizingNorm
from lowbit.nn.row_linear import RowLinear
from lowbit.ops.elementwise import EmbeddingTable

SIZES = {
    "vocab_size": 97, "hidden_size": 36, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

CASES = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 6}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": ("Llama", {"hidden_act": "relu"}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"head_dim": 6}),
    "qwen2-window": (
        "Qwen2",
        {"head_dim": 6, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": YARN},
    ),
    "qwen3": ("Qwen3", {"attention_bias": True}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "smollm3": ("SmolLM3", {"head_dim": 6, "no_rope_layers": [0, 1, 1], "tie_word_embeddings": True}),
    "smollm3-window": (
        "SmolLM3", {"head_dim": 6, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 4}
    ),
    "phi3": ("Phi3", {}),
    "phi3-partial": (
        "Phi3",
        {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4}},
    ),
    "gemma": ("Gemma", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": (
        "Gemma2", {"sliding_window": 5, "layer_types": TYPES, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}
    ),
    "gemma2-untied": (
        "Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False}
    ),
    "gemma3": (
        "Gemma3", {"sliding_window": 5, "layer_types": TYPES, "query_pre_attn_scalar": 7, "final_logit_softcapping": 1.5}
    ),
    "gemma3-scaled": (
        "Gemma3",
        {
            "layer_types": TYPES,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "qwen2-moe": ("Qwen2Moe", {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}),
    "olmoe": ("Olmoe", {"head_dim": 6, "num_experts": 5, "num_experts_per_tok": 3}),
    "gpt-oss": ("GptOss", {"num_local_experts": 5, "sliding_window": 5, "rope_parameters": YARN, "swiglu_limit": 2.0}),
    "gpt-oss-no-biases": (
        "GptOss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": False, "layer_types": ["full_attention"] * 3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "opt": ("OPT", {"ffn_dim": 56}),
    "opt-untied": ("OPT", {"ffn_dim": 40, "tie_word_embeddings": False, "enable_bias": False}),
    "opt-gelu": ("OPT", {"ffn_dim": 56, "activation_function": "gelu_new"}),
}  # fmt: skip


def tiny(family, **options):
    """Returns a random model of a family. Norms and biases are random too, since they start as constants. Attention is eager:
    under SDPA, transformers 5.17 leaves out the soft cap of Gemma 2's scores."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config(**{**SIZES, **options}, attn_implementation="eager"))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 0.5, std=0.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def norm(x, gamma, eps, offset, bias=None):
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma + bias
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + gamma)


def attend(qkv, layer, decoder):
    shape, (length, _) = decoder.attention_shape(layer), qkv.shape
    heads = qkv.view(length, -1, shape.head_dim)
    q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    if layer.q_gamma is not None:
        q, k = (norm(x, g, shape.norm_eps, shape.norm_offset) for x, g in ((q, layer.q_gamma), (k, layer.k_gamma)))
    cos, sin = decoder.ropes[layer.rope][:length, None].chunk(2, dim=-1)
    half = shape.rotary_dim // 2

    def turned(x):
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)

    k, v = (t.repeat_interleave(shape.group, dim=1) for t in (turned(k), v))
    scores = torch.einsum("qhd,khd->hqk", turned(q), k) * shape.scale
    scores = shape.softcap * (scores / shape.softcap).tanh() if shape.softcap else scores
    at = torch.arange(length)
    seen = at[None] <= at[:, None]
    seen &= at[None] > at[:, None] - layer.window if layer.window else seen
    scores = scores.masked_fill(~seen, float("-inf"))
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks[:, None, None].expand(-1, length, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def forward(decoder: Decoder, tokens):
    """Returns logits [T, V] that are computed from the data. Only products use the model's modules."""

    def product(layer, name, x):
        return torch.cat([module(x) for module in layer.modules(name)], dim=-1)

    def normed(x, gamma, bias=None):
        return norm(x, gamma, decoder.eps, decoder.norm_offset, bias)

    act = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }[decoder.activation]
    h = decoder.table[tokens] * decoder.embedding_scale
    h = h if decoder.position_table is None else h + decoder.position_table[: len(tokens)]
    for layer in decoder.layers:
        x = normed(h, layer.input_gamma, layer.input_bias)
        qkv = product(layer, "qkv", x)
        if layer.qk_norms:
            parts = qkv.split([module.out_features for module in layer.modules("qkv")], dim=-1)
            gammas = [module.weight for module in layer.qk_norms]
            qkv = torch.cat([*(normed(part, gamma) for part, gamma in zip(parts, gammas, strict=False)), parts[2]], dim=-1)
        delta = product(layer, "o", attend(qkv, layer, decoder))
        h = h + (delta if layer.after_attention_gamma is None else normed(delta, layer.after_attention_gamma))
        x = normed(h, layer.mlp_gamma, layer.mlp_bias)
        if isinstance(layer.mlp, ExpertsMLP):
            y = layer.mlp.block(x[None])
            delta = (y[0] if isinstance(y, tuple) else y)[0]
        else:
            up = product(layer, "gate_up", x)
            y = act(up.chunk(2, dim=-1)[0]) * up.chunk(2, dim=-1)[1] if decoder.gated else act(up)
            delta = product(layer, "down", y)
        h = h + (delta if layer.after_mlp_gamma is None else normed(delta, layer.after_mlp_gamma))
    logits = decoder.head(normed(h, decoder.final_gamma, decoder.final_bias))
    return decoder.final_softcap * (logits / decoder.final_softcap).tanh() if decoder.final_softcap else logits


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_decoder_computes_the_model(case):
    family, options = CASES[case]
    model = tiny(family, **options)
    decoder = recognise(model)
    assert isinstance(decoder, Decoder), decoder
    assert (decoder.family, decoder.tied, len(decoder.layers)) == (family, model.config.tie_word_embeddings, 3)
    assert decoder.vocab == 97 and decoder.hidden == 36 and {rope.shape[0] for rope in decoder.ropes} == {64}
    tokens = torch.randint(97, (23,), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=tokens[None], use_cache=False).logits[0]
    got = forward(decoder, tokens)
    assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_every_family_has_a_case():
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", ["llama", "phi3-partial", "gemma3", "opt"])
def test_every_field_of_a_decoder_matters(case):
    """A wrong value in any field changes the logits, so that the comparison above would fail."""
    family, options = CASES[case]
    model = tiny(family, **options)
    decoder = recognise(model)
    assert isinstance(decoder, Decoder)
    tokens = torch.randint(97, (23,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = forward(decoder, tokens)
        changes = {"eps": 0.1, "norm_offset": decoder.norm_offset + 0.1, "embedding_scale": decoder.embedding_scale * 1.1}
        changes["ropes"] = tuple(rope.flip(0) for rope in decoder.ropes)
        if case == "opt":
            changes = {"eps": 10.0, "embedding_scale": 1.1, "final_bias": decoder.final_bias + 1}
            changes["position_table"] = decoder.position_table.roll(1, 0)
        changes["activation"] = "gelu_tanh" if decoder.activation == "silu" else "silu"
        for name, value in changes.items():
            wrong = copy.copy(decoder)
            object.__setattr__(wrong, name, value)
            assert float((forward(wrong, tokens) - right).abs().max()) > 1e-3 * float(right.abs().max()), name
        attention = {"scale": 0.1, "softcap": 3.0} | ({"norm_eps": 0.1, "norm_offset": 0.9} if case == "gemma3" else {})
        for name, value in attention.items():
            wrong = copy.copy(decoder)
            object.__setattr__(wrong, "attention", type(decoder.attention)(**{**vars(decoder.attention), name: value}))
            assert float((forward(wrong, tokens) - right).abs().max()) > 1e-3 * float(right.abs().max()), name


def test_quantized_and_fused_models_are_recognised():
    """Models are still recognised with the norms and MLPs of lowbit.models.fuse, with quantized layers, and with an 8-bit
    embedding."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 128}
    model = tiny("Qwen3", **sizes)
    plain = recognise(model)
    convert(model, "w8a8")
    fuse_quantization(model)
    assert isinstance(model.model.layers[0].input_layernorm, QuantizingNorm)
    assert isinstance(model.model.layers[0].mlp, GatedMLP)
    decoder = recognise(model)
    assert isinstance(decoder, Decoder) and isinstance(plain, Decoder)
    assert decoder.activation == "silu" and decoder.eps == plain.eps
    for mine, other in zip(decoder.layers, plain.layers, strict=True):
        assert torch.equal(mine.input_gamma, other.input_gamma) and torch.equal(mine.mlp_gamma, other.mlp_gamma)
        assert [type(module).__name__ for module in (*mine.qkv, *mine.mlp.gate_up, mine.o, mine.mlp.down)] == [
            "QuantLinear"
        ] * 7
    for scheme, kind in (("w8a16", EmbeddingTable), ("w4a16", torch.Tensor)):
        model = tiny("Llama", **sizes, tie_word_embeddings=True)
        convert(model, scheme, embeddings=True)
        decoder = recognise(model)
        assert isinstance(decoder, Decoder) and decoder.tied and isinstance(decoder.table, kind)
    assert torch.equal(decoder.table, model.model.embed_tokens(torch.arange(97)))


def test_hooks_of_transformers_and_of_this_library_are_accepted():
    """Two kinds of hooks are accepted: those that recorded hidden states, and those of a model that will quantize its inputs on
    a GPU."""
    model = tiny("Llama")
    model(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True)
    convert(model, "w8a8")
    prepare_on_gpu(model)
    assert model._forward_pre_hooks and model.model.layers[0]._forward_hooks
    assert isinstance(recognise(model), Decoder)


def unknown(what):
    if what in ("layer norm", "positions"):
        model, other = tiny("OPT", ffn_dim=56), tiny("Llama")
        if what == "positions":
            model.model.decoder.embed_positions = other.model.embed_tokens
        else:
            model.model.decoder.layers[1].self_attn_layer_norm = other.model.norm
        return model
    model = tiny("Gemma2" if what == "bidirectional" else "Llama")
    layer = model.model.layers[1]
    if what == "class":
        return torch.nn.Linear(3, 3)
    if what == "bidirectional":
        model.config.use_bidirectional_attention = True
    elif what == "linear":
        layer.self_attn.q_proj = torch.nn.Sequential(layer.self_attn.q_proj)
    elif what == "attention":
        layer.self_attn = tiny("Mistral").model.layers[0].self_attn
    elif what == "norm":
        layer.input_layernorm = torch.nn.LayerNorm(36)
    elif what == "eps":
        layer.input_layernorm.variance_epsilon = 0.5
    elif what == "hook":
        layer.mlp.register_forward_hook(lambda *_: None)
    elif what == "meta":
        layer.mlp.to("meta")
    return model


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("class", "Linear is none of the families that a decode program is written for (Llama, Mistral, Qwen2"),
        ("bidirectional", "tokens see those after them"),
        ("linear", "a linear layer is a Sequential, known are Linear, QuantLinear"),
        ("attention", "self_attn is a MistralAttention, known is LlamaAttention"),
        ("norm", "a norm is a LayerNorm, known are LlamaRMSNorm, QuantizingNorm"),
        ("layer norm", "a norm is a LlamaRMSNorm, known is LayerNorm"),
        ("positions", "the embedding of positions is a Embedding, known is OPTLearnedPositionalEmbedding"),
        ("eps", "norms with different epsilons (1e-06, 0.5)"),
        ("hook", "hooks on LlamaMLP"),
        ("meta", "weights on several devices (cpu, meta)"),
    ],
)
def test_reasons_for_unknown_modules(what, reason):
    found = recognise(unknown(what))
    assert isinstance(found, tuple) and any(reason in line for line in found), found
    assert len(found) == len(set(found)), "each reason once"


def test_a_model_loaded_on_a_cpu_is_recognised_after_a_move():
    """On a CPU the 16-bit head is a layer of its own class (models/cpu.py). The model is recognised after a move, although
    elsewhere that class would be refused."""
    model = tiny("Llama").bfloat16()
    convert(model, "w4a16_g32")
    plan_on_cpu(model)
    assert isinstance(model.lm_head, RowLinear)
    assert recognise(model.to("meta")) == ("weights that are not loaded",)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
            "positions of type 'dynamic'",
        ),
        (
            "Phi3",
            {
                "head_dim": 6,
                "original_max_position_embeddings": 16,
                "rope_parameters": {
                    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 3, "long_factor": [2.0] * 3,
                },
            },
            "positions of type 'longrope'",
        ),
        ("Llama", {"hidden_act": "relu2"}, "an activation that is neither silu nor gelu_tanh nor relu: relu2"),
        ("Phi3", {"hidden_act": "gelu"}, "an activation that is neither silu nor gelu_tanh nor relu: gelu"),
        ("OPT", {"activation_function": "tanh"}, "an activation that is neither silu nor gelu_tanh nor relu: tanh"),
        ("OPT", {"layer_norm_elementwise_affine": False}, "a norm is a LayerNorm without weights or without a bias"),
        ("OPT", {"_remove_final_layer_norm": True}, "no norm stands before the head (_remove_final_layer_norm is True)"),
    ],
)  # fmt: skip
def test_reasons_for_unknown_options(family, options, reason):
    found = recognise(tiny(family, **options))
    assert isinstance(found, tuple) and any(reason in line for line in found), found


def test_opt_350m_is_refused():
    """OPT-350m is refused because its norms follow attention and MLP, and its embeddings are half as wide as its layers."""
    assert recognise(tiny("OPT", ffn_dim=56, do_layer_norm_before=False, word_embed_proj_dim=18)) == (
        "norms stand after attention and MLP, not before (do_layer_norm_before is False)",
        "embeddings of 18 elements are projected to rows of 36",
    )


def test_learned_positions_are_limited():
    """Rotary angles can be computed for any position; a position embedding has a fixed number of rows."""
    model = tiny("OPT", ffn_dim=56)
    assert isinstance(recognise(model, 64), Decoder) and isinstance(recognise(tiny("Llama"), 65), Decoder)
    assert recognise(model, 65) == ("its embedding has 64 positions, 65 are asked for",)


@pytest.mark.parametrize("name", ["GPTNeoX", "GraniteMoe", "Cohere", "Granite", "Olmo2", "Bloom"])
def test_other_families_are_refused(name):
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(num_hidden_layers=1))
    assert recognise(model) == (
        f"{name}ForCausalLM is none of the families that a decode program is written for ({', '.join(FAMILIES)})",
    )


def test_classes_from_a_checkpoint_are_refused():
    """A class from a checkpoint is refused even if its name is known, since it may compute anything."""
    model = tiny("Llama")
    stranger = type("LlamaForCausalLM", (type(model),), {"__module__": "transformers_modules.somebody.modeling"})
    model.__class__ = stranger
    assert "none of the families" in recognise(model)[0]


@pytest.mark.parametrize("case", CASES)
def test_the_program_of_every_family_computes_its_model(case):
    family, options = CASES[case]
    model = tiny(family, **options)
    decoder = recognise(model)
    assert isinstance(decoder, Decoder)
    program, difference = difference_to(model, lambda: DecodeProgram(decoder, model.dtype, model.device, batch_invariant=False))
    assert difference < 1e-5 and len(program.layers) == len(decoder.layers)


def test_kernel_refusals():
    """The kernels refuse such a model. On a GPU it runs through its own forward, like a model of an unknown family."""
    fits = recognise(tiny("Llama", head_dim=16))
    assert not isinstance(fits, tuple) and kernel_refusals(fits, torch.float16) == ()
    (dtype,) = kernel_refusals(fits, torch.float32)
    assert dtype == "its kernels compute in fp16 and bf16, the model is in float32"
    narrow = recognise(tiny("Llama", head_dim=10))
    assert not isinstance(narrow, tuple)
    assert kernel_refusals(narrow, torch.bfloat16) == ("heads have 16 to 256 elements, a multiple of 8, got 10",)
