"""y[M, N] = scaled x[M, K] . w[N, K]^T, both of 8 bits (int8 or fp8), wgmma and TMA: sm_90a.

Reads   x and w row-major by TMA, 128 columns of K per stage. Tokens are the columns of the tile (y^T = w x^T); if there are
        many, they may be its rows. The matrix with the tile's rows is operand A of wgmma, 64 rows per warpgroup; the other one
        is operand B
Roles   load: 1 warp; math: 1 to 4 warpgroups: wgmma with two stages in flight, scale, store by TMA
Stages  of x and w, in one allocation with their barriers (parts/pipeline.py); warps are not synchronised with each other. The
        first weights are loaded before the previous kernel, which may write x, has finished
Grid    persistent, one block per SM; tiles are ordered in groups of token tiles, so that a wave shares x and w in L2
Sum     int8 in s32, exact. fp8 in the tensor core, whose sums of fp8 products keep about 14 bits; with `promote` sums over 128
        columns of K are added to a total in fp32. With splits > 1 the last block to arrive adds the splits in order, or both
        blocks of a cluster exchange halves of the tile (parts/cluster_split_k.py): same input, same bits
Scales  per token and per channel in the epilogue, in fp32, then bias and function; scales of 128 x 128 blocks on each sum over
        128 columns of K. y is rounded once, or quantized to codes (parts/scaled_epilogue.py)
Source  wgmma: PTX ISA; measurements: docs/log
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.kernels.choose.scaled_gemm import ScaledShape, ScaledTile
from lowbit.kernels.parts.cluster_split_k import arrive_cluster
from lowbit.kernels.parts.gluon import (
    Descriptor,
    Scalar,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    run,
    source_digest,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.launch import TilePlan, descriptors
from lowbit.kernels.parts.pipeline import advance, make_barriers, previous, release, wait_full
from lowbit.kernels.parts.producer import load
from lowbit.kernels.parts.promote import add_here, zero_half, zero_sums
from lowbit.kernels.parts.scaled_epilogue import (
    CODE_TYPES,
    TYPES,
    OutputTile,
    ScaledEpilogueArgs,
    XScale,
    complete,
    of_tokens,
    prefetch,
)
from lowbit.kernels.parts.schedule import SplitKWorkspace, TileGrid, first_token_of, iterations_of, tile_at, tile_count
from lowbit.kernels.parts.smem import allocate, view, view_stages
from lowbit.kernels.parts.tile import OPERAND_LAYOUT, STAGE_K, TILE_K, ByteTile


@dataclass(frozen=True)
class ScaledGemm(ByteTile):
    """The kernel's compile-time configuration. Kernels with equal configurations give bit-equal results.

    `block_scale`: w has scales of 128 x 128 blocks; the channels of a tile lie within one block.
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
    factor = 1.0
    """Factor by which the epilogue multiplies all sums."""

    @property
    def channel_scale(self) -> bool:
        """True if the epilogue applies a scale per channel."""
        return not self.block_scale

    @property
    def iteration_stages(self) -> int:
        """Number of stages in a main-loop iteration."""
        return 2 if self.promote and self.warpgroups == 1 else 1

    @property
    def stage_bytes(self) -> int:
        return STAGE_K * (self.rows + self.columns)

    @property
    def operand_regions(self) -> tuple[tuple[str, int], ...]:
        x, w = (self.stages * STAGE_K * size for size in (self.tile_tokens, self.tile_channels))
        return ("x", x), ("w", w)

    @property
    def w(self) -> gl.dtype:
        return TYPES[self.w_type][0]


@aggregate
class ScaledLoaderArgs:
    """Arguments of the loader: descriptors, the stages of x and w, their barriers."""

    x_desc: Descriptor
    w_desc: Descriptor
    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor
    tiles: TileGrid


@aggregate
class ScaledMathArgs:
    """Arguments of the math warps: stages of x and w, scales of w for each of `groups` groups of 128 columns of K, split-K
    workspace, epilogue, y."""

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    w_scale: Scalar
    groups: Scalar
    splits: SplitKWorkspace
    epilogue_args: ScaledEpilogueArgs
    out: OutputTile
    tiles: TileGrid


