"""Hadamard butterflies in registers: they equal the matrix, and the layout of a row over threads does not change the bits."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import BLOCKS, rotate_blocks
from tests.kernels.interpreter import interpreted

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")
import triton.language as tl  # noqa: E402

from lowbit.kernels.parts.rotation import rotated  # noqa: E402
from lowbit.kernels.parts.rows import floats, loaded  # noqa: E402


def butterflies(x, block):
    """x H in float32, with additions in the order that the kernels guarantee."""
    values, apart = x.float() * block**-0.5, 1
    while apart < block:
        pairs = values.unflatten(-1, (-1, 2, apart))
        a, b = pairs.unbind(-2)
        values = torch.stack((a + b, a - b), -2).flatten(-3)
        apart *= 2
    return values


@triton.jit
def rotate_one(y, x, BLOCK: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, CHUNKS: tl.constexpr):
    """Rotates a row of 1024 numbers."""
    STEP: tl.constexpr = THREADS * VECTOR
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    values = rotated(floats(loaded(x, i, STEP * CHUNKS, STEP, CHUNKS), CHUNKS), BLOCK, CHUNKS)
    for c in tl.static_range(CHUNKS):
        tl.store(y + c * STEP + i, values[c])


def check_shapes():
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    for block in BLOCKS:
        for threads, vector in ((32, 8), (128, 8), (256, 4), (64, 16), (32, 32)):
            y = torch.full_like(x, float("nan"))
            rotate_one[(1,)](y, x, block, threads, vector, 1024 // (threads * vector))
            assert torch.equal(y, butterflies(x, block)), (block, threads, vector)


def test_the_same_bits_in_every_shape():
    interpreted(check_shapes)


@pytest.mark.parametrize("block", BLOCKS)
def test_butterflies_are_the_matrix(block):
    """The float32 butterflies are within the rounding bound of sequential sums of the float64 product with the matrix."""
    x = torch.randn(7, 2 * block, generator=torch.Generator().manual_seed(0))
    right, size = rotate_blocks(x.double(), block), x.double().norm(dim=1, keepdim=True)
    steps = block.bit_length() - 1
    assert bool(((butterflies(x, block).double() - right).abs() <= steps * 2.0**-24 * size).all())
