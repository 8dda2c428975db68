"""y[M, N] = scaled x[M, K] . dequant(w)[N, K]^T, x of 8 bits, w of fewer, wgmma and TMA: sm_90a.

Computes y^T = w x^T: codes converted to int8 or e4m3 are the register operand A of wgmma, 64 rows per warpgroup; x is operand
        B.
Reads   x by TMA, 128 columns of K per stage; w in FragmentOrder for 8-bit operands by TMA, two tiles of 64 columns per stage
Roles   load: 1 warp; math: 2 or 4 warpgroups: wait, dequantize during the previous products, wgmma, scale, store by TMA
Stages  of x and w, in one allocation with their barriers (parts/pipeline.py); warps are not synchronised with each other
Sum     int8 in s32, exact; fp8 in the tensor core, with about 14 bits. With groups (or `promote`) sums over 128 columns of K
        are scaled and added to a total in fp32; tiles of 256 tokens do so for one half of the tokens after the other. With
        splits > 1 the last block to arrive adds the splits in order, or both blocks of a cluster exchange halves of the tile
        (parts/cluster_split_k.py): same input, same bits
Exact   every weight is dequantized exactly (hardware/byte_conversions.py), never rounded; one rounding at the store
Source  wgmma fragments: PTX ISA; the pipeline is the one of large_m_gemm.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit.formats import Scheme
from lowbit.kernels.choose.scaled_gemm import ScaledShape, ScaledTile
from lowbit.kernels.parts.byte_dequantize import TILES, ByteDequantizer, dequantize
from lowbit.kernels.parts.cluster_split_k import arrive_cluster
from lowbit.kernels.parts.gluon import (
    Descriptor,
    Tuple,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    ptx,
    run,
    source_digest,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.launch import Address, TilePlan, plane_descriptors
from lowbit.kernels.parts.operand import (
    empty_registers,
    fence_registers,
    operand_a,
    read_words,
    registers_layout,
    release_stage,
    words_layout,
)
from lowbit.kernels.parts.pipeline import advance, make_barriers, previous
from lowbit.kernels.parts.producer import load
from lowbit.kernels.parts.promote import add_here, add_scaled_here, zero_half, zero_sums
from lowbit.kernels.parts.scaled_epilogue import CODE_TYPES, OutputTile, ScaledEpilogueArgs, XScale, complete, prefetch
from lowbit.kernels.parts.schedule import SplitKWorkspace, TileGrid, first_token_of, iterations_of, tile_at, tile_count
from lowbit.kernels.parts.smem import allocate, view, view_stages
from lowbit.kernels.parts.tile import STAGE_K, ByteTile


@dataclass(frozen=True)
class NarrowGemm(ByteTile):
    """The kernel's compile-time configuration. Kernels with equal configurations give bit-equal results.

    Columns are tokens; `stages` is even, and K is padded to a multiple of 256. `grouped`: scales are 16-bit floats, one for
    each group of 128 columns of K, and `promote` is True. Otherwise scales are fp32, one for each channel.
    """

    format: str
    x_type: torch.dtype
    y_type: torch.dtype
    columns: int
    warpgroups: int
    stages: int
    splits: int
    token_group: int
    grouped: bool
    promote: bool
    x_scale: XScale
    x_zero: bool
    bias: bool
    function: str
    paired: bool
    store_by_tma: bool
    digest: str = source_digest()

    tokens_are_rows = False
    stage_tiles = TILES
    """Number of FragmentOrder tiles along K in a stage."""
    iteration_stages = 2
    """Number of stages in a main-loop iteration."""

    @property
    def dequantizer(self) -> ByteDequantizer:
        return ByteDequantizer(self.format, "s8" if self.x_type == torch.int8 else "e4m3")

    @property
    def bits(self) -> int:
        return self.dequantizer.bits

    @property
    def factor(self) -> float:
        """Factor by which the epilogue multiplies all sums."""
        return self.dequantizer.conversion.scale_factor

    @property
    def channel_scale(self) -> bool:
        return not self.grouped

    @property
    def scale_bytes(self) -> int:
        return 2 * self.rows if self.grouped else 0

    @property
    def stage_bytes(self) -> int:
        return STAGE_K * (self.rows * self.bits // 8 + self.columns) + self.scale_bytes

    @property
    def operand_regions(self) -> tuple[tuple[str, int], ...]:
        w = [self.stages * TILES * self.rows * 8 * self.dequantizer.plane_words(p) for p in range(self.dequantizer.planes)]
        x = ("x", self.stages * self.columns * STAGE_K)
        return (x, *((f"w{p}", size) for p, size in enumerate(w)), ("scales", self.stages * self.scale_bytes))

    @property
    def operand_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.part_layout, 4)

    @property
    def part_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of the sums that are added to totals at once: all, or one half of the tokens."""
        return self.store_layout if self.by_halves else self.accumulator

    @property
    def registers_layout(self) -> gl.BlockedLayout:
        return registers_layout(self.warps, 4)

    def words_layout(self, plane: int) -> gl.DistributedLinearLayout:
        """Layout in which the words of a plane of a tile are loaded."""
        return words_layout(self.warps, self.dequantizer.plane_words(plane))


