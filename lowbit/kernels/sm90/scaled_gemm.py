"""y[M, N] = (x[M, K] . w[N, K]^T) scaled, both of 8 bits: int8 or fp8, wgmma and TMA: sm_90a.

Reads   x and w row-major by TMA, 128 k a stage; the one of them that is `rows` is operand A of wgmma, 64 rows a warpgroup,
        the other one operand B: few tokens are columns (y^T = w x^T), many may be rows
Roles   load: 1 warp; math: 1 to 4 warpgroups: wgmma with two stages in flight, scale, store by TMA
Ring    `stages` of both, in one allocation with their barriers (parts/stages.py); warps run free of one another. The first
        weights are asked for before the kernel ahead, which may have made x, is through
Grid    persistent, one block per SM; tiles in groups of tokens so that a wave shares x and w in L2
Sum     int8 in s32, exact. fp8 in the tensor core, whose sums of fp8 products keep about 14 bits; with `promote` every 128 k
        go to a sum in fp32. With splits > 1 the block that comes last adds the splits in order, or both blocks of a pair swap
        halves of the tile (parts/pair.py): same input, same bits
Scales  per token and per channel at the end, in fp32, then bias and function; blocks of 128 x 128 on the sum of each 128 k. One
        rounding, or codes of y (parts/epilogue.py)
Source  wgmma: PTX ISA; what was measured: docs/log.md
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit.formats import Scheme
from lowbit.kernels.choose.scaled_gemm import ScaledShape, ScaledTile
from lowbit.kernels.parts.epilogue import CODE_TYPES, TYPES, XScale, bring, finished, of_channels, of_tokens
from lowbit.kernels.parts.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    part,
    run,
    source_digest,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.pair import say_ready, swap
from lowbit.kernels.parts.promote import add_here
from lowbit.kernels.sm90.byte_tile import OPERAND_LAYOUT, STAGE_K, TILE_K, Address, ByteTile, TilePlan, compiled
from lowbit.kernels.sm90.mixed_gemm import UNIT, UNIT_WORDS, meet, tile_at


@dataclass(frozen=True)
class ScaledGemm(ByteTile):
    """All that is fixed when the kernel is compiled. Of two equal ones, results are equal to the last bit.

    `block_scale`: w has scales of blocks of 128 x 128, a tile lies within one.
    """

    w_type: torch.dtype
    x_type: torch.dtype
    y_type: torch.dtype
    tokens_are_rows: bool
    warpgroups: int
    columns: int
    stages: int
    splits: int
    token_group: int
    promote: bool
    x_scale: XScale
    block_scale: bool
    x_zero: bool
    bias: bool
    function: str
    paired: bool
    store_by_tma: bool
    digest: str = source_digest()

    @property
    def channel_scale(self) -> bool:
        """Whether a scale of each channel is applied at the end."""
        return not self.block_scale

    @property
    def factor(self) -> float:
        """What sums are multiplied by at the end."""
        return 1.0

    @property
    def turn(self) -> int:
        """Stages of a turn of the main loop."""
        return 2 if self.promote and self.warpgroups == 1 else 1

    @property
    def stage_bytes(self) -> int:
        return STAGE_K * (self.rows + self.columns)

    @property
    def w_unit(self) -> int:
        """Where w starts in shared memory, in units; x is at 0."""
        return self.stages * STAGE_K * self.tile_tokens // UNIT

    @property
    def y_unit(self) -> int:
        return self.stages * self.stage_bytes // UNIT

    @property
    def shared_bytes(self) -> int:
        return UNIT * (self.barrier_unit + 1)

    @property
    def w(self) -> gl.dtype:
        return TYPES[self.w_type][0]


@gluon.jit
def load(read, C: gl.constexpr):
    """The warp that keeps the ring full. The first weights do not wait for the kernel before this one."""
    x_desc, w_desc, x_ring, w_ring, barriers, token_tiles, channel_tiles, turns = read
    if C.paired:
        say_ready(1, C)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents;\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    tiles = token_tiles * channel_tiles * C.splits
    token_tile, channel_tile, split = tile_at(gl.program_id(0), token_tiles, channel_tiles, C)
    begin, end = turns * split // C.splits * C.turn, turns * (split + 1) // C.splits * C.turn
    ahead = gl.where(gl.program_id(0) < tiles, gl.minimum(end - begin, C.stages_ahead), 0)
    for i in range(0, ahead):
        mbarrier.expect(barriers.index(i), C.stage_bytes)
        tma_load(w_desc, [channel_tile * C.tile_channels, (begin + i) * TILE_K], barriers.index(i), w_ring.index(i))
    gl.inline_asm_elementwise("griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, channel_tile, split = tile_at(index, token_tiles, channel_tiles, C)
        for k in range(turns * split // C.splits * C.turn, turns * (split + 1) // C.splits * C.turn):
            full = barriers.index(stage)
            if ahead == 0:
                mbarrier.wait(barriers.index(C.stages + stage), phase)
                mbarrier.expect(full, C.stage_bytes)
                tma_load(w_desc, [channel_tile * C.tile_channels, k * TILE_K], full, w_ring.index(stage))
            ahead = gl.maximum(ahead - 1, 0)
            tma_load(x_desc, [token_tile * C.tile_tokens, k * TILE_K], full, x_ring.index(stage))
            stage = gl.where(stage + 1 == C.stages, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def wait_full(stage, phase, C: gl.constexpr):
    """Until a stage is there."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(
        C.barriers.wait, "=r,r,r,r", [thread * 0 + stage, thread * 0 + phase, thread >= 0],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def give(stage, exists, C: gl.constexpr):
    """A stage back to the loader, if it exists."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(
        C.barriers.give, "=r,r,r", [thread * 0 + stage, ((thread & 31) == 0) & exists],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def start(x_ring, w_ring, acc, stage, adds, part_of: gl.constexpr, C: gl.constexpr):
    """Starts the products of a stage with all columns or with C.store_columns of them, in the registers of `acc`."""
    if C.tokens_are_rows:
        a, b = x_ring.index(stage), w_ring.index(stage)
    else:
        a, b = w_ring.index(stage), x_ring.index(stage)
    if part_of is not None:
        b = b.slice(part_of * C.store_columns, C.store_columns)
    return warpgroup_mma(a, b.permute([1, 0]), acc, use_acc=adds, is_async=True)


@gluon.jit
def multiply(x_ring, w_ring, stage, phase, begin, end, C: gl.constexpr):
    """The sums of one tile in the tensor core's type, two stages in flight; with the stage and phase that come next."""
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    SUMS: gl.constexpr = C.accumulator
    TYPE: gl.constexpr = C.sums
    acc = gl.zeros((ROWS, COLUMNS), TYPE, SUMS)
    for k in range(begin, end):
        wait_full(stage, phase, C)
        acc = start(x_ring, w_ring, acc, stage, True, None, C)
        acc = warpgroup_mma_wait(1, deps=[acc])
        give(gl.where(stage == 0, C.stages, stage) - 1, k > begin, C)
        stage = gl.where(stage + 1 == C.stages, 0, stage + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    give(gl.where(stage == 0, C.stages, stage) - 1, begin < end, C)
    return acc, stage, phase


@gluon.jit
def block_scales(x_scale, w_scale, groups, k, tokens, exists, C: gl.constexpr):
    """Scales of 128 k: of each token and of the tile's block of w.

    Not to be asked for before the x of that k is there: the kernel before may still be writing both.
    """
    ones = gl.full([C.tile_tokens], 1.0, gl.float32, tokens.type.layout)
    if C.x_scale == "block":
        ones = gl.load(x_scale + tokens.to(gl.int64) * groups + k, mask=exists, other=0.0)
    if C.block_scale:
        ones = ones * gl.load(w_scale + k)
    return ones


@gluon.jit
def add_stage(total, sums, scale, C: gl.constexpr):
    """The total with the sums of 128 k, scaled where scales are those of blocks."""
    if C.x_scale == "block" or C.block_scale:
        return total + sums.to(gl.float32) * of_tokens(scale, C)
    else:
        return total + sums.to(gl.float32)


@gluon.jit
def multiply_and_promote(x_ring, w_ring, scales, stage, phase, begin, end, C: gl.constexpr):
    """The sums of one tile in fp32, to which every 128 k are added; while one warpgroup does, the other one multiplies."""
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    SUMS: gl.constexpr = C.accumulator
    TYPE: gl.constexpr = C.sums
    x_scale, w_scale, groups, tokens, exists = scales
    nought = gl.zeros((ROWS, COLUMNS), TYPE, SUMS)
    total = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS)
    for k in range(begin, end):
        wait_full(stage, phase, C)
        sums = start(x_ring, w_ring, nought, stage, False, None, C)
        scale = block_scales(x_scale, w_scale, groups, k, tokens, exists, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        give(stage, True, C)
        total = add_stage(total, sums, scale, C)
        stage = gl.where(stage + 1 == C.stages, 0, stage + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    return total, stage, phase


@gluon.jit
def multiply_and_promote_alone(x_ring, w_ring, scales, stage, phase, begin, end, C: gl.constexpr):
    """The same for a warpgroup that has the tensor cores to itself: it adds a stage while its next one multiplies."""
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    SUMS: gl.constexpr = C.accumulator
    TYPE: gl.constexpr = C.sums
    x_scale, w_scale, groups, tokens, exists = scales
    nought = gl.zeros((ROWS, COLUMNS), TYPE, SUMS)
    total = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS)
    for k in range(begin, end, 2):
        wait_full(stage, phase, C)
        even = start(x_ring, w_ring, nought, stage, False, None, C)
        even_scale = block_scales(x_scale, w_scale, groups, k, tokens, exists, C)
        odd_scale = block_scales(x_scale, w_scale, groups, gl.minimum(k + 1, groups - 1), tokens, exists, C)
        second = gl.where(stage + 1 == C.stages, 0, stage + 1)
        phase = gl.where(second == 0, phase ^ 1, phase)
        wait_full(second, phase, C)
        odd = start(x_ring, w_ring, nought, second, False, None, C)
        even = warpgroup_mma_wait(1, deps=[even])
        give(stage, True, C)
        total = add_stage(total, even, even_scale, C)
        odd = warpgroup_mma_wait(0, deps=[odd])
        give(second, True, C)
        total = add_stage(total, odd, odd_scale, C)
        stage = gl.where(second + 1 == C.stages, 0, second + 1)
        phase = gl.where(stage == 0, phase ^ 1, phase)
    return total, stage, phase


@gluon.jit
def multiply_by_halves(x_ring, w_ring, stage, phase, begin, end, never, C: gl.constexpr):
    """As `multiply_and_promote`, for 256 columns, of which registers have no room for two sets: one half after the other.

    From the end of a product to the start of the next one there is nothing but the additions: the next stage is waited for
    before, and products start in the registers of the sums before them. That they start at zero, as `never` is False, compilers
    cannot see, or they would give them registers of their own. There is at least one stage. Returned are both halves, then as
    above.
    """
    ROWS: gl.constexpr = C.rows
    WIDE: gl.constexpr = C.store_columns
    SUMS: gl.constexpr = C.store_layout
    TYPE: gl.constexpr = C.sums
    low = gl.zeros((ROWS, WIDE), gl.float32, SUMS)
    high = gl.zeros((ROWS, WIDE), gl.float32, SUMS)
    wait_full(stage, phase, C)
    under_way = start(x_ring, w_ring, gl.zeros((ROWS, WIDE), TYPE, SUMS), stage, never, 0, C)
    for _ in range(begin + 1, end):
        sums = warpgroup_mma_wait(0, deps=[under_way])
        low = add_here(low, sums)
        under_way = start(x_ring, w_ring, sums, stage, never, 1, C)
        following = gl.where(stage + 1 == C.stages, 0, stage + 1)
        phase = gl.where(following == 0, phase ^ 1, phase)
        wait_full(following, phase, C)
        sums = warpgroup_mma_wait(0, deps=[under_way])
        give(stage, True, C)
        high = add_here(high, sums)
        under_way = start(x_ring, w_ring, sums, following, never, 0, C)
        stage = following
    sums = warpgroup_mma_wait(0, deps=[under_way])
    low = add_here(low, sums)
    under_way = start(x_ring, w_ring, sums, stage, never, 1, C)
    sums = warpgroup_mma_wait(0, deps=[under_way])
    give(stage, True, C)
    high = add_here(high, sums)
    stage = gl.where(stage + 1 == C.stages, 0, stage + 1)
    phase = gl.where(stage == 0, phase ^ 1, phase)
    return (low, high), stage, phase


@gluon.jit
def store_piece(out, acc, beside, first_token, first_channel, M, N, C: gl.constexpr):
    """Finishes and stores C.store_columns columns of a tile."""
    y_desc, y, y_tile = out
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.store_layout))
    columns = gl.arange(0, C.store_columns, gl.SliceLayout(0, C.store_layout))
    if C.tokens_are_rows:
        tokens, channels = first_token + rows, first_channel + columns
    else:
        tokens, channels = first_token + columns, first_channel + rows
    result = finished(acc, beside, tokens, channels, M, N, C)
    if C.store_by_tma:
        tma_store_wait(0)
        barrier()
        if C.tokens_are_rows:
            y_tile.store(result)
        else:
            y_tile.permute([1, 0]).store(result)
        fence_async_shared()
        barrier()
        tma_store(y_desc, [first_token, first_channel], y_tile)
    else:
        at = y + of_tokens(tokens.to(gl.int64) * N, C) + of_channels(channels, C)
        gl.store(at, result, mask=of_tokens(tokens < M, C) & of_channels(channels < N, C))


