"""Experts are quantized with the tokens that reach them. On other tokens they are closer than experts rounded to nearest."""

from __future__ import annotations

import functools

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.methods import Awq, Gptq, Hqq, Learned, Rtn, SmoothQuant
from lowbit.quantize.expert_layer import ExpertMatrices, RoutedInputs, calibrate_experts

E, HIDDEN, INNER, TOP_K = 4, 64, 48, 2


def silu_gate(y):
    gate, up = y.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def clamped_gate(y):
    """gpt-oss's clamped gate, whose rows of gate and up alternate."""
    gate, up = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@functools.cache
def matrices(kind="silu"):
    g = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(E, *shape, generator=g) * shape[1] ** -0.5 for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    if kind == "clamped":
        biases = [0.1 * torch.randn(E, n, generator=g) for n in (2 * INNER, HIDDEN)]
        return ExpertMatrices(gate_up, down, clamped_gate, *biases)
    return ExpertMatrices(gate_up, down, silu_gate, up_rows=torch.arange(INNER, 2 * INNER))


def routed(tokens=1500, seed=1, only=E):
    return RoutedInputs(*routing(tokens, seed, only), E)


@functools.cache
def routing(tokens=1500, seed=1, only=E):
    """Inputs with heavy-tailed channels that depend on each other, and the experts and weights of a random router."""
    g = torch.Generator().manual_seed(0)
    channels = torch.exp(1.2 * torch.randn(HIDDEN, generator=g))
    mixing = torch.eye(HIDDEN) + 0.3 * torch.randn(HIDDEN, HIDDEN, generator=g) * HIDDEN**-0.5
    router = torch.randn(HIDDEN, only, generator=g)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)) @ mixing * channels
    weights, experts = (x @ router / channels.norm()).softmax(dim=-1).topk(TOP_K)
    return x, experts, weights


def error(experts, of, inputs):
    """The squared error of the layer's outputs on other tokens, relative to their squares."""
    difference = size = 0.0
    for e in range(E):
        x, p = inputs.of(e)
        expected = of.output(e, of.hidden(e, x)) * p
        actual = of.output(e, of.hidden(e, x, experts.gate_up[e].dequantize()), experts.down[e].dequantize()) * p
        difference += float((actual - expected).double().square().sum())
        size += float(expected.double().square().sum())
    return difference / size


METHODS = {
    "gptq": Gptq(), "gptq-act-order": Gptq(act_order=True), "awq": Awq(), "awq-loss": Awq(search="loss"),
    "learned": Learned(iterations=25, batch=2),
}  # fmt: skip
CASES = [("silu", "w4a16_g16"), ("clamped", "w3a16_g16_z")]
MORE = [("silu", "w3a16_g16_z"), ("silu", "w4a16_pc"), ("clamped", "w4e2m1a16_g16")]


@pytest.mark.parametrize(
    ("name", "kind", "scheme"),
    [(name, *case) for name in METHODS for case in CASES] + [(name, *case) for name in ("gptq", "awq") for case in MORE],
)
def test_calibrated_experts_are_closer_on_other_tokens(name, kind, scheme):
    schemes, of = (parse_scheme(scheme),) * 2, matrices(kind)
    rounded = calibrate_experts(of, routed(), schemes, Rtn(), least=0)
    experts = calibrate_experts(of, routed(), schemes, METHODS[name], least=0)
    assert error(experts, of, routed(seed=2)) < 0.9 * error(rounded, of, routed(seed=2))
    assert experts.error < 0.9 * rounded.error and not experts.starved
    assert error(experts, of, routed()) == pytest.approx(experts.error, rel=1e-4)
    for own, expected in ((experts.gate_up, of.gate_up), (experts.down, of.down)):
        assert [q.shape for q in own] == [tuple(w.shape) for w in expected]
        assert all(q.scheme == schemes[0] and q.input_transform.order is None for q in own)
        first = own[0].input_transform
        assert not any(first.differences(q.input_transform) for q in own)  # shared by the experts


@pytest.mark.parametrize("name", METHODS)
def test_twice_the_same(name):
    schemes = (parse_scheme("w4a16_g16"), parse_scheme("w8a16"))
    one, two = (calibrate_experts(matrices(), routed(), schemes, METHODS[name]) for _ in range(2))
    for a, b in zip((*one.gate_up, *one.down), (*two.gate_up, *two.down), strict=True):
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


