"""Conversion of torch images and features to packed codes, and back, in one pass each. Plain Triton.

Reads   x [N, C, H, W] with any strides (NCHW or NHWC in memory), floats or integers; constants gain, shift [C] in float32
Writes  packed codes of pack/nhwc64.py or pack/stem.py. In the other direction: y [N, C, H, W] with any strides, from packed
        codes
Exact   code = clamp(rne(fma(float32(x), gain[c], shift[c]))); y = float32(code) * scale, rounded once more to y's type.
        Rounding to integers is adding 1.5 * 2^23. Tested: tests/kernels/elementwise/test_relayout.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import code_range
from lowbit.pack.nhwc64 import CHANNEL_BLOCK, Nhwc64
from lowbit.pack.stem import PIXEL_BYTES, StemImages

PIXELS = 64
"""Number of pixels per block, with 64 channels each."""

STEM_PIXELS = 256
"""Number of packed pixels of a stem per block."""


@triton.jit
def codes_of(x, gain, shift, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Returns int32 codes of x. NaN becomes the smallest code, since the maximum of NaN and a number is the number."""
    steps = tl.minimum(tl.maximum(tl.fma(x.to(tl.float32), gain, shift), LOW), HIGH)
    return (steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def pack_kernel(
    y, x, gain, shift, channels, pixels, row_bytes, image_stride, channel_stride, pixel_stride, LOW: tl.constexpr,
    HIGH: tl.constexpr, FOUR: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Packs PIXELS pixels of one image, 64 channels each."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    channel = tl.program_id(1) * 64 + tl.arange(0, 64)
    image = tl.program_id(2).to(tl.int64)
    g = tl.load(gain + channel, mask=channel < channels, other=0.0)[None, :]
    s = tl.load(shift + channel, mask=channel < channels, other=0.0)[None, :]
    at = x + image * image_stride + channel[None, :].to(tl.int64) * channel_stride + pixel * pixel_stride
    values = tl.load(at, mask=(channel < channels)[None, :] & (pixel < pixels), other=0)
    codes = codes_of(values, g, s, LOW, HIGH)
    row = y + (image * pixels + pixel) * row_bytes
    if FOUR:
        low, high = tl.split(tl.reshape(codes, (PIXELS, 32, 2)))
        byte = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
        tl.store(row + byte, (low | (high << 4)).to(tl.uint8), mask=pixel < pixels)
    else:
        tl.store(row + channel[None, :], codes.to(tl.int8).to(tl.uint8, bitcast=True), mask=pixel < pixels)


@triton.jit
def stem_kernel(
    y, x, gain, shift, total, rows, columns, before, height, width, image_stride, channel_stride, row_stride, pixel_stride,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Packs PIXELS stem pixels, each of 2 x 2 words of up to 4 channels."""
    packed = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    word = tl.arange(0, 4)[None, :]
    line = packed // columns
    h = line % rows * 2 + word // 2
    w = (packed % columns - before) * 2 + word % 2
    inside = (packed < total) & (h < height) & (w >= 0) & (w < width)
    at = x + (line // rows).to(tl.int64) * image_stride + h * row_stride + w * pixel_stride
    words = tl.zeros([PIXELS, 4], tl.int32)
    for channel in tl.static_range(CHANNELS):
        values = tl.load(at + channel * channel_stride, mask=inside, other=0)
        codes = codes_of(values, tl.load(gain + channel), tl.load(shift + channel), -128.0, 127.0)
        words = words | (tl.where(inside, codes, 0) & 255) << (8 * channel)
    tl.store(y + packed.to(tl.int64) * 4 + word, words, mask=packed < total)


@triton.jit
def unpack_kernel(
    y, x, scale, channels, pixels, row_bytes, image_stride, channel_stride, pixel_stride, FOUR: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """Unpacks PIXELS pixels of one image, 64 channels each; integer outputs get codes."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    channel = tl.program_id(1) * 64 + tl.arange(0, 64)[None, :]
    image = tl.program_id(2).to(tl.int64)
    row = x + (image * pixels + pixel) * row_bytes
    if FOUR:
        byte = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
        both = tl.load(row + byte, mask=pixel < pixels, other=0)
        codes = tl.reshape(tl.join(both & 15, both >> 4), (PIXELS, 64)).to(tl.int32)
    else:
        codes = tl.load(row + channel, mask=pixel < pixels, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    at = y + image * image_stride + channel.to(tl.int64) * channel_stride + pixel * pixel_stride
    if y.dtype.element_ty.is_floating():
        values = (codes.to(tl.float32) * scale).to(y.dtype.element_ty)
    else:
        values = codes.to(y.dtype.element_ty)
    tl.store(at, values, mask=(channel < channels) & (pixel < pixels))


def pack(x: Tensor, gain: Tensor, shift: Tensor, storage: str, out: Tensor | None = None) -> Tensor:
    """Returns packed codes uint8 [N, H, W, bytes] of x [N, C, H, W], written to `out` if given; gain and shift are float32
    [C]."""
    n, channels, height, width = x.shape
    shape = Nhwc64(storage).shape((n, channels, height, width))
    y = torch.empty(shape, dtype=torch.uint8, device=x.device) if out is None else out
    images, pixels, strides, x = _planes(x)
    low, high = code_range(storage)
    grid = (triton.cdiv(pixels, PIXELS), triton.cdiv(channels, CHANNEL_BLOCK), images)
    pack_kernel[grid](y, x, gain, shift, channels, pixels, shape[3], *strides, float(low), float(high), storage == "u4", PIXELS)
    return y


def pack_stem(x: Tensor, gain: Tensor, shift: Tensor, images: StemImages, out: Tensor | None = None) -> Tensor:
    """Returns the packed input of a stem, uint8 [N, rows, columns, 16], of images x [N, C, H, W]; otherwise like `pack`."""
    shape = (x.shape[0], images.rows, images.columns, PIXEL_BYTES)
    y = torch.empty(shape, dtype=torch.uint8, device=x.device) if out is None else out
    total = shape[0] * shape[1] * shape[2]
    image, channel, row, pixel = x.stride()
    stem_kernel[(triton.cdiv(total, STEM_PIXELS),)](
        y.view(torch.int32), x, gain, shift, total, images.rows, images.columns, images.before[1], images.height, images.width,
        image, channel, row, pixel, images.channels, STEM_PIXELS,
    )  # fmt: skip
    return y


def unpack(x: Tensor, storage: str, scale: float, out: Tensor) -> Tensor:
    """Writes the values [N, C, H, W] of packed codes uint8 [N, H, W, bytes] to `out`, which may have any strides. If `out` is
    an integer tensor, writes codes."""
    images, pixels, strides, planes = _planes(out)
    if planes is not out:
        raise ValueError(f"rows of `out` must be contiguous with its pixels, got strides {out.stride()} of {list(out.shape)}")
    grid = (triton.cdiv(pixels, PIXELS), x.shape[3] // Nhwc64(storage).pixel_bytes(1), images)
    unpack_kernel[grid](out, x, scale, out.shape[1], pixels, x.shape[3], *strides, storage == "u4", PIXELS)
    return out


def _planes(x: Tensor) -> tuple[int, int, tuple[int, int, int], Tensor]:
    """Describes x [N, C, H, W] as images whose pixels have a single stride. Returns the numbers of images and pixels, the
    strides of image, channel and pixel, and x (a copy if its rows do not follow each other). Contiguous NHWC images count as
    one image."""
    n, _, height, width = x.shape
    pixels = height * width
    if height > 1 and width > 1 and x.stride(2) != width * x.stride(3):
        x = x.contiguous()
    step = x.stride(3) if width > 1 else x.stride(2) if height > 1 else x.stride(0)
    if pixels == 1 or (x.stride(0) == pixels * step and n * pixels * step < 1 << 31):
        return 1, n * pixels, (0, x.stride(1), step), x
    return n, pixels, (x.stride(0), x.stride(1), step), x
