"""The last convolution of a bottleneck block and the first one of the next block, both 1 x 1, in one kernel, and the 3 x 3
convolution before them, if it keeps the size: sm_90a.

Computes y = conv1x1(x) + residual (or + conv1x1(entry), a shortcut with a stride), z = conv1x1(y), requantized. With a 3 x 3
        convolution x is its output, which is not stored
Reads   weights in one stream of 16 KB stages (pack/conv_pair.py), by bulk copies; constants once; pixels without any exchange:
        K is in the order of memory, so a thread needs 16 of every 64 bytes of its two rows, and copies them to shared memory
        of its own by cp.async. x, the residual and y pass no barrier
        For a 3 x 3 convolution, strips of its input by TMA (parts/strip_ring.py), 128 channels at a time
Roles   one warp loads weights and strips; 3 warpgroups of 64 pixels multiply, requantize and store. They share weights only
x       128 outputs of the 3 x 3 convolution at a time, over all of its K. A thread's codes are its operand A of y's product
y       128 outputs per iteration, in chunks of 64: one is multiplied while the other is requantized. With a shortcut, which
        has two sums for each output, in chunks of 32, one at a time. x and the shortcut's input stay in registers
z       128 outputs per pass over y, which a thread loads again from where it stored it; y of the next k block is on its way
        while one is multiplied
Values  one register of each thread: every tensor here is [threads] (parts/thread_product.py)
Grid    persistent. Exact: the same bits as both layers one after the other (formats/conv.py)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import U4_STEPS, ConvSpec
from lowbit.kernels.choose.conv import STRIPS, PairTile, pair_tile, third_parts
from lowbit.kernels.parts.conv_plan import ConvLauncher, ConvPlan
from lowbit.kernels.parts.conv_tile import UNIT_WORDS
from lowbit.kernels.parts.gluon import asm, barrier, fence_async_shared, gl, gluon, run, source_digest
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.prologue import launch_next_kernel, wait_for_previous_kernel
from lowbit.kernels.parts.requantize import Requantize
from lowbit.kernels.parts.strip_ring import StripPlaces
from lowbit.kernels.parts.thread_codes import codes_of, columns, scaled, store_rows, table
from lowbit.kernels.parts.thread_product import ThreadProduct, fence_registers, load_words, start, thread_words, wait
from lowbit.kernels.parts.tile import Warps
from lowbit.kernels.parts.warp_roles import LOADER_REGISTERS, following, map_arrived, own_thread, own_warpgroup, registers_of
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_layout import PackedConv
from lowbit.pack.conv_pair import STAGE_BYTES, STEP, PairLayout

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


@dataclass(frozen=True)
class PairConv(PairTile, Warps):
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
        return StageBarriers(self.barriers_start, self.stages, 4 * self.multipliers)

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
    def y_codes(self) -> Requantize:
        return Requantize(self.storage, None if self.entry else self.storage, True)

    @property
    def z_codes(self) -> Requantize:
        return Requantize(self.storage, None, True)

    @property
    def streams(self) -> bool:
        """True if x and the shortcut's input do not fit in registers."""
        return self.entry > 256

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
def finish_chunk(chunk: gl.constexpr, later: gl.constexpr, first, second, residual, at, g, C: gl.constexpr):
    """Requantizes a chunk of y while `later` products run; returns the words of both rows. `second`: sums of the shortcut."""
    R: gl.constexpr = C.y_codes
    ALL: gl.constexpr = C.expanded // 32
    THIRD: gl.constexpr = (2 * C.expanded + 2 * C.following) // 32
    WORDS: gl.constexpr = C.group_words
    GROUPS: gl.constexpr = C.chunk // 32
    SUMS: gl.constexpr = C.chunk // 2
    if C.entry > 0:
        both = wait(first + second, later, 2 * SUMS)
        first = both[0:SUMS]
        second = both[SUMS:]
    else:
        first = wait(first, later, SUMS)
    words = ((), ())
    for group in gl.static_range(GROUPS):
        s = table(at, GROUPS * chunk + group)
        b = table(at, ALL + GROUPS * chunk + group)
        if C.entry > 0:
            s2 = table(at, THIRD + GROUPS * chunk + group)
            upper = codes_of(columns(second, group, 0), s2, scaled(columns(first, group, 0), s, b), (), g, R)
            lower = codes_of(columns(second, group, 1), s2, scaled(columns(first, group, 1), s, b), (), g, R)
        else:
            codes = residual[0][(GROUPS * chunk + group) * WORDS : (GROUPS * chunk + group + 1) * WORDS]
            upper = codes_of(columns(first, group, 0), s, b, codes, g, R)
            codes = residual[1][(GROUPS * chunk + group) * WORDS : (GROUPS * chunk + group + 1) * WORDS]
            lower = codes_of(columns(first, group, 1), s, b, codes, g, R)
        words = (words[0] + upper, words[1] + lower)
    return words


