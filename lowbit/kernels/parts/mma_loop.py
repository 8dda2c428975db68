"""The main loop of the large-M kernels of mma.sync: dequantizes the stages of parts/tile_stage.py ahead of their use and
multiplies them.

The functions take the configuration C of a kernel, which is an `MmaBlock`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.gluon import aggregate, asm, barrier, gl, gluon, mma_v2, ptx, run
from lowbit.kernels.parts.smem import Regions, allocate, view
from lowbit.kernels.parts.tile import Warps
from lowbit.kernels.parts.tile_stage import StageCopy, TileStage, commit, copy_vector, first_vector

# Order of work within a stage of parts/tile_stage.py: for each k16 step, the tokens of a warp in chunks.
#
# While a chunk is multiplied, x of a later chunk is read, some weights of the next step are dequantized, and some copies of a
# later stage start. ptxas does not move reads of x past copies, so copies that are spread over a stage keep ldmatrix ahead of
# the products. With 4 chunks:
#
#     position    0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12 13 14 15      one chunk of one k16 step each
#     copies      --------------------------------           of the stage that is furthest ahead
#     barrier                                             |  the next stage is complete; its x is read from here on
#     dequantized of step 1  |  of step 2  |  of step 3   |  of step 0 of the next stage
#
# Tested: tests/kernels/sm80/test_stage_order.py, tests/kernels/parts/test_mma_loop.py

CHUNK = 32
"""Number of a warp's tokens that are multiplied at a time (a chunk). Of three combinations of CHUNK and AHEAD, 32 with 4 was
the fastest (H200, 2026-11-23, int4, M 1024, 8192 x 8192, 8 x 1 warps of 128 tokens)."""

AHEAD = 4
"""Largest number of x chunks that are read ahead of their multiplication. They take as many registers as x of 128 tokens for
one k16 step."""

STEPS = 4
"""Number of matrix instructions along K (k16 steps) in a stage."""


@dataclass(frozen=True)
class StageOrder:
    """The order of work for warps of `tokens` tokens and `row_blocks` row blocks. A position is the index of a chunk within a
    stage. `copies` are all copies of a thread for one stage."""

    tokens: int
    row_blocks: int
    copies: tuple[StageCopy, ...]

    @property
    def chunks(self) -> int:
        return max(self.tokens // CHUNK, 1)

    @property
    def positions(self) -> int:
        return STEPS * self.chunks

    @property
    def ahead(self) -> int:
        """Number of x chunks that are read ahead of their multiplication. It is limited to the chunks of one step, so that the
        wait for the next stage, which precedes the first read of its x, lies within the last step. Dequantization of the next
        stage starts after that wait."""
        return min(AHEAD, self.chunks)

    def next_step(self, position: int) -> int:
        """Index of the step after the step of a position; after a stage's last step, step 0 of the next stage."""
        return (position // self.chunks + 1) % STEPS

    @property
    def copy_count(self) -> int:
        return len(self.copies)

    def copy(self, i: int) -> StageCopy:
        """Returns the i-th copy, since a kernel cannot index a tuple of constants."""
        return self.copies[i]

    def first_copy(self, position: int) -> int:
        """Index of the first copy that starts at a position. All copies start before the wait for the next stage. The last two
        start together, since ptxas inserts three idle reads before a single copy."""
        room = self.positions - self.ahead
        return position * len(self.copies) // room if position < room - 1 else len(self.copies)

    def first_row_block(self, position: int) -> int:
        """Index of the first row block that is dequantized for the next step at a position. In the last step, where the next
        step belongs to the next stage, this begins after the wait for that stage."""
        step, chunk = divmod(position, self.chunks)
        start = self.chunks - self.ahead if step == STEPS - 1 else 0
        return max(chunk - start, 0) * self.row_blocks // (self.chunks - start)

    def end_row_block(self, position: int) -> int:
        """Index after the last row block that is dequantized at a position."""
        return self.row_blocks if (position + 1) % self.chunks == 0 else self.first_row_block(position + 1)


STAGE_K = 64

STEP_REGISTERS = gl.constexpr(4)
"""Number of registers of operand A of one row block and step."""


class MmaBlock(Warps):
    """A block that multiplies a tile: `tokens` tokens by warps_n * row_blocks m16 row blocks, `stages` stages of 64 columns of
    K for each of the warps_k slices of K. `gathered`: True if rows of x are at arbitrary addresses."""

    dequantizer: Dequantizer
    tokens: int
    row_blocks: int
    warps_n: int
    warps_m: int
    warps_k: int
    stages: int
    epilogue: Epilogue
    gathered = False

    @property
    def rows(self) -> int:
        return 16 * self.row_blocks * self.warps_n

    @property
    def channels(self) -> int:
        """Number of channels of y in a tile."""
        return self.rows if self.epilogue.gate == "none" else self.rows // 2

    @property
    def columns(self) -> int:
        return self.tokens

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_m * self.warps_k

    @property
    def stage(self) -> TileStage:
        return TileStage(self.dequantizer, self.tokens, self.row_blocks * self.warps_n, self.stages, self.warps, self.warps_k)

    @property
    def regions(self) -> Regions:
        return Regions((("stages", self.stage.bytes),))

    @property
    def stage_k(self) -> int:
        return STAGE_K * self.warps_k

    @property
    def block_steps(self) -> int:
        """Number of k16 steps whose weights are dequantized together."""
        return self.dequantizer.block_registers // 4

    @property
    def order(self) -> StageOrder:
        return StageOrder(self.tokens // self.warps_m, self.row_blocks, self.stage.copies)

    @property
    def chunk_columns(self) -> int:
        """Number of columns of a chunk: its tokens of all warps, once for each slice of K."""
        return self.tokens * self.warps_k // self.order.chunks

    # ---- layouts

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([2, 0], [self.warps_n, self.warps_m * self.warps_k], [16, 8])

    @property
    def operand_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.accumulator, 2)

    @property
    def x_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(1, self.accumulator, 2)

    @property
    def lanes_layout(self) -> gl.DistributedLinearLayout:
        """One element for each lane of a column of warps; all columns have equal elements."""
        return gl.DistributedLinearLayout([], [[1 << i] for i in range(5)], self._warp_bases(1), [], [32 * self.warps_n])

    @property
    def registers_layout(self) -> gl.DistributedLinearLayout:
        """Two elements for each lane of a column of warps; all columns have equal elements."""
        lane, warp = [[1 << i, 0] for i in range(5)], self._warp_bases(2)
        return gl.DistributedLinearLayout([[0, 1]], lane, warp, [], [32 * self.warps_n, 2])

    def _warp_bases(self, rank: int) -> list[list[int]]:
        more = [0] * (rank - 1)
        of_tokens = [[0, *more] for _ in range((self.warps_m * self.warps_k).bit_length() - 1)]
        return of_tokens + [[32 << i, *more] for i in range(self.warps_n.bit_length() - 1)]

    @property
    def store_layout(self) -> gl.BlockedLayout:
        """[channels, tokens] with 8 channels per thread; neighbouring lanes have neighbouring channels."""
        lanes = min(32, self.channels // 8)
        return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, self.warps], [0, 1])


