"""QuantExperts against the experts of Transformers with the dequantized weights, on a CPU."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch import nn

from lowbit.formats import parse_scheme
from lowbit.nn import PackedExperts, QuantExperts, convert, make_batch_invariant, plan_conversion
from lowbit.nn.decoding import allow_decoding
from lowbit.nn.experts import GateRule, expert_refusals, expert_weights, gate_rule
from lowbit.ops.table import UnsupportedProblem
from lowbit.pack.gated import alternate
from tests.tiny_experts import MODELS, tiny_experts

TOKENS, TOP_K = 13, 2
SCHEMES = (
    "w4a16_g32", "w3a16_g48_z", "w4a16_g16_fz", "w6e3m2a16", "w8a16", "w8e4m3a16_b16x16", "w8a8", "w8a8_az", "w8e4m3a8e4m3",
    "w8e4m3a8e4m3_b32x128",
)  # fmt: skip


def experts_of(name, dtype=torch.float32):
    """The first module of experts of a tiny model."""
    return next(m for m in tiny_experts(name, dtype).modules() if expert_weights(m) is not None)


def converted(module, scheme):
    """Quantizes the module, as the only module of a model."""
    model = nn.Module()
    model.experts = copy.deepcopy(module)
    convert(model, scheme)
    return model.experts


def inputs(dtype=torch.float32, experts=4, hidden=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, hidden, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    return x, chosen, torch.rand(TOKENS, TOP_K, generator=generator)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_as_the_original_with_dequantized_weights(name, scheme):
    original, quantized = experts_of(name), converted(experts_of(name), scheme)
    assert isinstance(quantized, QuantExperts) and quantized.num_experts == 4
    plain = quantized.dequantized(torch.float32)
    assert type(plain) is type(original)
    x, chosen, weights = inputs()
    with torch.no_grad():
        y, expected = quantized(x, chosen, weights), plain(x, chosen, weights)
    error = (y - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if parse_scheme(scheme).activation is None else 0.1)
    assert torch.equal(quantized(x, chosen, weights), quantized(x[:], chosen.int(), weights))
    alone = torch.cat([quantized(x[t : t + 1], chosen[t : t + 1], weights[t : t + 1]) for t in range(TOKENS)])
    torch.testing.assert_close(alone, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w8a16", "w6e3m2a16"])
def test_16_bit_activations_in_every_form_of_a_cpu(scheme):
    quantized = converted(experts_of("mixtral", torch.bfloat16), scheme)
    x, chosen, weights = inputs(torch.bfloat16)
    model = nn.ModuleList([quantized])
    reference = quantized.dequantized(torch.float32)
    with torch.no_grad():
        expected = reference(x.float(), chosen, weights)
    state = {name: t.clone() for name, t in quantized.state_dict().items()}
    for memory in (0, 1 << 40):  # weights are dequantized at every call with 0, once with much memory
        assert len(allow_decoding(model, torch.bfloat16, memory)) == 1
        y = quantized(x, chosen, weights)
        assert y.dtype == torch.bfloat16
        assert (y.float() - expected).abs().max() < 2e-2 * expected.abs().max()
        assert all(torch.equal(t, state[name]) for name, t in quantized.state_dict().items())
        assert torch.equal(pickle.loads(pickle.dumps(quantized))(x, chosen, weights), y)
        assert torch.equal(copy.deepcopy(quantized)(x, chosen, weights), y)
    for part in quantized.packed().values():
        part.restore()
        assert torch.equal(part.expert_tensor().packed, part.weight_packed)


def test_a_transform_of_the_input_is_that_of_all_experts():
    quantized = converted(experts_of("mixtral"), "w4a16_g32")
    generator = torch.Generator().manual_seed(3)
    for name, part in quantized.packed().items():
        k = part.shape[1]
        q = (
            part.expert_tensor()
            .rotated_by(16)
            .with_input(
                pre_quant_scale=0.5 + torch.rand(k, generator=generator), order=torch.randperm(k, generator=generator).int()
            )
        )
        quantized.set_weights(name, PackedExperts.from_expert_tensor(q))
    x, chosen, weights = inputs()
    with torch.no_grad():
        torch.testing.assert_close(
            quantized(x, chosen, weights), quantized.dequantized(torch.float32)(x, chosen, weights), rtol=1e-4, atol=1e-5
        )


def test_slots_of_other_ranks_add_nothing_and_no_token_is_nothing():
    quantized = converted(experts_of("gpt_oss"), "w8a16")
    x, chosen, weights = inputs()
    away = chosen.clone()
    away[::2, 1] = 4  # 4 is one more than the last expert: expert parallelism's number for an expert of another rank
    masked = torch.where(away == 4, 0.0, weights)
    torch.testing.assert_close(quantized(x, away, weights), quantized(x, chosen, masked))
    assert torch.equal(quantized(x, torch.full_like(chosen, 4), weights), torch.zeros_like(x))
    assert quantized(x[:0], chosen[:0], weights[:0]).shape == (0, 64)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_gradients_are_those_of_the_dequantized_experts(name):
    quantized = converted(experts_of(name), "w4a16_g32")
    plain = quantized.dequantized(torch.float32)
    grads = []
    for module in (quantized, plain):
        x, chosen, weights = inputs()
        x.requires_grad_(), weights.requires_grad_()
        module(x, chosen, weights).square().sum().backward()
        grads.append((x.grad, weights.grad))
    for own, expected in zip(*grads, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)
    assert all(p.grad is None for name, p in quantized.named_parameters() if not name.endswith("bias"))


def test_the_gate_is_found_by_its_values():
    rules = {name: converted(experts_of(name), "w8a16").gate for name in MODELS}
    swiglu = rules.pop("gpt_oss")
    assert swiglu == GateRule("clamped_swiglu", interleaved=True) and set(rules.values()) == {GateRule("silu")}
    assert gate_rule(lambda y: nn.functional.gelu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]) == GateRule("none")
    tanh = gate_rule(lambda y: nn.functional.gelu(y[..., ::2], approximate="tanh") * y[..., 1::2])
    assert tanh == GateRule("gelu_tanh", interleaved=True)
    numbers = torch.arange(32)
    assert torch.equal(GateRule("silu").rows(32), alternate(numbers[:16], numbers[16:]))
    assert torch.equal(GateRule("silu", interleaved=True).rows(32), alternate(numbers[::2], numbers[1::2]))
    assert GateRule("none").rows(32) is None and GateRule("silu").rows(24) is None


def test_what_is_not_quantized_says_why():
    module = experts_of("mixtral")
    module.has_post_expert_norm = True
    assert expert_refusals(module, expert_weights(module)) == ("a norm follows each expert",)
    model = nn.Module()
    model.experts = module
    plan = plan_conversion(model, "w8a16")
    assert not plan.experts and [row.reason for row in plan.kept] == ["a norm follows each expert"]
    module = experts_of("mixtral")
    module.scale = nn.Parameter(torch.ones(4))
    assert expert_refusals(module, expert_weights(module)) == ("its experts have scale too",)
    assert expert_weights(nn.Linear(4, 4)) is None


def test_half_leaves_scales_and_reloading_packs_again():
    quantized = converted(experts_of("mixtral"), "w8a16")
    x, chosen, weights = inputs()
    first = quantized(x, chosen, weights)
    quantized.half()
    assert quantized.gate_up_proj.weight_scale.dtype == torch.float32
    other = converted(experts_of("mixtral"), "w8a16")
    state = {name: t.flip(0) for name, t in other.state_dict().items()}
    quantized.load_state_dict(state)
    flipped = quantized(x, 3 - chosen, weights)
    torch.testing.assert_close(flipped, first, rtol=1e-5, atol=1e-6)


OTHERS = {
    "transformers.models.deepseek_v4.modeling_deepseek_v4:DeepseekV4Experts": GateRule("none"),  # has its own limits
    "transformers.models.nemotron_h.modeling_nemotron_h:NemotronHExperts": GateRule("none"),  # has no gate
    "transformers.models.aria.modeling_aria:AriaExperts": GateRule("silu"),  # has transposed matrices
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLExperts": GateRule("clamped_swiglu"),
    "transformers.models.gemma4.modeling_gemma4:Gemma4TextExperts": GateRule("gelu_tanh"),
}


@pytest.mark.parametrize("path", OTHERS)
def test_experts_of_other_architectures(path):
    module, _, name = path.partition(":")
    cls = getattr(pytest.importorskip(module), name, None)
    if cls is None:
        pytest.skip(f"this Transformers has no {name}")
    numbers = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 32)
    config = types.SimpleNamespace(
        **numbers, **sizes, hidden_size=64, moe_latent_size=None, hidden_act="silu", hidden_activation="gelu_pytorch_tanh",
        mlp_hidden_act="relu2", swiglu_limit=7.0, swiglu_alpha=1.702, _experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    original = cls(config)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.3)
    if expert_weights(original) is None:
        pytest.skip(f"in this Transformers, {name} has not the interface of experts")
    quantized = converted(original, "w4a16_g32")
    assert quantized.gate == OTHERS[path]
    with torch.no_grad():
        y, expected = quantized(*inputs()), quantized.dequantized(torch.float32)(*inputs())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_form_of_a_gpu(name):
    """The weights of all experts are packed as one, as on a GPU, and multiplied by the operators' CPU implementation. The gate
    is in the epilogue, and biases follow the order of rows."""
    pytest.importorskip("lowbit.ops.expert_gemm", reason="the kernels of experts are not in this tree")
    quantized = converted(experts_of(name), "w4a16_g32")
    with torch.no_grad():
        expected = quantized.dequantized(torch.float32)(*inputs())
        state = {key: t.clone() for key, t in quantized.state_dict().items()}
        for part in quantized.packed().values():
            part.restore()
            part._form = "fragments"
            part._pack_stacked(part.expert_tensor())
            part.weight_packed.data = part.weight_packed.data.new_empty(0)
        assert quantized.packed()["gate_up_proj"].packed_rows is not None
        torch.testing.assert_close(quantized(*inputs()), expected, rtol=1e-3, atol=1e-3)
        again = copy.deepcopy(quantized)
        assert not again.packed()["down_proj"].is_prepared
        torch.testing.assert_close(again(*inputs()), expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(t, state[key]) for key, t in quantized.state_dict().items())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("scheme", ["w4a16_g32", "w6e3m2a16", "w8a16", "w4a16_g16_fz", "w8a8"])
def test_experts_on_a_gpu(name, scheme, tokens):
    quantized = converted(experts_of(name, torch.bfloat16), scheme)
    x, chosen, weights = (t.repeat(-(-tokens // TOKENS), 1)[:tokens].cuda() for t in inputs(torch.bfloat16))
    reference = quantized.dequantized(torch.float64).cuda()
    reference.config = copy.deepcopy(reference.config)
    reference.config._experts_implementation = "eager"  # torch's grouped product does not support float64
    expected = reference(x.double(), chosen, weights.double())
    state = {key: t.clone() for key, t in quantized.state_dict().items()}
    quantized.cuda()
    with torch.no_grad():
        y = quantized(x, chosen, weights)
        assert torch.equal(quantized(x, chosen, weights), y)
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < (0.02 if parse_scheme(scheme).activation is None else 0.1)
    assert all(torch.equal(t.cpu(), state[key]) for key, t in quantized.state_dict().items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("scheme", ["w4a16_g32", "w8a8", "fp8_dynamic"])
def test_a_batch_invariant_layer_on_a_gpu(name, scheme):
    """A token's output has the same bits alone and in a batch; a router of more tokens has tiles of more rows."""
    quantized = converted(experts_of(name, torch.bfloat16), scheme).cuda()
    make_batch_invariant(quantized, torch.bfloat16)
    assert quantized.batch_invariant
    x, chosen, weights = (t.repeat(60, 1).cuda() for t in inputs(torch.bfloat16))
    with torch.no_grad():
        whole = quantized(x, chosen, weights)
        for tokens in (1, 7, 100):
            assert torch.equal(quantized(x[:tokens], chosen[:tokens], weights[:tokens]), whole[:tokens])


