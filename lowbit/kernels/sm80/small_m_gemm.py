"""y[M, N] = x[M, K] . dequant(w)[N, K]^T for small M, any code width, mma.sync and cp.async: sm_80 and newer.

Reads   x fp16 or bf16, rows of 16-byte vectors; w in FragmentOrder, one stream per m16 row block; scales in the same order;
        or w of x's type as nn.Linear stores it, whose rows a gated GEMM pairs by itself (parts/ring.py)
Grid    blocks of rows x blocks of tokens x splits of K; about one block of threads per SM, all in one wave
Warps   warps_n x warps_k: each row of warps has `row_blocks` row blocks, columns of warps take k blocks (128 k) in turn
Ring    every warp fills and reads its own ring buffer: no barrier in the main loop, all slots in flight (parts/ring.py)
K block codes -> halves -> mma.sync, group scales in fp32 on the group's sum (parts/k_block.py)
Sum     slices of K are reduced once, through shared memory, in a fixed order: same input, same bits. With splits > 1 the last
        block to arrive adds the sums of all splits, also in order
Epilogue  scales and bias; for up to 16 tokens of a decode step also norm, gate, residual (parts/small_m_epilogue.py)
Exact   dequantization is exact; sums in fp32; one rounding at the store. Tested: tests/ops/test_fragment_gemm.py
Source  fragments: PTX ISA; the ring per warp and measurements: docs/log
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.arch import Arch
from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.tiles import GemmShape, RingTile, shared_by
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.gluon import Scalar, Tuple, aggregate, gl, gluon, half_type, ptx, run, source_digest
from lowbit.kernels.parts.k_block import BLOCK_K, BLOCK_TILES, KBlock
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.ring import Ring, RowRing
from lowbit.kernels.parts.small_m_epilogue import (
    ResidualArgs,
    SmallMEpilogueArgs,
    ThreadCoordinates,
    apply_epilogue,
    load_h,
    load_rows,
    prefetch_rows,
    reduce_slices,
    reduce_splits,
    rms_factors,
)
from lowbit.kernels.parts.tile import Warps
from lowbit.pack.weight import WeightForm


@dataclass(frozen=True)
class RingGemm(Warps):
    """The kernel's compile-time configuration. Equal ones give results that are equal to the last bit.

    `overlap` starts the weight copies before the previous kernel has finished (programmatic dependent launch, sm_90). A block
    takes at least `shared_bytes` of shared memory, which limits how many share an SM.
    """

    ring: Ring
    warps_n: int
    warps_k: int
    splits: int
    epilogue: Epilogue
    overlap: bool
    shared_bytes: int = 0
    digest: str = source_digest()
    start_of_ring = "{ .reg .b32 start; mov.u32 start, global_smem; add.u32 $0, start, $1; }"
    """$0: the address $1 bytes into the kernel's one allocation, whose offset is 0."""

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def slices(self) -> int:
        """Slices of K over all blocks; slice i takes the k blocks i, i + slices, i + 2 slices, ..."""
        return self.warps_k * self.splits

    @property
    def row_blocks(self) -> int:
        """m16 row blocks of a block of threads."""
        return self.warps_n * self.ring.row_blocks

    @property
    def accumulators(self) -> int:
        return self.ring.row_blocks * self.ring.k_block.accumulators

    @property
    def shared_rows(self) -> int:
        """Shared memory in rows of one float32 per thread: the rings. The epilogue puts the accumulators in their place, and
        with a residual the squares of octets of rows behind them."""
        squares = 2 * self.row_blocks * self.ring.k_block.tokens if self.epilogue.residual else 0
        at_end = self.accumulators + -(-squares // self.threads)
        return max(-(-max(self.ring.bytes * self.warps, self.shared_bytes) // (4 * self.threads)), at_end)

    @property
    def outputs(self) -> int:
        """Sums that each thread finishes; a gate and its up belong to the same thread."""
        together = 1 if self.epilogue.gate == "none" else 2
        return together * -(-self.accumulators // (together * self.warps_k))

    @property
    def row_period(self) -> int:
        """Length of runs of a thread's outputs in which rows repeat alike in all threads: that of a row block, 2 tokens, or
        0."""
        together = 1 if self.epilogue.gate == "none" else 2
        outputs, vectors_per_row_block = self.outputs, self.ring.k_block.accumulators
        if outputs % vectors_per_row_block == 0 or (
            vectors_per_row_block % outputs == 0 and (together == 2 or outputs % 4 == 0)
        ):
            return vectors_per_row_block
        return 2 if together == 1 and outputs % 2 == 0 else 0

    def first_of_row(self, i: int) -> int:
        """First of a thread's outputs with the row of output i, as far as that is the same for all threads."""
        if self.row_period == 0:
            return i
        period = range(i // self.row_period * self.row_period, i + 1)

        def half(j: int) -> int:  # row g of a row block or row g + 8
            return j % 2 if self.epilogue.gate != "none" else j // 2 % 2

        return next(j for j in period if half(j) == half(i))

    @property
    def rows_early(self) -> bool:
        """True if values of rows are loaded before the main loop, which takes a register for each of a thread's rows: in a
        chain of short kernels, and where rows are few. Otherwise they are loaded from L2 in the epilogue."""
        in_chain = self.splits == 1 and (self.epilogue.norm_parts > 0 or self.epilogue.residual)
        return in_chain or len({self.first_of_row(i) for i in range(self.outputs)}) <= 8

    @property
    def h_early(self) -> bool:
        """True if h is loaded before the main loop; not where only the last of several blocks needs it."""
        return self.splits == 1


BLOCK = gl.constexpr(BLOCK_K)
TILES = gl.constexpr(BLOCK_TILES)


@aggregate
class RingAddresses:
    """A lane, and its addresses in its warp's ring: where it copies weights to and reads them, copies x to and reads it."""

    lane: gl.tensor
    copies: Tuple
    reads: Tuple
    at_x: gl.tensor
    at16: gl.tensor


@aggregate
class SliceAddresses:
    """A lane's addresses in global memory of the next k block's weights, scales and x, with strides between row blocks and n8
    tiles; which tokens exist; how many tiles of codes (or k of rows), how many rows, and how many k of x are left.

    Of 16-bit rows `w` has both halves of a row block; `w_stride` and `w_quad` (four rows) are bytes.
    """

    w: Tuple
    w_stride: Scalar
    w_quad: Scalar
    scale: Scalar
    scale_stride: Scalar
    x: gl.tensor
    x_eight: Scalar
    x_size: Tuple
    left: gl.tensor
    rows: gl.tensor
    ks: gl.tensor


@gluon.jit
def addresses_of(start, lane, C: gl.constexpr):
    """Returns a lane's addresses in the ring at byte `start`."""
    S: gl.constexpr = C.ring.k_block
    place, group = lane & 3, lane >> 2
    at16 = start + lane * 16
    if S.dense:
        vector, row = lane & 7, lane >> 3
        own = start + row * 128
        copies = (own + (vector ^ row) * 16, own + (vector ^ row ^ 4) * 16)
        own = start + (lane & 15) * 128
        vector = vector ^ (lane >> 4)
        reads = (own + vector * 16, own + (vector ^ 2) * 16, own + (vector ^ 4) * 16, own + (vector ^ 6) * 16)
    else:
        at8, at4, at_scale = start + lane * 8, start + lane * 4, start + lane * C.ring.scale_copy
        copies = (at16, at_scale)
        reads = (at16, at8, at4, start + group * S.pair_bytes)
    return RingAddresses(lane, copies, reads, start + (place * 8 + group) * 16, at16)


@gluon.jit
def copy_weights(ring, source, C: gl.constexpr, row_block: gl.constexpr, ahead: gl.constexpr, d: gl.constexpr):
    """Starts the copies of one row block's weights, `ahead` k blocks later."""
    R: gl.constexpr = C.ring
    s = source
    if R.k_block.dense:
        gl.inline_asm_elementwise(
            ptx(R.copy_rows, d, C.slices), "=r,r,r,l,l,r,r,r,r",
            [ring.copies[0], ring.copies[1], s.w[0], s.w[1], s.w_stride, s.w_quad, s.left - ahead * BLOCK, s.rows],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            ptx(R.copy_codes, d), "=r,r,r,l,l,r,r",
            [ring.copies[0], ring.copies[1], s.w[0] + (row_block * s.w_stride + ahead * (R.code_bytes // 4)),
             s.scale + (row_block * s.scale_stride + ahead * (R.scale_bytes // 2)), ring.lane, s.left - ahead * TILES],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def copy_block(ring, source, C: gl.constexpr, d: gl.constexpr, codes: gl.constexpr, tokens: gl.constexpr):
    """Starts the copies of pair d from `source` on: one row block's weights; with the first row block also x."""
    R: gl.constexpr = C.ring
    N8_TILES: gl.constexpr = R.k_block.n8_tiles
    row_block: gl.constexpr = d % R.row_blocks
    ahead: gl.constexpr = d // R.row_blocks * C.slices  # k blocks
    s = source
    if tokens and row_block == 0:
        for n8_tile in gl.static_range(N8_TILES):
            gl.inline_asm_elementwise(
                ptx(R.copy_x, d, n8_tile), "=r,r,l,r,r",
                [ring.at_x, s.x + (n8_tile * s.x_eight + ahead * BLOCK), s.x_size[n8_tile], s.ks - ahead * BLOCK],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    if codes:
        copy_weights(ring, s, C, row_block, ahead, d)
    if tokens:
        gl.inline_asm_elementwise(
            "cp.async.commit_group;\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip


@gluon.jit
def advance(source, C: gl.constexpr):
    """Advances `source` by one iteration along K."""
    s = source
    steps: gl.constexpr = C.ring.rounds * C.slices
    if C.ring.k_block.dense:
        w = (s.w[0] + steps * BLOCK, s.w[1] + steps * BLOCK)
        left = s.left - steps * BLOCK
    else:
        w = (s.w[0] + steps * (C.ring.code_bytes // 4),)
        left = s.left - steps * TILES
    scale = s.scale + steps * (C.ring.scale_bytes // 2)
    return SliceAddresses(
        w,
        s.w_stride,
        s.w_quad,
        scale,
        s.scale_stride,
        s.x + steps * BLOCK,
        s.x_eight,
        s.x_size,
        left,
        s.rows,
        s.ks - steps * BLOCK,
    )


@gluon.jit
def read_block(ring, C: gl.constexpr, d: gl.constexpr, pending: gl.constexpr):
    """Waits for slot d and reads it: the lane's words of codes, then its scales."""
    return gl.inline_asm_elementwise(
        ptx(C.ring.read, d, pending), C.ring.read_constraints, ring.reads,
        dtype=C.ring.read_types, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply(read, x, sums, acc, C: gl.constexpr, row_block: gl.constexpr):
    """Multiplies one k block of one row block; the accumulators of the other row blocks are unchanged."""
    S: gl.constexpr = C.ring.k_block
    first: gl.constexpr = row_block * S.accumulators
    end: gl.constexpr = first + S.accumulators
    new = gl.inline_asm_elementwise(
        S.asm, S.constraints, read[0 : S.words] + x + read[S.words :] + sums + acc[first:end],
        dtype=S.types, is_pure=True, pack=1,
    )  # fmt: skip
    return acc[0:first] + new + acc[end:]


@gluon.jit
def iteration(ring, source, read, acc, C: gl.constexpr, last: gl.constexpr):
    """One iteration: all row blocks, `rounds` k blocks. `read` is the first slot's content; each freed slot is refilled at
    once."""
    R: gl.constexpr = C.ring
    S: gl.constexpr = C.ring.k_block
    TURN: gl.constexpr = R.iteration_blocks
    x = ()
    sums = ()
    for d in gl.static_range(TURN):
        if d % R.row_blocks == 0:
            x = gl.inline_asm_elementwise(
                ptx(R.read_x, d), R.x_constraints, [ring.at16], dtype=R.x_types, is_pure=False, pack=1
            )  # fmt: skip
            if S.sums > 0:
                sums = gl.inline_asm_elementwise(
                    S.sum_asm, S.sum_constraints, x, dtype=S.sum_types, is_pure=True, pack=1
                )  # fmt: skip
        following = read
        if not last or d + R.depth < R.iteration_blocks:
            copy_block(ring, source, C, d + R.depth, True, True)
        if not last or d + 1 < R.iteration_blocks:
            following = read_block(ring, C, d + 1, min(R.iteration_blocks - 2 - d, R.depth - 1) if last else R.depth - 1)
        acc = multiply(read, x, sums, acc, C, d % R.row_blocks)
        read = following
    return read, acc


@gluon.jit
def rows_of(w, row_block, slice_k, lane, N, K, C: gl.constexpr):
    """Addresses of a lane's vectors in both halves of its warp's first row block, bytes between row blocks, and number of rows
    left. In a gated GEMM the halves are of gate and of up, whose rows follow all gate rows."""
    row, k = lane >> 3, slice_k * BLOCK + (lane & 7) * 8
    if C.epilogue.gate == "none":
        first = row_block * 16 + row
        second = first + 8
        w_stride = 32 * K
    else:
        first = row_block * 8 + row
        second = first + N // 2
        w_stride = 16 * K
    return (w + (first.to(gl.int64) * K + k), w + (second.to(gl.int64) * K + k)), w_stride, N - first


@gluon.jit
def source_of(x, w, scale, row_block, slice_k, first_token, lane, M, N, K, x_stride, tiles, scale_stride, C: gl.constexpr):
    """Addresses at which a lane of a slice of K begins."""
    R: gl.constexpr = C.ring
    S: gl.constexpr = C.ring.k_block
    N8_TILES: gl.constexpr = S.n8_tiles
    place, group = lane & 3, lane >> 2
    if S.dense:
        w, w_stride, rows = rows_of(w, row_block, slice_k, lane, N, K, C)
        w_quad = 8 * K
        left = K - slice_k * BLOCK - (lane & 7) * 8
    else:
        w_stride = tiles * (32 * S.bits)
        w = (w + (row_block.to(gl.int64) * w_stride + slice_k * (R.code_bytes // 4) + lane * 4),)
        w_quad = 0
        rows = lane
        left = tiles - slice_k * TILES
    if R.scale_copy > 0:
        scale += (
            row_block.to(gl.int64) * scale_stride
            + slice_k * (R.scale_bytes // 2)
            + lane * (R.scale_copy // 2) % (R.scale_bytes // 2)
        )
    x_size = ()
    for n8_tile in gl.static_range(N8_TILES):
        x_size = x_size + (gl.where(first_token + n8_tile * 8 + group < M, 16, 0),)
    # Tokens that do not exist are not read; their addresses may be anything.
    x += (first_token + group).to(gl.int64) * x_stride + slice_k * BLOCK + place * 8
    return SliceAddresses(
        w, w_stride, w_quad, scale, scale_stride, x, 8 * x_stride, x_size, left, rows, K - slice_k * BLOCK - place * 8
    )  # fmt: skip


@gluon.jit
def clear_x(ring, source, C: gl.constexpr):
    """Zeroes the places of tokens that do not exist, which no copy writes."""
    R: gl.constexpr = C.ring
    N8_TILES: gl.constexpr = R.k_block.n8_tiles if R.skips_absent_tokens else 0
    for n8_tile in gl.static_range(N8_TILES):
        run(ptx(R.clear_x, n8_tile), "=r,r,r", [ring.at_x, source.x_size[n8_tile]])


@gluon.jit(do_not_specialize=["M", "N", "K", "x_stride", "row_blocks", "tiles", "scale_stride", "iterations"])
def ring_gemm(
    y, x, w, scale, channel_scale, bias, partial, arrived, h, gamma, squares, M, N, K, x_stride, row_blocks, tiles,
    scale_stride, iterations, factor, x_factor, inverse_width, eps, C: gl.constexpr,
):  # fmt: skip
    """One block of threads: C.row_blocks row blocks of w, C.ring.k_block.tokens tokens, its slices of K.

    Before griddepcontrol.wait it reads only weights; x, h and squares, which previous kernels write, after it.
    """
    R: gl.constexpr = C.ring
    S: gl.constexpr = C.ring.k_block
    DEPTH: gl.constexpr = R.depth
    ACCUMULATORS: gl.constexpr = C.accumulators
    shared = gl.allocate_shared_memory(gl.float32, [C.shared_rows, C.threads], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    thread = gl.arange(0, C.threads, gl.BlockedLayout([1], [32], [C.warps], [0]))
    lane = thread & 31
    warp = thread >> 5
    slice_k = gl.program_id(2) * C.warps_k + warp % C.warps_k
    # The last block may overlap the previous one: both store the same values, but only one adds to h.
    first_row_block = gl.minimum(gl.program_id(0) * C.row_blocks, row_blocks - C.row_blocks)
    first_token = gl.program_id(1) * S.tokens
    row_block = first_row_block + warp // C.warps_k * R.row_blocks
    start = gl.inline_asm_elementwise(C.start_of_ring, "=&r,r", [warp * R.bytes], dtype=gl.int32, is_pure=True, pack=1)
    ring = addresses_of(start, lane, C)
    source = source_of(x, w, scale, row_block, slice_k, first_token, lane, M, N, K, x_stride, tiles, scale_stride, C)
    at = ThreadCoordinates(lane, warp, first_row_block, first_token, gl.program_id(0) * C.row_blocks * 16, M, N)
    for d in gl.static_range(DEPTH):
        copy_block(ring, source, C, d, True, not C.overlap)
    if C.rows_early and C.epilogue.channel_scale:
        channel_scale = load_rows(channel_scale, at, C)
    if C.rows_early and C.epilogue.bias:
        bias = load_rows(bias, at, C)
    if C.rows_early and C.epilogue.residual:
        gamma = load_rows(gamma, at, C)
    if not C.rows_early:
        prefetch_rows(channel_scale, bias, gamma, thread, at, C)
    clear_x(ring, source, C)
    if C.overlap:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait;\n griddepcontrol.launch_dependents;\n mov.b32 $0, 0;", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        for d in gl.static_range(DEPTH):
            copy_block(ring, source, C, d, False, True)
    rms = ()
    old = ()
    if C.epilogue.norm_parts > 0:
        rms = rms_factors(squares, at, inverse_width, eps, x_factor, C)
    if C.epilogue.residual and C.h_early:
        old = load_h(h, at, C)

    THREADS: gl.constexpr = C.threads
    zeros = gl.zeros((THREADS,), gl.float32, gl.BlockedLayout([1], [32], [C.warps], [0]))
    acc = ()
    for _ in gl.static_range(ACCUMULATORS):
        acc = acc + (zeros,)
    read = read_block(ring, C, 0, R.depth - 1)
    for _ in range(0, iterations - 1):
        read, acc = iteration(ring, source, read, acc, C, False)
        source = advance(source, C)
    read, acc = iteration(ring, source, read, acc, C, True)
    sums = reduce_slices(shared, acc, lane, warp, C)
    if not C.rows_early and C.epilogue.channel_scale:
        channel_scale = load_rows(channel_scale, at, C)
    if not C.rows_early and C.epilogue.bias:
        bias = load_rows(bias, at, C)
    if not C.rows_early and C.epilogue.residual:
        gamma = load_rows(gamma, at, C)
    epilogue_args = SmallMEpilogueArgs(factor, channel_scale, rms, bias)
    residual = ResidualArgs(h, gamma, squares, x_factor, old)
    if C.splits == 1:
        apply_epilogue(y, sums, epilogue_args, residual, at, C)
    else:
        last, totals = reduce_splits(partial, arrived, sums, thread, C)
        if last:
            apply_epilogue(y, totals, epilogue_args, residual, at, C)


class RingPlan:
    """A small-M GEMM with its epilogue, for one shape: made once, called many times."""

    def __init__(
        self, shape: GemmShape, tile: RingTile, form: WeightForm, dtype: torch.dtype, epilogue: Epilogue, arch: Arch
    ) -> None:
        self.shape, self.tile, self.dtype = shape, tile, dtype
        overlap = arch.sm >= 90
        self.config = _config(tile, form, half_type(dtype), shape.n, shape.k, epilogue, overlap, shared_by(tile, arch))
        self.columns = shape.n if epilogue.gate == "none" else shape.n // 2
        self.grid = (-(-shape.row_blocks // tile.tile_row_blocks), -(-shape.m // tile.tokens), tile.splits)
        self.launch = Launcher(ring_gemm, self.grid, self.config.warps, overlap=overlap)
        self.iterations = -(-shape.steps(BLOCK_K) // (self.config.slices * tile.rounds))
        self.factor = self.config.ring.k_block.factor

    @property
    def workspace(self) -> tuple[int, int]:
        """Elements of the two workspaces, float32 sums and int32 counters (which are zero before and after)."""
        if self.tile.splits == 1:
            return 0, 0
        blocks = self.grid[0] * self.grid[1]
        return blocks * self.tile.splits * self.config.outputs * self.config.threads, blocks

    @property
    def squares_parts(self) -> int:
        """Partial sums of squares per token that a residual epilogue stores."""
        return self.grid[0]

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        sums: Tensor, arrived: Tensor, squares: Tensor | None = None, h: Tensor | None = None, gamma: Tensor | None = None,
        x_factor: float | None = None, inverse_width: float | None = None, eps: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns y [M, N], or [M, N / 2] behind a gate, of x [M, K], whose rows start at multiples of 16 bytes.

        Codes and scales as pack/weight.py has them, or the rows of pack/dense.py alone; `sums` and `arrived` are the workspace;
        all tensors on the current device. A norm reads `squares` float32 [norm_parts, M] of rows of h of 1 / `inverse_width`
        elements. A residual adds y to h [M, N] in place, writes `squares` [squares_parts, M] and returns h * gamma * x_factor.
        """
        y = torch.empty((self.shape.m, self.columns), dtype=x.dtype, device=x.device)
        some = next(t for t in (scale, channel_scale, codes) if t is not None)  # an unused pointer where there are no scales
        tiles = 0 if self.config.ring.k_block.dense else codes.shape[1]
        self.launch(
            y, x, codes, some, channel_scale, bias, sums, arrived, h, gamma, squares, self.shape.m, self.shape.n, self.shape.k,
            x.stride(0), self.shape.row_blocks, tiles, 0 if scale is None else scale.stride(0), self.iterations, self.factor,
            x_factor, inverse_width, eps, self.config,
        )  # fmt: skip
        return y


@functools.lru_cache(maxsize=1024)
def _config(
    tile: RingTile, form: WeightForm, dtype: HalfType, n: int, k: int, epilogue: Epilogue, overlap: bool, shared_bytes: int
) -> RingGemm:
    k_block = KBlock(form.format, dtype, tile.tokens, form.group, form.zero, form.scale_dtype)
    tail = k % (BLOCK_K * tile.warps_k * tile.splits * tile.rounds) != 0
    if k_block.dense:
        ring: Ring = RowRing(k_block, tile.row_blocks, tile.rounds, tail, tile.slots, n % 16 != 0)
    else:
        ring = Ring(k_block, tile.row_blocks, tile.rounds, tail, tile.slots)
    return RingGemm(ring, tile.warps_n, tile.warps_k, tile.splits, epilogue, overlap, shared_bytes)
