"""Pairs of packed codes in element-wise kernels, channels 2 i and 2 i + 1, which are one byte of 4-bit codes or two bytes of
8-bit codes. Plain Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pairs(x, i, total, FOUR: tl.constexpr):
    """Loads the pairs of codes with indices i as float32."""
    if FOUR:
        codes = tl.load(x + i, mask=i < total, other=0)
        return (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
    else:
        both = tl.load(x.to(tl.pointer_type(tl.int16)) + i, mask=i < total, other=0)
        return ((both << 8) >> 8).to(tl.float32), (both >> 8).to(tl.float32)


@triton.jit
def stored(t, FOUR: tl.constexpr, LOW: tl.constexpr):
    """Rounds t to int32 codes."""
    HIGH: tl.constexpr = 255.0 if FOUR else 127.0
    steps = tl.minimum(tl.maximum(t, LOW), HIGH) + 12582912.0
    code = steps.to(tl.int32, bitcast=True) - 0x4B400000
    return code >> 4 if FOUR else code