@aggregate
class BlockScales:
    """Scales of a thread's tokens of x, and of the tile's block of w, for each of `groups` groups of 128 columns of K."""

    of_x: Scalar
    of_w: Scalar
    groups: Scalar
    tokens: gl.tensor
    exist: gl.tensor


@gluon.jit
def load_weights(loader_args, full, stage, channel_tile, k, C: gl.constexpr):
    """Starts the copy of the rows of w of a stage."""
    tma_load(loader_args.w_desc, [channel_tile * C.tile_channels, k * TILE_K], full, loader_args.w.index(stage))


@gluon.jit
def start(p, acc, stage, adds, half: gl.constexpr, C: gl.constexpr):
    """Starts the products of a stage with all columns, or with column half `half`, in the registers of `acc`."""
    if C.tokens_are_rows:
        a, b = p.x.index(stage), p.w.index(stage)
    else:
        a, b = p.w.index(stage), p.x.index(stage)
    if half is not None:
        b = b.slice(half * C.store_columns, C.store_columns)
    return warpgroup_mma(a, b.permute([1, 0]), acc, use_acc=adds, is_async=True)


@gluon.jit
def multiply(p, stage, phase, begin, end, C: gl.constexpr):
    """Computes the sums of one tile in the tensor core's type, two stages in flight. Returns them, the next stage and phase."""
    acc = zero_sums(C.sums, C)
    for k in range(begin, end):
        wait_full(stage, phase, True, C)
        acc = start(p, acc, stage, True, None, C)
        acc = warpgroup_mma_wait(1, deps=[acc])
        release(previous(stage, C), k > begin, C)
        stage, phase = advance(stage, phase, 1, C)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(previous(stage, C), begin < end, C)
    return acc, stage, phase


@gluon.jit
def block_scales(scales, k, C: gl.constexpr):
    """Loads the scales of 128 columns of K: of each token and of the tile's block of w.

    Must be called after x of these columns has arrived, since before that the previous kernel may still be writing x and its
    scales.
    """
    ones = gl.full([C.tile_tokens], 1.0, gl.float32, scales.tokens.type.layout)
    if C.x_scale == "block":
        ones = gl.load(scales.of_x + scales.tokens.to(gl.int64) * scales.groups + k, mask=scales.exist, other=0.0)
    if C.block_scale:
        ones = ones * gl.load(scales.of_w + k)
    return ones


@gluon.jit
def add_stage(total, sums, scale, C: gl.constexpr):
    """Returns the total plus the sums over 128 columns of K, which are scaled if there are block scales."""
    if C.x_scale == "block" or C.block_scale:
        return total + sums.to(gl.float32) * of_tokens(scale, C)
    else:
        return total + sums.to(gl.float32)