@aggregate
class NarrowLoaderArgs:
    """Arguments of the loader: descriptors, stages of w (for each plane of codes), of x and of scales, their barriers."""

    w_descs: Tuple
    x_desc: Descriptor
    scale_desc: Descriptor | gl.constexpr
    w: Tuple
    x: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor
    tiles: TileGrid


@aggregate
class NarrowMathArgs:
    """Arguments of the math warps: stages of w, x and scales, split-K workspace, arguments of the epilogue, y."""

    w: Tuple
    x: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    splits: SplitKWorkspace
    epilogue_args: ScaledEpilogueArgs
    out: OutputTile
    tiles: TileGrid


@gluon.jit
def load_weights(loader_args, full, stage, row_tile, k, C: gl.constexpr):
    """Starts the copies of the codes of a stage and their scales."""
    PLANES: gl.constexpr = C.dequantizer.planes
    if C.grouped:
        tma_load(loader_args.scale_desc, [k, row_tile * C.rows], full, loader_args.scales.index(stage))
    for plane in gl.static_range(PLANES):
        for tile in gl.static_range(2):
            column = (2 * k + tile) * (32 * C.bits) + ptx(C.dequantizer.plane_start, plane)
            tma_load(
                loader_args.w_descs[plane], [row_tile * C.warps, column], full, loader_args.w[plane].index(2 * stage + tile)
            )


@gluon.jit
def start(registers, x_stages, acc, stage, adds, C: gl.constexpr):
    """Starts the products of a stage, in the registers of `acc`."""
    x = x_stages.index(stage).permute([1, 0])
    return warpgroup_mma(operand_a(registers, C), x, acc, use_acc=adds, is_async=True)


@gluon.jit
def start_from_zero(registers, x_stages, before, never, stage, C: gl.constexpr):
    """Starts the products of a stage from zero. With 128 tokens the products use the registers of the sums `before`, as in
    `start_half`."""
    if C.columns == 128:
        return start(registers, x_stages, before, stage, never, C)
    else:
        return start(registers, x_stages, zero_sums(C.sums, C), stage, False, C)


@gluon.jit
def multiply(p, words, stage, phase, begin, end, more, C: gl.constexpr):
    """Computes the sums of one tile, two stages per iteration. While one stage is multiplied, the next is dequantized into a
    second set of registers.

    `words` are the words of the tile's first stage. Returns the sums, the words of the next tile's first stage (valid only if
    `more`, that is if there is a next tile), and the next stage and phase.
    """
    acc = zero_sums(C.sums, C)
    odd = empty_registers(C)
    for iteration in range(begin, end):
        before = previous(stage, C)
        even = dequantize(words, C)
        words = read_words(p.w, stage + 1, phase, True, C)
        acc = warpgroup_mma_wait(1, deps=[start(even, p.x, acc, stage, True, C)])
        release_stage(odd, before, iteration > begin, C)

        odd = dequantize(words, C)
        following, phase = advance(stage, phase, 2, C)
        words = read_words(p.w, following, phase, (iteration + 1 < end) | more, C)
        acc = warpgroup_mma_wait(1, deps=[start(odd, p.x, acc, stage + 1, True, C)])
        release_stage(even, stage, True, C)
        stage = following
    acc = warpgroup_mma_wait(0, deps=[acc])
    release_stage(odd, previous(stage, C), begin < end, C)
    return acc, words, stage, phase


@gluon.jit
def scale_of(scales, stage, C: gl.constexpr):
    """Loads the scale of each row for a stage that has arrived; 1 if scales do not change along K."""
    if C.grouped:
        return scales.index(stage).load(gl.SliceLayout(1, C.part_layout)).to(gl.float32)
    else:
        return 1.0


@gluon.jit
def add_stage(total, sums, scale, C: gl.constexpr):
    """Returns the total plus the scaled sums of a stage; compilers do not move the addition."""
    if C.grouped:
        return add_scaled_here(total, sums, scale[:, None])
    else:
        return add_here(total, sums)


