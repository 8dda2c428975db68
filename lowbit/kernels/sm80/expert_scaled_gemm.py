"""y[slot] = (x[row of slot] . dequant(w[expert of slot])[N, K]^T) scaled, x of 8 bits, mma.sync: sm_80, fp8 from sm_89 on.

Computes y^T = w x^T as scaled_gemm.py does, with its stages (parts/byte_block.py). Correct on every GPU that has the
instructions, tuned for none.
Reads   x of 8 bits, rows gathered by slot; w of pack/expert_operand.py; the list of tiles that ops/route.py writes: (expert,
        first position in `order`, rows); scales and zeros of x by the row of x
Grid    the largest possible number of tiles, times blocks of 64 rows of w. The number of tiles is read from memory; blocks
        beyond it return at once. Blocks of the same tile are neighbours, and the next tile is often one of the same expert
Sum     int8 in s32, exact; fp8 in fp32, K in order. Where scales change along K, sums over 128 columns of K are scaled and
        added in fp32. One block sums all of K for its rows, so a row of y has the same bits in every batch
Epilogue  zeros, scales, bias of the expert, router weight; a row of y for each slot, rounded once
Exact   every weight is dequantized exactly, never rounded. Tested: tests/ops/test_scaled_expert_gemm.py
Source  mma.m16n8k32 and its fragments: PTX ISA
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import IntFormat, PerBlock, PerGroup, Scheme
from lowbit.kernels.choose.experts import FEW_ROWS, MANY_ROWS, ExpertShape
from lowbit.kernels.parts.byte_block import (
    BLOCK,
    ROWS,
    ByteBlock,
    ScaledSource,
    block_scale_of,
    copy_rows,
    copy_words,
    read_words,
    words_memory,
)
from lowbit.kernels.parts.byte_dequantize import dequantize
from lowbit.kernels.parts.gluon import (
    barrier,
    commit_copies,
    copy_ahead,
    gl,
    gluon,
    mma_v2,
    source_digest,
    wait_copies,
)
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.operand import operand_a
from lowbit.kernels.parts.scaled_epilogue import CODE_TYPES, ScaledEpilogueArgs, XScale, finished

MOST_COLUMNS, MOST_PROMOTED = 64, 32
"""Largest number of tokens of a block, without and with block scales. With twice as many, kernels with promoted sums need more
than 255 registers (Triton 3.6 and 3.9; 432 bytes of stack with 128 tokens)."""


@dataclass(frozen=True)
class ExpertScaledGemm(ByteBlock):
    """The kernel's compile-time configuration. The epilogue returns `y_type`, which is float32; y is stored in type `stored`.
    A tile of the list is computed in `parts` parts of `columns` tokens."""

    narrow: str
    w_type: torch.dtype
    x_type: torch.dtype
    stored: torch.dtype
    columns: int
    parts: int
    stages: int
    grouped: bool
    block_scale: bool
    x_scale: XScale
    x_zero: bool
    bias: bool
    weighted: bool
    digest: str = source_digest()

    y_type = torch.float32
    function = "none"


@gluon.jit
def rows_of_x(order, first, rows, top_k, M, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns (slots of a tile's tokens, their rows of x). For tokens that do not exist the row is M, one beyond the last."""
    token = gl.arange(0, C.columns, LAYOUT)
    slot = gl.load(order + first + token, mask=token < rows, other=0)
    return slot, gl.where(token < rows, slot // top_k, M)


@gluon.jit
def copy_stage(x_rows, source, x_shared, w_shared, group, slot, M, C: gl.constexpr):
    """Starts the copies of 128 columns of K. Columns beyond K, and rows that do not exist, become zeros."""
    PLANES: gl.constexpr = C.planes
    columns = group * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, C.copy_layout))
    at = source.x + (x_rows.to(gl.int64) * source.x_stride)[:, None] + columns[None, :]
    copy_ahead(x_shared.index(slot), at, (x_rows < M)[:, None] & (columns < source.ks)[None, :])
    if C.narrow == "":
        copy_rows(source.w, source.w_stride, w_shared[0].index(slot), group * BLOCK, source.channels, source.ks, C.rows, C)
    for plane in gl.static_range(PLANES):
        copy_words(source, w_shared[plane], slot, group, plane, C)
    commit_copies()


