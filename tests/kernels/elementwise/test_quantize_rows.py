"""The kernel that quantizes activations, alone and with fused norm, gate and residual. It is bit-equal to the reference;
without a GPU it runs in Triton's interpreter."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from lowbit.formats import number_format
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.reference.activations import quantize_activations_reference
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

triton = pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise import quantize_rows as kernel_module  # noqa: E402
from lowbit.kernels.elementwise.quantize_rows import CODE_VECTOR, QuantizePlan, QuantizeRequest  # noqa: E402
from lowbit.ops import (  # noqa: E402
    add_norm_quantize,
    layer_norm_quantize,
    quantize_activations,
    rms_norm_quantize,
    silu_mul_quantize,
)

gpu = pytest.mark.gpu


def hard_rows(m, k, dtype, device="cpu"):
    """Rows of all magnitudes, with ties, outliers and zeros; generated on the CPU, so equal on every device."""
    generator = torch.Generator().manual_seed(m * k)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-6, 3, m)[:, None]
    if m > 3:
        x[1] = 0
        x[2] = torch.arange(k) % 255 - 127  # has scale 1 exactly, so all values are integers
        x[3] = (torch.arange(k) % 255 - 127) / 2  # has ties
        x[3, 0] = 127
        x[0, ::3] = -0.0  # 8-bit floats keep the sign of zero
    return x.to(device=device, dtype=dtype)


def same(got, expected):
    return torch.equal(got.view(torch.uint8) if got.dtype.itemsize == 1 else got, expected.view(got.dtype) if
                       got.dtype.itemsize > 1 else expected.view(torch.uint8))  # fmt: skip


def check(x, name, group=0, static=False, symmetric=True, device=80):
    fmt = number_format(name)
    scale = torch.full((1,), 0.03, device=x.device) if static else None
    given = torch.full((1,), -37, dtype=torch.int32, device=x.device) if static and not symmetric else None
    aligned = x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    plan = QuantizePlan(*x.shape, QuantizeRequest("", fmt, group, static, symmetric), aligned, typical_machine(device))
    if x.is_cuda:
        torch.full((x.shape[0], x.shape[1] + CODE_VECTOR), -1, dtype=torch.int8, device=x.device)  # poisons memory to be reused
    codes, own, zero = quantize_activations_reference(x, fmt, group, scale, symmetric, given)
    expected = [t for t in ((codes,) if static else (codes, own, zero)) if t is not None]
    for _ in range(2 if x.is_cuda else 1):  # the first call compiles, the second uses the cached launch
        made = plan(x, None, None, None, scale, 0.0, given)
        assert len(made) == len(expected)
        for got, wanted in zip(made, expected, strict=True):
            assert got.shape == wanted.shape and same(got.contiguous(), wanted), (
                x.shape,
                x.dtype,
                name,
                group,
                static,
                symmetric,
            )
        assert made[0].stride(0) % CODE_VECTOR == 0 and made[0].data_ptr() % CODE_VECTOR == 0
        rest = made[0].as_strided((x.shape[0], made[0].stride(0)), (made[0].stride(0), 1))[:, x.shape[1] :]
        assert not rest.view(torch.uint8).any(), "a vector is read as a whole, so what is beyond K must be zero"


def check_without_a_gpu():
    """Runs the checks with the launch shapes for many rows, then with those for few rows."""
    for few in (0, 4):
        kernel_module.FEW_PER_SM = few
        check_in_one_shape()


def check_in_one_shape():
    for m, k in ((5, 64), (5, 203), (4, 576)):
        x = hard_rows(m, k, torch.float16)
        check(x, "int8")
        check(x, "int8", static=True)
        check(x, "int8", symmetric=False)
        check(x, "int8", static=True, symmetric=False)
        check(x, "int8", group=128)
    check(hard_rows(5, 219, torch.float16)[:, 3:203], "int8")
    for m, k, group in ((5, 64, 0), (4, 203, 128), (3, 2304, 0)):
        check_fused(m, k, group)
    check_layer_norm("cpu", 80)
    for m, k in ((5, 64), (4, 203), (3, 2304)):
        check_in_place(m, k)
        check_halves(m, k)


def check_in_place(m, k, device="cpu", sm=80, dtype=torch.float16):
    """Checks that the residual sum replaces x in place; the memory around x is poisoned."""
    generator = torch.Generator().manual_seed(k)
    x, other, weight = (torch.randn(n, k, generator=generator).to(device, dtype) for n in (m, m, 1))
    plan = QuantizePlan(
        m, k, QuantizeRequest("rms_norm", number_format("int8"), residual=True), k % 8 == 0, typical_machine(sm)
    )
    codes, scale, total = plan(x, other, weight[0], None, None, 1e-5)
    memory = torch.full(((m + 2) * k,), float("nan"), dtype=dtype, device=device)
    mine = memory[k:-k].view(m, k)
    mine.copy_(x)
    for _ in range(2 if mine.is_cuda else 1):
        made = plan(mine, other, weight[0], None, None, 1e-5, None, mine)
        assert made[2] is mine and torch.equal(mine, total) and torch.equal(total, (x.float() + other.float()).to(dtype))
        assert torch.equal(made[0], codes) and torch.equal(made[1], scale)
        assert memory[:k].isnan().all() and memory[-k:].isnan().all()
        mine.copy_(x)


def check_halves(m, k, device="cpu", sm=80):
    """Checks a gate whose inputs are the two halves of one product [M, 2 K], so rows are not adjacent."""
    both = torch.randn(m, 2 * k, generator=torch.Generator().manual_seed(k)).to(device, torch.float16)
    plan = QuantizePlan(m, k, QuantizeRequest("silu", number_format("int8")), k % 8 == 0, typical_machine(sm))
    gate, up = both[:, :k], both[:, k:]
    codes, scale = plan(gate, up, None, None, None, 0.0)
    again = QuantizePlan(m, k, QuantizeRequest("silu", number_format("int8")), k % 8 == 0, typical_machine(sm))
    apart = again(gate.contiguous(), up.contiguous(), None, None, None, 0.0)
    assert torch.equal(codes, apart[0]) and torch.equal(scale, apart[1])


def check_fused(m, k, group, device="cpu", sm=80):
    """Checks norms, gates and residuals fused into the kernel against the operator on a CPU."""
    generator = torch.Generator().manual_seed(k)
    x, other = (torch.randn(2, m, k, generator=generator).half() for _ in range(2))
    x, other = x[0], other[0]
    weight, bias = (torch.rand(k, generator=generator).half() + 0.5 for _ in range(2))
    cases = [
        ("rms_norm", None, None, rms_norm_quantize(x, weight, 1e-5, "int8", group=group)),
        ("rms_norm", other, None, rms_norm_quantize(x, weight, 1e-5, "int8", residual=other, group=group)),
        ("layer_norm", None, bias, layer_norm_quantize(x, weight, bias, 1e-5, "int8", group=group)),
        ("silu", other, None, silu_mul_quantize(x, other, "int8", group=group)),
    ]
    for before, beside, b, wanted in cases:
        residual = before != "silu" and beside is not None
        request = QuantizeRequest(before, number_format("int8"), group, False, True, residual)
        plan = QuantizePlan(m, k, request, k % 8 == 0, typical_machine(sm))
        given = (None if t is None else t.to(device) for t in (x, beside, None if before == "silu" else weight, b, None))
        made = [t.cpu() for t in plan(*given, 1e-5)]
        if residual:
            assert torch.equal(made[2], wanted.sum)
        values = exact(before, wanted.sum if residual else x, other, weight, b)
        near(type(wanted)(*made[:2]), wanted, wanted.scale.repeat_interleave(group or k, -1)[..., :k], values)


def check_layer_norm(device, sm):
    """Checks rows with a large mean and rows with an outlier against float64."""
    generator = torch.Generator().manual_seed(0)
    for k in (64, 203, 4096):
        x = torch.randn(5, k, generator=generator)
        x[1] += 3
        x[2] += 100
        x[3, 0], x[4, 5] = 3000, 20000
        weight, bias = torch.rand(k, generator=generator).half() + 0.5, torch.randn(k, generator=generator).half()
        x, weight, bias = x.half().to(device), weight.to(device), bias.to(device)
        wide = x.double()
        apart = wide - wide.mean(1, keepdim=True)
        exact = apart / (apart.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double()
        plan = QuantizePlan(5, k, QuantizeRequest("layer_norm", number_format("int8")), k % 8 == 0, typical_machine(sm))
        codes, scale = plan(x, None, weight, bias, None, 1e-5)
        torch.testing.assert_close(scale.double(), exact.abs().amax(1, keepdim=True) / 127, rtol=1e-5, atol=0)
        assert float((codes.double() * scale - exact).abs().max() / scale.max()) < 0.501


def test_the_arithmetic_in_tritons_interpreter():
    """Checks int8 only: the interpreter converts to 8-bit floats in another way than the hardware."""
    interpreted(check_without_a_gpu)


def compiled(sm, k, name="int8", before="", vectors=True, dtype=torch.float16, **asked):
    request = QuantizeRequest(before, number_format(name), **asked)
    plan = QuantizePlan(4096, k, request, vectors, typical_machine(sm))
    beside = meta((4096, k), dtype) if request.residual or before == "silu" else None
    weight = meta((k,), dtype) if before.endswith("norm") else None
    bias = meta((k,), dtype) if before == "layer_norm" else None
    scale = meta((1,), torch.float32) if request.static else None
    zero = meta((1,), torch.int32) if request.static and not request.symmetric else None
    code = compile_plan(plan, (meta((4096, k), dtype), beside, weight, bias, scale, 1e-5, zero), sm)
    return plan.launch.options["num_warps"], code


def plan_for(m, k, before="", **asked):
    return QuantizePlan(m, k, QuantizeRequest(before, number_format("int8"), **asked), True, typical_machine(90))


@pytest.mark.parametrize("sm", [80, 89, 90, 100])
def test_a_row_is_read_in_vectors_of_16_bytes(sm):
    """A row is read twice, first for the scale, then from the caches for the codes. So no registers hold x in between."""
    for k, (warps, kernel) in {k: compiled(sm, k) for k in (4096, 8192, 28672)}.items():
        vectors = k // (8 * 32 * warps)
        loads = [line for line in kernel.lines if "LDG" in line]
        assert len(loads) == 2 * vectors and all(".128" in line for line in loads), k
        assert kernel.count("STG.E.64") == vectors and kernel.stack_bytes <= (16 if k == 28672 else 0), k
        assert kernel.count("F2I") == 0, "rounding is an addition"
        assert kernel.shared_bytes <= 4 * warps, "only what the warps found is shared"


def test_what_is_fused_reads_everything_once():
    tensors = {"rms_norm": 3, "layer_norm": 3, "silu": 2}  # x and the other tensors of a row's length
    cases = [*itertools.product(("int8", "fp8_e4m3"), tensors)]
    made = [compiled(90, 8192, name, before, residual=before == "rms_norm") for name, before in cases]
    for (name, before), (warps, kernel) in zip(cases, made, strict=True):
        assert kernel.stack_bytes == 0, (name, before)
        assert sum(".128" in line for line in kernel.lines if "LDG" in line) == tensors[before] * 8192 // (8 * 32 * warps)


@pytest.mark.parametrize("m", [1, 4096])
@pytest.mark.parametrize("before", ["", "layer_norm"])
@pytest.mark.parametrize("k", [1, 8, 203, 576, 2048, 4096, 5120, 8192, 11008, 14336, 28672, 32768, 40000, 65536])
def test_threads_have_up_to_64_elements_and_few_too_many(k, before, m):
    _, threads, vector, chunks, *_ = plan_for(m, k, before).constants
    assert vector * chunks <= 64 and k <= threads * vector * chunks < k + threads * vector
    assert 3 * threads * vector * chunks <= max(4 * k, 3 * 256)
    if k % 1024 == 0:
        assert threads * vector * chunks == k, "whole chunks, which need no masks"


def test_few_rows_get_more_threads():
    shapes = [[plan_for(m, 8192, before).constants[1] for m in (16, 4096)] for before in ("", "layer_norm")]
    assert shapes == [[512, 256], [512, 128]]


@pytest.mark.parametrize(("sm", "name"), [(90, "fp8_e4m3"), (90, "fp8_e5m2"), (120, "fp8_e4m3"), (120, "fp8_e5m2")])
def test_floats_are_rounded_once(sm, name):
    _, kernel = compiled(sm, 4096, name)
    assert f"cvt.rn.satfinite.{name[4:]}x2.f32" in kernel.ptx and not re.search(
        r"cvt\.\w+\.f16\.f32|e[45]m[23]x2\.f16x2", kernel.ptx
    )


def test_few_instructions_per_element():
    """At 4 TB/s an SM of an H200 moves 17.3 bytes per clock and issues 128 thread instructions. The count includes work done
    once per row and rarely taken branches.
    """
    bounds = {"": (3, 0.4), "rms_norm": (3, 0.7), "layer_norm": (3, 0.85), "silu": (5, 0.45)}
    cases = [*itertools.product(bounds, (4096, 8192))]
    made = [compiled(90, k, before=before) for before, k in cases]
    for (before, k), (warps, kernel) in zip(cases, made, strict=True):
        nbytes, share = bounds[before]
        executed = max(number for number, line in enumerate(kernel.lines) if "EXIT" in line)
        assert executed * 32 * warps / k < share * 128 * nbytes / 17.3, (before, k)


@pytest.mark.parametrize("m", [1, 64])
def test_neighbours_in_the_stream_overlap(m):
    (_, kernel), (_, before) = (compiled(sm, 4096, before="rms_norm") for sm in (90, 80))
    lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
    start, wait = lines.index("PREEXIT"), lines.index("ACQBULK")
    reads = [i for i, line in enumerate(lines) if line.startswith("LDG")]
    assert start < wait and any(i < wait for i in reads) and any(i > wait for i in reads)
    assert before.count("ACQBULK") == before.count("PREEXIT") == 0


SHAPES = [(1, 8), (5, 64), (7, 203), (300, 576), (16, 4096), (33, 8192), (9, 28672), (3, 40000)]


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_bit_equal_to_the_reference(dtype, name, m, k):
    x = hard_rows(m, k, dtype, "cuda")
    check(x, name, device=90)
    check(x, name, static=True, device=90)
    check(x, name, group=128, device=90)
    check(hard_rows(m, k + 5, dtype, "cuda")[:, 3 : k + 3], name, device=90)
    if name == "int8":
        check(x, name, symmetric=False, device=90)
        check(x, name, static=True, symmetric=False, device=90)


@gpu
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(("m", "k"), [(7, 203), (16, 4096), (5, 5120), (9, 28672), (3, 40000)])
def test_in_the_shapes_for_many_rows(name, m, k, monkeypatch):
    monkeypatch.setattr(kernel_module, "FEW_PER_SM", 0)
    x = hard_rows(m, k, torch.float16, "cuda")
    check(x, name, device=90)
    check(x, name, group=128, device=90)
    if name == "int8":
        check(x, name, symmetric=False, device=90)
        check_fused(m, k, 0, "cuda", 90)
        check_fused(m, k, 128, "cuda", 90)


def exact(before, x, other, weight, bias):
    """The fused norm or gate of x (or of a residual sum that is already rounded), in float64."""
    x, other, weight, bias = (None if t is None else t.double() for t in (x, other, weight, bias))
    if before == "silu":
        return x * torch.sigmoid(x) * other
    if before == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    eps = 1e-5
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + (0 if bias is None else bias)


def near(got, wanted, spread, values):
    """Asserts that codes differ only where a value is a tie between two codes, which the last bits of float32 decide. `spread`
    are the scales and `values` the quantized values in float64, both [.., K].
    """
    assert torch.allclose(got.scale, wanted.scale, rtol=1e-5)
    one, other = got.codes.double(), wanted.codes.double()
    steps = values / spread + (0 if wanted.zero is None else wanted.zero)
    apart = one != other
    assert bool(((one - other).abs() <= other.abs() / 8 + 1.01).all())
    middle = (one + other) / 2
    assert bool(((steps - middle).abs() <= 1e-4 * steps.abs() + 1e-4)[apart].all())


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(("m", "k"), [(5, 64), (7, 203), (33, 4096), (6, 5120), (9, 28672)])
@pytest.mark.parametrize("group", [0, 128])
def test_fused_against_the_plain_operator(dtype, name, m, k, group):
    generator = torch.Generator().manual_seed(k)
    x, other = (torch.randn(2, m, k, generator=generator).to(dtype) for _ in range(2))
    weight, bias = (torch.rand(k, generator=generator).to(dtype) + 0.5 for _ in range(2))
    calls = {
        "rms_norm": lambda d: rms_norm_quantize(x.to(d), weight.to(d), 1e-5, name, group=group),
        "rms_norm + residual": lambda d: rms_norm_quantize(
            x.to(d), weight.to(d), 1e-5, name, residual=other.to(d), group=group
        ),
        "layer_norm": lambda d: layer_norm_quantize(x.to(d), weight.to(d), bias.to(d), 1e-5, name, group=group),
        "silu": lambda d: silu_mul_quantize(x.to(d), other.to(d), name, group=group),
    }
    if name == "int8" and group == 0:
        calls["silu, asymmetric"] = lambda d: silu_mul_quantize(x.to(d), other.to(d), name, symmetric=False)
    for what, call in calls.items():
        got, wanted = call("cuda"), call("cpu")
        assert (wanted.sum is None) == ("residual" not in what)
        if wanted.sum is not None:
            assert torch.equal(got.sum.cpu(), wanted.sum)
        size = group or k
        spread = wanted.scale.repeat_interleave(size, -1)[..., :k]
        before = what.split(",")[0].split(" ")[0]
        values = exact(before, x if wanted.sum is None else wanted.sum, other, weight, bias if before == "layer_norm" else None)
        got = type(got)(got.codes.cpu(), got.scale.cpu(), None if got.zero is None else got.zero.cpu())
        assert wanted.zero is None or torch.equal(got.zero, wanted.zero)
        near(got, wanted, spread, values)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [64, 203, 576, 4096, 8192])
def test_in_place_and_halves(k, dtype):
    for m in (1, 16, 1000):
        check_in_place(m, k, "cuda", 90, dtype)
        check_halves(m, k, "cuda", 90)


@gpu
def test_a_residual_in_place_in_a_graph():
    """The order is that of a decode step: the previous kernel writes delta, the next one reads the codes, and the one after
    that reads h."""
    delta, weight = (torch.randn(n, 4096, device="cuda", dtype=torch.float16) for n in (16, 1))

    def step(h):
        for _ in range(10):
            made = add_norm_quantize(h, delta * 0.5, weight[0], 1e-5, "int8")
            made = add_norm_quantize(h, (made.codes * made.scale).half(), weight[0], 1e-5, "int8")
        return made.codes, made.scale, h

    begin = torch.randn(16, 4096, device="cuda", dtype=torch.float16)
    wanted = [t.clone() for t in step(begin.clone())]
    torch.cuda.synchronize()
    graph, h = torch.cuda.CUDAGraph(), begin.clone()
    with torch.cuda.graph(graph):
        made = step(h)
    for _ in range(3):
        h.copy_(begin)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@gpu
def test_layer_norm_far_from_zero():
    check_layer_norm("cuda", 90)


@gpu
def test_what_is_not_finite_shows():
    x = torch.randn(4, 4096, device="cuda", dtype=torch.float16)
    x[1, 7], x[2, 9], x[3, 11] = float("inf"), float("nan"), -float("nan")
    for options in ({}, {"symmetric": False}):
        scale = quantize_activations(x, "int8", **options).scale
        assert scale.isfinite().tolist() == [[True], [False], [False], [False]]


@gpu
def test_in_a_graph_behind_and_before_other_kernels():
    """The previous kernel writes x, the next one reads codes and scale. Both must be correct although the three kernels
    overlap.
    """
    x = torch.randn(16, 4096, device="cuda", dtype=torch.float16)

    def step(x):
        a = quantize_activations(x * -1, "int8")
        return (a.codes.float() * a.scale).half() + 1

    step(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(20):
            y = step(y)
    expected = x.cpu()
    for _ in range(20):
        codes, scale, _ = quantize_activations_reference(expected * -1, number_format("int8"))
        expected = (codes.float() * scale).half() + 1
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y.cpu(), expected)
