"""y = requantize(convolution(x, w) + ..) on packed NHWC activations of 4 or 8 bits, mma.sync: sm_80 and newer.

Computes pixels x output channels with sums in int32: by mma.m16n8k64 for u4 x s4 (twice the rate of int8 on sm_80, 86 and 89),
        else by mma.m16n8k32 on bytes (with 8-bit weights u4 codes are unpacked to bytes)
Reads   x as packed NHWC codes, 8 bytes per lane, row and k block, zeros outside the image; w in pack/conv_fragment.py's order.
        A second product reads another x and w; a stem reads rows of 4 overlapping packed pixels
Roles   none: each warp computes 32 pixels x 64 outputs; neighbouring warps have neighbouring pixels and the same weights
Exact   bit for bit as formats/conv.py
Source  fragments of m16n8k64 and m16n8k32: PTX ISA
State   on an H200 (sm_90) codes equal the reference's, also with m16n8k64; since sm_90 has no INT4 tensor cores, ptxas calls a
        subroutine for it. For sm_80 to 89 the kernel was compiled and its machine code read, but it was not run
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import ACTIVATIONS, ConvSpec, ProductSpec
from lowbit.kernels.parts.conv_plan import ConvLauncher, ConvPlan
from lowbit.kernels.parts.gluon import Scalar, aggregate, gl, gluon, source_digest
from lowbit.kernels.parts.requantize import Requantize
from lowbit.pack.conv_fragment import FRAGMENTS, OUTPUTS, STEP_BYTES, fragment_bits, fragment_words
from lowbit.pack.conv_layout import PackedConv
from lowbit.pack.nhwc64 import padded_channels
from lowbit.pack.stem import PIXEL_BYTES, WINDOW_PIXELS, StemImages

WARPS = 4
ROW_BLOCKS = 2
"""Number of m16 row blocks (16 pixels) of a warp."""

PIXELS = 16 * ROW_BLOCKS * WARPS
SUMS = ROW_BLOCKS * FRAGMENTS * 4
"""Number of sums of a thread. In lane 4 g + t, these are for each row block and fragment the columns 2 t and 2 t + 1 of the
rows g and g + 8."""


@dataclass(frozen=True)
class MmaProduct:
    """One product: storage of its input, and bits of its weights."""

    x: str
    bits: int

    @property
    def words(self) -> int:
        """Number of words of weights per lane and fragment."""
        return fragment_words(self.x, self.bits)

    @property
    def fragment_pairs(self) -> int:
        """Number of word pairs per lane in a k block."""
        return FRAGMENTS * self.words // 2

    @property
    def asm(self) -> str:
        """PTX of a k block. Outputs: sums. Inputs: 8 words of x, the words of w, then the sums."""
        x = [f"${SUMS + i}" for i in range(4 * ROW_BLOCKS)]
        w = [f"${SUMS + 4 * ROW_BLOCKS + i}" for i in range(self.words * FRAGMENTS)]
        before = [f"${SUMS + 4 * ROW_BLOCKS + self.words * FRAGMENTS + i}" for i in range(SUMS)]
        after = [f"${i}" for i in range(SUMS)]
        kind = "m16n8k64.row.col.s32.u4.s4.s32" if (self.x, self.bits) == ("u4", 4) else "m16n8k32.row.col.s32.s8.s8.s32"
        halves, lines = [x], []
        if self.words == 4:
            halves = [[f"{half}{i}" for i in range(4 * ROW_BLOCKS)] for half in ("even", "odd")]
            lines = [f".reg .b32 even<{4 * ROW_BLOCKS}>, odd<{4 * ROW_BLOCKS}>;"]
            for i, word in enumerate(x):
                lines.append(
                    f"and.b32 even{i}, {word}, 0x0F0F0F0F; shr.b32 odd{i}, {word}, 4; and.b32 odd{i}, odd{i}, 0x0F0F0F0F;"
                )
        for row_block in range(ROW_BLOCKS):
            for fragment in range(FRAGMENTS):
                first = 4 * (row_block * FRAGMENTS + fragment)
                d, c = (", ".join(r[first : first + 4]) for r in (after, before))
                for i, half in enumerate(halves):
                    a = ", ".join(half[4 * row_block : 4 * row_block + 4])
                    b = ", ".join(w[self.words * fragment + 2 * i : self.words * fragment + 2 * i + 2])
                    lines.append(f"mma.sync.aligned.{kind} {{{d}}}, {{{a}}}, {{{b}}}, {{{c if i == 0 else d}}};")
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def constraints(self) -> str:
        return ",".join(["=&r"] * SUMS + ["r"] * (4 * ROW_BLOCKS + self.words * FRAGMENTS + SUMS))


@dataclass(frozen=True)
class MmaConv:
    """The kernel's compile-time configuration."""

    first: MmaProduct
    second: MmaProduct | None
    y: str
    residual: str | None
    relu: bool
    digest: str = source_digest()
    threads = gl.BlockedLayout([1], [32], [WARPS], [0])
    types = (gl.int32,) * SUMS

    @property
    def stores_codes(self) -> bool:
        return self.y in ACTIVATIONS

    @property
    def requantize(self) -> Requantize:
        return Requantize(self.y, self.residual, self.relu)

    @property
    def words(self) -> tuple[gl.dtype, ...]:
        """Types of the output words of 8 columns."""
        return (gl.int32,) * self.requantize.words


