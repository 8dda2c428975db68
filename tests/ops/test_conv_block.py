"""Whole bottleneck blocks on a CPU: the codes of three separate layers; refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowbit.formats.conv import ConvLayer, SecondProduct, code_range, requantize
from lowbit.kernels.choose.conv import block_refusals
from lowbit.ops.conv import prepare_conv
from lowbit.ops.conv_block import prepare_block
from lowbit.pack.nhwc64 import Nhwc64

SIZE = (2, 5, 6)


def layer(x, channels, outputs, kernel, residual=None, second=None):
    weight = torch.randint(-8, 8, (outputs, channels, kernel, kernel), dtype=torch.int8)
    spread = (channels * kernel**2) ** 0.5 * 5 * (8 if x == "u4" else 74)
    scale = (0.5 + torch.rand(outputs)) * (5 if x == "u4" else 40) / spread
    s, b, g = requantize(scale, torch.randn(outputs), 1.0, 1.0, x, 0.5 if residual else None)
    return ConvLayer(weight, s, b, x, x, (1, 1), (kernel // 2, kernel // 2), True, residual, g, second)


def block(x="u4", shortcut=False, following=64):
    torch.manual_seed(0)
    second = None
    if shortcut:
        other = layer(x, 64, 256, 1)
        second = SecondProduct(other.weight, other.s, x)
    return layer(x, 64, 64, 3), layer(x, 64, 256, 1, None if shortcut else x, second), layer(x, 256, following, 1)


@pytest.mark.parametrize("x", ["u4", "s8"])
@pytest.mark.parametrize(("shortcut", "following"), [(False, 64), (True, 64), (False, 128)])
def test_as_three_layers(x, shortcut, following):
    layers = block(x, shortcut, following)
    low, high = code_range(x)
    codes = Nhwc64(x).pack(torch.randint(low, high + 1, (2, 64, 5, 6)))
    added = Nhwc64(x).pack(torch.randint(low, high + 1, (2, 64 if shortcut else 256, 5, 6)))
    whole = prepare_block(*layers, SIZE)
    out = tuple(torch.full(shape, 0xA5, dtype=torch.uint8) for shape in whole.output_shapes(tuple(codes.shape)))
    y, z = whole(codes, added, out)
    apart = [prepare_conv(one, SIZE) for one in layers]
    wanted = apart[1](apart[0](codes), None if shortcut else added, added if shortcut else None)
    assert y is out[0] and z is out[1]
    assert torch.equal(y, wanted) and torch.equal(z, apart[2](wanted)) and y.unique().numel() > 4 and z.unique().numel() > 4


def test_refusals_name_everything():
    second, third, following = block()
    assert block_refusals(second.spec, third.spec, following.spec, SIZE, None) == ()
    strided = dataclasses.replace(second, stride=(2, 2))
    other = dataclasses.replace(following, x="s8")
    reasons = " ".join(block_refusals(strided.spec, third.spec, other.spec, (1, 5, 80), None))
    assert "stride (2, 2)" in reasons and "one storage" in reasons and "80 pixels wide" in reasons
    with pytest.raises(ValueError, match="200 outputs"):
        prepare_block(second, third, layer("u4", 256, 200, 1), SIZE)
    with pytest.raises(ValueError, match="no ReLU"):
        signed = block("s8")
        prepare_block(signed[0], dataclasses.replace(signed[1], relu=False), signed[2], SIZE)


def test_wrong_tensors_are_refused():
    whole = prepare_block(*block(), SIZE)
    x, added = torch.zeros(2, 5, 6, 32, dtype=torch.uint8), torch.zeros(2, 5, 6, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"added is contiguous uint8 \[2, 5, 6, 128\]"):
        whole(x, added[..., :64])
    with pytest.raises(ValueError, match="x is contiguous uint8"):
        whole(x.int(), added)
    with pytest.raises(ValueError, match="z is contiguous uint8"):
        whole(x, added, (added.clone(), added))