@gluon.jit
def streamed_product(
    at, first: gl.constexpr, vectors: gl.constexpr, base, tile: gl.constexpr, turn, C: gl.constexpr
):  # fmt: skip
    """Returns the sums of a chunk of a product. Its input does not fit in registers: `vectors` vectors of each row in the
    thread's own shared memory, from vector `first` on, of which those of one k block are loaded at a time. The weights start at
    tile `tile` of a stage."""
    P: gl.constexpr = C.third
    COUNT: gl.constexpr = C.step_vectors
    BLOCKS: gl.constexpr = vectors // COUNT
    SUMS: gl.constexpr = C.chunk // 2
    sums = ()
    held = ()
    for block in gl.static_range(BLOCKS):
        upper = copied(at, first + COUNT * block, COUNT, C)
        lower = copied(at, first + vectors + COUNT * block, COUNT, C)
        registers = operand_of(upper, lower, 4 * COUNT, C)
        sums = start(sums, registers, base, tile + block, 4, block > 0, P)
        if block > 0:
            sums = wait(sums, 1, SUMS)
            fence_registers(held, turn, 16)
        held = registers
    sums = wait(sums, 0, SUMS)
    fence_registers(held, turn, 16)
    return sums


@gluon.jit
def shortcut_step(operand, entry, own, ring, at, g, turn, thread, C: gl.constexpr):
    """Computes 128 outputs of y with a shortcut, a chunk at a time; returns the words of both rows and the next stage. Stages
    are read in the order of `PairLayout.iteration`."""
    CHUNKS: gl.constexpr = 128 // C.chunk
    TILES: gl.constexpr = C.stage_tiles
    X_BLOCKS: gl.constexpr = C.channels // 128
    ENTRY_BLOCKS: gl.constexpr = C.entry // 128
    P: gl.constexpr = C.third
    stage, phase, base = ring
    nought = thread * 0
    words = ((), ())
    x_base = ()
    x_stage = ()
    entry_base = ()
    entry_stage = ()
    for chunk in gl.static_range(CHUNKS):
        if chunk * X_BLOCKS % TILES == 0:
            x_base, x_stage, stage, phase = wait_stages(stage, phase, base, nought, 1, C)
        if chunk * ENTRY_BLOCKS % TILES == 0:
            entry_base, entry_stage, stage, phase = wait_stages(stage, phase, base, nought, 1, C)
        if C.streams:
            first = streamed_product(own, C.x_vector, C.x_vectors, x_base[0], chunk * X_BLOCKS % TILES, turn, C)
            second = streamed_product(
                own, C.entry_vector, C.entry_vectors, entry_base[0], chunk * ENTRY_BLOCKS % TILES, turn, C
            )  # fmt: skip
        else:
            first = start((), operand, x_base[0], chunk * X_BLOCKS % TILES, 4 * X_BLOCKS, False, P)
            second = start((), entry, entry_base[0], chunk * ENTRY_BLOCKS % TILES, 4 * ENTRY_BLOCKS, False, P)
        found = finish_chunk(chunk, 0, first, second, (), at, g, C)
        words = (words[0] + found[0], words[1] + found[1])
        if (chunk + 1) * ENTRY_BLOCKS % TILES == 0:
            release_stages(entry_stage, nought, thread, 1, C)
        if (chunk + 1) * X_BLOCKS % TILES == 0:
            release_stages(x_stage, nought, thread, 1, C)
    return words, stage, phase


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
    for i in gl.static_range(count):
        run(C.ring.give, "=r,r,r", [nought + stages[i], ((thread & 31) == 0).to(gl.int32)])