@aggregate
class StageReader:
    """A lane's coordinates for reading weights: address of its slice's part of shared memory, its warp's first row block, its
    lane number."""

    start: gl.tensor
    row_block: gl.tensor
    lane: gl.tensor


@gluon.jit
def allocate_stages(C: gl.constexpr):
    """Allocates shared memory for all stages. Returns their x as blocks [chunk_columns, 16], one for each chunk and k16
    step."""
    shape: gl.constexpr = [C.stages * C.order.positions, C.chunk_columns, 16]
    return view(allocate(C), C.regions, "stages", C.dequantizer.operand_type, shape, C.stage.x_layout)


@gluon.jit
def first_weights(w, scale, first_row_block, thread, w_stride, scale_stride, C: gl.constexpr):
    """Returns the addresses of a thread's first vectors of codes, one per plane, and of scales. Strides between row blocks are
    in bytes."""
    S: gl.constexpr = C.stage
    PLANES: gl.constexpr = len(S.planes)
    codes = ()
    for plane in gl.static_range(PLANES):
        codes = codes + (first_vector(w, first_row_block, thread, w_stride // 4, ptx(S.vectors, plane), 4),)
    scales = codes[0]
    if S.scale_bytes > 0:
        scales = first_vector(scale, first_row_block, thread, scale_stride // 2, S.scale_vectors, 8)
    return codes, scales


@gluon.jit
def reader_of_stages(C: gl.constexpr):
    """Returns the StageReader of a lane."""
    each = gl.arange(0, 32 * C.warps_n, C.lanes_layout)
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32)
    if C.warps_k > 1:  # the layout assumes the same elements in all columns of warps, but their slices of K differ
        own = asm("{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5; }", "=r", [], gl.int32) % C.warps_k
        start += own * C.stage.slice_bytes
    return StageReader(each * 0 + start, each // 32, each & 31)


@gluon.jit
def wait_for_stage(C: gl.constexpr):
    """Waits in all warps for the oldest stage in flight. The stage that was read before it may then be overwritten."""
    run(ptx("cp.async.wait_group {};\n mov.b32 $0, 0;".format, C.stages - 2), "=r", [])
    barrier()


@gluon.jit
def prepare_scales(read, group: gl.constexpr, C: gl.constexpr):
    """Prepares a group's scales and zeros for dequantization. `read` are the words read for one row block."""
    D: gl.constexpr = C.dequantizer
    first: gl.constexpr = D.bits + group * D.group_words
    return gl.inline_asm_elementwise(
        D.prepare_asm, D.prepare_constraints, read[first : first + D.group_words], dtype=D.prepared_types, is_pure=True, pack=1
    )


@gluon.jit
def read_weights(reader, slot, C: gl.constexpr):
    """Reads the words of codes of a stage, row block by row block, and prepares its scales."""
    S: gl.constexpr = C.stage
    BITS: gl.constexpr = C.dequantizer.bits
    ROW_BLOCKS: gl.constexpr = C.row_blocks
    GROUPS: gl.constexpr = C.dequantizer.groups
    words = ()
    prepared = ()
    at = reader.start + S.w_start + slot * S.w_bytes
    for row_block in gl.static_range(ROW_BLOCKS):
        read = asm(ptx(S.read, row_block * C.warps_n), S.read_constraints, [at, reader.row_block, reader.lane], S.read_types)
        words = words + read[0:BITS]
        for group in gl.static_range(GROUPS):
            prepared = prepared + prepare_scales(read, group, C)
    return words, prepared


@gluon.jit
def dequantize_row_block(words, prepared, row_block: gl.constexpr, block: gl.constexpr, C: gl.constexpr):
    """Returns the registers of operand A of a row block and dequantization block."""
    D: gl.constexpr = C.dequantizer
    first: gl.constexpr = row_block * D.bits + block * D.block_words
    inputs = words[first : first + D.block_words]
    if D.group > 0:
        low: gl.constexpr = (row_block * D.groups + ptx(D.first_group, block)) * D.prepared
        high: gl.constexpr = (row_block * D.groups + ptx(D.end_group, block)) * D.prepared
        inputs = inputs + prepared[low:high]
    return gl.inline_asm_elementwise(
        ptx(D.block_asm, block), ptx(D.block_constraints, block), inputs, dtype=D.block_types, is_pure=True, pack=1
    )


@gluon.jit
def join(registers, count: gl.constexpr, C: gl.constexpr):
    """Joins `count` tensors [lanes, 2] to [lanes, 2 * count], in order."""
    if count == 1:
        return registers[0]
    else:
        low = join(registers[0 : count // 2], count // 2, C)
        high = join(registers[count // 2 :], count // 2, C)
        return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [32 * C.warps_n, 2 * count])


@gluon.jit
def operand_of(registers, step: gl.constexpr, C: gl.constexpr):
    """Returns operand A [C.rows, 16] of one k16 step of a dequantization block; this takes no instruction."""
    LAYOUT: gl.constexpr = C.registers_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    ROW_BLOCKS: gl.constexpr = C.row_blocks
    parts = ()
    for row_block in gl.static_range(ROW_BLOCKS):
        for i in gl.static_range(STEP_REGISTERS):
            register = registers[row_block * C.dequantizer.block_registers + step * STEP_REGISTERS + i]
            column = gl.expand_dims(gl.convert_layout(register, ROWS, assert_trivial=True), 1)
            whole = gl.convert_layout(column.broadcast_to([32 * C.warps_n, 2]), LAYOUT, assert_trivial=True)
            part = gl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r,r", [whole], dtype=C.dequantizer.operand_type, is_pure=True, pack=2
            )  # fmt: skip
            parts = parts + (part,)
    # [warp, lane group, lane of the group, row block, k half, row half, element] -> rows, k
    joined = gl.reshape(join(parts, ROW_BLOCKS * STEP_REGISTERS, C), [C.warps_n, 8, 4, ROW_BLOCKS, 2, 2, 2])
    matrix = gl.reshape(gl.permute(joined, [3, 0, 5, 1, 4, 2, 6]), [C.rows, 16])
    return gl.convert_layout(matrix, C.operand_layout, assert_trivial=True)


@gluon.jit
def read_x(x, block, C: gl.constexpr):
    """Reads operand B [16, columns] of a chunk as whole registers: of the two elements of a register, the first holds all 32
    bits and the second is 0. If the main loop carried halves, they would be split and joined in every iteration, by one
    permutation per register."""
    LAYOUT: gl.constexpr = C.x_layout
    halves = x.index(block).permute([1, 0]).load(LAYOUT)
    pairs = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $2;", "=r,=r,r", [halves], dtype=gl.int32, is_pure=True, pack=2
    )  # fmt: skip
    k = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    return gl.where((k % 2 == 0)[:, None], pairs, 0)


@gluon.jit
def operand_b(registers, C: gl.constexpr):
    """Returns operand B in the layout of the matrix instruction, from the registers of `read_x`."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [registers], dtype=C.dequantizer.operand_type, is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def together(sums, count: gl.constexpr, C: gl.constexpr):
    """Joins the sums of `count` chunks in order to one matrix; this takes no instruction."""
    if count == 1:
        return sums[0]
    else:
        low = together(sums[0 : count // 2], count // 2, C)
        high = together(sums[count // 2 :], count // 2, C)
        both = gl.permute(gl.join(low, high), [0, 2, 1])
        return gl.convert_layout(gl.reshape(both, [C.rows, C.chunk_columns * count]), C.accumulator, assert_trivial=True)


@gluon.jit
def of_slices(sums, C: gl.constexpr):
    """Reduces the slices of K in a fixed order."""
    if C.warps_k == 1:
        return sums
    else:
        apart = gl.reshape(sums, [C.rows, C.tokens // 8, C.warps_k, 8])
        total = gl.reshape(gl.sum(apart, axis=2), [C.rows, C.tokens])
        return gl.convert_layout(total, C.accumulator)


@gluon.jit
def multiply(sums, registers, b, position: gl.constexpr, C: gl.constexpr):
    """Adds the products of a chunk to the sums."""
    CHUNK: gl.constexpr = position % C.order.chunks
    STEP: gl.constexpr = position // C.order.chunks % C.block_steps
    new = mma_v2(operand_of(registers, STEP, C), operand_b(b, C), sums[CHUNK])
    return sums[0:CHUNK] + (new,) + sums[CHUNK + 1 :]


@gluon.jit
def dequantize_ahead(dequantized, words, prepared, position: gl.constexpr, C: gl.constexpr):
    """Dequantizes the row blocks of the next dequantization block that are due at a position; appends their registers to
    `dequantized`."""
    STEP: gl.constexpr = ptx(C.order.next_step, position)
    if STEP % C.block_steps == 0:
        for row_block in gl.static_range(ptx(C.order.first_row_block, position), ptx(C.order.end_row_block, position)):
            dequantized = dequantized + dequantize_row_block(words, prepared, row_block, STEP // C.block_steps, C)
    return dequantized


@gluon.jit
def products(x, reader, source, begin, end, C: gl.constexpr):
    """Returns the sums of one tile over the iterations from `begin` to `end`; each iteration multiplies one stage."""
    STAGES_AHEAD: gl.constexpr = C.stages - 1
    POSITIONS: gl.constexpr = C.order.positions
    AHEAD: gl.constexpr = C.order.ahead
    CHUNKS: gl.constexpr = C.order.chunks
    COPIES: gl.constexpr = C.order.copy_count
    ROW_BLOCKS: gl.constexpr = C.row_blocks
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.chunk_columns
    SUMS: gl.constexpr = C.accumulator
    sums = ()
    for _ in gl.static_range(CHUNKS):
        sums = sums + (gl.zeros((ROWS, COLUMNS), gl.float32, SUMS),)
    for stage in gl.static_range(STAGES_AHEAD):
        for i in gl.static_range(COPIES):
            copy_vector(source, begin + stage, stage, i, C)
        commit()
    wait_for_stage(C)
    words, prepared = read_weights(reader, 0, C)
    registers = ()
    for row_block in gl.static_range(ROW_BLOCKS):
        registers = registers + dequantize_row_block(words, prepared, row_block, 0, C)
    b = ()
    for position in gl.static_range(AHEAD):
        b = b + (read_x(x, position, C),)
    slot = 0
    for iteration in range(begin, end):
        filled = gl.where(slot == 0, C.stages, slot) - 1
        following = gl.where(slot + 1 == C.stages, 0, slot + 1)
        dequantized = ()
        for position in gl.static_range(POSITIONS):
            if position + AHEAD == POSITIONS:
                commit()
                wait_for_stage(C)
                words, prepared = read_weights(reader, following, C)
            if position + AHEAD < POSITIONS:
                b = b + (read_x(x, slot * POSITIONS + (position + AHEAD), C),)
            else:
                b = b + (read_x(x, following * POSITIONS + (position + AHEAD - POSITIONS), C),)
            for i in gl.static_range(ptx(C.order.first_copy, position), ptx(C.order.first_copy, position + 1)):
                copy_vector(source, iteration + STAGES_AHEAD, filled, i, C)
            dequantized = dequantize_ahead(dequantized, words, prepared, position, C)
            sums = multiply(sums, registers, b[0], position, C)
            b = b[1:]
            if (position + 1) % (CHUNKS * C.block_steps) == 0:
                registers = dequantized
                dequantized = ()
        slot = following
    # The last prefetches lie beyond K and copy zeros. Wait for them: y is transposed in the shared memory that they write.
    run("cp.async.wait_group 0;\n mov.b32 $0, 0;", "=r", [])
    barrier()
    return of_slices(together(sums, CHUNKS, C), C)
