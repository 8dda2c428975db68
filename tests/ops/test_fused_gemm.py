"""GEMMs with norm, gate and residual epilogues: the reference against model layers, the kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import QuantTensor
from lowbit.kernels.choose.fused_gemm import CHAIN_TOKENS
from lowbit.kernels.reference.fused_gemm import norm_gemm_reference, residual_gemm_reference
from lowbit.ops.fused_gemm import chain_refusals, factor_of, norm_gemm, residual_gemm
from lowbit.pack import DENSE_FORM, DenseWeight, FragmentWeight, OperandWeight
from lowbit.pack.gated import alternate, pack_gated
from lowbit.quantize import rtn

gpu = pytest.mark.gpu
HALVES = [torch.float16, torch.bfloat16]
SCHEMES = [
    "w4a16_g128", "w4a16_g64", "w4a16_pc", "w4a16_g128_z", "w4a16_g32_fz", "w6e3m2a16", "w6e3m2a16_g128", "w8a16", "w8a16_g128",
    "w5a16_g64", "w3a16_g128", "w8e4m3a16_b128x128",
]  # fmt: skip
GATES = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def quantized(scheme, n, k, device="cpu", seed=0) -> QuantTensor:
    generator = torch.Generator(device).manual_seed(seed)
    return rtn(torch.randn(n, k, device=device, generator=generator) * k**-0.5, scheme)


def relative_error(y, reference) -> float:
    return float((y.double() - reference.double()).norm() / reference.double().norm())


def squares_of(h, parts=1):
    """Sums of squares [parts, M] of the rows of h, cut into unequal parts."""
    cuts = [len(part) for part in torch.arange(h.shape[1]).tensor_split(parts)]
    return torch.stack([part.float().square().sum(1) for part in h.split(cuts, 1)])


# ---- without a GPU


def rms_norm(h, gamma, eps):
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gamma


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("scheme", ["w4a16_g32", "w8a16", "w6e3m2a16", "w4a16_g32_z"])
def test_two_layers_equal_norms_and_products_apart(scheme, gate, dtype):
    """Two layers without attention (qkv with bias, o, gate-up, down), then a head; each layer adds to h."""
    torch.manual_seed(0)
    b, hidden, inner, eps = 5, 64, 104, 1e-5
    h = torch.randn(b, hidden).to(dtype)
    reference, layers = h.double(), []
    for layer in range(2):
        parts = {
            "qkv": (96, hidden),
            "o": (hidden, 96),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        layers.append({name: quantized(scheme, *shape, seed=10 * layer + i) for i, (name, shape) in enumerate(parts.items())})
    gammas = [(0.2 + 3 * torch.rand(hidden)).to(dtype) for _ in range(5)]
    bias, head = torch.randn(96).to(dtype), quantized("w8a16", 48, hidden, seed=99)
    factors = [factor_of(gamma, dtype) for gamma in gammas]

    x, squares = (h.float() * gammas[0].float() * factors[0]).to(dtype), squares_of(h)
    for i, layer in enumerate(layers):
        fused = {name: FragmentWeight.pack(layer[name]) for name in ("qkv", "o", "down")}
        given = {"width": hidden, "eps": eps}
        x = norm_gemm(x, fused["qkv"], squares, bias, factor=factors[2 * i], **given)
        x, squares = residual_gemm(x, fused["o"], h, gammas[2 * i + 1], factor=factors[2 * i + 1])
        x = norm_gemm(x, pack_gated(layer["gate"], layer["up"]), squares, gated=gate, factor=factors[2 * i + 1], **given)
        x, squares = residual_gemm(x, fused["down"], h, gammas[2 * i + 2], factor=factors[2 * i + 2])
        w = {name: q.dequantize(torch.float64) for name, q in layer.items()}
        qkv = rms_norm(reference, gammas[2 * i].double(), eps) @ w["qkv"].T + bias.double()
        reference = reference + qkv @ w["o"].T
        normed = rms_norm(reference, gammas[2 * i + 1].double(), eps)
        reference = reference + (GATES[gate](normed @ w["gate"].T) * (normed @ w["up"].T)) @ w["down"].T
    logits = norm_gemm(x, FragmentWeight.pack(head), squares, factor=factors[4], width=hidden, eps=eps)
    reference = rms_norm(reference, gammas[4].double(), eps) @ head.dequantize(torch.float64).T
    assert relative_error(logits, reference) < (2e-3 if dtype == torch.float16 else 1.6e-2)


def test_h_that_overflows_without_a_factor():
    """|h| is up to 6e4 and gamma up to 9: h * gamma overflows fp16, h * gamma * factor does not, and the next product is
    right.
    """
    torch.manual_seed(1)
    q, following = quantized("w4a16_g32", 64, 64), quantized("w8a16", 80, 64, seed=1)
    h = torch.randn(3, 64).half()
    h[:, 7], h[1, 9] = 6e4, -5e4
    gamma = torch.linspace(0.1, 9, 64).half()
    factor = factor_of(gamma, torch.float16)
    assert factor == 1 / 16
    for used, finite in ((1.0, False), (factor, True)):
        moved = h.clone()
        x, squares = residual_gemm(torch.zeros(3, 64).half(), FragmentWeight.pack(q), moved, gamma, factor=used)
        assert torch.equal(moved, h) and torch.isfinite(squares).all()
        y = norm_gemm(x, FragmentWeight.pack(following), squares, width=64, eps=1e-6, factor=used)
        assert bool(torch.isfinite(y).all()) == finite
    expected = rms_norm(h.double(), gamma.double(), 1e-6) @ following.dequantize(torch.float64).T
    assert relative_error(y, expected) < 1e-3


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1.0, 300.0])
@pytest.mark.parametrize("rms", [1e-2, 1.0, 500.0])
def test_the_factor_costs_no_precision(size, rms):
    """gamma and h of various magnitudes: the error is that of normalising x and rounding it to fp16."""
    torch.manual_seed(2)
    w, h = torch.randn(256, 512, dtype=torch.float64), (torch.randn(8, 512) * rms).half()
    gamma = (size * (0.1 + torch.rand(512))).float()
    factor = factor_of(gamma, torch.float16)
    assert 0.5 < float(gamma.max()) * factor <= 1
    exact = rms_norm(h.double(), gamma.double(), 0.0) @ w.T
    x = (h.float() * gamma * factor).half().double()
    y = x @ w.T / (h.double().square().mean(1).sqrt() * factor)[:, None]
    assert relative_error(y, exact) < 3e-4


def test_factors_are_powers_of_two():
    for largest, factor in ((1.0, 1.0), (0.9, 1.0), (0.5, 2.0), (1.5, 0.5), (2.0, 0.5), (37.0, 1 / 64), (0.0, 1.0)):
        gamma = torch.tensor([0.0, -largest, largest / 3])
        assert factor_of(gamma, torch.float16) == factor and factor_of(gamma, torch.bfloat16) == 1.0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_weights_of_16_bits(gate, dtype):
    """16-bit weights are used unpacked: all rows of gate, then all rows of up, in the weight and the bias."""
    torch.manual_seed(3)
    gate_up, down, bias = torch.randn(80, 64).to(dtype), torch.randn(48, 40).to(dtype), torch.randn(80).to(dtype)
    x, squares, h, gamma = torch.randn(3, 64).to(dtype), torch.rand(7, 3), torch.randn(3, 48).to(dtype), torch.rand(48)
    rms = (squares.double().sum(0) / 64 + 1e-3).sqrt()[:, None]
    plain = x.double() @ gate_up.double().T / rms + bias.double()
    given = {"width": 64, "eps": 1e-3}
    assert torch.equal(norm_gemm(x, DenseWeight(gate_up), squares, bias, **given), plain.to(dtype))
    y = norm_gemm(x, DenseWeight(gate_up), squares, bias, gated=gate, **given)
    assert torch.equal(y, (GATES[gate](plain[:, :40]) * plain[:, 40:]).to(dtype))
    before = h.clone()
    following, parts = residual_gemm(y, DenseWeight(down), h, gamma, factor=0.5)
    assert torch.equal(h, (before.double() + y.double() @ down.double().T).to(dtype))
    assert torch.equal(following, (h.double() * gamma.double() * 0.5).to(dtype))
    assert torch.allclose(parts.sum(0), h.float().square().sum(1))


def test_gates_alternate_with_what_they_gate():
    gate, up = quantized("w4a16_g32", 40, 64), quantized("w4a16_g32", 40, 64, seed=1)
    bias = torch.randn(2, 40).half()
    x, squares = torch.randn(3, 64).half(), torch.rand(7, 3)
    for name, act in GATES.items():
        y = norm_gemm(x, pack_gated(gate, up), squares, alternate(*bias), width=64, eps=1e-3, gated=name)
        rms = (squares.double().sum(0) / 64 + 1e-3).sqrt()[:, None]
        left, right = (x.double() @ q.dequantize(torch.float64).T / rms + b for q, b in zip((gate, up), bias, strict=True))
        assert y.shape == (3, 40) and torch.equal(y, (act(left) * right).half())


def test_the_residual_is_added_in_place():
    q, h, gamma = quantized("w4a16_g32", 40, 64), torch.randn(3, 40).bfloat16(), torch.rand(40)
    x, before, bias = torch.randn(3, 64).half(), h.clone(), torch.randn(40).half()
    following, squares = residual_gemm(x, FragmentWeight.pack(q), h, gamma, bias, factor=0.25)
    y = x.double() @ q.dequantize(torch.float64).T + bias.double()
    assert torch.equal(h, (before.double() + y).bfloat16())
    assert torch.equal(following, (h.double() * gamma.double() * 0.25).half()) and following.dtype == torch.float16
    assert torch.allclose(squares.sum(0), h.float().square().sum(1)) and squares.dtype == torch.float32


def test_refusals():
    w, x = FragmentWeight.pack(quantized("w4a16_g32", 64, 64)), torch.zeros(2, 64).half()
    assert chain_refusals(w, 64, torch.bfloat16) == ()
    assert chain_refusals(w, 65, torch.float32) == (
        "takes x in fp16 or bf16, not torch.float32",
        "takes 1 to 64 tokens, not 65",
    )
    eight = OperandWeight.pack(quantized("w8a8", 64, 64))
    assert chain_refusals(eight, 1, x.dtype) == (
        "takes weights in fragment order (FragmentWeight), not OperandWeight",
        "takes activations of 16 bits; w8a8 quantizes them to int8",
    )
    with pytest.raises(ValueError, match="residual_gemm takes 1 to 64 tokens, not 65"):
        residual_gemm(torch.zeros(65, 64).half(), w, torch.zeros(65, 64).half(), torch.ones(64))
    with pytest.raises(
        ValueError, match=r"norm_gemm: squares are float32 \[parts, 2\], 1 to 256 parts, got torch.float32 \(1, 3\)"
    ):
        norm_gemm(x, w, torch.ones(1, 3), width=64, eps=0.0)
    with pytest.raises(
        ValueError, match="gated is none, or silu or gelu_tanh with row blocks of 8 gates and 8 ups; got relu, N 64"
    ):
        norm_gemm(x, w, torch.ones(1, 2), width=64, eps=0.0, gated="relu")
    with pytest.raises(
        ValueError, match=r"h is fp16 or bf16 \[2, N\], contiguous; got torch.float16 \(2, 64\), strides \(128, 1\)"
    ):
        residual_gemm(x, w, torch.zeros(2, 128).half()[:, :64], torch.ones(64))
    with pytest.raises(ValueError, match=r"gamma is floating-point \[64\], got torch.float32 \(3,\)"):
        residual_gemm(x, w, torch.zeros(2, 64).half(), torch.ones(3))
    with pytest.raises(ValueError, match="residual_gemm: w4a16_g32 with N 32 and K 64 takes codes"):
        residual_gemm(x, w, torch.zeros(2, 32).half(), torch.ones(32))


def operands(device, m=3, n=64, k=64, dense=False):
    w = FragmentWeight.pack(quantized("w4a16_g32", n, k, device))
    x, h = (torch.randn(m, size, device=device, dtype=torch.float16) for size in (k, n))
    squares, gamma = torch.rand(2, m, device=device), torch.rand(n, device=device)
    weight, scheme = (w.codes, w.scale, w.channel_scale), "w4a16_g32"
    if dense:
        weight, scheme = (torch.randn(n, k, device=device, dtype=torch.float16), None, None), "dense"
    options = False, w.subnormal and not dense
    norm = x, *weight, squares, None, scheme, n, k, 1e-5, 1.0, "silu", *options
    return norm, (x, *weight, h, gamma, None, scheme, 1.0, *options)


@pytest.mark.parametrize("dense", [False, True])
def test_opcheck(dense):
    norm, residual = operands("cpu", dense=dense)
    torch.library.opcheck(torch.ops.lowbit.norm_gemm.default, norm)
    torch.library.opcheck(torch.ops.lowbit.residual_gemm.default, residual)


@pytest.mark.parametrize("dense", [False, True])
def test_compiles_as_one_graph(dense):
    x, h, squares, gamma = torch.randn(3, 64).half(), torch.randn(3, 64).half(), torch.rand(2, 3), torch.rand(64)
    w = DenseWeight(torch.randn(64, 64).half()) if dense else FragmentWeight.pack(quantized("w4a16_g32", 64, 64))

    def products(x, squares, h):
        y = norm_gemm(x, w, squares, width=64, eps=1e-5)
        return residual_gemm(y, w, h, gamma)

    expected = products(x, squares, h.clone())
    found = torch.compile(products, fullgraph=True, backend="aot_eager")(x, squares, h.clone())
    assert all(map(torch.equal, found, expected))


# ---- on a GPU


@gpu
@pytest.mark.parametrize("dense", [False, True])
def test_opcheck_on_a_gpu(dense):
    norm, residual = operands("cuda", n=128, k=256, dense=dense)
    torch.library.opcheck(torch.ops.lowbit.norm_gemm.default, norm)
    torch.library.opcheck(torch.ops.lowbit.residual_gemm.default, residual)


MS = [1, 2, 5, 8, 9, 16, 17, 32, 50, 64]
RAGGED = [(1000, 576), (344, 1096), (4096, 2048)]
ONCE = [(scheme, HALVES[i % 2]) for i, scheme in enumerate(SCHEMES)]
GATED = [
    ("w4a16_g128", torch.float16),
    ("w6e3m2a16", torch.bfloat16),
    ("w8a16", torch.float16),
    ("w4a16_g128_z", torch.bfloat16),
]
"""Each entry compiles a kernel for every shape and for 8, 16, 32 and 64 tokens."""


def poison(*shapes, dtype=torch.float32):
    """Fills the memory that the allocator returns next with NaN."""
    for shape in shapes:
        torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def random_rows(k, dtype, *sizes):
    """Random [CHAIN_TOKENS, size] tensors, one per size; a test with m tokens uses the first m rows."""
    generator = torch.Generator("cuda").manual_seed(k)
    return [torch.randn(CHAIN_TOKENS, size, device="cuda", dtype=dtype, generator=generator) for size in sizes]


def residual_twice(x, w, before, gamma, bias):
    """h [M, N], x of the next product and sums of squares. Runs twice on poisoned memory and asserts equal bits."""
    found = []
    for _ in range(2):
        h = before.clone()
        poison(before.shape, dtype=before.dtype)
        poison((256, len(before)))
        found.append((h, *residual_gemm(x, w, h, gamma, bias, factor=0.5)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "same input, same bits"
    return found[0]


@gpu
@pytest.mark.parametrize(
    ("gated", "scheme", "dtype"),
    [*(("none", *one) for one in ONCE), *((gate, *one) for gate in GATES for one in GATED)],
    ids=str,
)
def test_norm_on_a_gpu(gated, scheme, dtype):
    for place, (n, k) in enumerate(RAGGED):
        n = n // 16 * 16 if gated != "none" else n
        w = FragmentWeight.pack(q := quantized(scheme, n, k, "cuda", place))
        bias = torch.randn(n, device="cuda", dtype=dtype) if place % 2 else None
        (rows,), all_squares = random_rows(k, dtype, k), k * (0.5 + torch.rand(1 + 37 * place, CHAIN_TOKENS, device="cuda"))
        for m in MS:
            x, squares = rows[:m], all_squares[:, :m].contiguous()
            given = {"width": k, "eps": 1e-5, "gated": gated}
            poison((m, n), dtype=dtype)
            y = norm_gemm(x, w, squares, bias, factor=0.5, **given)
            expected = norm_gemm_reference(x, q, squares, bias, x_factor=0.5, **given)
            honest = norm_gemm_reference(x, DenseWeight(q.dequantize(dtype)), squares, bias, x_factor=0.5, **given).to(dtype)
            assert relative_error(y, expected) <= 2 * relative_error(honest, expected) + 2e-5, (n, k, m)
            assert torch.equal(y, norm_gemm(x, w, squares, bias, factor=0.5, **given)), "same input, same bits"


@gpu
@pytest.mark.parametrize(("scheme", "dtype"), ONCE, ids=str)
def test_residual_on_a_gpu(scheme, dtype):
    for place, (n, k) in enumerate(RAGGED):
        w = FragmentWeight.pack(q := quantized(scheme, n, k, "cuda", place))
        gamma = torch.rand(n, device="cuda") + 0.5
        bias = torch.randn(n, device="cuda", dtype=dtype) if place % 2 else None
        rows, all_h = random_rows(k, dtype, k, n)
        for m in MS:
            x, before = rows[:m], all_h[:m]
            added, _, _ = residual_gemm_reference(x, q, before, gamma, bias)
            honest, _, _ = residual_gemm_reference(x, DenseWeight(q.dequantize(dtype)), before, gamma, bias)
            h, following, squares = residual_twice(x, w, before, gamma, bias)
            assert relative_error(h, added) <= 2 * relative_error(honest, added) + 2e-4, (n, k, m)
            assert torch.equal(following, (h.float() * (gamma * 0.5)).to(dtype)), (n, k, m)
            assert torch.allclose(squares.sum(0), h.float().square().sum(1), rtol=1e-5) and torch.isfinite(squares).all()


@gpu
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w8a16"])
def test_rows_do_not_depend_on_the_batch(scheme):
    for n, k in RAGGED[1:]:
        n = n // 16 * 16
        w, gamma = FragmentWeight.pack(quantized(scheme, n, k, "cuda")), torch.rand(n, device="cuda")
        rows, all_h = random_rows(k, torch.float16, k, n)
        all_squares, whole = k * torch.rand(5, CHAIN_TOKENS, device="cuda"), None
        for m in reversed(MS):
            h = all_h[:m].clone()
            y = norm_gemm(rows[:m], w, all_squares[:, :m], width=k, eps=1e-5, gated="silu", batch_invariant=True)
            found = (y, h, *residual_gemm(rows[:m], w, h, gamma, batch_invariant=True))
            whole = whole or found
            assert all(torch.equal(one, all_[:m]) for one, all_ in zip(found[:3], whole, strict=False))
            assert torch.equal(found[3], whole[3][:, :m])


def in_parts(*counts):
    """Parameters (token counts, slice of the tiles). Kernels take seconds to compile, so several processes share the tiles of a
    test. The token counts of one test share kernels.
    """
    return [pytest.param(ms, slice(i, None, of), id=f"{ms}-{i}") for ms, of in counts for i in range(of)]


@gpu
@pytest.mark.parametrize(("ms", "part"), in_parts(((1, 8), 3), ((16,), 12), ((19,), 4), ((64,), 4)))
def test_every_tile_on_a_gpu(ms, part):
    """All candidates, including splits and two rows of warps, on shapes with a partial row block and overlapping blocks."""
    from lowbit.hardware.machine import machine_of
    from lowbit.kernels.choose.fused_gemm import chain_candidates
    from lowbit.kernels.choose.tiles import GemmShape, RingTile
    from lowbit.kernels.parts.epilogue import Epilogue
    from lowbit.kernels.sm80.small_m_gemm import RingPlan
    from lowbit.kernels.sm90.large_m_gemm import WgmmaPlan
    from lowbit.ops.workspace import workspace

    machine, n, k = machine_of("cuda"), 1008, 2176
    q = quantized("w4a16_g128", n, k, "cuda")
    w = FragmentWeight.pack(q)
    form = w.form
    weight = w.codes, w.scale, w.channel_scale, None

    def plan_of(shape, tile, epilogue):
        if isinstance(tile, RingTile):
            return RingPlan(shape, tile, form, torch.float16, epilogue, machine.arch)
        return WgmmaPlan(shape, tile, form, torch.float16, epilogue, machine.sm_count)

    for m in ms:
        shape = GemmShape(m, n, k, 4)
        x, h0 = (torch.randn(m, size, device="cuda", dtype=torch.float16) for size in (k, n))
        gamma, squares = torch.rand(n, device="cuda"), k * torch.rand(11, m, device="cuda")
        more = [RingTile(8 if m <= 8 else 16, 3, 1, 2, 4, 2), RingTile(8 if m <= 8 else 16, 5, 1, 1, 8, 3)] if m <= 16 else []
        tiles = [row.tile for row in chain_candidates("residual", shape, machine) if not row.reasons] + more
        assert len(tiles) > 8
        added, _, _ = residual_gemm_reference(x, q, h0, gamma)
        wanted = {gated: norm_gemm_reference(x, q, squares, width=k, eps=1e-5, gated=gated) for gated in ("silu", "none")}
        for tile in sorted(tiles, key=str)[part]:
            plan = plan_of(shape, tile, Epilogue(form.channel_scale, False, h_type="fp16"))
            h, parts = h0.clone(), torch.full((plan.squares_parts, m), float("nan"), device="cuda")
            poison((m, n), (n, m))
            following = plan(x, *weight, *workspace(x.device, *plan.workspace), parts, h, gamma, 1.0)
            assert relative_error(h, added) < 1e-3 and relative_error(parts.sum(0), h.double().square().sum(1)) < 1e-5, str(
                tile
            )
            assert torch.equal(following, (h.float() * gamma).half()), str(tile)
            for gated, expected in wanted.items():
                norm = plan_of(shape, tile, Epilogue(form.channel_scale, False, 11, gated))
                poison((m, n))
                y = norm(x, *weight, *workspace(x.device, *norm.workspace), squares, None, None, 1.0, 1 / k, 1e-5)
                assert relative_error(y, expected) < 2e-3, (str(tile), gated)


@gpu
@pytest.mark.parametrize("m", [1, 7, 16, 40, 64])
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8a16"])
def test_a_layer_in_a_graph(scheme, m):
    """Four chained GEMMs, each started before the previous one has finished, replayed from a graph: equal to separate
    launches.
    """
    hidden, inner = 1024, 2816
    generator = torch.Generator("cuda").manual_seed(m)
    q = {
        "qkv": quantized(scheme, 1536, hidden, "cuda", 1), "o": quantized(scheme, hidden, 1536, "cuda", 2),
        "gate": quantized(scheme, inner, hidden, "cuda", 3), "up": quantized(scheme, inner, hidden, "cuda", 4),
        "down": quantized(scheme, hidden, inner, "cuda", 5),
    }  # fmt: skip
    w = {name: FragmentWeight.pack(q[name]) for name in ("qkv", "o", "down")} | {"gu": pack_gated(q["gate"], q["up"])}
    gamma = [torch.rand(hidden, device="cuda", generator=generator) + 0.5 for _ in range(2)]
    start = torch.randn(m, hidden, device="cuda", dtype=torch.float16, generator=generator)
    h = start.clone()

    def layers(count, pause=lambda: None):
        h.copy_(start)
        x, squares = (h.float() * gamma[0]).half(), h.float().square().sum(1)[None].contiguous()
        for _ in range(count):
            given = {"width": hidden, "eps": 1e-5}
            pause()
            x = norm_gemm(x, w["qkv"], squares, **given)
            pause()
            x, squares = residual_gemm(x, w["o"], h, gamma[1])
            pause()
            x = norm_gemm(x, w["gu"], squares, gated="silu", **given)
            pause()
            x, squares = residual_gemm(x, w["down"], h, gamma[0])
        return x, squares

    expected = [t.clone() for t in (*layers(6, torch.cuda.synchronize), h)]
    torch.cuda.synchronize()  # the copy of h must end before another stream writes h
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers(1)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            made = layers(6)
    for _ in range(3):
        for t in made:
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip((*made, h), expected, strict=True))
    reference = start.double()
    for _ in range(6):
        normed = rms_norm(reference, gamma[0].double(), 1e-5)
        reference = reference + normed @ q["qkv"].dequantize(torch.float64).T @ q["o"].dequantize(torch.float64).T
        normed = rms_norm(reference, gamma[1].double(), 1e-5)
        gate, up = (normed @ q[name].dequantize(torch.float64).T for name in ("gate", "up"))
        reference = reference + (torch.nn.functional.silu(gate) * up) @ q["down"].dequantize(torch.float64).T
    assert relative_error(h, reference) < 5e-3


@gpu
def test_large_h_on_a_gpu():
    q, following = quantized("w4a16_g128", 512, 512, "cuda"), quantized("w8a16", 256, 512, "cuda", 1)
    h = torch.randn(3, 512, device="cuda", dtype=torch.float16)
    h[:, 7], h[1, 9] = 6e4, -5e4
    gamma = torch.linspace(0.1, 9, 512, device="cuda").half()
    expected = rms_norm(h.double(), gamma.double(), 1e-6) @ following.dequantize(torch.float64).T
    zero, factor = torch.zeros_like(h), factor_of(gamma, h.dtype)
    x, squares = residual_gemm(zero, FragmentWeight.pack(q), h, gamma, factor=factor)
    y = norm_gemm(x, FragmentWeight.pack(following), squares, width=512, eps=1e-6, factor=factor)
    assert torch.isfinite(y).all() and relative_error(y, expected) < 1e-3


@gpu
@pytest.mark.parametrize("m", [1, 3, 8, 11, 16, 19, 50])
def test_tokens_that_do_not_exist_are_not_read(m):
    """The memory after the m rows of x holds NaN, which must not reach y through the ring buffer."""
    for k in (1000, 1024):
        w = FragmentWeight.pack(quantized("w4a16_g128", 512, k, "cuda"))
        room = torch.full((64, k), float("nan"), device="cuda", dtype=torch.float16)
        room[:m] = torch.randn(m, k, device="cuda", dtype=torch.float16)
        y = norm_gemm(room[:m], w, torch.full((1, m), float(k), device="cuda"), width=k, eps=0.0)
        assert torch.isfinite(y).all()


@gpu
@pytest.mark.parametrize("m", [20, 64])
def test_blocks_of_several_tiles(m):
    """More tiles of 256 rows than an H200 has SMs: the epilogue's shared memory must be right for a block's next tile too."""
    n, k = 36_864, 256
    q = quantized("w4a16_g128", n, k, "cuda")
    w, (x,) = FragmentWeight.pack(q), random_rows(k, torch.float16, k)
    squares = k * (0.5 + torch.rand(7, m, device="cuda"))
    for gated in ("none", "silu"):
        poison((m, n), dtype=torch.float16)
        y = norm_gemm(x[:m], w, squares, width=k, eps=1e-5, gated=gated)
        assert relative_error(y, norm_gemm_reference(x[:m], q, squares, width=k, eps=1e-5, gated=gated)) < 2e-3


@gpu
def test_h_of_another_type_or_off_the_grid():
    q, gamma = quantized("w4a16_g128", 512, 256, "cuda"), torch.rand(512, device="cuda")
    w, (x, h) = FragmentWeight.pack(q), random_rows(256, torch.float16, 256, 512)
    for m in (5, 40):
        wide = h[:m].bfloat16()
        added, following, _ = residual_gemm_reference(x[:m], q, wide, gamma)
        found, _ = residual_gemm(x[:m], w, wide, gamma)
        assert relative_error(wide, added) < 4e-3 and relative_error(found, following) < 4e-3
    room = torch.zeros(40 * 512 + 1, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match="h must start at a multiple of 16 bytes"):
        residual_gemm(x[:40], w, room[1:].view(40, 512), gamma)


# ---- weights of 16 bits


DENSE_MS = [1, 2, 5, 8, 9, 13, 16]


def with_nan_around(values):
    """A copy of `values` with NaN before and after, which shows reads out of bounds."""
    n, k = values.shape
    around = torch.full((n + 32, k), float("nan"), device=values.device, dtype=values.dtype)
    around[16 : 16 + n] = values
    return around[16 : 16 + n]


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1000, 576), (347, 1096), (4096, 2048), (40, 72)])
def test_weights_of_16_bits_on_a_gpu(n, k, dtype):
    w = DenseWeight(with_nan_around(torch.randn(n, k, device="cuda", dtype=dtype) * k**-0.5))
    gamma, bias = torch.rand(n, device="cuda") + 0.5, torch.randn(n, device="cuda", dtype=dtype)
    rows, all_h = random_rows(k, dtype, k, n)
    all_squares = k * (0.5 + torch.rand(37, CHAIN_TOKENS, device="cuda"))
    half = n // 16 * 16
    pairs = DenseWeight(with_nan_around(w.values[:half].clone()))
    alternating = DenseWeight(alternate(*pairs.values.chunk(2))), alternate(*bias[:half].chunk(2))
    for m in DENSE_MS:
        x, squares, before = rows[:m], all_squares[:, :m].contiguous(), all_h[:m]
        given = {"width": k, "eps": 1e-5}
        for gated, used, b, reference in (
            ("none", w, bias, (w, bias)), ("silu", pairs, bias[:half].clone(), alternating),
            ("gelu_tanh", pairs, None, (alternating[0], None)),
        ):  # fmt: skip
            poison((m, n), dtype=dtype)
            y = norm_gemm(x, used, squares, b, factor=0.5, gated=gated, **given)
            expected = norm_gemm_reference(x, reference[0], squares, reference[1], x_factor=0.5, gated=gated, **given)
            honest = expected.to(dtype)
            assert relative_error(y, expected) <= 2 * relative_error(honest, expected) + 2e-5, (m, gated)
            assert torch.equal(y, norm_gemm(x, used, squares, b, factor=0.5, gated=gated, **given)), "same input, same bits"
        added, _, _ = residual_gemm_reference(x, w, before, gamma, bias)
        h, following, squares = residual_twice(x, w, before, gamma, bias)
        assert relative_error(h, added) <= 2e-4
        assert torch.equal(following, (h.float() * (gamma * 0.5)).to(dtype))
        assert torch.allclose(squares.sum(0), h.float().square().sum(1), rtol=1e-5)


@gpu
@pytest.mark.parametrize(("ms", "part"), in_parts(((1, 8), 4), ((9, 16), 10)))
def test_every_tile_of_16_bit_weights_on_a_gpu(ms, part):
    """All candidates, on shapes with a partial row block, a tail of K and overlapping blocks."""
    from lowbit.hardware.machine import machine_of
    from lowbit.kernels.choose.fused_gemm import chain_candidates
    from lowbit.kernels.choose.tiles import DENSE_BITS, GemmShape
    from lowbit.kernels.parts.epilogue import Epilogue
    from lowbit.kernels.sm80.small_m_gemm import RingPlan
    from lowbit.ops.workspace import workspace

    machine, n, k = machine_of("cuda"), 1003, 2184
    values = torch.randn(n, k, device="cuda", dtype=torch.float16) * k**-0.5
    values = with_nan_around(values)
    for m in ms:
        shape = GemmShape(m, n, k, DENSE_BITS)
        x, h0 = (torch.randn(m, size, device="cuda", dtype=torch.float16) for size in (k, n))
        gamma, squares = torch.rand(n, device="cuda"), k * torch.rand(11, m, device="cuda")
        added, _, _ = residual_gemm_reference(x, DenseWeight(values), h0, gamma)
        expected = norm_gemm_reference(x, DenseWeight(values), squares, width=k, eps=1e-5)
        tiles = [row.tile for row in chain_candidates("residual", shape, machine) if not row.reasons]
        assert len(tiles) > 8
        for tile in sorted(tiles, key=str)[part]:
            residual = Epilogue(False, False, h_type="fp16")
            plan, h = RingPlan(shape, tile, DENSE_FORM, torch.float16, residual, machine.arch), h0.clone()
            parts = torch.full((plan.squares_parts, m), float("nan"), device="cuda")
            poison((m, n), (n, m))
            plan(x, values, None, None, None, *workspace(x.device, *plan.workspace), parts, h, gamma, 1.0)
            assert relative_error(h, added) < 1e-3 and relative_error(parts.sum(0), h.double().square().sum(1)) < 1e-5, str(
                tile
            )
            norm = RingPlan(shape, tile, DENSE_FORM, torch.float16, Epilogue(False, False, 11), machine.arch)
            poison((m, n))
            space = workspace(x.device, *norm.workspace)
            y = norm(x, values, None, None, None, *space, squares, None, None, 1.0, 1 / k, 1e-5)
            assert relative_error(y, expected) < 2e-3, str(tile)
