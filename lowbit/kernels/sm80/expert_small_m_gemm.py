"""y[slot] = x[row of slot] . dequant(w[expert of slot])[N, K]^T, few rows per expert, mma.sync and cp.async: sm_80 and newer.

Reads   x fp16 or bf16, rows of 16-byte vectors, gathered by slot; w and scales of pack/expert.py; the list of tiles that
        ops/route.py writes: (expert, first position in `order`, rows), at most 8 or 16 rows each; `order` gives their slots
Tasks   a task is a tile of the list times C.row_blocks m16 row blocks of its expert. Task t belongs to block t mod blocks, so
        each block's share is fixed, and blocks that run at the same time read the same expert. Experts without slots are not
        read
Grid    persistent, about one block per SM; the number of tiles is read from memory, so the host does not wait for the router
Warps   as in small_m_gemm.py: warps_n x warps_k warps with a ring each; the warps_k warps of a row take k blocks round-robin
Ring    stays full from task to task: the last iteration of a task starts the copies for the first iteration of the next task.
        So the reduction of the warps' sums needs shared memory besides the rings
Start   the first task's weights are copied before its slots are loaded. Its x is then loaded through registers, not by
        cp.async: groups of cp.async complete in order, so the first slot of the ring would wait for all copies. With `early`
        these weights are copied before the previous kernel has finished
Ahead   a task's slots are loaded one task earlier, its tile two tasks earlier
Lanes   lane 4 g + t of a warp belongs to lane group g and has index t in it, as in the fragments of mma.sync
Sum     slices of K are reduced once, through shared memory, in a fixed order: same input, same bits
Epilogue  scales, bias of the expert, gate (silu or clamped), router weight; a row of y for each slot, rounded once
Exact   dequantization is exact; sums in fp32. Tested: tests/kernels/sm80/test_expert_small_m_in_numpy.py,
        tests/ops/test_expert_gemm.py
Source  docs/log/matrix-products.md, 2026-11-24
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.experts import ExpertShape, expert_blocks
from lowbit.kernels.choose.tiles import RingTile
from lowbit.kernels.parts.epilogue import Epilogue, gate_times_up
from lowbit.kernels.parts.gluon import aggregate, asm, gl, gluon, half_type, ptx, run, source_digest
from lowbit.kernels.parts.k_block import BLOCK_K, KBlock
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.prologue import launch_next_kernel, wait_for_previous_kernel
from lowbit.kernels.parts.ring import Ring
from lowbit.kernels.parts.ring_loop import (
    RingBlock,
    SliceAddresses,
    addresses_of,
    advance,
    copy_block,
    iteration,
    read_block,
    source_of,
)
from lowbit.kernels.parts.small_m_epilogue import (
    SmallMEpilogueArgs,
    ThreadCoordinates,
    element_of,
    load_rows,
    output_of,
    prefetch_rows,
    reduce_slices,
    scaled_sum,
)
from lowbit.pack.weight import WeightForm

MOST_REGISTERS = 255
"""Limit of registers per thread."""

VECTORS = 16
"""Number of 16-byte vectors of x that a lane loads at a time before the main loop; they take 64 registers."""


@dataclass(frozen=True)
class TaskRing(Ring):
    """The ring of a warp that runs through several tasks. Copies for a task that does not exist write zeros."""

    # Without fences ptxas moves, in a fourth of the tiles, the products of all slots behind the wait for the last slot (Triton
    # 3.6, 3.9).
    fenced = True

    def copy_codes(self, d: int) -> str:
        """PTX like `Ring.copy_codes`, but operand $6 is 0 or less if there is no task. Without a tail (see `Ring`) all copies
        of a task have the same size."""
        if self.tail:
            return super().copy_codes(d)
        lines = [".reg .b32 size, scale_size; .reg .pred some, low;", "setp.lt.s32 low, $5, 16; setp.gt.s32 some, $6, 0;"]
        lines.append(f"selp.b32 size, 16, 0, some; selp.b32 scale_size, {self.scale_copy}, 0, some;")
        for done in range(0, self.code_bytes, 512):
            half = "@low " if self.code_bytes - done < 512 else ""
            to = self.slot(d) + done
            lines.append(f"{half}cp.async.cg.shared.global.L2::256B [$1+{to}], [$3+{done}], 16, size;")
        if self.scale_copy:
            cache, to = "cg" if self.scale_copy == 16 else "ca", self.slot(d) + self.code_bytes
            lines.append(f"cp.async.{cache}.shared.global [$2+{to}], [$4], {self.scale_copy}, scale_size;")
        return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"

    @property
    def x_vectors(self) -> int:
        """Number of 16-byte vectors of x per lane in all slots."""
        return self.x_slots * self.k_block.n8_tiles * 4

    @property
    def x_loads(self) -> int:
        """Number of `load_x` parts that fill all slots."""
        return -(-self.x_vectors // VECTORS)

    def load_x(self, part: int, slices: int) -> str:
        """PTX that copies x of the first iteration through registers, VECTORS of a lane's vectors in each `part`, all in flight
        at once. Missing tokens and columns become zeros.

        Operands in lane 4 g + t: $1 is ring + 16 (8 t + g); $2 is the number of columns of K from column 8 t on. Then follow,
        for each n8 tile, the address of token g's row at column 8 t, and a number that is 0 if the token does not exist. The k
        blocks of a warp are `slices` apart."""
        loads, stores = [], []
        for v in range(part * VECTORS, min((part + 1) * VECTORS, self.x_vectors)):
            slot, n8_tile, i = v // (4 * self.k_block.n8_tiles), v // 4 % self.k_block.n8_tiles, v % 4
            k = slot * slices * BLOCK_K + 32 * i
            registers = ", ".join(f"v{4 * (v % VECTORS) + j}" for j in range(4))
            loads.append(f"setp.gt.s32 some, $2, {k}; setp.ne.and.s32 some, ${4 + 2 * n8_tile}, 0, some;")
            loads += [f"mov.b32 v{4 * (v % VECTORS) + j}, 0;" for j in range(4)]
            loads.append(f"@some ld.global.v4.b32 {{{registers}}}, [${3 + 2 * n8_tile}+{2 * k}];")
            to = self.x_slot(slot * self.row_blocks) + 2048 * n8_tile + 512 * i
            stores.append(f"st.shared.v4.b32 [$1+{to}], {{{registers}}};")
        return "{\n" + "\n".join([f".reg .b32 v<{4 * VECTORS}>; .reg .pred some;", *loads, *stores]) + "\nmov.b32 $0, 0;\n}"

    @property
    def load_x_constraints(self) -> str:
        return "=r,r,r" + ",l,r" * self.k_block.n8_tiles


@dataclass(frozen=True)
class ExpertRingGemm(RingBlock):
    """The kernel's compile-time configuration. Kernels with equal configurations give bit-equal results.

    `weighted`: y is multiplied by the router weight. `overlap`: programmatic dependent launch (sm_90). `early`: the tiles were
    written before the previous kernel began, so that weights may be copied before it has finished.
    """

    ring: TaskRing
    warps_n: int
    warps_k: int
    epilogue: Epilogue
    weighted: bool
    overlap: bool
    early: bool
    digest: str = source_digest()

    @property
    def slices(self) -> int:
        """Number of slices of K; slice i takes the k blocks i, i + slices, i + 2 slices, ..."""
        return self.warps_k

    @property
    def reduction_bytes(self) -> int:
        """Bytes of shared memory in which the slices of K are reduced; it precedes the rings."""
        return 4 * self.threads * self.accumulators

    @property
    def shared_rows(self) -> int:
        """Size of shared memory in rows of one float32 per thread."""
        return self.accumulators + -(-self.ring.bytes * self.warps // (4 * self.threads))

    @property
    def rows_early(self) -> bool:
        """True if scales and biases of rows are loaded before a task's main loop, into one register each; otherwise they are
        loaded from L2 in the epilogue."""
        return len({self.first_of_row(i) for i in range(self.outputs)}) <= 8

    @property
    def start_of_ring(self) -> str:
        first = f"mov.u32 start, global_smem; add.u32 start, start, {self.reduction_bytes};"
        return f"{{ .reg .b32 start; {first} add.u32 $0, start, $1; }}"


INVERSE_BITS = gl.constexpr(30)

FROM_LANE = gl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;")
"""PTX that returns the value of $1 in lane $2."""

COMMIT = gl.constexpr("cp.async.commit_group;\n mov.b32 $0, 0;")


@gluon.jit
def again(value):
    """Returns the value unchanged, but the compiler cannot see that. So it does not hoist computations with the value out of
    the loop over tasks; their results would take registers or be spilled."""
    return asm("mov.b32 $0, $1;", "=r,r", [value], gl.int32)


@aggregate
class Tile:
    """An entry of the list of tiles: expert, first position in `order`, number of rows (0 if there is no task)."""

    expert: gl.tensor
    first: gl.tensor
    rows: gl.tensor


@gluon.jit
def quotient(n, inverse):
    """Returns n // d, given inverse = ceil(2^30 / d); exact for 0 <= n < 2^30 / d. It is one multiplication; a division takes
    30 instructions."""
    return (n.to(gl.int64) * inverse >> INVERSE_BITS).to(gl.int32)


@gluon.jit
def tile_of(tiles, task, total, by_units, last_tile):
    """Returns the tile of a task. Contents of the list beyond its last tile are ignored."""
    entry = tiles + 3 * gl.minimum(quotient(task, by_units), last_tile)
    exists = task < total
    expert = gl.where(exists, gl.load(entry, cache_modifier=".cg"), 0)
    rows = gl.where(exists, gl.load(entry + 2, cache_modifier=".cg"), 0)
    return Tile(expert, gl.load(entry + 1, cache_modifier=".cg"), rows)


@gluon.jit
def slots_of(order, tile, lane, C: gl.constexpr):
    """Returns the slot of token g of each n8 tile, for a lane of group g; -1 for tokens that do not exist."""
    N8_TILES: gl.constexpr = C.ring.k_block.n8_tiles
    slots = ()
    for n8_tile in gl.static_range(N8_TILES):
        token = n8_tile * 8 + (lane >> 2)
        slots = slots + (gl.load(order + tile.first + token, mask=token < tile.rows, other=-1, cache_modifier=".cg"),)
    return slots


@gluon.jit
def weights_of(weights, slots, C: gl.constexpr):
    """Loads the router weights of slots, 0 where the slot is -1; returns () without C.weighted."""
    N8_TILES: gl.constexpr = C.ring.k_block.n8_tiles if C.weighted else 0
    factors = ()
    for n8_tile in gl.static_range(N8_TILES):
        slot = slots[n8_tile]
        factors = factors + (gl.load(weights + slot, mask=slot >= 0, other=0.0, cache_modifier=".cg"),)
    return factors


@gluon.jit
def first_row_block_of(task, units, by_units, row_blocks, C: gl.constexpr):
    """First m16 row block of a task within its expert. The last task of a tile may overlap the previous one; both store the
    same values."""
    unit = task - quotient(task, by_units) * units
    return gl.minimum(unit * C.row_blocks, row_blocks - C.row_blocks)


@gluon.jit
def task_source(w, scale, expert, exists, row_block, k_block, lane, x, K, row_blocks, tiles, scale_stride, C: gl.constexpr):
    """Returns the addresses of a task's weights, for a lane whose warp begins at row block `row_block` of the expert and at k
    block `k_block`. `with_tokens` adds those of x."""
    of_all = expert * row_blocks + row_block
    s = source_of(x, w, scale, of_all, k_block, 0, lane, 0, 16 * row_blocks, K, 0, tiles, scale_stride, C)
    return SliceAddresses(
        s.w, s.w_stride, s.w_quad, s.scale, s.scale_stride, s.x, s.x_eight, s.x_size, gl.where(exists, s.left, 0), s.rows, s.ks
    )


@gluon.jit
def with_tokens(source, x, slots, k_block, lane, x_stride, by_top_k, C: gl.constexpr):
    """Returns `source` with the addresses of x: the rows of the slots. `by_top_k` is the inverse with which `quotient` divides
    slots by top_k."""
    N8_TILES: gl.constexpr = C.ring.k_block.n8_tiles
    s = source
    sizes = ()
    for n8_tile in gl.static_range(N8_TILES):
        sizes = sizes + (gl.where(slots[n8_tile] >= 0, 16, 0),)
    first = quotient(gl.maximum(slots[0], 0), by_top_k)
    x += first.to(gl.int64) * x_stride + k_block * BLOCK + (lane & 3) * 8
    apart = s.x_eight
    if N8_TILES > 1:  # a second n8 tile; it has no tokens unless the first is full
        apart = (quotient(gl.maximum(slots[N8_TILES - 1], 0), by_top_k) - first).to(gl.int64) * x_stride
    return SliceAddresses(
        s.w, s.w_stride, s.w_quad, s.scale, s.scale_stride, x, apart, sizes, s.left, s.rows, s.ks
    )  # fmt: skip


BLOCK = gl.constexpr(BLOCK_K)


@gluon.jit
def load_x(ring, source, C: gl.constexpr):
    """Loads x of a task's first iteration into the ring; the next `read_block` makes it visible to the warp."""
    R: gl.constexpr = C.ring
    PARTS: gl.constexpr = R.x_loads
    N8_TILES: gl.constexpr = R.k_block.n8_tiles
    pointers = ()
    for n8_tile in gl.static_range(N8_TILES):
        pointers = pointers + (source.x + n8_tile * source.x_eight, source.x_size[n8_tile])
    for part in gl.static_range(PARTS):
        run(ptx(R.load_x, part, C.slices), R.load_x_constraints, (ring.at_x, source.ks) + pointers)


