# ruff: noqa
"""y[M, N] = x[M, K] . dequant(w)[N, K]^T for many tokens, any code width, mma.sync and cp.async: sm_80 and newer.

Computes y^T = w x^T: decoded weights are operand A of mma.sync m16n8k16, from registers; x is operand B, by ldmatrix.
Reads   x fp16 or bf16, rows of 16-byte pieces; w in FragmentOrder, or in ColumnMajorTileInterleave; scales in fragment order
Grid    tiles of rows x tokens, times splits of K; neighbours in groups of tokens, so that a wave shares x and w in L2
Warps   warps_n x warps_m: each has `strips` strips of 16 rows and a share of the tokens; warps of a row decode the same codes.
        With warps_k > 1 as many share K: x of their slices is columns of one matrix, 8 tokens of each in turn, since a warp
        multiplies its own columns alone; at the end the columns of a token are added up
Stages  of 64 k for each slice, copied by all threads, `stages` - 1 ahead; one barrier for each (parts/tile_stage.py)
Steps   four of 16 k: while one multiplies, x of the next is read and its weights are decoded, into other registers
Sum     in fp32, K in order; with splits > 1 the block that comes last adds the splits in order, or each adds to what the one
        before has left: same input, same bits
End     y with scales and bias, gated or not, transposed through shared memory, stored in pieces of 16 bytes
Exact   every weight is decoded exactly and rounded once after scaling, as a dequantized model's would be
Source  mma.m16n8k16 and ldmatrix: PTX ISA; the order of copies, barrier and products: CUTLASS 2.x; measurements: docs/log.md
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from base_tile_stage import TileStage
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.mixed_gemm import GemmShape, MmaTile
from lowbit.kernels.parts.decode import Decode
from lowbit.kernels.parts.end import End, Gate
from lowbit.kernels.parts.gluon import Tuple, aggregate, asm, barrier, gl, gluon, half_type, mma_v2, ptx, run, source_digest
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.line_stage import LineDecode, LineStage, first_line_piece
from lowbit.kernels.parts.schedule import SplitK, Tiles, iterations_of, meet, meet_in_turn, tile_at
from lowbit.kernels.parts.smem import Regions, allocate, view
from lowbit.kernels.parts.tile_end import Applied, gated
from lowbit.pack.weight import WeightForm

STAGE_K = 64

MOST_REGISTERS = 255
"""Of a thread."""

REGISTERS_PER_SM = 65536

STEPS = gl.constexpr(4)
"""Matrix instructions along K in a stage."""

STEP_REGISTERS = gl.constexpr(4)
"""Registers of operand A of one."""


@dataclass(frozen=True)
class MmaGemm:
    """All that is fixed when the kernel is compiled. Of two equal ones, results are equal to the last bit."""

    decode: Decode
    tokens: int
    strips: int
    warps_n: int
    warps_m: int
    warps_k: int
    stages: int
    splits: int
    token_group: int
    in_turn: bool
    end: End
    whole: bool
    digest: str = source_digest()

    last_is_full = False

    @property
    def rows(self) -> int:
        return 16 * self.strips * self.warps_n

    @property
    def channels(self) -> int:
        """Of y, in a tile."""
        return self.rows if self.end.gate == "none" else self.rows // 2

    @property
    def columns(self) -> int:
        return self.tokens

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_m * self.warps_k

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stage(self) -> TileStage:
        kind = LineStage if self.lines else TileStage
        return kind(self.decode, self.tokens, self.strips * self.warps_n, self.stages, self.warps, self.warps_k)

    @property
    def lines(self) -> bool:
        """Whether weights come in lines of several channels."""
        return isinstance(self.decode, LineDecode)

    @property
    def regions(self) -> Regions:
        return Regions((("stages", self.stage.bytes),))

    @property
    def stage_k(self) -> int:
        return STAGE_K * self.warps_k

    @property
    def turn_steps(self) -> int:
        """Steps whose weights are decoded together."""
        return self.decode.turn_registers // 4

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
    def threads_layout(self) -> gl.BlockedLayout:
        """One element per thread."""
        return gl.BlockedLayout([1], [32], [self.warps], [0])

    @property
    def lanes_layout(self) -> gl.DistributedLinearLayout:
        """One element for each lane of the warps of a column, the same in all columns."""
        return gl.DistributedLinearLayout([], [[1 << i] for i in range(5)], self._warp_bases(1), [], [32 * self.warps_n])

    @property
    def registers_layout(self) -> gl.DistributedLinearLayout:
        """The same, two elements for each."""
        lane, warp = [[1 << i, 0] for i in range(5)], self._warp_bases(2)
        return gl.DistributedLinearLayout([[0, 1]], lane, warp, [], [32 * self.warps_n, 2])

    def _warp_bases(self, rank: int) -> list[list[int]]:
        more = [0] * (rank - 1)
        of_tokens = [[0, *more] for _ in range((self.warps_m * self.warps_k).bit_length() - 1)]
        return of_tokens + [[32 << i, *more] for i in range(self.warps_n.bit_length() - 1)]

    @property
    def store_layout(self) -> gl.BlockedLayout:
        """[channels, tokens] with 8 channels a thread, neighbouring lanes neighbouring channels."""
        lanes = min(32, self.channels // 8)
        return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, self.warps], [0, 1])


@aggregate
class Source:
    """Where this thread's first pieces of x, codes (one for each plane) and scales lie, bytes from piece to piece or from strip
    to strip; how many tokens and k exist from the piece of x on, how many tiles of 64 k, and the iteration with which the block
    ends."""

    x: gl.tensor
    x_step: gl.tensor
    tokens: gl.tensor
    ks: gl.tensor
    w: Tuple
    w_strip: gl.tensor
    scale: gl.tensor
    scale_strip: gl.tensor
    tiles: gl.tensor
    end: gl.tensor


@aggregate
class Reader:
    """What a lane reads weights by: the start of shared memory, its warp's strip, its number."""

    start: gl.tensor
    strip: gl.tensor
    lane: gl.tensor