@gluon.jit
def copy_inputs(x, added, pixel, step, geometry, here, C: gl.constexpr):
    """Starts the copies of what a job needs at its beginning: x, and the residual of iteration `step` (to the first of two
    places) or the shortcut's input. `pixel` is the thread's first pixel."""
    pixels, image, width, entry_image, entry_width, stride = geometry
    X_WORDS: gl.constexpr = C.channels * C.bits // 32
    first = (pixel < pixels).to(gl.int32)
    second = (pixel + 8 < pixels).to(gl.int32)
    lane = here[1]
    if C.rows == 0:
        source = x + (pixel * X_WORDS + lane * 4)
        copy_row(here[0], source, first, C.x_vector, 0, C.x_vectors, C)
        copy_row(here[0], source, second, C.x_vector + C.x_vectors, 32 * X_WORDS, C.x_vectors, C)
    if C.entry > 0:
        E_WORDS: gl.constexpr = C.entry * C.bits // 32
        for row in gl.static_range(2):
            own = pixel + 8 * row
            inside = own % image
            at = own // image * entry_image + inside // width * (stride * entry_width) + inside % width * stride
            exists = first
            if row == 1:
                exists = second
            source = added + (at * E_WORDS + lane * 4)
            copy_row(here[0], source, exists, C.entry_vector + row * C.entry_vectors, 0, C.entry_vectors, C)
    else:
        copy_residual(added, pixel, step, here, (first, second), pixel * 0, C)


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
def window_operand(pixel, strips, ring, constants, geometry, turn, thread, C: gl.constexpr):
    """Returns the codes of the 3 x 3 convolution as operand A, and the next stage. `pixel`: the thread's row of a strip as a
    pixel, the one whose address it passes to ldmatrix."""
    TILES: gl.constexpr = C.channels // 128
    WORDS: gl.constexpr = 4 * C.x_vectors
    stage, phase, base = ring
    width = geometry[2]
    height = geometry[1] // width
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
def residual_step(operand, residual, ring, at, g, thread, C: gl.constexpr):
    """Requantizes 128 outputs of y with a residual, whose words of both rows are `residual`. Products of a chunk are in flight
    while the chunk before is requantized. Returns the words of both rows and the next stage."""
    CHUNKS: gl.constexpr = 128 // C.chunk
    TILES: gl.constexpr = C.stage_tiles
    BLOCKS: gl.constexpr = C.channels // 128
    P: gl.constexpr = C.third
    stage, phase, base = ring
    nought = thread * 0
    words = ((), ())
    bases = ()
    stages = ()
    held = ()
    before = ()
    for chunk in gl.static_range(CHUNKS):
        if chunk * BLOCKS % TILES == 0:
            bases, stages, stage, phase = wait_stages(stage, phase, base, nought, 1, C)
        sums = start((), operand, bases[0], chunk * BLOCKS % TILES, 4 * BLOCKS, False, P)
        if chunk > 0:
            found = finish_chunk(chunk - 1, 1, held, (), residual, at, g, C)
            words = (words[0] + found[0], words[1] + found[1])
            if chunk * BLOCKS % TILES == 0:
                release_stages(before, nought, thread, 1, C)
        held = sums
        before = stages
    found = finish_chunk(CHUNKS - 1, 0, held, (), residual, at, g, C)
    release_stages(before, nought, thread, 1, C)
    return (words[0] + found[0], words[1] + found[1]), stage, phase


