"""The tensor-core kernels for 8-bit activations against a float64 product of the same values and against `scaled_gemm`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit.formats import parse_scheme
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.scaled_gemm import candidates_scaled
from lowbit.kernels.reference.gemm import FUNCTIONS, scaled_gemm_reference
from lowbit.ops import byte_gemm, quantize_activations
from lowbit.ops.byte_gemm import plan_for_scaled
from lowbit.ops.scaled_gemm import activation_dtype
from lowbit.ops.table import scaled_shape
from lowbit.ops.workspace import workspace
from lowbit.pack import OperandWeight
from lowbit.quantize import rtn

gpu = pytest.mark.gpu
EIGHT = ["w8a8", "w8a8_t", "fp8", "fp8_dynamic", "fp8_block", "w8e4m3a8e5m2"]
NARROW = ["w4a8", "w4a8_g128", "w4a8_g256", "w6a8", "w3a8_g128", "w4a8e4m3", "w4a8e4m3_g128", "w6e3m2a8e4m3", "w6e2m3a8e4m3"]
EPS = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 1e-6}
ERROR = {"int8": 0.0, "fp8": 4e-4, "positive": 1e-3}
"""Relative error of the sums, without the rounding of y: for int8, fp8 of both signs, and positive fp8
(docs/internals/numerics.md)."""


def problem(scheme, m, n, k, kind="token", zero=False, seed=0):
    """(weight, x codes, x scales, x zeros, float64 product)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    parsed = parse_scheme(scheme)
    q = rtn(torch.randn(n, k, device="cuda", generator=generator) * 0.05, parsed)
    x = torch.randn(m, k, device="cuda", generator=generator) * 40
    dtype = activation_dtype(parsed.activation)
    x = x.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else x.clamp(-448, 448).to(dtype)
    shape = {"tensor": (1,), "token": (m, 1), "block": (m, -(-k // 128))}[kind]
    x_scale = torch.rand(shape, device="cuda", generator=generator) + 0.5
    x_zero = torch.randint(-30, 30, (m, 1), device="cuda", generator=generator, dtype=torch.int32) if zero else None
    return q, x, x_scale, x_zero, scaled_gemm_reference(x, x_scale, q, x_zero=x_zero)


def relative_error(y, reference) -> float:
    return float((y.double() - reference).norm() / reference.norm())


def bound(scheme, dtype) -> float:
    return EPS[dtype] + ERROR["int8" if parse_scheme(scheme).activation.name == "int8" else "fp8"]


def compare(scheme, m, n, k, kind, dtype):
    integer = parse_scheme(scheme).activation.name == "int8"
    bias = torch.randn(n, device="cuda", dtype=dtype)
    q, x, x_scale, x_zero, expected = problem(scheme, m, n, k, kind, zero=integer and kind == "token")
    w = OperandWeight.pack(q)
    torch.full((m, n), float("nan"), dtype=dtype, device="cuda")  # poisons memory to be reused
    y = byte_gemm(x, x_scale, w, bias, dtype=dtype, x_zero=x_zero)
    assert y.dtype == dtype and relative_error(y, expected + bias.double()) <= bound(scheme, dtype)
    assert torch.equal(y, byte_gemm(x, x_scale, w, bias, dtype=dtype, x_zero=x_zero)), "same input, same bits"


@gpu
@pytest.mark.parametrize("scheme", EIGHT + NARROW)
@pytest.mark.parametrize(("m", "n", "k", "kind"), [(13, 1000, 576, "tensor"), (300, 520, 2048, "token")])
def test_against_float64(scheme, m, n, k, kind):
    compare(scheme, m, n, k, kind, torch.bfloat16)


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "w4a8_g128", "w6e3m2a8e4m3"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 512, 1024), (40, 333, 1090)])
def test_ragged_shapes(scheme, m, n, k):
    compare(scheme, m, n, k, "token", torch.bfloat16)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "w4a8_g128"])
