"""Depthwise convolution of packed NHWC codes of 8 bits, windows of 3 x 3 and 5 x 5, strides 1 and 2. For all GPUs from sm_80.

A thread computes 4 channels of ROWS x COLUMNS neighbouring output pixels, where depthwise.py computes 8 channels of fewer
pixels: fewer pixels are loaded and transposed for each output. As there, a word holds 4 neighbouring pixels of one channel, and
one dp4a multiplies 4 taps. A window of 3 that ends within a word is multiplied by shifted weights, without a funnel shift. The
fifth column of a 5 x 5 window is one word of 4 rows and one tap: 7 dp4a instead of 10. Rows and columns of zeros at the border
of a window, which padding on one side leaves, are removed before a launch. With a ReLU the fma clamps to 0..1, codes are 128
times that, and 128 becomes 127 in 4 codes at once.

Memory  x, y as in pack/nhwc64.py; weights and constants as in pack/depthwise.py with 4 channels a vector.
Exact   bit for bit as `ConvLayer` of formats/conv.py. Sums start at the bits of 1.5 * 2^23, exact below 2^22. s and b are
        multiplied by 2^-7, which is exact, before a clamped fma. Tested: tests/kernels/sm80/test_depthwise_quads.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import ConvSpec
from lowbit.kernels.choose.depthwise import quad_tile, vectors_of_block, window_without_zeros
from lowbit.kernels.parts.conv_plan import ConvPlan, PlainLauncher
from lowbit.kernels.parts.pixel_words import MAGIC, THREADS, WARPS, bytes_of, dp4a, prmt, rounded, transposed, window_of
from lowbit.pack.conv_layout import PackedConv
from lowbit.pack.depthwise import VECTOR, DepthwiseTaps
from lowbit.pack.nhwc64 import padded_channels


@triton.jit
def clamped_fma(a, b, c):
    """Returns a * b + c, rounded once and clamped to 0..1."""
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def at_most_127(word):
    """Returns a word of bytes of 0 to 128 with 127 for 128: a byte with its sign bit set is inverted."""
    return word ^ tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, 0xBA98;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def load_quads(x, row, column, height, width, inside, QUADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads 4 channels of ROWS x COLUMNS pixels from (row, column), to which x points, on; zeros outside of the image."""
    step = (width * QUADS).to(tl.int64)
    line = x
    pixels = ()
    for r in tl.static_range(ROWS):
        in_row = inside & ((row + r).to(tl.uint32, bitcast=True) < height)
        for c in tl.static_range(COLUMNS):
            in_image = in_row & ((column + c).to(tl.uint32, bitcast=True) < width)
            pixels = pixels + (tl.load(line + c * QUADS, mask=in_image, other=0),)
        line = line + step
    return pixels


@triton.jit
def transposed_two(a, b):
    """Returns 4 words, word i from the bytes i of a and b and any two others."""
    low = prmt(a, b, 0x5140)
    high = prmt(a, b, 0x7362)
    return low, low >> 16, high, high >> 16


@triton.jit
def transposed_three(a, b, c):
    """Returns 4 words, word i from the bytes i of a, b and c and any other."""
    low = prmt(a, b, 0x5140)
    high = prmt(a, b, 0x7362)
    return prmt(low, c, 0x0410), prmt(low, c, 0x0532), prmt(high, c, 0x0610), prmt(high, c, 0x0732)


