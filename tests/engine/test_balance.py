"""Keys with biases are balanced before they are quantized. The model computes the same bits, and its keys lose less in few
bits."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lowbit.engine import Engine, Request
from lowbit.engine.balance import _scale_rows, balance_keys, factors_of
from lowbit.engine.recognise import recognise
from lowbit.eval.kv import stored_kv
from lowbit.formats.kv import parse_kv
from lowbit.nn import QuantLinear, convert
from tests.adapters import merged, write_adapter
from tests.tiny import eager_llama

HEADS, KV_HEADS, DIM = 4, 2, 16


def outliers(model):
    """Gives a few channels of k biases that are as large as Qwen2.5's."""
    generator = torch.Generator().manual_seed(3)
    for layer in recognise(model).layers:
        bias = torch.randn(KV_HEADS, DIM, generator=generator)
        bias[:, 3], bias[0, 9] = 60.0, -90.0
        layer.qkv[1].bias.data = bias.flatten().to(model.dtype)
    return model


def qwen2(layers=2):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=HEADS * DIM, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    return outliers(model)


def ids_of(count=60):
    return torch.randint(0, 97, (1, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, kv="16"):
    with stored_kv(model, parse_kv(kv)):
        return model(ids_of(), use_cache=False).logits[0]


@pytest.mark.parametrize("scheme", [None, "w4a16_g32", "w4a16_g32_z", "w4a16_g32_fz", "w8a8", "w6e3m2a16", "w8a16"])
def test_the_model_computes_the_same_bits(scheme):
    model = qwen2()
    if scheme:
        convert(model, scheme)
    before = logits(model)
    keys = model.model.layers[0].self_attn.k_proj
    old = keys.bias.clone()
    assert balance_keys(recognise(model)) == 2 and balance_keys(recognise(model)) == 0, "once"
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    assert isinstance(keys, QuantLinear) == bool(scheme)
    factors = factors_of(keys).view(KV_HEADS, DIM)
    assert torch.equal(factors.log2(), factors.log2().round()) and torch.equal(keys.bias, old * factors.flatten())
    assert torch.equal(factors[:, : DIM // 2], factors[:, DIM // 2 :]), "RoPE rotates both together"
    assert factors[0, 3] <= 0.25 and factors[0, 1] <= 0.25 and factors.median() == 1


def test_few_bits_lose_less():
    model = qwen2()
    plain, wide = copy.deepcopy(model), logits(model)
    for layer in recognise(plain).layers:
        layer.qkv[1].row_factors = torch.ones(KV_HEADS * DIM)  # these factors make the engine take it for balanced
    for kv, ratio in (("int8", 2), ("k8v4", 1)):
        losses = [float((logits(each, kv) - wide).norm()) for each in (plain, model)]
        assert losses[0] > ratio * losses[1] > 0, (kv, losses)


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_an_engine_balances(kv):
    """The engine generates the tokens of the model's forward over keys and values as they are stored. The reference is balanced
    too."""
    model = qwen2()
    reference = copy.deepcopy(model)
    ids = ids_of(20)[0].tolist()
    (sequence,) = Engine(model, max_concurrent=2, max_length=64, kv=kv).generate([Request(ids, 12)])
    assert factors_of(model.model.layers[1].self_attn.q_proj) is not None
    assert factors_of(reference.model.layers[1].self_attn.q_proj) is None
    with torch.no_grad(), stored_kv(reference, parse_kv(kv)):
        for token in sequence.sampled:
            assert int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()) == token.token
            ids.append(token.token)


def test_adapters_of_balanced_layers(tmp_path):
    """An adapter adds to the outputs of q and k before balancing scales them, so the adapter's outputs must be scaled too."""
    model = qwen2()
    folder = write_adapter(tmp_path / "a", model, ("q_proj", "k_proj"), rank=4, seed=2, size=3.0)
    whole = outliers(merged(model, folder))
    engine = Engine(model, max_concurrent=2, max_length=64, kv="int8", lora={"a": folder})
    for layer, own in zip(whole.model.layers, model.model.layers, strict=True):
        for name in ("q_proj", "k_proj"):  # balancing the merged weights would choose other factors
            _scale_rows(layer.self_attn.get_submodule(name), factors_of(own.self_attn.get_submodule(name)))
    other = Engine(whole, max_concurrent=2, max_length=64, kv="int8")
    found = []
    for each, adapter in ((engine, "a"), (other, None), (engine, None)):
        (sequence,) = each.generate([Request(ids_of(20)[0].tolist(), 16, adapter=adapter)])
        found.append([token.token for token in sequence.sampled])
    assert found[0] == found[1] != found[2]


def test_what_is_left_alone():
    assert balance_keys(recognise(eager_llama())) == 0, "no biases"
    model = qwen2()
    convert(model, "fp8_block")
    assert balance_keys(recognise(model)) == 0, "rows share scales"
    Engine(model := qwen2(), max_concurrent=1, max_length=64)
    assert factors_of(model.model.layers[0].self_attn.k_proj) is None, "16 bits need none"


def test_positions_that_are_not_rotated():
    """OPT has biases and no RoPE. Without RoPE each channel of k has its own factor, not one for each rotated pair."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=97, hidden_size=KV_HEADS * DIM, ffn_dim=64, num_hidden_layers=1, num_attention_heads=KV_HEADS,
        max_position_embeddings=128, word_embed_proj_dim=KV_HEADS * DIM,
    )  # fmt: skip
    model = outliers(OPTForCausalLM(config).eval())
    before = logits(model)
    assert balance_keys(recognise(model)) == 1
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    factors = factors_of(recognise(model).layers[0].qkv[1]).view(KV_HEADS, DIM)
    assert factors[0, 3] <= 0.25 and factors[0, 11] == 1