def test_other_types_of_y(scheme, dtype):
    compare(scheme, 40, 520, 1024, "token", dtype)
    compare(scheme, 300, 520, 1024, "tensor", dtype)


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "fp8_block"])
@pytest.mark.parametrize("m", [1, 30, 200])
def test_scales_of_blocks_of_x(scheme, m):
    q, x, x_scale, _, expected = problem(scheme, m, 400, 1100, "block")
    y = byte_gemm(x, x_scale, OperandWeight.pack(q), dtype=torch.float16)
    assert relative_error(y, expected) <= bound(scheme, torch.float16)


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "fp8_block", "w4a8", "w4a8e4m3_g128", "w6e3m2a8e4m3"])
@pytest.mark.parametrize("m", [3, 300])
def test_tiles_other_than_the_chosen_one(scheme, m):
    """Runs some of the candidates, including the widest."""
    n, k = 520, 2048
    q, x, x_scale, _, expected = problem(scheme, m, n, k)
    w = OperandWeight.pack(q)
    shape = scaled_shape(q.scheme, m, n, k)
    rows = [row.tile for row in candidates_scaled(shape, typical_machine(90)) if not row.reasons]
    widest = [tile for tile in rows if tile.splits == 1 and tile.columns == max(t.columns for t in rows if t.splits == 1)]
    pairs = [tile for tile in rows if tile.pair and tile.columns >= 64]
    for tile in dict.fromkeys(rows[:: max(1, len(rows) // 4)] + widest + pairs):
        plan = plan_for_scaled(tile, shape, q.scheme, torch.bfloat16, "token", False, False, machine_of(x.device))
        arguments = (x, x_scale, None, w.codes, w.scale, w.channel_scale, w.sums, None)
        y, again = (plan(*arguments, *workspace(x.device, *plan.workspace)) for _ in range(2))
        assert relative_error(y, expected) <= bound(scheme, torch.bfloat16), str(tile)
        assert torch.equal(y, again), str(tile)


@gpu
@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_integers_are_exact(m):
    """With scales of 1 and small sums, y is the integer product to the last bit."""
    generator = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(126, 131, (256, 1024), dtype=torch.uint8, device="cuda", generator=generator)
    q = rtn(torch.randn(256, 1024, device="cuda"), "w8a8")
    q = type(q)(codes, torch.ones_like(q.scale), None, q.scheme)
    x = torch.randint(-3, 4, (m, 1024), device="cuda", generator=generator, dtype=torch.int8)
    y = byte_gemm(x, torch.ones(1, device="cuda"), OperandWeight.pack(q), dtype=torch.float32)
    assert torch.equal(y.double(), x.double() @ (codes.double() - 128).T)


@gpu
@pytest.mark.parametrize("function", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "w4a8_g128"])
@pytest.mark.parametrize("m", [3, 300])
def test_functions(scheme, function, m):
    q, x, x_scale, _, expected = problem(scheme, m, 520, 1024)
    x_scale, expected = x_scale / expected.std() * 2, expected / expected.std() * 2
    bias = torch.randn(520, device="cuda", dtype=torch.float16)
    y = byte_gemm(x, x_scale, OperandWeight.pack(q), bias, dtype=torch.float16, function=function)
    wanted = FUNCTIONS[function](expected + bias.double())
    assert relative_error(y, wanted) <= bound(scheme, torch.float16) + 2e-6
    assert float((y.double() - wanted).abs().max()) < 2e-2


@gpu
@pytest.mark.parametrize("m", [3, 300])
def test_no_function_hides_what_is_not_a_number(m):
    q, x, x_scale, _, _ = problem("w8a8", m, 128, 1024)
    x_scale[1] = float("nan")
    for function in FUNCTIONS:
        y = byte_gemm(x, x_scale, OperandWeight.pack(q), dtype=torch.float16, function=function)
        assert y[1].isnan().all() and y[0].isfinite().all()


@gpu
@pytest.mark.parametrize("scheme", ["fp8_dynamic", "w8e4m3a8e5m2"])
@pytest.mark.parametrize("m", [1, 30, 300])
def test_fast_sums_of_fp8_are_near(scheme, m):
    """Fast sums have the error of the tensor core's 14-bit accumulation, more than promoted sums, and are deterministic."""
    q, x, x_scale, _, expected = problem(scheme, m, 520, 4096)
    w = OperandWeight.pack(q)
    fast, again = (byte_gemm(x, x_scale, w, dtype=torch.float32, fast_accum=True) for _ in range(2))
    exact = byte_gemm(x, x_scale, w, dtype=torch.float32)
    assert relative_error(exact, expected) < ERROR["fp8"]
    assert relative_error(exact, expected) < relative_error(fast, expected) < 5e-3
    assert torch.equal(fast, again)


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_block", "w4a8e4m3", "w4a8e4m3_g128"])
def test_fast_sums_change_nothing_elsewhere(scheme):
    q, x, x_scale, _, _ = problem(scheme, 40, 520, 1024)
    w = OperandWeight.pack(q)
    assert torch.equal(byte_gemm(x, x_scale, w, fast_accum=True), byte_gemm(x, x_scale, w))


def exact_problem(scheme, m, n, k):
    """Scales are powers of two and values small: float32 is exact at every step, so codes must be exact, including at ties."""
    generator = torch.Generator("cuda").manual_seed(m)
    q = rtn(torch.randn(n, k, device="cuda", generator=generator), scheme)
    half = 1 << (q.scheme.weight.bits - 1)
    codes = torch.randint(half - 3, half + 4, (n, k), dtype=torch.uint8, device="cuda", generator=generator)
    scale = 2.0 ** torch.randint(-4, 1, tuple(q.scale.shape), device="cuda", generator=generator)
    q = type(q)(codes, scale.to(q.scale.dtype), None, q.scheme)
    x = torch.randint(-20, 21, (m, k), device="cuda", generator=generator, dtype=torch.int8)
    x_scale = 2.0 ** torch.randint(-3, 1, (m, 1), device="cuda", generator=generator)
    bias = torch.randint(-64, 64, (n,), device="cuda", generator=generator).half() / 4
    expected = (x.double() * x_scale) @ q.dequantize(torch.float64).T + bias.double()
    return q, x, x_scale, bias, expected


def exact_scale(expected):
    """A power of two for y's scale, small enough that the largest values saturate."""
    return torch.exp2((expected.abs().max() / 127).log2().floor()).float().reshape(1)


def exact_codes(expected, y_scale):
    return (expected / y_scale.double()).round().clamp(-128, 127).to(torch.int8)


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "w4a8_g128"])
@pytest.mark.parametrize(("m", "n"), [(1, 1024), (16, 1000), (64, 528), (300, 1024), (300, 1001)])
def test_codes_of_y_are_exact(scheme, m, n):
    q, x, x_scale, bias, expected = exact_problem(scheme, m, n, 1024)
    w, y_scale = OperandWeight.pack(q), exact_scale(expected)
    for function in ("none", "relu"):
        torch.full((m, n), 77, dtype=torch.int8, device="cuda")  # poisons memory to be reused
        y = byte_gemm(x, x_scale, w, bias, dtype=torch.int8, function=function, y_scale=y_scale)
        wanted = exact_codes(FUNCTIONS[function](expected), y_scale)
        assert y.dtype == torch.int8 and torch.equal(y, wanted) and wanted.unique().numel() > 60


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "w6e3m2a8e4m3"])
@pytest.mark.parametrize("m", [5, 300])
def test_codes_of_y_are_those_of_the_float_result(scheme, m):
    """Equal to quantizing the float32 result, except at ties, which the last bit decides."""
    q, x, x_scale, _, _ = problem(scheme, m, 512, 1024)
    w = OperandWeight.pack(q)
    y = byte_gemm(x, x_scale, w, dtype=torch.float32, function="gelu")
    y_scale = (y.abs().max() / 100).reshape(1)
    codes = byte_gemm(x, x_scale, w, dtype=torch.int8, function="gelu", y_scale=y_scale)
    wrong = codes != quantize_activations(y, "int8", scale=y_scale).codes
    steps = y / y_scale
    assert bool(((steps - steps.floor() - 0.5).abs() < 1e-3)[wrong].all()) and float(wrong.float().mean()) < 1e-3