@gluon.jit
def x_piece(thread):
    """(token, piece of its 8) that a thread copies first. A warp has 4 tokens, lanes 8 i to 8 i + 7 pieces 2 i and 2 i + 1 of
    each: whole rows of memory, and no bank of shared memory twice."""
    lane = thread % 32
    return thread // 32 * 4 + lane % 8 // 2, lane % 2 + lane // 8 * 2


@gluon.jit
def x_at(token, piece, S: gl.constexpr):
    """Byte of a piece of 8 k of a token within the x of a stage, of its first slice."""
    row = token + token // 8 * (8 * S.slices - 8)
    return piece // 2 * (S.slices * S.tokens * 32) + row * 32 + (piece % 2 ^ token // 4 % 2) * 16


@gluon.jit
def first_piece(base, first_strip, thread, stride, of_strip: gl.constexpr, elements: gl.constexpr):
    """Where a thread's first piece of `elements` lies, of `of_strip` for each strip."""
    strip = first_strip + thread // of_strip
    return base + strip.to(gl.int64) * stride + thread % of_strip * elements


@gluon.jit
def copy_stage(source, iteration, slot, C: gl.constexpr):
    """Starts the copies of a stage; of none beyond the end, as one group all the same."""
    S: gl.constexpr = C.stage
    PLANES: gl.constexpr = len(S.planes)
    thread = gl.arange(0, C.threads, C.threads_layout)
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32)
    there = iteration < source.end
    token, piece = x_piece(thread)
    run(
        S.copy_x, "=r,r,l,l,r,r",
        [start + slot * S.x_bytes + x_at(token, piece, S), source.x + iteration * C.stage_k, source.x_step, source.tokens,
         gl.where(there, source.ks - iteration * C.stage_k, 0)],
    )  # fmt: skip
    slices = (thread >= 0) & there
    if C.warps_k > 1:
        slices = thread * 0 + gl.where(there, source.tiles - iteration * C.warps_k, 0)
    w_at = start + S.w_start + slot * S.w_bytes + thread * 16
    for plane in gl.static_range(PLANES):
        run(
            ptx(S.copy_codes, plane), "=r,r,l,r,r,r",
            [w_at, source.w[plane] + iteration * (S.tile_words * C.warps_k), source.w_strip, thread, slices],
        )  # fmt: skip
    if S.scale_bytes > 0:
        group = iteration * C.stage_k // C.decode.group * (16 * C.decode.group_words)
        run(
            S.copy_scales, "=r,r,l,r,r,r",
            [w_at, source.scale + group, source.scale_strip, thread, slices],
        )  # fmt: skip
    run("cp.async.commit_group;\n mov.b32 $0, 0;", "=r", [])


