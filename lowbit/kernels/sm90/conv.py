"""y = requantize(convolution(x, w) + ..) on packed NHWC activations of 4 or 8 bits, wgmma and TMA: sm_90a.

Computes rows of pixels x columns of output channels, K over taps and input channels: implicit GEMM, int8 wgmma
Reads   x by TMA in im2col mode (zeros outside the image), decoded to operand A in registers (u4) or from shared memory (s8);
        w in the pieces of pack/conv_weight.py by bulk copies; residual codes from global memory
Roles   none: 4 warps for each 64 pixels copy ahead, decode, multiply and store; two and more blocks share an SM
Ring    `stages` of x and w (parts/window_ring.py) that runs on from tile to tile
Grid    persistent; neighbouring blocks have the same pixels and neighbouring outputs
Exact   sums in int32; requantized as kernels/conv_reference.py says, bit for bit
Source  wgmma fragments: PTX ISA; what was measured: docs/log.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats.conv import ACTIVATIONS
from lowbit.kernels.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    part,
    ptx,
    run,
    source_digest,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.requantize import Requantize
from lowbit.kernels.parts.stages import StageBarriers, hold
from lowbit.kernels.parts.window_ring import WindowRing
from lowbit.kernels.sm90.conv_store import (
    as_float,
    constants,
    keep_constants,
    load_residual,
    store_codes,
    store_values,
    tile_constants,
)
from lowbit.pack.conv_weight import GROUP, planes, unit_channels

UNIT = 1024
"""Bytes; parts of shared memory start at multiples of it."""

UNIT_WORDS = gl.constexpr(UNIT // 4)


@dataclass(frozen=True)
class WgmmaConv:
    """All that is fixed when the kernel is compiled.

    A tile is 64 * warpgroups pixels x `outputs` channels; a step is `step_bytes` of packed channels of one tap. `second` is
    the storage of the second product's input, or None. `resident` is the number of pieces of weights (one step, one plane) that
    stay in shared memory while a block runs, 0 where they are copied for every tile.
    """

    x: str
    y: str
    residual: str | None
    relu: bool
    warpgroups: int
    outputs: int
    step_bytes: int
    stages: int
    second: str | None = None
    resident: int = 0
    digest: str = source_digest()

    @property
    def pixels(self) -> int:
        return 64 * self.warpgroups

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def planes(self) -> int:
        """Planes of weights of a step of the first product."""
        return planes(self.x)

    @property
    def second_planes(self) -> int:
        return planes(self.second) if self.second else 0

    @property
    def most_planes(self) -> int:
        return max(self.planes, self.second_planes)

    @property
    def x_bytes(self) -> int:
        return self.pixels * self.step_bytes

    @property
    def piece_bytes(self) -> int:
        """Bytes of the weights of a step and plane."""
        return self.outputs * self.step_bytes

    @property
    def w_bytes(self) -> int:
        """Bytes of weights of a stage."""
        return self.most_planes * self.piece_bytes

    @property
    def pieces(self) -> int:
        """Pieces of weights for which there is room."""
        return self.resident or self.stages * self.most_planes

    @property
    def w_unit(self) -> int:
        return self.stages * self.x_bytes // UNIT

    @property
    def barrier_unit(self) -> int:
        return self.w_unit + self.pieces * self.piece_bytes // UNIT

    @property
    def shared_bytes(self) -> int:
        return (self.barrier_unit + 1) * UNIT

    @property
    def barriers(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit, self.stages, self.warps)

    @property
    def ring(self) -> WindowRing:
        return WindowRing(
            self.barriers, 0, UNIT * self.w_unit, self.pixels, self.step_bytes, self.w_bytes, self.resident > 0
        )  # fmt: skip

    @property
    def keeps_constants(self) -> bool:
        """Whether a thread keeps s and b of its outputs in registers; else it loads them for every tile."""
        return self.outputs == 64 and self.second is None

    @property
    def weights(self) -> StageBarriers:
        """The barrier of weights that stay."""
        return StageBarriers(UNIT * self.barrier_unit + 16 * self.stages, 1, self.warps)

    @property
    def requantize(self) -> Requantize:
        return Requantize(self.y, self.residual, self.relu)

    @property
    def hold(self) -> str:
        """Keeps the registers of a stage."""
        return hold(2 * self.ring.registers)

    @property
    def decoded(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (2 * self.ring.registers)

    @property
    def stores_codes(self) -> bool:
        return self.y in ACTIVATIONS

    @property
    def words(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.requantize.words

    @property
    def instruction(self) -> int:
        """Columns of one wgmma; with 256 and int8 Triton 3.6 ends the process."""
        return min(self.outputs, 128)

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, self.instruction, 32])

    @property
    def operand(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.accumulator, 4)

    @property
    def operand_tile(self) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout(swizzle_byte_width=self.step_bytes, element_bitwidth=8, rank=2)

    @property
    def threads_layout(self) -> gl.BlockedLayout:
        """One element per thread."""
        return gl.BlockedLayout([1], [32], [self.warps], [0])

    @property
    def quads_layout(self) -> gl.BlockedLayout:
        """[threads, 4]: four elements per thread."""
        return gl.BlockedLayout([1, 4], [32, 1], [self.warps, 1], [1, 0])

    @property
    def units(self) -> int:
        """Pieces of a tile's outputs that a thread stores with one instruction each."""
        return self.outputs // unit_channels(self.y, self.outputs)

    @property
    def groups(self) -> int:
        """Groups of 8 columns of a thread in a unit."""
        return unit_channels(self.y, self.outputs) // (4 * GROUP)

    def words_layout(self, words: int) -> gl.DistributedLinearLayout:
        """[pixels, units, 4 lanes, words] as the accumulator holds them: `words` neighbours in one register vector."""
        register = [[0, 0, 0, 1 << i] for i in range(words.bit_length() - 1)]
        register += [[8, 0, 0, 0]] + [[0, 1 << i, 0, 0] for i in range(self.units.bit_length() - 1)]
        lane = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
        warp = [[16 << i, 0, 0, 0] for i in range(self.warps.bit_length() - 1)]
        return gl.DistributedLinearLayout(register, lane, warp, [], [self.pixels, self.units, 4, words])

    @property
    def constants_layout(self) -> gl.DistributedLinearLayout:
        """[outputs / 16, 4 lanes, 4]: a thread's constants, 4 in one register vector."""
        register = [[0, 0, 1], [0, 0, 2]] + [[1 << i, 0, 0] for i in range((self.outputs // 16).bit_length() - 1)]
        warp = [[0, 0, 0] for _ in range(self.warps.bit_length() - 1)]
        lane = [[0, 1, 0], [0, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
        return gl.DistributedLinearLayout(register, lane, warp, [], [self.outputs // 16, 4, 4])

    @property
    def out_words(self) -> int:
        """Words of output of a thread in a unit."""
        return self.groups * self.requantize.words

    @property
    def residual_words(self) -> int:
        return self.groups * self.requantize.residual_words


@gluon.jit
def join_quads(quads, count: gl.constexpr, C: gl.constexpr):
    """`count` tensors [threads, 4] -> [threads, 4 * count], in order."""
    if count == 1:
        return quads[0]
    else:
        low = join_quads(quads[0 : count // 2], count // 2, C)
        high = join_quads(quads[count // 2 :], count // 2, C)
        return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [C.threads, 4 * count])


@gluon.jit
def operand_a(registers, count: gl.constexpr, C: gl.constexpr):
    """Registers of 4 codes each as operand A of wgmma, pixels x 8 * count bytes of K; this takes no instruction."""
    QUADS: gl.constexpr = C.quads_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, QUADS)
    quads = ()
    for i in gl.static_range(count):
        column = gl.expand_dims(gl.convert_layout(registers[i], ROWS, assert_trivial=True), 1)
        all4 = gl.convert_layout(column.broadcast_to([C.threads, 4]), QUADS, assert_trivial=True)
        quad = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [all4], dtype=gl.int8, is_pure=True, pack=4)
        quads = quads + (quad,)
    # [warp, lane group, lane of the group, k step, k half, row half, element] -> pixels, k
    parts = gl.reshape(join_quads(quads, count, C), [C.warps, 8, 4, count // 4, 2, 2, 4])
    matrix = gl.reshape(gl.permute(parts, [0, 5, 1, 3, 4, 2, 6]), [C.pixels, 8 * count])
    return gl.convert_layout(matrix, C.operand, assert_trivial=True)


@gluon.jit
def copy_step(at, exists, first, second, shape, C: gl.constexpr):
    """Starts the copies of the step `at` and returns the next one: every thread counts along, one issues.

    Places are those of output pixels. From a tile of this block to its next one they move by a constant, with carries.
    """
    slot, parity, product, block, across, down, piece, tile, column, row, image = at
    out_height, out_width, tiles_across = shape[0], shape[1], shape[2]
    column_step, row_step, image_step = shape[4], shape[5], shape[6]
    maps, weight, blocks, taps_across, taps_down, stride_down, stride_across, first_down, first_across = first
    PIECE: gl.constexpr = C.outputs * C.step_bytes
    w_bytes = C.planes * PIECE
    if C.second is not None:
        maps = gl.where(product == 0, maps, second[0])
        weight = gl.where(product == 0, weight, second[1])
        blocks = gl.where(product == 0, blocks, second[2])
        taps_across = gl.where(product == 0, taps_across, second[3])
        taps_down = gl.where(product == 0, taps_down, second[4])
        stride_down = gl.where(product == 0, stride_down, second[5])
        stride_across = gl.where(product == 0, stride_across, second[6])
        first_down = gl.where(product == 0, first_down, second[7])
        first_across = gl.where(product == 0, first_across, second[8])
        w_bytes = gl.where(product == 0, w_bytes, C.second_planes * PIECE)
    thread = gl.arange(0, C.threads, C.threads_layout)
    nought = thread * 0
    gl.inline_asm_elementwise(
        C.ring.copy, "=r,r,r,r,l,r,r,r,r,r,r,l,r",
        [
            ((thread == 0) & exists).to(gl.int32), nought + slot, nought + parity, maps + nought, nought + block * C.step_bytes,
            nought + (column * stride_across + first_across), nought + (row * stride_down + first_down), nought + image,
            nought + across, nought + down, weight + (nought + piece).to(gl.int64) * w_bytes, nought + w_bytes,
        ],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    slot = gl.where(slot + 1 == C.stages, 0, slot + 1)
    parity = gl.where(slot == 0, parity ^ 1, parity)
    piece += 1
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
            column += column_step
            row += row_step
            image += image_step
            row = gl.where(column >= out_width, row + 1, row)
            column = gl.where(column >= out_width, column - out_width, column)
            image = gl.where(row >= out_height, image + 1, image)
            row = gl.where(row >= out_height, row - out_height, row)
            piece = first_piece(first, tiles_across)
        else:
            piece = first_piece(second, tiles_across)
    return slot, parity, product, block, across, down, piece, tile, column, row, image


@gluon.jit
def first_piece(product, tiles_across):
    """Where the weights of this block's outputs begin; a block keeps to one tile of outputs."""
    return gl.program_id(0) % tiles_across * (product[2] * product[3] * product[4])


@gluon.jit
def multiply(acc, adds, x_ring, w_ring, stage, piece, PLANES: gl.constexpr, C: gl.constexpr):
    """Starts the products of a stage, which add to the sums or replace them; returns them and the registers to be held."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    COUNT: gl.constexpr = C.ring.registers
    if PLANES == 1:
        acc = warpgroup_mma(x_ring.index(stage), w_ring.index(piece).permute([1, 0]), acc, use_acc=adds, is_async=True)
        return acc, ()
    else:
        held = gl.inline_asm_elementwise(
            C.ring.decode, C.ring.decode_constraints, [thread * 0 + stage, thread],
            dtype=C.decoded, is_pure=False, pack=1,
        )  # fmt: skip
        even = operand_a(held[0:COUNT], COUNT, C)
        odd = operand_a(held[COUNT:], COUNT, C)
        acc = warpgroup_mma(even, w_ring.index(piece).permute([1, 0]), acc, use_acc=adds, is_async=True)
        acc = warpgroup_mma(odd, w_ring.index(piece + 1).permute([1, 0]), acc, is_async=True)
        return acc, held


@gluon.jit
def finish(held, stage, PLANES: gl.constexpr, C: gl.constexpr):
    """Of a stage whose products are done: its registers may be written again, and it may be filled again."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    if PLANES == 2:
        run(C.hold, "=r" + ",r" * (2 * C.ring.registers + 1), held + (thread * 0 + stage,))
    run(C.barriers.give, "=r,r,r", [thread * 0 + stage, ((thread & 31) == 0).to(gl.int32)])


@gluon.jit
def map_arrived(maps, C: gl.constexpr):
    """Makes a descriptor in memory known to the copy engine, whatever lay at its address before."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(
        "fence.proxy.tensormap::generic.acquire.gpu [$1], 128;\n mov.b32 $0, 0;", "=r,l", [maps + thread * 0],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def product(acc, at, stage, phase, first_piece, steps, rings, two, shape, PLANES: gl.constexpr, C: gl.constexpr):
    """The sums of one product over its steps, while the ring is kept full.

    A step is decoded after the products of the one before: other warpgroups of the SM multiply meanwhile.
    """
    x_ring, w_ring = rings
    thread = gl.arange(0, C.threads, C.threads_layout)
    STAGES: gl.constexpr = C.stages
    for step in range(steps):
        run(C.barriers.wait, "=r,r,r,r", [thread * 0 + stage, thread * 0 + phase, thread * 0 + 1])
        piece = first_piece + step * PLANES if C.resident else C.most_planes * stage
        acc, held = multiply(acc, step > 0, x_ring, w_ring, stage, piece, PLANES, C)
        at = copy_step(at, at[7] < shape[3], two[0], two[1], shape, C)
        acc = warpgroup_mma_wait(0, deps=[acc])
        finish(held, stage, PLANES, C)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    return acc, at, stage, phase


@gluon.jit
def copy_resident(weight, weight2, across, steps, steps2, C: gl.constexpr):
    """Starts the copies of weights that stay; they do not depend on the kernel before."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    size = steps * (C.planes * C.piece_bytes)
    size2 = steps2 * (C.second_planes * C.piece_bytes)
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
    """Barriers of the ring and of weights that stay."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.barriers.init, "=r,r", [thread])
    if C.resident:
        run(C.weights.init, "=r,r", [thread])
    fence_async_shared()
    barrier()


@gluon.jit
def await_inputs(C: gl.constexpr):
    """The kernel after this one may start now; this one waits until the one before, which made x, is through."""
    run("griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def fill_ring(first_tile, own, two, shape, C: gl.constexpr):
    """Starts the first copies of a block and returns the step after them."""
    out_height, out_width, tiles_across = shape[0], shape[1], shape[2]
    zero = own * 0
    pixel = first_tile * C.pixels
    line = pixel // out_width
    at = (
        zero, zero + 1, zero, zero, zero, zero, first_piece(two[0], tiles_across), zero, pixel % out_width,
        line % out_height, line // out_height,
    )  # fmt: skip
    for _filled in range(C.stages - 1):
        at = copy_step(at, at[7] < own, two[0], two[1], shape, C)
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
    """The kernel: a block's tiles of pixels, all with the same outputs, the ring running ahead of the products."""
    PIXELS: gl.constexpr = C.pixels
    OUTPUTS: gl.constexpr = C.outputs
    SUMS: gl.constexpr = C.accumulator
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    x_ring = part(shared, 0, C.w_unit, gl.int8, [C.stages, C.pixels, C.step_bytes], C.operand_tile)
    w_ring = part(
        shared, C.w_unit, C.barrier_unit, gl.int8, [C.pieces, C.outputs, C.step_bytes], C.operand_tile
    )  # fmt: skip
    rings = (x_ring, w_ring)
    make_barriers(C)
    across = gl.program_id(0) % tiles_across
    if C.resident:
        copy_resident(weight, weight2, across, steps, steps2, C)
    await_inputs(C)
    map_arrived(maps, C)
    first_tile = gl.program_id(0) // tiles_across
    stride = gl.num_programs(0) // tiles_across
    own = (tiles_down - first_tile + stride - 1) // stride  # tiles of this block
    shape = (out_height, out_width, tiles_across, own, column_step, row_step, image_step)
    one = (maps, weight, blocks, taps_across, taps_down, stride_down, stride_across, first_down, first_across)
    two = (one, one)
    if C.second is not None:
        map_arrived(maps2, C)
        two = (one, (
            maps2, weight2, blocks2, taps_across2, taps_down2, stride_down2, stride_across2, first_down2, first_across2,
        ))  # fmt: skip
    at = fill_ring(first_tile, own, two, shape, C)
    stage = own * 0
    phase = stage
    acc = gl.zeros((PIXELS, OUTPUTS), gl.int32, SUMS)
    if C.resident:
        thread = gl.arange(0, C.threads, C.threads_layout)
        run(C.weights.wait, "=r,r,r,r", [thread * 0, thread * 0, thread * 0 + 1])
    kept = keep_constants(s, b, across, C)
    later = stage
    if C.residual is not None:  # codes of a tile are on their way while the one before is multiplied
        later = load_residual(residual, first_tile * PIXELS, across * C.units, pixels, row_units, C)
    for tile in range(first_tile, tiles_down, stride):
        codes = ()
        if C.residual is not None:
            codes = later
            later = load_residual(residual, (tile + stride) * PIXELS, across * C.units, pixels, row_units, C)
        acc, at, stage, phase = product(acc, at, stage, phase, 0, steps, rings, two, shape, C.planes, C)
        if C.second is not None:
            sums = as_float(acc, constants(s, across, C), constants(b, across, C), C)
            acc, at, stage, phase = product(
                acc, at, stage, phase, steps * C.planes, steps2, rings, two, shape, C.second_planes, C
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
