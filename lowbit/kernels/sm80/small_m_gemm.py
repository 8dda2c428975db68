"""y[M, N] = x[M, K] . dequant(w)[N, K]^T for small M, any code width, mma.sync and cp.async: sm_80 and newer.

Reads   x fp16 or bf16, rows of 16-byte vectors; w in FragmentOrder, one stream per m16 row block; scales in the same order; or
        w in x's type as nn.Linear stores it (parts/ring.py), where the kernel pairs gate and up rows
Grid    blocks of rows x blocks of tokens x splits of K; about one thread block per SM, all in one wave
Warps   warps_n x warps_k: each row of warps has `row_blocks` row blocks, whose k blocks (128 columns) its warps_k warps take
        round-robin
Ring    every warp fills and reads its own ring buffer: no barrier in the main loop, all slots in flight (parts/ring.py)
K block codes -> halves -> mma.sync; group scales multiply each group's sum in fp32 (parts/k_block.py)
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
from lowbit.kernels.parts.gluon import gl, gluon, half_type, ptx, run, source_digest
from lowbit.kernels.parts.k_block import BLOCK_K, KBlock
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.lora_epilogue import LoraArgs
from lowbit.kernels.parts.ring import Ring, RowRing
from lowbit.kernels.parts.ring_loop import RingBlock, addresses_of, advance, copy_block, iteration, read_block, source_of
from lowbit.kernels.parts.small_m_epilogue import (
    ResidualArgs,
    SmallMEpilogueArgs,
    ThreadCoordinates,
    apply_epilogue,
    load_h,
    load_rows,
    load_tokens,
    lora_terms,
    prefetch_rows,
    prefetch_terms,
    reduce_slices,
    reduce_splits,
    rms_factors,
    stage_sums,
)
from lowbit.pack.weight import WeightForm


@dataclass(frozen=True)
class RingGemm(RingBlock):
    """The kernel's compile-time configuration. Kernels with equal configurations give bit-equal results.

    `overlap` starts the weight copies before the previous kernel has finished (programmatic dependent launch, sm_90). A block
    allocates at least `shared_bytes` of shared memory, which limits the number of blocks per SM.
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
    """PTX that returns in $0 the address $1 bytes after the start of the kernel's only allocation, whose offset is 0."""

    @property
    def slices(self) -> int:
        """Number of slices of K over all blocks; slice i takes the k blocks i, i + slices, i + 2 slices, ..."""
        return self.warps_k * self.splits

    @property
    def shared_rows(self) -> int:
        """Size of shared memory in rows of one float32 per thread: the rings, and behind them what adapters' a x are."""
        lora = self.epilogue.lora
        sums = 0 if lora is None else self.ring.k_block.tokens * lora.parts * lora.rank
        return self.ring_rows + -(-sums // self.threads)

    @property
    def lora_offset(self) -> int:
        """Byte of shared memory at which the sums a x of adapters begin."""
        return 4 * self.ring_rows * self.threads

    @property
    def ring_rows(self) -> int:
        """Rows of shared memory for the rings; the epilogue overwrites them with the accumulators and, with a residual, the
        sums of squares of groups of 8 rows behind these."""
        squares = 2 * self.row_blocks * self.ring.k_block.tokens if self.epilogue.residual else 0
        at_end = self.accumulators + -(-squares // self.threads)
        return max(-(-max(self.ring.bytes * self.warps, self.shared_bytes) // (4 * self.threads)), at_end)

    @property
    def rows_early(self) -> bool:
        """True if scales and other values of rows are loaded before the main loop, which takes a register for each of a
        thread's rows. This is done in a chain of short kernels, and where a thread has few rows. Otherwise they are loaded from
        L2 in the epilogue."""
        in_chain = self.splits == 1 and (self.epilogue.norm_parts > 0 or self.epilogue.residual)
        return in_chain or len({self.first_of_row(i) for i in range(self.outputs)}) <= 8

    @property
    def h_early(self) -> bool:
        """True if h, and a bias of tokens, are loaded before the main loop. With splits they are not, since only the last of
        the blocks that share a tile needs them."""
        return self.splits == 1


@gluon.jit
def clear_x(ring, source, C: gl.constexpr):
    """Zeroes the x rows of tokens that do not exist, which no copy writes."""
    R: gl.constexpr = C.ring
    N8_TILES: gl.constexpr = R.k_block.n8_tiles if R.skips_absent_tokens else 0
    for n8_tile in gl.static_range(N8_TILES):
        run(ptx(R.clear_x, n8_tile), "=r,r,r", [ring.at_x, source.x_size[n8_tile]])


@gluon.jit(do_not_specialize=["M", "N", "K", "x_stride", "row_blocks", "tiles", "scale_stride", "iterations"])
def ring_gemm(
    y, x, w, scale, channel_scale, bias, partial, arrived, h, gamma, squares, M, N, K, x_stride, row_blocks, tiles,
    scale_stride, iterations, factor, x_factor, inverse_width, eps, t, b, adapter_of, C: gl.constexpr,
):  # fmt: skip
    """One thread block: C.row_blocks row blocks of w, C.ring.k_block.tokens tokens, and the slices of K of its split.

    Before griddepcontrol.wait the kernel reads only weights. It reads x, h, squares, a bias of tokens and t, which previous
    kernels write, after it.
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
    if C.rows_early and C.epilogue.bias and not C.epilogue.bias_of_tokens:
        bias = load_rows(bias, at, C)
    if C.rows_early and C.epilogue.residual:
        gamma = load_rows(gamma, at, C)
    if not C.rows_early:
        prefetch_rows(channel_scale, bias, gamma, thread, at, C)
    lora = LoraArgs(t, b, adapter_of)
    if C.epilogue.lora is not None:
        prefetch_terms(lora, at, C)
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
    if C.epilogue.bias_of_tokens and C.h_early:
        bias = load_tokens(bias, at, C)
    if C.epilogue.lora is not None:
        stage_sums(lora, thread, at, C)

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
    if not C.rows_early and C.epilogue.bias and not C.epilogue.bias_of_tokens:
        bias = load_rows(bias, at, C)
    if C.epilogue.bias_of_tokens and not C.h_early:
        bias = load_tokens(bias, at, C)
    if not C.rows_early and C.epilogue.residual:
        gamma = load_rows(gamma, at, C)
    terms = ()
    if C.epilogue.lora is not None:
        terms = lora_terms(lora, at, C)
    epilogue_args = SmallMEpilogueArgs(factor, channel_scale, rms, bias, terms)
    residual = ResidualArgs(h, gamma, squares, x_factor, old)
    if C.splits == 1:
        apply_epilogue(y, sums, epilogue_args, residual, at, C)
    else:
        last, totals = reduce_splits(partial, arrived, sums, thread, C)
        if last:
            apply_epilogue(y, totals, epilogue_args, residual, at, C)


class RingPlan:
    """Plan of a small-M GEMM with its epilogue, for one shape: created once, called many times."""

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
        """Number of elements of the two workspaces: float32 sums, and int32 counters, which are zero before and after a
        launch."""
        if self.tile.splits == 1:
            return 0, 0
        blocks = self.grid[0] * self.grid[1]
        return blocks * self.tile.splits * self.config.outputs * self.config.threads, blocks

    @property
    def squares_parts(self) -> int:
        """Number of partial sums of squares per token that a residual epilogue stores."""
        return self.grid[0]

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        sums: Tensor, arrived: Tensor, squares: Tensor | None = None, h: Tensor | None = None, gamma: Tensor | None = None,
        x_factor: float | None = None, inverse_width: float | None = None, eps: float | None = None,
        t: Tensor | None = None, b: Tensor | None = None, adapter_of: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns y [M, N], or [M, N / 2] with a gate, of x [M, K], whose rows start at multiples of 16 bytes.

        Codes and scales are those of pack/weight.py, or codes are the rows of pack/dense.py, without scales. bias is [N], or
        contiguous [M, N] with `Epilogue.bias_of_tokens`. `sums` and `arrived` are the workspace. All tensors are on the current
        device. A norm reads `squares` float32 [norm_parts, M]: partial sums of squares of the rows of h, which have 1 /
        `inverse_width` elements. A residual adds y to h [M, N] in place, writes `squares` [squares_parts, M] and returns h *
        gamma * x_factor.
        `t`, `b` and `adapter_of` are those of parts/lora_epilogue.py, with `Epilogue.lora`.
        """
        y = torch.empty((self.shape.m, self.columns), dtype=x.dtype, device=x.device)
        some = next(t for t in (scale, channel_scale, codes) if t is not None)  # stands for missing scales, never read
        tiles = 0 if self.config.ring.k_block.dense else codes.shape[1]
        self.launch(
            y, x, codes, some, channel_scale, bias, sums, arrived, h, gamma, squares, self.shape.m, self.shape.n, self.shape.k,
            x.stride(0), self.shape.row_blocks, tiles, 0 if scale is None else scale.stride(0), self.iterations, self.factor,
            x_factor, inverse_width, eps, t, b, adapter_of, self.config,
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