def test_scales_of_h_cost_nothing():
    """AWQ scales an expert's own h in the rows of up, so down needs no transform. gpt-oss is an exception: its h is not
    proportional to up."""
    schemes = (parse_scheme("w4a16_g16"),) * 2
    folded = calibrate_experts(matrices(), routed(), schemes, Awq())
    assert all(q.input_transform.pre_quant_scale is None for q in folded.down)
    assert all(q.input_transform.pre_quant_scale is not None for q in folded.gate_up)
    rows = [q.dequantize()[INNER:] / w[INNER:] for q, w in zip(folded.gate_up, matrices().gate_up, strict=True)]
    factors = torch.stack([r.median(dim=1).values for r in rows])  # about 1 / s, where s is AWQ's scale of each channel of h
    assert float((factors.log().abs()).max()) > 0.1 and not torch.allclose(factors[0], factors[1], rtol=0.05)
    shared = calibrate_experts(matrices("clamped"), routed(), schemes, Awq())
    assert all(q.input_transform.pre_quant_scale is not None for q in shared.down)


def test_starved_experts_are_rounded_and_named():
    """The third and fourth expert see no token. Numbers beyond the last expert belong to another rank."""
    schemes = (parse_scheme("w4a16_g16"),) * 2
    inputs = routed(300, only=2)
    assert inputs.tokens == [300, 300, 0, 0]
    experts = calibrate_experts(matrices(), inputs, schemes, Gptq(), least=200)
    rounded = calibrate_experts(matrices(), inputs, schemes, Rtn(), least=200)
    assert experts.starved == [2, 3]
    assert torch.equal(experts.gate_up[2].codes, rounded.gate_up[2].codes)
    assert not torch.equal(experts.gate_up[1].codes, rounded.gate_up[1].codes)
    (line,) = experts.notes("model.layers.3.mlp.experts", 200)
    assert line == (
        "model.layers.3.mlp.experts: 2 of 4 experts rounded to nearest, since fewer than 200 calibration tokens reached them: "
        "expert (tokens) 2 (0), 3 (0)"
    )
    assert calibrate_experts(matrices(), inputs, schemes, Awq(), least=400).starved == [0, 1, 2, 3]


def test_tokens_of_experts():
    x = torch.arange(3.0)[:, None].expand(3, 2)
    inputs = RoutedInputs(x, torch.tensor([[1, 0], [3, 1], [1, 5]]), torch.tensor([[0.5, 0.25], [1, 2], [3, 4.0]]), 4)
    assert inputs.tokens == [1, 3, 0, 1]
    assert inputs.of(1)[0][:, 0].tolist() == [0, 1, 2] and inputs.of(1)[1].tolist() == [[0.5], [2], [3]]
    assert inputs.of(3)[0][:, 0].tolist() == [1] and inputs.of(2)[0].shape == (0, 2)
    both = RoutedInputs.of_batches([(x[None, :2], torch.tensor([[[1], [0]]]), torch.ones(1, 2, 1))] * 2, 2)
    assert both.tokens == [2, 2] and both.x.shape == (4, 2)
    with pytest.raises(ValueError, match=r"x \[T, K\], experts \[T, top_k\]"):
        RoutedInputs(x, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 4)
    with pytest.raises(ValueError, match="numbers of experts are 0 to 3, got -1"):
        RoutedInputs(x, torch.full((3, 1), -1), torch.ones(3, 1), 4)


def test_the_routers_weights_matter():
    """Tokens with small weights count less: with weights of zero they are as good as absent."""
    x, experts = routed().x, torch.zeros(1500, 1, dtype=torch.int64)
    weights = torch.ones(1500, 1)
    weights[500:] = 0.0
    schemes, method = (parse_scheme("w4a16_g16"),) * 2, Gptq()
    weighted = calibrate_experts(matrices(), RoutedInputs(x, experts, weights, E), schemes, method)
    fewer = calibrate_experts(matrices(), RoutedInputs(x[:500], experts[:500], weights[:500], E), schemes, method)
    assert float((weighted.gate_up[0].codes != fewer.gate_up[0].codes).float().mean()) < 0.01


@pytest.mark.parametrize("method", [Gptq(), Learned(iterations=40, batch=2)], ids=lambda m: type(m).__name__)
def test_few_tokens_are_not_fitted_too_closely(method):
    """Only 40 of 1,500 tokens reach an expert of 64 channels. The tokens of the whole layer prevent a fit to these 40 alone."""
    experts = torch.ones(1500, 1, dtype=torch.int64)
    experts[::38] = 0
    few = RoutedInputs(routed().x, experts, torch.ones(1500, 1), E)
    assert few.tokens == [40, 1460, 0, 0]
    every = RoutedInputs(routed(seed=2).x, torch.zeros(1500, 1, dtype=torch.int64), torch.ones(1500, 1), E)
    schemes = (parse_scheme("w4a16_g16"),) * 2
    errors = {
        prior: error(calibrate_experts(matrices(), few, schemes, method, prior=prior), matrices(), every) for prior in (0, 256)
    }
    rounded = error(calibrate_experts(matrices(), few, schemes, Rtn()), matrices(), every)
    assert errors[256] < errors[0] and errors[256] < 0.9 * rounded