@gluon.jit
def consume(y, z, x, added, g, geometry, tiles, C: gl.constexpr):
    """The math warpgroups. A job is a part of the outputs of a tile."""
    Y_WORDS: gl.constexpr = C.expanded * C.bits // 32
    Z_WORDS: gl.constexpr = C.following * C.bits // 32
    PARTS: gl.constexpr = C.parts
    STEPS: gl.constexpr = C.expanded // 128 // PARTS
    PASSES: gl.constexpr = C.following // 128
    X_BLOCKS: gl.constexpr = C.channels // 128
    ENTRY_BLOCKS: gl.constexpr = C.entry // 128
    PLACE: gl.constexpr = C.residual_bytes
    VECTORS: gl.constexpr = C.step_vectors
    PIXELS: gl.constexpr = C.pixels
    pixels = geometry[0]
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
    copy_inputs(x, added, first_job // PARTS * PIXELS + own, first_job % PARTS * STEPS, geometry, here, C)
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
                row, (strip, strip_phase), (stage, phase, base), constants, geometry, turn, thread, C
            )  # fmt: skip
            for _block in gl.static_range(X_BLOCKS):
                strip, strip_phase = following(strip, strip_phase, 2, 1)
        elif not C.streams:
            operand = copied_operand(here[0], C.x_vector, C.x_vectors, C)
        entry = ()
        if C.entry > 0 and not C.streams:
            entry = copied_operand(here[0], C.entry_vector, C.entry_vectors, C)
        y_row = y + (pixel * Y_WORDS + here[1] * 4)
        next_pixel = pixel + stride * PIXELS
        next_step = first_step
        if PARTS > 1:
            next_pixel = (nought + (job + stride) // PARTS) * PIXELS + own
            next_step = (job + stride) % PARTS * STEPS
        for step in range(first_step, first_step + STEPS):
            at = constants + step * 512
            words = ((), ())
            if C.entry > 0:
                words, stage, phase = shortcut_step(
                    operand, entry, here[0], (stage, phase, base), at, factor, turn, thread, C
                )  # fmt: skip
            else:
                other = PLACE - place
                if step + 1 < first_step + STEPS:
                    copy_residual(added, pixel, step + 1, here, exists, other, C)
                else:
                    copy_inputs(x, added, next_pixel, next_step, geometry, here, C)
                commit_copies()
                wait_for_copies(1)
                residual = (copied(here[0] + place, 0, VECTORS, C), copied(here[0] + place, VECTORS, VECTORS, C))
                place = other
                words, stage, phase = residual_step(operand, residual, (stage, phase, base), at, factor, thread, C)
            store_step(y_row + step * 16 * VECTORS, words, exists, 4 * Y_WORDS, C)
        if not C.streams:
            fence_registers(operand + entry, turn, 16 * (X_BLOCKS + ENTRY_BLOCKS))
        if C.entry > 0:
            copy_inputs(x, added, next_pixel, next_step, geometry, here, C)
            commit_copies()
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


@gluon.jit(do_not_specialize=["pixels", "tiles", "image", "width", "entry_image", "entry_width", "stride"])
def pair_conv(
    y, z, x, added, g, pixels, tiles, image, width, entry_image, entry_width, stride, maps, weight, C: gl.constexpr
):  # fmt: skip
    """The kernel. `added`: codes of the residual or, with a shortcut, its input, whose images have `entry_image` pixels, in
    rows of `entry_width`. `image`: number of pixels of an image of y. `maps`: with a 3 x 3 convolution, the descriptor of its
    input, and x is None. `weight`: all weights and constants."""
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
    group = own_warpgroup()
    launch_next_kernel()
    if group == C.multipliers:
        run(registers_of(LOADER_REGISTERS), "=r", [])
        if own_thread() == C.math_threads:
            produce(weight, maps, tiles, width, C)
    else:
        run(registers_of(C.registers), "=r", [])
        consume(y, z, x, added, g, (pixels, image, width, entry_image, entry_width, stride), tiles, C)


class PreparedPair:
    """Two convolutions prepared for the kernel, or three with a 3 x 3 one. `packed` is the result of pack/conv_pair.py, `g` the
    residual's factor."""

    def __init__(self, third: ConvSpec, layout: PairLayout, packed: Tensor, g: float, sm_count: int) -> None:
        self.third, self.layout, self.packed, self.g, self.sm_count = third, layout, packed, g, sm_count
        self.config = functools.lru_cache(maxsize=None)(self._config)
        self.launch = ConvLauncher(pair_conv, maxnreg=128, launch_pdl=True)
        self.map = functools.lru_cache(maxsize=None)(row_map)

    def _config(self, width: int, parts: int) -> PairConv:
        """The configuration for images of this width, which matters to a 3 x 3 convolution only, and jobs of a part of the
        outputs."""
        return PairConv(**vars(pair_tile(self.layout, width, parts)))

    def __call__(self, x: Tensor, added: Tensor, out: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Computes (y, z) of packed x [N, H, W, bytes], or of the input of the 3 x 3 convolution. `added` is the residual, or
        the input of the shortcut."""
        n, height, width, row_bytes = x.shape
        own_width = width if self.layout.window else 0
        pixels = n * height * width
        tiles = -(-pixels // (64 * PairTile.multipliers))
        parts = 1 if self.layout.following else third_parts(tiles, self.layout.expanded, self.sm_count)
        config = self.config(own_width, parts)
        stride = 1 if self.third.second is None else self.third.second.stride[0]
        y, codes, read = (tensor.view(-1).view(torch.int32) for tensor in (out[0], added, x))
        z = None if out[1] is None else out[1].view(-1).view(torch.int32)
        maps = None
        if config.rows:
            maps = self.map(pixels, row_bytes, config.rows, config.row_bytes, x.data_ptr(), x.device)
        self.launch(
            own_width or parts, (min(tiles * parts, self.sm_count), 1, 1), config.warps,
            y, z, None if config.rows else read, codes, self.g, pixels, tiles, height * width, width,
            added.shape[1] * added.shape[2], added.shape[2], stride, maps, self.packed, config,
        )  # fmt: skip
        return out


class PreparedThird(ConvPlan):
    """A 1 x 1 convolution with a residual, prepared for the kernel alone: no convolution follows in it."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, layout: PairLayout, sm_count: int) -> None:
        super().__init__(spec, packed)
        steps = U4_STEPS if spec.x == "u4" else 1.0
        constants = [values.view(torch.int8) for values in (packed.s / steps, packed.b)]
        self.pair = PreparedPair(spec, layout, torch.cat([packed.weight.reshape(-1), *constants]), packed.g, sm_count)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        assert residual is not None, "choose/conv.py takes this kernel for layers with a residual"
        return self.pair(x, residual, (self.output(x, out), None))[0]
