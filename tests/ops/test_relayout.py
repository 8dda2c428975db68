"""Conversion of values to packed codes and back on a CPU, and refusals. tests/kernels/elementwise/test_relayout.py tests the
kernels."""

from __future__ import annotations

import pytest
import torch

from lowbit.kernels.reference.conv import quantize_reference
from lowbit.ops.relayout import pack_values, unpack_values
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import StemImages


@pytest.mark.parametrize("layout", [Nhwc64("u4"), Nhwc64("s8"), StemImages(3, 9, 8, (3, 3), (1, 1))], ids=["u4", "s8", "stem"])
def test_values_are_packed(layout):
    torch.manual_seed(0)
    x = 9 * torch.randn(2, 3, 9, 8)
    gain, shift = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0.0, 1.0, -1.0])
    wanted = layout.pack(quantize_reference(x, gain, shift, getattr(layout, "storage", "s8")))
    assert torch.equal(pack_values(x, gain, shift, layout), wanted)
    out = torch.full_like(wanted, 0xA5)
    by_pixels = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert pack_values(by_pixels, gain, shift, layout, out) is out and torch.equal(out, wanted)


def test_values_are_unpacked():
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (2, 70, 3, 4))
    packed = Nhwc64("s8").pack(codes)
    assert torch.equal(unpack_values(packed, "s8", 0.25, torch.zeros(codes.shape)), codes * 0.25)
    assert torch.equal(unpack_values(packed, "s8", 0.25, torch.zeros(codes.shape, dtype=torch.int32)).long(), codes)


def test_other_tensors_are_refused():
    x, one = torch.zeros(2, 3, 9, 8), torch.ones(3)
    with pytest.raises(ValueError, match="up to 32 bits"):
        pack_values(x.double(), one, one, Nhwc64("s8"))
    with pytest.raises(ValueError, match=r"gain is float32 \[3\]"):
        pack_values(x, torch.ones(2), one, Nhwc64("s8"))
    with pytest.raises(ValueError, match=r"the stem takes images \[N, 3, 8, 8\]"):
        pack_values(x, one, one, StemImages(3, 8, 8, (3, 3), (1, 1)))
    with pytest.raises(ValueError, match=r"contiguous uint8 \[2, 9, 8, 64\]"):
        pack_values(x, one, one, Nhwc64("s8"), torch.zeros(1, 9, 8, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"packed codes of \[2, 3, 9, 8\]"):
        unpack_values(torch.zeros(2, 9, 8, 32, dtype=torch.uint8), "s8", 1.0, x)
