"""Packed NHWC codes of 4 or 8 bits at another image size: nearest pixels, or bilinear interpolation in integers. Plain Triton.

A thread computes 16 bytes of an output pixel. It loads those of one input pixel, or of the four around its position.
The positions are whole numbers (`Axis` of formats/conv.py), so no table is read.
Exact   bit for bit as `ResizeSpec`: sums of codes are integers below 2^24, the fma rounds once.
        Tested: tests/kernels/elementwise/test_resize.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import ResizeSpec
from lowbit.kernels.parts.code_pairs import stored

BLOCK = 128
"""Number of 16-byte vectors per block."""


@triton.jit
def source(j, step, shift, whole, size):
    """Returns the first input pixel of output pixel j of an axis, the second one, and the weight of the second."""
    n = tl.maximum(j * step + shift, 0)
    first = n // whole
    return first, tl.minimum(first + 1, size - 1), n % whole


@triton.jit(do_not_specialize=[
    "height", "width", "out_height", "out_width", "row_step", "row_shift", "row_whole", "step", "shift", "whole", "s", "b",
    "total",
])  # fmt: skip
def resize_kernel(
    y, x, height, width, out_height, out_width, row_step, row_shift, row_whole, step, shift, whole, s, b, total,
    VECTORS: tl.constexpr, NEAREST: tl.constexpr, FOUR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK of `total` vectors of 16 bytes; a pixel has VECTORS of them."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.arange(0, 4)[None, :]
    inside = (i < total)[:, None]
    pixel = i // VECTORS
    line = pixel // out_width
    image = line // out_height
    top, bottom, below = source(line % out_height, row_step, row_shift, row_whole, height)
    left, right, after = source(pixel % out_width, step, shift, whole, width)
    vector = i % VECTORS
    upper = (image * height + top) * width
    lower = (image * height + bottom) * width
    here = tl.load(x + ((upper + left) * VECTORS + vector)[:, None] * 4 + word, mask=inside, other=0)
    if NEAREST:
        found = here
    else:
        there = tl.load(x + ((upper + right) * VECTORS + vector)[:, None] * 4 + word, mask=inside, other=0)
        under = tl.load(x + ((lower + left) * VECTORS + vector)[:, None] * 4 + word, mask=inside, other=0)
        across = tl.load(x + ((lower + right) * VECTORS + vector)[:, None] * 4 + word, mask=inside, other=0)
        after = after[:, None]
        below = below[:, None]
        BITS: tl.constexpr = 4 if FOUR else 8
        found = tl.zeros([BLOCK, 4], tl.int32)
        for k in tl.static_range(32 // BITS):
            one = code(here, k, BITS) * (whole - after) + code(there, k, BITS) * after
            two = code(under, k, BITS) * (whole - after) + code(across, k, BITS) * after
            t = tl.fma((one * (row_whole - below) + two * below).to(tl.float32), s, b)
            found |= (stored(t, FOUR, 0.0 if FOUR else -128.0) & ((1 << BITS) - 1)) << (BITS * k)
    tl.store(y + i[:, None] * 4 + word, found, mask=inside)


@triton.jit
def code(words, k: tl.constexpr, BITS: tl.constexpr):
    """Returns code k of each word: 4 bits without sign, or 8 bits with one."""
    if BITS == 4:
        return (words >> (4 * k)) & 15
    else:
        return (words << (24 - 8 * k)) >> 24


def resize(x: Tensor, layer: ResizeSpec, storage: str, out: Tensor) -> Tensor:
    """Writes packed codes uint8 [N, H, W, bytes] at the size of `layer` to `out` [N, Ho, Wo, bytes], on x's device."""
    height, width = x.shape[1:3]
    rows, columns = layer.axes((height, width))
    s, b = layer.constants((height, width), storage)
    total = out.numel() // 16
    resize_kernel[(triton.cdiv(total, BLOCK),)](
        out.view(-1).view(torch.int32), x.view(-1).view(torch.int32), height, width, *layer.size, rows.step, rows.shift,
        rows.whole,
        columns.step, columns.shift, columns.whole, s, b, total, x.shape[3] // 16, layer.mode == "nearest", storage == "u4",
        BLOCK,
    )  # fmt: skip
    return out