@aggregate
class Windows:
    """Geometry of windows in the input of a product, and bytes of a pixel of that input."""

    height: Scalar
    width: Scalar
    pixel_words: Scalar
    stride_down: Scalar
    stride_across: Scalar
    pad_down: Scalar
    pad_across: Scalar


@gluon.jit
def load_pair(at, exists):
    """Loads two neighbouring words with one 64-bit load; zeros where they do not exist."""
    both = gl.load(at.to(gl.pointer_type(gl.int64), bitcast=True), mask=exists, other=0)
    return both.to(gl.int32), (both >> 32).to(gl.int32)


@gluon.jit
def store_pair(at, low, high, exists):
    """Stores two neighbouring words with one 64-bit store."""
    both = low.to(gl.uint32, bitcast=True).to(gl.int64) | (high.to(gl.int64) << 32)
    gl.store(at.to(gl.pointer_type(gl.int64), bitcast=True), both, mask=exists)


@gluon.jit
def load_pixels(x, place, down, across, block, shape, C: gl.constexpr):
    """Loads the words of operand A of a thread, lane 4 g + t of its warp: for rows g and g + 8 of each row block, 8 bytes from
    byte 8 t of the k block on."""
    columns, rows, images, thread = place
    height = shape.height
    width = shape.width
    low = ()
    high = ()
    for i in gl.static_range(4):
        h = rows[i] * shape.stride_down - shape.pad_down + down
        w = columns[i] * shape.stride_across - shape.pad_across + across
        inside = (h >= 0) & (h < height) & (w >= 0) & (w < width)
        at = x + ((images[i] * height + h) * width + w).to(gl.int64) * shape.pixel_words + block * 8 + (thread & 3) * 2
        first, second = load_pair(at, inside)
        low = low + (first,)
        high = high + (second,)
    return (low[0], low[1], high[0], high[1]) + (low[2], low[3], high[2], high[3])  # words of both row blocks