@gluon.jit
def store(out, acc, beside, first_token, first_channel, M, N, C: gl.constexpr):
    """Finishes a tile and stores it, at most 128 columns at a time."""
    if C.stores == 1:
        store_piece(out, acc, beside, first_token, first_channel, M, N, C)
    else:
        store_halves(out, halves(acc, C), beside, first_token, first_channel, M, N, C)


@gluon.jit
def halves(acc, C: gl.constexpr):
    """Both halves of the columns; this takes no instruction."""
    low, high = gl.split(gl.permute(gl.reshape(acc, [C.rows, 2, C.store_columns]), [0, 2, 1]))
    low = gl.convert_layout(low, C.store_layout, assert_trivial=True)
    return low, gl.convert_layout(high, C.store_layout, assert_trivial=True)


@gluon.jit
def store_half(out, acc, beside, first_token, first_channel, half, M, N, C: gl.constexpr):
    """Finishes and stores one half of the columns of a tile."""
    if C.tokens_are_rows:
        store_piece(out, acc, beside, first_token, first_channel + half * C.store_columns, M, N, C)
    else:
        store_piece(out, acc, beside, first_token + half * C.store_columns, first_channel, M, N, C)


@gluon.jit
def store_halves(out, halves, beside, first_token, first_channel, M, N, C: gl.constexpr):
    """The same for the two halves of the columns of a tile."""
    low, high = halves
    store_half(out, low, beside, first_token, first_channel, 0, M, N, C)
    store_half(out, high, beside, first_token, first_channel, 1, M, N, C)


