"""The integer convolution reference against exact fractions, nested loops and values computed by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from lowbit.formats.conv import ConvLayer, SecondProduct, requantize
from lowbit.kernels.reference.conv import average_pool_reference, conv_reference, fma, max_pool_reference, quantize_reference


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest to a fraction, ties to even; searched among the neighbours of a float64 guess."""
    guess = np.float32(float(value))
    around = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    distance = [abs(Fraction(float(f)) - value) for f in around]
    best = [f for f, d in zip(around, distance, strict=True) if d == min(distance)]
    return best[0] if len(best) == 1 else next(f for f in best if f.view(np.uint32) % 2 == 0)


def test_fma_rounds_once():
    torch.manual_seed(0)
    a = torch.randint(-(1 << 26), 1 << 26, (400,))
    b = torch.rand(400) * 2.0 ** torch.randint(-20, 2, (400,))
    c = torch.randn(400) * 2.0 ** torch.randint(-30, 30, (400,))
    got = fma(a, b, c)
    for i in range(400):
        exact = Fraction(float(a[i].float())) * Fraction(float(b[i])) + Fraction(float(c[i]))
        assert got[i].item() == nearest_float32(exact), i


def test_fma_where_rounding_twice_is_wrong():
    # 1 + 2^-24 is a tie in float32. An extra 2^-60 breaks it, but float64 cannot hold both terms.
    got = fma(torch.tensor([1]), torch.tensor([2.0**-60]), torch.tensor([1.0]))
    assert got.item() == 1.0
    a, b, c = torch.tensor([4097]), torch.tensor([1 + 2.0**-12]), torch.tensor([2.0**-40])
    exact = Fraction(4097) * Fraction(1 + 2.0**-12) + Fraction(2.0**-40)
    assert fma(a, b, c).item() == nearest_float32(exact)


def layer(y, relu=True, residual=None, second=None, stride=(1, 1), padding=(0, 0), x="u4", shape=(5, 3, 3, 3), seed=0):
    torch.manual_seed(seed)
    limit = 8 if x == "u4" else 128
    weight = torch.randint(-limit, limit, shape, dtype=torch.int8)
    scale = 1 / (30.0 if x == "u4" else 3000.0)
    s, b, g = requantize(torch.rand(shape[0]) + 0.5, torch.randn(shape[0]), scale, 1.0, y, 0.4 if residual else None)
    return ConvLayer(weight, s, b, x, y, stride, padding, relu, residual, g, second)


def by_loops(x, conv, residual=None, second=None):
    """The convolution by nested loops over outputs, in Python integers and fractions."""
    n, _, h, w = x.shape
    o, c = conv.weight.shape[:2]
    height, width = conv.output_size(h, w)
    out = torch.zeros(n, o, height, width, dtype=torch.float64)

    def product(image, weights, i, j, stride, padding, channels):
        total = 0
        for k in range(channels):
            for di in range(weights.shape[1]):
                for dj in range(weights.shape[2]):
                    a, b = i * stride[0] - padding[0] + di, j * stride[1] - padding[1] + dj
                    if 0 <= a < image.shape[1] and 0 <= b < image.shape[2]:
                        total += int(image[k, a, b]) * int(weights[k, di, dj])
        return np.float32(total)

    def rounded(a, b, c):
        return nearest_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))

    for image in range(n):
        for k in range(o):
            for i in range(height):
                for j in range(width):
                    t = rounded(product(x[image], conv.weight[k], i, j, conv.stride, conv.padding, c), conv.s[k], conv.b[k])
                    if residual is not None:
                        t = rounded(np.float32(int(residual[image, k, i, j])), conv.g, t)
                    if second is not None:
                        p = conv.second
                        total = product(second[image], p.weight[k], i, j, p.stride, p.padding, p.weight.shape[1])
                        t = rounded(total, p.s[k], t)
                    code = np.rint(t)
                    if conv.y == "u4":
                        out[image, k, i, j] = int(min(max(code, 0), 255)) >> 4
                    elif conv.y == "s8":
                        out[image, k, i, j] = float(min(max(code, 0 if conv.relu else -128), 127))
                    else:
                        out[image, k, i, j] = float(max(t, 0) if conv.relu else t)
    return out


@pytest.mark.parametrize(
    ("y", "relu", "residual"),
    [
        ("u4", True, None),
        ("u4", True, "u4"),
        ("s8", True, "s8"),
        ("s8", False, "u4"),
        ("f32", False, None),
        ("f32", True, "s8"),
    ],
)
@pytest.mark.parametrize(("x", "stride", "padding"), [("u4", (1, 1), (1, 1)), ("s8", (2, 1), (0, 2))])
def test_against_loops(y, relu, residual, x, stride, padding):
    conv = layer(y, relu, residual, stride=stride, padding=padding, x=x)
    low, high = (0, 16) if x == "u4" else (-128, 128)
    codes = torch.randint(low, high, (1, 3, 5, 4))
    height, width = conv.output_size(5, 4)
    added = None
    if residual:
        added = torch.randint(*((0, 16) if residual == "u4" else (-128, 128)), (1, 5, height, width))
    got = conv_reference(codes, conv, added)
    assert torch.equal(got.double(), by_loops(codes, conv, added))
    if y != "f32":
        assert got.unique().numel() > 3, "the codes are not all alike"


