"""A bottleneck block of 128 or 256 channels from its 3 x 3 convolution to the next block's first, in one kernel, or its last
convolution alone: sm_90a.

Computes x = conv3x3(input), y = conv1x1(x) + residual, z = conv1x1(y), requantized. x is not stored. Or only y, of a given x
Reads   weights in one stream of 16 KB stages (pack/conv_deep_block.py), by bulk copies; constants once; strips of the input by
        TMA (parts/strip_ring.py), 128 channels at a time; pixels of the third convolution without any exchange: K is in the
        order of memory, so a thread needs 16 of every 64 bytes of its two rows. It copies residual codes and a given x to
        shared memory of its own by cp.async, which pass no barrier
Roles   one warp loads weights and strips; 3 warpgroups of 64 pixels multiply, requantize and store. They share weights only
x       128 outputs of the 3 x 3 convolution at a time, over all of its K. A thread's codes are its operand A of y's product
y       128 outputs per iteration, in chunks: one is multiplied while the one before is requantized
z       128 outputs per pass over y, which a thread loads again from where it stored it; y of the next k block is on its way
        while one is multiplied
Values  one register of each thread: every tensor here is [threads] (parts/thread_product.py)
Cluster two blocks read the same weights at the same time. Each copies half of a stage to both (`SharedStages`)
Grid    persistent. Exact: the same bits as the layers one after the other (formats/conv.py)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import U4_STEPS, ConvSpec
from lowbit.kernels.choose.conv import STRIPS, DeepBlockTile, deep_block_tile, third_parts
from lowbit.kernels.parts.conv_plan import ConvLauncher, ConvPlan
from lowbit.kernels.parts.conv_tile import UNIT_WORDS
from lowbit.kernels.parts.gluon import asm, barrier, fence_async_shared, gl, gluon, run, source_digest
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.prologue import launch_next_kernel, wait_for_previous_kernel
from lowbit.kernels.parts.requantize import Requantize
from lowbit.kernels.parts.strip_ring import StripPlaces
from lowbit.kernels.parts.thread_codes import codes_of, columns, store_rows, table
from lowbit.kernels.parts.thread_product import ThreadProduct, fence_registers, load_words, start, thread_words, wait
from lowbit.kernels.parts.tile import Warps
from lowbit.kernels.parts.warp_roles import LOADER_REGISTERS, following, map_arrived, own_thread, own_warpgroup, registers_of
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_deep_block import STAGE_BYTES, STEP, DeepBlockLayout
from lowbit.pack.conv_layout import PackedConv

FIRST_WEIGHTS = gl.constexpr(2)
"""Number of stages of weights that are loaded before the previous kernel has finished. More of them would delay x."""

STAGE_UNITS = gl.constexpr(STAGE_BYTES // 16)
"""Distance of stages in the unit of weight descriptors."""

UPPER = gl.constexpr(-0x0F0F0F10)
"""Mask of the upper half of each byte."""

ZEROS = 512
"""Byte offset of the row of zeros in the unit of shared memory with the barriers."""

VECTOR_BYTES = gl.constexpr(64)
"""Bytes of a row that its four threads copy, load or store at once."""


CLUSTER_SYNC = gl.constexpr("barrier.cluster.arrive;\n barrier.cluster.wait;\n mov.b32 $0, 0;")

BARRIERS_VISIBLE = gl.constexpr("fence.mbarrier_init.release.cluster;\n mov.b32 $0, 0;")


@dataclass(frozen=True)
class SharedStages(StageBarriers):
    """Barriers of stages that both blocks of a cluster fill and read. A stage is full in a block when both halves have arrived
    there; it is empty when the warps of both blocks have read it, since each block writes to both."""

    @property
    def arrivals(self) -> int:
        return 2 * self.readers

    @property
    def give(self) -> str:
        """PTX that arrives at the empty barriers of stage $1 in both blocks: lane $2 of a warp at that of block $2."""
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; mad.lo.u32 at, $1, 8, at; setp.lt.u32 p, $2, 2;\n"
            f"add.u32 at, at, {self.start + 8 * self.stages}; @p mapa.shared::cluster.u32 at, at, $2;\n"
            "@p mbarrier.arrive.shared::cluster.b64 _, [at]; mov.b32 $0, 0; }"
        )

    def fill_half(self, stage_bytes: int) -> str:
        """PTX that waits until stage $2 has been read in both blocks (parity $3), then copies this block's half of the stage,
        whose weights are at address $4, to both; $1 is 1."""
        half = stage_bytes // 2
        copy = f"""{{ .reg .b32 rank; .reg .b64 from; .reg .b16 both; mov.u32 rank, %cluster_ctarank; mov.b16 both, 3;
            mad.wide.u32 from, rank, {half}, $4; mad.lo.u32 to, rank, {half}, to;
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [to], [from], {half}, [bar], both; }}"""
        return self.fill(stage_bytes, stage_bytes, 0, copy)


@dataclass(frozen=True)
class DeepBlockConv(DeepBlockTile, Warps):
    """The kernel's compile-time configuration: a tile and values derived from it."""

    digest: str = source_digest()

    @property
    def warps(self) -> int:
        return 4 * (self.multipliers + 1)

    @property
    def math_threads(self) -> int:
        return 128 * self.multipliers

    @property
    def registers(self) -> int:
        """Number of registers of a math thread."""
        return 128 + (128 - LOADER_REGISTERS.value) // self.multipliers

    @property
    def ring(self) -> StageBarriers:
        kind = SharedStages if self.cluster > 1 else StageBarriers
        return kind(self.barriers_start, self.stages, 4 * self.multipliers)

    @property
    def constant_barrier(self) -> StageBarriers:
        return StageBarriers(self.ring.end, 1, 4 * self.multipliers)

    @property
    def strip(self) -> StripPlaces:
        """Copies and reads of strips."""
        strips = StageBarriers(self.constant_barrier.end, STRIPS, 4 * self.multipliers)
        return StripPlaces(
            strips, self.ring, self.barriers_start + ZEROS, self.strips_start, 0, self.rows, self.row_bytes, 0, self.bits
        )  # fmt: skip

    @property
    def fill(self) -> str:
        """PTX that waits until stage $2 has been read (parity $3), then fills it from address $4; $1 is 1."""
        if isinstance(self.ring, SharedStages):
            return self.ring.fill_half(STAGE_BYTES)
        copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes " + f"[to], [$4], {STAGE_BYTES}, [bar];"
        return self.ring.fill(STAGE_BYTES, STAGE_BYTES, 0, copy)

    @property
    def fill_constants(self) -> str:
        """PTX that copies all constants from address $4, as `fill`."""
        size = 4 * self.constants
        copy = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [$4], {size}, [bar];"
        return self.constant_barrier.fill(size, size, self.constants_start, copy)

    @property
    def third(self) -> ThreadProduct:
        """A chunk of y."""
        return ThreadProduct(self.chunk, STEP, self.bits == 4, 0)

    @property
    def next(self) -> ThreadProduct:
        """128 outputs of z."""
        return ThreadProduct(STEP, STEP, self.bits == 4, 0)

    @property
    def unroll(self) -> int:
        """Number of iterations of y in a loop's body, fewer where x takes more registers. Products in flight do not cross its
        end: ptxas would serialize them."""
        return math.gcd(512 // self.channels, self.expanded // 128 // self.parts)

    @property
    def y_codes(self) -> Requantize:
        return Requantize(self.storage, self.storage, True)

    @property
    def z_codes(self) -> Requantize:
        return Requantize(self.storage, None, True)

    @property
    def lane_place(self) -> str:
        """PTX that returns in $0 the address of the constants for thread $1."""
        return (
            "{ .reg .b32 at; mov.u32 at, global_smem; and.b32 $0, $1, 3; mad.lo.u32 $0, $0, 16, at; "
            f"add.u32 $0, $0, {self.constants_start}; }}"
        )

    @property
    def private_place(self) -> str:
        """PTX that returns in $0 the address of the first 16 bytes of thread $1's own shared memory."""
        return f"{{ .reg .b32 at; mov.u32 at, global_smem; mad.lo.u32 $0, $1, 16, at; add.u32 $0, $0, {self.private_start}; }}"


@gluon.constexpr_function
def copy_asm(to, source):
    """PTX that copies 16 bytes from address $2 + source to shared memory at $1 + to; zeros if $3 is 0."""
    return (
        "{ .reg .pred p; .reg .b32 size; setp.ne.s32 p, $3, 0; selp.b32 size, 16, 0, p; mov.b32 $0, 0;\n"
        f"cp.async.cg.shared.global [$1+{to}], [$2+{source}], 16, size; }}"
    )


@gluon.jit
def copy_row(to, at, exists, first: gl.constexpr, source: gl.constexpr, count: gl.constexpr, C: gl.constexpr):
    """Starts the copies of `count` vectors of a row, from address `at` + `source` bytes, to the thread's own shared memory:
    vectors from `first` on after address `to`."""
    for i in gl.static_range(count):
        run(copy_asm((first + i) * C.private_vector, source + VECTOR_BYTES * i), "=r,r,l,r", (to, at, exists))


@gluon.jit
def copied(at, first: gl.constexpr, count: gl.constexpr, C: gl.constexpr):
    """Loads the words of `count` vectors from the thread's own shared memory."""
    words = ()
    for i in gl.static_range(count):
        words = words + asm(
            copied_asm((first + i) * C.private_vector), "=r,=r,=r,=r,r", (at,), thread_words(4)
        )  # fmt: skip
    return words


@gluon.constexpr_function
def copied_asm(offset):
    """PTX that loads 16 bytes of shared memory at address $4 + offset."""
    return f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"


@gluon.jit
def commit_copies():
    """Ends a group of copies of this thread."""
    run("cp.async.commit_group;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def wait_for_copies(later: gl.constexpr):
    """Waits until all but the `later` youngest groups of copies of this thread are complete."""
    run(wait_copies_asm(later), "=r", [])


@gluon.constexpr_function
def wait_copies_asm(later):
    """PTX of `wait_for_copies`."""
    return f"cp.async.wait_group {later};\n mov.b32 $0, 0;"


@gluon.jit
def operand_of(upper, lower, count: gl.constexpr, C: gl.constexpr):
    """Returns operand A of `count` words of both rows. 4-bit codes become bytes of 16 times the code: of each word the even
    channels, then the odd ones. The shift to the left is a multiplication, since the pipeline for logic is busy."""
    registers = ()
    if C.bits == 8:
        for i in gl.static_range(count):
            registers = registers + (upper[i], lower[i])
    else:
        for i in gl.static_range(count):
            registers = registers + (
                (upper[i] * 16) & UPPER, (lower[i] * 16) & UPPER, upper[i] & UPPER, lower[i] & UPPER,
            )  # fmt: skip
    return registers


@gluon.jit
def copied_operand(at, first: gl.constexpr, count: gl.constexpr, C: gl.constexpr):
    """Returns operand A of `count` vectors of both rows in the thread's own shared memory."""
    return operand_of(copied(at, first, count, C), copied(at, first + count, count, C), 4 * count, C)


@gluon.jit
def finish_chunk(chunk: gl.constexpr, sums, residual, at, g, C: gl.constexpr):
    """Requantizes a chunk of y, whose products are complete; returns the words of both rows."""
    R: gl.constexpr = C.y_codes
    ALL: gl.constexpr = C.expanded // 32
    WORDS: gl.constexpr = C.group_words
    GROUPS: gl.constexpr = C.chunk // 32
    words = ((), ())
    for group in gl.static_range(GROUPS):
        s = table(at, GROUPS * chunk + group)
        b = table(at, ALL + GROUPS * chunk + group)
        codes = residual[0][(GROUPS * chunk + group) * WORDS : (GROUPS * chunk + group + 1) * WORDS]
        upper = codes_of(columns(sums, group, 0), s, b, codes, g, R)
        codes = residual[1][(GROUPS * chunk + group) * WORDS : (GROUPS * chunk + group + 1) * WORDS]
        lower = codes_of(columns(sums, group, 1), s, b, codes, g, R)
        words = (words[0] + upper, words[1] + lower)
    return words


@gluon.jit
def store_step(at, words, exists, row_bytes: gl.constexpr, C: gl.constexpr):
    """Stores the codes of 128 outputs of both rows."""
    VECTORS: gl.constexpr = C.step_vectors
    for i in gl.static_range(VECTORS):
        store_rows(
            at, (words[0][4 * i : 4 * i + 4], words[1][4 * i : 4 * i + 4]), exists, VECTOR_BYTES * i, 4, row_bytes
        )  # fmt: skip


@gluon.jit
def wait_stages(stage, phase, base, nought, count: gl.constexpr, C: gl.constexpr):
    """Waits for `count` stages of weights; returns their descriptors' bases, their indices and the next stage."""
    bases = ()
    stages = ()
    for _i in gl.static_range(count):
        run(C.ring.wait, "=r,r,r,r", [nought + stage, nought + phase, nought + 1])
        bases = bases + (base + stage * STAGE_UNITS,)
        stages = stages + (stage,)
        stage, phase = following(stage, phase, C.stages, 1)
    return bases, stages, stage, phase


@gluon.jit
def release_stages(stages, nought, thread, count: gl.constexpr, C: gl.constexpr):
    """Marks stages of weights as read by this warp."""
    lane = thread & 31
    if C.cluster == 1:
        lane = (lane == 0).to(gl.int32)
    for i in gl.static_range(count):
        run(C.ring.give, "=r,r,r", [nought + stages[i], lane])


@gluon.jit
def copy_inputs(x, added, pixel, step, pixels, here, C: gl.constexpr):
    """Starts the copies of what a job needs at its beginning: a given x, and the residual of iteration `step`, to the first of
    two places. `pixel` is the thread's first pixel."""
    X_WORDS: gl.constexpr = C.channels * C.bits // 32
    exists = ((pixel < pixels).to(gl.int32), (pixel + 8 < pixels).to(gl.int32))
    if C.rows == 0:
        source = x + (pixel * X_WORDS + here[1] * 4)
        copy_row(here[0], source, exists[0], C.x_vector, 0, C.x_vectors, C)
        copy_row(here[0], source, exists[1], C.x_vector + C.x_vectors, 32 * X_WORDS, C.x_vectors, C)
    copy_residual(added, pixel, step, here, exists, pixel * 0, C)


@gluon.jit
def arrived_residual(at, C: gl.constexpr):
    """Ends a group of copies, waits for those of the group before, and returns the words of both rows that they wrote to
    address `at`."""
    VECTORS: gl.constexpr = C.step_vectors
    commit_copies()
    wait_for_copies(1)
    return copied(at, 0, VECTORS, C), copied(at, VECTORS, VECTORS, C)


@gluon.jit
def copy_residual(added, pixel, iteration, here, exists, place, C: gl.constexpr):
    """Starts the copies of the residual codes of 128 outputs. `place` is 0 or the bytes of one iteration."""
    Y_WORDS: gl.constexpr = C.expanded * C.bits // 32
    COUNT: gl.constexpr = C.step_vectors
    source = added + (pixel * Y_WORDS + here[1] * 4 + iteration * 16 * COUNT)
    copy_row(here[0] + place, source, exists[0], 0, 0, COUNT, C)
    copy_row(here[0] + place, source, exists[1], COUNT, 32 * Y_WORDS, COUNT, C)


@gluon.jit
def loaded_step(at, exists, step: gl.constexpr, C: gl.constexpr):
    """Loads the words of a k block of y that this thread has stored."""
    COUNT: gl.constexpr = C.step_vectors
    ROW_BYTES: gl.constexpr = C.expanded * C.bits // 8
    upper = ()
    lower = ()
    for i in gl.static_range(COUNT):
        upper = upper + load_words(at, exists[0], VECTOR_BYTES * (COUNT * step + i), 4)
        lower = lower + load_words(at, exists[1], VECTOR_BYTES * (COUNT * step + i) + 8 * ROW_BYTES, 4)
    return upper, lower


@gluon.jit
def requantized_step(sums, at, first: gl.constexpr, all_groups: gl.constexpr, C: gl.constexpr):
    """Requantizes 128 outputs; returns the words of both rows. Their constants s are from column group `first` on after `at`, b
    are `all_groups` groups later."""
    R: gl.constexpr = C.z_codes
    words = ((), ())
    for group in gl.static_range(4):
        s = table(at, first + group)
        b = table(at, first + all_groups + group)
        upper = codes_of(columns(sums, group, 0), s, b, (), 0.0, R)
        words = (words[0] + upper, words[1] + codes_of(columns(sums, group, 1), s, b, (), 0.0, R))
    return words


@gluon.jit
def load_tap(tap: gl.constexpr, center, zeros, place, C: gl.constexpr):
    """Loads the packed codes of a tap. `center`: the place of this thread's pixel in its strip; `place`: the pixel's row and
    column, and the image's height and width."""
    row, column, height, width = place
    ROW_BYTES: gl.constexpr = C.row_bytes
    inside = row >= 0
    if tap // 3 == 0:
        inside = inside & (row > 0)
    if tap // 3 == 2:
        inside = inside & (row + 1 < height)
    if tap % 3 == 0:
        inside = inside & (column > 0)
    if tap % 3 == 2:
        inside = inside & (column + 1 < width)
    where = center + ((tap // 3 - 1) * ROW_BYTES * width + (tap % 3 - 1) * ROW_BYTES)
    return asm(C.strip.tap, C.strip.tap_constraints, (where, zeros, inside.to(gl.int32)), thread_words(C.strip.loaded))


@gluon.jit
def tap_operand(words, C: gl.constexpr):
    """Returns operand A of a tap's packed codes: of 4-bit codes the even channels, then the odd ones, as in `operand_of`."""
    LOADED: gl.constexpr = C.strip.loaded
    if C.bits == 8:
        return words
    else:
        even = ()
        odd = ()
        for i in gl.static_range(LOADED):
            even = even + ((words[i] * 16) & UPPER,)
            odd = odd + (words[i] & UPPER,)
        return even + odd


@gluon.jit
def window_step(center, zeros, place, ring, strips, last: gl.constexpr, at, turn, thread, C: gl.constexpr):
    """Computes 128 outputs of the 3 x 3 convolution; returns the words of both rows and the next stage. `strips`: the stage and
    phase of the first strip; if `last`, the strips are released."""
    N: gl.constexpr = C.next
    BLOCKS: gl.constexpr = C.channels // 128
    FIRST: gl.constexpr = (2 * C.expanded + 2 * C.following) // 32
    ALL: gl.constexpr = C.channels // 32
    HELD: gl.constexpr = 16
    stage, phase, base = ring
    nought = thread * 0
    sums = ()
    for _i in gl.static_range(64):
        sums = sums + (nought,)
    for block in range(BLOCKS):
        strip = (strips[0] + block) & 1
        run(C.strip.strips.wait, "=r,r,r,r", [nought + strip, nought + strips[1], nought + 1])
        own = center + strip * C.strip_bytes
        words = load_tap(0, own, zeros, place, C)
        held = ()
        before = ()
        for tap in gl.static_range(9):
            registers = tap_operand(words, C)
            if tap < 8:
                words = load_tap(tap + 1, own, zeros, place, C)
            bases, stages, stage, phase = wait_stages(stage, phase, base, nought, 1, C)
            sums = start(sums, registers, bases[0], 0, 4, True, N)
            if tap > 0:
                sums = wait(sums, 1, 64)
                fence_registers(held, turn, HELD)
                release_stages(before, nought, thread, 1, C)
            held = registers
            before = stages
        if last:
            run(C.strip.strips.give, "=r,r,r", [nought + strip, ((thread & 31) == 0).to(gl.int32)])
        sums = wait(sums, 0, 64)
        fence_registers(held, turn, HELD)
        release_stages(before, nought, thread, 1, C)
    return requantized_step(sums, at, FIRST, ALL, C), stage, phase


@gluon.jit
def window_operand(pixel, strips, ring, constants, size, turn, thread, C: gl.constexpr):
    """Returns the codes of the 3 x 3 convolution as operand A, and the next stage. `pixel`: the thread's row of a strip as a
    pixel, the one whose address it passes to ldmatrix. `size`: height and width of the images."""
    TILES: gl.constexpr = C.channels // 128
    WORDS: gl.constexpr = 4 * C.x_vectors
    stage, phase, base = ring
    height, width = size
    place = (pixel // width % height, pixel % width, height, width)
    own_row = (thread >> 5) * 16 + (thread & 15)
    center = asm(C.strip.place, "=&r,r,r", (own_row + width + 1, thread), gl.int32)
    zeros = asm(
        "{ .reg .b32 at; mov.u32 at, global_smem; add.u32 $0, $1, at; }", "=r,r", (thread * 0 + C.strip.zeros,), gl.int32
    )
    upper = ()
    lower = ()
    for tile in gl.static_range(TILES):
        words, stage, phase = window_step(
            center, zeros, place, (stage, phase, base), strips, tile == TILES - 1, constants + tile * 512, turn, thread, C
        )  # fmt: skip
        upper = upper + words[0]
        lower = lower + words[1]
    return operand_of(upper, lower, WORDS, C), stage, phase


@gluon.jit
def next_pass(y, z, exists, ring, at, turn, thread, C: gl.constexpr):
    """Computes 128 outputs of z and stores them; returns the next stage. Words of y are loaded two k blocks ahead."""
    N: gl.constexpr = C.next
    BLOCKS: gl.constexpr = C.expanded // 128
    FIRST: gl.constexpr = 2 * C.expanded // 32
    ALL: gl.constexpr = C.following // 32
    WORDS: gl.constexpr = 4 * C.step_vectors
    ROW_BYTES: gl.constexpr = C.following * C.bits // 8
    HELD: gl.constexpr = 16
    stage, phase, base = ring
    nought = thread * 0
    loads = (loaded_step(y, exists, 0, C), loaded_step(y, exists, 1, C))
    sums = ()
    held = ()
    before = ()
    for block in gl.static_range(BLOCKS):
        upper, lower = loads[block]
        registers = operand_of(upper, lower, WORDS, C)
        if block + 2 < BLOCKS:
            loads = loads + (loaded_step(y, exists, block + 2, C),)
        bases, stages, stage, phase = wait_stages(stage, phase, base, nought, 1, C)
        sums = start(sums, registers, bases[0], 0, 4, block > 0, N)
        if block > 0:
            sums = wait(sums, 1, 64)
            fence_registers(held, turn, HELD)
            release_stages(before, nought, thread, 1, C)
        held = registers
        before = stages
    sums = wait(sums, 0, 64)
    fence_registers(held, turn, HELD)
    release_stages(before, nought, thread, 1, C)
    store_step(z, requantized_step(sums, at, FIRST, ALL, C), exists, ROW_BYTES, C)
    return stage, phase


@gluon.jit
def start_chunk(chunk: gl.constexpr, operand, weights, ring, thread, C: gl.constexpr):
    """Starts the products of a chunk of y. `weights`: base and index of the stage of the chunk before. Returns the sums, the
    weights of this chunk, and the next stage."""
    TILES: gl.constexpr = C.stage_tiles
    BLOCKS: gl.constexpr = C.channels // 128
    P: gl.constexpr = C.third
    stage, phase, base = ring
    bases, stages = weights
    if chunk * BLOCKS % TILES == 0:
        bases, stages, stage, phase = wait_stages(stage, phase, base, thread * 0, 1, C)
    sums = start((), operand, bases[0], chunk * BLOCKS % TILES, 4 * BLOCKS, False, P)
    return sums, (bases, stages), stage, phase


@gluon.jit
def residual_step(sums, weights, operand, residual, ring, at, g, last: gl.constexpr, thread, C: gl.constexpr):
    """Requantizes 128 outputs of y with a residual, whose words of both rows are `residual`. The products of a chunk are in
    flight while the chunk before is requantized: `sums` and `weights` are those of the first chunk. If this is not the `last`
    iteration of a loop's body, the first chunk of the next one is started. Returns the words of both rows, that chunk's sums
    and weights, and the next stage."""
    CHUNKS: gl.constexpr = 128 // C.chunk
    TILES: gl.constexpr = C.stage_tiles
    BLOCKS: gl.constexpr = C.channels // 128
    SUMS: gl.constexpr = C.chunk // 2
    stage, phase, base = ring
    words = ((), ())
    for chunk in gl.static_range(CHUNKS):
        before = weights[1]
        later = ()
        if chunk + 1 < CHUNKS or not last:
            later, weights, stage, phase = start_chunk(
                (chunk + 1) % CHUNKS, operand, weights, (stage, phase, base), thread, C
            )  # fmt: skip
            sums = wait(sums, 1, SUMS)
        else:
            sums = wait(sums, 0, SUMS)
        found = finish_chunk(chunk, sums, residual, at, g, C)
        words = (words[0] + found[0], words[1] + found[1])
        if (chunk + 1) * BLOCKS % TILES == 0:
            release_stages(before, thread * 0, thread, 1, C)
        sums = later
    return words, sums, weights, stage, phase


@gluon.jit
def consume(y, z, x, added, g, pixels, size, tiles, C: gl.constexpr):
    """The math warpgroups. A job is a part of the outputs of a tile."""
    Y_WORDS: gl.constexpr = C.expanded * C.bits // 32
    Z_WORDS: gl.constexpr = C.following * C.bits // 32
    PARTS: gl.constexpr = C.parts
    STEPS: gl.constexpr = C.expanded // 128 // PARTS
    UNROLL: gl.constexpr = C.unroll
    PASSES: gl.constexpr = C.following // 128
    X_BLOCKS: gl.constexpr = C.channels // 128
    PLACE: gl.constexpr = C.residual_bytes
    VECTORS: gl.constexpr = C.step_vectors
    PIXELS: gl.constexpr = C.pixels
    thread = gl.arange(0, C.threads, C.threads_layout)
    nought = thread * 0
    own = (thread >> 5) * 16 + (thread >> 2) % 8  # the first of the two pixels of a tile whose sums this thread has
    here = (asm(C.private_place, "=r,r", (thread,), gl.int32), thread & 3)
    constants = asm(C.lane_place, "=&r,r", (thread,), gl.int32)
    base = asm(C.third.base, "=&r,r", (thread,), gl.int32)
    factor = gl.full([C.threads], g, gl.float32, C.threads_layout)
    first_job = gl.program_id(0)
    stride = gl.num_programs(0)
    wait_for_previous_kernel()
    copy_inputs(x, added, first_job // PARTS * PIXELS + own, first_job % PARTS * STEPS, pixels, here, C)
    commit_copies()
    run(C.constant_barrier.wait, "=r,r,r,r", [nought, nought, nought + 1])
    stage = tiles * 0
    phase = tiles * 0
    strip = tiles * 0
    strip_phase = tiles * 0
    turn = nought
    place = nought
    for job in range(first_job, tiles * PARTS, stride):
        turn = asm("add.s32 $0, $1, 1;", "=r,r", (turn,), gl.int32)
        now = asm("mov.b32 $0, $1;", "=r,r", (nought + job // PARTS,), gl.int32)
        first_step = job % PARTS * STEPS
        pixel = now * PIXELS + own
        exists = ((pixel < pixels).to(gl.int32), (pixel + 8 < pixels).to(gl.int32))
        if C.rows == 0:
            wait_for_copies(0)
        operand = ()
        if C.rows > 0:
            row = now * PIXELS + (thread >> 5) * 16 + (thread & 15)
            operand, stage, phase = window_operand(
                row, (strip, strip_phase), (stage, phase, base), constants, size, turn, thread, C
            )  # fmt: skip
            for _block in gl.static_range(X_BLOCKS):
                strip, strip_phase = following(strip, strip_phase, 2, 1)
        else:
            operand = copied_operand(here[0], C.x_vector, C.x_vectors, C)
        y_row = y + (pixel * Y_WORDS + here[1] * 4)
        next_pixel = pixel + stride * PIXELS
        next_step = first_step
        if PARTS > 1:
            next_pixel = (nought + (job + stride) // PARTS) * PIXELS + own
            next_step = (job + stride) % PARTS * STEPS
        for first in range(first_step, first_step + STEPS, UNROLL):
            sums, weights, stage, phase = start_chunk(0, operand, ((), ()), (stage, phase, base), thread, C)
            for number in gl.static_range(UNROLL):
                step = first + number
                if step + 1 < first_step + STEPS:
                    copy_residual(added, pixel, step + 1, here, exists, PLACE - place, C)
                else:
                    copy_inputs(x, added, next_pixel, next_step, pixels, here, C)
                residual = arrived_residual(here[0] + place, C)
                place = PLACE - place
                words, sums, weights, stage, phase = residual_step(
                    sums, weights, operand, residual, (stage, phase, base), constants + step * 512, factor,
                    number + 1 == UNROLL, thread, C,
                )  # fmt: skip
                store_step(y_row + step * 16 * VECTORS, words, exists, 4 * Y_WORDS, C)
        fence_registers(operand, turn, 16 * X_BLOCKS)
        if PASSES > 0:
            for part in range(PASSES):
                z_row = z + (pixel * Z_WORDS + here[1] * 4 + part * 16 * VECTORS)
                stage, phase = next_pass(y_row, z_row, exists, (stage, phase, base), constants + part * 512, turn, thread, C)


@gluon.jit
def produce(weight, maps, tiles, width, C: gl.constexpr):
    """The loader thread: the weights of each job, and strips."""
    X_BLOCKS: gl.constexpr = C.channels // 128
    PARTS: gl.constexpr = C.parts
    STAGES: gl.constexpr = C.weight_stages // PARTS
    zero = tiles * 0
    one = zero + 1
    run(C.fill_constants, "=r,r,r,r,l", [one, zero, one, weight + C.weight_stages * C.stage_bytes])
    stage = zero
    parity = one
    strip = zero
    strip_parity = one
    first = gl.program_id(0)
    if C.rows > 0:
        map_arrived(maps)
    for i in range(FIRST_WEIGHTS):
        run(C.fill, "=r,r,r,r,l", [one, stage, parity, weight + (first % PARTS * STAGES + i) * C.stage_bytes])
        stage, parity = following(stage, parity, C.stages, 1)
    wait_for_previous_kernel()
    for job in range(first, tiles * PARTS, gl.num_programs(0)):
        if C.rows > 0:
            for block in gl.static_range(X_BLOCKS):
                run(C.strip.copy_strip, "=r,r,r,r,l,r,r", [
                    one, strip, strip_parity, maps, job * C.pixels - width - 1, zero + block * C.row_bytes
                ])  # fmt: skip
                strip, strip_parity = following(strip, strip_parity, 2, 1)
        for i in range(gl.where(job == first, FIRST_WEIGHTS, 0), STAGES):
            run(C.fill, "=r,r,r,r,l", [one, stage, parity, weight + (job % PARTS * STAGES + i) * C.stage_bytes])
            stage, parity = following(stage, parity, C.stages, 1)


@gluon.jit(do_not_specialize=["pixels", "tiles", "height", "width"])
def deep_block_conv(y, z, x, added, g, pixels, tiles, height, width, maps, weight, C: gl.constexpr):
    """The kernel. `added`: codes of the residual. `maps`: the descriptor of the input of the 3 x 3 convolution; then x is None.
    `weight`: all weights and constants. `tiles`: in a cluster a multiple of the number of blocks; some may be beyond the last
    pixel."""
    shared = gl.allocate_shared_memory(
        gl.int32, [C.shared_units, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    thread = gl.arange(0, C.threads, C.threads_layout)
    # Triton does not allocate memory that only PTX uses.
    shared.index(C.shared_units - 1).store(gl.full([UNIT_WORDS], 0, gl.int32, gl.BlockedLayout([1], [32], [C.warps], [0])))
    barrier()
    own = gl.where(thread < C.math_threads, thread, 1)  # the first thread of each math warp initialises
    run(C.ring.init, "=r,r", [own])
    run(C.constant_barrier.init, "=r,r", [own])
    if C.rows > 0:
        run(C.strip.strips.init, "=r,r", [own])
    fence_async_shared()
    barrier()
    if C.cluster > 1:
        run(BARRIERS_VISIBLE, "=r", [])
        run(CLUSTER_SYNC, "=r", [])
    group = own_warpgroup()
    launch_next_kernel()
    if group == C.multipliers:
        run(registers_of(LOADER_REGISTERS), "=r", [])
        if own_thread() == C.math_threads:
            produce(weight, maps, tiles, width, C)
    else:
        run(registers_of(C.registers), "=r", [])
        consume(y, z, x, added, g, pixels, (height, width), tiles, C)
    if C.cluster > 1:  # the other block may still arrive at barriers of this one
        run(CLUSTER_SYNC, "=r", [])


class PreparedDeepBlock:
    """Three convolutions prepared for the kernel, or the third one alone. `packed` is the result of pack/conv_deep_block.py,
    `g` the residual's factor."""

    def __init__(self, layout: DeepBlockLayout, packed: Tensor, g: float, sm_count: int) -> None:
        self.layout, self.packed, self.g, self.sm_count = layout, packed, g, sm_count
        self.config = functools.lru_cache(maxsize=None)(self._config)
        self.launch = ConvLauncher(
            deep_block_conv, cluster=deep_block_tile(layout).cluster, maxnreg=128, launch_pdl=True
        )  # fmt: skip
        self.map = functools.lru_cache(maxsize=None)(row_map)

    def _config(self, width: int, parts: int) -> DeepBlockConv:
        """The configuration for images of this width, or for jobs of a part of the outputs of one convolution."""
        return DeepBlockConv(**vars(deep_block_tile(self.layout, width, parts)))

    def __call__(self, x: Tensor, residual: Tensor, out: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Computes (y, z) of the packed input [N, H, W, bytes] of the 3 x 3 convolution, or y of the third one's."""
        n, height, width, row_bytes = x.shape
        pixels = n * height * width
        tiles = -(-pixels // (64 * DeepBlockTile.multipliers))
        alone = self.layout.following == 0
        parts = third_parts(tiles, self.layout.expanded, self.sm_count) if alone else 1
        config = self.config(0 if alone else width, parts)
        blocks = min(tiles * parts, self.sm_count)
        if config.cluster > 1:  # both blocks of a cluster read all weights as often
            blocks = min(tiles + tiles % 2, max(self.sm_count // 2, 1) * 2)
            tiles = -(-tiles // blocks) * blocks
        y, codes, read = (tensor.view(-1).view(torch.int32) for tensor in (out[0], residual, x))
        z = None if out[1] is None else out[1].view(-1).view(torch.int32)
        maps = None
        if config.rows:
            maps = self.map(pixels, row_bytes, config.rows, config.row_bytes, x.data_ptr(), x.device)
        self.launch(
            parts if alone else width, (blocks, 1, 1), config.warps,
            y, z, None if config.rows else read, codes, self.g, pixels, tiles, height, width, maps, self.packed, config,
        )  # fmt: skip
        return out


class PreparedThird(ConvPlan):
    """A 1 x 1 convolution with a residual, prepared for the kernel alone."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, layout: DeepBlockLayout, sm_count: int) -> None:
        super().__init__(spec, packed)
        steps = U4_STEPS if spec.x == "u4" else 1.0
        constants = [values.view(torch.int8) for values in (packed.s / steps, packed.b)]
        together = torch.cat([packed.weight.reshape(-1), *constants])
        self.block = PreparedDeepBlock(layout, together, packed.g, sm_count)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        assert residual is not None, "choose/conv.py takes this kernel for layers with a residual"
        return self.block(x, residual, (self.output(x, out), None))[0]
