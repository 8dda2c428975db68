"""expert_mlp against float64, for all experts in one weight and for a matrix of each expert."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import ExpertTensor
from lowbit.nn.experts import GateRule, PackedExperts
from lowbit.ops.cpu_gemm import pack_for_cpu
from lowbit.ops.experts import expert_mlp, multiply_experts, take_rows
from lowbit.ops.gemm import gemm, quantized
from lowbit.pack.gemm_weight import RowWeight
from lowbit.quantize import rtn

E, TOP_K, K, INNER = 5, 2, 96, 48


def silu(y):
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def data(tokens, scheme, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    matrices = [[rtn(torch.randn(*shape, generator=g) / 8, scheme) for _ in range(E)] for shape in ((2 * INNER, K), (K, INNER))]
    x = torch.randn(tokens, K, generator=g).to(dtype)
    chosen = torch.stack([torch.randperm(E, generator=g)[:TOP_K] for _ in range(tokens)])
    biases = [torch.randn(E, n, generator=g).to(dtype) for n in (2 * INNER, K)]
    return matrices, x, chosen, torch.rand(tokens, TOP_K, generator=g), biases


def reference(matrices, x, chosen, weights, biases, residual):
    """Computes the same in float64."""
    gate_up, down = ([q.dequantize(torch.float64) for q in each] for each in matrices)
    y = residual.double().clone()
    for t in range(len(x)):
        for s in range(TOP_K):
            e = int(chosen[t, s])
            h = silu(gate_up[e] @ x[t].double() + biases[0][e].double())
            y[t] += weights[t, s].double() * (down[e] @ h + biases[1][e].double())
    return y


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("scheme", ["w4a16_g32", "w8a16", "w4a16_g16_fz"])
def test_a_matrix_for_each_expert(scheme, tokens):
    matrices, x, chosen, weights, biases = data(tokens, scheme)
    residual = torch.randn(tokens, K, generator=torch.Generator().manual_seed(1))
    forms = [[RowWeight.pack(q) for q in each] for each in matrices]
    arguments = dict(apply_gate=silu, gate_up_bias=biases[0], down_bias=biases[1], residual=residual)
    y = expert_mlp(x, chosen, weights, *forms, **arguments)
    expected = reference(matrices, x, chosen, weights, biases, residual)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(y, expert_mlp(x, chosen, weights, *forms, **arguments))
    decoded = [[pack_for_cpu(q, "decoded", torch.float32) for q in each] for each in matrices]
    torch.testing.assert_close(expert_mlp(x, chosen, weights, *decoded, **arguments), y, rtol=1e-4, atol=1e-5)


def test_only_experts_that_are_hit_are_multiplied():
    matrices, x, chosen, weights, _ = data(6, "w8a16")
    chosen = torch.tensor([[1, 3], [3, 1], [1, 9], [-1, 3], [3, 1], [1, 3]])
    seen = []

    def multiply(which):
        def product(e, rows):
            seen.append((which, e, len(rows)))
            return gemm(rows, RowWeight.pack(matrices[which][e]))

        return product

    y = multiply_experts(x, chosen, weights, E, multiply(0), silu, multiply(1))
    assert seen == [(0, 1, 5), (1, 1, 5), (0, 3, 5), (1, 3, 5)]
    masked = torch.where((chosen >= 0) & (chosen < E), weights, 0.0)
    known = chosen.clamp(0, E - 1)
    expected = reference(matrices, x, known, masked, torch.zeros(2, E, 1), torch.zeros_like(x))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_quantized_activations_keep_their_scales():
    q = rtn(torch.randn(4, 64), "w8a8_az")
    x = quantized(torch.randn(5, 64), q.scheme)
    rows = torch.tensor([3, 0, 3])
    taken = take_rows(x, rows)
    assert torch.equal(taken.codes, x.codes[rows]) and torch.equal(taken.scale, x.scale[rows])
    assert torch.equal(taken.zero, x.zero[rows]) and taken.dtype == x.dtype
    static = x._replace(scale=torch.ones(1), zero=torch.zeros(1, dtype=torch.int32))
    assert take_rows(static, rows).scale.shape == (1,)


def test_tensors_that_do_not_fit_are_refused():
    matrices, x, chosen, weights, _ = data(3, "w8a16")
    forms = [[RowWeight.pack(q) for q in each] for each in matrices]
    with pytest.raises(
        ValueError, match=r"experts \(integers\) and weights are \[T, top_k\]; got \(3, 96\), torch.int64 \(2, 2\)"
    ):
        expert_mlp(x, chosen[:2], weights, *forms, apply_gate=silu)
    with pytest.raises(ValueError, match="torch.float32"):
        expert_mlp(x, weights, weights, *forms, apply_gate=silu)
    with pytest.raises(ValueError, match="goes with apply_gate"):
        expert_mlp(x, chosen, weights, *forms)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scheme", ["w4a16_g32", "w8a16", "w6e3m2a16", "w8e4m3a16_b16x16", "w2a16_t"])
def test_all_experts_in_one_weight(scheme, interleaved):
    """The weights of all experts are packed as one, as on a GPU. The operators multiply by it on a CPU, and unpack it."""
    pytest.importorskip("lowbit.ops.expert_gemm", reason="the kernels of experts are not in this tree")
    matrices, x, chosen, weights, biases = data(7, scheme, torch.bfloat16)
    rule = GateRule("silu", interleaved)
    parts = [PackedExperts.from_expert_tensor(ExpertTensor.stack(each, E)) for each in matrices]
    parts[0].row_order = rule.rows(2 * INNER)
    gate_up_bias = biases[0]
    for part in parts:
        state = {name: t.clone() for name, t in part.state_dict().items()}
        part._form = "fragments"
        part._pack_stacked(part.expert_tensor())
        part.weight_packed.data = part.weight_packed.data.new_empty(0)
        assert all(torch.equal(t, state[name]) for name, t in part.state_dict().items())
        assert torch.equal(part.expert(3).codes, matrices[parts.index(part)][3].codes)
    rows = parts[0].packed_rows
    y = expert_mlp(
        x, chosen, weights, parts[0]._stacked_weight(), parts[1]._stacked_weight(), gate="silu",
        gate_up_bias=gate_up_bias[:, rows], down_bias=biases[1],
    )  # fmt: skip

    def gate(y):
        return silu(torch.cat((y[..., ::2], y[..., 1::2]), -1) if interleaved else y)

    forms = [[RowWeight.pack(q) for q in each] for each in matrices]
    plain = expert_mlp(x, chosen, weights, *forms, apply_gate=gate, gate_up_bias=gate_up_bias, down_bias=biases[1])
    torch.testing.assert_close(y, plain, rtol=3e-2, atol=3e-2)
    for part in parts:
        part.restore()
        assert not part.is_prepared and part.weight_packed.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 200, 900])
def test_slots_of_no_expert_add_nothing_on_a_gpu(tokens, hit):
    """There are few rows and many. Some or all experts of a token are on other ranks (-1). Rows that no kernel writes hold
    NaN."""
    matrices, x, chosen, weights, biases = data(tokens, "w4a16_g32", torch.float16)
    chosen[torch.rand(chosen.shape, generator=torch.Generator().manual_seed(3)) < 0.4] = -1
    chosen = chosen if hit else torch.full_like(chosen, -1)
    parts = [PackedExperts.from_expert_tensor(ExpertTensor.stack(each, E)).cuda() for each in matrices]
    rule = GateRule("silu", False)
    parts[0].row_order = rule.rows(2 * INNER)
    forms = [part.forms_for(torch.float16) for part in parts]
    given = [t.cuda() for t in (x, chosen, weights)]
    torch.full((1 << 26,), float("nan"), dtype=torch.float16, device="cuda")  # poisons memory to be reused
    y = expert_mlp(
        *given, *forms, gate="silu", gate_up_bias=biases[0].cuda()[:, parts[0].packed_rows], down_bias=biases[1].cuda()
    )  # fmt: skip
    zeros, present = torch.zeros(tokens, K), chosen.clamp(0)
    expected = reference(matrices, x, present, weights.masked_fill(chosen < 0, 0), biases, zeros)
    torch.testing.assert_close(y.double().cpu(), expected, rtol=1e-2, atol=1e-2 * max(1.0, float(expected.abs().max())))
