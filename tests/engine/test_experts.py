"""Decoders with experts: the program computes what the model does, quantized or not, and the engine generates by it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from lowbit import convert
from lowbit.engine import Engine, Request
from lowbit.engine import program as program_module
from lowbit.engine.chain import Gamma
from lowbit.engine.check import difference_to
from lowbit.engine.decoder import Decoder
from lowbit.engine.experts import (
    ExpertMLP,
    GroupedProducts,
    PackedProducts,
    ResidualRouter,
    Router,
    SlotOutputs,
    _shared_expert,
    activation_of,
    block_refusals,
    grouped_refusals,
    shared_linears,
)
from lowbit.engine.program import DecodeProgram
from lowbit.engine.recognise import recognise
from lowbit.nn import QuantExperts
from lowbit.nn.experts import _Matrices
from lowbit.nn.linear import make_batch_invariant
from lowbit.ops.elementwise import add_norm
from lowbit.pack import ExpertOperandWeight, ExpertWeight
from tests.tiny import tiny_llama
from tests.tiny_experts import tiny_experts

Gamma_of = Gamma.of
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


def by_kernels(mlp, dtype, activation, batch_invariant):
    """The MLP as on a GPU, whose operators have their references on a CPU."""
    experts, block = mlp.block.experts, mlp.block
    shared = _shared_expert(block, dtype, activation, batch_invariant, False) if shared_linears(block) else None
    gate_row = shared.share if shared is not None and type(shared.share) is torch.nn.Linear else None
    router = Router.of(mlp.router, gate_row, 4, batch_invariant)
    if not isinstance(experts, QuantExperts):
        own = None if activation_of(block) is None else activation
        return ExpertMLP(experts, mlp.router, router, GroupedProducts.of(experts, own), shared)
    parts = experts.packed().values()
    packed = [
        ExpertWeight.pack(_Matrices(part.expert_tensor().without_input(), part.row_order))
        if part.scheme.activation is None
        else ExpertOperandWeight.pack(_Matrices(part.expert_tensor().without_input(), None))
        for part in parts
    ]
    return ExpertMLP(experts, mlp.router, router, PackedProducts.of(experts, *packed, batch_invariant), shared)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_with_8_bit_activations_as_a_gpu_runs_them(name, batch_invariant, monkeypatch):
    model = tiny_experts(name, torch.float32)
    convert(model, "w8a8", skip=["*self_attn*", "*shared_expert*", "lm_head"])
    monkeypatch.setattr(program_module, "expert_mlp_of", by_kernels)
    program, difference = difference_to(model, lambda: program_of(model, batch_invariant))
    assert isinstance(program.layers[0].experts.products.gate_up, ExpertOperandWeight)
    assert difference < 2e-3


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [None, "w8a16", "w4a16_g32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_gpu_runs(name, scheme, dtype, batch_invariant, monkeypatch):
    """The program with the operators of a GPU computes what the model does: router, products by slot, and their sum in the next
    norm. For up to 16 tokens its router does not round the logits, as the model does in bf16."""
    model = tiny_experts(name, dtype)
    if scheme is not None:
        convert(model, scheme)
        if name == "qwen2_moe" and scheme == "w8a16":  # in files it keeps its 16 bits
            for layer in model.model.layers:
                layer.mlp.shared_expert_gate = torch.nn.Linear(64, 1, bias=False, dtype=dtype)
    monkeypatch.setattr(program_module, "expert_mlp_of", by_kernels)
    program, difference = difference_to(model, lambda: program_of(model, batch_invariant))
    assert difference < (2e-5 if dtype == torch.float32 else 0.05)
    outputs = program.layers[0].experts(torch.randn(5, 64, dtype=dtype))
    assert isinstance(outputs, SlotOutputs) and (outputs.shared is None) == (name != "qwen2_moe")
    assert outputs.y.shape == (10, 64)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_residual_and_a_norm_in_the_products(name, monkeypatch):
    """o with the residual and the router with the norm, of steps of up to 8 or 16 tokens: of a prompt too."""
    model = tiny_experts(name, torch.bfloat16)
    convert(model, "w8a16", skip=["*self_attn*", "lm_head"])  # a CPU has no packed form of o
    monkeypatch.setattr(program_module, "expert_mlp_of", by_kernels)
    plain, expected = difference_to(model, lambda: program_of(model))
    assert all(row.fused is None for row in plain.layers)
    made = []

    def fused(self, spec, o, experts):
        made.append(ResidualRouter.of(o, experts, spec.mlp_gamma, self.decoder.eps, self.dtype, frozenset({"wgmma"})))
        return made[-1]

    monkeypatch.setattr(DecodeProgram, "_fused", fused)
    _, difference = difference_to(model, lambda: program_of(model))
    assert len(made) == 2 and all(each.most == 16 for each in made) and difference < max(2 * expected, 0.02)
    # A wrong norm shows: the last token is a step of one row.
    monkeypatch.setattr(Gamma, "of", lambda values, offset, dtype: Gamma_of(values * 1.5, offset, dtype))
    assert difference_to(model, lambda: program_of(model))[1] > 3 * difference
    assert ResidualRouter.of(made[0].o, by_kernels(recognise(model).layers[0].mlp, torch.bfloat16, "silu", True),
                             torch.ones(64), 1e-5, torch.bfloat16, frozenset()) is None  # fmt: skip


def test_outputs_by_slot_are_summed_once():
    y, h, shared, share, gamma = (torch.randn(*size, generator=torch.Generator().manual_seed(0)) for size in (
        (12, 16), (4, 16), (4, 16), (4, 1), (16,)
    ))  # fmt: skip
    outputs = SlotOutputs(y, 3, shared, share)
    expected = y.view(4, 3, 16).sum(1) + share.sigmoid() * shared
    torch.testing.assert_close(outputs.total(), expected)
    tokens = torch.tensor([2, 0])
    torch.testing.assert_close(outputs[tokens].total(), expected[tokens])
    after = h.clone()
    x = outputs.add_norm(after, gamma, 1e-5)
    torch.testing.assert_close(after, h + expected)
    torch.testing.assert_close(x, add_norm(h + expected, None, gamma, 1e-5))


def test_sixteen_bit_experts_that_a_gpu_refuses():
    experts = tiny_experts("mixtral", torch.bfloat16).model.layers[0].mlp.experts
    assert list(grouped_refusals(experts, torch.bfloat16, frozenset({"wgmma"}))) == []
    (reason,) = grouped_refusals(experts, torch.float16, frozenset({"wgmma"}))
    assert reason == "experts in 16 bits, which a GPU multiplies in bf16 and by wgmma (sm_90) alone, not in torch.float16"
    assert len(list(grouped_refusals(experts, torch.bfloat16, frozenset()))) == 1
    odd = tiny_experts("olmoe", torch.bfloat16).model.layers[0].mlp.experts
    odd.down_proj = torch.nn.Parameter(odd.down_proj[..., :60].contiguous())
    assert "multiples of 8" in next(grouped_refusals(odd, torch.bfloat16, frozenset({"wgmma"})))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_sixteen_bit_experts_on_a_gpu(name):
    model = tiny_experts(name, torch.bfloat16).cuda()
    program, difference = difference_to(model, lambda: program_of(model))
    assert difference < 0.1 and all(isinstance(row.experts.products, GroupedProducts) for row in program.layers)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("scheme", ["w4a16_g32", None])
@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_of_steps_and_prompts_on_a_gpu(name, scheme, batch_invariant):
    """Captured steps and prompts give the tokens of a program without graphs; batch-invariant, alone and among others."""
    if batch_invariant and scheme is None:
        pytest.skip("experts in 16 bits are not batch-invariant")
    model = tiny_experts(name, torch.bfloat16)
    if scheme is not None:
        convert(model, scheme)
    model.cuda()
    if batch_invariant:
        make_batch_invariant(model, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 160, (length,), generator=generator).tolist() for length in (1, 9, 150, 40)]

    def generate(engine, prompts):
        return [[s.token for s in sequence.sampled] for sequence in engine.generate([Request(ids, 12) for ids in prompts])]

    engine = Engine(model, max_concurrent=4, cache_bytes=1 << 24, batch_invariant=batch_invariant)
    assert isinstance(engine.program, DecodeProgram), engine.program.reasons
    together = generate(engine, prompts)
    assert together == generate(engine, prompts)
    assert engine.prefill_runner.captures and engine.decode_runner.captures
    if batch_invariant:
        assert together == [generate(engine, [ids])[0] for ids in prompts]
    for ids, tokens in zip(prompts, together, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *tokens]], device="cuda"), use_cache=False).logits[0, len(ids) - 1 : -1].float()
        below = logits.max(-1).values - logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        # Rounding may give a token that is nearly between two experts the other one.
        assert int((below > 0.1 * logits.std()).sum()) <= 1 and float(below.max()) < 0.5 * float(logits.std())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_the_program_on_a_gpu(name):
    model = tiny_experts(name, torch.bfloat16)
    convert(model, "w8a16")
    model.cuda()
    program, difference = difference_to(model, lambda: program_of(model))
    assert difference < 0.1 and all(row.experts.router is not None for row in program.layers)
    assert all((row.fused is None) == (name == "qwen2_moe") for row in program.layers)
