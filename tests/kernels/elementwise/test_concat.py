"""Concatenation of the channels of several packed values. Kernels equal the reference; without a GPU they run in Triton's
interpreter. Parts with equal scales are copied. Also tests the machine code, and wrong tensors."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.conv import SumSpec, code_range, requantize
from lowbit.kernels.reference.conv import concat_reference
from lowbit.ops.code_arrange import concat_codes
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_triton

pytest.importorskip("triton", reason="the kernels are Triton's")
from lowbit.kernels.elementwise.concat import BLOCK, concat, concat_kernel

CASES = (
    ("s8", ("s8", "s8"), (64, 128)), ("s8", ("s8", "u4", "s8"), (15, 33, 17)), ("s8", ("u4", "s8"), (64, 3)),
    ("u4", ("u4", "u4"), (64, 64)), ("u4", ("u4", "u4", "u4"), (6, 34, 25)), ("s8", ("s8",), (5,)),
)  # fmt: skip


def part(x, y, x_scale, y_scale):
    """The layer of a part with these storages and scales."""
    s, b, _ = requantize(torch.ones(1), None, x_scale, y_scale, y)
    return SumSpec(x, y, float(s), float(b), y == "u4")


def given(y, storages, channels, equal, on="cpu"):
    """Returns random codes of all parts, and their layers, with equal or with different scales."""
    codes, layers = [], []
    for i, (x, count) in enumerate(zip(storages, channels, strict=True)):
        low, high = code_range(x)
        codes.append(torch.randint(low, high + 1, (2, count, 3, 5), dtype=torch.int32, device=on))
        layers.append(part(x, y, 0.1 if equal else 0.07 + 0.02 * i, 0.1))
    return codes, tuple(layers)


def check(on="cpu"):
    torch.manual_seed(0)
    for y, storages, channels in CASES:
        for equal in (True, False):
            codes, layers = given(y, storages, channels, equal, on)
            wanted = concat_reference(codes, layers)
            assert not equal or torch.equal(wanted, torch.cat(codes, 1))
            packed = [Nhwc64(x).pack(each) for x, each in zip(storages, codes, strict=True)]
            out = torch.full(Nhwc64(y).shape(tuple(wanted.shape)), 0xA5, dtype=torch.uint8, device=on)
            concat(packed, list(channels), layers, out)
            assert torch.equal(out, Nhwc64(y).pack(wanted)), (y, storages, channels, equal)


def test_the_codes_in_tritons_interpreter():
    interpreted(check)


@pytest.mark.gpu
def test_the_codes_on_a_gpu():
    check("cuda")


def test_rescaled_codes_are_those_of_the_values():
    torch.manual_seed(0)
    codes, layers = given("s8", ("s8", "u4"), (7, 9), False)
    values = torch.cat([code.double() * scale for code, scale in zip(codes, (0.07, 0.09), strict=True)], 1) / 0.1
    assert float((concat_reference(codes, layers) - values.clamp(-128, 127)).abs().max()) <= 0.5 + 1e-5


def test_wrong_parts_are_refused():
    x, one, four = torch.zeros(2, 3, 4, 64, dtype=torch.uint8), part("s8", "s8", 1.0, 1.0), part("u4", "u4", 1.0, 1.0)
    out = x.new_zeros(2, 3, 4, 128)
    with pytest.raises(ValueError, match="2 parts have as many numbers of channels and layers"):
        concat_codes([x, x], [64], [one, one], out)
    with pytest.raises(ValueError, match=r"4-bit parts with even numbers of channels, got \[5, 4\]"):
        concat_codes([x[..., :32], x[..., :32]], [5, 4], [four, four], x[..., :32])
    with pytest.raises(ValueError, match=r"a part is contiguous uint8 \[2, 3, 4, 128\] on cpu, got torch.uint8"):
        concat_codes([x, x], [64, 65], [one, one], out)
    with pytest.raises(ValueError, match=r"the output is contiguous uint8 \[2, 3, 4, 128\]"):
        concat_codes([x, x], [64, 64], [one, one], x)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("storage", ["s8", "u4"])
def test_codes_move_16_bytes_at_a_time(storage, capability):
    signature = {"y": "*u8", "x": "*u8", "filled": "i32", "offset": "i32", "y_pixel": "i32", "x_pixel": "i32"}
    signature |= {"s": "fp32", "b": "fp32", "total": "i32"}
    four = storage == "u4"
    constants = dict(WIDTH=96, VECTOR=16, X_FOUR=four, Y_FOUR=four, BLOCK=BLOCK)
    aligned = ("y", "x", "offset", "y_pixel", "x_pixel")  # as for parts of whole blocks
    kernel = compile_triton(concat_kernel, signature, constants, aligned, 4, capability)
    assert kernel.stack_bytes == 0 and kernel.count("LDG.E.128") == 1 and kernel.count("STG.E.128") == 1
    assert len(kernel.lines) < (220 if storage == "s8" else 380), "for 16 bytes of a thread"
