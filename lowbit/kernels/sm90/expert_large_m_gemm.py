"""y[slot] = x[slot's position] . dequant(w[expert of slot])[N, K]^T for many rows per expert, wgmma and TMA: sm_90a.

Computes y^T = w x^T like large_m_gemm.py, with the same main loop (parts/wgmma_loop.py).
Reads   x in the order of slots sorted by expert, by TMA in swizzled tiles of tokens x 64 columns of K. The rows of an expert
        are contiguous; a tile with fewer rows also loads rows of the next expert, which are multiplied but not stored. w in
        FragmentOrder by TMA, all experts as one matrix; the list of tiles of ops/route.py: (expert, first position, rows)
Roles   load: 1 warp; math: 2 warpgroups: wait, dequantize, scale, wgmma with two steps in flight, store
Grid    persistent, one block per SM; blocks take tiles round-robin. The number of tiles is read from memory. Row tiles of the
        same entry of the list are neighbours, and the next entry is often one of the same expert, so L2 serves x and w
Sum     in fp32, K in order: same input, same bits
Epilogue  scales, bias of the expert, gate, router weight; a row of y for each slot, 8 channels at a time, rounded once
Exact   every weight is dequantized exactly and rounded once after scaling. Tested: tests/ops/test_expert_gemm.py
Source  wgmma fragments: PTX ISA; docs/log/matrix-products.md, 2026-11-24
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.experts import ExpertShape
from lowbit.kernels.choose.tiles import WgmmaTile
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
    prefetch_descriptor,
    ptx,
    source_digest,
    tma_load,
)
from lowbit.kernels.parts.large_m_epilogue import LargeMEpilogueArgs, finished_tile
from lowbit.kernels.parts.launch import Launcher, descriptors, plane_descriptors
from lowbit.kernels.parts.operand import read_words
from lowbit.kernels.parts.pipeline import acquire, advance, make_barriers
from lowbit.kernels.parts.prologue import launch_next_kernel, wait_for_previous_kernel
from lowbit.kernels.parts.smem import UNIT, Regions, allocate, view_stages
from lowbit.kernels.parts.wgmma_loop import STAGE_K, WgmmaBlock, load_scales, multiply
from lowbit.pack.weight import WeightForm


@dataclass(frozen=True)
class ExpertWgmmaGemm(WgmmaBlock):
    """The kernel's compile-time configuration. Kernels with equal configurations give bit-equal results.

    A tile is `tokens` x 64 * warpgroups rows of w. A stage has 64 columns of K; `stages` is even, and K is padded to a multiple
    of 128. `whole`: rows of y are whole vectors of 8 elements. `weighted`: y is multiplied by the router weight.
    """

    dequantizer: Dequantizer
    tokens: int
    warpgroups: int
    stages: int
    epilogue: Epilogue
    whole: bool
    weighted: bool
    digest: str = source_digest()

    @property
    def channels(self) -> int:
        """Number of channels of y in a tile."""
        return self.rows if self.epilogue.gate == "none" else self.rows // 2

    @property
    def regions(self) -> Regions:
        w = [(f"w{p}", self.stages * self.rows * 8 * self.dequantizer.plane_words(p)) for p in range(self.dequantizer.planes)]
        return Regions((("x", self.stages * self.tokens * 128), *w, ("barriers", UNIT)))

    @property
    def store_layout(self) -> gl.BlockedLayout:
        """[channels, tokens] with 8 channels per thread; neighbouring lanes have neighbouring channels."""
        lanes = min(32, self.channels // 8)
        return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, self.warps], [0, 1])


@aggregate
class TileList:
    """The list of tiles, and the numbers of its tiles, of an expert's row tiles and row blocks, and of iterations that cover
    K."""

    tiles: Scalar
    count: Scalar
    row_tiles: Scalar
    row_blocks: Scalar
    iterations: Scalar


@aggregate
class ListedTile:
    """A tile: its expert, first position and number of rows from the list, and its first row block within the expert."""

    expert: gl.tensor
    first: gl.tensor
    rows: gl.tensor
    row_block: gl.tensor


@aggregate
class ExpertLoaderArgs:
    """Arguments of the loader: descriptors, the stages of w (for each plane of codes) and of x, their barriers."""

    w_descs: Tuple
    x_desc: Descriptor
    w: Tuple
    x: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor
    listed: TileList


@aggregate
class ExpertScales:
    """Scale and zero words of groups. Row blocks are `stride` words apart; K ends within group `last_group`."""

    words: Scalar
    stride: Scalar
    last_group: Scalar


@aggregate
class SlotOutput:
    """y with `columns` columns; N; the slots in `order`; router weights."""

    y: Scalar
    columns: Scalar
    N: Scalar
    order: Scalar
    weights: Scalar


@aggregate
class ExpertMathArgs:
    """Arguments of the math warps: stages of w and x, scales, arguments of the epilogue, y."""

    w: Tuple
    x: gl.shared_memory_descriptor
    scales: ExpertScales
    epilogue_args: LargeMEpilogueArgs
    out: SlotOutput
    listed: TileList


@gluon.jit
def listed_tile(index, listed, C: gl.constexpr):
    """Returns the tile with index `index`. The last row tile of an expert begins early enough to be full; rows that are in two
    tiles are stored twice, with the same bits."""
    entry = listed.tiles + 3 * (index // listed.row_tiles)
    row_block = gl.minimum(index % listed.row_tiles * C.warps, listed.row_blocks - C.warps)
    return ListedTile(gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), row_block)


@gluon.jit
def load_experts(loader_args, C: gl.constexpr):
    """The loader role: all stages of all tiles of a block, by TMA."""
    PLANES: gl.constexpr = C.dequantizer.planes
    listed = loader_args.listed
    wait_for_previous_kernel()
    launch_next_kernel()
    total = gl.load(listed.count) * listed.row_tiles
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        tile = listed_tile(index, listed, C)
        row_block = tile.expert * listed.row_blocks + tile.row_block
        for k in range(0, listed.iterations * C.iteration_stages):
            full = acquire(loader_args.barriers, stage, phase, C)
            for plane in gl.static_range(PLANES):
                column = k * (32 * C.dequantizer.bits) + ptx(C.dequantizer.plane_start, plane)
                tma_load(loader_args.w_descs[plane], [row_block, column], full, loader_args.w[plane].index(stage))
            tma_load(loader_args.x_desc, [tile.first, k * C.x_block[1]], full, loader_args.x.index(stage))
            stage, phase = advance(stage, phase, 1, C)


@gluon.jit
def first_scales(p, tile, thread, C: gl.constexpr):
    """Returns the address of the scales of a thread's row pair, and its words for a tile's first two iterations."""
    row_block = tile.expert * p.listed.row_blocks + tile.row_block + (thread >> 5)
    scale = p.scales.words + row_block.to(gl.int64) * p.scales.stride + ((thread & 31) >> 2) * C.dequantizer.group_words
    last = p.scales.last_group
    return scale, load_scales(scale, 0, last, C) + load_scales(scale, 1, last, C)


@gluon.jit
def store_slots(p, acc, tile, C: gl.constexpr):
    """Applies scales, bias, gate and router weights, rounds once, and stores the rows of a tile's slots, 8 neighbouring
    channels at a time."""
    STORED: gl.constexpr = C.store_layout
    of_expert = tile.expert.to(gl.int64) * p.out.N
    channel_scale = p.epilogue_args.channel_scale
    bias = p.epilogue_args.bias
    if C.epilogue.channel_scale:
        channel_scale += of_expert
    if C.epilogue.bias:
        bias += of_expert
    epilogue_args = LargeMEpilogueArgs(channel_scale, bias, p.epilogue_args.factor)
    acc, first_channel = finished_tile(acc, epilogue_args, tile.row_block * 16, p.out.N, C)
    slots = p.out.order + tile.first
    if C.weighted:
        LIKE: gl.constexpr = C.accumulator if C.epilogue.gate == "none" else acc.type.layout
        token = gl.arange(0, C.tokens, gl.SliceLayout(0, LIKE))
        slot = gl.load(slots + token, mask=token < tile.rows, other=0)
        acc = acc * gl.load(p.out.weights + slot, mask=token < tile.rows, other=0.0)[None, :]
    columns = p.out.columns
    if C.whole:
        columns = columns * 8
    result = gl.convert_layout(acc.to(C.dequantizer.operand_type), STORED)
    channels = first_channel + gl.arange(0, C.channels, gl.SliceLayout(1, STORED))
    token = gl.arange(0, C.tokens, gl.SliceLayout(0, STORED))
    slot = gl.load(slots + token, mask=token < tile.rows, other=0)
    at = p.out.y + slot.to(gl.int64)[None, :] * columns + channels[:, None]
    gl.store(at, result, mask=(channels < columns)[:, None] & (token < tile.rows)[None, :])


@gluon.jit
def multiply_experts(p, C: gl.constexpr):
    """The math role: warpgroups that dequantize, multiply and store."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    wait_for_previous_kernel()
    total = gl.load(p.listed.count) * p.listed.row_tiles
    blocks = gl.num_programs(0)
    stage = 0
    phase = 0
    tile = listed_tile(gl.maximum(gl.minimum(gl.program_id(0), total - 1), 0), p.listed, C)
    scale, ahead = first_scales(p, tile, thread, C)
    words = read_words(p.w, stage, phase, gl.program_id(0) < total, C)
    for index in range(gl.program_id(0), total, blocks):
        more = index + blocks < total
        acc, words, stage, phase = multiply(
            p, scale, ahead, words, stage, phase, 0, p.listed.iterations, more, C
        )  # fmt: skip
        following = listed_tile(gl.minimum(index + blocks, total - 1), p.listed, C)
        scale, ahead = first_scales(p, following, thread, C)
        store_slots(p, acc, tile, C)
        tile = following


