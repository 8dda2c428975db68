"""`attn_implementation="lowbit"` against "sdpa": the same results, and no repeated keys and values in a compiled step."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import lowbit.models.hf  # noqa: F401  registers the name
from lowbit.models.attention import grouped_attention


def model(kv_heads=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=kv_heads, max_position_embeddings=128, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prompts():
    """Three prompts, two of which are padded on the left."""
    ids = torch.randint(1, 300, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    return ids * mask, mask


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_is_that_of_sdpa(cache, kv_heads):
    ids, mask = prompts()
    found = {}
    for name in ("sdpa", "lowbit"):
        net = model(kv_heads)
        net.set_attn_implementation(name)
        assert net.config._attn_implementation == name
        out = net.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, cache_implementation=cache, disable_compile=True,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        found[name] = out.sequences, torch.stack(out.logits)
    assert torch.equal(found["sdpa"][0], found["lowbit"][0])
    assert torch.allclose(found["sdpa"][1], found["lowbit"][1], atol=1e-5)


def compiled_step(name):
    """Returns the logits of a step over a static cache, compiled as one graph, and the shapes of the keys that attention gets
    in it."""
    net = model()
    net.set_attn_implementation(name)
    keys = []

    def backend(graph, inputs):
        attention = torch.nn.functional.scaled_dot_product_attention
        for node in graph.graph.nodes:
            if node.target is attention or node.target is torch._C._nn.scaled_dot_product_attention:
                keys.append(tuple(node.args[1].meta["example_value"].shape))
        return graph

    ids, mask = prompts()
    cache = StaticCache(config=net.config, max_cache_len=32)
    with torch.no_grad():
        net(ids, attention_mask=mask, past_key_values=cache)
        torch._dynamo.reset()
        step = torch.compile(net, backend=backend, fullgraph=True, dynamic=False)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        places = (mask.cumsum(1) - 1)[:, -1:]
        logits = step(ids[:, -1:], attention_mask=mask, position_ids=places, past_key_values=cache).logits
    return logits, keys


def test_a_compiled_step_over_a_static_cache_repeats_nothing():
    expected, _ = compiled_step("sdpa")  # its keys are (3, 8, 32, 8) in Transformers 5.17 to 5.23
    logits, keys = compiled_step("lowbit")
    assert torch.allclose(logits, expected, atol=1e-5)
    assert keys == [(3, 2, 32, 8)] * 2, "as they lie in the cache"


def test_a_soft_cap_is_refused():
    q, k = torch.zeros(1, 8, 1, 8), torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="softcap"):
        grouped_attention(torch.nn.Module(), q, k, k, torch.ones(1, 1, 1, 4).bool(), softcap=50.0)


def test_masks_of_heads_are_those_of_sdpa():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 8, generator=generator) for n, s in ((8, 1), (2, 5), (2, 5)))
    mask = torch.rand(2, 8, 1, 5, generator=generator) < 0.6
    mask[..., 0] = True
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    y, _ = grouped_attention(module, q, k, v, mask, scaling=0.3)
    keys, values = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)
    assert torch.allclose(y, expected.transpose(1, 2), atol=1e-6)
