"""y[M, N] = scaled x[M, K] . dequant(w)[N, K]^T, x of 8 bits, w of 8 or fewer, mma.sync: sm_80 and newer, fp8 from sm_89 on.

Computes y^T = w x^T. A simple kernel, correct on every GPU that has the instructions and tuned for none.
Reads   x and w of 8 bits row-major, by ldmatrix; codes of fewer bits in FragmentOrder, whose words each lane reads directly
Grid    blocks of 64 rows of w x blocks of tokens; 4 warps of 16 rows each
Stages  of 128 columns of K, copied by cp.async, `stages` - 1 ahead; one barrier per stage
Sum     int8 in s32, exact; fp8 in fp32. Where scales change along K, sums over 128 columns are scaled and added to a total in
        fp32
Exact   every weight is dequantized exactly (hardware/byte_conversions.py), never rounded; one rounding at the store
Source  mma.m16n8k32 and its fragments: PTX ISA
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.kernels.choose.scaled_gemm import ScaledShape
from lowbit.kernels.parts.byte_dequantize import TILES, ByteDequantizer, dequantize
from lowbit.kernels.parts.gluon import (
    Scalar,
    aggregate,
    barrier,
    commit_copies,
    copy_ahead,
    gl,
    gluon,
    mma_v2,
    ptx,
    source_digest,
    wait_copies,
)
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.operand import operand_a, registers_layout, split_words
from lowbit.kernels.parts.scaled_epilogue import (
    CODE_TYPES,
    TYPES,
    ScaledEpilogueArgs,
    XScale,
    finished,
    of_channels,
    of_tokens,
)
from lowbit.kernels.parts.tile import ByteTypes, Warps

ROWS = 64
BLOCK_K = 128
FEW, MANY = (16, 4), (64, 3)
"""(tokens of a block, stages) for few and for many tokens. They take at most 48 KiB of shared memory, so that two blocks share
an SM on every GPU."""

BLOCK = gl.constexpr(BLOCK_K)
WORD_TILES = gl.constexpr(TILES)


@dataclass(frozen=True)
class PlainGemm(Warps, ByteTypes):
    """The kernel's compile-time configuration. `narrow` is the format of codes of fewer than 8 bits, or "" for 8-bit codes."""

    narrow: str
    w_type: torch.dtype
    x_type: torch.dtype
    y_type: torch.dtype
    columns: int
    stages: int
    grouped: bool
    block_scale: bool
    x_scale: XScale
    x_zero: bool
    bias: bool
    function: str = "none"
    digest: str = source_digest()

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
        """True if sums over 128 columns of K are added to fp32 totals."""
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
        """Layout [rows, 128] with 16 bytes per thread."""
        return gl.BlockedLayout([1, 16], [4, 8], [self.warps, 1], [1, 0])

    def words_layout(self, plane: int) -> gl.BlockedLayout:
        """Layout [row blocks, 32 lanes * words] of a plane of sub-byte codes."""
        return gl.BlockedLayout([1, self.dequantizer.plane_words(plane)], [1, 32], [self.warps, 1], [1, 0])

    @property
    def registers_layout(self) -> gl.BlockedLayout:
        return registers_layout(self.warps, 4)


@aggregate
class ScaledSource:
    """Addresses of x and w, their row strides, and the numbers of rows from the block's first row on. For sub-byte codes: the
    first row block, and the numbers of row blocks and of tiles (64 columns of K). K, a multiple of 16."""

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
    """Starts the copies of 128 columns of some rows; rows that do not exist become zeros."""
    rows = gl.arange(0, COUNT, gl.SliceLayout(1, C.copy_layout))
    columns = k + gl.arange(0, BLOCK, gl.SliceLayout(0, C.copy_layout))
    at = source + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    copy_ahead(shared, at, (rows < rows_exist)[:, None] & (columns < k_exist)[None, :])


