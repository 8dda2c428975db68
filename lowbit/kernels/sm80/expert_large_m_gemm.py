"""y[slot] = x[row of slot] . dequant(w[expert of slot])[N, K]^T, many rows per expert, mma.sync and cp.async: sm_80 and newer.

Computes y^T = w x^T like large_m_gemm.py, with the same main loop (parts/mma_loop.py).
Reads   x fp16 or bf16, rows of 16-byte vectors, gathered by slot (each thread looks up its rows); w and scales of
        pack/expert.py; the list of tiles that ops/route.py writes: (expert, first position in `order`, rows)
Grid    the largest possible number of tiles, times tiles of rows of w. The number of tiles is read from memory; blocks beyond
        it return at once. Blocks of the same tile are neighbours, and the next tile is often one of the same expert, so L2
        serves x and w
Sum     in fp32, K in order: same input, same bits, in any batch with the same number of rows per tile
Epilogue  scales, bias of the expert, gate, router weight; a row of y for each slot, 8 channels at a time, rounded once
Exact   every weight is dequantized exactly and rounded once after scaling. Tested: tests/ops/test_expert_gemm.py
Source  docs/log/matrix-products.md, 2026-11-24
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.experts import ExpertShape
from lowbit.kernels.choose.tiles import MmaTile
from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.gluon import gl, gluon, half_type, source_digest
from lowbit.kernels.parts.large_m_epilogue import LargeMEpilogueArgs, finished_tile
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.mma_loop import STAGE_K, MmaBlock, allocate_stages, first_weights, products, reader_of_stages
from lowbit.kernels.parts.tile_stage import StageSource, x_vector
from lowbit.pack.weight import WeightForm

MOST_REGISTERS = 255
"""Limit of registers per thread."""

REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class ExpertMmaGemm(MmaBlock):
    """The kernel's compile-time configuration. Kernels with equal configurations give bit-equal results.

    `whole`: rows of y are whole vectors of 8 elements. `weighted`: y is multiplied by the router weight.
    """

    dequantizer: Dequantizer
    tokens: int
    row_blocks: int
    warps_n: int
    warps_m: int
    warps_k: int
    stages: int
    epilogue: Epilogue
    whole: bool
    weighted: bool
    digest: str = source_digest()

    gathered = True

    @property
    def thread_tokens(self) -> int:
        """Number of tokens of which a thread copies vectors."""
        return self.stage.x_copies // self.warps_k

    @property
    def copied_tokens(self) -> int:
        """Number of tokens that all threads together copy at a time."""
        return 4 * self.warps


@gluon.jit
def gathered_rows(x, order, first, rows, thread, x_stride, top_k, C: gl.constexpr):
    """Returns the address of the first vector of each token that a thread copies. For tokens that do not exist it is that of
    some row."""
    TOKENS: gl.constexpr = C.thread_tokens
    token, vector = x_vector(thread)
    pointers = ()
    for i in gl.static_range(TOKENS):
        own = token + i * C.copied_tokens
        slot = gl.load(order + first + own, mask=own < rows, other=0)
        pointers = pointers + (x + ((slot // top_k).to(gl.int64) * x_stride + vector * 8),)
    return pointers


@gluon.jit
def store_slots(y, acc, epilogue_args, weights, order, first, rows, first_row, N, columns, C: gl.constexpr):
    """Applies scales, bias, gate and router weights, rounds once, and stores the rows of a tile's slots, 8 neighbouring
    channels at a time."""
    STORED: gl.constexpr = C.store_layout
    acc, first_row = finished_tile(acc, epilogue_args, first_row, N, C)
    if C.weighted:
        LIKE: gl.constexpr = C.accumulator if C.epilogue.gate == "none" else acc.type.layout
        token = gl.arange(0, C.tokens, gl.SliceLayout(0, LIKE))
        slot = gl.load(order + first + token, mask=token < rows, other=0)
        acc = acc * gl.load(weights + slot, mask=token < rows, other=0.0)[None, :]
    result = gl.convert_layout(acc.to(C.dequantizer.operand_type), STORED)
    channels = first_row + gl.arange(0, C.channels, gl.SliceLayout(1, STORED))
    token = gl.arange(0, C.tokens, gl.SliceLayout(0, STORED))
    slot = gl.load(order + first + token, mask=token < rows, other=0)
    at = y + slot.to(gl.int64)[None, :] * columns + channels[:, None]
    gl.store(at, result, mask=(channels < columns)[:, None] & (token < rows)[None, :])


SIZES = ["N", "K", "columns", "x_stride", "row_tiles", "iterations", "row_blocks", "w_stride", "scale_stride", "top_k"]


@gluon.jit(do_not_specialize=SIZES)
def expert_mma_gemm(
    y, x, w, scale, channel_scale, bias, tiles, tile_count, order, weights, N, K, columns, x_stride, row_tiles, iterations,
    row_blocks, w_stride, scale_stride, top_k, factor, C: gl.constexpr,
):  # fmt: skip
    """One block: a tile of the list times a tile of rows of w. The last row tile of an expert begins early enough to be full;
    rows that are in two tiles are stored twice, with the same bits. With C.whole, `columns` counts vectors of 8 columns of
    y."""
    if C.whole:
        columns = columns * 8
    x_shared = allocate_stages(C)
    index = gl.program_id(0) // row_tiles
    if index < gl.load(tile_count):
        expert = gl.load(tiles + 3 * index)
        first = gl.load(tiles + 3 * index + 1)
        rows = gl.load(tiles + 3 * index + 2)
        row_tile = gl.program_id(0) % row_tiles
        first_row_block = gl.minimum(row_tile * (C.rows // 16), row_blocks - C.rows // 16)
        thread = gl.arange(0, C.threads, C.threads_layout)
        token, vector = x_vector(thread)
        codes, scales = first_weights(w, scale, expert * row_blocks + first_row_block, thread, w_stride, scale_stride, C)
        source = StageSource(
            gathered_rows(x, order, first, rows, thread, x_stride, top_k, C), thread * 0, rows - token, K - vector * 8, codes,
            thread * 0 + w_stride, scales, thread * 0 + scale_stride, thread * 0 + (K + 63) // 64,
        )  # fmt: skip
        acc = products(x_shared, reader_of_stages(C), source, 0, iterations, C)
        of_expert = expert.to(gl.int64) * N
        if C.epilogue.channel_scale:
            channel_scale += of_expert
        if C.epilogue.bias:
            bias += of_expert
        epilogue_args = LargeMEpilogueArgs(channel_scale, bias, factor)
        store_slots(y, acc, epilogue_args, weights, order, first, rows, first_row_block * 16, N, columns, C)


class ExpertMmaPlan:
    """Plan of a product of experts with many rows each, for one shape: created once, called many times."""

    def __init__(
        self, shape: ExpertShape, tile: MmaTile, form: WeightForm, dtype: torch.dtype, epilogue: Epilogue, *,
        weighted: bool = False,
    ) -> None:  # fmt: skip
        if tile.splits != 1 or tile.tokens != shape.tile_rows or tile.rows // 16 > shape.row_blocks:
            raise ValueError(
                f"{tile}: a tile has {shape.tile_rows} rows of x, all of K and at most {shape.row_blocks} row blocks"
            )
        self.shape, self.tile = shape, tile
        self.columns = shape.n if epilogue.gate == "none" else shape.n // 2
        self.config = _config(tile, form, half_type(dtype), epilogue, self.columns % 8 == 0, weighted)
        self.row_tiles = -(-shape.row_blocks // (tile.rows // 16))
        # Without a limit ptxas spills in small tiles to fit more blocks on an SM.
        registers = min(MOST_REGISTERS, REGISTERS_PER_SM // self.config.threads)
        grid = (shape.most_tiles * self.row_tiles, 1, 1)
        self.launch = Launcher(expert_mma_gemm, grid, self.config.warps, registers=registers)
        self.factor = self.config.dequantizer.epilogue_factor

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None,
        tiles: Tensor, tile_count: Tensor, order: Tensor, weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns y [slots, N], or [slots, N / 2] with a gate, of x [rows, K]. Rows of x start at multiples of 16 bytes, with
        zeros from K up to the next multiple. Codes and scales are those of pack/expert.py; `tiles` [any, 3], `tile_count` [1],
        `order` and `weights` [slots] those of ops/route.py. All tensors are on the current device."""
        n, k = self.shape.n, self.shape.k
        y = torch.empty((self.shape.slots, self.columns), dtype=x.dtype, device=x.device)
        self.launch(
            y, x, codes, codes if scale is None else scale, channel_scale, bias, tiles, tile_count, order, weights, n, k,
            self.columns // 8 if self.config.whole else self.columns, x.stride(0), self.row_tiles,
            self.shape.steps(self.config.stage_k), self.shape.row_blocks, self.shape.steps(STAGE_K) * 128 * self.shape.bits,
            0 if scale is None else 2 * scale.stride(1), 1 if self.shape.per_slot else self.shape.top_k, self.factor,
            self.config,
        )  # fmt: skip
        return y


@functools.lru_cache(maxsize=1024)
def _config(
    tile: MmaTile, form: WeightForm, dtype: HalfType, epilogue: Epilogue, whole: bool, weighted: bool
) -> ExpertMmaGemm:  # fmt: skip
    dequantizer = Dequantizer(form.format, dtype, form.group, form.zero, form.scale_dtype, form.subnormal)
    return ExpertMmaGemm(
        dequantizer,
        tile.tokens,
        tile.row_blocks,
        tile.warps_n,
        tile.warps_m,
        tile.warps_k,
        tile.stages,
        epilogue,
        whole,
        weighted,
    )
