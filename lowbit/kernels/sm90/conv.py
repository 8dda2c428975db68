"""y = requantize(convolution(x, w) + ..) on packed NHWC activations of 4 or 8 bits, wgmma and TMA: sm_90a.

Computes rows of pixels x columns of output channels, K over taps and input channels: implicit GEMM, int8 wgmma
Reads   x by TMA in im2col mode (zeros outside the image); operand A is unpacked to registers (u4) or read from shared memory
        (s8); w in the tiles of pack/conv_weight.py by bulk copies; residual codes from global memory
Roles   none: 4 warps for each 64 pixels copy ahead, unpack, multiply and store; two or more blocks share an SM
Ring    `stages` of x and w (parts/window_ring.py), which continues from tile to tile
Grid    persistent; neighbouring blocks have the same pixels and neighbouring outputs
Exact   sums in int32; requantized as in formats/conv.py, bit for bit
Source  wgmma fragments: PTX ISA; measurements: docs/log
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.conv import ConvSpec
from lowbit.kernels.choose.conv import ConvTile, resident_tiles
from lowbit.kernels.parts.conv_epilogue import (
    as_float,
    constants,
    keep_constants,
    load_residual,
    store_codes,
    store_values,
    tile_constants,
)
from lowbit.kernels.parts.conv_inputs import Product, map_arrived
from lowbit.kernels.parts.conv_operand import operand_a
from lowbit.kernels.parts.conv_plan import ConvLauncher, TiledConvPlan, most_registers
from lowbit.kernels.parts.conv_tile import UNIT_WORDS, WgmmaConv
from lowbit.kernels.parts.gluon import (
    Scalar,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    part,
    ptx,
    run,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.prologue import launch_next_and_wait_for_previous
from lowbit.kernels.sm90.tensor_map import NO_OPERAND, WindowOperand
from lowbit.pack.conv_layout import PackedConv
from lowbit.pack.stem import StemImages


@aggregate
class CopyCursor:
    """Coordinates of the next k block to be copied: ring stage and parity, product, block of channels, tap, weight tile. Also
    the index of its tile among this thread block's tiles, and the output position of the tile's first pixel."""

    slot: Scalar
    parity: Scalar
    product: Scalar
    block: Scalar
    across: Scalar
    down: Scalar
    w_tile: Scalar
    tile: Scalar
    column: Scalar
    row: Scalar
    image: Scalar


@aggregate
class TileWalk:
    """A block's path over the output: output size, number of output tiles, number of this block's pixel tiles, and the distance
    between consecutive ones."""

    out_height: Scalar
    out_width: Scalar
    tiles_across: Scalar
    own: Scalar
    column_step: Scalar
    row_step: Scalar
    image_step: Scalar


@gluon.jit
def copy_block(at, exists, first, second, walk, C: gl.constexpr):
    """Starts the copies of the k block `at` and returns the next k block. All threads compute the coordinates, one issues the
    copies.

    Positions are those of output pixels. From one tile of this block to the next they advance by a constant, with carries.
    """
    slot = at.slot
    parity = at.parity
    product = at.product
    block = at.block
    across = at.across
    down = at.down
    w_tile = at.w_tile
    tile = at.tile
    column = at.column
    row = at.row
    image = at.image
    maps = first.maps
    weight = first.weight
    blocks = first.blocks
    taps_across = first.taps_across
    taps_down = first.taps_down
    stride_down = first.stride_down
    stride_across = first.stride_across
    first_down = first.first_down
    first_across = first.first_across
    W_TILE_BYTES: gl.constexpr = C.outputs * C.step_bytes
    w_bytes = C.planes * W_TILE_BYTES
    if C.second is not None:
        maps = gl.where(product == 0, maps, second.maps)
        weight = gl.where(product == 0, weight, second.weight)
        blocks = gl.where(product == 0, blocks, second.blocks)
        taps_across = gl.where(product == 0, taps_across, second.taps_across)
        taps_down = gl.where(product == 0, taps_down, second.taps_down)
        stride_down = gl.where(product == 0, stride_down, second.stride_down)
        stride_across = gl.where(product == 0, stride_across, second.stride_across)
        first_down = gl.where(product == 0, first_down, second.first_down)
        first_across = gl.where(product == 0, first_across, second.first_across)
        w_bytes = gl.where(product == 0, w_bytes, C.second_planes * W_TILE_BYTES)
    thread = gl.arange(0, C.threads, C.threads_layout)
    nought = thread * 0
    gl.inline_asm_elementwise(
        C.ring.copy, "=r,r,r,r,l,r,r,r,r,r,r,l,r",
        [
            ((thread == 0) & exists).to(gl.int32), nought + slot, nought + parity, maps + nought, nought + block * C.step_bytes,
            nought + (column * stride_across + first_across), nought + (row * stride_down + first_down), nought + image,
            nought + across, nought + down, weight + (nought + w_tile).to(gl.int64) * w_bytes, nought + w_bytes,
        ],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    slot = gl.where(slot + 1 == C.stages, 0, slot + 1)
    parity = gl.where(slot == 0, parity ^ 1, parity)
    w_tile += 1
    block += 1
    across = gl.where(block == blocks, across + 1, across)
    block = gl.where(block == blocks, 0, block)
    down = gl.where(across == taps_across, down + 1, down)
    across = gl.where(across == taps_across, 0, across)
    if down == taps_down:
        down = 0
        if C.second is not None:
            product = product ^ 1
        if product == 0:
            tile += 1
            column += walk.column_step
            row += walk.row_step
            image += walk.image_step
            row = gl.where(column >= walk.out_width, row + 1, row)
            column = gl.where(column >= walk.out_width, column - walk.out_width, column)
            image = gl.where(row >= walk.out_height, image + 1, image)
            row = gl.where(row >= walk.out_height, row - walk.out_height, row)
            w_tile = first_w_tile(first, walk.tiles_across)
        else:
            w_tile = first_w_tile(second, walk.tiles_across)
    return CopyCursor(slot, parity, product, block, across, down, w_tile, tile, column, row, image)


@gluon.jit
def first_w_tile(product, tiles_across):
    """Returns the address of the weights of this block's outputs; a block has a single tile of outputs."""
    return gl.program_id(0) % tiles_across * (product.blocks * product.taps_across * product.taps_down)


