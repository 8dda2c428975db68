"""`scaled_gemm` against a float64 product and against values by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit.formats import pack_words, parse_scheme
from lowbit.kernels.reference.gemm import scaled_gemm_reference
from lowbit.ops import quantize_activations, scaled_gemm
from lowbit.ops.scaled_gemm import activation_dtype
from lowbit.quantize import rtn

SCHEMES = [
    "w8a8", "fp8", "fp8_dynamic", "fp8_block", "w8e4m3a8e5m2", "w4a8", "w4a8_g128", "w4a8_g96", "w4a8_g128_z", "w4a8_g32_fz",
    "w4a8e4m3_g128", "w6e3m2a8e4m3", "w6e2m3a8e4m3", "w3a8_g64", "w8a8_t_z",
]  # fmt: skip


def problem(scheme, n, k, tokens, kind, seed=0):
    """(weight, x codes, x scales, x zeros, float64 product)."""
    generator = torch.Generator().manual_seed(seed)
    parsed = parse_scheme(scheme)
    q = rtn(torch.randn(n, k, generator=generator) * 0.05, parsed)
    dtype = activation_dtype(parsed.activation)
    x = torch.randn(*tokens, k, generator=generator) * 40
    x = x.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)
    shape = {"tensor": (1,), "token": (*tokens, 1), "block": (*tokens, -(-k // 128))}[kind]
    x_scale = torch.rand(shape, generator=generator) + 0.5
    x_zero = None
    if dtype == torch.int8 and kind != "block":
        x_zero = torch.randint(-30, 30, shape, generator=generator, dtype=torch.int32)
    return q, x, x_scale, x_zero, scaled_gemm_reference(x, x_scale, q, x_zero=x_zero)


@pytest.mark.parametrize("kind", ["tensor", "token", "block"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k", "tokens"), [(70, 1100, (2, 3)), (33, 130, (5,)), (400, 700, (1,))])
def test_against_float64(scheme, kind, n, k, tokens):
    q, x, x_scale, x_zero, expected = problem(scheme, n, k, tokens, kind)
    bias = torch.randn(n)
    packed = pack_words(q.codes, q.scheme.weight.bits)
    for dtype, eps in ((torch.float32, 2e-7), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        y = scaled_gemm(x, x_scale, packed, q.scale, q.zero, bias, q.scheme.name, dtype, x_zero)
        assert y.dtype == dtype and y.shape == (*tokens, n)
        error = (y.double() - (expected + bias.double())).norm() / expected.norm()
        assert error <= eps


def test_by_hand():
    """((3 - 1) * 0.5) * (-2 * 0.25) + ((-1 - 1) * 0.5) * (5 * 0.25) + 10 = 8.25"""
    packed = torch.tensor([[128 - 2, 128 + 5]], dtype=torch.uint8)
    arguments = (packed, torch.tensor([[0.25]]), None, torch.tensor([10.0]), "w8a8", torch.float32)
    x = torch.tensor([3, -1], dtype=torch.int8)
    assert scaled_gemm(x, torch.tensor([0.5]), *arguments, torch.tensor([1], dtype=torch.int32)).tolist() == [8.25]


def test_function_and_codes_by_hand():
    """The products are 0.5 * (1 * 4) = 2 and 0.5 * (1 * -4) = -2. With biases of 1 and -1 they become 3 and -3. silu(3) = 3 /
    (1 + e^-3), and gelu is the one with tanh."""
    packed = torch.tensor([[128 + 4], [128 - 4]], dtype=torch.uint8)
    scales = torch.ones(2, 1), None, torch.tensor([1.0, -1.0]), "w8a8"
    x = torch.tensor([1], dtype=torch.int8), torch.tensor([0.5])
    expected = {
        "none": [3.0, -3.0],
        "relu": [3.0, 0.0],
        "silu": [3 / (1 + math.exp(-3)), -3 / (1 + math.exp(3))],
        "gelu": [s * 1.5 * (1 + s * math.tanh(math.sqrt(2 / math.pi) * (3 + 0.044715 * 27))) for s in (1, -1)],
    }
    for function, values in expected.items():
        y = scaled_gemm(*x, packed, *scales, torch.float32, function=function)
        assert torch.allclose(y, torch.tensor(values), rtol=3e-7, atol=0), function
    # 3 / 2 = 1.5 and -1.5 are ties, which go to even; 3 / 0.01 and -3 / 0.01 are out of range.
    for scale, codes in ((2.0, [2, -2]), (0.01, [127, -128])):
        y = scaled_gemm(*x, packed, *scales, torch.int8, y_scale=torch.tensor([scale]))
        assert y.dtype == torch.int8 and y.tolist() == codes


@pytest.mark.parametrize("scheme", ["w8a8", "fp8_dynamic", "w4a8_g32_fz"])
def test_codes_are_those_of_the_plain_operator(scheme):
    q, x, x_scale, x_zero, _ = problem(scheme, 70, 1100, (2, 3), "token")
    arguments = (x, x_scale, pack_words(q.codes, q.scheme.weight.bits), q.scale, q.zero, torch.randn(70), scheme)
    y = scaled_gemm(*arguments, torch.float32, x_zero, "gelu")
    scale = y.abs().max().reshape(1) / 100
    codes = scaled_gemm(*arguments, torch.int8, x_zero, "gelu", scale)
    assert torch.equal(codes, quantize_activations(y, "int8", scale=scale).codes) and codes.unique().numel() > 20


def test_integers_are_exact_at_their_worst():
    """All terms are of maximal magnitude and one sign: their sum needs more than the 24 bits of float32."""
    k = 5000
    x = torch.full((2, k), -128, dtype=torch.int8)
    packed = torch.zeros(3, k, dtype=torch.uint8)
    packed[1, 0] = 1
    zero = torch.tensor([[127], [-128]], dtype=torch.int32)
    y = scaled_gemm(x, torch.ones(1), packed, torch.ones(3, 1), None, None, "w8a8", torch.float32, zero)
    expected = torch.tensor([255 * 128 * k, 255 * 128 * k - 255, 255 * 128 * k], dtype=torch.float64).float()
    assert torch.equal(y[0], expected) and not y[1].any()


def test_opaque_to_compilers_and_checked():
    q, x, x_scale, x_zero, _ = problem("w8a8", 16, 64, (4,), "token")
    packed = pack_words(q.codes, 8)
    arguments = (x, x_scale, packed, q.scale, None, None, "w8a8", torch.bfloat16, x_zero)
    torch.library.opcheck(torch.ops.lowbit.scaled_gemm.default, arguments)
    to_codes = (*arguments[:7], torch.int8, x_zero, "relu", torch.ones(1))
    torch.library.opcheck(torch.ops.lowbit.scaled_gemm.default, to_codes)
    assert scaled_gemm(x[:0], x_scale[:0], *arguments[2:8], x_zero[:0]).shape == (0, 16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(x=torch.zeros(4, 64)), "takes x torch.int8"),
        (dict(x_scale=torch.ones(4, 2)), r"x_scale float32 \[1\], \(4, 1\) or \(4, 1\), got torch.float32 \(4, 2\)"),
        (dict(x_scale=torch.ones(4, 1).half()), "got torch.float16"),
        (dict(x_zero=torch.zeros(4, 1)), "x_zero is int32"),
        (dict(packed=torch.zeros(16, 63, dtype=torch.uint8)), r"packed uint8 \[N, 64\]"),
        (dict(bias=torch.zeros(5)), r"bias is \[16\]"),
        (dict(dtype=torch.int8), "y is fp16, bf16 or fp32"),
        (dict(function="tanh"), "none, relu, gelu, silu, got 'tanh'"),
        (
            dict(y_scale=torch.ones(1)),
            r"y_scale is float32 \[1\] and makes y int8, got torch.float32 \(1,\) and torch.bfloat16",
        ),
        (dict(dtype=torch.int8, y_scale=torch.ones(4, 1)), r"y_scale is float32 \[1\]"),
        (dict(scheme="w8a16"), "quantized activations are int8, e4m3 or e5m2, got 16 bits"),
        (dict(scheme="fp8"), "takes x torch.float8_e4m3fn"),
    ],
)
def test_bad_input_says_what_is_wrong(change, why):
    q, x, x_scale, _, _ = problem("w8a8", 16, 64, (4,), "token")
    arguments = dict(
        x=x, x_scale=x_scale, packed=pack_words(q.codes, 8), scale=q.scale, zero=None, bias=None, scheme="w8a8",
        dtype=torch.bfloat16, x_zero=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match=why):
        scaled_gemm(**(arguments | change))