@triton.jit
def transposed_rows(pixels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns words of 4 neighbouring pixels of a channel: for each row, each 4 columns, and each of 4 channels. Bytes of
    columns that there are not have any value; a last column alone has no words."""
    words = ()
    for r in tl.static_range(ROWS):
        for c in tl.static_range(0, COLUMNS - (1 if COLUMNS % 4 == 1 else 0), 4):
            if c + 2 == COLUMNS:
                four = transposed_two(pixels[r * COLUMNS + c], pixels[r * COLUMNS + c + 1])
            elif c + 3 == COLUMNS:
                four = transposed_three(
                    pixels[r * COLUMNS + c], pixels[r * COLUMNS + c + 1], pixels[r * COLUMNS + c + 2]
                )  # fmt: skip
            else:
                four = transposed(
                    pixels[r * COLUMNS + c], pixels[r * COLUMNS + c + 1], pixels[r * COLUMNS + c + 2],
                    pixels[r * COLUMNS + c + 3],
                )  # fmt: skip
            words = words + four
    return words


@triton.jit
def sums_of_3x3(
    words, pixels, weight, PLACE: tl.constexpr, STEP: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, LOADED: tl.constexpr
):  # fmt: skip
    """Returns MAGIC + the sum of each of ROWS x 2 windows of channel PLACE. A row has one word of each channel; with LOADED = 5
    the second window ends with a pixel of its own."""
    taps = ()
    for r in tl.static_range(3):
        taps = taps + (tl.load(weight + r * STEP),)
    sums = ()
    for row in tl.static_range(ROWS):
        first = tl.full(weight.shape, MAGIC, tl.int32)
        second = first
        for r in tl.static_range(3):
            word = words[(row * S + r) * 4 + PLACE]
            first = dp4a(word, taps[r], first)
            if LOADED == 4:
                second = dp4a(word, taps[r] << 8, second)
            else:  # bytes 2 and 3 of the word, byte PLACE of pixel 4; any fourth byte, whose weight is zero
                ends = prmt(word, pixels[(row * S + r) * LOADED + 4], 0x0432 + PLACE * 0x100)
                second = dp4a(ends, taps[r], second)
        sums = sums + (first, second)
    return sums


@triton.jit
def next_rows(four, word, BYTE: tl.constexpr):
    """Returns the last 3 bytes of `four` and byte BYTE of `word`."""
    return prmt(four, word, 0x0321 + (4 + BYTE) * 0x1000)


@triton.jit
def fifth_columns(words, PLACE: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr):
    """Returns, for each of ROWS outputs and each byte of second words, the word of that byte of 4 rows from S * output on."""
    fours = transposed(words[4 + PLACE], words[12 + PLACE], words[20 + PLACE], words[28 + PLACE])
    columns = fours
    for row in tl.static_range(S * (ROWS - 1)):
        new = words[(row + 4) * 8 + 4 + PLACE]
        low = (next_rows(fours[0], new, 0), next_rows(fours[1], new, 1))
        fours = low + (next_rows(fours[2], new, 2), next_rows(fours[3], new, 3))
        if (row + 1) % S == 0:
            columns = columns + fours
    return columns


@triton.jit
def sums_of_5x5(
    words, weight, PLACE: tl.constexpr, STEP: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Returns MAGIC + the sum of each of ROWS x COLUMNS windows of channel PLACE. A row has 2 words of each channel."""
    firsts = ()
    lasts = ()
    for r in tl.static_range(5):
        firsts = firsts + (tl.load(weight + 2 * r * STEP),)
        lasts = lasts + (tl.load(weight + (2 * r + 1) * STEP),)
    fifth = bytes_of(lasts[0], lasts[1], lasts[2], lasts[3])
    columns = fifth_columns(words, PLACE, S, ROWS)
    sums = ()
    for row in tl.static_range(ROWS):
        for column in tl.static_range(COLUMNS):
            total = tl.full(weight.shape, MAGIC, tl.int32)
            for r in tl.static_range(5):
                total = dp4a(
                    window_of(words, (row * S + r) * 8 + PLACE, (row * S + r) * 8 + 4 + PLACE, column * S), firsts[r], total
                )  # fmt: skip
            total = dp4a(columns[4 * row + column * S], fifth, total)
            sums = sums + (dp4a(words[(row * S + 4) * 8 + 4 + PLACE], lasts[4] << (8 * column * S), total),)
    return sums


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "across", "down", "total"])
def depthwise_quads_kernel(
    y, x, weight, s, b, height, width, out_height, out_width, across, down, total, VECTORS: tl.constexpr,
    OF_BLOCK: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Computes `total` groups of ROWS x COLUMNS pixels; an image has `down` x `across` groups. A block computes 2 OF_BLOCK
    quads (4 channels) of VECTORS vectors (8 channels). OF_BLOCK = 4: the last 4 vectors of a pixel are padding, which the block
    before them fills."""
    QUADS: tl.constexpr = 2 * VECTORS
    WIDE: tl.constexpr = 2 * OF_BLOCK
    PLACES: tl.constexpr = THREADS // WIDE
    FILLED: tl.constexpr = 8 if OF_BLOCK == 4 else 0
    OF_PIXEL: tl.constexpr = (QUADS - FILLED) // WIDE
    LOADED_ROWS: tl.constexpr = (ROWS - 1) * S + K
    LOADED: tl.constexpr = (COLUMNS - 1) * S + K
    STEP: tl.constexpr = 4 * QUADS
    N: tl.constexpr = ROWS * COLUMNS
    i = (tl.program_id(0) // OF_PIXEL) * PLACES + tl.arange(0, PLACES)[:, None] + tl.zeros([PLACES, WIDE], tl.int32)
    q = (tl.program_id(0) % OF_PIXEL) * WIDE + tl.arange(0, WIDE)[None, :] + tl.zeros_like(i)
    image = i // (down * across)
    row = (i // across % down) * ROWS
    column = (i % across) * COLUMNS
    inside = i < total
    first = (image * height + row * S - PH).to(tl.int64) * width + (column * S - PW)
    pixels = load_quads(
        x + (first * QUADS + q), row * S - PH, column * S - PW, height, width, inside, QUADS, LOADED_ROWS, LOADED
    )
    words = transposed_rows(pixels, LOADED_ROWS, LOADED)
    codes = ()
    for place in tl.static_range(4):
        channel = place * QUADS + q
        if K == 3:
            sums = sums_of_3x3(words, pixels, weight + channel, place, STEP, S, ROWS, LOADED)
        else:
            sums = sums_of_5x5(words, weight + channel, place, STEP, S, ROWS, COLUMNS)
        scale = tl.load(s + channel)
        shift = tl.load(b + channel)
        if RELU:
            scale = scale * 0.0078125
            shift = shift * 0.0078125
        for j in tl.static_range(N):
            value = sums[j].to(tl.float32, bitcast=True) - 12582912.0
            if RELU:
                code = tl.fma(clamped_fma(value, scale, shift), 128.0, 12582912.0).to(tl.int32, bitcast=True)
            else:
                code = rounded(tl.fma(value, scale, shift), -128.0, 127.0)
            codes = codes + (code,)
    out = y + (((image * out_height + row).to(tl.int64) * out_width + column) * QUADS + q)
    step = (out_width * QUADS).to(tl.int64)
    for j in tl.static_range(N):
        word = bytes_of(codes[j], codes[N + j], codes[2 * N + j], codes[3 * N + j])
        if RELU:
            word = at_most_127(word)
        kept = inside & (row + j // COLUMNS < out_height) & (column + j % COLUMNS < out_width)
        to = out + j % COLUMNS * QUADS
        tl.store(to, word, mask=kept)
        if FILLED > 0:
            tl.store(to + FILLED, tl.zeros_like(word), mask=kept & (q >= QUADS - FILLED - WIDE))
        if j % COLUMNS == COLUMNS - 1:
            out = out + step


class PreparedDepthwiseQuads(ConvPlan):
    """A depthwise layer on one GPU."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, weight: Tensor) -> None:
        """`weight` are the codes int8 [C, 1, R, S] that `packed` has in the order of depthwise.py."""
        super().__init__(spec, packed)
        self.window, self.zeros = window_without_zeros(weight)
        order = DepthwiseTaps(4)
        rows, columns = (slice(first, first + self.window) for first in self.zeros)
        self.weight = order.pack(weight[:, :, rows, columns])
        self.s, self.b = (order.constants(values.T.flatten()) for values in (packed.s, packed.b))
        self.launch = PlainLauncher(depthwise_quads_kernel, num_warps=WARPS)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Returns y of packed x [N, H, W, bytes]; it adds nothing, so `residual` and `second` are None."""
        y = self.output(x, out)
        spec = self.spec
        n, height, width, _ = x.shape
        out_height, out_width = y.shape[1], y.shape[2]
        tile = quad_tile(spec, self.window, (out_height, out_width))
        across, down = -(-out_width // tile.columns), -(-out_height // tile.rows)
        vectors = padded_channels(spec.channels) // VECTOR
        of_block = vectors_of_block(vectors, -(-spec.channels // VECTOR))
        total = n * down * across
        self.launch(
            -(-total * 2 * of_block // THREADS.value) * ((vectors - (4 if of_block == 4 else 0)) // of_block),
            y.view(-1).view(torch.int32), x.view(-1).view(torch.int32), self.weight.view(torch.int32), self.s, self.b,
            height, width, out_height, out_width, across, down, total, vectors, of_block, self.window,
            spec.stride[0], spec.padding[0] - self.zeros[0], spec.padding[1] - self.zeros[1], tile.rows, tile.columns,
            spec.relu,
        )  # fmt: skip
        return y