@gluon.jit
def copy_words(source, shared, slot, group, plane: gl.constexpr, C: gl.constexpr):
    """Starts the copies of 128 columns of a plane of sub-byte codes."""
    LAYOUT: gl.constexpr = ptx(C.words_layout, plane)
    WORDS: gl.constexpr = ptx(C.dequantizer.plane_words, plane) * 32
    COUNT: gl.constexpr = WORDS * WORD_TILES
    WARPS: gl.constexpr = C.warps
    row_block = source.first_row_block + gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
    row_block = gl.minimum(row_block, source.row_blocks - 1)  # row blocks beyond the last are computed but not stored
    word = gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    tile = group * WORD_TILES + word // WORDS
    inside = tile * (32 * C.dequantizer.bits) + word % WORDS + ptx(C.dequantizer.plane_start, plane)
    row = row_block.to(gl.int64) * source.tiles * (32 * C.dequantizer.bits)
    there = (row_block >= 0)[:, None] & (tile < source.tiles)[None, :]
    copy_ahead(shared.index(slot), source.w + row[:, None] + inside[None, :], there)


@gluon.jit
def copy_block(source, x_shared, w_shared, group, slot, C: gl.constexpr):
    """Starts the copies of a stage; columns beyond K become zeros."""
    PLANES: gl.constexpr = C.planes
    copy_rows(source.x, source.x_stride, x_shared.index(slot), group * BLOCK, source.tokens, source.ks, C.columns, C)
    if C.narrow == "":
        copy_rows(source.w, source.w_stride, w_shared[0].index(slot), group * BLOCK, source.channels, source.ks, C.rows, C)
    for plane in gl.static_range(PLANES):
        copy_words(source, w_shared[plane], slot, group, plane, C)
    commit_copies()


@gluon.jit
def read_plane(shared, slot, plane: gl.constexpr, C: gl.constexpr):
    """Reads a lane's words of a plane: the words of the first tile, then of the second."""
    LAYOUT: gl.constexpr = ptx(C.words_layout, plane)
    WORDS: gl.constexpr = ptx(C.dequantizer.plane_words, plane)
    read = gl.reshape(shared.index(slot).load(LAYOUT), [C.warps, WORD_TILES, 32, WORDS])
    return split_words(gl.reshape(gl.permute(read, [0, 2, 1, 3]), [C.threads, WORD_TILES * WORDS]), WORD_TILES * WORDS, C)


@gluon.jit
def read_words(shared, slot, C: gl.constexpr):
    """Reads a lane's words of a stage (128 columns of K)."""
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
    """Allocates shared memory for all stages of a plane of sub-byte codes."""
    COUNT: gl.constexpr = ptx(C.dequantizer.plane_words, plane) * (32 * WORD_TILES)
    return gl.allocate_shared_memory(gl.int32, [C.stages, C.warps, COUNT], C.words_shared_layout)


