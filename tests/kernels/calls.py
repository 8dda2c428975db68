"""Arguments for the plans of the GEMM kernels, as meta tensors with the shapes and dtypes that lowbit/pack makes."""

from __future__ import annotations

import torch

from lowbit.formats import PerBlock, PerGroup, parse_scheme
from lowbit.kernels.reference.activations import CODE_DTYPES


def meta(shape, dtype):
    """A tensor on the meta device, without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def mixed_call(shape, dtype, group, scale_dtype):
    """x has 16 bits. The weight has codes of `shape.bits` bits in fragment order, group scales and channel scales. Then bias
    and two workspaces."""
    codes = meta((shape.row_blocks, shape.steps(64) * 32 * shape.bits), torch.int32)
    scale = meta((shape.row_blocks, shape.k), scale_dtype) if group else None
    channels = meta((shape.n,), torch.float32), meta((shape.n,), dtype)
    return meta((shape.m, shape.k), dtype), codes, scale, *channels, meta((1,), torch.float32), meta((1,), torch.int32)


def scaled_call(scheme, m, n, k, *, x_scale="token", x_zero=False, bias=torch.bfloat16, codes_of_y=False):
    """x has 8 bits, a scale and a zero. The weight has the scheme's codes, scales and sums of its rows. Then bias, workspaces
    and the scale of y."""
    parsed = parse_scheme(scheme)
    float32, groups = torch.float32, -(-k // 128)
    narrow, blocks = parsed.weight.bits < 8, isinstance(parsed.granularity, PerBlock)
    grouped = isinstance(parsed.granularity, PerGroup)
    x = meta((m, -(-k // 16) * 16), CODE_DTYPES[parsed.activation.name])[:, :k]
    of_x = {"token": (m, 1), "tensor": (1,), "block": (m, groups)}[x_scale]
    row_blocks, row = -(-n // 16), -(-k // 64) * 32 * parsed.weight.bits
    of_groups = meta((groups, 16 * row_blocks), torch.float16)
    of_w = of_groups if grouped else meta((-(-n // 128), groups), float32) if blocks else None
    channel = None if grouped or blocks else meta((n,), float32)
    codes = meta((row_blocks, row), torch.int32) if narrow else meta((n, x.stride(0)), CODE_DTYPES[parsed.weight.name])
    zero = meta((m, 1), torch.int32) if x_zero else None
    before = x, meta(of_x, float32), zero, codes, of_w, channel, meta((n,), float32), meta((n,), bias)
    return *before, meta((1,), float32), meta((1,), torch.int32), meta((1,), float32) if codes_of_y else None


def expert_call(shape, dtype, form):
    """x; codes, group scales, channel scales and biases of the experts; the tiles, and their number; the order of slots; router
    weights."""
    scale_dtype = torch.bfloat16 if form.scale_dtype == "bf16" else torch.float16
    scale, pair = None, 2 if form.zero == "none" else 4
    if form.group:
        groups = shape.steps(128) * (128 // form.group)
        scale = meta((shape.experts, shape.row_blocks, groups, 8, pair), scale_dtype)
    channels = meta((shape.experts, shape.n), torch.bfloat16 if form.subnormal else torch.float32)
    slots, int32 = shape.slots, torch.int32
    return (
        meta((slots if shape.per_slot else shape.tokens, shape.k), dtype),
        meta((shape.experts, shape.row_blocks, shape.steps(64), 32 * shape.bits), int32), scale, channels,
        meta((shape.experts, shape.n), dtype), meta((shape.most_tiles, 3), int32), meta((1,), int32), meta((slots,), int32),
        meta((slots,), torch.float32),
    )  # fmt: skip