SIZES = ["N", "columns", "row_tiles", "row_blocks", "iterations", "scale_stride", "last_group"]


@gluon.jit(do_not_specialize=SIZES)
def expert_wgmma_gemm(
    w_desc, w_desc_1, w_desc_2, x_desc, y, scale, channel_scale, bias, tiles, tile_count, order, weights, N, columns, row_tiles,
    row_blocks, iterations, scale_stride, last_group, factor, C: gl.constexpr,
):  # fmt: skip
    """Sets up stages, barriers and roles. There is one descriptor of w per plane of codes; the others are None."""
    PLANES: gl.constexpr = C.dequantizer.planes
    w_descs = (w_desc, w_desc_1, w_desc_2)
    prefetch_descriptor(w_desc, "expert_wgmma_gemm")
    if PLANES > 1:
        prefetch_descriptor(w_desc_1, "expert_wgmma_gemm")
    if PLANES > 2:
        prefetch_descriptor(w_desc_2, "expert_wgmma_gemm")
    prefetch_descriptor(x_desc, "expert_wgmma_gemm")
    shared = allocate(C)
    x = view_stages(shared, C.regions, "x", C.stages, x_desc)
    w = ()
    for p in gl.static_range(PLANES):
        w = w + (view_stages(shared, C.regions, f"w{p}", C.stages, w_descs[p]),)
    barriers = make_barriers(shared, C)
    fence_async_shared()
    barrier()
    listed = TileList(tiles, tile_count, row_tiles, row_blocks, iterations)
    math_args = ExpertMathArgs(
        w, x, ExpertScales(scale, scale_stride, last_group), LargeMEpilogueArgs(channel_scale, bias, factor),
        SlotOutput(y, columns, N, order, weights), listed,
    )  # fmt: skip
    loader_args = ExpertLoaderArgs(w_descs, x_desc, w, x, barriers, listed)
    # All math warpgroups are one role, as in large_m_gemm.py.
    gl.warp_specialize([(multiply_experts, (math_args, C)), (load_experts, (loader_args, C))], [1], [24])


