"""y[M, N] = x[M, K] . dequant(w)[N, K]^T for large M, any code width, mma.sync and cp.async: sm_80 and newer.

Computes y^T = w x^T: dequantized weights are operand A of mma.sync m16n8k16, from registers; x is operand B, by ldmatrix.
Reads   x fp16 or bf16, rows of 16-byte vectors; w and scales in fragment order
Grid    tiles of rows x tokens, times splits of K; ordered in groups of token tiles, so that a wave shares x and w in L2
Warps   warps_n x warps_m: each has `row_blocks` m16 row blocks and a share of the tokens; warps of a row dequantize the same
        codes. With warps_k > 1, warps_k warps share K, each with one slice. The columns of operand B are then the tokens of all
        slices, interleaved 8 tokens at a time, so that the layout assigns each warp the columns of its slice. At the end the
        columns of a token are added up
Stages  of 64 columns of K for each slice, copied by all threads, `stages` - 1 ahead; one barrier per stage
        (parts/tile_stage.py)
Steps   four k16 steps per stage, each over a warp's tokens in chunks of 32. While a chunk is multiplied, x is read four chunks
        ahead, and weights of the next step are dequantized into a second set of registers; copies are spread over a stage
        (parts/mma_loop.py)
Sum     in fp32, K in order; with splits > 1 the last block to arrive adds the splits in order (split-K), or each block adds to
        the sum of the previous split (serial split-K): same input, same bits
Epilogue  scales, bias and gate; transposed through shared memory, stored in vectors of 16 bytes
Exact   every weight is dequantized exactly and rounded once after scaling, like the weights of a dequantized model
Source  mma.m16n8k16 and ldmatrix: PTX ISA; the order of copies, barrier and products: CUTLASS 2.x; measurements: docs/log
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.tiles import GemmShape, MmaTile
from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.gluon import gl, gluon, half_type, source_digest
from lowbit.kernels.parts.large_m_epilogue import LargeMEpilogueArgs, finished_tile
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.mma_loop import STAGE_K, MmaBlock, allocate_stages, first_weights, products, reader_of_stages
from lowbit.kernels.parts.schedule import (
    SplitKWorkspace,
    TileGrid,
    iterations_of,
    reduce_splits,
    reduce_splits_serially,
    tile_at,
)
from lowbit.kernels.parts.tile_stage import StageSource, x_vector
from lowbit.pack.weight import WeightForm

MOST_REGISTERS = 255
"""Limit of registers per thread."""

REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class MmaGemm(MmaBlock):
    """The kernel's compile-time configuration. Kernels with equal configurations give bit-equal results."""

    dequantizer: Dequantizer
    tokens: int
    row_blocks: int
    warps_n: int
    warps_m: int
    warps_k: int
    stages: int
    splits: int
    token_group: int
    in_turn: bool
    epilogue: Epilogue
    whole: bool
    digest: str = source_digest()

    last_is_full = False


@gluon.jit
def store_tile(y, acc, epilogue_args, first_row, first_token, M, N, columns, C: gl.constexpr):
    """Applies scales, bias and gate, rounds once and stores y [M, columns], 8 neighbouring channels of a token at a time."""
    STORED: gl.constexpr = C.store_layout
    acc, first_row = finished_tile(acc, epilogue_args, first_row, N, C, first_token, M)
    result = gl.convert_layout(acc.to(C.dequantizer.operand_type), STORED)
    channels = first_row + gl.arange(0, C.channels, gl.SliceLayout(1, STORED))
    tokens = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, STORED))
    at = y + tokens.to(gl.int64)[None, :] * columns + channels[:, None]
    gl.store(at, result, mask=(channels < columns)[:, None] & (tokens < M)[None, :])


SIZES = [
    "M",
    "N",
    "K",
    "columns",
    "x_stride",
    "token_tiles",
    "row_tiles",
    "iterations",
    "row_blocks",
    "w_stride",
    "scale_stride",
]