@gluon.jit
def multiply_and_promote(p, scales, stage, phase, begin, end, C: gl.constexpr):
    """Computes the sums of one tile in fp32, as totals of sums over 128 columns of K. While one warpgroup adds, the other
    multiplies."""
    zeros = zero_sums(C.sums, C)
    total = zero_sums(gl.float32, C)
    for k in range(begin, end):
        wait_full(stage, phase, True, C)
        sums = start(p, zeros, stage, False, None, C)
        scale = block_scales(scales, k, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        release(stage, True, C)
        total = add_stage(total, sums, scale, C)
        stage, phase = advance(stage, phase, 1, C)
    return total, stage, phase


@gluon.jit
def multiply_and_promote_alone(p, scales, stage, phase, begin, end, C: gl.constexpr):
    """As `multiply_and_promote`, for a single warpgroup: it adds the sums of a stage while its next stage is multiplied."""
    zeros = zero_sums(C.sums, C)
    total = zero_sums(gl.float32, C)
    for k in range(begin, end, 2):
        wait_full(stage, phase, True, C)
        even = start(p, zeros, stage, False, None, C)
        even_scale = block_scales(scales, k, C)
        odd_scale = block_scales(scales, gl.minimum(k + 1, scales.groups - 1), C)
        next_stage, phase = advance(stage, phase, 1, C)
        wait_full(next_stage, phase, True, C)
        odd = start(p, zeros, next_stage, False, None, C)
        even = warpgroup_mma_wait(1, deps=[even])
        release(stage, True, C)
        total = add_stage(total, even, even_scale, C)
        odd = warpgroup_mma_wait(0, deps=[odd])
        release(next_stage, True, C)
        total = add_stage(total, odd, odd_scale, C)
        stage, phase = advance(next_stage, phase, 1, C)
    return total, stage, phase


@gluon.jit
def multiply_by_halves(p, stage, phase, begin, end, never, C: gl.constexpr):
    """As `multiply_and_promote`, for 256 columns. Registers do not hold sums and totals of all of them, so the halves are
    multiplied one after the other.

    Only the additions separate the end of a product from the start of the next one, since the wait for the next stage precedes
    them. A product starts from zero but must use the registers of the previous sums. So it is passed these sums as accumulator,
    and `never`, which is always False, as the flag to add to them. If compilers could see that it is False, they would use
    other registers. There must be at least one stage. Returns both halves, the next stage and phase.
    """
    low = zero_half(gl.float32, C)
    high = zero_half(gl.float32, C)
    wait_full(stage, phase, True, C)
    under_way = start(p, zero_half(C.sums, C), stage, never, 0, C)
    for _ in range(begin + 1, end):
        sums = warpgroup_mma_wait(0, deps=[under_way])
        low = add_here(low, sums)
        under_way = start(p, sums, stage, never, 1, C)
        following, phase = advance(stage, phase, 1, C)
        wait_full(following, phase, True, C)
        sums = warpgroup_mma_wait(0, deps=[under_way])
        release(stage, True, C)
        high = add_here(high, sums)
        under_way = start(p, sums, following, never, 0, C)
        stage = following
    sums = warpgroup_mma_wait(0, deps=[under_way])
    low = add_here(low, sums)
    under_way = start(p, sums, stage, never, 1, C)
    sums = warpgroup_mma_wait(0, deps=[under_way])
    release(stage, True, C)
    high = add_here(high, sums)
    stage, phase = advance(stage, phase, 1, C)
    return (low, high), stage, phase


@gluon.jit
def math(p, C: gl.constexpr):
    """The math role: warpgroups that multiply and store."""
    tiles = tile_count(p.tiles, C)
    if C.paired:
        arrive_cluster(C.warps, C)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, channel_tile, split = tile_at(index, p.tiles, C)
        first_token, first_channel = first_token_of(token_tile, p.tiles, C), channel_tile * C.tile_channels
        begin, end = iterations_of(split, p.tiles, C)
        begin, end = begin * C.iteration_stages, end * C.iteration_stages
        prefetch(p.epilogue_args, first_channel, p.out.N, C)
        if C.by_halves:
            acc, stage, phase = multiply_by_halves(p, stage, phase, begin, end, p.groups < 0, C)
        elif C.promote:
            tokens = first_token + gl.arange(0, C.tile_tokens, gl.SliceLayout(1 if C.tokens_are_rows else 0, C.accumulator))
            of_w = p.w_scale + first_channel // 128 * p.groups
            scales = BlockScales(p.epilogue_args.x_scale, of_w, p.groups, tokens, tokens < p.out.M)
            if C.iteration_stages == 2:
                acc, stage, phase = multiply_and_promote_alone(p, scales, stage, phase, begin, end, C)
            else:
                acc, stage, phase = multiply_and_promote(p, scales, stage, phase, begin, end, C)
        else:
            acc, stage, phase = multiply(p, stage, phase, begin, end, C)
        tile = token_tile * p.tiles.of_channels + channel_tile
        complete(p.out, acc, p.epilogue_args, p.splits, tile, split, first_token, first_channel, C)
    if C.store_by_tma:
        tma_store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "token_tiles", "channel_tiles", "iterations", "groups"])