class ExpertWgmmaPlan:
    """Plan of a product of experts with many rows each, for one shape: created once, called many times."""

    def __init__(
        self, shape: ExpertShape, tile: WgmmaTile, form: WeightForm, dtype: torch.dtype, epilogue: Epilogue, machine: Machine,
        *, weighted: bool = False,
    ) -> None:  # fmt: skip
        if tile.splits != 1 or tile.sections != 1 or tile.tokens != shape.tile_rows or tile.rows // 16 > shape.row_blocks:
            raise ValueError(
                f"{tile}: a tile has {shape.tile_rows} rows of x, all of K and at most {shape.row_blocks} row blocks"
            )
        if tile.stages < 4:
            raise ValueError(f"{tile}: the kernel waits for itself with less than 4 stages")
        self.shape, self.tile = shape, tile
        self.columns = shape.n if epilogue.gate == "none" else shape.n // 2
        self.config = config = _config(tile, form, half_type(dtype), epilogue, self.columns % 8 == 0, weighted)
        self.row_tiles = -(-shape.row_blocks // (tile.rows // 16))
        grid = (max(1, min(machine.sm_count, shape.most_tiles * self.row_tiles)), 1, 1)
        self.launch = Launcher(expert_wgmma_gemm, grid, config.warps, overlap=True)
        self.factor = config.dequantizer.epilogue_factor
        self.last_group = (shape.k - 1) // max(form.group, 1)
        self.x_descriptor = descriptors(config.x_type, (shape.slots, shape.k), config.x_block, config.x_shared_layout)
        blocks = [(config.warps, 32 * config.dequantizer.plane_words(p)) for p in range(config.dequantizer.planes)]
        row_words = shape.steps(STAGE_K) * 32 * shape.bits
        self.weight_descriptors = plane_descriptors(shape.experts * shape.row_blocks, row_words, blocks)

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        tiles: Tensor, tile_count: Tensor, order: Tensor, weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns y [slots, N], or [slots, N / 2] with a gate, of x [slots, K] in the order of `order`, whose rows start at
        multiples of 16 bytes. Codes and scales are those of pack/expert.py; `tiles` [any, 3], `tile_count` [1], `order` and
        `weights` [slots] those of ops/route.py. All tensors are on the current device."""
        y = torch.empty((self.shape.slots, self.columns), dtype=x.dtype, device=x.device)
        self.launch(
            *self.weight_descriptors(codes.data_ptr()), self.x_descriptor(x.data_ptr(), x.stride(0)), y,
            codes if scale is None else scale.view(torch.int32), channel_scale, bias, tiles, tile_count, order, weights,
            self.shape.n, self.columns // 8 if self.config.whole else self.columns, self.row_tiles, self.shape.row_blocks,
            self.shape.steps(2 * STAGE_K), 0 if scale is None else scale.stride(1) // 2, self.last_group, self.factor,
            self.config,
        )  # fmt: skip
        return y


@functools.lru_cache(maxsize=1024)
def _config(
    tile: WgmmaTile, form: WeightForm, dtype: HalfType, epilogue: Epilogue, whole: bool, weighted: bool
) -> ExpertWgmmaGemm:  # fmt: skip
    dequantizer = Dequantizer(form.format, dtype, form.group, form.zero, form.scale_dtype, form.subnormal)
    return ExpertWgmmaGemm(dequantizer, tile.tokens, tile.warpgroups, tile.stages, epilogue, whole, weighted)
