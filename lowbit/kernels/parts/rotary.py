"""Heads of q and k before attention: RMS norm of a head, RoPE in the rotate-half convention. Plain Triton.

Lanes are the places of a head's elements in a tensor, not threads. Their number is a power of two, and those beyond `head_dim`
are zero. RoPE rotates element i of the first `rotary_dim / 2` with element i + rotary_dim / 2; elements from `rotary_dim` on
are unchanged. `C` is the kernel's configuration, with the attention shape as `C.shape`. All values are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def angles(cos_sin, position, d, C: tl.constexpr):
    """Returns cos and signed sin (negative in the first half of the rotated lanes) for lanes d of a head at a position; 1 and 0
    for lanes that are not rotated."""
    HALF: tl.constexpr = C.shape.rotary_dim // 2
    row = cos_sin + position.to(tl.int64) * C.shape.rotary_dim + tl.where(d < HALF, d, d - HALF)
    cos = tl.load(row, mask=d < 2 * HALF, other=1.0)
    sin = tl.load(row + HALF, mask=d < 2 * HALF, other=0.0)
    return cos, tl.where(d < HALF, -sin, sin)


@triton.jit
def partner(d, C: tl.constexpr):
    """Returns the lane that lane d is rotated with; d itself for lanes that are not rotated."""
    HALF: tl.constexpr = C.shape.rotary_dim // 2
    other = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    if HALF % 8 == 0:  # promises contiguous vectors, which the compiler cannot prove
        other = tl.multiple_of(tl.max_contiguous(other, 8), 8)
    return other


@triton.jit
def pairs(rows, exist, d, C: tl.constexpr, TWICE: tl.constexpr):
    """Loads heads [n, lanes] at pointers `rows` [n, 1] in float32, and each element's partner. Rows whose `exist` [n, 1] is
    False are zeros. With TWICE partners are loaded from memory; with several warps this is faster than an exchange between
    threads, which takes barriers."""
    exist = exist & (d < C.shape.head_dim)[None, :]
    heads = tl.load(rows + d[None, :], mask=exist, other=0.0).to(tl.float32)
    if C.shape.rotary_dim == 0:
        return heads, heads
    elif TWICE:
        return heads, tl.load(rows + partner(d, C)[None, :], mask=exist, other=0.0).to(tl.float32)
    else:
        return heads, tl.gather(heads, tl.broadcast_to(partner(d, C)[None, :], heads.shape), 1)


@triton.jit
def factors(gamma, d, C: tl.constexpr):
    """Returns the factors of a norm: gamma plus the norm's offset."""
    return tl.load(gamma + d, mask=d < C.shape.head_dim, other=0.0).to(tl.float32) + C.shape.norm_offset


@triton.jit
def gammas(gamma, d, C: tl.constexpr):
    """Returns the factors [lanes] of the norm of a head, and those of the partners of its elements."""
    return factors(gamma, d, C), factors(gamma, partner(d, C), C)


@triton.jit
def normed(heads, others, gammas, C: tl.constexpr):
    """Divides heads [n, lanes] and the partners of their elements by the heads' root mean square, and multiplies them by
    gammas."""
    root = tl.rsqrt(tl.sum(heads * heads, 1) / C.shape.head_dim + C.shape.norm_eps)[:, None]
    return heads * root * gammas[0][None, :], others * root * gammas[1][None, :]


@triton.jit
def turned(heads, others, cos, sin, C: tl.constexpr):
    """Rotates heads [n, lanes] with their partners by the angles [1 or n, lanes]."""
    if C.shape.rotary_dim == 0:
        return heads
    else:
        return heads * cos + others * sin
