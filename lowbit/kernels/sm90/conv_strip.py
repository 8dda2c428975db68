"""The convolutions that keep their size (stride 1, padding half the window) with every pixel copied once a tile: sm_90a.

Computes what sm90/conv.py does; its copies bring each tap of each pixel, 9 times the input for 3 x 3, and more rows than the
        copy engine moves in the time of the products. Here a tile's pixels are one run of memory, with width + 1 more on
        either side, and a tap is read at another row of it
Reads   x by TMA in strips (parts/strip_ring.py), as operand A by ldmatrix; w in the pieces of pack/conv_weight.py, kept for
        all tiles of a block where all steps fit its ring, streamed otherwise
Roles   none, Grid, Exact: as sm90/conv.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.kernels.conv_reference import ConvLayer
from lowbit.kernels.gluon import (
    CompiledKernel,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    part,
    run,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.stages import StageBarriers
from lowbit.kernels.parts.strip_ring import StripRing
from lowbit.kernels.sm90.conv import (
    UNIT,
    UNIT_WORDS,
    WgmmaConv,
    load_residual,
    map_arrived,
    operand_a,
    store_codes,
)
from lowbit.kernels.sm90.conv_plan import ConvTile
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_weight import pack_constants, pack_conv_weight, unit_channels
from lowbit.pack.nhwc64 import CODE_BITS, Nhwc64, padded_channels

MOST_ROWS = 256
"""Rows of a strip: what one copy brings."""

STRIPS = 2
"""Strips of a block: one is read, one is filled."""


@dataclass(frozen=True)
class StripConv(WgmmaConv):
    """All that is fixed when the kernel is compiled: as WgmmaConv, and the strip: rows, blocks of channels, window."""

    rows: int = 0
    blocks: int = 1
    kernel: int = 3

    @property
    def steps(self) -> int:
        return self.kernel * self.kernel * self.blocks

    @property
    def resident(self) -> bool:
        """Whether a block loads its weights once."""
        return self.stages >= self.steps

    @property
    def x_bytes(self) -> int:
        return self.rows * self.step_bytes * self.blocks

    @property
    def w_unit(self) -> int:
        return STRIPS * self.x_bytes // UNIT

    @property
    def strip(self) -> StripRing:
        tail = UNIT * self.barrier_unit
        weights = StageBarriers(tail, self.stages, self.warps)
        strips = StageBarriers(tail + 16 * self.stages, STRIPS, self.warps)
        zeros = tail + 16 * (self.stages + STRIPS)
        return StripRing(
            strips, weights, zeros, 0, UNIT * self.w_unit, self.rows, self.blocks, self.step_bytes, self.w_bytes,
            CODE_BITS[self.x],  # type: ignore[index]
        )  # fmt: skip

    @property
    def operands(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.strip.registers


@gluon.jit
def multiply_tap(acc, adds, w_ring, stage, registers, C: gl.constexpr):
    """Starts the products of one tap and block of channels."""
    COUNT: gl.constexpr = C.strip.loaded
    if C.planes == 1:
        return warpgroup_mma(
            operand_a(registers, COUNT, C), w_ring.index(stage).permute([1, 0]), acc, use_acc=adds, is_async=True
        )  # fmt: skip
    else:
        even = operand_a(registers[0:COUNT], COUNT, C)
        odd = operand_a(registers[COUNT:], COUNT, C)
        acc = warpgroup_mma(even, w_ring.index(2 * stage).permute([1, 0]), acc, use_acc=adds, is_async=True)
        return warpgroup_mma(odd, w_ring.index(2 * stage + 1).permute([1, 0]), acc, is_async=True)


@gluon.jit
def copy_weights(copies, exists, weight, thread, C: gl.constexpr):
    """Starts the copy of the next piece of weights; pieces repeat for every tile."""
    slot, parity, piece, first, last = copies
    W_BYTES: gl.constexpr = C.w_bytes
    nought = thread * 0
    run(
        C.strip.copy_weights, "=r,r,r,r,l",
        [
            ((thread == 0) & exists).to(gl.int32), nought + slot, nought + parity,
            weight + (nought + piece).to(gl.int64) * W_BYTES,
        ],
    )  # fmt: skip
    slot = gl.where(slot + 1 == C.stages, 0, slot + 1)
    parity = gl.where(slot == 0, parity ^ 1, parity)
    piece = gl.where(piece + 1 == last, first, piece + 1)
    return slot, parity, piece, first, last


@gluon.jit
def copy_strip(maps, exists, strip, parity, first_row, thread, C: gl.constexpr):
    """Starts the copy of a strip."""
    nought = thread * 0
    run(
        C.strip.copy_strip, "=r,r,r,r,l,r",
        [((thread == 0) & exists).to(gl.int32), nought + strip, nought + parity, maps + nought, nought + first_row],
    )  # fmt: skip


@gluon.jit
def multiply_strip(acc, w_ring, copies, left, stage, phase, strip, place, weight, C: gl.constexpr):
    """The sums of one tile: every tap, every block of channels. `place` is where this thread's row lies in its image."""
    row, column, height, width, own_row, thread = place
    nought = thread * 0
    KERNEL: gl.constexpr = C.kernel
    HALF: gl.constexpr = KERNEL // 2
    TURN: gl.constexpr = C.steps if C.resident else C.stages
    REGISTERS: gl.constexpr = C.strip.registers
    for tap in range(KERNEL * KERNEL):
        down = tap // KERNEL
        beside = tap % KERNEL
        h = row + (down - HALF)
        w = column + (beside - HALF)
        inside = ((h >= 0) & (h < height) & (w >= 0) & (w < width)).to(gl.int32)
        source = own_row + (down * width + beside)
        for block in range(C.blocks):
            run(C.strip.weights.wait, "=r,r,r,r", [nought + stage, nought + phase, nought + 1])
            registers = gl.inline_asm_elementwise(
                C.strip.read, C.strip.read_constraints, [nought + strip, nought + block, source, inside, thread],
                dtype=C.operands, is_pure=False, pack=1,
            )  # fmt: skip
            acc = multiply_tap(acc, tap + block > 0, w_ring, stage, registers, C)
            if not C.resident:
                copies = copy_weights(copies, left > 0, weight, thread, C)
                left -= 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            run(C.strip.hold, "=r" + ",r" * (REGISTERS + 1), registers + (nought + stage,))
            if not C.resident:
                run(C.strip.weights.give, "=r,r,r", [nought + stage, ((thread & 31) == 0).to(gl.int32)])
                phase = gl.where(stage + 1 == TURN, phase ^ 1, phase)
            stage = gl.where(stage + 1 == TURN, 0, stage + 1)
    return acc, copies, left, stage, phase