def scaled_gemm(
    x_desc, w_desc, y_desc, y, x_scale, x_zero, w_scale, sums, bias, y_scale, partial, arrived, M, N, token_tiles,
    channel_tiles, iterations, groups, C: gl.constexpr,
):  # fmt: skip
    """Sets up stages, barriers and roles.

    `groups`: number of groups of 128 columns of K. `iterations`: number of main-loop iterations of C.iteration_stages such
    groups. Scales are float32: w_scale [N], or [ceil(N / 128), groups] with C.block_scale, x_scale [1], [M] or [M, groups].
    """
    shared = allocate(C)
    x = view_stages(shared, C.regions, "x", C.stages, x_desc)
    w = view_stages(shared, C.regions, "w", C.stages, w_desc)
    y_tile = x
    if C.store_by_tma:
        y_tile = view(shared, C.regions, "y", C.y, y_desc.block_type.shape, y_desc.layout)
    barriers = make_barriers(shared, C)
    if C.paired:
        P: gl.constexpr = C.exchange
        run(P.init, "=r,r", [gl.arange(0, C.threads, C.threads_layout)])
    fence_async_shared()
    barrier()
    tiles = TileGrid(token_tiles, channel_tiles, iterations, M)
    epilogue_args = ScaledEpilogueArgs(x_scale, x_zero, w_scale, sums, bias, y_scale)
    out = OutputTile(y_desc, y, y_tile, M, N)
    math_args = ScaledMathArgs(x, w, w_scale, groups, SplitKWorkspace(partial, arrived), epilogue_args, out, tiles)
    loader_args = ScaledLoaderArgs(x_desc, w_desc, x, w, barriers, tiles)
    if C.paired:
        gl.warp_specialize(
            [(math, (math_args, C)), (load, (loader_args, gl.constexpr(load_weights), C)), (arrive_cluster, (1, C)),
             (arrive_cluster, (2, C))],
            [1, 1, 2], [24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize([(math, (math_args, C)), (load, (loader_args, gl.constexpr(load_weights), C))], [1], [24])


@functools.lru_cache(maxsize=1024)
def scaled_config(
    shape: ScaledShape, tile: ScaledTile, scheme: Scheme, dtype: torch.dtype, x_scale: XScale, x_zero: bool, bias: bool,
    function: str = "none",
) -> ScaledGemm:  # fmt: skip
    """Returns the kernel's configuration for a shape, tile and scheme."""
    assert scheme.activation is not None
    # TMA cannot store rows that do not start at multiples of 16 bytes; float32 exceeds the shared memory.
    by_tma = (tile.splits == 1 or tile.pair) and shape.n * dtype.itemsize % 16 == 0 and dtype != torch.float32
    return ScaledGemm(
        CODE_TYPES[scheme.weight.name], CODE_TYPES[scheme.activation.name], dtype, tile.tokens_are_rows, tile.warpgroups,
        tile.columns, tile.stages, tile.splits, tile.token_group, shape.promoted, x_scale, shape.blocks, x_zero, bias,
        function, tile.pair, by_tma,
    )  # fmt: skip


class ScaledPlan(TilePlan):
    """The plan of a GEMM with 8-bit weights."""

    def __init__(self, shape: ScaledShape, tile: ScaledTile, config: ScaledGemm, sm_count: int) -> None:
        super().__init__(scaled_gemm, shape, tile, config, sm_count)
        self.groups = -(-shape.k // STAGE_K)
        self.iterations = -(-self.groups // config.iteration_stages)
        block = (config.tile_channels, STAGE_K)
        self.w_descriptor = descriptors(config.w_type, (shape.n, shape.k), block, OPERAND_LAYOUT, seen=1024)

    def __call__(
        self, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, codes: Tensor, scale: Tensor | None,
        channel_scale: Tensor | None, sums: Tensor, bias: Tensor | None, partial: Tensor, arrived: Tensor,
        y_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns y [M, N] of x [M, K], whose rows start at multiples of 16 bytes; all tensors on the current device."""
        m, n = self.shape.m, self.shape.n
        y = torch.empty((m, n), dtype=self.config.y_type, device=x.device)
        workspace = partial.view(torch.int32) if self.config.total is gl.int32 else partial
        self.launch(
            self.x_descriptor(x.data_ptr(), x.stride(0)), self.w_descriptor(codes.data_ptr(), codes.stride(0)),
            self.y_descriptor(y.data_ptr()), y, x_scale, x_zero, channel_scale if scale is None else scale, sums, bias, y_scale,
            workspace, arrived, m, n, *self.tiles, self.iterations, self.groups, self.config,
        )  # fmt: skip
        return y
