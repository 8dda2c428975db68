"""Decoders with experts: the program computes what the model does, quantized or not, and the engine generates by it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from lowbit import convert
from lowbit.engine import Engine, Request
from lowbit.engine.check import difference_to
from lowbit.engine.decoder import Decoder
from lowbit.engine.experts import ExpertMLP, block_refusals
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.nn import QuantExperts
from tests.tiny import tiny_llama
from tests.tiny_experts import tiny_experts

FAMILIES = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe", "gpt_oss": "GptOss"}


def program_of(model, batch_invariant=False):
    decoder = recognise(model)
    assert isinstance(decoder, Decoder), decoder
    return DecodeProgram(decoder, model.dtype, model.device, batch_invariant=batch_invariant)


@pytest.mark.parametrize("scheme", [None, "w4a16_g16", "w8a8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_program_computes_the_model(name, scheme):
    model = tiny_experts(name, torch.float32)
    if scheme is not None:
        convert(model, scheme)
        assert isinstance(model.model.layers[0].mlp.experts, QuantExperts)
    program, difference = difference_to(model, lambda: program_of(model))
    assert difference < (1e-4 if scheme != "w8a8" else 0.1)
    assert program.decoder.family == FAMILIES[name] and all(isinstance(row.experts, ExpertMLP) for row in program.layers)
    assert (program.layers[0].experts.shared is not None) == (name == "qwen2_moe")
    assert any("its MLPs are experts" in line for line in program.report(difference))


def test_dense_layers_stay_dense():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**{**tiny_experts("qwen3_moe").config.to_dict(), "mlp_only_layers": [0]})
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    program, difference = difference_to(model, lambda: program_of(model))
    assert difference < 1e-4 and [row.experts is None for row in program.layers] == [True, False]


def test_a_block_that_differs_is_refused():
    model = tiny_experts("mixtral")
    model.model.layers[1].mlp = tiny_llama().model.layers[0].mlp
    assert any("mlp is a LlamaMLP" in reason for reason in recognise(model))
    model = tiny_experts("olmoe")
    model.config.clip_qkv = 3.0
    assert recognise(model) == ("q, k and v are clamped (clip_qkv is 3.0)",)
    assert list(block_refusals(tiny_experts("mixtral").model.layers[0].mlp)) == []


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_engine_generates_as_the_model(name):
    """Prompts of different lengths at once, in chunks, and steps of all of them."""
    model = tiny_experts(name, torch.float32)
    convert(model, "w8a16")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 160, (length,), generator=generator).tolist() for length in (1, 9, 150)]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    engine = Engine(model, max_concurrent=4, chunk_tokens=128, cache_bytes=1 << 24)
    assert isinstance(engine.program, DecodeProgram)
    found = engine.generate([Request(ids, 8) for ids in prompts])
    assert [[sampled.token for sampled in request.sampled] for request in found] == expected


@pytest.mark.parametrize("scheme", [None, "w4a16_g32", "w4e2m1a16_g32"])
def test_gpt_oss_beyond_its_window(scheme):
    """YaRN with its factor, a window shorter than the prompts, sinks that take most of the softmax; gpt-oss's own 4 bits."""
    from transformers import GptOssConfig, GptOssForCausalLM

    base = tiny_experts("gpt_oss").config.to_dict()
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False,
        "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**{**base, "sliding_window": 9, "rope_parameters": yarn})).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=2.0 if "sinks" in name else 1.0 if "norm" in name else 0.0, std=0.2)
    if scheme is not None:
        convert(model, scheme)
    program, difference = difference_to(model, lambda: program_of(model))
    assert difference < 1e-5
    assert [row.shape.window for row in program.layers] == [9, 0] and program.layers[0].spec.sinks is not None
    assert float(program.ropes[0][0, 0]) == pytest.approx(1.2079, abs=1e-4)  # 0.1 ln 8 + 1
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 160, (length,), generator=generator).tolist() for length in (1, 30, 140)]
    engine = Engine(model, max_concurrent=2, chunk_tokens=128, cache_bytes=1 << 24)
    for sequence in engine.generate([Request(ids, 12) for ids in prompts]):
        tokens = [sampled.token for sampled in sequence.sampled]
        with torch.no_grad():
            logits = model(torch.tensor([[*sequence.request.prompt, *tokens]]), use_cache=False).logits[0]
        assert logits[len(sequence.request.prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gpt_oss_in_sixteen_bits(dtype):
    model = tiny_experts("gpt_oss", dtype)
    _, difference = difference_to(model, lambda: program_of(model))
    assert difference < (0.004 if dtype == torch.float16 else 0.03)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_rule_of_a_router(name):
    """The kernel's rule chooses the experts of Transformers' router, with its weights."""
    route = pytest.importorskip("lowbit.ops.route", reason="the router's kernel is not in this tree").route
    from lowbit.engine.experts import bias_of, rule_of

    block = tiny_experts(name, torch.float32).model.layers[0].mlp
    router = block.router if name == "gpt_oss" else block.gate
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    _, weights, experts = router(x)
    routing = route(linear(x, router.weight), rule_of(router), bias_of(router), tile_rows=8)
    assert torch.equal(routing.experts.long(), experts)
    torch.testing.assert_close(routing.weights, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_the_program_on_a_gpu(name):
    model = tiny_experts(name, torch.bfloat16)
    convert(model, "w8a16")
    model.cuda()
    program, difference = difference_to(model, lambda: program_of(model))
    assert difference < 0.1 and all(row.experts.rule is not None for row in program.layers)
