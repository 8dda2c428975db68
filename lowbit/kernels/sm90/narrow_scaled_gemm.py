"""y[M, N] = (x[M, K] . dequant(w)[N, K]^T) scaled, x of 8 bits, w of fewer, wgmma and TMA: sm_90a.

Computes y^T = w x^T: codes decoded to int8 or e4m3 are the register operand A of wgmma, 64 rows a warpgroup; x is operand B.
Reads   x by TMA, 128 k of some tokens a stage; w in FragmentOrder for 8-bit operands by TMA, two tiles of 64 k
Roles   load: 1 warp; math: 2 or 4 warpgroups: wait, decode while the stage before multiplies, wgmma, scale, store by TMA
Ring    `stages` of x and w, in one allocation with their barriers (parts/stages.py); warps run free of one another
Sum     int8 in s32, exact; fp8 in the tensor core, about 14 bits. With groups (or `promote`) every 128 k go, scaled, to a sum
        in fp32; of 256 tokens one half after the other. With splits > 1 the block that comes last adds the splits in order, or
        both blocks of a pair swap halves of the tile (parts/pair.py): same input, same bits
Exact   every weight is decoded exactly (hardware/byte_conversions.py) and never rounded; one rounding at the store
Source  wgmma fragments: PTX ISA; the pipeline is that of mixed_gemm.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit.formats import Scheme
from lowbit.kernels.choose.scaled_gemm import ScaledShape, ScaledTile
from lowbit.kernels.parts.byte_decode import OPERAND_REGISTERS, TILES, ByteDecode, decode, operand_a
from lowbit.kernels.parts.epilogue import CODE_TYPES, XScale, bring
from lowbit.kernels.parts.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    part,
    ptx,
    run,
    source_digest,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from lowbit.kernels.parts.pair import say_ready, swap
from lowbit.kernels.parts.promote import add_here, add_scaled_here
from lowbit.kernels.sm90.byte_tile import STAGE_K, TILE_K, Address, ByteTile, TilePlan, compiled
from lowbit.kernels.sm90.mixed_gemm import UNIT, UNIT_WORDS, WgmmaGemm, finish, meet, tile_at, words_of
from lowbit.kernels.sm90.scaled_gemm import halves, store, store_half, store_halves


@dataclass(frozen=True)
class NarrowGemm(ByteTile):
    """All that is fixed when the kernel is compiled. Of two equal ones, results are equal to the last bit.

    Columns are tokens; `stages` is even, and K counts as if it were a multiple of 256. `grouped`: scales of groups of 128 k in
    16 bits, and `promote`; without, one per channel in fp32.
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
    hold = WgmmaGemm.hold

    @property
    def decode(self) -> ByteDecode:
        return ByteDecode(self.format, "s8" if self.x_type == torch.int8 else "e4m3")

    @property
    def bits(self) -> int:
        return self.decode.bits

    @property
    def factor(self) -> float:
        """What the decoded numbers must still be multiplied by."""
        return self.decode.conversion.scale_factor

    @property
    def channel_scale(self) -> bool:
        return not self.grouped

    @property
    def planes(self) -> int:
        return self.decode.planes

    def plane_words(self, plane: int) -> int:
        """As `mixed_gemm.words_of` asks for them."""
        return self.decode.plane_words(plane)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales of a stage."""
        return 2 * self.rows if self.grouped else 0

    @property
    def stage_bytes(self) -> int:
        return STAGE_K * (self.rows * self.bits // 8 + self.tokens) + self.scale_bytes

    def w_unit(self, plane: int) -> int:
        """Where the words of a plane start in shared memory, in units; x is at 0."""
        before = (self.stages * TILES * self.rows * 8 * self.plane_words(p) for p in range(plane))
        return self.stages * self.tokens * STAGE_K // UNIT + sum(-(-size // UNIT) for size in before)

    @property
    def scale_unit(self) -> int:
        return self.w_unit(self.planes)

    @property
    def y_unit(self) -> int:
        return self.scale_unit + -(-self.stages * self.scale_bytes // UNIT)

    @property
    def operand_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.part_layout, 4)

    @property
    def part_layout(self) -> gl.NVMMADistributedLayout:
        """The sums that are added to totals at a time."""
        return self.store_layout if self.by_halves else self.accumulator

    def words_layout(self, plane: int) -> gl.DistributedLinearLayout:
        """Words [strips, 32 lanes * words]: a warp for each strip, neighbouring words in one load."""
        words = self.plane_words(plane)
        register = [[0, 1 << i] for i in range(words.bit_length() - 1)]
        lane = [[0, words << i] for i in range(5)]
        warp = [[1 << i, 0] for i in range(self.warps.bit_length() - 1)]
        return gl.DistributedLinearLayout(register, lane, warp, [], [self.warps, 32 * words])

    @property
    def quads_layout(self) -> gl.BlockedLayout:
        """[threads, 4]: four elements per thread."""
        return gl.BlockedLayout([1, 4], [32, 1], [self.warps, 1], [1, 0])


@gluon.jit
def load_words(w_descs, w_ring, scale_desc, scale_ring, full, stage, row_tile, k, C: gl.constexpr):
    """Asks for the codes of a stage and their scales."""
    PLANES: gl.constexpr = C.planes
    if C.grouped:
        tma_load(scale_desc, [k, row_tile * C.rows], full, scale_ring.index(stage))
    for plane in gl.static_range(PLANES):
        for tile in gl.static_range(2):
            column = (2 * k + tile) * (32 * C.bits) + ptx(C.decode.plane_start, plane)
            tma_load(w_descs[plane], [row_tile * C.warps, column], full, w_ring[plane].index(2 * stage + tile))


@gluon.jit
def load(read, C: gl.constexpr):
    """The warp that keeps the ring full. The first weights do not wait for the kernel before this one."""
    w_descs, x_desc, scale_desc, w_ring, x_ring, scale_ring, barriers, token_tiles, row_tiles, turns = read
    if C.paired:
        say_ready(1, C)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents;\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    tiles = token_tiles * row_tiles * C.splits
    token_tile, row_tile, split = tile_at(gl.program_id(0), token_tiles, row_tiles, C)
    begin, end = turns * split // C.splits * 2, turns * (split + 1) // C.splits * 2
    ahead = gl.where(gl.program_id(0) < tiles, gl.minimum(end - begin, C.stages_ahead), 0)
    for i in range(0, ahead):
        mbarrier.expect(barriers.index(i), C.stage_bytes)
        load_words(w_descs, w_ring, scale_desc, scale_ring, barriers.index(i), i, row_tile, begin + i, C)
    gl.inline_asm_elementwise("griddepcontrol.wait;\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, row_tile, split = tile_at(index, token_tiles, row_tiles, C)
        for k in range(turns * split // C.splits * 2, turns * (split + 1) // C.splits * 2):
            full = barriers.index(stage)
            if ahead == 0:
                mbarrier.wait(barriers.index(C.stages + stage), phase)
                mbarrier.expect(full, C.stage_bytes)
                load_words(w_descs, w_ring, scale_desc, scale_ring, full, stage, row_tile, k, C)
            ahead = gl.maximum(ahead - 1, 0)
            tma_load(x_desc, [token_tile * C.tokens, k * TILE_K], full, x_ring.index(stage))
            stage = gl.where(stage + 1 == C.stages, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)


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
    for tile in gl.static_range(2):
        for p in gl.static_range(PLANES):
            words = words + words_of(w_ring[p].index(2 * stage + tile).load(ptx(C.words_layout, p)), C, p)
    return words


@gluon.jit
def start(registers, x_ring, acc, stage, adds, C: gl.constexpr):
    """Starts the products of a stage, in the registers of `acc`."""
    x = x_ring.index(stage).permute([1, 0])
    return warpgroup_mma(operand_a(registers, C), x, acc, use_acc=adds, is_async=True)


@gluon.jit
def start_apart(registers, x_ring, before, never, stage, C: gl.constexpr):
    """Starts the products of a stage, from zero. Of 128 tokens, in the registers of the sums `before`: see `start_half`."""
    ROWS: gl.constexpr = C.rows
    TOKENS: gl.constexpr = C.tokens
    SUMS: gl.constexpr = C.accumulator
    TYPE: gl.constexpr = C.sums
    if C.columns == 128:
        return start(registers, x_ring, before, stage, never, C)
    else:
        return start(registers, x_ring, gl.zeros((ROWS, TOKENS), TYPE, SUMS), stage, False, C)


@gluon.jit
def nothing_decoded(C: gl.constexpr):
    """Registers for the stage before the first one, which does not exist."""
    THREADS: gl.constexpr = C.threads
    EACH: gl.constexpr = C.threads_layout
    registers = ()
    for _ in gl.static_range(OPERAND_REGISTERS):
        registers = registers + (gl.zeros((THREADS,), gl.int32, EACH),)
    return registers


@gluon.jit
def multiply(w_ring, x_ring, words, stage, phase, begin, end, more, C: gl.constexpr):
    """The sums of one tile, two stages a turn. While one multiplies, the next is decoded, into other registers.

    `words` are those of the tile's first stage; returned are those of the next tile's, if there is `more`, with the stage
    and the phase that come next.
    """
    ROWS: gl.constexpr = C.rows
    TOKENS: gl.constexpr = C.tokens
    SUMS: gl.constexpr = C.accumulator
    TYPE: gl.constexpr = C.sums
    acc = gl.zeros((ROWS, TOKENS), TYPE, SUMS)
    odd = nothing_decoded(C)
    for turn in range(begin, end):
        before = gl.where(stage == 0, C.stages, stage) - 1
        even = decode(words, C)
        words = read_words(w_ring, stage + 1, phase, True, C)
        acc = warpgroup_mma_wait(1, deps=[start(even, x_ring, acc, stage, True, C)])
        finish(odd, before, turn > begin, C)

        odd = decode(words, C)
        following = gl.where(stage + 2 == C.stages, 0, stage + 2)
        phase = gl.where(following == 0, phase ^ 1, phase)
        words = read_words(w_ring, following, phase, (turn + 1 < end) | more, C)
        acc = warpgroup_mma_wait(1, deps=[start(odd, x_ring, acc, stage + 1, True, C)])
        finish(even, stage, True, C)
        stage = following
    acc = warpgroup_mma_wait(0, deps=[acc])
    finish(odd, gl.where(stage == 0, C.stages, stage) - 1, begin < end, C)
    return acc, words, stage, phase


@gluon.jit
def keep(registers, stage, C: gl.constexpr):
    """Has the registers of a stage to come decoded by here: compilers would put that behind the next wait."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    run(C.hold, "=r" + ",r" * (OPERAND_REGISTERS + 1), registers + (thread * 0 + stage,))


