"""Sums of two tensors of codes. The definition is tested on values by hand, and the machine code without a GPU. On a GPU every
code equals the definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowbit.formats.conv import SumSpec, code_range, requantize
from lowbit.kernels.reference.conv import sum_reference
from lowbit.ops.code_sum import sum_codes
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.sass import compile_triton

CASES = [
    (x, other, y, relu)
    for x, other, y, relu in itertools.product(("u4", "s8"), (None, "u4", "s8"), ("u4", "s8"), (True, False))
    if relu or y == "s8"
]


def made(x, other, y, relu):
    """A SumSpec: x with scale 0.3 plus `other` with scale 0.5, requantized to scale 0.4."""
    s, b, g = requantize(torch.tensor([0.3]), None, 1.0, 0.4, y, None if other is None else 0.5)
    return SumSpec(x, y, float(s), float(b), relu, other, g)


def test_sums_by_hand():
    x = torch.tensor([-128, -3, 0, 5, 7, 127]).reshape(1, 6, 1, 1)
    other = torch.tensor([1, 2, 0, 0, 15, 9]).reshape(1, 6, 1, 1)
    values = [-37.9, 0.1, 0.0, 1.5, 9.6, 42.6]  # divided by the scale 0.4: -94.75, 0.25, 0, 3.75, 24, 106.5
    assert values[4] == pytest.approx(0.3 * 7 + 0.5 * 15)
    assert sum_reference(x, made("s8", "u4", "s8", False), other).flatten().tolist() == [-95, 0, 0, 4, 24, 106]
    assert sum_reference(x, made("s8", "u4", "s8", True), other).flatten().tolist() == [0, 0, 0, 4, 24, 106]
    assert sum_reference(x, made("s8", "u4", "u4", True), other).flatten().tolist() == [0, 0, 0, 4, 15, 15]
    assert sum_reference(x, made("s8", None, "u4", True)).flatten().tolist() == [0, 0, 0, 4, 5, 15]
    with pytest.raises(ValueError, match="one"):
        sum_reference(x, made("s8", None, "u4", True), other)
    with pytest.raises(ValueError, match="stored as s8"):
        SumSpec("s8", "u4", 1.0, 0.0, relu=False)
    with pytest.raises(ValueError, match="got s8, f32"):
        SumSpec("s8", "f32", 1.0, 0.0)


def codes_of(storage, device, channels=100):
    low, high = code_range(storage)
    return torch.randint(low, high + 1, (3, channels, 7, 5), dtype=torch.int32, device=device)


def check(case, device):
    x, other, y, _ = case
    layer, codes = made(*case), codes_of(x, device)
    added = None if other is None else codes_of(other, device)
    packed = None if added is None else Nhwc64(other).pack(added)
    wanted = sum_reference(codes, layer, added)
    out = torch.full(Nhwc64(y).shape(tuple(wanted.shape)), 0xA5, dtype=torch.uint8, device=device)
    assert sum_codes(Nhwc64(x).pack(codes), layer, packed, out) is out
    assert torch.equal(Nhwc64(y).unpack(out, 100), wanted) and wanted.unique().numel() > 3
    assert not bool(Nhwc64(y).unpack(out, 128)[:, 100:].any()), "channels that fill up stay 0"
    assert torch.equal(sum_codes(Nhwc64(x).pack(codes), layer, packed), out)


@pytest.mark.parametrize("case", CASES)
def test_on_the_cpu(case):
    torch.manual_seed(1)
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_the_gpu(case):
    torch.manual_seed(1)
    check(case, "cuda")


def test_tensors_of_another_shape_are_refused():
    layer = made("u4", "s8", "u4", True)
    x, other = torch.zeros(1, 2, 2, 32, dtype=torch.uint8), torch.zeros(1, 2, 2, 64, dtype=torch.uint8)
    assert sum_codes(x, layer, other).shape == (1, 2, 2, 32)
    with pytest.raises(ValueError, match=r"the other value of the sum is contiguous uint8 \[1, 2, 2, 64\] of s8, got .*32"):
        sum_codes(x, layer, x)
    with pytest.raises(ValueError, match="stored as s8, got none"):
        sum_codes(x, layer)


def test_every_thread_moves_8_or_16_bytes_at_a_time():
    from lowbit.kernels.elementwise.add import BLOCK, sum_kernel

    kernels = {}
    for x_four, other, y_four in ((True, 4, True), (False, 4, True), (False, 8, False), (False, 0, True)):
        constants = dict(X_FOUR=x_four, OTHER=other, Y_FOUR=y_four, LOW=0.0, BLOCK=BLOCK)
        signature = {"y": "*u8", "x": "*u8", "other": "*u8", "s": "fp32", "b": "fp32", "g": "fp32", "total": "i32"}
        kernel = compile_triton(sum_kernel, signature, constants, ("y", "x", "other", "total"), 4, 90)
        kernels[x_four, other, y_four] = kernel
    for case, kernel in kernels.items():
        loads = kernel.count("LDG.E.64") + kernel.count("LDG.E.128")
        assert kernel.stack_bytes == 0 and loads == 1 + (case[1] > 0) and kernel.count("LDG") == loads, case
        assert kernel.count("STG.E.64") + kernel.count("STG.E.128") == 1 == kernel.count("STG"), case
