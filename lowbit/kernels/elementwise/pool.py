"""Pooling of packed NHWC codes: maxima of windows, and means of whole images. Plain Triton.

4-bit codes are compared 4 at a time, one per byte. If the high bit of the first byte is set before the subtraction, the
difference keeps that bit unless the first code is smaller; prmt turns the bit into a mask. 8-bit codes become unsigned by
flipping their sign bit, and are compared in the same way in 16-bit halves. Exact: maxima are codes; means are float32(sum) *
float32(scale / pixels); codes of means equal those of `quantize_reference`. Tested: tests/kernels/elementwise/test_pool.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import output_size

BLOCK = 128
"""Number of 16-byte vectors per block of max pooling."""

MEAN_BLOCK = 512
"""Number of bytes of each pixel that a block of average pooling sums. 128 images of 7 x 7 pixels, 2048 channels, take 5.0 us
with 4-bit codes and 4.3 us with 8-bit codes. With blocks of 128 bytes and 8 pixels in flight they take 5.9 and 7.4 us (one
H200, 2026-11-21)."""

UNDER_WAY = 49
"""Number of pixels whose loads are in flight at a time."""


@triton.jit
def larger_bytes(a, b):
    """Returns the larger byte of each pair of bytes, which must be below 128."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; or.b32 t, $1, 0x80808080; sub.u32 t, t, $2; prmt.b32 t, t, 0, 0xba98;"
        " lop3.b32 $0, t, $1, $2, 0xca; }", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def larger_halves(a, b):
    """Returns the larger 16-bit half of each pair of halves, which must be below 2^15."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; or.b32 t, $1, 0x80008000; sub.u32 t, t, $2; prmt.b32 t, t, 0, 0xbb99;"
        " lop3.b32 $0, t, $1, $2, 0xca; }", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "total"])
def max_pool_kernel(
    y, x, height, width, out_height, out_width, total, VECTORS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, FOUR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Processes one 16-byte vector per row of elements: VECTORS vectors per pixel."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.arange(0, 4)[None, :]
    pixel = i // VECTORS
    vector = i % VECTORS
    column = pixel % out_width
    line = pixel // out_width
    row = line % out_height
    image = line // out_height
    low = tl.zeros([BLOCK, 4], tl.int32)  # codes are compared as unsigned numbers: 0 is the smallest
    high = tl.zeros([BLOCK, 4], tl.int32)
    for r in tl.static_range(KH):
        for s in tl.static_range(KW):
            h = row * SH - PH + r
            w = column * SW - PW + s
            inside = (h >= 0) & (h < height) & (w >= 0) & (w < width) & (i < total)
            at = (((image * height + h) * width + w) * VECTORS + vector)[:, None] * 4 + word
            if FOUR:
                codes = tl.load(x + at, mask=inside[:, None], other=0)
                low = larger_bytes(low, codes & 0x0F0F0F0F)
                high = larger_bytes(high, (codes >> 4) & 0x0F0F0F0F)
            else:
                codes = tl.load(x + at, mask=inside[:, None], other=-2139062144) ^ -2139062144  # the smallest code
                low = larger_halves(low, codes & 0x00FF00FF)
                high = larger_halves(high, (codes >> 8) & 0x00FF00FF)
    if FOUR:
        largest = low | (high << 4)
    else:
        largest = (low | (high << 8)) ^ -2139062144
    tl.store(y + i[:, None] * 4 + word, largest, mask=(i < total)[:, None])


@triton.jit
def code_of_mean(total, factor, gain):
    """Returns the s8 code of a mean: clamp(rne(fma(mean, gain, 0)))."""
    steps = tl.minimum(tl.maximum(total.to(tl.float32) * factor * gain, -128.0), 127.0)
    return ((steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit(do_not_specialize=["pixels", "channels", "factor", "gain"])
def average_pool_kernel(
    y, x, pixels, channels, factor, gain, ROW: tl.constexpr, FOUR: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
    UNDER_WAY: tl.constexpr,
):  # fmt: skip
    """Sums BLOCK bytes of every pixel of one image; a byte has one or two codes. Writes the means, or their codes."""
    image = tl.program_id(0)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32)
    row = x + (image * pixels).to(tl.int64) * ROW + byte
    for first in range(0, pixels, UNDER_WAY):
        for i in tl.static_range(UNDER_WAY):
            codes = tl.load(row + (first + i) * ROW, mask=(byte < ROW) & (first + i < pixels), other=0)
            if FOUR:
                low += (codes & 15).to(tl.int32)
                high += (codes >> 4).to(tl.int32)
            else:
                low += codes.to(tl.int8, bitcast=True).to(tl.int32)
    at = y + image * channels
    if CODES:
        if FOUR:
            both = tl.join(code_of_mean(low, factor, gain), code_of_mean(high, factor, gain))
            place = 2 * byte[:, None] + tl.arange(0, 2)[None, :]
            tl.store(at + place, both, mask=place < channels)
        else:
            tl.store(at + byte, code_of_mean(low, factor, gain), mask=byte < channels)
    elif FOUR:
        tl.store(at + 2 * byte, (low.to(tl.float32) * factor).to(y.dtype.element_ty), mask=2 * byte < channels)
        tl.store(at + 2 * byte + 1, (high.to(tl.float32) * factor).to(y.dtype.element_ty), mask=2 * byte + 1 < channels)
    else:
        tl.store(at + byte, (low.to(tl.float32) * factor).to(y.dtype.element_ty), mask=byte < channels)


def max_pool(
    x: Tensor, storage: str, window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the maxima of windows of packed codes uint8 [N, H, W, bytes], as packed codes, on x's device; written to `out` if
    given."""
    n, height, width, pixel = x.shape
    out_height, out_width = output_size((height, width), window, stride, padding)
    y = torch.empty((n, out_height, out_width, pixel), dtype=torch.uint8, device=x.device) if out is None else out
    total = y.numel() // 16
    max_pool_kernel[(triton.cdiv(total, BLOCK),)](
        y.view(torch.int32), x.view(torch.int32), height, width, out_height, out_width, total, pixel // 16, *window, *stride,
        *padding, storage == "u4", BLOCK,
    )  # fmt: skip
    return y


def average_pool(
    x: Tensor, storage: str, channels: int, scale: float, dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the mean values [N, channels] of packed codes uint8 [N, H, W, bytes] with scale `scale`, rounded once to
    `dtype`."""
    y = torch.empty((x.shape[0], channels), dtype=dtype, device=x.device) if out is None else out
    return _average(x, storage, scale, 0.0, channels, y)


def average_codes(x: Tensor, storage: str, scale: float, gain: float, out: Tensor) -> Tensor:
    """Writes s8 codes clamp(rne(fma(mean, gain, 0))) of the means of all channels to `out`, packed uint8 [N, 1, 1, bytes]."""
    return _average(x, storage, scale, gain, out.shape[3], out)


def _average(x: Tensor, storage: str, scale: float, gain: float, channels: int, y: Tensor) -> Tensor:
    n, height, width, pixel = x.shape
    factor = torch.tensor(scale / (height * width), dtype=torch.float32).item()
    average_pool_kernel[(n, triton.cdiv(pixel, MEAN_BLOCK))](
        y, x, height * width, channels, factor, gain, pixel, storage == "u4", y.dtype == torch.uint8, MEAN_BLOCK, UNDER_WAY,
        num_warps=4,
    )  # fmt: skip
    return y
