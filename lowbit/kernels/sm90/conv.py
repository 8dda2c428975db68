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

from lowbit.kernels.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    part,
    source_digest,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.requantize import Requantize
from lowbit.kernels.parts.stages import StageBarriers
from lowbit.kernels.parts.window_ring import WindowRing
from lowbit.pack.conv_weight import GROUP, planes, unit_channels
from lowbit.pack.nhwc64 import CODE_BITS

UNIT = 1024
"""Bytes; parts of shared memory start at multiples of it."""

UNIT_WORDS = gl.constexpr(UNIT // 4)


@dataclass(frozen=True)
class WgmmaConv:
    """All that is fixed when the kernel is compiled.

    A tile is 64 * warpgroups pixels x `outputs` channels; a step is `step_bytes` of packed channels of one tap. `second` is
    the storage of the second product's input, or None.
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
        return planes(self.x)  # type: ignore[arg-type]

    @property
    def second_planes(self) -> int:
        return planes(self.second) if self.second else 0  # type: ignore[arg-type]

    @property
    def most_planes(self) -> int:
        return max(self.planes, self.second_planes)

    @property
    def x_bytes(self) -> int:
        return self.pixels * self.step_bytes

    @property
    def w_bytes(self) -> int:
        """Bytes of weights for which a stage has room."""
        return self.most_planes * self.outputs * self.step_bytes

    @property
    def w_unit(self) -> int:
        return self.stages * self.x_bytes // UNIT

    @property
    def barrier_unit(self) -> int:
        return self.w_unit + self.stages * self.w_bytes // UNIT

    @property
    def shared_bytes(self) -> int:
        return (self.barrier_unit + 1) * UNIT

    @property
    def barriers(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit, self.stages, self.warps)

    @property
    def ring(self) -> WindowRing:
        return WindowRing(self.barriers, 0, UNIT * self.w_unit, self.pixels, self.step_bytes, self.w_bytes)

    @property
    def requantize(self) -> Requantize:
        return Requantize(self.y, self.residual, self.relu)

    @property
    def decoded(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * (2 * self.ring.registers)

    @property
    def stores_codes(self) -> bool:
        return self.y in CODE_BITS

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
def multiply(acc, adds, x_ring, w_ring, stage, PLANES: gl.constexpr, C: gl.constexpr):
    """Starts the products of a stage, which add to the sums or replace them; returns them and the registers to be held."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    COUNT: gl.constexpr = C.ring.registers
    MOST: gl.constexpr = C.most_planes
    if PLANES == 1:
        acc = warpgroup_mma(x_ring.index(stage), w_ring.index(MOST * stage).permute([1, 0]), acc, use_acc=adds, is_async=True)
        return acc, ()
    else:
        held = gl.inline_asm_elementwise(
            C.ring.decode, C.ring.decode_constraints, [thread * 0 + stage, thread],
            dtype=C.decoded, is_pure=False, pack=1,
        )  # fmt: skip
        even = operand_a(held[0:COUNT], COUNT, C)
        odd = operand_a(held[COUNT:], COUNT, C)
        acc = warpgroup_mma(even, w_ring.index(2 * stage).permute([1, 0]), acc, use_acc=adds, is_async=True)
        acc = warpgroup_mma(odd, w_ring.index(2 * stage + 1).permute([1, 0]), acc, is_async=True)
        return acc, held


@gluon.jit
def finish(held, stage, PLANES: gl.constexpr, C: gl.constexpr):
    """Of a stage whose products are done: its registers may be written again, and it may be filled again."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    if PLANES == 2:
        gl.inline_asm_elementwise(
            C.ring.hold, "=r" + ",r" * (2 * C.ring.registers + 1), held + (thread * 0 + stage,),
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    gl.inline_asm_elementwise(
        C.barriers.give, "=r,r,r", [thread * 0 + stage, ((thread & 31) == 0).to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def by_groups(tile, C: gl.constexpr):
    """[pixels, outputs] -> [pixels, units, 4 lanes, groups, 2, 2, 2]: a thread's columns, 8 to a group."""
    parts = gl.reshape(tile, [C.pixels, C.units, C.groups, 2, 2, 4, 2])
    return gl.permute(parts, [0, 1, 5, 2, 3, 4, 6])


@gluon.jit
def split_groups(tile, C: gl.constexpr):
    """[pixels, outputs] -> 8 tensors [pixels, units, 4 lanes, groups], the columns of a group in order."""
    even, odd = gl.split(by_groups(tile, C))
    e0, e1 = gl.split(even)
    o0, o1 = gl.split(odd)
    c0, c4 = gl.split(e0)
    c2, c6 = gl.split(e1)
    c1, c5 = gl.split(o0)
    c3, c7 = gl.split(o1)
    return (c0, c1, c2, c3, c4, c5, c6, c7)


@gluon.jit
def codes_at(base, first_pixel, first_unit, pixels, row_units, words: gl.constexpr, C: gl.constexpr):
    """Pointers to, and existence of, the `words` words of each thread, pixel and unit; a row has row_units * 4 * words."""
    L: gl.constexpr = C.words_layout(words)
    PIXEL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    UNITS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    WORDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    pixel = first_pixel + gl.arange(0, C.pixels, PIXEL)[:, None, None, None]
    unit = first_unit + gl.arange(0, C.units, UNITS)[None, :, None, None]
    lane = gl.arange(0, 4, LANES)[None, None, :, None]
    word = gl.arange(0, words, WORDS)[None, None, None, :]
    return base + ((pixel * row_units + unit) * 4 + lane) * words + word, pixel < pixels


@gluon.jit
def per_column(values, C: gl.constexpr):
    """[outputs] -> [pixels, outputs]; what has a value for each pixel already stays as it is."""
    if len(values.shape) == 2:
        return values
    else:
        return gl.expand_dims(values, 0).broadcast_to([C.pixels, C.outputs])


@gluon.jit
def map_arrived(maps, C: gl.constexpr):
    """Makes a descriptor in memory known to the copy engine, whatever lay at its address before."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(
        "fence.proxy.tensormap::generic.acquire.gpu [$1], 128;\n mov.b32 $0, 0;", "=r,l", [maps + thread * 0],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_residual(residual, first_pixel, first_unit, pixels, row_units, C: gl.constexpr):
    """The words of residual codes of a tile, under way while it is multiplied."""
    at, exists = codes_at(residual, first_pixel, first_unit, pixels, row_units, C.residual_words, C)
    return gl.load(at, mask=exists, other=0)


@gluon.jit
def store_codes(y, codes, acc, s, b, g, first_pixel, first_unit, pixels, row_units, C: gl.constexpr):
    """Requantizes the sums of a tile, with the residual `codes` added, and stores them, 16 bytes a thread."""
    R: gl.constexpr = C.requantize
    sums = split_groups(acc, C)
    LIKE: gl.constexpr = sums[0].type.layout
    inputs = sums + split_groups(per_column(s, C), C) + split_groups(per_column(b, C), C)
    if R.residual_words > 0:
        if R.residual_words == 2:
            low, high = gl.split(gl.reshape(codes, [C.pixels, C.units, 4, C.groups, 2]))
            inputs = inputs + (
                gl.convert_layout(low, LIKE, assert_trivial=True), gl.convert_layout(high, LIKE, assert_trivial=True),
            )  # fmt: skip
        else:
            inputs = inputs + (gl.convert_layout(codes, LIKE, assert_trivial=True),)
        inputs = inputs + (gl.full(sums[0].shape, g, gl.float32, LIKE),)
    out = gl.inline_asm_elementwise(R.asm, R.constraints, inputs, dtype=C.words, is_pure=True, pack=1)
    at, exists = codes_at(y, first_pixel, first_unit, pixels, row_units, C.out_words, C)
    if R.words == 2:
        words = gl.reshape(gl.join(out[0], out[1]), [C.pixels, C.units, 4, C.out_words])
    else:
        words = out[0]
    gl.store(at, gl.convert_layout(words, C.words_layout(C.out_words), assert_trivial=True), mask=exists)


@gluon.jit
def as_float(acc, s, b, C: gl.constexpr):
    """fma(float(sum), s[column], b[column])."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f32.s32 $0, $1; fma.rn.f32 $0, $0, $2, $3;", "=&f,r,f,f", [acc, per_column(s, C), per_column(b, C)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def store_values(y, acc, s, b, first_pixel, first_output, pixels, channels, C: gl.constexpr):
    """Values in 16 or 32 bits, plain NHWC without filled-up channels."""
    value = as_float(acc, s, b, C)
    if C.relu:
        value = gl.maximum(value, 0.0)
    pixel = first_pixel + gl.arange(0, C.pixels, gl.SliceLayout(1, C.accumulator))
    output = first_output + gl.arange(0, C.outputs, gl.SliceLayout(0, C.accumulator))
    at = y + pixel.to(gl.int64)[:, None] * channels + output[None, :]
    gl.store(at, value.to(y.dtype.element_ty), mask=(pixel < pixels)[:, None] & (output < channels)[None, :])


@gluon.jit
def product(acc, at, stage, phase, steps, rings, first, second, shape, PLANES: gl.constexpr, C: gl.constexpr):
    """The sums of one product over its steps, while the ring is kept full."""
    x_ring, w_ring = rings
    thread = gl.arange(0, C.threads, C.threads_layout)
    STAGES: gl.constexpr = C.stages
    for step in range(steps):
        gl.inline_asm_elementwise(
            C.barriers.wait, "=r,r,r,r", [thread * 0 + stage, thread * 0 + phase, thread * 0 + 1],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        acc, held = multiply(acc, step > 0, x_ring, w_ring, stage, PLANES, C)
        at = copy_step(at, at[7] < shape[3], first, second, shape, C)
        acc = warpgroup_mma_wait(0, deps=[acc])
        finish(held, stage, PLANES, C)
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    return acc, at, stage, phase


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
    STAGES: gl.constexpr = C.stages
    SUMS: gl.constexpr = C.accumulator
    COLUMNS: gl.constexpr = gl.SliceLayout(0, C.accumulator)
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    x_ring = part(shared, 0, C.w_unit, gl.int8, [C.stages, C.pixels, C.step_bytes], C.operand_tile)
    w_ring = part(
        shared, C.w_unit, C.barrier_unit, gl.int8, [C.stages * C.most_planes, C.outputs, C.step_bytes], C.operand_tile
    )  # fmt: skip
    rings = (x_ring, w_ring)
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(C.barriers.init, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)
    fence_async_shared()
    barrier()
    # The kernel after this one may start now; this one waits until the one before, which made x, is through.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    map_arrived(maps, C)
    across = gl.program_id(0) % tiles_across
    first_tile = gl.program_id(0) // tiles_across
    stride = gl.num_programs(0) // tiles_across
    own = (tiles_down - first_tile + stride - 1) // stride  # tiles of this block
    shape = (out_height, out_width, tiles_across, own, column_step, row_step, image_step)
    one = (maps, weight, blocks, taps_across, taps_down, stride_down, stride_across, first_down, first_across)
    two = one
    if C.second is not None:
        map_arrived(maps2, C)
        two = (maps2, weight2, blocks2, taps_across2, taps_down2, stride_down2, stride_across2, first_down2, first_across2)
    zero = own * 0
    line = first_tile * PIXELS // out_width
    at = (
        zero, zero + 1, zero, zero, zero, zero, first_piece(one, tiles_across), zero, first_tile * PIXELS % out_width,
        line % out_height, line // out_height,
    )  # fmt: skip
    for _filled in range(STAGES - 1):
        at = copy_step(at, at[7] < own, one, two, shape, C)
    stage = zero
    phase = zero
    acc = gl.zeros((PIXELS, OUTPUTS), gl.int32, SUMS)
    columns = across * OUTPUTS + gl.arange(0, OUTPUTS, COLUMNS)
    for tile in range(first_tile, tiles_down, stride):
        first_pixel = tile * PIXELS
        codes = ()
        if C.residual is not None:
            codes = load_residual(residual, first_pixel, across * C.units, pixels, row_units, C)
        acc, at, stage, phase = product(acc, at, stage, phase, steps, rings, one, two, shape, C.planes, C)
        if C.second is not None:
            offset = as_float(acc, gl.load(s + columns), gl.load(b + columns), C)
            acc, at, stage, phase = product(acc, at, stage, phase, steps2, rings, one, two, shape, C.second_planes, C)
            store_codes(y, codes, acc, gl.load(s2 + columns), offset, g, first_pixel, across * C.units, pixels, row_units, C)
        else:
            scale = gl.load(s + columns)
            offset = gl.load(b + columns)
            if C.stores_codes:
                store_codes(y, codes, acc, scale, offset, g, first_pixel, across * C.units, pixels, row_units, C)
            else:
                store_values(y, acc, scale, offset, first_pixel, across * OUTPUTS, pixels, channels, C)
