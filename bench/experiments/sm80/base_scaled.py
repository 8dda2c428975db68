"""y[M, N] = (x[M, K] . dequant(w)[N, K]^T) scaled, x of 8 bits, w of 8 or fewer, mma.sync: sm_80 and newer, fp8 from sm_89 on.

Computes y^T = w x^T. The plain kernel: right on every machine that has the instructions, tuned for none.
Reads   x row-major, by way of shared memory; w of 8 bits likewise; codes of fewer bits in FragmentOrder, straight to registers
Grid    blocks of 64 rows of w x blocks of tokens; 4 warps of 16 rows each
Sum     int8 in s32, exact; fp8 in fp32. Where scales change along K, every 128 k go, scaled, to a sum in fp32
Exact   every weight is decoded exactly (hardware/byte_conversions.py) and never rounded; one rounding at the store
Source  mma.m16n8k32 and its fragments: PTX ISA
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.kernels.choose.scaled_gemm import ScaledShape
from lowbit.kernels.parts.byte_decode import TILES, ByteDecode, decode
from lowbit.kernels.parts.epilogue import CODE_TYPES, OUTPUTS, TYPES, Applied, XScale, finished, of_channels, of_tokens
from lowbit.kernels.parts.gluon import barrier, gl, gluon, mma_v2, source_digest
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.operand import operand_a, registers_layout
from lowbit.pack.fragment import word_places

ROWS = 64
STEP_K = 128
STEP = gl.constexpr(STEP_K)
WORD_TILES = gl.constexpr(TILES)


@dataclass(frozen=True)
class PlainGemm:
    """All that is fixed when the kernel is compiled. `narrow` is the format of codes of fewer than 8 bits, "" for 8 bits."""

    narrow: str
    w_type: torch.dtype
    x_type: torch.dtype
    y_type: torch.dtype
    columns: int
    grouped: bool
    block_scale: bool
    x_scale: XScale
    x_zero: bool
    bias: bool
    function: str = "none"
    digest: str = source_digest()

    rows = ROWS
    warps = ROWS // 16
    threads = 2 * ROWS
    tokens_are_rows = False

    @property
    def decode(self) -> ByteDecode:
        return ByteDecode(self.narrow, "s8" if self.x_type == torch.int8 else "e4m3")

    @property
    def word_places(self) -> tuple[tuple[int, ...], ...]:
        """Where in a tile's words those of lane 0 lie, and by how much they move from lane to lane."""
        places = word_places(self.decode.bits)
        return tuple(places[0].tolist()), tuple((places[1] - places[0]).tolist())

    @property
    def factor(self) -> float:
        return self.decode.conversion.scale_factor if self.narrow else 1.0

    @property
    def channel_scale(self) -> bool:
        return not (self.grouped or self.block_scale)

    @property
    def promote(self) -> bool:
        """Whether 128 k are summed on their own first."""
        return self.grouped or self.block_scale or self.x_scale == "block"

    @property
    def w(self) -> gl.dtype:
        return TYPES[self.w_type][0]

    @property
    def x(self) -> gl.dtype:
        return TYPES[self.x_type][0]

    @property
    def y(self) -> gl.dtype:
        return OUTPUTS[self.y_type]

    @property
    def sums(self) -> gl.dtype:
        return gl.int32 if self.x_type == torch.int8 else gl.float32

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
        """[rows, 128]: 16 bytes a thread."""
        return gl.BlockedLayout([1, 16], [4, 8], [self.warps, 1], [1, 0])

    @property
    def shared_layout(self) -> gl.SwizzledSharedLayout:
        return gl.SwizzledSharedLayout(16, 1, 8, [1, 0])

    @property
    def threads_layout(self) -> gl.BlockedLayout:
        """One element per thread."""
        return gl.BlockedLayout([1], [32], [self.warps], [0])

    @property
    def registers_layout(self) -> gl.BlockedLayout:
        return registers_layout(self.warps, 4)


@gluon.jit
def copy_rows(source, stride, shared, first, k, rows_exist, k_exist, COUNT: gl.constexpr, C: gl.constexpr):
    """128 k of some rows to shared memory, zeros where there are none; `k_exist` is a multiple of 16."""
    rows = first + gl.arange(0, COUNT, gl.SliceLayout(1, C.copy_layout))
    columns = k + gl.arange(0, STEP, gl.SliceLayout(0, C.copy_layout))
    at = source + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    bytes_of = gl.load(at, mask=(rows < rows_exist)[:, None] & (columns < k_exist)[None, :], other=0.0)
    shared.store(bytes_of)


@gluon.jit
def read_words(w, strip, tile, tiles, C: gl.constexpr):
    """A lane's words of 128 k, zeros beyond the last tile."""
    PLACES: gl.constexpr = C.word_places
    WORDS: gl.constexpr = C.decode.bits
    lane = gl.arange(0, C.threads, C.threads_layout) & 31
    words = ()
    for t in gl.static_range(WORD_TILES):
        for i in gl.static_range(WORDS):
            at = w + (strip.to(gl.int64) * tiles + tile + t) * (32 * WORDS) + PLACES[0][i] + lane * PLACES[1][i]
            words = words + (gl.load(at, mask=(lane >= 0) & (tile + t < tiles), other=0),)
    return words


