"""The end of a product of the wgmma kernel: scales and bias, then what parts/epilogue.py says, on the sums of a whole tile.

Squares that a norm needs are added up in two turns: by all threads before the main loop, 16 sums for each token, which meet in
shared memory at the end. h comes by TMA while the product is made and leaves the same way, as x of the next norm does.

The functions take the configuration C of a kernel, which has `end` (parts/epilogue.py), `rows`, `tokens`, `warps`, `threads`,
`threads_layout`, `accumulator`, `store_by_tma` and the layouts of `SquaresLayouts`. A block has one tile of tokens, and where h is
added, one tile.
"""

from __future__ import annotations

from lowbit.kernels.parts.epilogue import activated
from lowbit.kernels.parts.gluon import (
    Descriptor,
    Scalar,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    run,
    tma_load,
    tma_store,
)
from lowbit.kernels.parts.prologue import wait_for_previous_kernel
from lowbit.kernels.parts.scaled_epilogue import put
from lowbit.kernels.parts.tile import Warpgroups

SUMS = 16
"""Sums of squares of a token that meet in shared memory."""

SQUARES = gl.constexpr(SUMS)


class SquaresLayouts(Warpgroups):
    """Who adds up squares: layouts of a configuration's tile."""

    tokens: int

    @property
    def of_parts(self) -> gl.BlockedLayout:
        """[SUMS, tokens]: as they are read, neighbouring lanes neighbouring tokens."""
        lanes = min(32, self.tokens)
        warps = min(self.warps, self.tokens // lanes)
        return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [self.warps // warps, warps], [1, 0])

    @property
    def of_columns(self) -> gl.DistributedLinearLayout:
        """[SUMS, tokens]: columns where `accumulator` has them, the same in every warp; a token's sums are 8 lanes' pairs."""
        register = [[0, 1], [8, 0], *([0, 1 << i] for i in range(3, self.tokens.bit_length() - 1))]
        lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
        return gl.DistributedLinearLayout(register, lane, [[0, 0]] * (self.warps.bit_length() - 1), [], [SUMS, self.tokens])

    @property
    def of_tokens(self) -> gl.BlockedLayout:
        """[strips, tokens]: all of a token in one thread."""
        return gl.BlockedLayout([self.warps, 1], [1, 32], [1, self.warps], [1, 0])


@aggregate
class LargeMEpilogueArgs:
    """What is applied to sums: scales float32 and biases of channels, or None, and what all sums are multiplied by."""

    channel_scale: Scalar
    bias: Scalar
    factor: Scalar


@aggregate
class ResidualStream:
    """What the residual stream has for an end: `squares` [parts, M] float32, of which the norm makes 1 / rms or which are left
    for the next one; h with its tile in shared memory and the barrier of its copy, the next norm's gamma. `sums` is where
    squares meet, [SUMS, tokens]."""

    squares: Scalar
    inverse_width: Scalar
    eps: Scalar
    x_factor: Scalar
    gamma: Scalar
    h: Descriptor | gl.constexpr
    h_tile: gl.shared_memory_descriptor
    h_there: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor


@gluon.jit
def prefetch_rows(epilogue_args, stream, first_row, N, C: gl.constexpr):
    """What belongs to the rows of a tile to the L2, while it multiplies: it would come from memory at its end."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    row = gl.minimum(first_row + thread * 8 % C.rows, N - 1)  # memory comes in 32 bytes and more
    if C.epilogue.channel_scale:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [epilogue_args.channel_scale + row])
    if C.epilogue.bias:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [epilogue_args.bias + row])
    if C.epilogue.residual:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [stream.gamma + row])


@gluon.jit
def load_epilogue_inputs(stream, first_row, first_token, M, C: gl.constexpr):
    """What the end needs of kernels before this one, asked for before the main loop."""
    if C.epilogue.norm_parts > 0:
        wait_for_previous_kernel()
        load_squares(stream, first_token, M, C)
    if C.epilogue.residual:
        wait_for_previous_kernel()
        mbarrier.expect(stream.h_there, 2 * C.rows * C.tokens)
        tma_load(stream.h, [first_token, first_row], stream.h_there, stream.h_tile)


@gluon.jit
def wait_for_h(stream, C: gl.constexpr):
    """Until h is there. Every block waits, also one whose split another one finishes: a copy must not outlive its block."""
    if C.epilogue.residual:
        mbarrier.wait(stream.h_there, 0)


@gluon.jit
def load_squares(stream, first_token, M, C: gl.constexpr):
    """Part i of a token goes to sum i % SUMS. They are read behind a barrier, of which the main loop has some."""
    TOKENS: gl.constexpr = C.tokens
    LAYOUT: gl.constexpr = C.of_parts
    CHUNKS: gl.constexpr = (C.epilogue.norm_parts + SQUARES - 1) // SQUARES
    part = gl.arange(0, SQUARES, gl.SliceLayout(1, LAYOUT))[:, None]
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))[None, :]
    total = gl.zeros((SQUARES, TOKENS), gl.float32, LAYOUT)
    for chunk in gl.static_range(CHUNKS):
        exists = (part + chunk * SQUARES < C.epilogue.norm_parts) & (token < M)
        total += gl.load(stream.squares + (part + chunk * SQUARES) * M + token, mask=exists, other=0.0)
    stream.sums.store(total)


@gluon.jit
def rms_factors(stream, C: gl.constexpr):
    """1 / (rms * x_factor) of the tokens of a tile."""
    total = gl.sum(stream.sums.load(C.of_columns), axis=0)
    factors = gl.rsqrt(total * stream.inverse_width + stream.eps) * (1.0 / stream.x_factor)
    return gl.convert_layout(factors, gl.SliceLayout(0, C.accumulator), assert_trivial=True)


@gluon.jit
def gated(sums, C: gl.constexpr):
    """act(gate) * up [rows / 2, tokens]; rows g and g + 8 of a strip are in one lane."""
    pairs = gl.reshape(sums, [C.rows // 16, 2, 8, C.tokens])
    gate, up = gl.split(gl.permute(pairs, [0, 2, 3, 1]))
    return gl.reshape(activated(gate, C) * up, [C.rows // 2, C.tokens])


@gluon.jit
def store_squares(stream, values, row_tile, first_token, M, C: gl.constexpr):
    """Sums of squares of a tile's rows: those of a strip meet in its warp, those of strips in shared memory."""
    ROW_BLOCKS: gl.constexpr = C.rows // 16
    LAYOUT: gl.constexpr = C.of_tokens
    row_block_sums = gl.sum(gl.reshape(values * values, [ROW_BLOCKS, 16, C.tokens]), axis=1)
    stream.sums.slice(0, ROW_BLOCKS).store(row_block_sums)
    barrier()
    total = gl.sum(stream.sums.slice(0, ROW_BLOCKS).load(LAYOUT), axis=0)
    token = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, LAYOUT))
    gl.store(stream.squares + row_tile * M + token, total, mask=token < M)


