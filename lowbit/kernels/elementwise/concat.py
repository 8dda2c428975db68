"""Channels of packed NHWC codes one after another, each part rescaled to the scale of the whole. Plain Triton.

One launch per part writes its channels of every pixel. The launch of the last part also writes the codes 0 that pad the last
block of channels. A thread moves vectors of up to 16 bytes, as large as start and end of the part allow, and divides once per
vector to find its pixel.
Exact   bit for bit as `SumSpec` of one value. Tested: tests/kernels/elementwise/test_concat.py
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import SumSpec
from lowbit.kernels.parts.code_pairs import stored

BLOCK = 2048
"""Bytes of the output per block of 128 threads: 16 bytes per thread."""


@triton.jit(do_not_specialize=["filled", "s", "b"])
def concat_kernel(
    y, x, filled, offset, y_pixel, x_pixel, s, b, total, WIDTH: tl.constexpr, VECTOR: tl.constexpr, X_FOUR: tl.constexpr,
    Y_FOUR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes BLOCK of `total` bytes of a part, in vectors of VECTOR bytes: WIDTH bytes of each pixel, from byte `offset` of the
    output pixel on. The part has codes for the first `filled` of these bytes. The others, which are whole vectors, are filled
    as if the part's codes were 0 there. 4-bit outputs have 4-bit parts, two codes a byte."""
    VECTORS: tl.constexpr = WIDTH // VECTOR
    i = tl.program_id(0) * (BLOCK // VECTOR) + tl.arange(0, BLOCK // VECTOR)
    pixel = (i // VECTORS).to(tl.int64)
    first = i % VECTORS * VECTOR
    byte = first[:, None] + tl.arange(0, VECTOR)[None, :]
    inside = (i * VECTOR < total)[:, None]
    within = inside & (first < filled)[:, None]
    if X_FOUR and not Y_FOUR:
        both = tl.load(x + (pixel * x_pixel)[:, None] + byte // 2, mask=within, other=0).to(tl.int32)
        code = rescaled((both >> (4 * (byte % 2))) & 15, s, b, False, -128.0)
    else:
        given = tl.load(x + (pixel * x_pixel)[:, None] + byte, mask=within, other=0)
        if Y_FOUR:
            both = given.to(tl.int32)
            code = rescaled(both & 15, s, b, True, 0.0) | (rescaled(both >> 4, s, b, True, 0.0) << 4)
        else:
            code = rescaled(given.to(tl.int8, bitcast=True).to(tl.int32), s, b, False, -128.0)
    tl.store(y + (pixel * y_pixel + offset)[:, None] + byte, code.to(tl.uint8), mask=inside)


@triton.jit
def rescaled(code, s, b, FOUR: tl.constexpr, LOW: tl.constexpr):
    """Returns the codes of the output for codes of a part."""
    return stored(tl.fma(code.to(tl.float32), s, b), FOUR, LOW)


def concat(parts: list[Tensor], channels: list[int], layers: tuple[SumSpec, ...], out: Tensor) -> Tensor:
    """Writes the channels of all parts, packed codes uint8 [N, H, W, bytes], to `out`; `channels` are those of each part."""
    pixels, y_pixel, offset = out.numel() // out.shape[3], out.shape[3], 0
    for i, (x, count, layer) in enumerate(zip(parts, channels, layers, strict=True)):
        four = layer.y == "u4"
        filled = -(-count // 2) if four else count
        width = y_pixel - offset if i == len(parts) - 1 else filled
        vector = math.gcd(16, offset, filled, width)
        total = pixels * width
        concat_kernel[(triton.cdiv(total, BLOCK),)](
            out, x, filled, offset, y_pixel, x.shape[3], layer.s, layer.b, total, width, vector, layer.x == "u4", four, BLOCK
        )  # fmt: skip
        offset += width
    return out