@gpu
@pytest.mark.parametrize("k", [4096, 28672])
@pytest.mark.parametrize("positive", [False, True])
def test_sums_of_fp8_stay_close(k, positive):
    """The error stays within docs/internals/numerics.md, for random values, and for positive values, whose sums grow with K."""
    q, x, x_scale, _, _ = problem("fp8_dynamic", 64, 512, k)
    if positive:
        q = type(q)(q.codes & 127, q.scale, None, q.scheme)
        x = x.float().abs().to(x.dtype)
    expected = (x.double() * x_scale.double()) @ q.dequantize(torch.float64).T
    y = byte_gemm(x, x_scale, OperandWeight.pack(q), dtype=torch.float32)
    assert relative_error(y, expected) <= ERROR["positive" if positive else "fp8"]


@gpu
@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    m=st.integers(1, 600), n=st.integers(1, 700), k=st.integers(1, 1500), seed=st.integers(0, 99),
    scheme=st.sampled_from(["w8a8", "fp8_dynamic", "fp8_block", "w4a8_g128", "w6e3m2a8e4m3"]),
)  # fmt: skip
def test_random_shapes(m, n, k, seed, scheme):
    q, x, x_scale, _, expected = problem(scheme, m, n, k, seed=seed)
    y = byte_gemm(x, x_scale, OperandWeight.pack(q), dtype=torch.float16)
    assert relative_error(y, expected) <= bound(scheme, torch.float16)


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "w4a8_g128"])
def test_opcheck_compile_and_graphs(scheme):
    q, x, x_scale, _, _ = problem(scheme, 6, 512, 1024)
    w = OperandWeight.pack(q)
    x, x_scale = x.view(2, 3, 1024), x_scale.view(2, 3, 1)
    arguments = (x, x_scale, w.codes, w.scale, w.channel_scale, w.sums, None, scheme, 512, torch.float16)
    if x.dtype == torch.int8:  # opcheck does not support fp8
        torch.library.opcheck(torch.ops.lowbit.byte_gemm.default, arguments)

    def layer(x_scale):
        return torch.nn.functional.silu(byte_gemm(x, x_scale * 2, w, dtype=torch.float16)) + 1

    assert torch.allclose(torch.compile(layer, fullgraph=True)(x_scale), layer(x_scale), atol=2e-2, rtol=1e-2)
    for m in (1, 16, 64, 256):
        q, x, x_scale, _, _ = problem(scheme, m, 512, 1024)
        expected = byte_gemm(x, x_scale, w)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            byte_gemm(x, x_scale, w)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                byte_gemm(x, x_scale, w)
                y = byte_gemm(x, x_scale, w)
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, expected)