@gluon.jit
def multiply_and_promote(p, even, words, stage, phase, begin, end, more, never, C: gl.constexpr):
    """As `multiply`, but each stage is summed separately, scaled and added to a total in fp32.

    `even`: the dequantized first stage of the tile. `words`: the words of its second stage. Both are also returned for the next
    tile. While the sums of a stage are added, other warpgroups use the tensor cores.
    """
    sums = zero_sums(C.sums, C)
    total = zero_sums(gl.float32, C)
    for iteration in range(begin, end):
        sums = start_from_zero(even, p.x, sums, never, stage, C)
        scale = scale_of(p.scales, stage, C)
        odd = dequantize(words, C)
        following, phase = advance(stage, phase, 2, C)
        words = read_words(p.w, following, phase, (iteration + 1 < end) | more, C)
        fence_registers(odd, stage, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        total = add_stage(total, sums, scale, C)
        release_stage(even, stage, True, C)

        sums = start_from_zero(odd, p.x, sums, never, stage + 1, C)
        scale = scale_of(p.scales, stage + 1, C)
        even = dequantize(words, C)
        words = read_words(p.w, following + 1, phase, (iteration + 1 < end) | more, C)
        fence_registers(even, stage, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        total = add_stage(total, sums, scale, C)
        release_stage(odd, stage + 1, True, C)
        stage = following
    return total, even, words, stage, phase


@gluon.jit
def start_half(registers, x_stages, before, never, stage, half: gl.constexpr, C: gl.constexpr):
    """Starts the products of a stage with one half of the tokens, into the registers of the sums `before`.

    The products start from zero, because `never`, the flag to add to `before`, is always False. Compilers cannot see that, so
    they use no other registers.
    """
    x = x_stages.index(stage).slice(half * C.store_columns, C.store_columns).permute([1, 0])
    return warpgroup_mma(operand_a(registers, C), x, before, use_acc=never, is_async=True)


@gluon.jit
def multiply_by_halves(p, stage, phase, begin, end, never, C: gl.constexpr):
    """As `multiply_and_promote`, for 256 tokens. Their totals leave registers only for sums of 128 tokens, so the halves are
    multiplied one after the other.

    While the second half is multiplied, the next stage is dequantized. Returns the totals of both halves, the next stage and
    phase. Nothing of the next tile is read ahead, since there are no registers for it while this tile is stored.
    """
    sums = zero_half(C.sums, C)
    low = zero_half(gl.float32, C)
    high = zero_half(gl.float32, C)
    registers = dequantize(read_words(p.w, stage, phase, begin < end, C), C)
    for k in range(2 * begin + 1, 2 * end + 1):
        sums = start_half(registers, p.x, sums, never, stage, 0, C)
        scale = scale_of(p.scales, stage, C)
        following, phase = advance(stage, phase, 1, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        low = add_stage(low, sums, scale, C)
        sums = start_half(registers, p.x, sums, never, stage, 1, C)
        ahead = dequantize(read_words(p.w, following, phase, k < 2 * end, C), C)
        fence_registers(ahead, stage, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        release_stage(registers, stage, True, C)
        high = add_stage(high, sums, scale, C)
        registers, stage = ahead, following
    return (low, high), stage, phase


@gluon.jit
def math(p, C: gl.constexpr):
    """The math role: warpgroups that dequantize, multiply and store."""
    tiles = tile_count(p.tiles, C)
    if C.paired:
        arrive_cluster(C.warps, C)
    stage = 0
    phase = 0
    if not C.by_halves:
        words = read_words(p.w, 0, 0, gl.program_id(0) < tiles, C)
        if C.promote:
            even = dequantize(words, C)
            words = read_words(p.w, 1, 0, gl.program_id(0) < tiles, C)
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, row_tile, split = tile_at(index, p.tiles, C)
        begin, end = iterations_of(split, p.tiles, C)
        prefetch(p.epilogue_args, row_tile * C.rows, p.out.N, C)
        more = index + gl.num_programs(0) < tiles
        if C.by_halves:
            acc, stage, phase = multiply_by_halves(p, stage, phase, begin, end, p.out.M < 0, C)
        elif C.promote:
            never = p.out.M < 0
            acc, even, words, stage, phase = multiply_and_promote(p, even, words, stage, phase, begin, end, more, never, C)
        else:
            acc, words, stage, phase = multiply(p, words, stage, phase, begin, end, more, C)
        tile = token_tile * p.tiles.of_channels + row_tile
        first_token = first_token_of(token_tile, p.tiles, C)
        complete(p.out, acc, p.epilogue_args, p.splits, tile, split, first_token, row_tile * C.rows, C)
    if C.store_by_tma:
        tma_store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "token_tiles", "channel_tiles", "iterations"])
def narrow_scaled_gemm(
    w_desc, w_desc_1, w_desc_2, x_desc, scale_desc, y_desc, y, x_scale, x_zero, channel_scale, sums, bias, y_scale, partial,
    arrived, M, N, token_tiles, channel_tiles, iterations, C: gl.constexpr,
):  # fmt: skip
    """Sets up stages, barriers and roles. There is one descriptor of w per plane of codes; the others are None."""
    PLANES: gl.constexpr = C.dequantizer.planes
    w_descs = (w_desc, w_desc_1, w_desc_2)
    shared = allocate(C)
    x = view_stages(shared, C.regions, "x", C.stages, x_desc)
    w = ()
    for p in gl.static_range(PLANES):
        w = w + (view_stages(shared, C.regions, f"w{p}", 2 * C.stages, w_descs[p]),)
    scale_stages = x
    scales = x  # replaced if there are group scales
    if C.grouped:
        scale_stages = view_stages(shared, C.regions, "scales", C.stages, scale_desc)
        rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales = view(shared, C.regions, "scales", scale_desc.dtype, [C.stages, C.rows], rows)
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
    epilogue_args = ScaledEpilogueArgs(x_scale, x_zero, channel_scale, sums, bias, y_scale)
    math_args = NarrowMathArgs(
        w, x, scales, SplitKWorkspace(partial, arrived), epilogue_args, OutputTile(y_desc, y, y_tile, M, N), tiles
    )
    loader_args = NarrowLoaderArgs(w_descs, x_desc, scale_desc, w, x, scale_stages, barriers, tiles)
    if C.paired:
        gl.warp_specialize(
            [(math, (math_args, C)), (load, (loader_args, gl.constexpr(load_weights), C)), (arrive_cluster, (1, C)),
             (arrive_cluster, (2, C))],
            [1, 1, 2], [24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize([(math, (math_args, C)), (load, (loader_args, gl.constexpr(load_weights), C))], [1], [24])


@functools.lru_cache(maxsize=1024)
def narrow_config(
    shape: ScaledShape, tile: ScaledTile, scheme: Scheme, dtype: torch.dtype, x_scale: XScale, x_zero: bool, bias: bool,
    function: str = "none",
) -> NarrowGemm:  # fmt: skip
    """Returns the kernel's configuration for a shape, tile and scheme."""
    assert scheme.activation is not None
    by_tma = (tile.splits == 1 or tile.pair) and shape.n * dtype.itemsize % 16 == 0 and dtype != torch.float32
    return NarrowGemm(
        scheme.weight.name, CODE_TYPES[scheme.activation.name], dtype, tile.columns, tile.warpgroups, tile.stages,
        tile.splits, tile.token_group, shape.grouped, shape.promoted, x_scale, x_zero, bias, function, tile.pair, by_tma,
    )  # fmt: skip


class NarrowPlan(TilePlan):
    """The plan of a GEMM with 8-bit activations and weights of fewer bits."""

    def __init__(self, shape: ScaledShape, tile: ScaledTile, config: NarrowGemm, sm_count: int) -> None:
        super().__init__(narrow_scaled_gemm, shape, tile, config, sm_count)
        self.iterations = -(-shape.k // (2 * STAGE_K))
        blocks = [(config.warps, 32 * config.dequantizer.plane_words(p)) for p in range(config.dequantizer.planes)]
        self.weight_descriptors = plane_descriptors(-(-shape.n // 16), -(-shape.k // 64) * 32 * shape.bits, blocks)
        self.scale_descriptor = functools.lru_cache(maxsize=1024)(self._scale_descriptor)

    def _scale_descriptor(self, address: int, shape: torch.Size, dtype: torch.dtype) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
        return TensorDescriptor(Address(address, dtype), [*shape], [shape[1], 1], [1, self.config.rows], layout)

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
            *self.weight_descriptors(codes.data_ptr()), self.x_descriptor(x.data_ptr(), x.stride(0)),
            None if scale is None else self.scale_descriptor(scale.data_ptr(), scale.shape, scale.dtype),
            self.y_descriptor(y.data_ptr()), y, x_scale, x_zero, channel_scale, sums, bias, y_scale, workspace, arrived,
            m, n, *self.tiles, self.iterations, self.config,
        )  # fmt: skip
        return y