@gluon.jit(do_not_specialize=SIZES)
def mma_gemm(
    y, x, w, scale, channel_scale, bias, partial, arrived, M, N, K, columns, x_stride, token_tiles, row_tiles, iterations,
    row_blocks, w_stride, scale_stride, factor, C: gl.constexpr,
):  # fmt: skip
    """One block: a tile, or one split of its K. The last row tile begins early enough to be full; rows that are in two tiles
    are stored twice, with the same bits. With C.whole, `columns` counts vectors of 8 columns of y."""
    if C.whole:
        columns = columns * 8
    x_shared = allocate_stages(C)
    tiles = TileGrid(token_tiles, row_tiles, iterations, M)
    token_tile, row_tile, split = tile_at(gl.program_id(0), tiles, C)
    begin, end = iterations_of(split, tiles, C)
    first_row_block = gl.minimum(row_tile * (C.rows // 16), row_blocks - C.rows // 16)
    first_token = token_tile * C.tokens

    thread = gl.arange(0, C.threads, C.threads_layout)
    token, vector = x_vector(thread)
    token += first_token
    k = vector * 8
    codes, scales = first_weights(w, scale, first_row_block, thread, w_stride, scale_stride, C)
    source = StageSource(
        x + (token.to(gl.int64) * x_stride + k), thread * 0 + x_stride * (8 * C.warps), M - token,
        gl.minimum(K, end * C.stage_k) - k, codes, thread * 0 + w_stride, scales, thread * 0 + scale_stride,
        thread * 0 + gl.minimum((K + 63) // 64, end * C.warps_k),
    )  # fmt: skip
    acc = products(x_shared, reader_of_stages(C), source, begin, end, C)
    epilogue_args = LargeMEpilogueArgs(channel_scale, bias, factor)
    if C.splits == 1:
        store_tile(y, acc, epilogue_args, first_row_block * 16, first_token, M, N, columns, C)
    else:
        at, tile = SplitKWorkspace(partial, arrived), token_tile * row_tiles + row_tile
        if C.in_turn:
            last, total = reduce_splits_serially(at, acc, tile, split, C)
        else:
            last, total = reduce_splits(at, acc, tile, split, C)
        if last:
            store_tile(y, total, epilogue_args, first_row_block * 16, first_token, M, N, columns, C)


class MmaPlan:
    """Plan of a large-M GEMM for one shape, with scales, bias and gate in its epilogue: created once, called many times."""

    def __init__(self, shape: GemmShape, tile: MmaTile, form: WeightForm, dtype: torch.dtype, epilogue: Epilogue) -> None:
        if epilogue.norm_parts or epilogue.residual:
            raise ValueError("mma_gemm has no norm and no residual in its epilogue")
        self.shape, self.tile = shape, tile
        self.columns = shape.n if epilogue.gate == "none" else shape.n // 2
        self.config = _config(tile, form, half_type(dtype), epilogue, self.columns % 8 == 0)
        self.tiles = (-(-shape.m // tile.tokens), -(-shape.row_blocks // (tile.rows // 16)))
        grid = (self.tiles[0] * self.tiles[1] * tile.splits, 1, 1)
        # Without a limit ptxas spills in small tiles to fit more blocks on an SM.
        registers = min(MOST_REGISTERS, REGISTERS_PER_SM // self.config.threads)
        self.launch = Launcher(mma_gemm, grid, self.config.warps, registers=registers)
        self.factor = self.config.dequantizer.epilogue_factor

    @property
    def workspace(self) -> tuple[int, int]:
        """Number of elements of the two workspaces: float32 sums, and int32 counters, which are zero before and after a
        launch."""
        if self.tile.splits == 1:
            return 0, 0
        tiles = self.tiles[0] * self.tiles[1]
        sums = 1 if self.tile.in_turn else self.tile.splits
        return tiles * sums * self.tile.rows * self.tile.tokens, tiles

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        sums: Tensor, arrived: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns y [M, N], or [M, N / 2] with a gate, of x [M, K]. Rows of x start at multiples of 16 bytes, with zeros from K
        up to the next multiple. All tensors are on the current device."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        y = torch.empty((m, self.columns), dtype=x.dtype, device=x.device)
        self.launch(
            y, x, codes, codes if scale is None else scale, channel_scale, bias, sums, arrived, m, n, k,
            self.columns // 8 if self.config.whole else self.columns, x.stride(0), *self.tiles,
            self.shape.steps(self.config.stage_k), self.shape.row_blocks, self.shape.steps(STAGE_K) * 128 * self.shape.bits,
            0 if scale is None else 2 * scale.stride(0), self.factor, self.config,
        )  # fmt: skip
        return y


@functools.lru_cache(maxsize=1024)
def _config(tile: MmaTile, form: WeightForm, dtype: HalfType, epilogue: Epilogue, whole: bool) -> MmaGemm:
    dequantizer = Dequantizer(form.format, dtype, form.group, form.zero, form.scale_dtype, form.subnormal)
    return MmaGemm(
        dequantizer, tile.tokens, tile.row_blocks, tile.warps_n, tile.warps_m, tile.warps_k, tile.stages, tile.splits,
        tile.token_group, tile.in_turn, epilogue, whole,
    )  # fmt: skip