@gluon.jit
def product(x, weight, place, tile, shape, taps_down, taps_across, blocks, P: gl.constexpr, C: gl.constexpr):
    """Computes the 64 sums of a thread over all taps and channels of one product."""
    PAIRS: gl.constexpr = P.fragment_pairs
    thread = place[3]
    sums = ()
    for _zero in gl.static_range(64):
        sums = sums + (thread * 0,)
    own = weight + tile * (taps_down * taps_across * blocks) * (64 * PAIRS) + (thread & 31) * 2
    for tap in range(taps_down * taps_across):
        for block in range(blocks):
            inputs = load_pixels(x, place, tap // taps_across, tap % taps_across, block, shape, C)
            for i in gl.static_range(PAIRS):
                low, high = load_pair(own + (tap * blocks + block) * (64 * PAIRS) + 64 * i, thread >= 0)
                inputs = inputs + (low, high)
            sums = gl.inline_asm_elementwise(
                P.asm, P.constraints, inputs + sums, dtype=C.types, is_pure=True, pack=1
            )  # fmt: skip
    return sums


@gluon.jit
def as_float(total, scale, offset):
    """fma(float(sum), s, b)."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f32.s32 $0, $1; fma.rn.f32 $0, $0, $2, $3;", "=&f,r,f,f", [total, scale, offset],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def store_codes(y, residual, sums, scales, offsets, g, pixel, pixels, row_words, residual_words, tile, thread, C: gl.constexpr):
    """Requantizes the 16 sums of one pixel, neighbouring channels, and stores them, 64 bits at a time."""
    R: gl.constexpr = C.requantize
    WORDS: gl.constexpr = R.words
    RESIDUAL: gl.constexpr = R.residual_words
    exists = pixel < pixels
    lane = tile * 4 + (thread & 3)
    words = ()
    for group in gl.static_range(2):
        inputs = sums[8 * group : 8 * group + 8] + scales[8 * group : 8 * group + 8] + offsets[8 * group : 8 * group + 8]
        if RESIDUAL > 0:
            at = residual + pixel.to(gl.int64) * residual_words + lane * (2 * RESIDUAL)
            for i in gl.static_range(RESIDUAL):
                inputs = inputs + (gl.load(at + (group * RESIDUAL + i), mask=exists, other=0),)
            inputs = inputs + (gl.full(thread.shape, g, gl.float32, C.threads),)
        words = words + gl.inline_asm_elementwise(R.asm, R.constraints, inputs, dtype=C.words, is_pure=True, pack=1)
    to = y + pixel.to(gl.int64) * row_words + lane * (2 * WORDS)
    for i in gl.static_range(WORDS):
        store_pair(to + 2 * i, words[2 * i], words[2 * i + 1], exists)


@gluon.jit
def store_values(y, sums, scales, offsets, pixel, pixels, channels, tile, thread, C: gl.constexpr):
    """Stores values of 16 or 32 bits, plain NHWC without padded channels."""
    for i in gl.static_range(16):
        value = as_float(sums[i], scales[i], offsets[i])
        if C.relu:
            value = gl.maximum(value, 0.0)
        column = tile * 64 + (i // 2) * 8 + (thread & 3) * 2 + i % 2
        at = y + pixel.to(gl.int64) * channels + column
        gl.store(at, value.to(y.dtype.element_ty), mask=(pixel < pixels) & (column < channels))


@gluon.jit
def per_column(values, tile, thread):
    """Returns the constants of a thread's 16 columns; value i is that of column 8 (i // 2) + 2 t + i % 2, in lane 4 g + t."""
    own = ()
    for i in gl.static_range(16):
        own = own + (gl.load(values + (tile * 64 + (i // 2) * 8 + (thread & 3) * 2 + i % 2)),)
    return own


@gluon.jit
def of_pixel(sums, i: gl.constexpr):
    """Returns the 16 sums of a thread's pixel i (0 to 3), which is row g or g + 8 of a row block in lane 4 g + t."""
    own = ()
    for j in gl.static_range(8):
        own = own + (sums[32 * (i // 2) + 4 * j + 2 * (i % 2)], sums[32 * (i // 2) + 4 * j + 2 * (i % 2) + 1])
    return own


@gluon.jit(do_not_specialize=[
    "pixels", "channels", "row_words", "residual_words", "out_height", "out_width", "height", "width", "pixel_words",
    "stride_down", "stride_across", "pad_down", "pad_across", "taps_down", "taps_across", "blocks", "height2", "width2",
    "pixel_words2", "stride_down2", "stride_across2", "pad_down2", "pad_across2", "taps_down2", "taps_across2", "blocks2",
])  # fmt: skip
def mma_conv(
    y, residual, s, b, g, s2, pixels, channels, row_words, residual_words, out_height, out_width,
    x, weight, height, width, pixel_words, stride_down, stride_across, pad_down, pad_across, taps_down, taps_across, blocks,
    x2, weight2, height2, width2, pixel_words2, stride_down2, stride_across2, pad_down2, pad_across2, taps_down2, taps_across2,
    blocks2, C: gl.constexpr,
):  # fmt: skip
    """One block: 128 pixels x 64 outputs."""
    FIRST: gl.constexpr = C.first
    SECOND: gl.constexpr = C.second
    thread = gl.arange(0, 128, C.threads)
    tile = gl.program_id(1)
    group = (thread & 31) >> 2
    columns = ()
    rows = ()
    images = ()
    places = ()
    for i in gl.static_range(4):  # rows g and g + 8 of two row blocks
        pixel = gl.program_id(0) * 128 + (thread >> 5) * 32 + i * 8 + group
        line = pixel // out_width
        places = places + (pixel,)
        columns = columns + (pixel % out_width,)
        rows = rows + (gl.where(pixel < pixels, line % out_height, -(1 << 20)),)  # pixels beyond the last count as outside
        images = images + (line // out_height,)
    place = (columns, rows, images, thread)
    shape = Windows(height, width, pixel_words, stride_down, stride_across, pad_down, pad_across)
    sums = product(x, weight, place, tile, shape, taps_down, taps_across, blocks, FIRST, C)
    scales = per_column(s, tile, thread)
    offsets = per_column(b, tile, thread)
    before = ()
    if C.second is not None:
        for i in gl.static_range(4):
            own = of_pixel(sums, i)
            for j in gl.static_range(16):
                before = before + (as_float(own[j], scales[j], offsets[j]),)
        shape2 = Windows(height2, width2, pixel_words2, stride_down2, stride_across2, pad_down2, pad_across2)
        sums = product(x2, weight2, place, tile, shape2, taps_down2, taps_across2, blocks2, SECOND, C)
        scales = per_column(s2, tile, thread)
    for i in gl.static_range(4):
        if C.second is not None:
            offsets = before[16 * i : 16 * i + 16]
        if C.stores_codes:
            store_codes(
                y, residual, of_pixel(sums, i), scales, offsets, g, places[i], pixels, row_words, residual_words, tile, thread,
                C,
            )  # fmt: skip
        else:
            store_values(y, of_pixel(sums, i), scales, offsets, places[i], pixels, channels, tile, thread, C)


class MmaOperand:
    """Kernel arguments of one product of a layer: packed weights, and geometry of windows in the input."""

    def __init__(self, product: ProductSpec, weight: Tensor, bits: int, images: StemImages | None = None) -> None:
        self.product, self.weight = MmaProduct(product.x, bits), weight
        self.windows = (*product.stride, *product.padding, *product.kernel)
        self.window_bytes = None if images is None else PIXEL_BYTES * WINDOW_PIXELS

    def arguments(self, x: Tensor) -> tuple[object, ...]:
        """Returns the kernel arguments for an input."""
        blocks = (self.window_bytes or x.shape[3]) // STEP_BYTES
        return (x.view(torch.int32), self.weight, x.shape[1], x.shape[2], x.shape[3] // 4, *self.windows, blocks)


class PreparedMmaConv(ConvPlan):
    """A layer prepared for the kernel, on one GPU. With `images` the layer is a stem, whose input they pack.

    `int4`: products of 4-bit codes and 4-bit weights use m16n8k64 instead of m16n8k32; weights must be packed for that
    instruction.
    """

    def __init__(self, spec: ConvSpec, packed: PackedConv, int4: bool = False, images: StemImages | None = None) -> None:
        super().__init__(spec, packed, images)
        # A stem's input is read as rows of 4 packed pixels, one starting at every packed pixel.
        first = spec if images is None else images.product(spec)
        self.first = MmaOperand(first, packed.weight, fragment_bits(first, int4), images)
        self.second: MmaOperand | None = None
        if spec.second is not None and packed.weight2 is not None:
            self.second = MmaOperand(spec.second, packed.weight2, fragment_bits(spec.second, int4))
        self.config = MmaConv(
            self.first.product, None if self.second is None else self.second.product, spec.y, spec.residual, spec.relu
        )
        self.launch = ConvLauncher(mma_conv)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        out, spec, packed = self.output(x, out), self.spec, self.packed
        n, height, width, row = out.shape
        pixels = n * height * width
        self.launch(
            0, (-(-pixels // PIXELS), padded_channels(spec.outputs) // OUTPUTS, 1), WARPS,
            out.view(torch.int32) if self.config.stores_codes else out,
            None if residual is None else residual.view(torch.int32), packed.s, packed.b, packed.g, packed.s2, pixels,
            spec.outputs, row // 4, 0 if residual is None else residual.shape[3] // 4, height, width,
            *self.first.arguments(x),
            *((None, None) + (0,) * 10 if self.second is None or second is None else self.second.arguments(second)),
            self.config,
        )  # fmt: skip
        return out
