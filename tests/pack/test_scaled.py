"""The packed form for 8-bit activations: lossless, and equal to the operands of wgmma."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowbit.formats import decode, parse_scheme
from lowbit.hardware.byte_conversions import byte_conversion
from lowbit.hardware.mma import wgmma_s8
from lowbit.pack import OperandWeight
from lowbit.pack.fragment import word_places
from lowbit.quantize import rtn

SCHEMES = [
    "w8a8", "fp8", "fp8_dynamic", "fp8_block", "w8e4m3a8e5m2", "w8e5m2a8e4m3", "w4a8_g128", "w4a8", "w4a8_g256", "w6a8",
    "w3a8_g128", "w4a8e4m3_g128", "w3a8e4m3", "w6e3m2a8e4m3", "w6e2m3a8e4m3_g128", "w5e2m2a8e4m3", "w4e2m1a8e4m3_g128",
]  # fmt: skip


def quantized(scheme, n, k):
    return rtn(torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.05, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(64, 256), (100, 200), (33, 576)])
def test_weights_survive_packing(scheme, shape):
    q = quantized(scheme, *shape)
    w = OperandWeight.pack(q)
    back = w.unpack()
    assert torch.equal(back.codes, q.codes) and back.scheme == q.scheme
    assert torch.equal(back.scale, q.scale.to(back.scale.dtype))
    clone = w.clone()
    assert torch.equal(clone.codes.view(torch.uint8), w.codes.view(torch.uint8)) and clone.nbytes == w.nbytes


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w8e5m2a8e4m3"])
def test_eight_bits_are_the_operands(scheme):
    q = quantized(scheme, 40, 200)
    codes = OperandWeight.pack(q).codes
    assert codes.shape == (40, 208) and codes.stride(0) % 16 == 0
    assert torch.equal(codes.double()[:, :200], decode(q.codes, q.scheme.weight, torch.float64))
    assert not codes.view(torch.uint8)[:, 200:].any()


@pytest.mark.parametrize("scheme", ["w4a8", "w4a8e4m3", "w6e3m2a8e4m3", "w3a8"])
def test_lanes_decode_their_fragment_of_a(scheme):
    """The codes that a warpgroup unpacks from its words are operand A of wgmma, by the instruction's fragment table."""
    q = quantized(scheme, 64, 64)
    parsed = parse_scheme(scheme)
    c = byte_conversion(parsed.weight, "e4m3" if "e4m3" in scheme else "s8")
    words = OperandWeight.pack(q).codes[:, 0][:, word_places(parsed.weight.bits)]  # row block = warp, lane, word
    runs = words.reshape(128, -1, c.fields.words).numpy().view(np.uint32)
    held = c.run([runs[..., i] for i in range(c.fields.words)]).reshape(128, 8, 4)
    numbers = torch.from_numpy(held.copy()).view(torch.int8 if c.operand == "s8" else torch.float8_e4m3fn).double()
    tile = wgmma_s8(8).a.tiled(64, 64).scatter(numbers.numpy() * c.scale_factor)
    assert np.array_equal(tile, decode(q.codes, parsed.weight, torch.float64).numpy())


def test_sums_are_what_a_zero_of_x_meets():
    q = quantized("w8a8", 24, 100)
    assert torch.equal(OperandWeight.pack(q).sums, decode(q.codes, q.scheme.weight).sum(1))
    q = quantized("w4a8_g128", 24, 300)
    assert torch.allclose(OperandWeight.pack(q).sums, q.dequantize(torch.float64).sum(1).float(), rtol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("w4a16_g128", "multiplies int8, e4m3 or e5m2 activations"),
        ("w4a8_g64", "in groups of multiples of 128, not w4a8_g64"),
        ("w8a8_g128", "in blocks of 128 x 128, not w8a8_g128"),
        ("w4a8_g128_z", "without zero points"),
        ("w8a8e4m3", "of one kind, not int8 by fp8_e4m3"),
        ("w6a8e4m3", "int6 has values that e4m3 does not have"),
    ],
)
def test_what_cannot_be_packed_says_why(scheme, why):
    with pytest.raises(ValueError, match=why):
        OperandWeight.pack(quantized(scheme, 32, 256))