@gluon.jit
def await_stage(C: gl.constexpr):
    """Until the oldest stage on its way is there, for all warps; the one that was read before may then be filled again."""
    run(ptx("cp.async.wait_group {};\n mov.b32 $0, 0;".format, C.stages - 2), "=r", [])
    barrier()


@gluon.jit
def ready_scales(read, group: gl.constexpr, C: gl.constexpr):
    """What the scales and zeros of a group become, of what was read of a strip."""
    D: gl.constexpr = C.decode
    first: gl.constexpr = D.bits + group * D.group_words
    return gl.inline_asm_elementwise(
        D.ready_asm, D.ready_constraints, read[first : first + D.group_words], dtype=D.ready_types, is_pure=True, pack=1
    )


@gluon.jit
def read_weights(reader, slot, C: gl.constexpr):
    """Words of codes of a stage, strip by strip, and what its scales become."""
    S: gl.constexpr = C.stage
    BITS: gl.constexpr = C.decode.bits
    STRIPS: gl.constexpr = C.strips
    GROUPS: gl.constexpr = C.decode.groups
    words = ()
    ready = ()
    at = reader.start + S.w_start + slot * S.w_bytes
    for strip in gl.static_range(STRIPS):
        read = asm(ptx(S.read, strip * C.warps_n), S.read_constraints, [at, reader.strip, reader.lane], S.read_types)
        words = words + read[0:BITS]
        for group in gl.static_range(GROUPS):
            ready = ready + ready_scales(read, group, C)
    return words, ready


@gluon.jit
def decode_strip(words, ready, strip: gl.constexpr, turn: gl.constexpr, C: gl.constexpr):
    """The registers of operand A of a strip and turn."""
    D: gl.constexpr = C.decode
    first: gl.constexpr = strip * D.bits + turn * D.turn_words
    inputs = words[first : first + D.turn_words]
    if D.group > 0:
        low: gl.constexpr = (strip * D.groups + ptx(D.first_group, turn)) * D.ready
        high: gl.constexpr = (strip * D.groups + ptx(D.end_group, turn)) * D.ready
        inputs = inputs + ready[low:high]
    return gl.inline_asm_elementwise(
        ptx(D.turn_asm, turn), ptx(D.turn_constraints, turn), inputs, dtype=D.turn_types, is_pure=True, pack=1
    )


@gluon.jit
def decode_turn(words, ready, turn: gl.constexpr, C: gl.constexpr):
    """The same of all strips of a warp."""
    STRIPS: gl.constexpr = C.strips
    registers = ()
    for strip in gl.static_range(STRIPS):
        registers = registers + decode_strip(words, ready, strip, turn, C)
    return registers


