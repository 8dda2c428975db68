"""Keys and values in few bits under Transformers' forward. Attention reads what the engine's pages hold, and nothing else
changes."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)

from lowbit.engine import Engine, Request
from lowbit.eval.kv import stored_kv
from lowbit.formats.kv import dequantize_rows, parse_kv, quantize_rows
from tests.tiny import eager_llama

NARROW = ("fp8", "int8", "int4", "k8v4")


def ids_of(count, seed=0):
    return torch.randint(3, 160, (count,), generator=torch.Generator().manual_seed(seed))


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "lowbit"])
@pytest.mark.parametrize("kv", NARROW)
def test_attention_reads_stored_rows(implementation, kv):
    """Attention of a layer equals its own function over quantized rows. Afterwards the model computes as before."""
    model, scheme, ids = eager_llama(), parse_kv(kv), ids_of(40)
    model.set_attn_implementation(implementation)
    before, seen = logits_of(model, ids), []

    def look(module, args, options, output):
        seen.append(output[0])

    hooks = [layer.self_attn.register_forward_hook(look, with_kwargs=True) for layer in model.model.layers]
    with stored_kv(model, scheme):
        inside = logits_of(model, ids)
    hooks[0].remove(), hooks[1].remove()
    attention, x = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm(model.model.embed_tokens(ids[None]))
    q, k, v = (layer(x).view(1, 40, -1, 16).transpose(1, 2) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    cos, sin = model.model.rotary_emb(x, torch.arange(40)[None])
    half = lambda t: torch.cat((-t[..., 8:], t[..., :8]), -1)  # noqa: E731
    q, k = (t * cos[:, None] + half(t) * sin[:, None] for t in (q, k))
    k, v = (dequantize_rows(*quantize_rows(t, f), f, t.dtype) for t, f in ((k, scheme.k), (v, scheme.v)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    expected = expected.transpose(1, 2).flatten(2) @ attention.o_proj.weight.double().T
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(inside, before) and torch.equal(logits_of(model, ids), before)
    assert model.config._attn_implementation == implementation


def test_sixteen_bits_change_nothing():
    model, ids = eager_llama(), ids_of(40)
    before = logits_of(model, ids)
    with stored_kv(model, parse_kv("16")):
        assert torch.equal(logits_of(model, ids), before) and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kv", NARROW)
def test_the_engine_generates_the_most_likely_tokens(kv):
    """An engine with pages of the format computes a prompt and steps. Its greedy tokens are those of the forward over stored
    rows."""
    model, scheme = eager_llama(), parse_kv(kv)
    prompts = [ids_of(count, count) for count in (1, 30, 150)]
    sequences = Engine(eager_llama(), max_concurrent=3, cache_bytes=1 << 24, kv=kv).generate(
        [Request(prompt.tolist(), 20) for prompt in prompts]
    )
    for prompt, sequence in zip(prompts, sequences, strict=True):
        tokens = torch.tensor([sampled.token for sampled in sequence.sampled])
        whole = torch.cat([prompt, tokens])
        with stored_kv(model, scheme):
            narrow = logits_of(model, whole)[len(prompt) - 1 : -1]
        # Another order of sums changes a code now and then. The logits then change by more than rounding.
        chosen = narrow.gather(1, tokens[:, None])[:, 0]
        assert (narrow.amax(1) - chosen < 0.02 * narrow.abs().amax(1)).all()
        assert (narrow.argmax(1) == tokens).float().mean() >= 0.95


def test_generate_reads_stored_rows_of_its_cache():
    """Greedy tokens of Transformers' `generate`, which uses a cache, are those of whole forwards without a cache."""
    model, prompt = eager_llama(), ids_of(20)
    with stored_kv(model, parse_kv("int4")):
        made = model.generate(
            prompt[None], attention_mask=torch.ones(1, 20, dtype=torch.long), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )[0]  # fmt: skip
        assert torch.equal(logits_of(model, made)[19:-1].argmax(1), made[20:])


def test_more_bits_are_nearer():
    model, ids = eager_llama(), ids_of(100)
    before, errors = logits_of(model, ids), {}
    for kv in ("int4", "int8", "fp8", "k8v4", "k4v8"):
        with stored_kv(model, parse_kv(kv)):
            errors[kv] = float((logits_of(model, ids) - before).norm())
    assert errors["int8"] < errors["fp8"] < errors["int4"]
    assert errors["int8"] < min(errors["k8v4"], errors["k4v8"])


def test_schemes_are_told_apart():
    """Schemes that differ only in rotation are distinguished, in any order of use."""
    model, ids = eager_llama(), ids_of(30)
    found = []
    for kv in ("int4", "int4-plain", "int4"):
        with stored_kv(model, parse_kv(kv)):
            found.append(logits_of(model, ids))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_a_model_with_its_own_eager_attention():
    """gpt-oss has sinks, which only its eager attention computes."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=160, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
    )  # fmt: skip
    model, ids = GptOssForCausalLM(config).eval(), ids_of(20)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    before = logits_of(model, ids)
    with stored_kv(model, parse_kv("int8")):
        near = logits_of(model, ids)
    assert 0 < float((near - before).norm()) < 0.05 * float(before.norm())


def test_a_model_without_the_interface_is_refused():
    model = BloomForCausalLM(BloomConfig(vocab_size=160, hidden_size=32, n_layer=1, n_head=2)).eval()
    with (
        pytest.raises(ValueError, match="BloomForCausalLM: its attention does not go through .*; measure it with 16 bits"),
        stored_kv(model, parse_kv("int8")),
    ):
        pass


def test_an_encoder_decoder_is_refused():
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=160, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                   decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    )  # fmt: skip
    with (
        pytest.raises(ValueError, match="encoder-decoders have keys and values in 16 bits"),
        stored_kv(model, parse_kv("int8")),
    ):
        pass
