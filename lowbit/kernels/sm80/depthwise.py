"""Depthwise convolution of packed NHWC codes of 4 or 8 bits: each channel has its own window. For all GPUs from sm_80 on.

A thread computes 8 channels of ROWS x COLUMNS neighbouring output pixels. It loads the pixels under their windows once, 8 codes
of a pixel at a time, transposes them with prmt so that a word holds 4 neighbouring pixels of one channel, and multiplies 4 taps
with one dp4a. Windows that begin between words come from a funnel shift. Plain Triton: a tile has one element per thread, so no
layout needs to be chosen. An output of a 3 x 3 window takes 17 instructions. On an H200 they take about as long as its loads
and stores.

Memory  x, y as in pack/nhwc64.py; weights and constants as in pack/depthwise.py.
Exact   bit for bit as `ConvLayer` of formats/conv.py. Sums start at the bits of 1.5 * 2^23, so that they are float32 numbers
        without a conversion, exact below 2^22; `depthwise_refusals` bounds the window for that.
        Tested: tests/kernels/sm80/test_depthwise.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import FLOATS, ConvSpec
from lowbit.kernels.choose.depthwise import DepthwiseTile, vectors_of_block
from lowbit.kernels.parts.conv_plan import ConvPlan, PlainLauncher
from lowbit.kernels.parts.pixel_words import MAGIC, THREADS, WARPS, bytes_of, dp4a, prmt, rounded, transposed, window_of
from lowbit.pack.conv_layout import PackedConv
from lowbit.pack.depthwise import VECTOR
from lowbit.pack.nhwc64 import padded_channels


@triton.jit
def half_of(vector, HALF: tl.constexpr, FOUR: tl.constexpr):
    """Returns 4 codes of a vector of 8 as the bytes of a word: channels 4 HALF to 4 HALF + 3, or of 4-bit codes the 4 with
    channel % 2 == HALF."""
    if FOUR:
        return (vector >> (4 * HALF)) & 0x0F0F0F0F
    else:
        return (vector >> (32 * HALF)).to(tl.int32)


@triton.jit
def packed(first, second, X_FOUR: tl.constexpr, Y_FOUR: tl.constexpr):
    """Returns the packed codes of 8 channels, one word of 4-bit codes or 64 bits of 8-bit codes, from the words of both halves
    in the order of `half_of`."""
    if Y_FOUR:
        even = first if X_FOUR else prmt(first, second, 0x6420)
        odd = second if X_FOUR else prmt(first, second, 0x7531)
        return ((even >> 4) & 0x0F0F0F0F) | (odd & ~0x0F0F0F0F)
    else:
        low = prmt(first, second, 0x5140) if X_FOUR else first
        high = prmt(first, second, 0x7362) if X_FOUR else second
        return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def load_pixels(x, first, row, column, height, width, inside, VECTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads one vector of each of ROWS x COLUMNS pixels from (row, column) on; zeros outside of the image, whose first row of
    pixels is `first`."""
    pixels = ()
    for r in tl.static_range(ROWS):
        h = row + r
        line = x + ((first + h) * width + column) * VECTORS
        in_row = inside & (h >= 0) & (h < height)
        for c in tl.static_range(COLUMNS):
            w = column + c
            pixels = pixels + (tl.load(line + c * VECTORS, mask=in_row & (w >= 0) & (w < width), other=0),)
    return pixels


