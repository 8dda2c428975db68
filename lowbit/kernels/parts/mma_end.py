"""The end of a product of the mma.sync kernel for many tokens: scales and bias, then what parts/end.py says, on a whole tile.

What a tile stores is transposed through shared memory, so that a thread has pieces of 8 neighbouring channels of a token: y, or
h and x of the next norm. Tokens of a tile are those of no other, so that a product may have as many tiles of them as it wants.

The functions take the configuration C of a kernel, which has `end` (parts/end.py), `rows`, `channels` and `tokens` of a tile,
`accumulator`, `decode`, `store_layout` of what is stored and `parts_layout` of sums of squares.
Tested: tests/ops/test_wide_gemm.py, tests/ops/test_chained_gemm.py
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import Scalar, aggregate, gl, gluon
from lowbit.kernels.parts.tile_end import Applied, gated

__all__ = ["Applied", "Output", "Stream", "finish_tile"]


@aggregate
class Output:
    """y [M, columns], and how many rows of w there are."""

    y: Scalar
    M: Scalar
    N: Scalar
    columns: Scalar


@aggregate
class Stream:
    """What the residual stream has for an end: `squares` [parts, M] float32, of which the norm makes 1 / rms or which are left
    for the next one; h [M, N] and the next norm's gamma."""

    squares: Scalar
    inverse_width: Scalar
    eps: Scalar
    x_factor: Scalar
    gamma: Scalar
    h: Scalar


@gluon.jit
def rms_factors(stream, first_token, M, C: gl.constexpr):
    """1 / (rms * x_factor) of the tokens of a tile."""
    LAYOUT: gl.constexpr = C.parts_layout
    PARTS: gl.constexpr = C.parts_size
    TOKENS: gl.constexpr = C.tokens
    part = gl.arange(0, PARTS, gl.SliceLayout(1, LAYOUT))[:, None]
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))[None, :]
    squares = gl.load(stream.squares + part * M + token, mask=(part < C.end.parts) & (token < M), other=0.0)
    factors = gl.rsqrt(gl.sum(squares, axis=0) * stream.inverse_width + stream.eps) * (1.0 / stream.x_factor)
    return gl.convert_layout(factors, gl.SliceLayout(0, C.accumulator))


@gluon.jit
def applied_to(sums, applied, stream, first_row, first_token, M, N, C: gl.constexpr):
    """Scales, norm and bias."""
    rows = first_row + gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    if C.end.channel_scale:
        scale = gl.load(applied.channel_scale + rows, mask=rows < N, other=0.0).to(gl.float32)
        sums = sums * (scale * applied.factor)[:, None]  # the factor is a power of two
    else:
        sums = sums * applied.factor
    if C.end.parts > 0:
        sums = sums * rms_factors(stream, first_token, M, C)[None, :]
    if C.end.bias:
        sums = sums + gl.load(applied.bias + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
    return sums


@gluon.jit
def finish_tile(out, sums, applied, stream, row_tile, first_row, first_token, C: gl.constexpr):
    """What becomes of the sums of a tile, one rounding, and y to memory. The last tile of rows begins where it is full: it
    stores y of some rows a second time, with the same bits, but adds to h only rows from its own first on."""
    STORED: gl.constexpr = C.store_layout
    sums = applied_to(sums, applied, stream, first_row, first_token, out.M, out.N, C)
    if C.end.gate != "none":
        sums = gated(sums, C)
        first_row = first_row // 2
    channels = first_row + gl.arange(0, C.channels, gl.SliceLayout(1, STORED))
    tokens = first_token + gl.arange(0, C.tokens, gl.SliceLayout(0, STORED))
    at = tokens.to(gl.int64)[None, :] * out.columns + channels[:, None]
    exists = (channels < out.columns)[:, None] & (tokens < out.M)[None, :]
    if C.end.residual:
        exists = exists & (channels >= row_tile * C.rows)[:, None]
        gamma = gl.load(stream.gamma + channels, mask=channels < out.columns, other=0.0).to(gl.float32) * stream.x_factor
        h = gl.load(stream.h + at, mask=exists, other=0.0)
        kept = (gl.convert_layout(sums, STORED) + h.to(gl.float32)).to(h.dtype)
        gl.store(stream.h + at, kept, mask=exists)
        values = gl.where(exists, kept.to(gl.float32), 0.0)
        gl.store(stream.squares + row_tile * out.M + tokens, gl.sum(values * values, axis=0), mask=tokens < out.M)
        gl.store(out.y + at, (values * gamma[:, None]).to(C.decode.operand_type), mask=exists)
    else:
        gl.store(out.y + at, gl.convert_layout(sums.to(C.decode.operand_type), STORED), mask=exists)