@gluon.jit(do_not_specialize=["M", "N", "K", "row_blocks", "tiles", "scale_stride"])
def plain_scaled_gemm(
    y, x, w, x_scale, x_zero, scale, channel_scale, sums, bias, y_scale, M, N, K, x_stride, w_stride, row_blocks, tiles,
    scale_stride, C: gl.constexpr,
):  # fmt: skip
    """One block: 64 rows of w, C.columns tokens, all of K. `tiles`: number of tiles (64 columns of K) of sub-byte w."""
    SUMS: gl.constexpr = C.accumulator
    COUNT: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    TYPE: gl.constexpr = C.sums
    first_channel = gl.program_id(0) * C.rows
    first_token = gl.program_id(1) * C.columns
    channels = first_channel + gl.arange(0, C.rows, gl.SliceLayout(1, SUMS))
    tokens = first_token + gl.arange(0, C.columns, gl.SliceLayout(0, SUMS))
    STAGES: gl.constexpr = C.stages
    PLANES: gl.constexpr = C.planes
    x_shared = gl.allocate_shared_memory(C.x, [STAGES, COLUMNS, BLOCK], C.shared_layout)
    w_shared = ()
    if C.narrow == "":
        w_shared = (gl.allocate_shared_memory(C.w, [STAGES, COUNT, BLOCK], C.shared_layout),)
        w += first_channel.to(gl.int64) * w_stride
    for plane in gl.static_range(PLANES):
        w_shared = w_shared + (words_memory(plane, C),)
    source = ScaledSource(
        x + first_token.to(gl.int64) * x_stride, x_stride, M - first_token, w, w_stride, N - first_channel,
        first_channel // 16, row_blocks, tiles, (K + 15) // 16 * 16,
    )  # fmt: skip
    groups = (K + BLOCK - 1) // BLOCK
    zeros = gl.zeros((COUNT, COLUMNS), TYPE, SUMS)
    acc = zeros
    if C.promote:
        acc = gl.zeros((COUNT, COLUMNS), gl.float32, SUMS)
    for ahead in gl.static_range(STAGES - 1):
        copy_block(source, x_shared, w_shared, ahead, ahead, C)
    slot = 0
    for group in range(0, groups):
        wait_copies(STAGES - 2)
        barrier()
        copy_block(source, x_shared, w_shared, group + (STAGES - 1), gl.where(slot == 0, STAGES, slot) - 1, C)
        if C.narrow == "":
            a = w_shared[0].index(slot).load(C.operand_layout)
        else:
            a = operand_a(dequantize(read_words(w_shared, slot, C), C), C)
        b = x_shared.index(slot).permute([1, 0]).load(C.x_layout)
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
        if C.promote:
            part_sum = mma_v2(a, b, zeros).to(gl.float32)
            acc += part_sum * block_scale_of(x_scale, scale, group, groups, scale_stride, tokens, channels, M, N, C)
        else:
            acc = mma_v2(a, b, acc)
    wait_copies(0)  # copies beyond K write zeros; they must not outlive the block
    result = finished(acc, ScaledEpilogueArgs(x_scale, x_zero, channel_scale, sums, bias, y_scale), tokens, channels, M, N, C)
    at = y + of_tokens(tokens.to(gl.int64) * N, C) + of_channels(channels, C)
    gl.store(at, result, mask=of_tokens(tokens < M, C) & of_channels(channels < N, C))


class PlainPlan:
    """The plan of an 8-bit GEMM by this kernel, for one shape: created once, called many times."""

    workspace = (0, 0)

    def __init__(
        self, shape: ScaledShape, scheme: Scheme, dtype: torch.dtype, x_scale: XScale, x_zero: bool, bias: bool,
        function: str = "none",
    ) -> None:  # fmt: skip
        assert scheme.activation is not None
        self.shape = shape
        columns, stages = FEW if shape.m <= 16 else MANY
        narrow = scheme.weight.name if shape.bits < 8 else ""
        x_type = CODE_TYPES[scheme.activation.name]
        self.config = PlainGemm(
            narrow, CODE_TYPES.get(scheme.weight.name, x_type), x_type, dtype, columns, stages, shape.grouped, shape.blocks,
            x_scale, x_zero, bias, function,
        )  # fmt: skip
        grid = (-(-shape.n // ROWS), -(-shape.m // columns), 1)
        self.launch = Launcher(plain_scaled_gemm, grid, self.config.warps)

    def __call__(
        self, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, codes: Tensor, scale: Tensor | None,
        channel_scale: Tensor | None, sums: Tensor, bias: Tensor | None, partial: Tensor, arrived: Tensor,
        y_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns y [M, N] of x [M, K], whose rows start at multiples of 16 bytes; all tensors on the current device."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        if k % 16:  # the kernel reads whole vectors of 16 bytes
            filled = x.new_zeros((m, -(-k // 16) * 16), dtype=torch.uint8)
            filled[:, :k] = x.view(torch.uint8)
            x = filled.view(x.dtype)
        y = torch.empty((m, n), dtype=self.config.y_type, device=x.device)
        self.launch(
            y, x, codes, x_scale, x_zero, sums if scale is None else scale, channel_scale, sums, bias, y_scale, m, n, k,
            x.stride(0), codes.stride(0), codes.shape[0], codes.shape[1], 0 if scale is None else scale.stride(0), self.config,
        )  # fmt: skip
        return y
