"""y = requantize(convolution(x, w) + residual) on 4-bit activations and 4-bit weights, native INT4 mma.sync: sm_80, 86, 89.

Computes pixels x output channels by mma.m16n8k64 (u4 x s4, int32 sums): twice the rate of int8 on these GPUs
Reads   x as packed NHWC codes, 8 bytes a lane, row and step, zeros outside the image; w in pack/conv_fragment.py's order
Roles   none: a warp has 32 pixels and 64 outputs; neighbouring warps have neighbouring pixels and the same weights
Exact   meant to be bit for bit as kernels/conv_reference.py. Newer GPUs have no INT4 tensor cores: there ptxas calls a
        subroutine for each instruction, slow, and sm90/conv.py is the kernel to use
Source  fragments of m16n8k64: PTX ISA
State   compiled for sm_80, 86 and 89, operands emulated lane by lane in a test; it has not run on a GPU, and ops/conv.py does
        not choose it
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.kernels.conv_reference import ConvLayer
from lowbit.kernels.gluon import CompiledKernel, gl, gluon, source_digest
from lowbit.kernels.parts.requantize import Requantize
from lowbit.pack.conv_fragment import FRAGMENTS, OUTPUTS, STEP_CHANNELS, pack_conv_fragments
from lowbit.pack.conv_weight import pack_constants
from lowbit.pack.nhwc64 import CODE_BITS, Nhwc64, padded_channels

WARPS = 4
STRIPS = 2
"""Strips of 16 pixels of a warp."""

PIXELS = 16 * STRIPS * WARPS
SUMS = STRIPS * FRAGMENTS * 4
"""Sums of a thread: of a strip and fragment, two columns of row g and two of row g + 8."""


@dataclass(frozen=True)
class MmaConv:
    """All that is fixed when the kernel is compiled."""

    y: str
    residual: str | None
    relu: bool
    digest: str = source_digest()

    @property
    def requantize(self) -> Requantize:
        """What becomes of 8 sums."""
        return Requantize(self.y, self.residual, self.relu)

    @property
    def words(self) -> tuple[gl.dtype, ...]:
        """Types of the words of 8 columns."""
        return (gl.int32,) * self.requantize.words

    @property
    def threads(self) -> gl.BlockedLayout:
        """One element per thread."""
        return gl.BlockedLayout([1], [32], [WARPS], [0])

    @property
    def products(self) -> str:
        """The instructions of a step: outputs sums; inputs 8 words of x, 16 words of w, then the sums."""
        x = [f"${SUMS + i}" for i in range(4 * STRIPS)]
        w = [f"${SUMS + 4 * STRIPS + i}" for i in range(2 * FRAGMENTS)]
        before = [f"${SUMS + 4 * STRIPS + 2 * FRAGMENTS + i}" for i in range(SUMS)]
        lines = []
        for strip in range(STRIPS):
            a = ", ".join(x[4 * strip : 4 * strip + 4])
            for fragment in range(FRAGMENTS):
                first = 4 * (strip * FRAGMENTS + fragment)
                d, c = (", ".join(r[first : first + 4]) for r in ([f"${i}" for i in range(SUMS)], before))
                b = ", ".join(w[2 * fragment : 2 * fragment + 2])
                lines.append(f"mma.sync.aligned.m16n8k64.row.col.s32.u4.s4.s32 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};")
        return "\n".join(lines)

    @property
    def constraints(self) -> str:
        """Of `products`."""
        return ",".join(["=&r"] * SUMS + ["r"] * (4 * STRIPS + 2 * FRAGMENTS + SUMS))

    @property
    def types(self) -> tuple[gl.dtype, ...]:
        """Of the sums."""
        return (gl.int32,) * SUMS


@gluon.jit
def load_pair(at, exists):
    """Two neighbouring words, one load of 64 bits; zeros where there are none."""
    both = gl.load(at.to(gl.pointer_type(gl.int64), bitcast=True), mask=exists, other=0)
    return both.to(gl.int32), (both >> 32).to(gl.int32)


@gluon.jit
def store_pair(at, low, high, exists):
    """Two neighbouring words, one store of 64 bits."""
    both = low.to(gl.uint32, bitcast=True).to(gl.int64) | (high.to(gl.int64) << 32)
    gl.store(at.to(gl.pointer_type(gl.int64), bitcast=True), both, mask=exists)


@gluon.jit
def load_pixels(x, place, down, across, block, shape, C: gl.constexpr):
    """The words of operand A of this thread: of rows g and g + 8 of each strip, 16 channels from 16 t on."""
    columns, rows, images, thread = place
    _pixels, height, width, pixel_words, stride_down, stride_across, pad_down, pad_across, _out_height, _out_width = shape
    low = ()
    high = ()
    for i in gl.static_range(4):
        h = rows[i] * stride_down - pad_down + down
        w = columns[i] * stride_across - pad_across + across
        inside = (h >= 0) & (h < height) & (w >= 0) & (w < width)
        at = x + ((images[i] * height + h) * width + w).to(gl.int64) * pixel_words + block * 8 + (thread & 3) * 2
        first, second = load_pair(at, inside)
        low = low + (first,)
        high = high + (second,)
    return (low[0], low[1], high[0], high[1], low[2], low[3], high[2], high[3])  # type: ignore[misc]


@gluon.jit
def store_row(y, residual, sums, scales, offsets, g, pixel, pixels, row_words, residual_words, tile, thread, C: gl.constexpr):
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


@gluon.jit(do_not_specialize=[
    "pixels", "height", "width", "pixel_words", "row_words", "residual_words", "stride_down", "stride_across", "pad_down",
    "pad_across", "out_height", "out_width", "taps_down", "taps_across", "blocks",
])  # fmt: skip
def mma_conv(
    y, residual, x, weight, s, b, g, pixels, height, width, pixel_words, row_words, residual_words, stride_down, stride_across,
    pad_down, pad_across, out_height, out_width, taps_down, taps_across, blocks, C: gl.constexpr,
):  # fmt: skip
    """The kernel: one block is 128 pixels x 64 outputs."""
    THREADS: gl.constexpr = 32 * 4
    thread = gl.arange(0, THREADS, C.threads)
    tile = gl.program_id(1)
    group = (thread & 31) >> 2
    columns = ()
    rows = ()
    images = ()
    places = ()
    for i in gl.static_range(4):  # rows g and g + 8 of two strips
        pixel = gl.program_id(0) * 128 + (thread >> 5) * 32 + i * 8 + group
        line = pixel // out_width
        places = places + (pixel,)
        columns = columns + (pixel % out_width,)
        rows = rows + (gl.where(pixel < pixels, line % out_height, -(1 << 20)),)  # beyond the last pixel: outside the image
        images = images + (line // out_height,)
    shape = (pixels, height, width, pixel_words, stride_down, stride_across, pad_down, pad_across, out_height, out_width)
    sums = ()
    for _zero in gl.static_range(64):
        sums = sums + (thread * 0,)
    own = weight + (tile * (taps_down * taps_across * blocks) * 32 + (thread & 31)) * 16
    for tap in range(taps_down * taps_across):
        for block in range(blocks):
            a = load_pixels(
                x, (columns, rows, images, thread), tap // taps_across, tap % taps_across, block, shape, C
            )  # fmt: skip
            fragments = ()
            for i in gl.static_range(8):
                low, high = load_pair(own + (tap * blocks + block) * 512 + 2 * i, thread >= 0)
                fragments = fragments + (low, high)
            sums = gl.inline_asm_elementwise(
                C.products, C.constraints, a + fragments + sums, dtype=C.types, is_pure=True, pack=1
            )  # fmt: skip
    scales = ()
    offsets = ()
    for i in gl.static_range(16):  # column 8 (i / 2) + 2 t + i % 2
        column = tile * 64 + (i // 2) * 8 + (thread & 3) * 2 + i % 2
        scales = scales + (gl.load(s + column),)
        offsets = offsets + (gl.load(b + column),)
    for i in gl.static_range(4):
        own_sums = ()
        for j in gl.static_range(8):
            own_sums = own_sums + (sums[32 * (i // 2) + 4 * j + 2 * (i % 2)], sums[32 * (i // 2) + 4 * j + 2 * (i % 2) + 1])
        store_row(
            y, residual, own_sums, scales, offsets, g, places[i], pixels, row_words, residual_words, tile, thread, C
        )  # fmt: skip


class PreparedMmaConv:
    """A layer of 4-bit codes and 4-bit weights as the kernel reads it, on one GPU."""

    def __init__(self, layer: ConvLayer) -> None:
        reasons = mma_refusals(layer)
        if reasons:
            raise ValueError(f"{layer.name or 'the layer'} is not for INT4 tensor cores: {'; '.join(reasons)}")
        self.layer = layer
        self.outputs = layer.weight.shape[0]
        self.weight = pack_conv_fragments(layer.weight, layer.y)
        self.s, self.b = (pack_constants(values, layer.y, OUTPUTS) for values in (layer.s, layer.b))
        self.config = MmaConv(layer.y, layer.residual, layer.relu)
        self.kernel: CompiledKernel | None = None

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the packed output [N, Ho, Wo, bytes]."""
        height, width = self.layer.output_size(size[1], size[2])
        return size[0], height, width, Nhwc64(self.layer.y).pixel_bytes(self.outputs)  # type: ignore[arg-type]

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: None = None, out: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """y of packed x [N, H, W, bytes]; `residual` as the layer has it; `out` is written if given."""
        shape, layer = self.output_shape(tuple(x.shape)), self.layer
        if out is None:
            out = torch.empty(shape, dtype=torch.uint8, device=x.device)
        pixels = shape[0] * shape[1] * shape[2]
        arguments = (
            out.view(torch.int32), None if residual is None else residual.view(torch.int32), x.view(torch.int32), self.weight,
            self.s, self.b, layer.g, pixels, x.shape[1], x.shape[2], x.shape[3] // 4, shape[3] // 4,
            0 if residual is None else residual.shape[3] // 4, *layer.stride, *layer.padding, shape[1], shape[2], *layer.kernel,
            x.shape[3] * 2 // STEP_CHANNELS, self.config,
        )  # fmt: skip
        mma_conv[(-(-pixels // PIXELS), padded_channels(self.outputs) // OUTPUTS)](*arguments, num_warps=WARPS)
        return out


def mma_refusals(layer: ConvLayer) -> tuple[str, ...]:
    """Why INT4 tensor cores cannot run a layer; empty if they can."""
    reasons = []
    if layer.x != "u4":
        reasons.append(f"its input is stored as {layer.x}, not u4")
    if layer.y not in CODE_BITS:
        reasons.append(f"its output is stored as {layer.y}, not u4 or s8")
    if layer.second is not None:
        reasons.append("it has a second product")
    if layer.weight.numel() and (int(layer.weight.min()) < -8 or int(layer.weight.max()) > 7):
        reasons.append("its weights have more than 4 bits")
    return tuple(reasons)
