"""Prepared convolutions on a CPU: packed input and output bytes, refusals, operators."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.conv import ConvLayer, SecondProduct, requantize
from lowbit.kernels.reference.conv import average_pool_reference, conv_reference, quantize_reference
from lowbit.ops.conv import (
    average_pool_codes,
    conv_refusals,
    max_pool_codes,
    prepare_conv,
    prepare_stem,
    stem_pool_refusals,
)
from lowbit.ops.relayout import pack_values
from lowbit.pack.nhwc64 import Nhwc64


def layer(x="u4", y="u4", residual=None, second=None, channels=70, outputs=100, kernel=3, stride=1):
    torch.manual_seed(0)
    weight = torch.randint(-8, 8, (outputs, channels, kernel, kernel), dtype=torch.int8)
    s, b, g = requantize(torch.rand(outputs) / 200, torch.randn(outputs), 1.0, 1.0, y, 0.5 if residual else None)
    pads = (kernel // 2, kernel // 2)
    return ConvLayer(weight, s, b, x, y, (stride, stride), pads, True, residual, g, second, "conv")


def test_packed_codes_in_and_out():
    conv = layer(residual="s8")
    codes, added = torch.randint(0, 16, (2, 70, 5, 6)), torch.randint(-128, 128, (2, 100, 5, 6))
    prepared = prepare_conv(conv, (2, 5, 6))
    out = torch.full(prepared.output_shape((2, 5, 6, 64)), 0xA5, dtype=torch.uint8)
    y = prepared(Nhwc64("u4").pack(codes), Nhwc64("s8").pack(added), out=out)
    assert y is out and torch.equal(Nhwc64("u4").unpack(y, 100), conv_reference(codes, conv, added))


def test_second_product_and_values():
    second = SecondProduct(torch.ones(100, 3, 1, 1, dtype=torch.int8), torch.full((100,), 0.01), "s8", (2, 2))
    conv = layer(second=second)
    codes, other = torch.randint(0, 16, (1, 70, 4, 4)), torch.randint(-128, 128, (1, 3, 8, 8))
    y = prepare_conv(conv, (1, 4, 4))(Nhwc64("u4").pack(codes), None, Nhwc64("s8").pack(other))
    assert torch.equal(Nhwc64("u4").unpack(y, 100), conv_reference(codes, conv, second=other))
    values = prepare_conv(layer(y="f32"), (1, 4, 4))(Nhwc64("u4").pack(codes))
    assert torch.equal(values.permute(0, 3, 1, 2), conv_reference(codes, layer(y="f32")))


def test_a_stem_takes_images():
    conv = layer("s8", channels=3, kernel=7, stride=2)
    images = torch.randn(2, 3, 17, 20)
    stem = prepare_stem(conv, (2, 17, 20))
    gain, shift = torch.tensor([40.0, 30.0, 50.0]), torch.tensor([0.0, 3.5, -2.0])
    y = stem(pack_values(images, gain, shift, stem.images))
    wanted = conv_reference(quantize_reference(images, gain, shift, "s8"), conv)
    assert torch.equal(Nhwc64("u4").unpack(y, 100), wanted)


def test_a_stem_with_its_pool_inside():
    conv = layer("s8", channels=3, kernel=7, stride=2)
    codes = torch.randint(-128, 128, (2, 3, 17, 20))
    stem = prepare_stem(conv, (2, 17, 20), pooled=True)
    wanted = torch.nn.functional.max_pool2d(conv_reference(codes, conv).double(), 3, 2, 1)
    y = stem(stem.images.pack(codes))
    assert y.shape == stem.output_shape(tuple(y.shape)) == (2, 5, 5, 64)
    assert torch.equal(Nhwc64("u4").unpack(y, 100), wanted.int())


def test_a_pool_keeps_the_order_of_sums():
    conv = layer("s8", channels=3, kernel=7, stride=2)
    conv.s[3] = -conv.s[3]
    assert "negative" in stem_pool_refusals(conv, None)[0]
    with pytest.raises(ValueError, match="some s are negative"):
        prepare_stem(conv, (2, 17, 20), pooled=True)
    assert "not as codes" in stem_pool_refusals(layer("s8", "f32", channels=3, kernel=7, stride=2), None)[0]


def test_pools_of_codes():
    x = Nhwc64("u4").pack(torch.randint(0, 16, (2, 70, 6, 8)))
    largest = torch.empty(2, 3, 4, x.shape[3], dtype=torch.uint8)
    max_pool_codes(x, "u4", (2, 2), (2, 2), (0, 0), largest)
    wanted = torch.nn.functional.max_pool2d(Nhwc64("u4").unpack(x, 70).double(), 2)
    assert torch.equal(Nhwc64("u4").unpack(largest, 70), wanted.int())
    mean = torch.empty(2, 70)
    average_pool_codes(x, "u4", 70, 0.25, mean)
    assert torch.equal(mean, average_pool_reference(Nhwc64("u4").unpack(x, 70), 0.25))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c(torch.zeros(1, 4, 4, 32, dtype=torch.uint8)), r"uint8 \[N, H, W, 64\]"),
        (lambda c: c(torch.zeros(1, 4, 4, 64)), "uint8"),
        (lambda c: c(torch.zeros(1, 4, 4, 64, dtype=torch.uint8), torch.zeros(1)), "takes residual None"),
        (
            lambda c: c(torch.zeros(1, 4, 4, 64, dtype=torch.uint8), out=torch.zeros(1, 4, 4, 32, dtype=torch.uint8)),
            "output is",
        ),
    ],
)
def test_wrong_tensors_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(prepare_conv(layer(), (1, 4, 4)))


def test_a_second_input_of_another_size_is_refused():
    second = SecondProduct(torch.ones(100, 3, 1, 1, dtype=torch.int8), torch.full((100,), 0.01), "s8", (2, 2))
    prepared, x = prepare_conv(layer(second=second), (1, 4, 4)), torch.zeros(1, 4, 4, 64, dtype=torch.uint8)
    right = torch.zeros(1, 8, 8, 64, dtype=torch.uint8)
    assert prepared(x, None, right).shape == (1, 4, 4, 64)
    for wrong in (right[:, :2, :2].contiguous(), right.expand(2, 8, 8, 64).contiguous(), right[..., :32].contiguous()):
        with pytest.raises(ValueError, match="the second input has pixels of 64 bytes that make an output of"):
            prepared(x, None, wrong)
    with pytest.raises(ValueError, match="the second input is contiguous"):
        prepared(x, None, torch.zeros(1, 64, 8, 8, dtype=torch.uint8).permute(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((7, 5), "sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_110, sm_120, sm_121; NVIDIA T4 is sm_75"),
        ((8, 6), ""),
        ((9, 0), "strides are 8 at most"),
        ((12, 0), ""),
    ],
)
def test_gpus(capability, words, monkeypatch):
    """Limits of TMA apply to sm_90 only."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA T4")
    reasons = conv_refusals(layer(stride=9), "cuda:0")
    assert words in " ".join(reasons) and bool(reasons) == bool(words)


def test_refusals_name_every_reason():
    with pytest.raises(ValueError, match="5 channels") as caught:
        prepare_stem(layer("s8", channels=5, kernel=11), (1, 32, 32))
    assert "4 packed pixels" in str(caught.value) and "stride" in str(caught.value)
    with pytest.raises(ValueError, match="not on meta"):
        prepare_conv(layer(), (1, 4, 4), "meta")
