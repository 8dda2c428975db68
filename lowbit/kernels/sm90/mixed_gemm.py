"""y[M, N] = x[M, K] . dequant(w)[N, K]^T for many tokens, any code width, wgmma and TMA: sm_90a.

Computes y^T = w x^T: decoded weights are the register operand A of wgmma, 64 rows for each warpgroup; x is operand B.
Reads   x by TMA in swizzled tiles of tokens x 64; w in FragmentOrder by TMA, 64 rows x 64 k a warpgroup and stage
Roles   load: 1 warp; math: 2 or 4 warpgroups: wait, decode, scale, wgmma with two steps in flight, store by TMA
Ring    `stages` of x and w, in one allocation with their barriers (parts/stages.py); warps run free of one another
Grid    persistent, one block per SM; tiles in groups of tokens so that a wave shares x and w in L2
Sum     in fp32, K in order; with splits > 1 the block that comes last adds the splits in order: same input, same bits
Exact   every weight is decoded exactly and rounded once after scaling, as a dequantized model's would be
Source  wgmma fragments: PTX ISA; the shape of the pipeline and what was measured: docs/log.md
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit.hardware.fields import WORD_GROUPS
from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.mixed_gemm import GemmShape, WgmmaTile
from lowbit.kernels.parts.decode import REGISTERS, Decode
from lowbit.kernels.parts.gluon import (
    CompiledKernel,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    half_type,
    mbarrier,
    part,
    ptx,
    source_digest,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.stages import StageBarriers
from lowbit.pack.weight import WeightForm

TILE_K = gl.constexpr(64)
OPERAND_REGISTERS = gl.constexpr(REGISTERS)
UNIT = 1024
"""Bytes; parts of shared memory start at multiples of it, which swizzled tiles need."""

UNIT_WORDS = gl.constexpr(UNIT // 4)

PREFETCH_TURNS = gl.constexpr(6)
"""Turns of k by which scales are brought into the L2 before they are loaded: more than the latency of memory."""


@dataclass(frozen=True)
class WgmmaGemm:
    """All that is fixed when the kernel is compiled. Of two equal ones, results are equal to the last bit.

    A tile is `tokens` x 64 * warpgroups rows of w; `stages` (of 64 k each) is even, and K counts as if it were a multiple of
    128.
    """

    decode: Decode
    tokens: int
    warpgroups: int
    stages: int
    splits: int
    token_group: int
    channel_scale: bool
    bias: bool
    store_by_tma: bool
    digest: str = source_digest()

    @property
    def rows(self) -> int:
        """Rows of w of a tile."""
        return 64 * self.warpgroups

    @property
    def warps(self) -> int:
        """Warps that multiply; each holds 16 rows of w."""
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def planes(self) -> int:
        """Groups of words in which the codes of a tile are loaded; 8-bit codes have two of the same kind, one load."""
        return 1 if self.decode.bits == 8 else len(WORD_GROUPS[self.decode.bits])

    def plane_words(self, plane: int) -> int:
        """Words per lane and tile of a plane."""
        return 8 if self.decode.bits == 8 else WORD_GROUPS[self.decode.bits][plane]

    def plane_start(self, plane: int) -> int:
        """Where a plane starts within the 32 * bits words of a tile."""
        return 32 * sum(self.plane_words(before) for before in range(plane))

    @property
    def stage_bytes(self) -> int:
        return self.rows * 8 * self.decode.bits + self.tokens * 128

    def w_unit(self, plane: int) -> int:
        """Where the words of a plane start in shared memory, in units; x is at 0."""
        before = (self.stages * self.rows * 8 * self.plane_words(p) for p in range(plane))
        return self.stages * self.tokens * 128 // UNIT + sum(-(-size // UNIT) for size in before)

    @property
    def y_unit(self) -> int:
        return self.w_unit(self.planes)

    @property
    def barrier_unit(self) -> int:
        return self.y_unit + (self.rows * self.tokens * 2 // UNIT if self.store_by_tma else 0)

    @property
    def barriers(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit, self.stages, self.warps)

    @property
    def hold(self) -> str:
        """Stores of the registers $1 to $16 that never happen, $17 being at least 0; see `finish_step`."""
        quads = [", ".join(f"${1 + 4 * i + j}" for j in range(4)) for i in range(REGISTERS // 4)]
        stores = [f"@p st.shared.v4.b32 [at+{16 * i}], {{{quad}}};" for i, quad in enumerate(quads)]
        return (
            "{ .reg .pred p; .reg .b32 at; mov.u32 at, global_smem; setp.eq.s32 p, $17, -1;\n"
            + "\n".join(stores)
            + "\nmov.b32 $0, 0; }"
        )

    @property
    def half(self) -> gl.dtype:
        return gl.float16 if self.decode.dtype == "fp16" else gl.bfloat16

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4 * self.warpgroups, 1], [16, self.tokens, 16])

    @property
    def operand(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.accumulator, 2)

    def words_layout(self, plane: int) -> gl.DistributedLinearLayout:
        """Words [strips, 32 lanes * words]: a warp for each strip, up to four neighbouring words in one load."""
        words = self.plane_words(plane)
        vector = min(words, 4)
        register = [[0, 1 << i] for i in range(vector.bit_length() - 1)]
        lane = [[0, vector << i] for i in range(5)]
        if words == 8:
            register.append([0, 128])
        warp = [[1 << i, 0] for i in range(self.warps.bit_length() - 1)]
        return gl.DistributedLinearLayout(register, lane, warp, [], [self.warps, 32 * words])

    @property
    def threads_layout(self) -> gl.BlockedLayout:
        """One element per thread."""
        return gl.BlockedLayout([1], [32], [self.warps], [0])

    @property
    def pairs_layout(self) -> gl.BlockedLayout:
        """[threads, 2]: two elements per thread."""
        return gl.BlockedLayout([1, 2], [32, 1], [self.warps, 1], [1, 0])


@gluon.jit
def tile_at(index, token_tiles, row_tiles, C: gl.constexpr):
    """(tile of tokens, tile of rows, split) of the index-th tile: all rows for a group of tokens, then the next group."""
    split = index % C.splits
    index = index // C.splits
    group = index // (C.token_group * row_tiles)
    first = group * C.token_group
    size = gl.minimum(token_tiles - first, C.token_group)
    inside = index % (C.token_group * row_tiles)
    return first + inside % size, inside // size, split


@gluon.jit
def load(read, C: gl.constexpr):
    """The warp that keeps the ring full."""
    w_descs, x_desc, w_ring, x_ring, barriers, token_tiles, row_tiles, turns = read
    PLANES: gl.constexpr = C.planes
    # The kernel after this one may start now, and this one has to wait until the kernel before, which may have made x, is
    # through. Math needs no wait of its own: it does nothing before x is there.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents;\n griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), token_tiles * row_tiles * C.splits, gl.num_programs(0)):
        token_tile, row_tile, split = tile_at(index, token_tiles, row_tiles, C)
        for k in range(turns * split // C.splits * 2, turns * (split + 1) // C.splits * 2):
            full = barriers.index(stage)
            mbarrier.wait(barriers.index(C.stages + stage), phase)
            mbarrier.expect(full, C.stage_bytes)
            for plane in gl.static_range(PLANES):
                column = k * (32 * C.decode.bits) + ptx(C.plane_start, plane)
                tma_load(w_descs[plane], [row_tile * C.warps, column], full, w_ring[plane].index(stage))
            tma_load(x_desc, [token_tile * C.tokens, k * TILE_K], full, x_ring.index(stage))
            stage = gl.where(stage + 1 == C.stages, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def words_of(plane, C: gl.constexpr, p: gl.constexpr):
    """The words of a plane [strips, 32 lanes * words] as one tensor per word, one element per thread."""
    WORDS: gl.constexpr = ptx(C.plane_words, p)
    if WORDS == 8:  # two vectors of 4 words
        plane = gl.permute(gl.reshape(plane, [C.warps, 2, 32, 4]), [0, 2, 1, 3])
    return split_words(gl.reshape(plane, [C.threads, WORDS]), WORDS, C)


@gluon.jit
def split_words(words, count: gl.constexpr, C: gl.constexpr):
    """[threads, count] -> count tensors [threads], in order."""
    if count == 1:
        return (gl.convert_layout(gl.reshape(words, [C.threads]), C.threads_layout, assert_trivial=True),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(words, [C.threads, 2, count // 2]), [0, 2, 1]))
        return split_words(low, count // 2, C) + split_words(high, count // 2, C)


@gluon.jit
def join_pairs(pairs, count: gl.constexpr, C: gl.constexpr):
    """`count` tensors [threads, 2] -> [threads, 2 * count], in order."""
    if count == 1:
        return pairs[0]
    else:
        low = join_pairs(pairs[0 : count // 2], count // 2, C)
        high = join_pairs(pairs[count // 2 :], count // 2, C)
        return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [C.threads, 2 * count])


@gluon.jit
def read_words(w_ring, stage, phase, there, C: gl.constexpr):
    """The words of a stage as soon as it is there.

    If `there` is False, nothing comes any more: there is no wait, and what is returned is not to be used.
    """
    PLANES: gl.constexpr = C.planes
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(
        C.barriers.wait, "=r,r,r,r", [thread * 0 + stage, thread * 0 + phase, (thread >= 0) & there],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    words = ()
    for p in gl.static_range(PLANES):
        words = words + words_of(w_ring[p].index(stage).load(ptx(C.words_layout, p)), C, p)
    return words


@gluon.jit
def load_scales(scale, turn, last, C: gl.constexpr):
    """Scale and zero words of this thread's row pair for one turn of k; `scale` points to its strip.

    Beyond the `last` group, where K has ended and x is zero, that group is read again.
    """
    WORDS: gl.constexpr = C.decode.pair_words
    words = ()
    for i in gl.static_range(WORDS):
        group = gl.minimum(turn * (WORDS // C.decode.group_words) + i // C.decode.group_words, last)
        words = words + (gl.load(scale + group * (8 * C.decode.group_words) + i % C.decode.group_words),)
    if WORDS > 0:
        ahead = gl.minimum((turn + PREFETCH_TURNS) * (WORDS // C.decode.group_words), last)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [scale + ahead * (8 * C.decode.group_words)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return words


@gluon.jit
def decode(words, scales, odd: gl.constexpr, C: gl.constexpr):
    """The weights of the even or odd stage of a turn: the registers of operand A."""
    D: gl.constexpr = C.decode
    first: gl.constexpr = D.pair_words - D.scale_words if odd else 0  # with groups of 128 both have the same scale
    own = scales[first : first + D.scale_words]
    return gl.inline_asm_elementwise(D.asm, D.constraints, words + own, dtype=D.types, is_pure=True, pack=1)


@gluon.jit
def operand_a(registers, C: gl.constexpr):
    """The decoded registers of a tile as operand A of wgmma, C.rows x 64 k; this takes no instruction.

    They are kept as whole registers and not as halves because halves are copied where they have two uses: here and in `hold`.
    """
    PAIRS: gl.constexpr = C.pairs_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    pairs = ()
    for i in gl.static_range(OPERAND_REGISTERS):
        column = gl.expand_dims(gl.convert_layout(registers[i], ROWS, assert_trivial=True), 1)
        both = gl.convert_layout(column.broadcast_to([C.threads, 2]), PAIRS, assert_trivial=True)
        pair = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [both], dtype=C.half, is_pure=True, pack=2)
        pairs = pairs + (pair,)
    # [warp, lane group, lane of the group, k step, k half, row half, element] -> rows, k
    parts = gl.reshape(join_pairs(pairs, OPERAND_REGISTERS, C), [C.warps, 8, 4, 4, 2, 2, 2])
    matrix = gl.reshape(gl.permute(parts, [0, 5, 1, 3, 4, 2, 6]), [C.rows, 64])
    return gl.convert_layout(matrix, C.operand, assert_trivial=True)


@gluon.jit
def start(registers, x_ring, acc, stage, C: gl.constexpr):
    """Starts the products of a stage and waits for those of the stage before."""
    acc = warpgroup_mma(operand_a(registers, C), x_ring.index(stage).permute([1, 0]), acc, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc])


@gluon.jit
def finish(registers, stage, exists, C: gl.constexpr):
    """Of a stage whose products are done: it goes back to the loader, and its registers may be written again.

    wgmma reads operand A while it runs, but for ptxas its registers are free once it has been issued: without C.hold, stores
    that never happen, the next stage is decoded into them too early (seen with Triton 3.6: weights of 1024 and more, the
    magic number).
    """
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(
        C.hold, "=r" + ",r" * (OPERAND_REGISTERS + 1), registers + (thread * 0 + stage,),
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gives = ((thread & 31) == 0) & exists
    gl.inline_asm_elementwise(
        C.barriers.give, "=r,r,r", [thread * 0 + stage, gives], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def multiply(w_ring, x_ring, scale, last_group, words, stage, phase, begin, end, more, C: gl.constexpr):
    """The sums of one tile, two stages a turn. While one multiplies, the next is decoded, into other registers.

    `words` are those of the tile's first stage; returned are those of the next tile's, if there is `more`, with the stage
    and the phase that come next.
    """
    ROWS: gl.constexpr = C.rows
    TOKENS: gl.constexpr = C.tokens
    SUMS: gl.constexpr = C.accumulator
    STAGES: gl.constexpr = C.stages
    THREADS: gl.constexpr = C.threads
    EACH: gl.constexpr = C.threads_layout
    acc = gl.zeros((ROWS, TOKENS), gl.float32, SUMS)
    odd = ()
    for _ in gl.static_range(OPERAND_REGISTERS):
        odd = odd + (gl.zeros((THREADS,), gl.int32, EACH),)
    scales = load_scales(scale, begin, last_group, C)
    next_scales = load_scales(scale, begin + 1, last_group, C)
    barrier()  # Triton wants one between the stores of the tile before and loads; better here than in the loop
    for turn in range(begin, end):
        before = gl.where(stage == 0, STAGES, stage) - 1
        even = decode(words, scales, False, C)
        words = read_words(w_ring, stage + 1, phase, True, C)
        acc = start(even, x_ring, acc, stage, C)
        finish(odd, before, turn > begin, C)

        odd = decode(words, scales, True, C)
        following = gl.where(stage + 2 == STAGES, 0, stage + 2)
        phase = gl.where(following == 0, phase ^ 1, phase)
        words = read_words(w_ring, following, phase, (turn + 1 < end) | more, C)
        scales = next_scales
        next_scales = load_scales(scale, turn + 2, last_group, C)
        acc = start(odd, x_ring, acc, stage + 1, C)
        finish(even, stage, True, C)
        stage = following
    acc = warpgroup_mma_wait(0, deps=[acc])
    finish(odd, gl.where(stage == 0, STAGES, stage) - 1, begin < end, C)
    return acc, words, stage, phase


@gluon.jit
def meet(partial, arrived, acc, tile, split, C: gl.constexpr):
    """Leaves the sums of one split to the block that comes last for this tile; that one gets True and the total."""
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    tokens = gl.arange(0, C.tokens, gl.SliceLayout(0, C.accumulator))
    # Neighbouring lanes, which hold rows g and pairs of tokens 2t (hardware/mma.py), write neighbouring words.
    of_row = rows % 8 * 4 + rows // 16 * 32 + rows // 8 % 2 * C.threads
    of_token = tokens % 8 // 2 + tokens % 2 * (2 * C.threads) + tokens // 8 * (4 * C.threads)
    place = of_row[:, None] + of_token[None, :]
    SPLITS: gl.constexpr = C.splits
    base = partial + tile.to(gl.int64) * (C.splits * C.rows * C.tokens)
    gl.store(base + split * (C.rows * C.tokens) + place, acc)
    barrier()
    last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == C.splits - 1
    total = acc
    if last:
        gl.store(arrived + tile, 0)
        total = gl.load(base + place)
        for i in gl.static_range(1, SPLITS):  # unrolled, so that all loads are under way at once
            total += gl.load(base + i * (C.rows * C.tokens) + place)
    return last, total


@gluon.jit
def store(y_desc, y, y_tile, acc, channel_scale, bias, factor, first_row, first_token, M, N, C: gl.constexpr):
    """Scales and bias per row, one rounding, then y: transposed through shared memory by TMA, or element by element."""
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    acc = acc * factor
    if C.channel_scale:
        acc = acc * gl.load(channel_scale + rows, mask=rows < N, other=0.0)[:, None]
    if C.bias:
        acc = acc + gl.load(bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    if C.store_by_tma:
        tma_store_wait(0)
        barrier()
        y_tile.permute([1, 0]).store(acc.to(C.half))
        fence_async_shared()
        barrier()
        tma_store(y_desc, [first_token, first_row], y_tile)
    else:
        tokens = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, C.accumulator))
        at = y + tokens.to(gl.int64)[None, :] * N + rows[:, None]
        gl.store(at, acc.to(C.half), mask=(rows < N)[:, None] & (tokens < M)[None, :])


@gluon.jit
def math(work, C: gl.constexpr):
    """The warpgroups that decode, multiply and store."""
    (
        w_ring, x_ring, y_tile, y_desc, y, scale, channel_scale, bias, partial, arrived, token_tiles, row_tiles, turns,
        scale_strip, last_group, M, N, strips, factor,
    ) = work  # fmt: skip
    thread = gl.arange(0, C.threads, C.threads_layout)
    lane_group = (thread & 31) >> 2
    tiles = token_tiles * row_tiles * C.splits
    stage = 0
    phase = 0
    words = read_words(w_ring, stage, phase, gl.program_id(0) < tiles, C)
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, row_tile, split = tile_at(index, token_tiles, row_tiles, C)
        first_row, first_token = row_tile * C.rows, token_tile * C.tokens
        strip = gl.minimum(first_row // 16 + (thread >> 5), strips - 1)  # strips beyond the last are computed, not stored
        own = scale + strip.to(gl.int64) * scale_strip + lane_group * C.decode.group_words
        begin, end = turns * split // C.splits, turns * (split + 1) // C.splits
        more = index + gl.num_programs(0) < tiles
        acc, words, stage, phase = multiply(
            w_ring, x_ring, own, last_group, words, stage, phase, begin, end, more, C
        )  # fmt: skip
        if C.splits == 1:
            store(y_desc, y, y_tile, acc, channel_scale, bias, factor, first_row, first_token, M, N, C)
        else:
            last, total = meet(partial, arrived, acc, token_tile * row_tiles + row_tile, split, C)
            if last:
                store(y_desc, y, y_tile, total, channel_scale, bias, factor, first_row, first_token, M, N, C)
    if C.store_by_tma:
        tma_store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "token_tiles", "row_tiles", "turns", "scale_strip", "last_group", "strips"])
def wgmma_gemm(
    w_desc, w_desc_1, w_desc_2, x_desc, y_desc, y, scale, channel_scale, bias, partial, arrived, M, N, token_tiles,
    row_tiles, turns, scale_strip, last_group, strips, factor, C: gl.constexpr,
):  # fmt: skip
    """The kernel: rings, barriers and roles. There is a descriptor of w for each of its planes; the others are None."""
    PLANES: gl.constexpr = C.planes
    w_descs = (w_desc, w_desc_1, w_desc_2)
    # One allocation, whose parts have known addresses; see parts/stages.py.
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    x_ring = part(shared, 0, ptx(C.w_unit, 0), C.half, [C.stages] + x_desc.block_type.shape, x_desc.layout)
    w_ring = ()
    for p in gl.static_range(PLANES):
        w_ring = w_ring + (
            part(
                shared, ptx(C.w_unit, p), ptx(C.w_unit, p + 1), gl.int32, [C.stages] + w_descs[p].block_type.shape,
                w_descs[p].layout,
            ),
        )  # fmt: skip
    y_tile = x_ring
    if C.store_by_tma:
        y_tile = part(shared, C.y_unit, C.barrier_unit, C.half, y_desc.block_type.shape, y_desc.layout)
    barriers = part(
        shared, C.barrier_unit, C.barrier_unit + 1, gl.int64, [2 * C.stages, 1], mbarrier.MBarrierLayout()
    )  # fmt: skip
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(C.barriers.init, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)
    fence_async_shared()
    barrier()
    read = (w_descs, x_desc, w_ring, x_ring, barriers, token_tiles, row_tiles, turns)
    work = (
        w_ring, x_ring, y_tile, y_desc, y, scale, channel_scale, bias, partial, arrived, token_tiles, row_tiles, turns,
        scale_strip, last_group, M, N, strips, factor,
    )  # fmt: skip
    # All warpgroups are one role: it takes the registers that the loader leaves, 240 a thread for two. (As roles of their
    # own, ptxas serializes their wgmma as soon as registers move between roles: Triton 3.6 and 3.9, remark C7512.)
    gl.warp_specialize([(math, (work, C)), (load, (read, C))], [1], [24])


class WgmmaPlan:
    """All of a product that does not depend on the tensors' contents: made once for a shape, called many times."""

    def __init__(
        self, shape: GemmShape, tile: WgmmaTile, form: WeightForm, dtype: torch.dtype, bias: bool, sm_count: int
    ) -> None:
        self.shape, self.tile = shape, tile
        # Rows of y that do not start at multiples of 16 bytes are beyond TMA.
        self.config = _config(tile, form, half_type(dtype), bias, tile.splits == 1 and shape.n % 8 == 0)
        self.tiles = (-(-shape.m // tile.tokens), -(-shape.n // tile.rows))
        self.grid = (min(sm_count, self.tiles[0] * self.tiles[1] * tile.splits), 1, 1)
        self.turns = shape.steps(128)
        self.last_group = (shape.k - 1) // max(form.group, 1)
        self.factor = self.config.decode.epilogue_factor
        self.dtype = dtype
        self.kernel: CompiledKernel | None = None
        # Descriptors say where memory is, nothing of what is in it, so those of addresses seen before serve again.
        self.x_descriptor = functools.lru_cache(maxsize=256)(self._x_descriptor)
        self.y_descriptor = functools.lru_cache(maxsize=256)(self._y_descriptor)
        self.weight_descriptors = functools.lru_cache(maxsize=1024)(self._weight_descriptors)

    def _x_descriptor(self, address: int, stride: int) -> TensorDescriptor:
        block = [self.tile.tokens, 64]
        layout = gl.NVMMASharedLayout.get_default_for(block, self.config.half)
        return TensorDescriptor(_Address(address, self.dtype), [self.shape.m, self.shape.k], [stride, 1], block, layout)

    def _y_descriptor(self, address: int) -> TensorDescriptor | None:
        if not self.config.store_by_tma:
            return None
        m, n, block = self.shape.m, self.shape.n, [self.tile.tokens, self.config.rows]
        layout = gl.NVMMASharedLayout.get_default_for(block, self.config.half)
        return TensorDescriptor(_Address(address, self.dtype), [m, n], [n, 1], block, layout)

    def _weight_descriptors(self, address: int) -> tuple[TensorDescriptor | None, ...]:
        """One for each plane of the codes, filled up with None to the three that the kernel takes."""
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        row = self.shape.steps(64) * 32 * self.shape.bits
        blocks = [[self.config.warps, 32 * self.config.plane_words(p)] for p in range(self.config.planes)]
        codes = _Address(address, torch.int32)
        planes = [TensorDescriptor(codes, [self.shape.strips, row], [row, 1], block, layout) for block in blocks]
        return (*planes, *(None,) * (3 - len(planes)))

    @property
    def workspace(self) -> tuple[int, int]:
        """Elements of the two workspaces, float32 sums and int32 counters (which are zero before and after)."""
        if self.tile.splits == 1:
            return 0, 0
        tiles = self.tiles[0] * self.tiles[1]
        return tiles * self.tile.splits * self.config.rows * self.tile.tokens, tiles

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        sums: Tensor, arrived: Tensor,
    ) -> Tensor:  # fmt: skip
        """y [M, N] of x [M, K], whose rows start at multiples of 16 bytes; all tensors on the current device."""
        m, n = self.shape.m, self.shape.n
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        arguments = (
            *self.weight_descriptors(codes.data_ptr()), self.x_descriptor(x.data_ptr(), x.stride(0)),
            self.y_descriptor(y.data_ptr()), y, codes if scale is None else scale.view(torch.int32), channel_scale, bias,
            sums, arrived, m, n, *self.tiles, self.turns, 0 if scale is None else scale.stride(0) // 2, self.last_group,
            codes.shape[0], self.factor, self.config,
        )  # fmt: skip
        if self.kernel is None:
            self.kernel = wgmma_gemm[self.grid](*arguments, num_warps=self.config.warps, launch_pdl=True)
        else:
            self.kernel[self.grid](*arguments)
        return y


@functools.lru_cache(maxsize=1024)
def _config(tile: WgmmaTile, form: WeightForm, dtype: HalfType, bias: bool, store_by_tma: bool) -> WgmmaGemm:
    decode = Decode(form.format, dtype, form.group, form.zero, form.scale_dtype)
    return WgmmaGemm(
        decode, tile.tokens, tile.warpgroups, tile.stages, tile.splits, tile.token_group, form.channel_scale, bias,
        store_by_tma,
    )  # fmt: skip


@dataclass(frozen=True)
class _Address:
    """As much of a tensor as a descriptor needs: it must not keep the memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