def test_experts_on_a_cpu_are_not_batch_invariant():
    with pytest.raises(UnsupportedProblem, match="is on a CPU, whose sums depend on the batch"):
        make_batch_invariant(converted(experts_of("mixtral"), "w8a8"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_gradients_on_a_gpu(name):
    """The backward pass unpacks single experts of the weight that all share, in which rows alternate."""
    quantized = converted(experts_of(name, torch.bfloat16), "w4a16_g32")
    plain = quantized.dequantized(torch.float32).cuda()
    quantized.cuda()
    x, chosen, weights = (t.cuda() for t in inputs(torch.bfloat16))
    of_x, of_plain = x.clone().requires_grad_(), x.float().requires_grad_()
    quantized(of_x, chosen, weights).float().square().sum().backward()
    plain(of_plain, chosen, weights).square().sum().backward()
    assert float((of_x.grad - of_plain.grad).norm()) < 0.05 * float(of_plain.grad.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_in_a_cuda_graph(name):
    """A captured call never synchronises with the device. A replay computes other routes."""
    quantized = converted(experts_of(name, torch.bfloat16), "w4a16_g32").cuda()
    held = [t.cuda() for t in inputs(torch.bfloat16)]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        quantized(*held)  # packs the weights
        with torch.cuda.graph(graph):
            captured = quantized(*held)
        for t, new in zip(held, inputs(torch.bfloat16, seed=1), strict=True):
            t.copy_(new)
        graph.replay()
        assert torch.equal(captured, quantized(*held))
