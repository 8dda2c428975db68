"""The operator is compared with the float64 reference, over every format, granularity, zero, dtype and ragged shapes. torch's
opcheck must pass."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import (
    PerBlock,
    PerGroup,
    PerTensor,
    QuantTensor,
    Scheme,
    ZeroPoint,
    decode,
    pack_words,
    parse_scheme,
    uint_format,
)
from lowbit.kernels.cpu import blocked
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops import mixed_gemm
from lowbit.quantize import rtn
from tests.formats import ALL_FORMATS, FLOAT_FORMATS, INT_FORMATS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SYMMETRIC = [Scheme(f) for f in INT_FORMATS if f.signed] + [Scheme(f) for f in FLOAT_FORMATS]
ZEROED = [
    Scheme(uint_format(b), None, PerGroup(g), zero)
    for b in range(2, 9)
    for g, zero in ((32, ZeroPoint.INTEGER), (48, ZeroPoint.FLOAT))
]
OTHER = [
    Scheme(s.weight, None, g) for s in SYMMETRIC[:7] + SYMMETRIC[-3:] for g in (PerTensor(), PerBlock(24, 40), PerGroup(128))
]


def problem(scheme, m, n, k, dtype=torch.float32, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    w = rtn(torch.randn(n, k, generator=g), scheme).to(device)
    x = torch.randn(m, k, generator=g).to(device, dtype)
    bias = torch.randn(n, generator=g).to(device, dtype)
    return x, w, bias


def run(x, w: QuantTensor, bias=None):
    return mixed_gemm(x, pack_words(w.codes, w.scheme.weight.bits), w.scale, w.zero, bias, w.scheme.name)


def close(y, x, w, bias=None):
    """Whether the error, relative to the sum of absolute terms, is within one rounding of each weight and one of y."""
    exact = mixed_gemm_reference(x, w, bias)
    size = x.double().abs() @ w.dequantize(torch.float64).abs().T
    return bool(((y.double() - exact).abs() <= 2 * torch.finfo(y.dtype).eps * (size + 1)).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SYMMETRIC + ZEROED + OTHER, ids=str)
def test_every_scheme_against_float64(scheme, device):
    x, w, bias = problem(scheme, 5, 50, 205, device=device)
    assert close(run(x, w, bias), x, w, bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["w8a16", "w4a16_g64", "w6e3m2a16", "w4a16_g32_fz", "w3a16_g16_z"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 192, 576), (17, 33, 129), (2, 7, 64)])
def test_dtypes_and_shapes(name, dtype, m, n, k, device):
    x, w, bias = problem(parse_scheme(name), m, n, k, dtype, device)
    y = run(x, w, bias)
    assert y.dtype == dtype and y.shape == (m, n)
    assert close(y, x, w, bias)


@pytest.mark.parametrize("scheme", SYMMETRIC + ZEROED, ids=str)
def test_one_hot_activations_return_the_weights_bit_exactly(scheme):
    w = problem(scheme, 1, 37, 64)[1]
    y = run(torch.eye(64), w)
    assert torch.equal(y.T.contiguous(), w.dequantize())


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda f: f.name)
def test_fast_decoding_equals_the_table(fmt):
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    fast, table = blocked.decode_codes(codes, fmt), decode(codes, fmt)
    assert torch.equal(fast.view(torch.int32), table.view(torch.int32))


@pytest.mark.parametrize("name", ["w4a16_g64", "w8a16_b24x40", "w8a16_t", "w6e3m2a16"])
def test_blocks_do_not_change_the_result(name, monkeypatch):
    x, w, bias = problem(parse_scheme(name), 3, 101, 128)
    whole = run(x, w, bias)
    monkeypatch.setitem(blocked.BLOCK_WEIGHTS, "cpu", 128 * 7)
    assert torch.allclose(run(x, w, bias), whole, rtol=1e-5, atol=1e-5)
    assert close(run(x, w, bias), x, w, bias)


def test_never_holds_the_whole_matrix():
    """The largest tensor during a call is far smaller than the dequantized matrix (64 MiB here)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.numel() * t.element_size())
            return out

    n, k = 8192, 2048
    packed, scale = torch.zeros(n, k // 2, dtype=torch.uint8), torch.ones(n, k // 64).half()
    with Watch():
        blocked.mixed_gemm_blocked(torch.ones(1, k), packed, scale, None, None, parse_scheme("w4a16_g64"))
    assert 0 < largest <= 4 * blocked.BLOCK_WEIGHTS["cpu"] < n * k // 8


def test_leading_dimensions():
    x, w, bias = problem(parse_scheme("w4a16_g64"), 6, 20, 64)
    assert torch.equal(run(x.view(2, 3, 64), w, bias), run(x, w, bias).view(2, 3, 20))
    assert run(x[:0], w, bias).shape == (0, 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["w8a16", "w4a16_g32_fz"])
def test_opcheck(name, dtype, device):
    x, w, bias = problem(parse_scheme(name), 3, 16, 64, dtype, device)
    packed = pack_words(w.codes, w.scheme.weight.bits)
    torch.library.opcheck(torch.ops.lowbit.mixed_gemm.default, (x, packed, w.scale, w.zero, bias, w.scheme.name))


def test_compiles_fullgraph_with_dynamic_m():
    _, w, bias = problem(parse_scheme("w4a16_g64"), 1, 16, 64)
    packed = pack_words(w.codes, 4)

    def product(x):
        return mixed_gemm(x, packed, w.scale, w.zero, bias, "w4a16_g64") * 2

    compiled = torch.compile(product, fullgraph=True, backend="eager", dynamic=True)
    for m in (1, 5, 9):
        x = torch.randn(m, 64)
        assert torch.equal(compiled(x), product(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.ones(2, 65)), r"packed uint8 \[N, 33\], got torch.uint8 \(16, 32\)"),
        (dict(x=torch.ones(2, 64, dtype=torch.int32)), "x is fp16, bf16 or fp32"),
        (dict(scale=torch.ones(16, 2)), r"scales \(16, 1\), got torch.float32 \(16, 2\)"),
        (dict(zero=torch.ones(16, 1)), "has no zeros, but some were given"),
        (dict(bias=torch.ones(15)), r"bias is \[16\]"),
        (dict(scheme="w4a16_g64_z"), "needs zeros"),
        (dict(scheme="q4_k"), "unknown scheme"),
        (dict(scheme="w4a8_g64"), "multiplies 16- or 32-bit activations, w4a8_g64 has int8 activations"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    x, w, _ = problem(parse_scheme("w4a16_g64"), 2, 16, 64)
    args = dict(x=x, packed=pack_words(w.codes, 4), scale=w.scale, zero=None, bias=None, scheme="w4a16_g64")
    with pytest.raises(ValueError, match=message):
        mixed_gemm(**{**args, **change})
