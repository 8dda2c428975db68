"""The first convolution of a network on packed images (pack/stem.py), rows copied once for each row of windows: sm_90a.

Computes one row of output pixels x 64 channels a tile, K over the rows of the window, 64 bytes each: int8 wgmma
Reads   the image rows that a tile touches as they lie, by one TMA copy; windows begin 16 bytes apart, and ldmatrix reads them
        overlapping; w in the pieces of pack/conv_weight.py, all of them in shared memory for as long as the block runs
Roles   none, Grid, Exact: as sm90/conv.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.kernels.conv_reference import ConvLayer
from lowbit.kernels.gluon import CompiledKernel, gl, gluon, part, ptx, run, warpgroup_mma, warpgroup_mma_wait
from lowbit.kernels.parts.strip_ring import StripRing
from lowbit.kernels.sm90.conv import UNIT, UNIT_WORDS, map_arrived, operand_a, store_codes
from lowbit.kernels.sm90.conv_strip import StripConv, copy_strip, strip_barriers
from lowbit.kernels.sm90.tensor_map import MOST_BOX, whole_row_map
from lowbit.pack.conv_weight import pack_constants, pack_conv_weight, unit_channels
from lowbit.pack.nhwc64 import CODE_BITS, Nhwc64, padded_channels
from lowbit.pack.stem import PIXEL_BYTES, WINDOW_PIXELS, StemImages

PIXELS = 128
"""Most pixels of an output row."""


@dataclass(frozen=True)
class ImageRows(StripRing):
    """Strips that are image rows: `rows` rows of `row_bytes` bytes are copied, windows begin 16 bytes apart."""

    room: int = 0

    @property
    def strip_bytes(self) -> int:
        """Bytes from strip to strip."""
        return self.room

    @property
    def copied_bytes(self) -> int:
        """Bytes of the rows of a strip."""
        return self.rows * self.row_bytes

    @property
    def loaded(self) -> int:
        """Registers that a thread loads of a row of its window, 64 bytes."""
        return 8

    @property
    def read(self) -> str:
        """Row $9 of the window of thread $11, in strip $8, as operand A; zeros where $10 is 0."""
        lines = [
            ".reg .pred inside; .reg .b32 at, none, word;",
            "mov.u32 none, global_smem; setp.ne.s32 inside, $10, 0;",
            f"mad.lo.u32 at, $8, {self.room}, none; mad.lo.u32 at, $9, {self.row_bytes}, at; add.u32 none, none, {self.zeros};",
            "shr.u32 word, $11, 5; mad.lo.u32 at, word, 256, at; and.b32 word, $11, 15; mad.lo.u32 at, word, 16, at;",
            f"bfe.u32 word, $11, 4, 1; mad.lo.u32 at, word, 16, at; add.u32 at, at, {self.x_start};",
        ]
        for step in range(2):
            registers = ", ".join(f"${4 * step + i}" for i in range(4))
            lines += [
                f"add.u32 word, at, {32 * step}; selp.b32 word, word, none, inside;",
                f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{registers}}}, [word];",
            ]
        return "{\n" + "\n".join(lines) + "\n}"


@dataclass(frozen=True)
class StemConv(StripConv):
    """All that is fixed when the kernel is compiled: as StripConv; `kernel` rows of a window, `columns` pixels of a row."""

    columns: int = 0

    @property
    def taps(self) -> int:
        """Rows of the window."""
        return self.kernel

    @property
    def x_bytes(self) -> int:
        """Room of a strip: threads beyond the last pixel read behind it."""
        needed = self.kernel * self.columns * PIXEL_BYTES + PIXELS * PIXEL_BYTES
        return -(-needed // UNIT) * UNIT

    @property
    def strip(self) -> ImageRows:
        """Copies and reads."""
        plain = StripConv.strip.fget(self)  # type: ignore[attr-defined]
        return ImageRows(
            plain.strips, plain.weights, plain.zeros, plain.x_start, plain.w_start, self.kernel, self.columns * PIXEL_BYTES,
            plain.w_bytes, 8, self.x_bytes,
        )  # fmt: skip


@gluon.jit
def multiply_windows(acc, w_ring, strip, row, rows, thread, C: gl.constexpr):
    """The sums of one row of windows, whose first row is `row` of the image."""
    nought = thread * 0
    KERNEL: gl.constexpr = C.kernel
    HELD: gl.constexpr = KERNEL * C.strip.registers
    held = ()
    for down in gl.static_range(KERNEL):
        inside = (nought + (row + down) >= 0) & (nought + (row + down) < rows)
        registers = gl.inline_asm_elementwise(
            C.strip.read, C.strip.read_constraints, [nought + strip, nought + down, inside.to(gl.int32), thread],
            dtype=C.operands, is_pure=False, pack=1,
        )  # fmt: skip
        acc = warpgroup_mma(
            operand_a(registers, 8, C), w_ring.index(down).permute([1, 0]), acc, use_acc=down > 0, is_async=True
        )  # fmt: skip
        held = held + registers
    acc = warpgroup_mma_wait(0, deps=[acc])
    run(ptx(C.strip.hold, KERNEL), "=r" + ",r" * (HELD + 1), held + (nought + strip,))
    return acc


@gluon.jit(do_not_specialize=["tiles_down", "tiles_across", "row_units", "rows", "out_height", "out_width", "before"])
def stem_conv(
    y, s, b, tiles_down, tiles_across, row_units, rows, out_height, out_width, before, maps, weight, C: gl.constexpr
):  # fmt: skip
    """The kernel: a block's rows of pixels, all with the same outputs, the next image rows under way."""
    OUTPUTS: gl.constexpr = C.outputs
    SUMS: gl.constexpr = C.accumulator
    COLUMNS: gl.constexpr = gl.SliceLayout(0, C.accumulator)
    ROWS: gl.constexpr = C.pixels
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    w_ring = part(shared, C.w_unit, C.barrier_unit, gl.int8, [C.stages, C.outputs, C.step_bytes], C.operand_tile)
    thread = gl.arange(0, C.threads, C.threads_layout)
    strip_barriers(thread, C)
    across = gl.program_id(0) % tiles_across
    first = gl.program_id(0) // tiles_across
    stride = gl.num_programs(0) // tiles_across
    W_BYTES: gl.constexpr = C.strip.w_bytes
    pieces = weight + (thread * 0 + across).to(gl.int64) * W_BYTES
    run(C.strip.copy_weights, "=r,r,l", [(thread == 0).to(gl.int32), pieces])
    run("griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])
    map_arrived(maps, C)
    strip = first * 0
    phase = first * 0
    top = first // out_height * rows + first % out_height - before
    copy_strip(maps, first < tiles_down, strip, strip + 1, top, thread, C)
    run(C.strip.weights.wait, "=r,r,r,r", [thread * 0, thread * 0, thread * 0 + 1])
    acc = gl.zeros((ROWS, OUTPUTS), gl.int32, SUMS)
    columns = across * OUTPUTS + gl.arange(0, OUTPUTS, COLUMNS)
    for tile in range(first, tiles_down, stride):
        run(C.strip.strips.wait, "=r,r,r,r", [thread * 0 + strip, thread * 0 + phase, thread * 0 + 1])
        after = tile + stride
        top = after // out_height * rows + after % out_height - before
        next_phase = gl.where(strip == 0, phase ^ 1, phase)
        copy_strip(maps, after < tiles_down, strip ^ 1, next_phase, top, thread, C)
        acc = multiply_windows(acc, w_ring, strip, tile % out_height - before, rows, thread, C)
        run(C.strip.strips.give, "=r,r,r", [thread * 0 + strip, ((thread & 31) == 0).to(gl.int32)])
        phase = gl.where(strip == 1, phase ^ 1, phase)
        strip = strip ^ 1
        scale = gl.load(s + columns)
        offset = gl.load(b + columns)
        end = (tile + 1) * out_width
        store_codes(y, (), acc, scale, offset, 0.0, tile * out_width, across * C.units, end, row_units, C)


def stem_refusals(layer: ConvLayer, images: StemImages) -> tuple[str, ...]:
    """Why this kernel cannot run a stem, which the general one then does; empty if it can."""
    reasons = []
    if images.output[1] > PIXELS or images.columns * PIXEL_BYTES > MOST_BOX * 8:
        reasons.append(f"rows of {images.output[1]} pixels are too long")
    if layer.y not in CODE_BITS:
        reasons.append(f"its output is stored as {layer.y}")
    return tuple(reasons)


class PreparedStem:
    """A stem as the kernel reads it, on one GPU."""

    def __init__(self, layer: ConvLayer, images: StemImages, sm_count: int, blocks: int = 2) -> None:
        self.layer, self.images, self.sm_count, self.blocks = layer, images, sm_count, blocks
        self.outputs = layer.weight.shape[0]
        step = PIXEL_BYTES * WINDOW_PIXELS
        self.weight = pack_conv_weight(images.pack_weight(layer.weight), "s8", layer.y, 64, step)
        self.s, self.b = (pack_constants(values, layer.y, 64) for values in (layer.s, layer.b))
        down = images.window[0]
        self.config = StemConv(
            "s8", layer.y, None, layer.relu, 2, 64, step, down, rows=down, kernel=down, columns=images.columns
        )  # fmt: skip
        self.map = functools.lru_cache(maxsize=64)(self._map)
        self.kernel: CompiledKernel | None = None

    def _map(self, rows: int, address: int, device: torch.device) -> Tensor:
        return whole_row_map(rows, self.images.columns * PIXEL_BYTES, self.config.kernel, address, device)

    def __call__(self, x: Tensor, residual: None = None, second: None = None, out: Tensor | None = None) -> Tensor:
        """y of packed images [N, rows, columns, 16]; `out` is written if given."""
        height, width = self.images.output
        if out is None:
            pixel = Nhwc64(self.layer.y).pixel_bytes(self.outputs)  # type: ignore[arg-type]
            out = torch.empty((x.shape[0], height, width, pixel), dtype=torch.uint8, device=x.device)
        across, down = padded_channels(self.outputs) // 64, x.shape[0] * height
        units = padded_channels(self.outputs) // unit_channels(self.layer.y, 64)
        arguments = (
            out.view(torch.int32), self.s, self.b, down, across, units,
            self.images.rows, height, width, self.images.before[0],
            self.map(x.shape[0] * x.shape[1], x.data_ptr(), x.device), self.weight, self.config,
        )  # fmt: skip
        grid = (max(1, min(down, self.sm_count * self.blocks // across)) * across, 1, 1)
        if self.kernel is None:
            registers = min(65536 // (self.blocks * self.config.threads) // 8 * 8, 255)
            self.kernel = stem_conv[grid](*arguments, num_warps=self.config.warps, maxnreg=registers, launch_pdl=True)
        else:
            self.kernel[grid](*arguments)
        return out
