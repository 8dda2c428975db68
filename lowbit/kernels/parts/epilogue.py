"""What is applied to the sums of 8-bit products before they are stored, in fp32: zeros of x, scales, bias, a function, and the
rounding of y to its type or, with a scale for all of y, to int8."""

from __future__ import annotations

from typing import Literal

import torch

from lowbit.kernels.parts.gluon import gl, gluon, run

XScale = Literal["tensor", "token", "block"]

TYPES = {
    torch.int8: (gl.int8, "i8"),
    torch.float8_e4m3fn: (gl.float8e4nv, "fp8e4nv"),
    torch.float8_e5m2: (gl.float8e5, "fp8e5"),
}
CODE_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
OUTPUTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32, torch.int8: gl.int8}


@gluon.jit
def of_tokens(values, C: gl.constexpr):
    """Values of tokens spread over a tile."""
    return values[:, None] if C.tokens_are_rows else values[None, :]


@gluon.jit
def of_channels(values, C: gl.constexpr):
    """Values of channels spread over a tile."""
    return values[None, :] if C.tokens_are_rows else values[:, None]


@gluon.jit
def bring(beside, first_channel, N, C: gl.constexpr):
    """Brings scales and biases of a tile's channels to the L2, while it multiplies: they would come from memory at its end."""
    _, _, channel_scale, _, bias, _ = beside
    thread = gl.arange(0, C.threads, C.threads_layout)
    channel = gl.minimum(first_channel + thread * 8 % C.tile_channels, N - 1)  # memory comes in 32 bytes and more
    if C.channel_scale:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [channel_scale + channel])
    if C.bias:
        run("prefetch.global.L2 [$1];\n mov.b32 $0, 0;", "=r,l", [bias + channel])


@gluon.jit
def finished(acc, beside, tokens, channels, M, N, C: gl.constexpr):
    """Some sums with everything that is applied at the end, of y's type."""
    x_scale, x_zero, channel_scale, sums, bias, y_scale = beside
    y = acc.to(gl.float32)
    if C.factor != 1.0:
        y = y * C.factor
    is_token, is_channel = tokens < M, channels < N
    if C.x_zero:
        zero = gl.load(x_zero + tokens, mask=is_token, other=0).to(gl.float32)
        of_w = gl.load(sums + channels, mask=is_channel, other=0.0)
        y = y - of_tokens(zero, C) * of_channels(of_w, C)
    if C.x_scale == "token":
        y = y * of_tokens(gl.load(x_scale + tokens, mask=is_token, other=0.0), C)
    if C.x_scale == "tensor":
        y = y * gl.load(x_scale)
    if C.channel_scale:
        y = y * of_channels(gl.load(channel_scale + channels, mask=is_channel, other=0.0), C)
    if C.bias:
        y = y + of_channels(gl.load(bias + channels, mask=is_channel, other=0.0).to(gl.float32), C)
    y = function_of(y, C)
    if C.y == gl.int8:
        return nearest_code(y * gl.div_rn(1.0, gl.load(y_scale)))
    return y.to(C.y)


@gluon.jit
def function_of(y, C: gl.constexpr):
    """C.function, as kernels/reference/gemm.py has them."""
    if C.function == "relu":
        y = gl.where(y < 0.0, 0.0, y)  # NaN stays
    if C.function == "silu":
        y = y / (1.0 + gl.exp(-y))
    if C.function == "gelu":  # 1 + tanh(u) = 2 / (1 + exp(-2 u)), u = sqrt(2 / pi) (y + 0.044715 y^3)
        y = y / (1.0 + gl.exp(-1.5957691216057308 * y * (1.0 + 0.044715 * y * y)))
    return y


@gluon.jit
def nearest_code(y):
    """int8 of fp32: nearest, ties to even, clamped. 1.5 * 2^23 + y has y, rounded, in its low bits."""
    y = gl.minimum(gl.maximum(y, -128.0), 127.0) + 12582912.0
    return y.to(gl.int32, bitcast=True).to(gl.int8)