@gluon.jit
def math(work, C: gl.constexpr):
    """The warpgroups that multiply and store."""
    x_ring, w_ring, out, w_scale, beside, partial, arrived, token_tiles, channel_tiles, turns, groups, M, N = work
    tiles = token_tiles * channel_tiles * C.splits
    if C.paired:
        say_ready(C.warps, C)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, channel_tile, split = tile_at(index, token_tiles, channel_tiles, C)
        first_token, first_channel = token_tile * C.tile_tokens, channel_tile * C.tile_channels
        begin, end = turns * split // C.splits * C.turn, turns * (split + 1) // C.splits * C.turn
        bring(beside, first_channel, N, C)
        if C.by_halves:
            acc, stage, phase = multiply_by_halves(x_ring, w_ring, stage, phase, begin, end, groups < 0, C)
        elif C.promote:
            tokens = first_token + gl.arange(0, C.tile_tokens, gl.SliceLayout(1 if C.tokens_are_rows else 0, C.accumulator))
            of_w = w_scale + first_channel // 128 * groups
            scales = (beside[0], of_w, groups, tokens, tokens < M)
            if C.turn == 2:
                acc, stage, phase = multiply_and_promote_alone(x_ring, w_ring, scales, stage, phase, begin, end, C)
            else:
                acc, stage, phase = multiply_and_promote(x_ring, w_ring, scales, stage, phase, begin, end, C)
        else:
            acc, stage, phase = multiply(x_ring, w_ring, stage, phase, begin, end, C)
        if C.paired:
            low, high = acc if C.by_halves else halves(acc, C)
            store_half(out, swap(low, high, split, C), beside, first_token, first_channel, split, M, N, C)
        elif C.by_halves:
            store_halves(out, acc, beside, first_token, first_channel, M, N, C)
        elif C.splits == 1:
            store(out, acc, beside, first_token, first_channel, M, N, C)
        else:
            last, total = meet(partial, arrived, acc, token_tile * channel_tiles + channel_tile, split, C)
            if last:
                store(out, total, beside, first_token, first_channel, M, N, C)
    if C.store_by_tma:
        tma_store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "token_tiles", "channel_tiles", "turns", "groups"])