@gluon.jit
def scale_of(scales, stage, C: gl.constexpr):
    """The scale of each row for a stage that is there; 1 where they do not change along K."""
    if C.grouped:
        return scales.index(stage).load(gl.SliceLayout(1, C.part_layout)).to(gl.float32)
    else:
        return 1.0


@gluon.jit
def add_stage(total, sums, scale, C: gl.constexpr):
    """The total with the sums of a stage, times its scales, in just this place."""
    if C.grouped:
        return add_scaled_here(total, sums, scale[:, None])
    else:
        return add_here(total, sums)


@gluon.jit
def multiply_apart(w_ring, x_ring, scales, even, words, stage, phase, begin, end, more, never, C: gl.constexpr):
    """As `multiply`, but each stage is summed on its own and then added, scaled, to a total in fp32.

    `even` is the tile's first stage, decoded, `words` those of the second one; returned are those of the next tile. While the
    sums of a stage are added, other warpgroups have the tensor cores.
    """
    ROWS: gl.constexpr = C.rows
    TOKENS: gl.constexpr = C.tokens
    SUMS: gl.constexpr = C.accumulator
    TYPE: gl.constexpr = C.sums
    sums = gl.zeros((ROWS, TOKENS), TYPE, SUMS)
    total = gl.zeros((ROWS, TOKENS), gl.float32, SUMS)
    for turn in range(begin, end):
        sums = start_apart(even, x_ring, sums, never, stage, C)
        scale = scale_of(scales, stage, C)
        odd = decode(words, C)
        following = gl.where(stage + 2 == C.stages, 0, stage + 2)
        phase = gl.where(following == 0, phase ^ 1, phase)
        words = read_words(w_ring, following, phase, (turn + 1 < end) | more, C)
        keep(odd, stage, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        total = add_stage(total, sums, scale, C)
        finish(even, stage, True, C)

        sums = start_apart(odd, x_ring, sums, never, stage + 1, C)
        scale = scale_of(scales, stage + 1, C)
        even = decode(words, C)
        words = read_words(w_ring, following + 1, phase, (turn + 1 < end) | more, C)
        keep(even, stage, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        total = add_stage(total, sums, scale, C)
        finish(odd, stage + 1, True, C)
        stage = following
    return total, even, words, stage, phase


@gluon.jit
def start_half(registers, x_ring, before, never, stage, half: gl.constexpr, C: gl.constexpr):
    """Starts the products of a stage with one half of the tokens, into the registers of the sums `before`.

    They start at zero, as `never` is False, but the compiler does not know it and gives them no registers of their own.
    """
    x = x_ring.index(stage).slice(half * C.store_columns, C.store_columns).permute([1, 0])
    return warpgroup_mma(operand_a(registers, C), x, before, use_acc=never, is_async=True)


@gluon.jit
def multiply_by_halves(w_ring, x_ring, scales, stage, phase, begin, end, never, C: gl.constexpr):
    """As `multiply_apart` for 256 tokens, whose totals leave registers for the sums of 128: one half after the other.

    While the second half multiplies, the next stage is decoded. Returned are the totals of both halves, with the stage and the
    phase that come next. Nothing of the next tile is read ahead: no registers could keep it while this one is stored.
    """
    ROWS: gl.constexpr = C.rows
    TOKENS: gl.constexpr = C.store_columns
    SUMS: gl.constexpr = C.store_layout
    TYPE: gl.constexpr = C.sums
    sums = gl.zeros((ROWS, TOKENS), TYPE, SUMS)
    low = gl.zeros((ROWS, TOKENS), gl.float32, SUMS)
    high = gl.zeros((ROWS, TOKENS), gl.float32, SUMS)
    registers = decode(read_words(w_ring, stage, phase, begin < end, C), C)
    for k in range(2 * begin + 1, 2 * end + 1):
        sums = start_half(registers, x_ring, sums, never, stage, 0, C)
        scale = scale_of(scales, stage, C)
        following = gl.where(stage + 1 == C.stages, 0, stage + 1)
        phase = gl.where(following == 0, phase ^ 1, phase)
        sums = warpgroup_mma_wait(0, deps=[sums])
        low = add_stage(low, sums, scale, C)
        sums = start_half(registers, x_ring, sums, never, stage, 1, C)
        ahead = decode(read_words(w_ring, following, phase, k < 2 * end, C), C)
        keep(ahead, stage, C)
        sums = warpgroup_mma_wait(0, deps=[sums])
        finish(registers, stage, True, C)
        high = add_stage(high, sums, scale, C)
        registers, stage = ahead, following
    return (low, high), stage, phase


@gluon.jit
def math(work, C: gl.constexpr):
    """The warpgroups that decode, multiply and store."""
    (
        w_ring, x_ring, scales, out, beside, partial, arrived, token_tiles, row_tiles, turns, M, N,
    ) = work  # fmt: skip
    tiles = token_tiles * row_tiles * C.splits
    if C.paired:
        say_ready(C.warps, C)
    stage = 0
    phase = 0
    if not C.by_halves:
        words = read_words(w_ring, 0, 0, gl.program_id(0) < tiles, C)
        if C.promote:
            even = decode(words, C)
            words = read_words(w_ring, 1, 0, gl.program_id(0) < tiles, C)
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, row_tile, split = tile_at(index, token_tiles, row_tiles, C)
        begin, end = turns * split // C.splits, turns * (split + 1) // C.splits
        bring(beside, row_tile * C.rows, N, C)
        more = index + gl.num_programs(0) < tiles
        if C.by_halves:
            acc, stage, phase = multiply_by_halves(w_ring, x_ring, scales, stage, phase, begin, end, M < 0, C)
        elif C.promote:
            acc, even, words, stage, phase = multiply_apart(
                w_ring, x_ring, scales, even, words, stage, phase, begin, end, more, M < 0, C
            )  # fmt: skip
        else:
            acc, words, stage, phase = multiply(w_ring, x_ring, words, stage, phase, begin, end, more, C)
        if C.paired:
            low, high = acc if C.by_halves else halves(acc, C)
            store_half(out, swap(low, high, split, C), beside, token_tile * C.tokens, row_tile * C.rows, split, M, N, C)
        elif C.by_halves:
            store_halves(out, acc, beside, token_tile * C.tokens, row_tile * C.rows, M, N, C)
        elif C.splits == 1:
            store(out, acc, beside, token_tile * C.tokens, row_tile * C.rows, M, N, C)
        else:
            last, total = meet(partial, arrived, acc, token_tile * row_tiles + row_tile, split, C)
            if last:
                store(out, total, beside, token_tile * C.tokens, row_tile * C.rows, M, N, C)
    if C.store_by_tma:
        tma_store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "token_tiles", "row_tiles", "turns"])