@gluon.jit
def join(registers, count: gl.constexpr, C: gl.constexpr):
    """`count` tensors [lanes, 2] -> [lanes, 2 * count], in order."""
    if count == 1:
        return registers[0]
    else:
        low = join(registers[0 : count // 2], count // 2, C)
        high = join(registers[count // 2 :], count // 2, C)
        return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [32 * C.warps_n, 2 * count])


@gluon.jit
def operand_of(registers, step: gl.constexpr, C: gl.constexpr):
    """Operand A of a step of a turn, C.rows x 16 k; this takes no instruction."""
    LAYOUT: gl.constexpr = C.registers_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    STRIPS: gl.constexpr = C.strips
    parts = ()
    for strip in gl.static_range(STRIPS):
        for i in gl.static_range(STEP_REGISTERS):
            register = registers[strip * C.decode.turn_registers + step * STEP_REGISTERS + i]
            column = gl.expand_dims(gl.convert_layout(register, ROWS, assert_trivial=True), 1)
            whole = gl.convert_layout(column.broadcast_to([32 * C.warps_n, 2]), LAYOUT, assert_trivial=True)
            part = gl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r,r", [whole], dtype=C.decode.operand_type, is_pure=True, pack=2
            )  # fmt: skip
            parts = parts + (part,)
    # [warp, lane group, lane of the group, strip, k half, row half, element] -> rows, k
    joined = gl.reshape(join(parts, STRIPS * STEP_REGISTERS, C), [C.warps_n, 8, 4, STRIPS, 2, 2, 2])
    matrix = gl.reshape(gl.permute(joined, [3, 0, 5, 1, 4, 2, 6]), [C.rows, 16])
    return gl.convert_layout(matrix, C.operand_layout, assert_trivial=True)


@gluon.jit
def read_x(x, block, C: gl.constexpr):
    """Operand B of a step, 16 k x C.tokens, as whole registers: each in the first of its two elements, 0 in the other. Halves
    that the main loop carries are taken apart and put together again in every iteration, a permutation each."""
    LAYOUT: gl.constexpr = C.x_layout
    halves = x.index(block).permute([1, 0]).load(LAYOUT)
    pairs = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $2;", "=r,=r,r", [halves], dtype=gl.int32, is_pure=True, pack=2
    )  # fmt: skip
    k = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    return gl.where((k % 2 == 0)[:, None], pairs, 0)


@gluon.jit
def operand_b(registers, C: gl.constexpr):
    """The same as the instruction takes it."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [registers], dtype=C.decode.operand_type, is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def of_slices(sums, C: gl.constexpr):
    """The sums of all slices of K, in a fixed order."""
    if C.warps_k == 1:
        return sums
    else:
        apart = gl.reshape(sums, [C.rows, C.tokens // 8, C.warps_k, 8])
        total = gl.reshape(gl.sum(apart, axis=2), [C.rows, C.tokens])
        return gl.convert_layout(total, C.accumulator)


@gluon.jit
def products(x, reader, source, begin, end, C: gl.constexpr):
    """The sums of one tile over the iterations from `begin` to `end`, a stage each."""
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.tokens * C.warps_k
    AHEAD: gl.constexpr = C.stages - 1
    TURN: gl.constexpr = C.turn_steps
    SUMS: gl.constexpr = C.accumulator
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS)
    for ahead in gl.static_range(AHEAD):
        copy_stage(source, begin + ahead, ahead, C)
    await_stage(C)
    words, ready = read_weights(reader, 0, C)
    registers = decode_turn(words, ready, 0, C)
    b = read_x(x, 0, C)
    slot = 0
    for iteration in range(begin, end):
        filled = gl.where(slot == 0, C.stages, slot) - 1
        following = gl.where(slot + 1 == C.stages, 0, slot + 1)
        copy_stage(source, iteration + AHEAD, filled, C)
        for step in gl.static_range(STEPS):
            if step + 1 < STEPS:
                next_b = read_x(x, slot * STEPS + (step + 1), C)
                if (step + 1) % TURN == 0:
                    next_registers = decode_turn(words, ready, (step + 1) // TURN, C)
                else:
                    next_registers = registers
            else:
                await_stage(C)
                next_b = read_x(x, following * STEPS, C)
                words, ready = read_weights(reader, following, C)
                next_registers = decode_turn(words, ready, 0, C)
            acc = mma_v2(operand_of(registers, step % TURN, C), operand_b(b, C), acc)
            registers = next_registers
            b = next_b
        slot = following
    # Zeros of x beyond the end may still be on their way to where y is transposed.
    run("cp.async.wait_group 0;\n mov.b32 $0, 0;", "=r", [])
    barrier()
    return of_slices(acc, C)


@gluon.jit
def finish_tile(y, acc, applied, first_row, first_token, M, N, columns, C: gl.constexpr):
    """Scales, bias and gate, one rounding, and y [M, columns] to memory: 8 neighbouring channels of a token at a time."""
    SUMS: gl.constexpr = C.accumulator
    STORED: gl.constexpr = C.store_layout
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, SUMS))
    if C.end.channel_scale:
        scale = gl.load(applied.channel_scale + rows, mask=rows < N, other=0.0).to(gl.float32)
        acc = acc * (scale * applied.factor)[:, None]  # the factor is a power of two
    else:
        acc = acc * applied.factor
    if C.end.bias:
        acc = acc + gl.load(applied.bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    if C.end.gate != "none":
        acc = gated(acc, C)
        first_row = first_row // 2
    result = gl.convert_layout(acc.to(C.decode.operand_type), STORED)
    channels = first_row + gl.arange(0, C.channels, gl.SliceLayout(1, STORED))
    tokens = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, STORED))
    at = y + tokens.to(gl.int64)[None, :] * columns + channels[:, None]
    gl.store(at, result, mask=(channels < columns)[:, None] & (tokens < M)[None, :])


SIZES = ["M", "N", "K", "columns", "x_stride", "token_tiles", "row_tiles", "iterations", "strips", "w_strip", "scale_strip"]


@gluon.jit(do_not_specialize=SIZES)
def mma_gemm(
    y, x, w, scale, channel_scale, bias, partial, arrived, M, N, K, columns, x_stride, token_tiles, row_tiles, iterations,
    strips, w_strip, scale_strip, factor, C: gl.constexpr,
):  # fmt: skip
    """One block: a tile, or its share of K. The last tile of rows begins where it is full: rows of two are stored twice, with
    the same bits. `columns` of y are pieces of 8 where C.whole."""
    S: gl.constexpr = C.stage
    PLANES: gl.constexpr = len(S.planes)
    if C.whole:
        columns = columns * 8
    shared = allocate(C)
    x_shared = view(
        shared, C.regions, "stages", C.decode.operand_type, [C.stages * STEPS, C.tokens * C.warps_k, 16], S.x_layout
    )
    tiles = Tiles(token_tiles, row_tiles, iterations, M)
    token_tile, row_tile, split = tile_at(gl.program_id(0), tiles, C)
    begin, end = iterations_of(split, tiles, C)
    first_strip = gl.minimum(row_tile * (C.rows // 16), strips - C.rows // 16)
    first_token = token_tile * C.tokens

    thread = gl.arange(0, C.threads, C.threads_layout)
    token, piece = x_piece(thread)
    token += first_token
    k = piece * 8
    stride = thread.to(gl.int64) * 0 + x_stride
    codes = ()
    for plane in gl.static_range(PLANES):
        if C.lines:
            codes = codes + (first_line_piece(w, first_strip, thread, w_strip // 4, S),)
        else:
            codes = codes + (first_piece(w, first_strip, thread, w_strip // 4, ptx(S.pieces, plane), 4),)
    scales = codes[0]
    if S.scale_bytes > 0:
        scales = first_piece(scale, first_strip, thread, scale_strip // 2, S.scale_pieces, 8)
    source = Source(
        x + (token * stride + k), stride * (8 * C.warps), M - token, K - k, codes, thread * 0 + w_strip, scales,
        thread * 0 + scale_strip, (K + 63) // 64, end,
    )  # fmt: skip
    each = gl.arange(0, 32 * C.warps_n, C.lanes_layout)
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32)
    if C.warps_k > 1:  # what layouts take to be the same in all columns of warps differs from slice to slice
        own = asm("{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5; }", "=r", [], gl.int32) % C.warps_k
        start += own * S.slice_bytes
    reader = Reader(each * 0 + start, each // 32, each & 31)
    acc = products(x_shared, reader, source, begin, end, C)
    applied = Applied(channel_scale, bias, factor)
    if C.splits == 1:
        finish_tile(y, acc, applied, first_strip * 16, first_token, M, N, columns, C)
    else:
        at, tile = SplitK(partial, arrived), token_tile * row_tiles + row_tile
        if C.in_turn:
            last, total = meet_in_turn(at, acc, tile, split, C)
        else:
            last, total = meet(at, acc, tile, split, C)
        if last:
            finish_tile(y, total, applied, first_strip * 16, first_token, M, N, columns, C)


class MmaPlan:
    """All of a product that does not depend on the tensors' contents: made once for a shape, called many times."""

    def __init__(
        self, shape: GemmShape, tile: MmaTile, form: WeightForm, dtype: torch.dtype, bias: bool, gate: Gate = "none"
    ) -> None:
        self.shape, self.tile = shape, tile
        self.columns = shape.n if gate == "none" else shape.n // 2
        end = End(form.channel_scale, bias, gate=gate)
        self.config = _config(tile, form, half_type(dtype), end, self.columns % 8 == 0)
        self.tiles = (-(-shape.m // tile.tokens), -(-shape.strips // (tile.rows // 16)))
        grid = (self.tiles[0] * self.tiles[1] * tile.splits, 1, 1)
        # Left to itself ptxas spills some in small tiles, so that more blocks might share an SM.
        registers = min(MOST_REGISTERS, REGISTERS_PER_SM // self.config.threads)
        self.launch = Launcher(mma_gemm, grid, self.config.warps, registers=registers)
        self.factor = self.config.decode.epilogue_factor

    @property
    def workspace(self) -> tuple[int, int]:
        """Elements of the two workspaces, float32 sums and int32 counters (which are zero before and after)."""
        if self.tile.splits == 1:
            return 0, 0
        tiles = self.tiles[0] * self.tiles[1]
        sums = 1 if self.tile.in_turn else self.tile.splits
        return tiles * sums * self.tile.rows * self.tile.tokens, tiles

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        sums: Tensor, arrived: Tensor,
    ) -> Tensor:  # fmt: skip
        """y [M, N], or [M, N / 2] behind a gate, of x [M, K], whose rows start at multiples of 16 bytes, with zeros up to the
        next one behind K; all tensors on the current device."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        y = torch.empty((m, self.columns), dtype=x.dtype, device=x.device)
        self.launch(
            y, x, codes, codes if scale is None else scale, channel_scale, bias, sums, arrived, m, n, k,
            self.columns // 8 if self.config.whole else self.columns, x.stride(0), *self.tiles,
            self.shape.steps(self.config.stage_k), self.shape.strips, self.shape.steps(STAGE_K) * 128 * self.shape.bits,
            0 if scale is None else 2 * scale.stride(0), self.factor, self.config,
        )  # fmt: skip
        return y


@functools.lru_cache(maxsize=1024)
def _config(tile: MmaTile, form: WeightForm, dtype: HalfType, end: End, whole: bool) -> MmaGemm:
    kind = LineDecode if form.interleaved else Decode
    decode = kind(form.format, dtype, form.group, form.zero, form.scale_dtype, form.subnormal)
    return MmaGemm(
        decode, tile.tokens, tile.strips, tile.warps_n, tile.warps_m, tile.warps_k, tile.stages, tile.splits, tile.token_group,
        tile.in_turn, end, whole,
    )  # fmt: skip
