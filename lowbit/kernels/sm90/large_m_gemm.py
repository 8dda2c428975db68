"""y[M, N] = x[M, K] . dequant(w)[N, K]^T for large M, any code width, wgmma and TMA: sm_90a.

Computes y^T = w x^T: dequantized weights are the register operand A of wgmma, 64 rows per warpgroup; x is operand B.
Reads   x by TMA in swizzled tiles of tokens x 64 columns of K; w in FragmentOrder by TMA, 64 rows x 64 columns of K per
        warpgroup and stage
Roles   load: 1 warp; math: 2 or 4 warpgroups: wait, dequantize, scale, wgmma with two steps in flight, store by TMA
Ahead   first, descriptors are prefetched. Codes and scales of the first stages are loaded before the previous kernel has
        finished. x and inputs of the epilogue, which that kernel may write, are loaded concurrently after it
Stages  of x and w, in one allocation with their barriers (parts/pipeline.py); warps are not synchronised with each other
Grid    persistent, one block per SM; tiles are ordered in groups of token tiles, so that a wave shares x and w in L2
Sum     in fp32, K in order; partial sums of several blocks are added by one of them in order: same input, same bits
Epilogue  scales and bias; for up to 64 tokens of a decode step also norm, gate, residual (parts/large_m_epilogue.py)
Exact   every weight is dequantized exactly and rounded once after scaling, like the weights of a dequantized model
Source  wgmma fragments: PTX ISA; the shape of the pipeline and measurements: docs/log
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.large_m import share_refusals
from lowbit.kernels.choose.tiles import GemmShape, WgmmaTile
from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.gluon import (
    Descriptor,
    Scalar,
    Tuple,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    half_type,
    mbarrier,
    prefetch_descriptor,
    ptx,
    run,
    source_digest,
    tma_load,
    tma_store_wait,
)
from lowbit.kernels.parts.large_m_epilogue import (
    SQUARES,
    SUMS,
    LargeMEpilogueArgs,
    ResidualStream,
    SquaresLayouts,
    apply_epilogue,
    load_epilogue_inputs,
    prefetch_rows,
    wait_for_h,
)
from lowbit.kernels.parts.launch import TilePlan, descriptors, plane_descriptors
from lowbit.kernels.parts.lora_epilogue import LoraArgs
from lowbit.kernels.parts.operand import read_words
from lowbit.kernels.parts.pipeline import make_barriers
from lowbit.kernels.parts.producer import load
from lowbit.kernels.parts.promote import zero_sums
from lowbit.kernels.parts.scaled_epilogue import OutputTile
from lowbit.kernels.parts.schedule import (
    SplitKWorkspace,
    TileGrid,
    first_token_of,
    iterations_of,
    k_range_of,
    reduce_splits,
    reduce_stream_k,
    tile_at,
    tile_count,
)
from lowbit.kernels.parts.smem import UNIT, Regions, allocate, view, view_stages
from lowbit.kernels.parts.wgmma_loop import STAGE_K, WgmmaBlock, load_scales, multiply
from lowbit.pack.weight import WeightForm


@dataclass(frozen=True)
class WgmmaGemm(WgmmaBlock, SquaresLayouts):
    """The kernel's compile-time configuration. Kernels with equal configurations give bit-equal results.

    A tile is `tokens` x 64 * warpgroups rows of w. A stage has 64 columns of K; `stages` is even, and K is padded to a multiple
    of 128. `splits` 0: stream-K (parts/schedule.py).
    """

    dequantizer: Dequantizer
    tokens: int
    warpgroups: int
    stages: int
    splits: int
    sections: int
    token_group: int
    epilogue: Epilogue
    store_by_tma: bool
    digest: str = source_digest()

    paired = False

    @property
    def last_is_full(self) -> bool:
        """True if the last of several token tiles begins early enough to be full. With stream-K it does not: the two tiles that
        share tokens would divide K differently and give different bits."""
        return self.splits > 0

    @property
    def tile_tokens(self) -> int:
        return self.tokens

    @property
    def tile_channels(self) -> int:
        return self.rows

    @property
    def stages_ahead(self) -> int:
        """Number of stages whose weights are loaded before the previous kernel has finished. They are few where x is large: the
        copies of x, which must wait for that kernel, are queued behind those of the weights."""
        return self.stages if self.tokens < 128 else 2

    @property
    def regions(self) -> Regions:
        w = [(f"w{p}", self.stages * self.rows * 8 * self.dequantizer.plane_words(p)) for p in range(self.dequantizer.planes)]
        (tokens, channels), squares = self.store_block, 4 * SUMS * self.tokens
        of_end = (
            ("y", 2 * tokens * channels if self.store_by_tma else 0),
            ("h", 2 * tokens * channels if self.epilogue.residual else 0),
            ("squares", squares if self.epilogue.norm_parts or self.epilogue.residual else 0),
            ("h_there", UNIT if self.epilogue.residual else 0),
        )
        return Regions((("x", self.stages * self.tokens * 128), *w, *of_end, ("barriers", UNIT)))

    @property
    def y_type(self) -> torch.dtype:
        return self.x_type

    @property
    def y(self) -> gl.dtype:
        return self.dequantizer.operand_type

    @property
    def store_block(self) -> list[int]:
        """[tokens, channels] of one TMA store."""
        return [self.tokens, self.rows if self.epilogue.gate == "none" else self.rows // 2]


@aggregate
class WgmmaLoaderArgs:
    """Arguments of the loader: descriptors, the stages of w (for each plane of codes) and of x, their barriers."""

    w_descs: Tuple
    x_desc: Descriptor
    w: Tuple
    x: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor
    tiles: TileGrid


@aggregate
class Scales:
    """Scale and zero words of groups. Row blocks are `stride` words apart; K ends within group `last_group`."""

    words: Scalar
    stride: Scalar
    last_group: Scalar
    row_blocks: Scalar


@aggregate
class WgmmaMathArgs:
    """Arguments of the math warps: stages of w and x, scales, split-K workspace, arguments of the epilogue, y."""

    w: Tuple
    x: gl.shared_memory_descriptor
    scales: Scales
    splits: SplitKWorkspace
    epilogue_args: LargeMEpilogueArgs
    stream: ResidualStream
    out: OutputTile
    tiles: TileGrid


@gluon.jit
def load_weights(loader_args, full, stage, row_tile, k, C: gl.constexpr):
    """Starts the copy of the codes of a stage."""
    PLANES: gl.constexpr = C.dequantizer.planes
    for plane in gl.static_range(PLANES):
        column = k * (32 * C.dequantizer.bits) + ptx(C.dequantizer.plane_start, plane)
        tma_load(loader_args.w_descs[plane], [row_tile * C.warps, column], full, loader_args.w[plane].index(stage))


@gluon.jit
def scales_of_row_block(scales, row_tile, thread, C: gl.constexpr):
    """Returns the address of the scales of a warp's row block. Row blocks beyond the last are computed but not stored; they use
    the scales of the last."""
    row_block = gl.minimum(row_tile * (C.rows // 16) + (thread >> 5), scales.row_blocks - 1)
    return scales.words + row_block.to(gl.int64) * scales.stride


@gluon.jit
def scales_of_pair(scales, row_tile, thread, C: gl.constexpr):
    """Returns the address of the scales of a thread's row pair."""
    return scales_of_row_block(scales, row_tile, thread, C) + ((thread & 31) >> 2) * C.dequantizer.group_words


