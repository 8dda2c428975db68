"""max_pool(requantize(convolution(images, w))), a network's first convolution and its 3 x 3 pool of stride 2 at once: sm_90a.

Computes 28 pooled pixels of a row x 64 channels a tile, going down the image: K over the rows of the window, 64 bytes each; two
        int8 wgmma tiles are the upper and the lower row of the convolution, with rows of registers in common
Reads   image rows once, as they lie, by TMA (parts/stem_rows.py); w in the pieces of pack/conv_weight.py, which stay in
        shared memory
Pool    of the sums, since requantizing keeps their order (s >= 0); a warp has 8 pooled pixels, of which the first only gives
        its odd column to the next; the lower row's maxima are kept for the tile below
Exact   as sm90/conv.py and kernels/pool.py one after the other, bit for bit
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.kernels.conv_reference import ConvLayer, output_size
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
from lowbit.kernels.parts.stem_rows import POOL_LANES, STEP_REGISTERS, StemRows
from lowbit.kernels.sm90.conv import UNIT, UNIT_WORDS, WgmmaConv, await_inputs, map_arrived, operand_a
from lowbit.kernels.sm90.conv_store import constants, requantized
from lowbit.kernels.sm90.tensor_map import image_map
from lowbit.pack.conv_weight import pack_conv_weight, pack_lane_constants, unit_channels
from lowbit.pack.nhwc64 import Nhwc64, padded_channels
from lowbit.pack.stem import PIXEL_BYTES, WINDOW_PIXELS, StemImages

WARP_PIXELS = 7
"""Pooled pixels of a warp, beside the one it computes for its neighbor's sake."""

TILE_PIXELS = 4 * WARP_PIXELS
STRIP_PIXELS = 2 * (TILE_PIXELS + 1) + WINDOW_PIXELS - 1
"""Packed pixels of a row of a strip."""

BLOCKS = 3
"""Blocks that share an SM."""

LEAST = gl.constexpr(-(2**31))