@gpu
@pytest.mark.parametrize("m", [1, 16, 100])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8_g128"])
def test_in_graphs_behind_a_kernel_that_writes_x(scheme, m):
    """The kernel starts before previous kernels have finished, and must wait for the x that they write."""
    q, x, x_scale, _, _ = problem(scheme, m, 1024, 1024)
    w = OperandWeight.pack(q)

    def chain(y):
        for _ in range(8):
            y = (byte_gemm(y, x_scale, w, dtype=torch.float16) * 0.3).clamp(-127, 127).to(torch.int8)
        return y

    expected = chain(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = chain(x)
    for _ in range(3):
        y.fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)


@gpu
def test_x_of_any_layout():
    q, _, x_scale, _, _ = problem("w8a8", 5, 128, 1000)
    w = OperandWeight.pack(q)
    wide = torch.randint(-128, 128, (5, 2003), device="cuda", dtype=torch.int8)
    for x in (wide[:, 1:1001], wide[:, ::2][:, :1000], wide[:, :1000].T.contiguous().T):
        assert torch.equal(byte_gemm(x, x_scale, w), byte_gemm(x.contiguous(), x_scale, w))
    apart = torch.cat([torch.zeros(3, 1, device="cuda"), x_scale])[3:]  # the view is not aligned to 16 bytes
    assert torch.equal(byte_gemm(x, apart, w), byte_gemm(x, x_scale, w))
    assert byte_gemm(x[:0], x_scale[:0], w).shape == (0, 128)


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "fp8_block", "w8e4m3a8e5m2", "w4a8_g128", "w6a8", "w4a8e4m3", "w6e3m2a8e4m3"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 300, 1024), (70, 333, 1090)])
def test_the_plain_kernel(scheme, m, n, k):
    """The mma.sync kernel for sm_80 and newer, on the present GPU."""
    from lowbit.kernels.sm80.scaled_gemm import PlainPlan

    integer = parse_scheme(scheme).activation.name == "int8"
    q, x, x_scale, x_zero, expected = problem(scheme, m, n, k, "block" if scheme == "fp8_block" else "token", zero=integer)
    w = OperandWeight.pack(q)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    kind = "block" if scheme == "fp8_block" else "token"
    plan = PlainPlan(scaled_shape(q.scheme, m, n, k, kind == "block"), q.scheme, torch.bfloat16, kind, integer, True)
    padded = torch.nn.functional.pad(x.view(torch.uint8), (0, -k % 16)).view(x.dtype)[:, :k]
    y = plan(padded, x_scale, x_zero, w.codes, w.scale, w.channel_scale, w.sums, bias, *workspace(x.device, 0, 0))
    assert relative_error(y, expected + bias.double()) <= bound(scheme, torch.bfloat16)