@gluon.jit
def prefetch_scales(p, index, thread, C: gl.constexpr):
    """Prefetches the scales of a tile's first 32 groups into L2, one group per lane; otherwise their loads would expose memory
    latency."""
    if index < tile_count(p.tiles, C):
        _token_tile, row_tile, split = tile_at(index, p.tiles, C)
        begin, _end = iterations_of(split, p.tiles, C)
        group = gl.minimum(begin * (C.dequantizer.pair_words // C.dequantizer.group_words) + (thread & 31), p.scales.last_group)
        scale = scales_of_row_block(p.scales, row_tile, thread, C)
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [scale + group * (8 * C.dequantizer.group_words)])


@gluon.jit
def first_scales(p, index, thread, C: gl.constexpr):
    """Loads scale and zero words of a tile's first two iterations. Called before the wait for the tile's first stage, or before
    the epilogue of the previous tile. If there is no next tile, it loads those of the last one."""
    _token_tile, row_tile, split = tile_at(gl.minimum(index, tile_count(p.tiles, C) - 1), p.tiles, C)
    begin, _end = iterations_of(split, p.tiles, C)
    scale = scales_of_pair(p.scales, row_tile, thread, C)
    last = p.scales.last_group
    return load_scales(scale, begin, last, C) + load_scales(scale, begin + 1, last, C)


@gluon.jit
def multiply_in_sections(p, scale, ahead, words, stage, phase, more, C: gl.constexpr):
    """Computes the sums of one tile in C.sections sections of K, with the same boundaries as that number of splits. Each
    section is summed separately and then added to the total, which gives the same bits as these splits."""
    total = zero_sums(gl.float32, C)
    for section in range(C.sections):
        begin, end = k_range_of(section, p.tiles, C.sections)
        if section > 0:
            last = p.scales.last_group
            ahead = load_scales(scale, begin, last, C) + load_scales(scale, begin + 1, last, C)
        follows = (section + 1 < C.sections) | more
        acc, words, stage, phase = multiply(p, scale, ahead, words, stage, phase, begin, end, follows, C)
        total = gl.where(section > 0, total + acc, acc)  # not 0 + acc, which turns -0 into 0
    return total, words, stage, phase


@gluon.jit
def math(p, C: gl.constexpr):
    """The math role: warpgroups that dequantize, multiply and store."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    tiles = tile_count(p.tiles, C)
    stage = 0
    phase = 0
    if C.dequantizer.pair_words > 0:
        prefetch_scales(p, gl.program_id(0), thread, C)
    ahead = first_scales(p, gl.program_id(0), thread, C)
    if not C.epilogue.plain:
        token_tile, row_tile, split = tile_at(gl.program_id(0), p.tiles, C)
        load_epilogue_inputs(p.stream, row_tile * C.rows, first_token_of(token_tile, p.tiles, C), p.out.M, C)
    words = read_words(p.w, stage, phase, gl.program_id(0) < tiles, C)
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, row_tile, split = tile_at(index, p.tiles, C)
        first_row, first_token = row_tile * C.rows, first_token_of(token_tile, p.tiles, C)
        prefetch_rows(p.epilogue_args, p.stream, first_row, first_token, p.out.N, p.out.M, C)
        if C.dequantizer.pair_words > 0:
            prefetch_scales(p, index + gl.num_programs(0), thread, C)
        scale = scales_of_pair(p.scales, row_tile, thread, C)
        begin, end = iterations_of(split, p.tiles, C)
        more = index + gl.num_programs(0) < tiles
        if C.sections > 1:
            acc, words, stage, phase = multiply_in_sections(p, scale, ahead, words, stage, phase, more, C)
        else:
            acc, words, stage, phase = multiply(p, scale, ahead, words, stage, phase, begin, end, more, C)
        ahead = first_scales(p, index + gl.num_programs(0), thread, C)
        wait_for_h(p.stream, C)
        if C.splits == 1:
            apply_epilogue(p.out, acc, p.epilogue_args, p.stream, row_tile, first_row, first_token, C)
        else:
            if C.splits == 0:
                last, total = reduce_stream_k(p.splits, acc, split, p.tiles, C)
            else:
                last, total = reduce_splits(p.splits, acc, token_tile * p.tiles.of_channels + row_tile, split, C)
            if last:
                apply_epilogue(p.out, total, p.epilogue_args, p.stream, row_tile, first_row, first_token, C)
    if C.store_by_tma:
        tma_store_wait(0)


@gluon.jit(
    do_not_specialize=["M", "N", "token_tiles", "channel_tiles", "iterations", "scale_stride", "last_group", "row_blocks"]
)
def wgmma_gemm(
    w_desc, w_desc_1, w_desc_2, x_desc, y_desc, h_desc, y, scale, channel_scale, bias, partial, arrived, gamma, squares, M, N,
    token_tiles, channel_tiles, iterations, scale_stride, last_group, row_blocks, factor, x_factor, inverse_width, eps, t, b,
    adapter_of, C: gl.constexpr,
):  # fmt: skip
    """Sets up stages, barriers and roles. There is one descriptor of w per plane of codes; the others are None."""
    PLANES: gl.constexpr = C.dequantizer.planes
    w_descs = (w_desc, w_desc_1, w_desc_2)
    prefetch_descriptor(w_desc, "wgmma_gemm")
    if PLANES > 1:
        prefetch_descriptor(w_desc_1, "wgmma_gemm")
    if PLANES > 2:
        prefetch_descriptor(w_desc_2, "wgmma_gemm")
    prefetch_descriptor(x_desc, "wgmma_gemm")
    if C.epilogue.residual:
        prefetch_descriptor(h_desc, "wgmma_gemm")
    if C.store_by_tma:
        prefetch_descriptor(y_desc, "wgmma_gemm")
    shared = allocate(C)
    x = view_stages(shared, C.regions, "x", C.stages, x_desc)
    w = ()
    for p in gl.static_range(PLANES):
        w = w + (view_stages(shared, C.regions, f"w{p}", C.stages, w_descs[p]),)
    y_tile = x
    if C.store_by_tma:
        y_tile = view(shared, C.regions, "y", C.y, y_desc.block_type.shape, y_desc.layout)
    h_tile = x
    h_there = x
    sums = x
    if C.epilogue.norm_parts > 0 or C.epilogue.residual:
        sums = view(shared, C.regions, "squares", gl.float32, [SQUARES, C.tokens], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if C.epilogue.residual:
        h_tile = view(shared, C.regions, "h", h_desc.dtype, h_desc.block_type.shape, h_desc.layout)
        h_there = view(shared, C.regions, "h_there", gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(h_there, count=1)
    barriers = make_barriers(shared, C)
    fence_async_shared()
    barrier()
    tiles = TileGrid(token_tiles, channel_tiles, iterations, M)
    stream = ResidualStream(
        squares, inverse_width, eps, x_factor, gamma, h_desc, h_tile, h_there, sums, LoraArgs(t, b, adapter_of)
    )
    math_args = WgmmaMathArgs(
        w, x, Scales(scale, scale_stride, last_group, row_blocks), SplitKWorkspace(partial, arrived),
        LargeMEpilogueArgs(channel_scale, bias, factor), stream, OutputTile(y_desc, y, y_tile, M, N), tiles,
    )  # fmt: skip
    loader_args = WgmmaLoaderArgs(w_descs, x_desc, w, x, barriers, tiles)
    # All math warpgroups are one role, which gets the registers that the loader gives up: 240 per thread with two warpgroups.
    # With one role per warpgroup, ptxas serializes their wgmma as soon as registers move between roles (Triton 3.6 and 3.9,
    # remark C7512).
    gl.warp_specialize([(math, (math_args, C)), (load, (loader_args, gl.constexpr(load_weights), C))], [1], [24])


class WgmmaPlan(TilePlan):
    """Plan of a large-M GEMM with its epilogue, for one shape: created once, called many times."""

    def __init__(
        self, shape: GemmShape, tile: WgmmaTile, form: WeightForm, dtype: torch.dtype, epilogue: Epilogue, sm_count: int
    ) -> None:
        # TMA cannot store rows of y that do not start at multiples of 16 bytes.
        by_tma = shape.n % 8 == 0 and (tile.splits <= 1 or epilogue.residual or epilogue.gate != "none")
        config = _config(tile, form, half_type(dtype), epilogue, by_tma)
        # The math role waits for an iteration's first stage before it frees the stages of the previous iteration.
        if config.stages < (least := 2 * config.iteration_stages):
            raise ValueError(f"{tile}: the kernel waits for itself with less than {least} stages")
        if refused := share_refusals(tile, shape, sm_count):
            raise ValueError(f"{tile}: {'; '.join(refused)}")
        columns = shape.n if epilogue.gate == "none" else shape.n // 2
        super().__init__(wgmma_gemm, shape, tile, config, sm_count, columns)
        if (epilogue.norm_parts or epilogue.residual) and self.tiles[0] > 1:
            raise ValueError(f"a norm or residual needs all {shape.m} tokens in one tile, {tile} has {tile.tokens}")
        self.iterations = shape.steps(2 * STAGE_K)
        self.last_group = (shape.k - 1) // max(form.group, 1)
        self.factor = config.dequantizer.epilogue_factor
        blocks = [(config.warps, 32 * config.dequantizer.plane_words(p)) for p in range(config.dequantizer.planes)]
        self.weight_descriptors = plane_descriptors(shape.row_blocks, shape.steps(64) * 32 * shape.bits, blocks)
        if epilogue.h_type is not None:
            if shape.n % 8 or not 0 < self.tiles[1] * tile.splits <= sm_count:
                raise ValueError(
                    f"a residual needs N to be a multiple of 8 and each block has one tile, not {tile} for {shape}"
                )
            stored = gl.NVMMASharedLayout.get_default_for(config.store_block, config.y)
            h_type = torch.float16 if epilogue.h_type == "fp16" else torch.bfloat16
            self.h_descriptor = descriptors(h_type, (shape.m, shape.n), config.store_block, stored)

    @property
    def squares_parts(self) -> int:
        """Number of partial sums of squares per token that a residual epilogue stores."""
        return self.tiles[1]

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        sums: Tensor, arrived: Tensor, squares: Tensor | None = None, h: Tensor | None = None, gamma: Tensor | None = None,
        x_factor: float | None = None, inverse_width: float | None = None, eps: float | None = None,
        t: Tensor | None = None, b: Tensor | None = None, adapter_of: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns y [M, N], or [M, N / 2] with a gate, of x [M, K], whose rows start at multiples of 16 bytes.

        Codes and scales are those of pack/weight.py. `sums` and `arrived` are the workspace. All tensors are on the current
        device. A norm reads `squares` float32 [norm_parts, M]: partial sums of squares of the rows of h, which have 1 /
        `inverse_width` elements. A residual adds y to h [M, N] in place, writes `squares` [squares_parts, M] and returns h *
        gamma * x_factor. t, b and adapter_of: those of parts/lora_epilogue.py, with `Epilogue.lora`.
        """
        y = torch.empty((self.shape.m, self.columns), dtype=x.dtype, device=x.device)
        self.launch(
            *self.weight_descriptors(codes.data_ptr()), self.x_descriptor(x.data_ptr(), x.stride(0)),
            self.y_descriptor(y.data_ptr()), None if h is None else self.h_descriptor(h.data_ptr()), y,
            codes if scale is None else scale.view(torch.int32), channel_scale, bias, sums, arrived, gamma, squares,
            self.shape.m, self.shape.n, *self.tiles, self.iterations, 0 if scale is None else scale.stride(0) // 2,
            self.last_group, codes.shape[0], self.factor, x_factor, inverse_width, eps, t, b, adapter_of, self.config,
        )  # fmt: skip
        return y


@functools.lru_cache(maxsize=1024)
def _config(tile: WgmmaTile, form: WeightForm, dtype: HalfType, epilogue: Epilogue, store_by_tma: bool) -> WgmmaGemm:
    dequantizer = Dequantizer(form.format, dtype, form.group, form.zero, form.scale_dtype, form.subnormal)
    token_group = 0 if epilogue.norm_parts or epilogue.residual else tile.token_group
    return WgmmaGemm(
        dequantizer, tile.tokens, tile.warpgroups, tile.stages, tile.splits, tile.sections, token_group, epilogue, store_by_tma
    )