@dataclass(frozen=True)
class StemPool(WgmmaConv):
    """All that is fixed when the kernel is compiled: as WgmmaConv, whose stages are strips; `window` rows of a window."""

    window: int = 4

    warp_pixels: int = WARP_PIXELS
    tile_pixels: int = TILE_PIXELS
    row_registers: int = STEP_REGISTERS
    pool: str = POOL_LANES

    @property
    def tile_words(self) -> int:
        """Words of 8 bytes of a packed row from tile to tile."""
        return 2 * self.tile_pixels * PIXEL_BYTES // 8

    @property
    def halo_words(self) -> int:
        """Words of 8 bytes by which a strip begins before its tile."""
        return 2 * PIXEL_BYTES // 8

    @property
    def strip_bytes(self) -> int:
        return -(-(self.window + 1) * STRIP_PIXELS * PIXEL_BYTES // UNIT) * UNIT

    @property
    def w_unit(self) -> int:
        """Where the weights start in shared memory, in units."""
        return self.stages * self.strip_bytes // UNIT

    @property
    def barrier_unit(self) -> int:
        return self.w_unit + self.window * self.piece_bytes // UNIT

    @property
    def rows(self) -> StemRows:
        """Copies and reads."""
        tail = UNIT * self.barrier_unit
        return StemRows(
            StageBarriers(tail, self.stages, self.warps), StageBarriers(tail + 16 * self.stages, 1, self.warps),
            UNIT * self.w_unit, self.window * self.piece_bytes, self.strip_bytes, self.window + 1, STRIP_PIXELS * PIXEL_BYTES,
            2 * WARP_PIXELS,
        )  # fmt: skip

    @property
    def hold(self) -> str:
        """Keeps the registers of a strip."""
        return hold(self.rows.registers)

    @property
    def operands(self) -> tuple[gl.dtype, ...]:
        """Types of the registers of a strip."""
        return (gl.int32,) * self.rows.registers

    @property
    def pooled(self) -> PooledTile:
        """The tile of pooled pixels."""
        return PooledTile(self.x, self.y, None, self.relu, 1, self.outputs, self.step_bytes, self.stages)


@dataclass(frozen=True)
class PooledTile(WgmmaConv):
    """[4 warps * 8 lane groups, outputs]: what is left of a tile of sums after pooling, for `requantized`."""

    @property
    def pixels(self) -> int:
        return 32

    def words_layout(self, words: int) -> gl.DistributedLinearLayout:
        """[pixels, units, 4 lanes, words]."""
        register = [[0, 0, 0, 1 << i] for i in range(words.bit_length() - 1)]
        register += [[0, 1 << i, 0, 0] for i in range(self.units.bit_length() - 1)]
        lane = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
        return gl.DistributedLinearLayout(register, lane, [[8, 0, 0, 0], [16, 0, 0, 0]], [], [32, self.units, 4, words])


@gluon.jit
def sums_of_rows(upper, lower, w_ring, strip, thread, C: gl.constexpr):
    """Sums [64, outputs] of the upper and of the lower row of the convolution, which share all but one row of the strip."""
    WINDOW: gl.constexpr = C.window
    COUNT: gl.constexpr = C.row_registers
    HELD: gl.constexpr = C.rows.registers
    held = gl.inline_asm_elementwise(
        C.rows.read, C.rows.read_constraints, [thread * 0 + strip, thread], dtype=C.operands, is_pure=False, pack=1
    )  # fmt: skip
    run(C.rows.strips.give, "=r,r,r", [thread * 0 + strip, ((thread & 31) == 0).to(gl.int32)])
    for row in gl.static_range(WINDOW):
        w = w_ring.index(row).permute([1, 0])
        over = operand_a(held[COUNT * row : COUNT * row + COUNT], COUNT, C)
        under = operand_a(held[COUNT * row + COUNT : COUNT * row + 2 * COUNT], COUNT, C)
        upper = warpgroup_mma(over, w, upper, use_acc=row > 0, is_async=True)
        lower = warpgroup_mma(under, w, lower, use_acc=row > 0, is_async=True)
    upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    run(C.hold, "=r" + ",r" * (HELD + 1), held + (thread * 0 + strip,))
    return upper, lower


@gluon.jit
def columns_apart(sums, C: gl.constexpr):
    """[64, outputs] -> even and odd columns of the convolution, [32 pooled pixels, outputs] each."""
    parts = gl.permute(gl.reshape(sums, [4, 2, 8, C.outputs]), [0, 2, 3, 1])
    even, odd = gl.split(parts)
    return gl.reshape(even, [32, C.outputs]), gl.reshape(odd, [32, C.outputs])


@gluon.jit
def pool(upper, lower, above, lower_exists, column, width, C: gl.constexpr):
    """Largest sums of the windows of 3 x 3, and of their lower rows; `column` is the even column of each pooled pixel."""
    LIKE: gl.constexpr = above.type.layout
    even0, odd0 = columns_apart(upper, C)
    even1, odd1 = columns_apart(lower, C)
    odd_exists = (column + 1 >= 0) & (column + 1 < width)
    limit = gl.where(odd_exists, -1 - LEAST, LEAST)[:, None].broadcast_to([32, C.outputs])
    lower_limit = gl.full([32, C.outputs], -1 - LEAST, gl.int32, LIKE)
    if lower_exists == 0:
        lower_limit = gl.full([32, C.outputs], LEAST, gl.int32, LIKE)
    turned = (gl.arange(0, 32, gl.SliceLayout(1, LIKE)) % 8 >= 4).to(gl.int32)[:, None].broadcast_to([32, C.outputs])
    return gl.inline_asm_elementwise(
        C.pool, "=&r,=&r" + ",r" * 8, [even0, odd0, even1, odd1, above, lower_limit, limit, turned],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def copy_strip(at, maps, beside, pooled_height, before, thread, C: gl.constexpr):
    """Starts the copy of the strip `at` and returns the next one."""
    slot, parity, row, image, left = at
    nought = thread * 0
    run(
        C.rows.copy, "=r,r,r,r,l,r,r,r",
        [
            ((thread == 0) & (left > 0)).to(gl.int32), nought + slot, nought + parity, maps + nought,
            nought + (beside * C.tile_words - C.halo_words), nought + (2 * row - before), nought + image,
        ],
    )  # fmt: skip
    slot = gl.where(slot + 1 == C.stages, 0, slot + 1)
    parity = gl.where(slot == 0, parity ^ 1, parity)
    row = gl.where(row + 1 == pooled_height, 0, row + 1)
    image = gl.where(row == 0, image + 1, image)
    return slot, parity, row, image, left - 1


@gluon.jit
def store_pooled(y, sums, s, b, tile, first_column, exists, width, across, row_units, C: gl.constexpr):
    """Requantizes the largest sums of a tile and stores those of the pooled pixels that are this warp's own."""
    P: gl.constexpr = C.pooled
    WORDS: gl.constexpr = P.out_words
    COLUMNS: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    L: gl.constexpr = P.words_layout(WORDS)
    scale = gl.convert_layout(constants(s, across, C), COLUMNS, assert_trivial=True)
    offset = gl.convert_layout(constants(b, across, C), COLUMNS, assert_trivial=True)
    words = requantized((), sums, scale, offset, 0.0, P)
    place = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    unit = gl.arange(0, P.units, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    column = first_column + pooled_column(place, C)
    at = y + (((tile * width + column) * row_units + across * P.units + unit) * 4 + lane) * WORDS + word
    gl.store(at, words, mask=exists & (place % 8 > 0) & (column < width))


@gluon.jit
def pooled_column(place, C: gl.constexpr):
    """Columns of the 32 pooled pixels of a tile; each warp's first one is its neighbor's last one."""
    return place // 8 * C.warp_pixels + place % 8 - 1


@gluon.jit(do_not_specialize=[
    "row_units", "pooled_height", "pooled_width", "height", "width", "before", "tiles", "tiles_beside", "tiles_across"
])  # fmt: skip
def stem_pool(
    y, s, b, row_units, pooled_height, pooled_width, height, width, before, tiles, tiles_beside, tiles_across, maps, weight,
    C: gl.constexpr,
):  # fmt: skip
    """The kernel: a block goes down its pooled rows, all with the same columns and outputs, strips under way."""
    OUTPUTS: gl.constexpr = C.outputs
    STAGES: gl.constexpr = C.stages
    SUMS: gl.constexpr = C.accumulator
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    w_ring = part(shared, C.w_unit, C.barrier_unit, gl.int8, [C.window, C.outputs, C.step_bytes], C.operand_tile)
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.rows.strips.init, "=r,r", [thread])
    run(C.rows.weights.init, "=r,r", [thread])
    fence_async_shared()
    barrier()
    across = gl.program_id(0) % tiles_across
    beside = gl.program_id(0) // tiles_across % tiles_beside
    chunk = gl.program_id(0) // tiles_across // tiles_beside
    chunks = gl.num_programs(0) // tiles_across // tiles_beside
    size = (tiles + chunks - 1) // chunks
    first = chunk * size
    end = gl.minimum(first + size, tiles)
    row = first % pooled_height
    start = gl.where(row > 0, first - 1, first)  # the tile above gives the lowest row of sums that this one needs
    row = gl.where(row > 0, row - 1, row)
    W_BYTES: gl.constexpr = C.rows.w_bytes
    pieces = weight + across.to(gl.int64) * W_BYTES + thread * 0
    run(C.rows.copy_weights, "=r,r,l", [((thread == 0) & (first < end)).to(gl.int32), pieces])
    await_inputs(C)
    map_arrived(maps, C)
    zero = row * 0
    at = (zero, zero + 1, row, first // pooled_height, gl.where(first < end, end - start, 0))
    for _filled in range(STAGES - 1):
        at = copy_strip(at, maps, beside, pooled_height, before, thread, C)
    if first < end:
        run(C.rows.weights.wait, "=r,r,r,r", [thread * 0, thread * 0, thread * 0 + 1])
    upper = gl.zeros((64, OUTPUTS), gl.int32, SUMS)
    lower = gl.zeros((64, OUTPUTS), gl.int32, SUMS)
    nothing, _same = columns_apart(upper, C)
    LIKE: gl.constexpr = nothing.type.layout
    above = gl.full([32, OUTPUTS], LEAST, gl.int32, LIKE)
    first_column = beside * C.tile_pixels
    columns = 2 * (first_column + pooled_column(gl.arange(0, 32, gl.SliceLayout(1, LIKE)), C))
    slot = zero
    phase = zero
    for tile in range(start, end):
        run(C.rows.strips.wait, "=r,r,r,r", [thread * 0 + slot, thread * 0 + phase, thread * 0 + 1])
        at = copy_strip(at, maps, beside, pooled_height, before, thread, C)
        upper, lower = sums_of_rows(upper, lower, w_ring, slot, thread, C)
        if row == 0:
            above = gl.full([32, OUTPUTS], LEAST, gl.int32, LIKE)
        largest, above = pool(upper, lower, above, 2 * row + 1 < height, columns, width, C)
        store_pooled(y, largest, s, b, tile, first_column, tile >= first, pooled_width, across, row_units, C)
        row = gl.where(row + 1 == pooled_height, 0, row + 1)
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
        phase = gl.where(slot == 0, phase ^ 1, phase)


class PreparedStemPool:
    """A stem with a max-pool of 3 x 3, stride 2 and padding 1 behind it, as the kernel reads it, on one GPU."""

    def __init__(self, layer: ConvLayer, images: StemImages, sm_count: int) -> None:
        self.layer, self.images, self.sm_count = layer, images, sm_count
        self.outputs = layer.weight.shape[0]
        step = PIXEL_BYTES * WINDOW_PIXELS
        self.weight = pack_conv_weight(images.pack_weight(layer.weight), "s8", layer.y, 64, step)
        self.s, self.b = (pack_lane_constants(values, layer.y, 64) for values in (layer.s, layer.b))
        self.config = StemPool("s8", layer.y, None, layer.relu, 1, 64, step, 4, window=images.window[0])
        self.map = functools.lru_cache(maxsize=64)(self._map)
        self.kernel: CompiledKernel | None = None

    def _map(self, n: int, address: int, device: torch.device) -> Tensor:
        rows, row_bytes = self.images.rows, self.images.columns * PIXEL_BYTES
        return image_map((n, rows, row_bytes), (self.config.window + 1, STRIP_PIXELS * PIXEL_BYTES), address, device)

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the output: packed codes [N, Hp, Wp, bytes]."""
        height, width = output_size(self.images.output, (3, 3), (2, 2), (1, 1))
        return size[0], height, width, Nhwc64(self.layer.y).pixel_bytes(self.outputs)  # type: ignore[arg-type]

    def __call__(self, x: Tensor, residual: None = None, second: None = None, out: Tensor | None = None) -> Tensor:
        """Pooled y of packed images [N, rows, columns, 16]; `out` is written if given."""
        n, height, width, _ = shape = self.output_shape(tuple(x.shape))
        if out is None:
            out = torch.empty(shape, dtype=torch.uint8, device=x.device)
        across, beside, down = padded_channels(self.outputs) // 64, -(-width // TILE_PIXELS), n * height
        arguments = (
            out.view(torch.int32), self.s, self.b, padded_channels(self.outputs) // unit_channels(self.layer.y, 64),
            height, width, *self.images.output, self.images.before[0], down, beside, across,
            self.map(n, x.data_ptr(), x.device), self.weight, self.config,
        )  # fmt: skip
        chunks = max(1, min(down, self.sm_count * BLOCKS // (across * beside)))
        grid = (chunks * across * beside, 1, 1)
        if self.kernel is None:
            registers = min(65536 // (BLOCKS * self.config.threads) // 8 * 8, 255)
            self.kernel = stem_pool[grid](*arguments, num_warps=self.config.warps, maxnreg=registers, launch_pdl=True)
        else:
            self.kernel[grid](*arguments)
        return out
