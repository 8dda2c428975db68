"""3 x 3 and 5 x 5 convolutions of 64 channels that keep their size, pixels copied once a tile, weights once a block: sm_90a.

Computes what sm90/conv.py does (stride 1, padding half the window). Its copies bring each tap of each pixel, 9 times the input
        for 3 x 3, in rows of 32 or 64 bytes, more than the copy engine moves in the time of the products. Here a tile's pixels
        are one run of memory with width + 1 more on either side, and a tap is read at another row of it
Reads   x by TMA in strips (parts/strip_ring.py), as operand A by ldmatrix; w in the pieces of pack/conv_weight.py, all of them
        in shared memory for as long as the block runs
Roles   none, Grid, Exact: as sm90/conv.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import ACTIVATIONS, CODES, ConvLayer
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
from lowbit.kernels.parts.stages import StageBarriers, hold
from lowbit.kernels.parts.strip_ring import StripRing
from lowbit.kernels.sm90.conv import UNIT, UNIT_WORDS, WgmmaConv, await_inputs, map_arrived, operand_a
from lowbit.kernels.sm90.conv_plan import ConvTile, PreparedConv, choose_tile
from lowbit.kernels.sm90.conv_store import keep_constants, load_residual, store_codes, tile_constants
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_weight import pack_conv_weight, pack_lane_constants, unit_channels
from lowbit.pack.nhwc64 import Nhwc64, padded_channels

MOST_ROWS = 256
"""Rows of a strip: what one copy brings."""

STRIPS = 2
"""Strips of a block: one is read, one is filled."""


@dataclass(frozen=True)
class StripConv(WgmmaConv):
    """All that is fixed when the kernel is compiled: as WgmmaConv, whose step is a tap, and the rows of a strip, the window."""

    rows: int = 0
    kernel: int = 3

    @property
    def taps(self) -> int:
        """Taps of the window, each a stage that stays."""
        return self.kernel * self.kernel

    @property
    def x_bytes(self) -> int:
        """Bytes of a strip."""
        return self.rows * self.step_bytes

    @property
    def w_unit(self) -> int:
        """Where the weights start in shared memory, in units."""
        return STRIPS * self.x_bytes // UNIT

    @property
    def strip(self) -> StripRing:
        """Copies and reads."""
        tail = UNIT * self.barrier_unit
        strips = StageBarriers(tail, STRIPS, self.warps)
        weights = StageBarriers(tail + 16 * STRIPS, 1, self.warps)
        return StripRing(
            strips, weights, tail + 16 * (STRIPS + 1), 0, UNIT * self.w_unit, self.rows, self.step_bytes,
            self.taps * self.w_bytes, CODES[self.x].bits,
        )  # fmt: skip

    @property
    def hold(self) -> str:
        """Keeps the registers of a row of taps."""
        return hold(self.kernel * self.strip.registers)

    @property
    def keeps_constants(self) -> bool:
        """As WgmmaConv's; registers of a residual take their room."""
        return self.residual is None and self.outputs == 64

    @property
    def operands(self) -> tuple[gl.dtype, ...]:
        """Types of the registers of a tap."""
        return (gl.int32,) * self.strip.registers


@gluon.jit
def multiply_tap(acc, adds, w_ring, tap, registers, C: gl.constexpr):
    """Starts the products of one tap, whose x is in `registers`; w of each tap is a piece of `w_ring`, or two planes of it."""
    COUNT: gl.constexpr = C.strip.loaded
    if C.planes == 1:
        return warpgroup_mma(
            operand_a(registers, COUNT, C), w_ring.index(tap).permute([1, 0]), acc, use_acc=adds, is_async=True
        )  # fmt: skip
    else:
        even = operand_a(registers[0:COUNT], COUNT, C)
        odd = operand_a(registers[COUNT:], COUNT, C)
        acc = warpgroup_mma(even, w_ring.index(2 * tap).permute([1, 0]), acc, use_acc=adds, is_async=True)
        return warpgroup_mma(odd, w_ring.index(2 * tap + 1).permute([1, 0]), acc, is_async=True)


@gluon.jit
def copy_strip(maps, exists, strip, parity, first_row, thread, C: gl.constexpr):
    """Starts the copy of a strip."""
    nought = thread * 0
    run(
        C.strip.copy_strip, "=r,r,r,r,l,r,r",
        [((thread == 0) & exists).to(gl.int32), nought + strip, nought + parity, maps + nought, nought + first_row, nought],
    )  # fmt: skip