@gluon.jit
def strip_barriers(thread, C: gl.constexpr):
    """Makes the barriers and the zeros."""
    run(C.strip.weights.init, "=r,r", [thread])
    run(C.strip.strips.init, "=r,r", [thread])
    run(C.strip.clear, "=r,r", [thread])
    fence_async_shared()
    barrier()


@gluon.jit(do_not_specialize=["pixels", "row_units", "height", "width", "tiles_across", "tiles_down"])
def strip_conv(
    y, residual, s, b, g, pixels, row_units, height, width, tiles_across, tiles_down, maps, weight, C: gl.constexpr
):  # fmt: skip
    """The kernel: a block's tiles of pixels, all with the same outputs, the next strip under way while one is multiplied."""
    PIXELS: gl.constexpr = C.pixels
    OUTPUTS: gl.constexpr = C.outputs
    STEPS: gl.constexpr = C.steps
    SUMS: gl.constexpr = C.accumulator
    COLUMNS: gl.constexpr = gl.SliceLayout(0, C.accumulator)
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    w_ring = part(
        shared, C.w_unit, C.barrier_unit, gl.int8, [C.stages * C.most_planes, C.outputs, C.step_bytes], C.operand_tile
    )  # fmt: skip
    thread = gl.arange(0, C.threads, C.threads_layout)
    strip_barriers(thread, C)
    across = gl.program_id(0) % tiles_across
    first_tile = gl.program_id(0) // tiles_across
    stride = gl.num_programs(0) // tiles_across
    own = (tiles_down - first_tile + stride - 1) // stride
    zero = own * 0
    copies = (zero, zero + 1, across * STEPS, across * STEPS, across * STEPS + STEPS)
    AHEAD: gl.constexpr = STEPS if C.resident else C.stages - 1
    for _ahead in range(AHEAD):  # weights do not depend on the kernel before
        copies = copy_weights(copies, own > 0, weight, thread, C)
    left = own * STEPS - AHEAD  # pieces still to be copied, where they are streamed
    run("griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])
    map_arrived(maps, C)
    reach = C.kernel // 2 * (width + 1)
    copy_strip(maps, own > 0, zero, zero + 1, first_tile * PIXELS - reach, thread, C)
    stage = zero
    phase = zero
    strip = zero
    strip_phase = zero
    acc = gl.zeros((PIXELS, OUTPUTS), gl.int32, SUMS)
    columns = across * OUTPUTS + gl.arange(0, OUTPUTS, COLUMNS)
    own_row = (thread >> 5) * 16 + (thread & 15)
    for tile in range(first_tile, tiles_down, stride):
        first_pixel = tile * PIXELS
        run(C.strip.strips.wait, "=r,r,r,r", [thread * 0 + strip, thread * 0 + strip_phase, thread * 0 + 1])
        next_phase = gl.where(strip == 0, strip_phase ^ 1, strip_phase)
        copy_strip(maps, tile + stride < tiles_down, strip ^ 1, next_phase, (tile + stride) * PIXELS - reach, thread, C)
        codes = ()
        if C.residual is not None:
            codes = load_residual(residual, first_pixel, across * C.units, pixels, row_units, C)
        pixel = first_pixel + own_row
        place = (pixel // width % height, pixel % width, height, width, own_row, thread)
        acc, copies, left, stage, phase = multiply_strip(acc, w_ring, copies, left, stage, phase, strip, place, weight, C)
        run(C.strip.strips.give, "=r,r,r", [thread * 0 + strip, ((thread & 31) == 0).to(gl.int32)])
        strip_phase = gl.where(strip == 1, strip_phase ^ 1, strip_phase)
        strip = strip ^ 1
        scale = gl.load(s + columns)
        offset = gl.load(b + columns)
        store_codes(y, codes, acc, scale, offset, g, first_pixel, across * C.units, pixels, row_units, C)


def strip_rows(pixels: int, width: int, kernel: int, step_bytes: int) -> int:
    """Rows of a strip: the pixels of a tile and what its windows reach over; a block of rows is a multiple of 1 KiB."""
    rows, unit = pixels + kernel // 2 * 2 * (width + 1), 1024 // step_bytes
    return -(-rows // unit) * unit


def strip_tile(layer: ConvLayer, width: int, shared_bytes: int) -> ConvTile | None:
    """A tile for a layer that keeps its size and has 64 channels in and out, whose weights fit; else None.

    Layers with more channels were not measured in strips; the other kernel multiplies them at 60 % of the data sheet's rate.
    """
    half = (layer.kernel[0] // 2, layer.kernel[1] // 2)
    channels = padded_channels(layer.weight.shape[1])
    if layer.kernel not in ((3, 3), (5, 5)) or layer.stride != (1, 1) or layer.padding != half or layer.second is not None:
        return None
    if channels != 64 or padded_channels(layer.weight.shape[0]) != 64 or layer.y not in CODE_BITS:
        return None
    step_bytes = Nhwc64(layer.x).pixel_bytes(channels)  # type: ignore[arg-type]
    rows = strip_rows(128, width, layer.kernel[0], step_bytes)
    weights = layer.kernel[0] * layer.kernel[1] * 64 * 64
    if rows > MOST_ROWS or STRIPS * rows * step_bytes + weights + UNIT > shared_bytes // 2:
        return None
    return ConvTile(
        2,
        64,
        step_bytes,
        layer.kernel[0] * layer.kernel[1],
        3 if 3 * (STRIPS * rows * step_bytes + weights + 2 * UNIT) <= shared_bytes else 2,
    )


class PreparedStrip:
    """A layer that keeps its size, as the kernel reads it, on one GPU."""

    def __init__(self, layer: ConvLayer, tile: ConvTile, sm_count: int) -> None:
        self.layer, self.tile, self.sm_count = layer, tile, sm_count
        self.outputs = layer.weight.shape[0]
        self.weight = pack_conv_weight(layer.weight, layer.x, layer.y, tile.outputs, tile.step_bytes)  # type: ignore[arg-type]
        self.s = pack_constants(layer.s, layer.y, tile.outputs)
        self.b = pack_constants(layer.b, layer.y, tile.outputs)
        self.map = functools.lru_cache(maxsize=64)(self._map)
        self.kernels: dict[StripConv, CompiledKernel] = {}

    def config(self, width: int, pixel_bytes: int) -> StripConv:
        """What is compiled for images of this width and packed pixel."""
        layer, tile, kernel = self.layer, self.tile, self.layer.kernel[0]
        rows = strip_rows(64 * tile.warpgroups, width, kernel, tile.step_bytes)
        if rows > MOST_ROWS:
            raise ValueError(f"images {width} pixels wide are too wide for this prepared layer: prepare it for their size")
        return StripConv(
            layer.x, layer.y, layer.residual, layer.relu, tile.warpgroups, tile.outputs, tile.step_bytes, tile.stages,
            rows=rows, blocks=pixel_bytes // tile.step_bytes, kernel=kernel,
        )  # fmt: skip

    def _map(self, rows: int, pixel_bytes: int, box: int, address: int, device: torch.device) -> Tensor:
        return row_map(rows, pixel_bytes, box, self.tile.step_bytes, address, device)

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the output: packed codes [N, H, W, bytes]."""
        return size[0], size[1], size[2], Nhwc64(self.layer.y).pixel_bytes(self.outputs)  # type: ignore[arg-type]

    def __call__(self, x: Tensor, residual: Tensor | None = None, second: None = None, out: Tensor | None = None) -> Tensor:
        """y of packed x [N, H, W, bytes]; `residual` as the layer has it; `out` is written if given."""
        n, height, width, pixel_bytes = x.shape
        config, layer, tile = self.config(width, pixel_bytes), self.layer, self.tile
        if out is None:
            out = torch.empty(self.output_shape(tuple(x.shape)), dtype=torch.uint8, device=x.device)
        pixels = n * height * width
        across, down = padded_channels(self.outputs) // tile.outputs, -(-pixels // config.pixels)
        stride = max(1, min(down, self.sm_count * tile.blocks // across))
        arguments = (
            out.view(torch.int32), None if residual is None else residual.view(torch.int32), self.s, self.b, layer.g, pixels,
            padded_channels(self.outputs) // unit_channels(layer.y, tile.outputs), height, width, across, down,
            self.map(pixels, pixel_bytes, config.rows, x.data_ptr(), x.device), self.weight, config,
        )  # fmt: skip
        grid = (stride * across, 1, 1)
        kernel = self.kernels.get(config)
        if kernel is None:
            registers = min(65536 // (tile.blocks * config.threads) // 8 * 8, 255)
            self.kernels[config] = strip_conv[grid](*arguments, num_warps=config.warps, maxnreg=registers, launch_pdl=True)
        else:
            kernel[grid](*arguments)
        return out