@gluon.jit
def multiply(acc, adds, x_ring, w_ring, stage, w_tile, PLANES: gl.constexpr, C: gl.constexpr):
    """Starts the products of a stage, which are added to the sums or replace them. Returns the sums and the registers that
    `release_stage` must fence."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    COUNT: gl.constexpr = C.ring.registers
    if PLANES == 1:
        acc = warpgroup_mma(x_ring.index(stage), w_ring.index(w_tile).permute([1, 0]), acc, use_acc=adds, is_async=True)
        return acc, ()
    else:
        fenced = gl.inline_asm_elementwise(
            C.ring.decode, C.ring.decode_constraints, [thread * 0 + stage, thread],
            dtype=C.decoded, is_pure=False, pack=1,
        )  # fmt: skip
        even = operand_a(fenced[0:COUNT], COUNT, C)
        odd = operand_a(fenced[COUNT:], COUNT, C)
        acc = warpgroup_mma(even, w_ring.index(w_tile).permute([1, 0]), acc, use_acc=adds, is_async=True)
        acc = warpgroup_mma(odd, w_ring.index(w_tile + 1).permute([1, 0]), acc, is_async=True)
        return acc, fenced


@gluon.jit
def release_stage(fenced, stage, PLANES: gl.constexpr, C: gl.constexpr):
    """Fences the registers of a stage whose products are complete, and releases the stage."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    if PLANES == 2:
        run(C.register_fence, "=r" + ",r" * (2 * C.ring.registers + 1), fenced + (thread * 0 + stage,))
    run(C.barriers.give, "=r,r,r", [thread * 0 + stage, ((thread & 31) == 0).to(gl.int32)])