def narrow_scaled_gemm(
    w_desc, w_desc_1, w_desc_2, x_desc, scale_desc, y_desc, y, x_scale, x_zero, channel_scale, sums, bias, y_scale, partial,
    arrived, M, N, token_tiles, row_tiles, turns, C: gl.constexpr,
):  # fmt: skip
    """The kernel: rings, barriers and roles. There is a descriptor of w for each of its planes; the others are None."""
    PLANES: gl.constexpr = C.planes
    w_descs = (w_desc, w_desc_1, w_desc_2)
    shared = gl.allocate_shared_memory(
        gl.int32, [C.barrier_unit + 1, UNIT_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    x_ring = part(shared, 0, ptx(C.w_unit, 0), C.x, [C.stages] + x_desc.block_type.shape, x_desc.layout)
    w_ring = ()
    for p in gl.static_range(PLANES):
        w_ring = w_ring + (
            part(
                shared, ptx(C.w_unit, p), ptx(C.w_unit, p + 1), gl.int32, [2 * C.stages] + w_descs[p].block_type.shape,
                w_descs[p].layout,
            ),
        )  # fmt: skip
    scale_ring = x_ring
    scales = x_ring  # the same, as the warps read it
    if C.grouped:
        kind: gl.constexpr = scale_desc.dtype
        scale_ring = part(
            shared, C.scale_unit, C.y_unit, kind, [C.stages] + scale_desc.block_type.shape, scale_desc.layout
        )  # fmt: skip
        scales = part(
            shared, C.scale_unit, C.y_unit, kind, [C.stages, C.rows], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )  # fmt: skip
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
    read = (w_descs, x_desc, scale_desc, w_ring, x_ring, scale_ring, barriers, token_tiles, row_tiles, turns)
    work = (
        w_ring, x_ring, scales, (y_desc, y, y_tile), (x_scale, x_zero, channel_scale, sums, bias, y_scale), partial,
        arrived, token_tiles, row_tiles, turns, M, N,
    )  # fmt: skip
    if C.paired:
        gl.warp_specialize(
            [(math, (work, C)), (load, (read, C)), (say_ready, (1, C)), (say_ready, (2, C))], [1, 1, 2], [24, 24, 24]
        )  # fmt: skip
    else:
        gl.warp_specialize([(math, (work, C)), (load, (read, C))], [1], [24])


@functools.lru_cache(maxsize=1024)
def narrow_config(
    shape: ScaledShape, tile: ScaledTile, scheme: Scheme, dtype: torch.dtype, x_scale: XScale, x_zero: bool, bias: bool,
    function: str = "none",
) -> NarrowGemm:  # fmt: skip
    """What is compiled for a product."""
    assert scheme.activation is not None
    by_tma = (tile.splits == 1 or tile.pair) and shape.n * dtype.itemsize % 16 == 0 and dtype != torch.float32
    return NarrowGemm(
        scheme.weight.name, CODE_TYPES[scheme.activation.name], dtype, tile.columns, tile.warpgroups, tile.stages,
        tile.splits, tile.token_group, shape.grouped, shape.apart, x_scale, x_zero, bias, function, tile.pair, by_tma,
    )  # fmt: skip


class NarrowPlan(TilePlan):
    """The plan of a product with weights of fewer bits."""

    def __init__(self, shape: ScaledShape, tile: ScaledTile, config: NarrowGemm, sm_count: int) -> None:
        super().__init__(shape, tile, config, sm_count)
        self.turns = -(-shape.k // (2 * STAGE_K))
        self.weight_descriptors = functools.lru_cache(maxsize=1024)(self._weight_descriptors)
        self.scale_descriptor = functools.lru_cache(maxsize=1024)(self._scale_descriptor)

    def _weight_descriptors(self, address: int) -> tuple[TensorDescriptor | None, ...]:
        """One for each plane of the codes, filled up with None to the three that the kernel takes."""
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        row = -(-self.shape.k // 64) * 32 * self.shape.bits
        blocks = [[self.config.warps, 32 * self.config.plane_words(p)] for p in range(self.config.planes)]
        codes = Address(address, torch.int32)
        planes = [TensorDescriptor(codes, [-(-self.shape.n // 16), row], [row, 1], block, layout) for block in blocks]
        return (*planes, *(None,) * (3 - len(planes)))

    def _scale_descriptor(self, address: int, shape: torch.Size, dtype: torch.dtype) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
        return TensorDescriptor(Address(address, dtype), [*shape], [shape[1], 1], [1, self.config.rows], layout)

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
            *self.weight_descriptors(codes.data_ptr()), self.x_descriptor(x.data_ptr(), x.stride(0)),
            None if scale is None else self.scale_descriptor(scale.data_ptr(), scale.shape, scale.dtype),
            self.y_descriptor(y.data_ptr()), y, x_scale, x_zero, channel_scale, sums, bias, y_scale, meeting, arrived,
            m, n,
            *self.tiles, self.turns, self.config,
        )  # fmt: skip
        if self.kernel is None:
            self.kernel = compiled(narrow_scaled_gemm, self.grid, arguments, self.config.warps, 2 if self.tile.pair else 1)
        self.kernel[self.launches](*arguments)
        return y
