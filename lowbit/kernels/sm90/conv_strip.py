"""3 x 3 and 5 x 5 same-size convolutions of 64 channels. Pixels are copied once per tile, weights once per block: sm_90a.

Computes the same as sm90/conv.py (stride 1, padding half the window). In sm90/conv.py TMA copies each tap of each pixel, 9
        times the input for 3 x 3, in rows of 32 or 64 bytes: more than it can copy in the time of the products. Here TMA copies
        the tile's pixels once, as one contiguous strip with the neighbours that the windows need (for 3 x 3: width + 1 pixels
        on either side). Each tap is read from the strip at another row offset
Reads   x by TMA in strips (parts/strip_ring.py), as operand A by ldmatrix; w in the tiles of pack/conv_weight.py, all of them
        in shared memory for the block's lifetime
Roles   none. Grid and exactness as in sm90/conv.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import CODES, ConvSpec
from lowbit.kernels.choose.conv import MOST_ROWS, STRIPS, UNIT, ConvTile, strip_rows
from lowbit.kernels.parts.conv_epilogue import keep_constants, load_residual, store_codes, tile_constants
from lowbit.kernels.parts.conv_inputs import map_arrived
from lowbit.kernels.parts.conv_operand import multiply_tap
from lowbit.kernels.parts.conv_plan import ConvLauncher, TiledConvPlan, most_registers
from lowbit.kernels.parts.conv_tile import UNIT_WORDS, WgmmaConv
from lowbit.kernels.parts.gluon import barrier, fence_async_shared, gl, gluon, part, run, warpgroup_mma_wait
from lowbit.kernels.parts.operand import register_fence
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.prologue import launch_next_and_wait_for_previous
from lowbit.kernels.parts.strip_ring import StripRing
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_layout import PackedConv


@dataclass(frozen=True)
class StripConv(WgmmaConv):
    """Configuration like WgmmaConv, with the rows of a strip and the window; a k block is a tap."""

    rows: int = 0
    kernel: int = 3

    @property
    def taps(self) -> int:
        return self.kernel * self.kernel

    @property
    def x_bytes(self) -> int:
        return self.rows * self.step_bytes

    @property
    def w_unit(self) -> int:
        """Start of the weights in shared memory, in units of UNIT bytes."""
        return STRIPS * self.x_bytes // UNIT

    @property
    def strip(self) -> StripRing:
        tail = UNIT * self.barrier_unit
        strips = StageBarriers(tail, STRIPS, self.warps)
        weights = StageBarriers(tail + 16 * STRIPS, 1, self.warps)
        return StripRing(
            strips, weights, tail + 16 * (STRIPS + 1), 0, UNIT * self.w_unit, self.rows, self.step_bytes,
            self.taps * self.w_bytes, CODES[self.x].bits,
        )  # fmt: skip

    @property
    def register_fence(self) -> str:
        return register_fence(self.kernel * self.strip.registers)

    @property
    def keeps_constants(self) -> bool:
        """As in WgmmaConv, but False with a residual, for lack of registers."""
        return self.residual is None and self.outputs == 64

    @property
    def operands(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.strip.registers


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
    """Computes the sums of one tile, one row of taps at a time. A tap is read while the previous one is multiplied.

    `place` is the position of this thread's row of operand A in its image.
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
        run(C.register_fence, "=r" + ",r" * (HELD + 1), held + (nought + strip,))
    return acc


@gluon.jit
def strip_barriers(thread, C: gl.constexpr):
    """Initialises the barriers and the zeros."""
    run(C.strip.weights.init, "=r,r", [thread])
    run(C.strip.strips.init, "=r,r", [thread])
    run(C.strip.clear, "=r,r", [thread])
    fence_async_shared()
    barrier()


@gluon.jit(do_not_specialize=["pixels", "row_units", "height", "width", "tiles_across", "tiles_down"])
def strip_conv(
    y, residual, s, b, g, pixels, row_units, height, width, tiles_across, tiles_down, maps, weight, C: gl.constexpr
):  # fmt: skip
    """The kernel: one block computes several tiles of pixels, all for the same outputs; the next strip is copied while one is
    multiplied."""
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
    w_tiles = weight + (thread * 0 + across).to(gl.int64) * W_BYTES
    run(C.strip.copy_weights, "=r,r,l", [((thread == 0) & (own > 0)).to(gl.int32), w_tiles])  # packed before any launch
    launch_next_and_wait_for_previous()
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


class PreparedStrip(TiledConvPlan):
    """A same-size layer prepared for the kernel, on one GPU, with a tile of 64 outputs."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, tile: ConvTile, sm_count: int) -> None:
        super().__init__(spec, packed, tile, sm_count)
        self.map = functools.lru_cache(maxsize=None)(row_map)
        self.config = functools.lru_cache(maxsize=None)(self._config)
        registers = most_registers(tile.blocks, 128 * tile.warpgroups)
        self.launch = ConvLauncher(strip_conv, maxnreg=registers, launch_pdl=True)

    def _config(self, width: int) -> StripConv:
        """The configuration for images of this width. Raises ValueError if they are too wide for strips."""
        spec, tile, kernel = self.spec, self.tile, self.spec.kernel[0]
        rows = strip_rows(tile.pixels, width, kernel, tile.step_bytes)
        if rows > MOST_ROWS:
            raise ValueError(f"a strip of images {width} pixels wide has {rows} pixels, at most {MOST_ROWS} are copied at once")
        return StripConv(
            spec.x, spec.y, spec.residual, spec.relu, tile.warpgroups, tile.outputs, tile.step_bytes, tile.stages, rows=rows,
            kernel=kernel,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        n, height, width, pixel_bytes = x.shape
        out, config, packed = self.output(x, out), self.config(width), self.packed
        down, stride = self.rows_of_tiles(n * height * width)
        self.launch(
            width, (stride * self.across, 1, 1), config.warps,
            out.view(torch.int32), None if residual is None else residual.view(torch.int32), packed.s, packed.b, packed.g,
            n * height * width, self.units, height, width, self.across, down,
            self.map(n * height * width, pixel_bytes, config.rows, config.step_bytes, x.data_ptr(), x.device), packed.weight,
            config,
        )  # fmt: skip
        return out
