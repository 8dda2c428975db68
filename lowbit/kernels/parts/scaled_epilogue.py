"""The epilogue of 8-bit GEMMs: from the sums of a tile to y in memory.

Corrects for zeros of x and applies scales, bias and a function in fp32. Then it rounds to y's type or, if y has a scale, to
int8. A tile is stored through shared memory by TMA, or element by element. The functions take the configuration C of a kernel,
a ByteTile of parts/tile.py.
"""

from __future__ import annotations

from typing import Literal

import torch

from lowbit.kernels.parts.cluster_split_k import exchange_halves
from lowbit.kernels.parts.gluon import (
    Descriptor,
    Scalar,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    run,
    tma_store,
    tma_store_wait,
)
from lowbit.kernels.parts.schedule import reduce_splits

XScale = Literal["tensor", "token", "block"]

TYPES = {
    torch.int8: (gl.int8, "i8"),
    torch.float8_e4m3fn: (gl.float8e4nv, "fp8e4nv"),
    torch.float8_e5m2: (gl.float8e5, "fp8e5"),
}
CODE_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
OUTPUTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.int8: gl.int8}


@aggregate
class ScaledEpilogueArgs:
    """Pointers to the values that are applied to sums, or None. They are float32, except `x_zero` (int32) and `bias` (any
    type)."""

    x_scale: Scalar
    x_zero: Scalar
    channel_scale: Scalar
    sums: Scalar
    bias: Scalar
    y_scale: Scalar


@aggregate
class OutputTile:
    """The output y [M, N]. Without a descriptor y is stored element by element, and the shared memory `tile` is unused."""

    descriptor: Descriptor | gl.constexpr
    pointer: Scalar
    tile: gl.shared_memory_descriptor
    M: Scalar
    N: Scalar


@gluon.jit
def of_tokens(values, C: gl.constexpr):
    """Broadcasts one value per token to the shape of a tile."""
    return values[:, None] if C.tokens_are_rows else values[None, :]


@gluon.jit
def of_channels(values, C: gl.constexpr):
    """Broadcasts one value per channel to the shape of a tile."""
    return values[None, :] if C.tokens_are_rows else values[:, None]


@gluon.jit
def prefetch(epilogue_args, first_channel, N, C: gl.constexpr):
    """Prefetches scales and biases of a tile's channels into L2 during the main loop; else the epilogue would load from
    memory."""
    thread = gl.arange(0, C.threads, C.threads_layout)
    channel = gl.minimum(first_channel + thread * 8 % C.tile_channels, N - 1)  # one channel per 32-byte sector
    if C.channel_scale:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [epilogue_args.channel_scale + channel])
    if C.bias:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [epilogue_args.bias + channel])


@gluon.jit
def finished(acc, epilogue_args, tokens, channels, M, N, C: gl.constexpr):
    """Applies the epilogue to sums and rounds to y's type."""
    y = acc.to(gl.float32)
    if C.factor != 1.0:
        y = y * C.factor
    is_token, is_channel = tokens < M, channels < N
    if C.x_zero:
        zero = gl.load(epilogue_args.x_zero + tokens, mask=is_token, other=0).to(gl.float32)
        of_w = gl.load(epilogue_args.sums + channels, mask=is_channel, other=0.0)
        y = y - of_tokens(zero, C) * of_channels(of_w, C)
    if C.x_scale == "token":
        y = y * of_tokens(gl.load(epilogue_args.x_scale + tokens, mask=is_token, other=0.0), C)
    if C.x_scale == "tensor":
        y = y * gl.load(epilogue_args.x_scale)
    if C.channel_scale:
        y = y * of_channels(gl.load(epilogue_args.channel_scale + channels, mask=is_channel, other=0.0), C)
    if C.bias:
        y = y + of_channels(gl.load(epilogue_args.bias + channels, mask=is_channel, other=0.0).to(gl.float32), C)
    y = function_of(y, C)
    if C.y == gl.int8:
        return nearest_code(y * gl.div_rn(1.0, gl.load(epilogue_args.y_scale)))
    return y.to(C.y)


@gluon.jit
def function_of(y, C: gl.constexpr):
    """Applies C.function, as defined in kernels/reference/gemm.py."""
    if C.function == "relu":
        y = gl.where(y < 0.0, 0.0, y)  # keeps NaN
    if C.function == "silu":
        y = y / (1.0 + gl.exp(-y))
    if C.function == "gelu":  # 1 + tanh(u) = 2 / (1 + exp(-2 u)), u = sqrt(2 / pi) (y + 0.044715 y^3)
        y = y / (1.0 + gl.exp(-1.5957691216057308 * y * (1.0 + 0.044715 * y * y)))
    return y


