"""Channels of packed NHWC codes one after another, each part rescaled to the scale of the whole. Plain Triton.

One launch per part writes its channels of every pixel; the launch of the last part also writes the codes 0 that pad the last
block of channels. Where a part starts at a multiple of 16 bytes and has as many, a thread moves 16 bytes at a time.
Exact   bit for bit as `SumSpec` of one value. Tested: tests/kernels/elementwise/test_concat.py
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import SumSpec
from lowbit.kernels.parts.code_pairs import stored

BLOCK = 2048
"""Bytes of the output per block of 128 threads: 16 bytes per thread."""


@triton.jit(do_not_specialize=["s", "b"])
def concat_kernel(
    y, x, filled, offset, y_pixel, x_pixel, s, b, total, WIDTH: tl.constexpr, X_FOUR: tl.constexpr, Y_FOUR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes BLOCK of `total` bytes of a part: WIDTH bytes of each pixel, from byte `offset` of the output pixel on. The part
    fills `filled` bytes; the bytes after them are 0. 4-bit outputs have 4-bit parts, two codes a byte."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pixel = i // WIDTH
    byte = (i % WIDTH).to(tl.int32)
    inside = i < total
    within = inside & (byte < filled)
    if Y_FOUR:
        both = tl.load(x + pixel * x_pixel + byte, mask=within, other=0).to(tl.int32)
        low = stored(tl.fma((both & 15).to(tl.float32), s, b), True, 0.0)
        high = stored(tl.fma((both >> 4).to(tl.float32), s, b), True, 0.0)
        code = low | (high << 4)
    else:
        if X_FOUR:
            both = tl.load(x + pixel * x_pixel + byte // 2, mask=within, other=0).to(tl.int32)
            given = (both >> (4 * (byte % 2))) & 15
        else:
            given = tl.load(x + pixel * x_pixel + byte, mask=within, other=0).to(tl.int8, bitcast=True).to(tl.int32)
        code = stored(tl.fma(given.to(tl.float32), s, b), False, -128.0)
    tl.store(y + pixel * y_pixel + offset + byte, code.to(tl.uint8), mask=inside)


def concat(parts: list[Tensor], channels: list[int], layers: tuple[SumSpec, ...], out: Tensor) -> Tensor:
    """Writes the channels of all parts, packed codes uint8 [N, H, W, bytes], to `out`; `channels` are those of each part."""
    pixels, y_pixel, offset = out.numel() // out.shape[3], out.shape[3], 0
    for i, (x, count, layer) in enumerate(zip(parts, channels, layers, strict=True)):
        four = layer.y == "u4"
        filled = -(-count // 2) if four else count
        width = y_pixel - offset if i == len(parts) - 1 else filled
        total = pixels * width
        concat_kernel[(triton.cdiv(total, BLOCK),)](
            out, x, filled, offset, y_pixel, x.shape[3], layer.s, layer.b, total, width, layer.x == "u4", four, BLOCK
        )  # fmt: skip
        offset += width
    return out
