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
from lowbit.kernels.parts.gluon import barrier, commit_copies, gl, gluon, mma_v2, source_digest, wait_copies
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.operand import operand_a
from lowbit.kernels.parts.scaled_epilogue import CODE_TYPES, ScaledEpilogueArgs, XScale, finished, of_channels, of_tokens

FEW, MANY = (16, 4), (64, 3)
"""(tokens of a block, stages) for few and for many tokens. They take at most 48 KiB of shared memory, so that two blocks share
an SM on every GPU."""


@dataclass(frozen=True)
class PlainGemm(ByteBlock):
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
    wait_copies(0)  # the last prefetches lie beyond K and copy zeros; no copy may outlive the block
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