@triton.jit
def words_of(pixels, HALF: tl.constexpr, FOUR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns words of 4 neighbouring pixels of a channel: for each row, each 4 columns, and each of 4 channels of the half."""
    words = ()
    for r in tl.static_range(ROWS):
        for c in tl.static_range(0, COLUMNS, 4):
            a = half_of(pixels[r * COLUMNS + c], HALF, FOUR)
            b = half_of(pixels[r * COLUMNS + c + 1], HALF, FOUR) if c + 1 < COLUMNS else tl.zeros_like(a)
            d = half_of(pixels[r * COLUMNS + c + 2], HALF, FOUR) if c + 2 < COLUMNS else tl.zeros_like(a)
            e = half_of(pixels[r * COLUMNS + c + 3], HALF, FOUR) if c + 3 < COLUMNS else tl.zeros_like(a)
            words = words + transposed(a, b, d, e)
    return words


@triton.jit
def values_of(
    words, weight, s, b, PLACE: tl.constexpr, LOADED: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Returns fma(sum, s, b) of one channel for ROWS x COLUMNS outputs. `weight`, `s` and `b` point to those of the channel;
    words of weights are STEP apart."""
    OF_ROW: tl.constexpr = (LOADED + 3) // 4
    TAPS: tl.constexpr = (KW + 3) // 4
    scale = tl.load(s)
    shift = tl.load(b)
    taps = ()
    for tap in tl.static_range(KH * TAPS):
        taps = taps + (tl.load(weight + tap * STEP),)
    values = ()
    for row in tl.static_range(ROWS):
        for column in tl.static_range(COLUMNS):
            total = tl.full(weight.shape, MAGIC, tl.int32)
            for r in tl.static_range(KH):
                for tap in tl.static_range(TAPS):
                    # A window's last word can end beyond the pixels: its taps there are zero, so any bytes will do.
                    four = window_of(
                        words, ((row * SH + r) * OF_ROW + column * SW // 4 + tap) * 4 + PLACE,
                        ((row * SH + r) * OF_ROW + min(column * SW // 4 + tap + 1, OF_ROW - 1)) * 4 + PLACE, column * SW % 4,
                    )  # fmt: skip
                    total = dp4a(four, taps[r * TAPS + tap], total)
            values = values + (tl.fma(total.to(tl.float32, bitcast=True) - 12582912.0, scale, shift),)
    return values


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "across", "down", "total", "channels"])
def depthwise_kernel(
    y, x, weight, s, b, height, width, out_height, out_width, across, down, total, channels, VECTORS: tl.constexpr,
    OF_BLOCK: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, X_FOUR: tl.constexpr, Y_FOUR: tl.constexpr,
    VALUES: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Computes `total` groups of ROWS x COLUMNS pixels; an image has `down` x `across` groups. A block computes OF_BLOCK of
    VECTORS vectors of 8 channels. OF_BLOCK = 4: the last 4 vectors of a pixel are padding, which the block before them fills.

    VALUES: True if y has values [N, Ho, Wo, channels], not codes.
    """
    PLACES: tl.constexpr = THREADS // OF_BLOCK
    FILLED: tl.constexpr = 4 if OF_BLOCK == 4 else 0
    OF_PIXEL: tl.constexpr = (VECTORS - FILLED) // OF_BLOCK
    LOADED_ROWS: tl.constexpr = (ROWS - 1) * SH + KH
    LOADED: tl.constexpr = (COLUMNS - 1) * SW + KW
    STEP: tl.constexpr = 8 * VECTORS
    N: tl.constexpr = ROWS * COLUMNS
    LOW: tl.constexpr = 0.0 if RELU else -128.0
    HIGH: tl.constexpr = 255.0 if Y_FOUR else 127.0
    i = (tl.program_id(0) // OF_PIXEL) * PLACES + tl.arange(0, PLACES)[:, None] + tl.zeros([PLACES, OF_BLOCK], tl.int32)
    v = (tl.program_id(0) % OF_PIXEL) * OF_BLOCK + tl.arange(0, OF_BLOCK)[None, :] + tl.zeros_like(i)
    image = (i // (down * across)).to(tl.int64)
    row = (i // across % down) * ROWS
    column = (i % across) * COLUMNS
    inside = i < total
    pixels = load_pixels(
        x + v, image * height, row * SH - PH, column * SW - PW, height, width, inside, VECTORS, LOADED_ROWS, LOADED
    )
    firsts = ()
    for half in tl.static_range(2):
        words = words_of(pixels, half, X_FOUR, LOADED_ROWS, LOADED)
        codes = ()
        for place in tl.static_range(4):
            channel = 2 * place + half if X_FOUR else 4 * half + place
            at = channel * VECTORS + v
            values = values_of(
                words, weight + at, s + at, b + at, place, LOADED, KH, KW, SH, SW, ROWS, COLUMNS, STEP
            )  # fmt: skip
            for j in tl.static_range(N):
                if VALUES:
                    t = tl.maximum(values[j], 0.0) if RELU else values[j]
                    h = row + j // COLUMNS
                    w = column + j % COLUMNS
                    kept = inside & (h < out_height) & (w < out_width) & (8 * v + channel < channels)
                    out = y + ((image * out_height + h) * out_width + w) * channels + 8 * v + channel
                    tl.store(out, t.to(y.dtype.element_ty), mask=kept)
                else:
                    codes = codes + (rounded(values[j], LOW, HIGH),)
        if not VALUES:
            for j in tl.static_range(N):
                word = bytes_of(codes[j], codes[N + j], codes[2 * N + j], codes[3 * N + j])
                if half == 0:
                    firsts = firsts + (word,)
                else:
                    h = row + j // COLUMNS
                    w = column + j % COLUMNS
                    out = y + ((image * out_height + h) * out_width + w) * VECTORS + v
                    kept = inside & (h < out_height) & (w < out_width)
                    tl.store(out, packed(firsts[j], word, X_FOUR, Y_FOUR), mask=kept)
                    if FILLED > 0:
                        last = v >= VECTORS - FILLED - OF_BLOCK
                        tl.store(out + FILLED, tl.zeros_like(v).to(y.dtype.element_ty), mask=kept & last)


class PreparedDepthwise(ConvPlan):
    """A depthwise layer on one GPU."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, tile: DepthwiseTile) -> None:
        super().__init__(spec, packed)
        self.tile = tile
        self.launch = PlainLauncher(depthwise_kernel, num_warps=WARPS)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Returns y of packed x [N, H, W, bytes]; it adds nothing, so `residual` and `second` are None."""
        y = self.output(x, out)
        spec, tile = self.spec, self.tile
        n, height, width, _ = x.shape
        out_height, out_width = y.shape[1], y.shape[2]
        across, down = -(-out_width // tile.columns), -(-out_height // tile.rows)
        vectors = padded_channels(spec.channels) // VECTOR
        of_block = vectors_of_block(vectors, -(-spec.channels // VECTOR))
        total = n * down * across
        types = {"u4": torch.int32, "s8": torch.int64}
        self.launch(
            -(-total * of_block // THREADS.value) * ((vectors - (4 if of_block == 4 else 0)) // of_block),
            y if spec.y in FLOATS else y.view(-1).view(types[spec.y]), x.view(-1).view(types[spec.x]),
            self.packed.weight.view(torch.int32), self.packed.s, self.packed.b, height, width, out_height,
            out_width, across, down, total, spec.outputs, vectors, of_block, *spec.kernel, *spec.stride, *spec.padding,
            tile.rows, tile.columns, spec.x == "u4", spec.y == "u4", spec.y in FLOATS, spec.relu,
        )  # fmt: skip
        return y
