"""The kernel that quantizes activations: bit-equal to the reference, its arithmetic without a GPU too, and what it fuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from lowbit.formats import number_format
from lowbit.hardware.device import device_for
from lowbit.kernels.reference import quantize_activations_reference
from tests.kernels.sass import compile_triton

triton = pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.quantize_activations import CODE_PIECE, QuantizePlan, Request, quantize_rows  # noqa: E402
from lowbit.ops import (  # noqa: E402
    layer_norm_quantize,
    quantize_activations,
    rms_norm_quantize,
    silu_mul_quantize,
)

gpu = pytest.mark.gpu


def hard_rows(m, k, dtype, device="cpu"):
    """Rows of all sizes, with ties, outliers, zeros; what does not depend on the generator of a device."""
    generator = torch.Generator().manual_seed(m * k)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-6, 3, m)[:, None]
    if m > 3:
        x[1] = 0
        x[2] = torch.arange(k) % 255 - 127  # scale 1 exactly: integers
        x[3] = (torch.arange(k) % 255 - 127) / 2  # ties
        x[3, 0] = 127
        x[0, ::3] = -0.0  # 8-bit floats keep the sign
    return x.to(device=device, dtype=dtype)


def same(got, expected):
    return torch.equal(got.view(torch.uint8) if got.dtype.itemsize == 1 else got, expected.view(got.dtype) if
                       got.dtype.itemsize > 1 else expected.view(torch.uint8))  # fmt: skip


def check(x, name, group=0, static=False, symmetric=True, device=80):
    fmt = number_format(name)
    scale = torch.full((1,), 0.03, device=x.device) if static else None
    given = torch.full((1,), -37, dtype=torch.int32, device=x.device) if static and not symmetric else None
    aligned = x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    plan = QuantizePlan(*x.shape, Request("", fmt, group, static, symmetric), aligned, device_for(device))
    if x.is_cuda:
        torch.full((x.shape[0], x.shape[1] + CODE_PIECE), -1, dtype=torch.int8, device=x.device)  # poisons what comes next
    codes, own, zero = quantize_activations_reference(x, fmt, group, scale, symmetric, given)
    expected = [t for t in ((codes,) if static else (codes, own, zero)) if t is not None]
    for _ in range(2):  # compiled, then called as it was compiled
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
        assert made[0].stride(0) % CODE_PIECE == 0 and made[0].data_ptr() % CODE_PIECE == 0
        rest = made[0].as_strided((x.shape[0], made[0].stride(0)), (made[0].stride(0), 1))[:, x.shape[1] :]
        assert not rest.view(torch.uint8).any(), "a piece is read as a whole, so what is beyond K must be zero"


def check_without_a_gpu():
    for m, k in ((5, 64), (5, 203), (4, 576)):
        x = hard_rows(m, k, torch.float16)
        check(x, "int8")
        check(x, "int8", static=True)
        check(x, "int8", symmetric=False)
        check(x, "int8", static=True, symmetric=False)
        check(x, "int8", group=128)
    check(hard_rows(5, 219, torch.float16)[:, 3:203], "int8")
    for m, k, group in ((5, 64, 0), (4, 203, 128)):
        check_fused(m, k, group)


def check_fused(m, k, group):
    """What goes before, in the kernel itself, against the operator on a CPU."""
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
        request = Request(before, number_format("int8"), group, False, True, residual)
        plan = QuantizePlan(m, k, request, k % 8 == 0, device_for(80))
        made = plan(x, beside, None if before == "silu" else weight, b, None, 1e-5)
        if residual:
            assert torch.equal(made[2], wanted.sum)
        near(type(wanted)(*made[:2]), wanted, wanted.scale.repeat_interleave(group or k, -1)[..., :k])


def test_the_arithmetic_in_tritons_interpreter():
    """Of int8; 8-bit floats are converted by the hardware, for which the interpreter has its own way."""
    code = "from tests.kernels.test_quantize_activations import check_without_a_gpu; check_without_a_gpu()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def compiled(sm, k, name="int8", before="", pieces=True, dtype="*fp16", **asked):
    fmt = number_format(name)
    request = Request(before, fmt, **asked)
    plan = QuantizePlan(64, k, request, pieces, device_for(sm))
    norm = before.endswith("norm")
    signature = dict(
        codes={"int8": "*i8", "fp8_e4m3": "*fp8e4nv", "fp8_e5m2": "*fp8e5"}[name],
        scales=None if request.static else "*fp32",
        zeros=None if request.symmetric or request.static else "*i32",
        sums=dtype if request.residual else None,
        x=dtype,
        beside=dtype if request.residual or before == "silu" else None,
        weight=dtype if norm else None,
        bias=dtype if before == "layer_norm" else None,
        static="*fp32" if request.static else None,
        static_zero="*i32" if request.static and not request.symmetric else None,
    )
    pointers = [name for name, kind in signature.items() if kind]
    signature |= dict(x_stride="i32", beside_stride="i32", code_pieces="i32", eps="fp32")
    names = ("K", "COLUMNS", "GROUP", "BEFORE", "FORMAT", "LARGEST", "PIECES", "OVERLAP")
    options = dict(plan.options)
    warps = options.pop("num_warps")
    constants = dict(zip(names, plan.constants, strict=True))
    return warps, compile_triton(quantize_rows, signature, constants, pointers, warps, sm, **options)


@pytest.mark.parametrize("sm", [80, 89, 90, 100])
@pytest.mark.parametrize("k", [4096, 8192, 28672])
def test_a_row_is_read_once_in_pieces_of_16_bytes(sm, k):
    warps, kernel = compiled(sm, k)
    pieces = 2 ** (k - 1).bit_length() // (8 * 32 * warps)
    loads = [line for line in kernel.lines if "LDG" in line]
    assert len(loads) == pieces and all(".128" in line for line in loads)
    assert kernel.count("STG.E.128") == pieces // 2 and kernel.stack_bytes == 0
    assert kernel.count("F2I") == 0, "rounding is an addition"
    assert kernel.shared_bytes <= 4 * warps, "the row stays in registers"


@pytest.mark.parametrize("before", ["rms_norm", "layer_norm", "silu"])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_what_is_fused_reads_everything_once(before, name):
    warps, kernel = compiled(90, 8192, name, before, residual=before == "rms_norm")
    tensors = {"rms_norm": 3, "layer_norm": 3, "silu": 2}[before]  # x and the rest of what is as long as a row
    assert kernel.stack_bytes == 0
    assert sum(".128" in line for line in kernel.lines if "LDG" in line) == tensors * 8192 // (8 * 32 * warps)


@pytest.mark.parametrize(("sm", "name"), [(90, "fp8_e4m3"), (90, "fp8_e5m2"), (120, "fp8_e4m3"), (120, "fp8_e5m2")])
def test_floats_are_rounded_once(sm, name):
    _, kernel = compiled(sm, 4096, name)
    assert f"cvt.rn.satfinite.{name[4:]}x2.f32" in kernel.ptx and not re.search(
        r"cvt\.\w+\.f16\.f32|e[45]m[23]x2\.f16x2", kernel.ptx
    )


def test_few_instructions_per_element():
    """At the speed of memory an SM of an H200 takes in 12 elements of 3 bytes per clock: 10 instructions each keep it busy."""
    for name in ("int8", "fp8_e4m3"):
        warps, kernel = compiled(90, 8192, name)
        assert sum(kernel.opcodes.values()) < 10 * 32 * 8192 / (32 * warps * 16) * 1.2


@pytest.mark.parametrize("m", [1, 64])
def test_neighbours_in_the_stream_overlap(m):
    _, kernel = compiled(90, 4096, before="rms_norm")
    lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
    start, wait = lines.index("PREEXIT"), lines.index("ACQBULK")
    reads = [i for i, line in enumerate(lines) if line.startswith("LDG")]
    assert start < wait and any(i < wait for i in reads) and any(i > wait for i in reads)
    _, before = compiled(80, 4096, before="rms_norm")
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


def near(got, wanted, spread):
    """Codes of values that differ in the last bits of float32: the same but for a few at ties. `spread` [M, K]: all scales."""
    assert torch.allclose(got.scale, wanted.scale, rtol=1e-5)
    values = wanted.codes.float() * spread
    difference = (got.codes.float() - wanted.codes.float()).abs() * spread
    assert float((difference > 0).float().mean()) < 1e-3
    assert bool((difference <= values.abs() / 8 + spread * 1.01).all())


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(("m", "k"), [(5, 64), (7, 203), (33, 4096), (9, 28672)])
@pytest.mark.parametrize("group", [0, 128])
def test_fused_against_the_plain_operator(dtype, name, m, k, group):
    generator = torch.Generator().manual_seed(k)
    x, other = (torch.randn(2, m, k, generator=generator).to(dtype) for _ in range(2))
    weight, bias = (torch.rand(k, generator=generator).to(dtype) + 0.5 for _ in range(2))
    calls = {
        "rms": lambda d: rms_norm_quantize(x.to(d), weight.to(d), 1e-5, name, group=group),
        "rms + residual": lambda d: rms_norm_quantize(x.to(d), weight.to(d), 1e-5, name, residual=other.to(d), group=group),
        "layer": lambda d: layer_norm_quantize(x.to(d), weight.to(d), bias.to(d), 1e-5, name, group=group),
        "silu": lambda d: silu_mul_quantize(x.to(d), other.to(d), name, group=group),
    }
    if name == "int8" and group == 0:
        calls["silu, asymmetric"] = lambda d: silu_mul_quantize(x.to(d), other.to(d), name, symmetric=False)
    for what, call in calls.items():
        got, wanted = call("cuda"), call("cpu")
        assert (wanted.sum is None) == (what != "rms + residual")
        if wanted.sum is not None:
            assert torch.equal(got.sum.cpu(), wanted.sum)
        size = group or k
        spread = wanted.scale.repeat_interleave(size, -1)[..., :k]
        near(type(got)(got.codes.cpu(), got.scale.cpu()), wanted, spread)


@gpu
def test_what_is_not_finite_shows():
    x = torch.randn(4, 4096, device="cuda", dtype=torch.float16)
    x[1, 7], x[2, 9], x[3, 11] = float("inf"), float("nan"), -float("nan")
    for options in ({}, {"symmetric": False}):
        scale = quantize_activations(x, "int8", **options).scale
        assert scale.isfinite().tolist() == [[True], [False], [False], [False]]


@gpu
def test_in_a_graph_behind_and_before_other_kernels():
    """The kernel before writes x, the one after reads codes and scale: both must be seen through the overlap."""
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
