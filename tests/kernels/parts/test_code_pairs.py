"""Pairs of packed codes in element-wise kernels, run in Triton's interpreter. Every byte and every code must be at its
place."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import interpreted

triton = pytest.importorskip("triton", reason="the part is Triton's")
import triton.language as tl  # noqa: E402

from lowbit.kernels.parts.code_pairs import pairs, stored  # noqa: E402

COUNT = 512


@triton.jit
def load_kernel(even, odd, x, total, FOUR: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a, b = pairs(x, i, total, FOUR)
    tl.store(even + i, a)
    tl.store(odd + i, b)


@triton.jit
def store_kernel(y, t, FOUR: tl.constexpr, LOW: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(y + i, stored(tl.load(t + i), FOUR, LOW))


def check_loads():
    for four in (True, False):
        x = torch.arange(COUNT if four else 2 * COUNT).to(torch.uint8)
        even, odd = torch.full((2, COUNT), -1.0)
        load_kernel[(1,)](even, odd, x, COUNT - 3, four, COUNT)
        wanted = (x & 15, x >> 4) if four else (x.view(torch.int8)[0::2], x.view(torch.int8)[1::2])
        for got, codes in zip((even, odd), wanted, strict=True):
            assert torch.equal(got[:-3], codes[:-3].float()) and not got[-3:].any()


def check_stores():
    t = torch.linspace(-300, 300, COUNT)
    t[:4] = torch.tensor([0.5, 1.5, -0.5, 2.5])  # ties go to even
    for four, low in ((True, 0.0), (False, -128.0), (False, 0.0)):
        y = torch.zeros(COUNT, dtype=torch.int32)
        store_kernel[(1,)](y, t, four, low, COUNT)
        wanted = t.round().clamp(low, 255 if four else 127).int()
        assert torch.equal(y, wanted >> 4 if four else wanted)


def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_loads, check_stores)