def test_second_product_against_loops():
    second = SecondProduct(torch.randint(-128, 128, (5, 2, 1, 1), dtype=torch.int8), torch.rand(5) * 0.05, "s8", (2, 2))
    conv = layer("u4", second=second)
    codes, other = torch.randint(0, 16, (1, 3, 4, 4)), torch.randint(-128, 128, (1, 2, 4, 4))
    assert torch.equal(conv_reference(codes, conv, second=other).double(), by_loops(codes, conv, second=other))


def test_large_sums_are_exact():
    """Sums beyond 2^24, which float32 cannot represent exactly."""
    weight = torch.full((1, 4608, 1, 1), -127, dtype=torch.int8)
    conv = ConvLayer(weight, torch.tensor([1.0]), torch.tensor([0.0]), "s8", "f32", relu=False)
    codes = torch.full((1, 4608, 1, 1), 127)
    codes[0, 0] = 126
    assert conv_reference(codes, conv).item() == np.float32(-127 * (127 * 4607 + 126))


def test_u4_rounds_half_up_and_saturates():
    values = torch.tensor([-3.0, 0.4, 0.5, 1.49, 1.5, 14.4, 14.5, 99.0])
    conv = ConvLayer(torch.zeros(8, 1, 1, 1, dtype=torch.int8), torch.zeros(8), values * 16 + 7.5, "u4", "u4")
    assert conv_reference(torch.zeros(1, 1, 1, 1, dtype=torch.int32), conv).flatten().tolist() == [0, 0, 1, 1, 2, 14, 15, 15]


def test_requantize_is_the_real_arithmetic():
    conv = layer("u4", residual="u4", padding=(1, 1))
    torch.manual_seed(1)
    codes, added = torch.randint(0, 16, (2, 3, 6, 6)), torch.randint(0, 16, (2, 5, 6, 6))
    torch.manual_seed(0)
    torch.randint(-8, 8, conv.weight.shape)
    scale, bias = torch.rand(5) + 0.5, torch.randn(5)
    real = torch.nn.functional.conv2d(codes.double(), conv.weight.double(), padding=1) * (scale[:, None, None] / 30)
    real = real + bias[:, None, None] + 0.4 * added
    wanted = (real + 0.5).floor().clamp(0, 15)
    far = (real + 0.5 - (real + 0.5).round()).abs() > 0.02  # not near a tie, where an extra rounding would change the code
    assert far.float().mean() > 0.9 and torch.equal(conv_reference(codes, conv, added)[far].double(), wanted[far])


def test_values_are_rounded_to_even_and_clamped():
    x = torch.tensor([0.25, 0.75, -1.25, 99.0, -99.0])[None, None, :, None].repeat(1, 2, 1, 1)
    codes = quantize_reference(x, torch.tensor([2.0, 4.0]), torch.tensor([0.0, 0.5]), "s8")
    assert codes[0, :, :, 0].tolist() == [[0, 2, -2, 127, -128], [2, 4, -4, 127, -128]]
    assert quantize_reference(x, torch.ones(2), torch.ones(2), "u4")[0, 0, :, 0].tolist() == [1, 2, 0, 15, 0]
    x = torch.tensor([float("inf"), float("-inf"), float("nan")])[None, None, :, None]
    assert quantize_reference(x, torch.ones(1), torch.ones(1), "s8").flatten().tolist() == [127, -128, -128]
    pixels = torch.tensor([0, 255], dtype=torch.uint8)[None, None, :, None]
    assert quantize_reference(pixels, torch.tensor([0.5]), torch.tensor([-64.0]), "s8").flatten().tolist() == [-64, 64]


def test_pooling():
    codes = torch.tensor([[[[-5, -7, 3], [-2, -9, 1], [4, 0, -128]]]])
    assert max_pool_reference(codes, (2, 2), (1, 1)).tolist() == [[[[-2, 3], [4, 1]]]]
    assert max_pool_reference(codes, (3, 3), (2, 2), (1, 1)).tolist() == [[[[-2, 3], [4, 1]]]]
    assert average_pool_reference(codes, 0.5).item() == np.float32(-143) * np.float32(0.5 / 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(y="u4", relu=False), "no negative"),
        (dict(y="u8"), "stored as one of"),
        (dict(residual="f32"), "residual"),
        (dict(stride=(0, 1)), "strides"),
        (dict(x="f16"), "input is stored"),
        (dict(b=torch.zeros(4)), "b is float32"),
    ],
)
def test_layers_refuse(change, message):
    given = dict(weight=torch.zeros(5, 3, 1, 1, dtype=torch.int8), s=torch.ones(5), b=torch.zeros(5), x="u4", y="s8")
    with pytest.raises(ValueError, match=message):
        ConvLayer(**(given | change))


def test_codes_out_of_range_and_missing_operands():
    conv = layer("u4", residual="u4")
    with pytest.raises(ValueError, match=r"0\.\.15"):
        conv_reference(torch.full((1, 3, 4, 4), 16), conv, torch.zeros(1, 5, 2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="a residual, got none"):
        conv_reference(torch.zeros(1, 3, 4, 4, dtype=torch.int32), conv)