def test_rows_of_the_whole_layer_weigh_as_stated():
    inputs = RoutedInputs(routed().x, torch.arange(1500)[:, None] % 4, torch.full((1500, 1), 0.5), E)
    x, weights = inputs.with_prior(1, 100)
    assert x.shape == (375 + 1500, HIDDEN) and torch.equal(x[:375], inputs.of(1)[0])
    assert float(weights[375:].square().sum()) == pytest.approx(100 * 0.25, rel=1e-4)
    assert inputs.with_prior(1, 0)[0].shape == (375, HIDDEN)


@pytest.mark.parametrize("method", [Gptq(), Awq(), Rtn()], ids=lambda m: type(m).__name__)
def test_rotated_inputs(method):
    """The experts share the rotations, and dequantizing undoes them. Heavy-tailed weights are rounded more accurately."""
    schemes, of = (parse_scheme("w4a16_g16"),) * 2, matrices()
    experts = calibrate_experts(of, routed(), schemes, method, rotations=(64, 16))
    assert all(q.input_transform.hadamard == 64 for q in experts.gate_up)
    assert all(q.input_transform.hadamard == 16 for q in experts.down)
    assert error(experts, of, routed(seed=2)) < 0.05
    exact = calibrate_experts(of, routed(), (parse_scheme("w8a16_g16"),) * 2, method, rotations=(64, 16))
    assert error(exact, of, routed(seed=2)) < 2e-4


def test_smoothquant_scales_h_by_expert():
    """SmoothQuant moves the range of h into down, by scaling the rows of up. The range of x stays, since scaling x would need
    another pass over it."""
    schemes = (parse_scheme("w8a8"),) * 2
    plain, smooth = (calibrate_experts(matrices(), routed(), schemes, m) for m in (Rtn(), SmoothQuant()))
    assert all(q.input_transform.pre_quant_scale is None for q in (*smooth.gate_up, *smooth.down))
    x, _ = routed().of(0)
    ranges = [
        (h := matrices().hidden(0, x, experts.gate_up[0].dequantize())).abs().amax(dim=0).max() / h.abs().amax(dim=0).min()
        for experts in (plain, smooth)
    ]
    assert ranges[1] < 0.5 * ranges[0]
    assert error(smooth, matrices(), routed(seed=2)) < 1e-3


def test_scales_of_all_experts_have_one_type():
    """One expert's weights are beyond the range of fp16, so all experts have bf16 scales."""
    of = matrices()
    large = ExpertMatrices(of.gate_up * torch.tensor([1, 1e7, 1, 1])[:, None, None], of.down, of.gate, up_rows=of.up_rows)
    for method in (Rtn(), Gptq(), Awq(), Learned(iterations=2)):
        experts = calibrate_experts(large, routed(), (parse_scheme("w4a16_g16"),) * 2, method)
        assert {q.scale.dtype for q in experts.gate_up} == {torch.bfloat16}
        assert {q.scale.dtype for q in experts.down} == {torch.float16}


def test_what_is_refused():
    schemes = (parse_scheme("w4a16_g16"),) * 2
    with pytest.raises(ValueError, match="Hqq does not look at inputs"):
        calibrate_experts(matrices(), routed(), schemes, Hqq())
    with pytest.raises(ValueError, match="w8a8_t has one calibrated scale of x per matrix, which experts do not have"):
        calibrate_experts(matrices(), routed(), (parse_scheme("w8a8_t"),) * 2, Gptq())
    with pytest.raises(ValueError, match=r"gate_up_bias is \[4, 96\], got \(4, 95\)"):
        ExpertMatrices(matrices().gate_up, matrices().down, silu_gate, torch.zeros(4, 95))
    with pytest.raises(ValueError, match=r"gate_up \[E, N, K\] and down \[E, K, I\]"):
        ExpertMatrices(matrices().gate_up[:3], matrices().down, silu_gate)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_on_a_gpu(name):
    """On a GPU the experts are the same up to rounding. No tensor stays on the CPU, and the error is that of the CPU's
    experts."""
    schemes, of = (parse_scheme("w4a16_g16"),) * 2, matrices()
    moved = ExpertMatrices(of.gate_up.cuda(), of.down.cuda(), of.gate, up_rows=of.up_rows.cuda())
    inputs = RoutedInputs(*(t.cuda() for t in routing()), E)
    assert inputs.tokens == routed().tokens
    one, two = (calibrate_experts(m, i, schemes, METHODS[name]) for m, i in ((of, routed()), (moved, inputs)))
    assert two.error == pytest.approx(one.error, rel=0.05)
    assert all(q.codes.is_cuda and q.scale.is_cuda for q in (*two.gate_up, *two.down))