@gpu
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8_g128"])
def test_the_plain_kernel_makes_codes(scheme):
    from lowbit.kernels.sm80.scaled_gemm import PlainPlan

    q, x, x_scale, bias, expected = exact_problem(scheme, 70, 333, 1024)
    w, y_scale = OperandWeight.pack(q), exact_scale(expected)
    plan = PlainPlan(scaled_shape(q.scheme, 70, 333, 1024), q.scheme, torch.int8, "token", False, True, "relu")
    arguments = (x, x_scale, None, w.codes, w.scale, w.channel_scale, w.sums, bias, *workspace(x.device, 0, 0))
    assert torch.equal(plan(*arguments, y_scale), exact_codes(expected.relu(), y_scale))


@gpu
def test_bad_input():
    q, x, x_scale, _, _ = problem("w8a8", 4, 128, 1024)
    w = OperandWeight.pack(q)
    with pytest.raises(ValueError, match=r"takes x torch.int8 \[\.\., K\], got torch.float32"):
        byte_gemm(x.float(), x_scale, w)
    with pytest.raises(ValueError, match="takes codes \\(128, 960\\)|another K"):
        byte_gemm(x[:, :960], x_scale, w)
    with pytest.raises(ValueError, match=r"sums and bias are \[128\]"):
        byte_gemm(x, x_scale, w, torch.zeros(5, device="cuda"))
    with pytest.raises((ValueError, NotImplementedError), match="one device|CPU"):
        byte_gemm(x.cpu(), x_scale.cpu(), w)
    with pytest.raises(ValueError, match=r"y_scale is float32 \[1\] and makes y int8"):
        byte_gemm(x, x_scale, w, y_scale=torch.ones(1, device="cuda"))
    narrow = OperandWeight.pack(problem("w4a8", 4, 128, 1024)[0])
    with pytest.raises(ValueError, match="x with scales of blocks goes with 8-bit weights"):
        byte_gemm(x, torch.ones(4, 8, device="cuda"), narrow)
