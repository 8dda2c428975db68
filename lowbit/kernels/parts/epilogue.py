"""What is applied to the sums of 8-bit products before they are stored: zeros of x, scales, bias, in fp32."""

from __future__ import annotations

from typing import Literal

import torch

from lowbit.kernels.gluon import gl, gluon

XScale = Literal["tensor", "token", "block"]

TYPES = {
    torch.int8: (gl.int8, "i8"),
    torch.float8_e4m3fn: (gl.float8e4nv, "fp8e4nv"),
    torch.float8_e5m2: (gl.float8e5, "fp8e5"),
}
CODE_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
OUTPUTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@gluon.jit
def of_tokens(values, C: gl.constexpr):
    """Values of tokens spread over a tile."""
    return values[:, None] if C.tokens_are_rows else values[None, :]


@gluon.jit
def of_channels(values, C: gl.constexpr):
    """Values of channels spread over a tile."""
    return values[None, :] if C.tokens_are_rows else values[:, None]


@gluon.jit
def finished(acc, beside, tokens, channels, M, N, C: gl.constexpr):
    """Some sums with everything that is applied at the end, in fp32."""
    x_scale, x_zero, channel_scale, sums, bias = beside
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
    return y