@gluon.jit
def product(acc, at, stage, phase, first_w_tile, steps, rings, two, walk, PLANES: gl.constexpr, C: gl.constexpr):
    """Computes the sums of one product over its k blocks, while the ring is refilled.

    A k block is unpacked after the products of the previous k block; meanwhile other warpgroups of the SM multiply.
    """
    x_ring, w_ring = rings
    thread = gl.arange(0, C.threads, C.threads_layout)
    STAGES: gl.constexpr = C.stages
    for step in range(steps):
        run(C.barriers.wait, "=r,r,r,r", [thread * 0 + stage, thread * 0 + phase, thread * 0 + 1])
        w_tile = first_w_tile + step * PLANES if C.resident else C.most_planes * stage
        acc, fenced = multiply(acc, step > 0, x_ring, w_ring, stage, w_tile, PLANES, C)
        at = copy_block(at, at.tile < walk.own, two[0], two[1], walk, C)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release_stage(fenced, stage, PLANES, C)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    return acc, at, stage, phase


@gluon.jit
def copy_resident(weight, weight2, across, steps, steps2, C: gl.constexpr):
    """Starts the copies of resident weights, which do not depend on the previous kernel."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    size = steps * (C.planes * C.w_tile_bytes)
    size2 = steps2 * (C.second_planes * C.w_tile_bytes)
    at = weight + across.to(gl.int64) * size
    at2 = at
    if C.second is not None:
        at2 = weight2 + across.to(gl.int64) * size2
    run(
        ptx(C.ring.copy_weights, C.weights.start), "=r,r,l,r,l,r",
        [(thread == 0).to(gl.int32), at + thread * 0, thread * 0 + size, at2 + thread * 0, thread * 0 + size2],
    )  # fmt: skip


@gluon.jit
def make_barriers(C: gl.constexpr):
    """Initialises the barriers of the ring and of resident weights."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.barriers.init, "=r,r", [thread])
    if C.resident:
        run(C.weights.init, "=r,r", [thread])
    fence_async_shared()
    barrier()


@gluon.jit
def fill_ring(first_tile, two, walk, C: gl.constexpr):
    """Starts the first copies of a block and returns the k block after them."""
    zero = walk.own * 0
    pixel = first_tile * C.pixels
    line = pixel // walk.out_width
    at = CopyCursor(
        zero, zero + 1, zero, zero, zero, zero, first_w_tile(two[0], walk.tiles_across), zero, pixel % walk.out_width,
        line % walk.out_height, line // walk.out_height,
    )  # fmt: skip
    for _filled in range(C.stages - 1):
        at = copy_block(at, at.tile < walk.own, two[0], two[1], walk, C)
    return at