SIZES = [
    "M", "N", "K", "x_stride", "w_stride", "row_tiles", "row_blocks", "k_tiles", "scale_stride", "expert_scales", "top_k",
]  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def expert_scaled_gemm(
    y, x, w, x_scale, x_zero, scale, channel_scale, sums, bias, tiles, tile_count, order, weights, M, N, K, x_stride, w_stride,
    row_tiles, row_blocks, k_tiles, scale_stride, expert_scales, top_k, C: gl.constexpr,
):  # fmt: skip
    """One block: a tile of the list by 64 rows of w. x has M rows; `x_stride` and `w_stride` count vectors of 16 bytes."""
    SUMS: gl.constexpr = C.accumulator
    COUNT: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    TYPE: gl.constexpr = C.sums
    STAGES: gl.constexpr = C.stages
    PLANES: gl.constexpr = C.planes
    x_shared = gl.allocate_shared_memory(C.x, [STAGES, COLUMNS, BLOCK], C.shared_layout)
    part = gl.program_id(0) // row_tiles
    index = part // C.parts
    if index < gl.load(tile_count):
        expert = gl.load(tiles + 3 * index)
        first = gl.load(tiles + 3 * index + 1) + part % C.parts * C.columns
        rows = gl.load(tiles + 3 * index + 2) - part % C.parts * C.columns
        first_channel = gl.program_id(0) % row_tiles * C.rows
        channels = first_channel + gl.arange(0, C.rows, gl.SliceLayout(1, SUMS))
        of_expert = expert.to(gl.int64) * N
        w_shared = ()
        if C.narrow == "":
            w_shared = (gl.allocate_shared_memory(C.w, [STAGES, COUNT, BLOCK], C.shared_layout),)
            w += (of_expert + first_channel) * (w_stride * 16)
        else:
            w += expert.to(gl.int64) * row_blocks * k_tiles * (32 * C.dequantizer.bits)
        for plane in gl.static_range(PLANES):
            w_shared = w_shared + (words_memory(plane, C),)
        source = ScaledSource(
            x, x_stride * 16, M, w, w_stride * 16, N - first_channel, first_channel // 16, row_blocks, k_tiles,
            (K + 15) // 16 * 16,
        )  # fmt: skip
        _slot, x_rows = rows_of_x(order, first, rows, top_k, M, gl.SliceLayout(1, C.copy_layout), C)
        slots, tokens = rows_of_x(order, first, rows, top_k, M, gl.SliceLayout(0, SUMS), C)
        if C.grouped or C.block_scale:
            scale += expert.to(gl.int64) * expert_scales
        groups = (K + BLOCK - 1) // BLOCK
        zeros = gl.zeros((COUNT, COLUMNS), TYPE, SUMS)
        acc = zeros
        if C.promote:
            acc = gl.zeros((COUNT, COLUMNS), gl.float32, SUMS)
        for ahead in gl.static_range(STAGES - 1):
            copy_stage(x_rows, source, x_shared, w_shared, ahead, ahead, M, C)
        stage = 0
        for group in range(0, groups):
            wait_copies(STAGES - 2)
            barrier()
            copy_stage(x_rows, source, x_shared, w_shared, group + (STAGES - 1), gl.where(stage == 0, STAGES, stage) - 1, M, C)
            if C.narrow == "":
                a = w_shared[0].index(stage).load(C.operand_layout)
            else:
                a = operand_a(dequantize(read_words(w_shared, stage, C), C), C)
            b = x_shared.index(stage).permute([1, 0]).load(C.x_layout)
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
            if C.promote:
                part_sum = mma_v2(a, b, zeros).to(gl.float32)
                acc += part_sum * block_scale_of(x_scale, scale, group, groups, scale_stride, tokens, channels, M, N, C)
            else:
                acc = mma_v2(a, b, acc)
        wait_copies(0)  # the last prefetches lie beyond K and copy zeros; no copy may outlive the block
        if C.channel_scale:
            channel_scale += of_expert
        if C.bias:
            bias += of_expert
        epilogue_args = ScaledEpilogueArgs(x_scale, x_zero, channel_scale, sums + of_expert, bias, None)
        result = finished(acc, epilogue_args, tokens, channels, M, N, C)
        exists = tokens < M
        if C.weighted:
            result = result * gl.load(weights + slots, mask=exists, other=0.0)[None, :]
        at = y + (slots.to(gl.int64) * N)[None, :] + channels[:, None]
        gl.store(at, result.to(y.dtype.element_ty), mask=exists[None, :] & (channels < N)[:, None])


