"""GEMMs with the CPU's packed forms against float64: every format, few and many rows, pitfalls of torch's GEMMs."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import number_format, pack_words, parse_scheme
from lowbit.kernels.cpu import torch_int4, torch_int8
from lowbit.kernels.cpu.torch_int8 import quantize_rows
from lowbit.kernels.reference.activations import quantize_activations_reference
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops import quantize_activations, scaled_gemm
from lowbit.ops.cpu_gemm import cpu_gemm, pack_for_cpu, scaled_cpu_gemm
from lowbit.ops.table import choose, problem_on, why_slow
from lowbit.pack.cpu import VECTOR_CPUS
from lowbit.quantize import rtn
from tests.kernels.elementwise.test_quantize_rows import hard_rows

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in VECTOR_CPUS, reason="torch's int4 and int8 products need AVX2 or AVX-512"
)

FORMS = {
    "int4": ["w4a16_g32", "w4a16_g64", "w4a16_g128", "w4a16_pc", "w4a16_g96_z", "w4a16_g64_fz", "w3a16_g32", "w2a16_g32_z"],
    "int8": ["w8a16", "w7a16", "w5a16", "w6a16_t"],
    "decoded": ["w6e3m2a16", "w5e2m2a16", "w8a16_g64", "w8a16_z", "w8e4m3a16", "w4e2m1a16_g32", "w6a16_g48"],
}


def problem(name, m, n, k, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(m + n + k)
    q = rtn(torch.randn(n, k, generator=g), name)
    return torch.randn(m, k, generator=g).to(dtype), q, torch.randn(n, generator=g).to(dtype)


def prepared(q, dtype=torch.bfloat16, form=None):
    chosen = choose(problem_on("cpu", q.scheme, 1, q.shape, dtype, decode_bytes=4)).form
    assert form in (None, chosen)
    return pack_for_cpu(q, chosen, dtype)


def check(y, x, q, bias):
    """Asserts an error bound relative to the sum of the absolute terms: one bf16 rounding of each weight or scale, and one of y
    (two with a bias).
    """
    exact = mixed_gemm_reference(x, q, bias)
    size = x.double().abs() @ q.dequantize(torch.float64).abs().T
    assert y.dtype == x.dtype
    assert bool(((y.double() - exact).abs() <= 2 * torch.finfo(y.dtype).eps * (size + 1)).all())


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, names in FORMS.items() for name in names])
@pytest.mark.parametrize(("n", "k"), [(16, 96), (208, 576), (304, 384)])
def test_against_float64(form, name, n, k):
    for m in (1, 3, 17, 50):
        x, q, bias = problem(name, m, n, k)
        w = prepared(q, form=form)
        check(cpu_gemm(x, w), x, q, None)
        check(cpu_gemm(x, w, bias), x, q, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["w4a16_g32", "w8a16", "w6e3m2a16", "w3a16_g48_z"])
def test_other_types_are_decoded_once(name, dtype):
    for m in (1, 7):
        x, q, bias = problem(name, m, 50, 205, dtype)
        w = prepared(q, dtype, "decoded")
        assert w.codes.dtype == w.dtype == dtype and torch.equal(w.codes, q.dequantize(dtype))
        check(cpu_gemm(x, w, bias), x, q, bias)


@pytest.mark.parametrize("name", [name for names in FORMS.values() for name in names])
@pytest.mark.parametrize("m", [1, 64])
def test_one_hot_activations_return_weights(name, m):
    """The weights are rounded once to bf16, or have bf16 scales: an error of 2^-8 of the weight, and of the group's zero if
    there is one.
    """
    _, q, _ = problem(name, 1, 80, 192)
    w, exact = prepared(q), q.dequantize(torch.float64)
    got = torch.cat([cpu_gemm(rows, w) for rows in torch.eye(192).bfloat16().split(m)]).T.double()
    slack = 0.0 if q.zero is None else float(exact.abs().max())
    assert bool(((got - exact).abs() <= 2**-7 * (exact.abs() + slack)).all())


@pytest.mark.parametrize(("name", "m"), [("w4a16_g64", 60), ("w4a16_g64_fz", 60), ("w8a16", 20), ("w6e3m2a16", 20)])
def test_cpus_without_bf16_products(name, m, monkeypatch):
    monkeypatch.setattr(torch_int4, "product_dtype", lambda: torch.float32)
    monkeypatch.setattr(torch_int4, "BLOCK_WEIGHTS", 192 * 64)
    x, q, bias = problem(name, m, 208, 192)
    check(cpu_gemm(x, prepared(q), bias), x, q, bias)


def test_leading_dimensions_strides_and_no_rows():
    for name in ("w4a16_g32", "w8a16", "w6e3m2a16"):
        x, q, bias = problem(name, 6, 32, 64)
        w = prepared(q)
        y = cpu_gemm(x, w, bias)
        torch.testing.assert_close(cpu_gemm(x.view(2, 3, 64), w, bias), y.view(2, 3, 32), rtol=0, atol=0)
        torch.testing.assert_close(cpu_gemm(x.repeat(1, 2)[:, :64], w, bias), y, rtol=0, atol=0)
        assert cpu_gemm(x[:0], w, bias).shape == (0, 32) and cpu_gemm(x[:1], w).shape == (1, 32)


VNNI = pytest.mark.skipif(not torch_int8.sums_are_exact(), reason="torch's int8 product saturates without VNNI")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 16, 203, 1536])
def test_rows_are_quantized_as_by_the_reference(k, dtype):
    x = hard_rows(64, k, dtype).view(4, 16, k)
    codes, scale = quantize_rows(x)
    wanted, of_rows, _ = quantize_activations_reference(x, number_format("int8"))
    assert torch.equal(codes, wanted) and torch.equal(scale, of_rows)
    for value in (torch.inf, -torch.inf, torch.nan):
        x[1, 2, 0] = value
        assert bool(quantize_rows(x)[1][1, 2].isfinite().logical_not()), "so that no product with the row is finite"


@VNNI
@pytest.mark.parametrize("name", ["w8a8", "w8a8_az"])
def test_integers_are_exact_at_their_worst(name):
    """All sums are at their maximum, which float32 still represents. Instructions that add pairs in 16 bits fail this test."""
    k = 256
    q = rtn(torch.ones(48, k), name)
    codes = torch.full((48, k), 255, dtype=torch.uint8)
    codes[::2] = 0
    q = type(q)(codes, torch.ones(48, 1), None, q.scheme)
    w = pack_for_cpu(q, "int8", torch.float32)
    for value in (-128, 127):
        x = torch.full((3, k), value, dtype=torch.int8)
        zero = torch.tensor([[-128], [0], [127]], dtype=torch.int32) if name.endswith("_az") else None
        y = scaled_cpu_gemm(x, torch.ones(3, 1), w, torch.ones(48), torch.float32, zero)
        centred = x.double() - (0 if zero is None else zero)
        assert torch.equal(y.double(), centred @ (codes.double() - 128).T + 1)


def kernel(name, shape, dtype, decode_bytes=0):
    """(name of the kernel that ops/table.py chooses for a layer on this CPU, reasons against the faster CPU kernels)."""
    p = problem_on("cpu", parse_scheme(name), 1, shape, dtype, decode_bytes=decode_bytes)
    return choose(p).name, why_slow(p)


def test_the_kernel_and_its_reasons():
    bf16 = torch.bfloat16
    assert kernel("w4a16_g64", (64, 64), bf16) == ("torch_int4", ())
    assert kernel("w8a16", (64, 64), bf16) == ("torch_int8", ())
    assert kernel("w6e3m2a16", (64, 64), bf16, 2)[0] == "decoded_once"
    assert kernel("w6e3m2a16", (64, 64), torch.float32, 2)[0] == "blocked"
    name, reasons = kernel("w4a16_g64", (64, 64), torch.float32)
    assert name == "blocked" and "torch_int4: takes bfloat16 activations, not float32" in reasons
    name, reasons = kernel("fp8", (64, 64), bf16, 4)
    assert name == "scaled_blocked" and "scaled_torch_int8: takes int8 activations, not fp8_e4m3" in reasons
    assert kernel("w8a8", (64, 72), bf16)[0] == "scaled_blocked"


@VNNI
@pytest.mark.parametrize("name", ["w8a8", "w8a8_az", "w6a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_x_equals_the_plain_operator(name, dtype):
    """`scaled_gemm` computes in float64, so differences come only from float32 scales and the rounding to y's dtype."""
    x, q, bias = problem(name, 5, 80, 192, torch.float32)
    codes, scale, zero, _ = quantize_activations(x, "int8", symmetric=not q.scheme.activation_zero)[:4]
    w = pack_for_cpu(q, "int8", dtype)
    packed = pack_words(q.codes, q.scheme.weight.bits)
    for b in (None, bias):
        plain = scaled_gemm(codes, scale, packed, q.scale, None, b, name, dtype, zero)
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(scaled_cpu_gemm(codes, scale, w, b, dtype, zero), plain, rtol=tolerance, atol=1e-5)


def test_a_cpu_whose_sums_saturate_is_refused(monkeypatch):
    """AVX2 without VNNI adds pairs of products in saturating 16 bits; such a CPU is refused."""

    def saturating(x, w):
        pairs = (x.int() + 128).view(len(x), -1, 2, 1) * w.int().reshape(1, -1, 2, w.shape[1])
        total = pairs.sum(2).clamp(-(2**15), 2**15 - 1).sum(1, dtype=torch.int32)
        return total - 128 * w.sum(0, dtype=torch.int32)

    torch_int8.sums_are_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    reason = "scaled_torch_int8: saturates sums of int8 x on this CPU, which has no VNNI instructions"
    choose.cache_clear()
    assert kernel("w8a8", (64, 64), torch.float32) == ("scaled_blocked", (reason,))
    assert kernel("w8a16", (64, 64), torch.bfloat16) == ("torch_int8", ()), "its sums are in float32"
    monkeypatch.undo()
    torch_int8.sums_are_exact.cache_clear()
    choose.cache_clear()
    chosen = kernel("w8a8", (64, 64), torch.float32)
    assert chosen == (("scaled_torch_int8", ()) if torch_int8.sums_are_exact() else ("scaled_blocked", (reason,)))