@gluon.jit(do_not_specialize=[
    "pixels", "channels", "row_units", "out_height", "out_width", "tiles_across", "tiles_down", "column_step", "row_step",
    "image_step", "steps", "blocks", "taps_across", "taps_down", "stride_down", "stride_across", "first_down", "first_across",
    "steps2", "blocks2", "taps_across2", "taps_down2", "stride_down2", "stride_across2", "first_down2", "first_across2",
])  # fmt: skip
def wgmma_conv(
    y, residual, s, b, g, s2, pixels, channels, row_units, out_height, out_width, tiles_across, tiles_down, column_step,
    row_step, image_step,
    maps, weight, steps, blocks, taps_across, taps_down, stride_down, stride_across, first_down, first_across,
    maps2, weight2, steps2, blocks2, taps_across2, taps_down2, stride_down2, stride_across2, first_down2, first_across2,
    C: gl.constexpr,
):  # fmt: skip
    """The kernel: one block computes several tiles of pixels, all for the same outputs, with copies ahead of the products."""
    PIXELS: gl.constexpr = C.pixels
    OUTPUTS: gl.constexpr = C.outputs
    SUMS: gl.constexpr = C.accumulator
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    x_ring = part(shared, 0, C.w_unit, gl.int8, [C.stages, C.pixels, C.step_bytes], C.operand_tile)
    w_ring = part(
        shared, C.w_unit, C.barrier_unit, gl.int8, [C.w_tiles, C.outputs, C.step_bytes], C.operand_tile
    )  # fmt: skip
    rings = (x_ring, w_ring)
    make_barriers(C)
    across = gl.program_id(0) % tiles_across
    if C.resident:
        copy_resident(weight, weight2, across, steps, steps2, C)
    launch_next_and_wait_for_previous()
    map_arrived(maps, C)
    first_tile = gl.program_id(0) // tiles_across
    stride = gl.num_programs(0) // tiles_across
    own = (tiles_down - first_tile + stride - 1) // stride  # number of tiles of this block
    walk = TileWalk(out_height, out_width, tiles_across, own, column_step, row_step, image_step)
    one = Product(maps, weight, blocks, taps_across, taps_down, stride_down, stride_across, first_down, first_across)
    two = (one, one)
    if C.second is not None:
        map_arrived(maps2, C)
        other = Product(
            maps2, weight2, blocks2, taps_across2, taps_down2, stride_down2, stride_across2, first_down2, first_across2
        )  # fmt: skip
        two = (one, other)
    at = fill_ring(first_tile, two, walk, C)
    stage = own * 0
    phase = stage
    acc = gl.zeros((PIXELS, OUTPUTS), gl.int32, SUMS)
    if C.resident:
        thread = gl.arange(0, C.threads, C.threads_layout)
        run(C.weights.wait, "=r,r,r,r", [thread * 0, thread * 0, thread * 0 + 1])
    kept = keep_constants(s, b, across, C)
    later = stage
    if C.residual is not None:  # codes of a tile are loaded while the previous one is multiplied
        later = load_residual(residual, first_tile * PIXELS, across * C.units, pixels, row_units, C)
    for tile in range(first_tile, tiles_down, stride):
        codes = ()
        if C.residual is not None:
            codes = later
            later = load_residual(residual, (tile + stride) * PIXELS, across * C.units, pixels, row_units, C)
        acc, at, stage, phase = product(acc, at, stage, phase, 0, steps, rings, two, walk, C.planes, C)
        if C.second is not None:
            sums = as_float(acc, constants(s, across, C), constants(b, across, C), C)
            acc, at, stage, phase = product(
                acc, at, stage, phase, steps * C.planes, steps2, rings, two, walk, C.second_planes, C
            )  # fmt: skip
            store_codes(
                y, codes, acc, constants(s2, across, C), sums, g, tile * PIXELS, across * C.units, pixels, row_units, C
            )  # fmt: skip
        else:
            scale, offset = tile_constants(kept, s, b, across, C)
            if C.stores_codes:
                store_codes(y, codes, acc, scale, offset, g, tile * PIXELS, across * C.units, pixels, row_units, C)
            else:
                store_values(y, acc, scale, offset, tile * PIXELS, across * OUTPUTS, pixels, channels, C)


class PreparedConv(TiledConvPlan):
    """A layer prepared for the kernel, on one GPU, with a tile. With `images` the layer is a stem, whose input they pack."""

    def __init__(
        self, spec: ConvSpec, packed: PackedConv, tile: ConvTile, sm_count: int, images: StemImages | None = None
    ) -> None:
        super().__init__(spec, packed, tile, sm_count, images)
        first = spec if images is None else images.product(spec)
        self.first = WindowOperand(first, packed.weight, tile.pixels, tile.step_bytes, images)
        self.second: WindowOperand | None = None
        products = (first, *spec.products[1:])
        if spec.second is not None and packed.weight2 is not None:
            self.second = WindowOperand(spec.second, packed.weight2, tile.pixels, tile.step_bytes)
        self.config = WgmmaConv(
            spec.x, spec.y, spec.residual, spec.relu, tile.warpgroups, tile.outputs, tile.step_bytes, tile.stages,
            None if spec.second is None else spec.second.x, resident_tiles(products, tile),
        )  # fmt: skip
        registers = most_registers(tile.blocks, self.config.threads)
        self.launch = ConvLauncher(wgmma_conv, maxnreg=registers, launch_pdl=True)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        out, spec, packed = self.output(x, out), self.spec, self.packed
        n, height, width, _ = out.shape
        down, stride = self.rows_of_tiles(n * height * width)
        line, column_step = divmod(stride * self.tile.pixels, width)
        image_step, row_step = divmod(line, height)
        self.launch(
            0, (stride * self.across, 1, 1), self.config.warps,
            out.view(torch.int32) if self.config.stores_codes else out,
            None if residual is None else residual.view(torch.int32), packed.s, packed.b, packed.g, packed.s2,
            n * height * width, spec.outputs, self.units, height, width, self.across, down, column_step, row_step, image_step,
            *self.first.arguments(x),
            *(NO_OPERAND if self.second is None or second is None else self.second.arguments(second)), self.config,
        )  # fmt: skip
        return out