class ExpertScaledPlan:
    """Plan of a product of experts with 8-bit x, for one shape: created once, called many times."""

    def __init__(
        self, shape: ExpertShape, scheme: Scheme, dtype: torch.dtype, x_scale: XScale, x_zero: bool, bias: bool, *,
        weighted: bool = False,
    ) -> None:  # fmt: skip
        assert scheme.activation is not None
        self.shape = shape
        columns = min(shape.tile_rows, MOST_PROMOTED if isinstance(scheme.granularity, PerBlock) else MOST_COLUMNS)
        if shape.tile_rows not in (*FEW_ROWS, *MANY_ROWS):
            rows = ", ".join(map(str, (*FEW_ROWS, *MANY_ROWS)))
            raise ValueError(f"products of experts have tiles of {rows} rows, the routing has tiles of {shape.tile_rows}")
        x_type = CODE_TYPES[scheme.activation.name]
        assert (x_type == torch.int8) == isinstance(scheme.activation, IntFormat)
        self.config = ExpertScaledGemm(
            scheme.weight.name if shape.bits < 8 else "", CODE_TYPES.get(scheme.weight.name, x_type), x_type, dtype,
            columns, shape.tile_rows // columns, 4 if columns <= 16 else 3, isinstance(scheme.granularity, PerGroup),
            isinstance(scheme.granularity, PerBlock), x_scale, x_zero, bias, weighted,
        )  # fmt: skip
        self.row_tiles = -(-shape.n // ROWS)
        grid = (shape.most_tiles * self.config.parts * self.row_tiles, 1, 1)
        self.launch = Launcher(expert_scaled_gemm, grid, self.config.warps)

    def __call__(
        self, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, codes: Tensor, scale: Tensor | None,
        channel_scale: Tensor | None, sums: Tensor, bias: Tensor | None, tiles: Tensor, tile_count: Tensor, order: Tensor,
        weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Returns y [slots, N] of x [rows, K], whose rows start at multiples of 16 bytes; all tensors on the current device.
        `tiles` [any, 3], `tile_count` [1], `order` and `weights` [slots] as ops/route.py has them."""
        n, k = self.shape.n, self.shape.k
        if k % 16:  # the kernel reads whole vectors of 16 bytes
            filled = x.new_zeros((x.shape[0], -(-k // 16) * 16), dtype=torch.uint8)
            filled[:, :k] = x.view(torch.uint8)
            x = filled.view(x.dtype)
        y = torch.empty((self.shape.slots, n), dtype=self.config.stored, device=x.device)
        narrow = self.config.narrow != ""
        self.launch(
            y, x, codes, x_scale, x_zero, sums if scale is None else scale, channel_scale, sums, bias, tiles, tile_count, order,
            weights, x.shape[0], n, k, x.stride(0) // 16, 0 if narrow else codes.stride(1) // 16, self.row_tiles,
            codes.shape[1], codes.shape[2] if narrow else 0, 0 if scale is None else scale.stride(1),
            0 if scale is None else scale.stride(0), 1 if self.shape.per_slot else self.shape.top_k, self.config,
        )  # fmt: skip
        return y