@gluon.jit
def nearest_code(y):
    """Rounds fp32 to int8: nearest, ties to even, clamped. The low bits of 1.5 * 2^23 + y are the rounded y."""
    y = gl.minimum(gl.maximum(y, -128.0), 127.0) + 12582912.0
    return y.to(gl.int32, bitcast=True).to(gl.int8)


@gluon.jit
def put(out, result, first_token, first_channel, tokens_are_rows: gl.constexpr):
    """Stores a tile of y through shared memory by TMA. First waits until the previous tile's store has read that shared
    memory."""
    tma_store_wait(0)
    barrier()
    if tokens_are_rows:
        out.tile.store(result)
    else:
        out.tile.permute([1, 0]).store(result)
    fence_async_shared()
    barrier()
    tma_store(out.descriptor, [first_token, first_channel], out.tile)


@gluon.jit
def store_part(out, acc, epilogue_args, first_token, first_channel, C: gl.constexpr):
    """Applies the epilogue to C.store_columns columns of a tile and stores them."""
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.store_layout))
    columns = gl.arange(0, C.store_columns, gl.SliceLayout(0, C.store_layout))
    if C.tokens_are_rows:
        tokens, channels = first_token + rows, first_channel + columns
    else:
        tokens, channels = first_token + columns, first_channel + rows
    result = finished(acc, epilogue_args, tokens, channels, out.M, out.N, C)
    if C.store_by_tma:
        put(out, result, first_token, first_channel, C.tokens_are_rows)
    else:
        at = out.pointer + of_tokens(tokens.to(gl.int64) * out.N, C) + of_channels(channels, C)
        gl.store(at, result, mask=of_tokens(tokens < out.M, C) & of_channels(channels < out.N, C))


@gluon.jit
def store_half(out, acc, epilogue_args, first_token, first_channel, half, C: gl.constexpr):
    """Applies the epilogue to one half of the columns of a tile and stores it."""
    if C.tokens_are_rows:
        store_part(out, acc, epilogue_args, first_token, first_channel + half * C.store_columns, C)
    else:
        store_part(out, acc, epilogue_args, first_token + half * C.store_columns, first_channel, C)


@gluon.jit
def store_halves(out, halves, epilogue_args, first_token, first_channel, C: gl.constexpr):
    """Applies the epilogue to a tile given as two halves of its columns and stores it."""
    low, high = halves
    store_half(out, low, epilogue_args, first_token, first_channel, 0, C)
    store_half(out, high, epilogue_args, first_token, first_channel, 1, C)


@gluon.jit
def store(out, acc, epilogue_args, first_token, first_channel, C: gl.constexpr):
    """Applies the epilogue to a tile and stores it, at most 128 columns at a time."""
    if C.stores == 1:
        store_part(out, acc, epilogue_args, first_token, first_channel, C)
    else:
        store_halves(out, halves(acc, C), epilogue_args, first_token, first_channel, C)


@gluon.jit
def halves(acc, C: gl.constexpr):
    """Splits a tile into both halves of its columns; this takes no instruction."""
    low, high = gl.split(gl.permute(gl.reshape(acc, [C.rows, 2, C.store_columns]), [0, 2, 1]))
    low = gl.convert_layout(low, C.store_layout, assert_trivial=True)
    return low, gl.convert_layout(high, C.store_layout, assert_trivial=True)


@gluon.jit
def complete(out, acc, epilogue_args, splits, tile, split, first_token, first_channel, C: gl.constexpr):
    """Reduces the splits of a tile, if any, applies the epilogue and stores y; with C.by_halves, `acc` is two halves."""
    if C.paired:
        low, high = acc if C.by_halves else halves(acc, C)
        store_half(out, exchange_halves(low, high, split, C), epilogue_args, first_token, first_channel, split, C)
    elif C.by_halves:
        store_halves(out, acc, epilogue_args, first_token, first_channel, C)
    elif C.splits == 1:
        store(out, acc, epilogue_args, first_token, first_channel, C)
    else:
        last, total = reduce_splits(splits, acc, tile, split, C)
        if last:
            store(out, total, epilogue_args, first_token, first_channel, C)