@gluon.jit
def step_scale(x_scale, scale, group, groups, stride, tokens, channels, M, N, C: gl.constexpr):
    """What the sums of 128 k are multiplied by."""
    factor = gl.full([C.rows, C.columns], 1.0, gl.float32, C.accumulator)
    if C.x_scale == "block":
        factor = factor * gl.load(x_scale + tokens.to(gl.int64) * groups + group, mask=tokens < M, other=0.0)[None, :]
    if C.grouped:
        factor = factor * gl.load(scale + group * stride + channels, mask=channels < N, other=0.0).to(gl.float32)[:, None]
    if C.block_scale:
        factor = factor * gl.load(scale + channels // 128 * groups + group, mask=channels < N, other=0.0)[:, None]
    return factor


@gluon.jit(do_not_specialize=["M", "N", "K", "strips", "tiles", "scale_stride"])
def plain_scaled_gemm(
    y, x, w, x_scale, x_zero, scale, channel_scale, sums, bias, y_scale, M, N, K, x_stride, w_stride, strips, tiles,
    scale_stride, C: gl.constexpr,
):  # fmt: skip
    """One block: 64 rows of w, C.columns tokens, all of K. `tiles` counts tiles of 64 k of narrow w."""
    SUMS: gl.constexpr = C.accumulator
    COUNT: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    TYPE: gl.constexpr = C.sums
    first_channel = gl.program_id(0) * C.rows
    first_token = gl.program_id(1) * C.columns
    channels = first_channel + gl.arange(0, C.rows, gl.SliceLayout(1, SUMS))
    tokens = first_token + gl.arange(0, C.columns, gl.SliceLayout(0, SUMS))
    x_shared = gl.allocate_shared_memory(C.x, [C.columns, STEP], C.shared_layout)
    if C.narrow == "":
        w_shared = gl.allocate_shared_memory(C.w, [C.rows, STEP], C.shared_layout)
    warp = gl.arange(0, C.threads, C.threads_layout) // 32
    strip = gl.minimum(first_channel // 16 + warp, strips - 1)  # strips beyond the last are computed, not stored
    k_exist = (K + 15) // 16 * 16
    groups = (K + STEP - 1) // STEP
    zeros = gl.zeros((COUNT, COLUMNS), TYPE, SUMS)
    acc = zeros
    if C.promote:
        acc = gl.zeros((COUNT, COLUMNS), gl.float32, SUMS)
    for group in range(0, groups):
        k = group * STEP
        barrier()
        copy_rows(x, x_stride, x_shared, first_token, k, M, k_exist, C.columns, C)
        if C.narrow == "":
            copy_rows(w, w_stride, w_shared, first_channel, k, N, k_exist, C.rows, C)
            barrier()
            a = w_shared.load(C.operand_layout)
        else:
            a = operand_a(decode(read_words(w, strip, group * WORD_TILES, tiles, C), C), C)
            barrier()
        b = x_shared.permute([1, 0]).load(C.x_layout)
        if C.promote:
            part_sum = mma_v2(a, b, zeros).to(gl.float32)
            acc += part_sum * step_scale(x_scale, scale, group, groups, scale_stride, tokens, channels, M, N, C)
        else:
            acc = mma_v2(a, b, acc)
    result = finished(acc, Applied(x_scale, x_zero, channel_scale, sums, bias, y_scale), tokens, channels, M, N, C)
    at = y + of_tokens(tokens.to(gl.int64) * N, C) + of_channels(channels, C)
    gl.store(at, result, mask=of_tokens(tokens < M, C) & of_channels(channels < N, C))


class PlainPlan:
    """All of a product that does not depend on the tensors' contents: made once for a shape, called many times."""

    workspace = (0, 0)

    def __init__(
        self, shape: ScaledShape, scheme: Scheme, dtype: torch.dtype, x_scale: XScale, x_zero: bool, bias: bool,
        function: str = "none",
    ) -> None:  # fmt: skip
        assert scheme.activation is not None
        self.shape = shape
        columns = 16 if shape.m <= 16 else 64
        narrow = scheme.weight.name if shape.bits < 8 else ""
        x_type = CODE_TYPES[scheme.activation.name]
        self.config = PlainGemm(
            narrow, CODE_TYPES.get(scheme.weight.name, x_type), x_type, dtype, columns, shape.grouped, shape.blocks, x_scale,
            x_zero, bias, function,
        )  # fmt: skip
        grid = (-(-shape.n // ROWS), -(-shape.m // columns), 1)
        self.launch = Launcher(plain_scaled_gemm, grid, self.config.warps)

    def __call__(
        self, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, codes: Tensor, scale: Tensor | None,
        channel_scale: Tensor | None, sums: Tensor, bias: Tensor | None, partial: Tensor, arrived: Tensor,
        y_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """y [M, N] of x [M, K], whose rows start at multiples of 16 bytes; all tensors on the current device."""
        m, n, k = self.shape.m, self.shape.n, self.shape.k
        if k % 16:  # the kernel reads whole pieces of 16 bytes
            filled = x.new_zeros((m, -(-k // 16) * 16), dtype=torch.uint8)
            filled[:, :k] = x.view(torch.uint8)
            x = filled.view(x.dtype)
        y = torch.empty((m, n), dtype=self.config.y_type, device=x.device)
        self.launch(
            y, x, codes, x_scale, x_zero, sums if scale is None else scale, channel_scale, sums, bias, y_scale, m, n, k,
            x.stride(0), codes.stride(0), codes.shape[0], codes.shape[1], 0 if scale is None else scale.stride(0), self.config,
        )  # fmt: skip
        return y