def scaled_gemm(
    x_desc, w_desc, y_desc, y, x_scale, x_zero, w_scale, sums, bias, y_scale, partial, arrived, M, N, token_tiles,
    channel_tiles, turns, groups, C: gl.constexpr,
):  # fmt: skip
    """The kernel: rings, barriers and roles.

    `groups` counts 128 k, `turns` C.turn of them; scales are float32: w_scale [N], or [ceil(N / 128), groups] with
    C.block_scale, x_scale [1], [M] or [M, groups].
    """
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    x_ring = part(shared, 0, C.w_unit, C.x, [C.stages] + x_desc.block_type.shape, x_desc.layout)
    w_ring = part(shared, C.w_unit, C.y_unit, C.w, [C.stages] + w_desc.block_type.shape, w_desc.layout)
    y_tile = x_ring
    if C.store_by_tma:
        y_tile = part(shared, C.y_unit, C.barrier_unit, C.y, y_desc.block_type.shape, y_desc.layout)
    barriers = part(
        shared, C.barrier_unit, C.barrier_unit + 1, gl.int64, [2 * C.stages, 1], mbarrier.MBarrierLayout()
    )  # fmt: skip
    thread = gl.arange(0, C.threads, C.threads_layout)
    gl.inline_asm_elementwise(C.barriers.init, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)
    if C.paired:
        P: gl.constexpr = C.pair
        run(P.init, "=r,r", [thread])
    fence_async_shared()
    barrier()
    read = (x_desc, w_desc, x_ring, w_ring, barriers, token_tiles, channel_tiles, turns)
    beside = (x_scale, x_zero, w_scale, sums, bias, y_scale)
    out = (y_desc, y, y_tile)
    work = (
        x_ring, w_ring, out, w_scale, beside, partial, arrived, token_tiles, channel_tiles, turns, groups, M, N
    )  # fmt: skip
    if C.paired:
        gl.warp_specialize(
            [(math, (work, C)), (load, (read, C)), (say_ready, (1, C)), (say_ready, (2, C))], [1, 1, 2], [24, 24, 24]
        )  # fmt: skip
    else:
        gl.warp_specialize([(math, (work, C)), (load, (read, C))], [1], [24])


