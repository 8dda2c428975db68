"""A block of 4 warps that multiplies 8-bit x by 64 rows of w with mma.sync: copies, reads and scales of 128 columns of K.

The functions take the configuration C of a kernel, which is a `ByteBlock`.
"""

from __future__ import annotations

import torch

from lowbit.kernels.parts.byte_dequantize import TILES, ByteDequantizer
from lowbit.kernels.parts.gluon import Scalar, aggregate, copy_ahead, gl, gluon, ptx
from lowbit.kernels.parts.operand import registers_layout, split_words
from lowbit.kernels.parts.scaled_epilogue import TYPES, XScale
from lowbit.kernels.parts.tile import ByteTypes, Warps

ROWS = 64
BLOCK_K = 128

BLOCK = gl.constexpr(BLOCK_K)
WORD_TILES = gl.constexpr(TILES)


class ByteBlock(Warps, ByteTypes):
    """Base class of configurations. `narrow` is the format of codes of fewer than 8 bits, "" for 8 bits. A block has `columns`
    tokens and `stages` stages of 128 columns of K."""

    narrow: str
    w_type: torch.dtype
    columns: int
    stages: int
    grouped: bool
    block_scale: bool
    x_scale: XScale

    rows = ROWS
    warps = ROWS // 16
    tokens_are_rows = False
    shared_layout = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    words_shared_layout = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    @property
    def dequantizer(self) -> ByteDequantizer:
        return ByteDequantizer(self.narrow, "s8" if self.x_type == torch.int8 else "e4m3")

    @property
    def planes(self) -> int:
        return self.dequantizer.planes if self.narrow else 0

    @property
    def factor(self) -> float:
        return self.dequantizer.conversion.scale_factor if self.narrow else 1.0

    @property
    def channel_scale(self) -> bool:
        return not (self.grouped or self.block_scale)

    @property
    def promote(self) -> bool:
        """True if sums over 128 columns of K are computed separately and added to fp32 totals."""
        return self.grouped or self.block_scale or self.x_scale == "block"

    @property
    def w(self) -> gl.dtype:
        return TYPES[self.w_type][0]

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([2, 0], [self.warps, 1], [16, 8])

    @property
    def operand_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.accumulator, 4)

    @property
    def x_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(1, self.accumulator, 4)

    @property
    def copy_layout(self) -> gl.BlockedLayout:
        """Layout [rows, 128]: 16 bytes a thread."""
        return gl.BlockedLayout([1, 16], [4, 8], [self.warps, 1], [1, 0])

    def words_layout(self, plane: int) -> gl.BlockedLayout:
        """Layout [row blocks, 32 lanes * words] of a plane of narrow codes."""
        return gl.BlockedLayout([1, self.dequantizer.plane_words(plane)], [1, 32], [self.warps, 1], [1, 0])

    @property
    def registers_layout(self) -> gl.BlockedLayout:
        return registers_layout(self.warps, 4)


@aggregate
class ScaledSource:
    """Addresses of x and w, their row strides, and the number of rows of each from the block's first row on. For narrow codes
    also the first row block and the numbers of row blocks and of tiles (64 columns of K). `ks`: number of columns of K, a
    multiple of 16."""

    x: Scalar
    x_stride: Scalar
    tokens: Scalar
    w: Scalar
    w_stride: Scalar
    channels: Scalar
    first_row_block: Scalar
    row_blocks: Scalar
    tiles: Scalar
    ks: Scalar


@gluon.jit
def copy_rows(source, stride, shared, k, rows_exist, k_exist, COUNT: gl.constexpr, C: gl.constexpr):
    """Starts to copy 128 columns of K of some rows; rows that do not exist become zeros."""
    rows = gl.arange(0, COUNT, gl.SliceLayout(1, C.copy_layout))
    columns = k + gl.arange(0, BLOCK, gl.SliceLayout(0, C.copy_layout))
    at = source + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    copy_ahead(shared, at, (rows < rows_exist)[:, None] & (columns < k_exist)[None, :])


@gluon.jit
def copy_words(source, shared, slot, group, plane: gl.constexpr, C: gl.constexpr):
    """Starts to copy 128 columns of K of a plane of narrow codes."""
    LAYOUT: gl.constexpr = ptx(C.words_layout, plane)
    WORDS: gl.constexpr = ptx(C.dequantizer.plane_words, plane) * 32
    COUNT: gl.constexpr = WORDS * WORD_TILES
    WARPS: gl.constexpr = C.warps
    row_block = source.first_row_block + gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
    row_block = gl.minimum(row_block, source.row_blocks - 1)  # row blocks beyond the last one are computed but not stored
    word = gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    tile = group * WORD_TILES + word // WORDS
    inside = tile * (32 * C.dequantizer.bits) + word % WORDS + ptx(C.dequantizer.plane_start, plane)
    row = row_block.to(gl.int64) * source.tiles * (32 * C.dequantizer.bits)
    there = (row_block >= 0)[:, None] & (tile < source.tiles)[None, :]
    copy_ahead(shared.index(slot), source.w + row[:, None] + inside[None, :], there)


@gluon.jit
def read_plane(shared, slot, plane: gl.constexpr, C: gl.constexpr):
    """Reads a lane's words of a plane: those of the first tile, then of the second."""
    LAYOUT: gl.constexpr = ptx(C.words_layout, plane)
    WORDS: gl.constexpr = ptx(C.dequantizer.plane_words, plane)
    read = gl.reshape(shared.index(slot).load(LAYOUT), [C.warps, WORD_TILES, 32, WORDS])
    return split_words(gl.reshape(gl.permute(read, [0, 2, 1, 3]), [C.threads, WORD_TILES * WORDS]), WORD_TILES * WORDS, C)


@gluon.jit
def read_words(shared, slot, C: gl.constexpr):
    """Reads a lane's words of 128 columns of K."""
    PLANES: gl.constexpr = C.planes
    first = ()
    second = ()
    for plane in gl.static_range(PLANES):
        words = read_plane(shared[plane], slot, plane, C)
        first = first + words[0 : ptx(C.dequantizer.plane_words, plane)]
        second = second + words[ptx(C.dequantizer.plane_words, plane) :]
    return first + second


@gluon.jit
def block_scale_of(x_scale, scale, group, groups, stride, tokens, channels, M, N, C: gl.constexpr):
    """Returns the scales of the sums over 128 columns of K."""
    factor = gl.full([C.rows, C.columns], 1.0, gl.float32, C.accumulator)
    if C.x_scale == "block":
        factor = factor * gl.load(x_scale + tokens.to(gl.int64) * groups + group, mask=tokens < M, other=0.0)[None, :]
    if C.grouped:
        factor = factor * gl.load(scale + group * stride + channels, mask=channels < N, other=0.0).to(gl.float32)[:, None]
    if C.block_scale:
        factor = factor * gl.load(scale + channels // 128 * groups + group, mask=channels < N, other=0.0)[:, None]
    return factor


@gluon.jit
def words_memory(plane: gl.constexpr, C: gl.constexpr):
    """Allocates shared memory for all stages of a plane of narrow codes."""
    COUNT: gl.constexpr = ptx(C.dequantizer.plane_words, plane) * (32 * WORD_TILES)
    return gl.allocate_shared_memory(gl.int32, [C.stages, C.warps, COUNT], C.words_shared_layout)