@gluon.jit
def multiply_strip(acc, w_ring, strip, place, C: gl.constexpr):
    """The sums of one tile, a row of taps at a time: one tap is read while the one before it is multiplied.

    `place` is where this thread's row lies in its image.
    """
    row, column, height, width, own_row, thread = place
    nought = thread * 0
    KERNEL: gl.constexpr = C.kernel
    HALF: gl.constexpr = KERNEL // 2
    HELD: gl.constexpr = KERNEL * C.strip.registers
    for down in range(KERNEL):
        h = row + (down - HALF)
        held = ()
        for beside in gl.static_range(KERNEL):
            w = column + (beside - HALF)
            inside = ((h >= 0) & (h < height) & (w >= 0) & (w < width)).to(gl.int32)
            registers = gl.inline_asm_elementwise(
                C.strip.read, C.strip.read_constraints, [nought + strip, own_row + (down * width + beside), inside, thread],
                dtype=C.operands, is_pure=False, pack=1,
            )  # fmt: skip
            acc = multiply_tap(acc, down + beside > 0, w_ring, down * KERNEL + beside, registers, C)
            held = held + registers
        acc = warpgroup_mma_wait(0, deps=[acc])
        run(C.hold, "=r" + ",r" * (HELD + 1), held + (nought + strip,))
    return acc


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
    SUMS: gl.constexpr = C.accumulator
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
    W_BYTES: gl.constexpr = C.strip.w_bytes
    pieces = weight + (thread * 0 + across).to(gl.int64) * W_BYTES
    run(C.strip.copy_weights, "=r,r,l", [((thread == 0) & (own > 0)).to(gl.int32), pieces])  # made long before
    await_inputs(C)
    map_arrived(maps, C)
    reach = C.kernel // 2 * (width + 1)
    copy_strip(maps, own > 0, zero, zero + 1, first_tile * PIXELS - reach, thread, C)
    strip = zero
    strip_phase = zero
    run(C.strip.weights.wait, "=r,r,r,r", [thread * 0, thread * 0, (own > 0).to(gl.int32) + thread * 0])
    acc = gl.zeros((PIXELS, OUTPUTS), gl.int32, SUMS)
    own_row = (thread >> 5) * 16 + (thread & 15)
    kept = keep_constants(s, b, across, C)
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
        acc = multiply_strip(acc, w_ring, strip, place, C)
        run(C.strip.strips.give, "=r,r,r", [thread * 0 + strip, ((thread & 31) == 0).to(gl.int32)])
        strip_phase = gl.where(strip == 1, strip_phase ^ 1, strip_phase)
        strip = strip ^ 1
        scale, offset = tile_constants(kept, s, b, across, C)
        store_codes(y, codes, acc, scale, offset, g, first_pixel, across * C.units, pixels, row_units, C)


def strip_rows(pixels: int, width: int, kernel: int, step_bytes: int) -> int:
    """Rows of a strip: the pixels of a tile and what its windows reach over; a block of rows is a multiple of 1 KiB."""
    rows, unit = pixels + kernel // 2 * 2 * (width + 1), 1024 // step_bytes
    return -(-rows // unit) * unit


def strip_tile(layer: ConvLayer, width: int, shared_bytes: int) -> ConvTile | None:
    """A tile for a layer of images this wide, if it has 64 channels in and out, keeps its size and fits; else None.

    Layers of whole 128 channels are those of sm90/conv_deep.py, which has strips of its own.
    """
    half = (layer.kernel[0] // 2, layer.kernel[1] // 2)
    channels = (padded_channels(layer.weight.shape[1]), padded_channels(layer.weight.shape[0]))
    if layer.kernel not in ((3, 3), (5, 5)) or layer.stride != (1, 1) or layer.padding != half or layer.second is not None:
        return None
    if channels != (64, 64) or layer.y not in ACTIVATIONS:
        return None
    taps, step_bytes = layer.kernel[0] * layer.kernel[1], Nhwc64(layer.x).pixel_bytes(64)
    rows = strip_rows(128, width, layer.kernel[0], step_bytes)
    block_bytes = STRIPS * rows * step_bytes + taps * 64 * 64 + 2 * UNIT
    if rows > MOST_ROWS or 2 * block_bytes > shared_bytes:
        return None
    return ConvTile(2, 64, step_bytes, taps, 2)


class PreparedStrip:
    """A layer that keeps its size, as the kernel reads it, on one GPU. Images too wide for strips take the other kernel."""

    def __init__(self, layer: ConvLayer, tile: ConvTile, sm_count: int) -> None:
        self.layer, self.tile, self.sm_count = layer, tile, sm_count
        self.outputs = layer.weight.shape[0]
        self.weight = pack_conv_weight(layer.weight, layer.x, layer.y, tile.outputs, tile.step_bytes)
        self.s = pack_lane_constants(layer.s, layer.y, tile.outputs)
        self.b = pack_lane_constants(layer.b, layer.y, tile.outputs)
        self.map = functools.lru_cache(maxsize=64)(self._map)
        self.kernels: dict[StripConv, CompiledKernel] = {}
        self.wide: PreparedConv | None = None

    def config(self, width: int) -> StripConv:
        """What is compiled for images of this width."""
        layer, tile, kernel = self.layer, self.tile, self.layer.kernel[0]
        return StripConv(
            layer.x, layer.y, layer.residual, layer.relu, tile.warpgroups, tile.outputs, tile.step_bytes, tile.stages,
            rows=strip_rows(64 * tile.warpgroups, width, kernel, tile.step_bytes), kernel=kernel,
        )  # fmt: skip

    def _map(self, rows: int, pixel_bytes: int, box: int, address: int, device: torch.device) -> Tensor:
        return row_map(rows, pixel_bytes, box, self.tile.step_bytes, address, device)

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the output: packed codes [N, H, W, bytes]."""
        return size[0], size[1], size[2], Nhwc64(self.layer.y).pixel_bytes(self.outputs)

    def __call__(self, x: Tensor, residual: Tensor | None = None, second: None = None, out: Tensor | None = None) -> Tensor:
        """y of packed x [N, H, W, bytes]; `residual` as the layer has it; `out` is written if given."""
        n, height, width, pixel_bytes = x.shape
        config, layer, tile = self.config(width), self.layer, self.tile
        if config.rows > MOST_ROWS:
            self.wide = self.wide or PreparedConv(layer, choose_tile(layer, n * height * width), self.sm_count)
            return self.wide(x, residual, None, out)
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
