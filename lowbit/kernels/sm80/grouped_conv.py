"""Convolution in groups on packed NHWC codes of 4 or 8 bits, on int8 tensor cores. For all GPUs from sm_80 on, plain Triton.

A block computes PIXELS output pixels x 64 outputs. For each tap and each block of 64 input channels that these outputs read, it
multiplies a matrix of pixels by a dense matrix of weights, with zeros between groups (pack/grouped.py). 4-bit codes are two
matrices of 32 channels, their low and high nibbles. Triton chooses the instruction: mma.sync, or wgmma on sm_90.

Exact   bit for bit as `ConvLayer` of formats/conv.py: sums in int32, each fma rounds once.
        Tested: tests/kernels/sm80/test_grouped_conv.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import FLOATS, ConvSpec
from lowbit.kernels.parts.conv_plan import ConvPlan, PlainLauncher
from lowbit.pack.conv_layout import PackedConv
from lowbit.pack.grouped import GroupedBlocks
from lowbit.pack.nhwc64 import CHANNEL_BLOCK, Nhwc64, padded_channels

PIXELS = 128
WARPS = 4
STAGES = 3


@triton.jit
def codes_of(t, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Returns t rounded to integers LOW..HIGH, as int32."""
    return (tl.minimum(tl.maximum(t, LOW), HIGH) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "total", "channels"])
def grouped_kernel(
    y, x, weight, s, b, height, width, out_height, out_width, total, channels, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    SPAN: tl.constexpr, BLOCKS: tl.constexpr, OUT_BLOCKS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, X_FOUR: tl.constexpr, Y_FOUR: tl.constexpr, VALUES: tl.constexpr,
    RELU: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Computes PIXELS of `total` pixels for 64 outputs. INPUTS, OUTPUTS: channels of a group. BLOCKS, OUT_BLOCKS: blocks of 64
    channels of a pixel of x and y. VALUES: True if y has values [N, Ho, Wo, channels], not codes."""
    BYTES: tl.constexpr = 32 if X_FOUR else 64
    LOW: tl.constexpr = 0.0 if RELU else -128.0
    block = tl.program_id(0) % OUT_BLOCKS
    i = (tl.program_id(0) // OUT_BLOCKS) * PIXELS + tl.arange(0, PIXELS)
    image = (i // (out_height * out_width)).to(tl.int64) * height
    row = (i // out_width % out_height) * SH - PH
    column = (i % out_width) * SW - PW
    first = block * 64 // OUTPUTS * INPUTS // 64
    k = tl.arange(0, BYTES)
    n = tl.arange(0, 64)
    weights = weight + block * (KH * KW * SPAN * 4096) + n[None, :] * 64 + k[:, None]
    total_sum = tl.zeros([PIXELS, 64], tl.int32)
    for step in range(KH * KW * SPAN):
        tap = step // SPAN
        h = row + tap // KW
        w = column + tap % KW
        source = first + step % SPAN + tl.zeros_like(i)
        inside = (i < total) & (h >= 0) & (h < height) & (w >= 0) & (w < width) & (source < BLOCKS)
        pixel = x + (((image + h) * width + w) * BLOCKS + source) * BYTES
        codes = tl.load(pixel[:, None] + k[None, :], mask=inside[:, None], other=0)
        taps = tl.load(weights + step * 4096)
        if X_FOUR:
            odd = tl.load(weights + step * 4096 + 32)
            total_sum = tl.dot((codes & 15).to(tl.int8), taps, total_sum, out_dtype=tl.int32)
            total_sum = tl.dot(((codes >> 4) & 15).to(tl.int8), odd, total_sum, out_dtype=tl.int32)
        else:
            total_sum = tl.dot(codes, taps, total_sum, out_dtype=tl.int32)
    output = block * 64 + n
    scale = tl.load(s + output)[None, :]
    shift = tl.load(b + output)[None, :]
    t = tl.fma(total_sum.to(tl.float32), scale + tl.zeros([PIXELS, 64], tl.float32), shift + tl.zeros([PIXELS, 64], tl.float32))
    at = i.to(tl.int64)[:, None]
    if VALUES:
        t = tl.maximum(t, 0.0) if RELU else t
        kept = (i < total)[:, None] & (output < channels)[None, :]
        tl.store(y + at * channels + output[None, :], t.to(y.dtype.element_ty), mask=kept)
    elif Y_FOUR:
        low, high = tl.split((codes_of(t, 0.0, 255.0) >> 4).reshape(PIXELS, 32, 2))
        byte = tl.arange(0, 32)[None, :]
        tl.store(y + at * (OUT_BLOCKS * 32) + block * 32 + byte, (low | (high << 4)).to(tl.int8), mask=(i < total)[:, None])
    else:
        codes = codes_of(t, LOW, 127.0).to(tl.int8)
        tl.store(y + at * (OUT_BLOCKS * 64) + output[None, :], codes, mask=(i < total)[:, None])


class PreparedGrouped(ConvPlan):
    """A grouped convolution, prepared for the kernel on one GPU; `layout` is the order of its weights."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, layout: GroupedBlocks) -> None:
        super().__init__(spec, packed)
        self.layout = layout
        self.launch = PlainLauncher(grouped_kernel, num_warps=WARPS, num_stages=STAGES)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Returns y of packed x [N, H, W, bytes]; it adds nothing, so `residual` and `second` are None."""
        y, spec, layout = self.output(x, out), self.spec, self.layout
        total = y.shape[0] * y.shape[1] * y.shape[2]
        blocks = x.shape[3] // Nhwc64(spec.x).pixel_bytes(CHANNEL_BLOCK)
        across = padded_channels(spec.outputs) // CHANNEL_BLOCK
        self.launch(
            triton.cdiv(total, PIXELS) * across,
            y if spec.y in FLOATS else y.view(torch.int8), x.view(torch.int8), self.packed.weight, self.packed.s, self.packed.b,
            x.shape[1], x.shape[2], y.shape[1], y.shape[2], total, spec.outputs, layout.inputs_of_group,
            layout.outputs_of_group, layout.span, blocks, across, *spec.kernel, *spec.stride, *spec.padding, spec.x == "u4",
            spec.y == "u4", spec.y in FLOATS, spec.relu, PIXELS,
        )  # fmt: skip
        return y