@gluon.jit
def of_tokens(values, at, constraints: gl.constexpr, C: gl.constexpr):
    """Redistributes values of tokens. Lanes of group g pass the value of token g of each n8 tile; lane t of each group gets the
    values of tokens 2t and 2t + 1 of each n8 tile."""
    N8_TILES: gl.constexpr = C.ring.k_block.n8_tiles
    own = ()
    for i in gl.static_range(2 * N8_TILES):
        lane = ((at.lane & 3) * 2 + i % 2) * 4
        own = own + (asm(FROM_LANE, constraints, [values[i // 2], lane], values[i // 2].dtype),)
    return own


@gluon.jit
def of_element(values, element, C: gl.constexpr):
    """Selects the value of an accumulator's token."""
    COUNT: gl.constexpr = 2 * C.ring.k_block.n8_tiles
    which = element % (2 * COUNT) // 4 * 2 + (element & 1)
    chosen = values[0]
    for i in gl.static_range(1, COUNT):
        chosen = gl.where(which == i, values[i], chosen)
    return chosen


@gluon.jit
def store_rows(y, sums, epilogue_args, slots, weights, at, C: gl.constexpr):
    """Applies scales, bias, gate and router weights, rounds once and stores the rows of a task's slots. In lanes of group g,
    `slots` and `weights` are those of token g."""
    TOGETHER: gl.constexpr = 1 if C.epilogue.gate == "none" else 2
    COUNT: gl.constexpr = C.outputs // TOGETHER
    own = of_tokens(slots, at, "=r,r,r", C)
    factors = ()
    if C.weighted:
        factors = of_tokens(weights, at, "=f,f,r", C)
    for i in gl.static_range(COUNT):
        element, row_of_warps = element_of(TOGETHER * i, at.warp, C)
        row, _token, exists = output_of(element, row_of_warps, at, C)
        slot = of_element(own, element, C)
        total = scaled_sum(sums[TOGETHER * i], epilogue_args, TOGETHER * i, element, C)
        column = row
        columns = at.N
        if TOGETHER == 2:
            up = scaled_sum(sums[2 * i + 1], epilogue_args, 2 * i + 1, element, C)
            total = gate_times_up(total, up, C)
            column = row // 16 * 8 + row % 16
            columns = at.N // 2
        if C.weighted:
            total *= of_element(factors, element, C)
        gl.store(y + (slot.to(gl.int64) * columns + column), total.to(y.dtype.element_ty), mask=exists & (slot >= 0))


SIZES = [
    "last_tile", "units", "N", "K", "x_stride", "row_blocks", "tiles_of_k", "scale_stride", "iterations", "by_units",
    "by_top_k",
]  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def expert_ring_gemm(
    y, x, w, scale, channel_scale, bias, tiles, tile_count, order, weights, last_tile, units, N, K, x_stride, row_blocks,
    tiles_of_k, scale_stride, iterations, by_units, by_top_k, factor, C: gl.constexpr,
):  # fmt: skip
    """One persistent block: every num_programs-th task, starting with the block's index. Each tile of the list has `units`
    tasks."""
    R: gl.constexpr = C.ring
    S: gl.constexpr = C.ring.k_block
    DEPTH: gl.constexpr = R.depth
    AHEAD: gl.constexpr = R.rounds * C.slices
    ACCUMULATORS: gl.constexpr = C.accumulators
    THREADS: gl.constexpr = C.threads
    shared = gl.allocate_shared_memory(gl.float32, [C.shared_rows, C.threads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread = gl.arange(0, C.threads, gl.BlockedLayout([1], [32], [C.warps], [0]))
    lane = thread & 31
    warp = thread >> 5
    slice_k = warp % C.warps_k
    own_row_block = warp // C.warps_k * R.row_blocks
    start = gl.inline_asm_elementwise(C.start_of_ring, "=&r,r", [warp * R.bytes], dtype=gl.int32, is_pure=True, pack=1)
    ring = addresses_of(start, lane, C)
    if C.overlap and not C.early:
        wait_for_previous_kernel()
        launch_next_kernel()
    task = gl.program_id(0)
    blocks = gl.num_programs(0)
    total = gl.load(tile_count, cache_modifier=".cg") * units
    tile = tile_of(tiles, task, total, by_units, last_tile)
    row_block = first_row_block_of(task, units, by_units, row_blocks, C) + own_row_block
    source = task_source(
        w, scale, tile.expert, task < total, row_block, slice_k, lane, x, K, row_blocks, tiles_of_k, scale_stride, C
    )  # fmt: skip
    for d in gl.static_range(DEPTH):
        copy_block(ring, source, C, d, True, False)
        run(COMMIT, "=r", [])
    if C.overlap and C.early:
        wait_for_previous_kernel()
        launch_next_kernel()
    slots = slots_of(order, tile, lane, C)
    following = tile_of(tiles, task + blocks, total, by_units, last_tile)
    source = with_tokens(source, x, slots, slice_k, lane, x_stride, by_top_k, C)
    load_x(ring, source, C)
    next_slots = slots_of(order, following, lane, C)
    read = read_block(ring, C, 0, DEPTH - 1)
    zeros = gl.zeros((THREADS,), gl.float32, gl.BlockedLayout([1], [32], [C.warps], [0]))
    for this in range(task, total, blocks):
        expert = tile.expert.to(gl.int64)
        first_row_block = first_row_block_of(this, units, by_units, row_blocks, C)
        at = ThreadCoordinates(again(lane), again(warp), first_row_block, 0, 0, S.tokens, N)
        later = tile_of(tiles, this + 2 * blocks, total, by_units, last_tile)
        factors = weights_of(weights, slots, C)
        scales = ()
        biases = ()
        own_scale = channel_scale
        own_bias = bias
        if C.epilogue.channel_scale:
            own_scale = channel_scale + expert * N
        if C.epilogue.bias:
            own_bias = bias + expert * N
        if C.rows_early and C.epilogue.channel_scale:
            scales = load_rows(own_scale, at, C)
        if C.rows_early and C.epilogue.bias:
            biases = load_rows(own_bias, at, C)
        if not C.rows_early:
            prefetch_rows(own_scale, own_bias, None, thread, at, C)
        acc = ()
        for _ in gl.static_range(ACCUMULATORS):
            acc = acc + (zeros,)
        for _ in range(0, iterations - 1):
            read, acc = iteration(ring, source, read, acc, C, False)
            source = advance(source, C)
        # An iteration starts the copies for the iteration after it, at addresses AHEAD k blocks further. This task's last
        # iteration starts those for the next task's first one, so its addresses are AHEAD k blocks before the next task's
        # start.
        tiles_of_k = again(tiles_of_k)
        scale_stride = again(scale_stride)
        row_block = first_row_block_of(this + blocks, units, by_units, row_blocks, C) + own_row_block
        source = task_source(
            w, scale, following.expert, this + blocks < total, row_block, slice_k - AHEAD, lane, x, K, row_blocks, tiles_of_k,
            scale_stride, C,
        )  # fmt: skip
        source = with_tokens(source, x, next_slots, slice_k - AHEAD, lane, x_stride, by_top_k, C)
        read, acc = iteration(ring, source, read, acc, C, False)
        source = advance(source, C)
        later_slots = slots_of(order, later, lane, C)
        sums = reduce_slices(shared, acc, again(lane), again(warp), C)
        if not C.rows_early and C.epilogue.channel_scale:
            scales = load_rows(channel_scale + expert * N, at, C)
        if not C.rows_early and C.epilogue.bias:
            biases = load_rows(bias + expert * N, at, C)
        store_rows(y, sums, SmallMEpilogueArgs(factor, scales, (), biases, ()), slots, factors, at, C)
        tile, following = following, later
        slots, next_slots = next_slots, later_slots


class ExpertRingPlan:
    """Plan of a product of experts with few rows each, for one shape: created once, called many times."""

    def __init__(
        self, shape: ExpertShape, tile: RingTile, form: WeightForm, dtype: torch.dtype, epilogue: Epilogue, machine: Machine,
        *, weighted: bool = False, early: bool = False,
    ) -> None:  # fmt: skip
        if tile.warps_n * tile.warps_k > 8:
            raise ValueError(f"{tile}: a block has at most 8 warps of {MOST_REGISTERS} registers")
        if tile.splits != 1 or tile.depth != tile.row_blocks * tile.rounds or tile.tile_row_blocks > shape.row_blocks:
            raise ValueError(f"{tile}: the ring holds an iteration of all of K, of at most {shape.row_blocks} row blocks")
        self.shape, self.tile = shape, tile
        overlap = machine.arch.sm >= 90
        self.config = _config(tile, form, half_type(dtype), shape.k, epilogue, weighted, overlap, early and overlap)
        self.columns = shape.n if epilogue.gate == "none" else shape.n // 2
        self.units = -(-shape.row_blocks // tile.tile_row_blocks)
        self.grid = (expert_blocks(shape, tile, machine), 1, 1)
        # Without a limit ptxas spills to fit more blocks on an SM than the grid has.
        self.launch = Launcher(expert_ring_gemm, self.grid, self.config.warps, overlap=overlap, registers=MOST_REGISTERS)
        self.iterations = -(-shape.steps(BLOCK_K) // (tile.warps_k * tile.rounds))
        self.factor = self.config.ring.k_block.factor
        top_k = 1 if shape.per_slot else shape.top_k
        one = 1 << INVERSE_BITS.value
        tasks = shape.most_tiles * self.units + 3 * self.grid[0]  # includes tiles that are loaded ahead
        if max(tasks * self.units, shape.slots * top_k) >= one:
            raise ValueError(f"{shape} with {tile}: too many tasks for one launch, split x by rows")
        self.inverses = tuple(-(-one // divisor) for divisor in (self.units, top_k))

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        tiles: Tensor, tile_count: Tensor, order: Tensor, weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns y [slots, N], or [slots, N / 2] with a gate, of x [rows, K], whose rows start at multiples of 16 bytes.

        Codes and scales are those of pack/expert.py; `tiles` [any, 3], `tile_count` [1], `order` and `weights` [slots] those of
        ops/route.py. All tensors are on the current device.
        """
        y = torch.empty((self.shape.slots, self.columns), dtype=x.dtype, device=x.device)
        some = next(t for t in (scale, channel_scale, codes) if t is not None)  # stands for missing scales, never read
        self.launch(
            y, x, codes, some, channel_scale, bias, tiles, tile_count, order, weights, tiles.shape[0] - 1, self.units,
            self.shape.n, self.shape.k, x.stride(0), self.shape.row_blocks, codes.shape[2],
            0 if scale is None else scale.stride(1), self.iterations, *self.inverses, self.factor, self.config,
        )  # fmt: skip
        return y


@functools.lru_cache(maxsize=1024)
def _config(
    tile: RingTile, form: WeightForm, dtype: HalfType, k: int, epilogue: Epilogue, weighted: bool, overlap: bool, early: bool
) -> ExpertRingGemm:
    k_block = KBlock(form.format, dtype, tile.tokens, form.group, form.zero, form.scale_dtype)
    tail = k % (BLOCK_K * tile.warps_k * tile.rounds) != 0
    ring = TaskRing(k_block, tile.row_blocks, tile.rounds, tail)
    return ExpertRingGemm(ring, tile.warps_n, tile.warps_k, epilogue, weighted, overlap, early)