@functools.lru_cache(maxsize=1024)
def scaled_config(
    shape: ScaledShape, tile: ScaledTile, scheme: Scheme, dtype: torch.dtype, x_scale: XScale, x_zero: bool, bias: bool,
    function: str = "none",
) -> ScaledGemm:  # fmt: skip
    """What is compiled for a product."""
    assert scheme.activation is not None
    # Rows of y that do not start at multiples of 16 bytes are beyond TMA; float32 takes more room than there is.
    by_tma = (tile.splits == 1 or tile.pair) and shape.n * dtype.itemsize % 16 == 0 and dtype != torch.float32
    return ScaledGemm(
        CODE_TYPES[scheme.weight.name], CODE_TYPES[scheme.activation.name], dtype, tile.tokens_are_rows, tile.warpgroups,
        tile.columns, tile.stages, tile.splits, tile.token_group, shape.apart, x_scale, shape.blocks, x_zero, bias,
        function, tile.pair, by_tma,
    )  # fmt: skip


class ScaledPlan(TilePlan):
    """The plan of a product with weights of 8 bits."""

    def __init__(self, shape: ScaledShape, tile: ScaledTile, config: ScaledGemm, sm_count: int) -> None:
        super().__init__(shape, tile, config, sm_count)
        self.groups = -(-shape.k // STAGE_K)
        self.turns = -(-self.groups // config.turn)
        self.w_descriptor = functools.lru_cache(maxsize=1024)(self._w_descriptor)

    def _w_descriptor(self, address: int, stride: int) -> TensorDescriptor:
        w, block = Address(address, self.config.w_type), [self.config.tile_channels, STAGE_K]
        return TensorDescriptor(w, [self.shape.n, self.shape.k], [stride, 1], block, OPERAND_LAYOUT)

    def __call__(
        self, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, codes: Tensor, scale: Tensor | None,
        channel_scale: Tensor | None, sums: Tensor, bias: Tensor | None, partial: Tensor, arrived: Tensor,
        y_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """y [M, N] of x [M, K], whose rows start at multiples of 16 bytes; all tensors on the current device."""
        m, n = self.shape.m, self.shape.n
        y = torch.empty((m, n), dtype=self.config.y_type, device=x.device)
        meeting = partial.view(torch.int32) if self.config.total is gl.int32 else partial
        arguments = (
            self.x_descriptor(x.data_ptr(), x.stride(0)), self.w_descriptor(codes.data_ptr(), codes.stride(0)),
            self.y_descriptor(y.data_ptr()), y, x_scale, x_zero, channel_scale if scale is None else scale, sums, bias, y_scale,
            meeting, arrived, m, n, *self.tiles, self.turns, self.groups, self.config,
        )  # fmt: skip
        if self.kernel is None:
            self.kernel = compiled(scaled_gemm, self.grid, arguments, self.config.warps, 2 if self.tile.pair else 1)
        self.kernel[self.launches](*arguments)
        return y