@gluon.jit
def add_to_residual(out, sums, stream, row_tile, first_row, first_token, C: gl.constexpr):
    """h += y, x = h * gamma * x_factor, and the tile's sums of squares of h. Rows that do not exist are not stored."""
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    exists = rows < out.N
    gamma = gl.load(stream.gamma + rows, mask=exists, other=0.0).to(gl.float32) * stream.x_factor
    h = stream.h_tile.permute([1, 0])
    kept = (sums + h.load(C.accumulator).to(gl.float32)).to(stream.h_tile.dtype)
    h.store(kept)
    values = gl.where(exists[:, None], kept.to(gl.float32), 0.0)
    out.tile.permute([1, 0]).store((values * gamma[:, None]).to(C.y))
    fence_async_shared()
    store_squares(stream, values, row_tile, first_token, out.M, C)  # has a barrier, behind which both tiles are there
    tma_store(stream.h, [first_token, first_row], stream.h_tile)
    tma_store(out.descriptor, [first_token, first_row], out.tile)


@gluon.jit
def apply_epilogue(out, sums, epilogue_args, stream, row_tile, first_row, first_token, C: gl.constexpr):
    """Applies C.epilogue to a tile of sums, rounds once and stores y: through shared memory by TMA, or element by element."""
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    if C.epilogue.channel_scale:
        scale = gl.load(epilogue_args.channel_scale + rows, mask=rows < out.N, other=0.0).to(gl.float32)
        sums = sums * (scale * epilogue_args.factor)[:, None]  # the factor is a power of two
    else:
        sums = sums * epilogue_args.factor
    if C.epilogue.norm_parts > 0:
        sums = sums * rms_factors(stream, C)[None, :]
    if C.epilogue.bias:
        sums = sums + gl.load(epilogue_args.bias + rows, mask=rows < out.N, other=0.0).to(gl.float32)[:, None]
    if C.epilogue.residual:
        add_to_residual(out, sums, stream, row_tile, first_row, first_token, C)
    elif C.epilogue.gate != "none":
        put(out, gated(sums, C).to(C.y), first_token, first_row // 2, False)
    elif C.store_by_tma:
        put(out, sums.to(C.y), first_token, first_row, False)
    else:
        tokens = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, C.accumulator))
        at = out.pointer + tokens.to(gl.int64)[None, :] * out.N + rows[:, None]
        gl.store(at, sums.to(C.y), mask=(rows < out.N)[:, None] & (tokens < out.M)[None, :])
