"""Words of 4 neighbouring pixels of a channel, for depthwise convolutions in plain Triton: transposed bytes, windows, dp4a, and
sums that are float32 numbers.

Exact   all functions. A sum that starts at MAGIC has the bits of the float32 1.5 * 2^23 + sum while the sum is below 2^22.
        Tested: tests/kernels/parts/test_pixel_words.py
"""

from __future__ import annotations

import triton
import triton.language as tl

THREADS = tl.constexpr(128)
"""Threads of a block, each with one vector of channels of one group of pixels."""
WARPS = 4

MAGIC = tl.constexpr(0x4B400000)
"""The bits of the float32 1.5 * 2^23. Numbers of this size have an integer, the difference to it, in their last bits."""


@triton.jit
def dp4a(a, b, c):
    """Returns c + the dot product of the 4 signed bytes of a and b."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def prmt(a, b, SELECTOR: tl.constexpr):
    """Returns the word whose byte i is byte (SELECTOR >> 4 i) & 15 of the 8 bytes of a and b."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, tl.full(a.shape, SELECTOR, tl.int32)], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def funnel(low, high, BYTES: tl.constexpr):
    """Returns bytes BYTES to BYTES + 3 of the 8 bytes of low and high."""
    return prmt(low, high, 0x3210 + 0x1111 * BYTES)


@triton.jit
def transposed(a, b, c, d):
    """Returns 4 words, word i from the bytes i of a, b, c and d."""
    low = prmt(a, b, 0x5140)
    high = prmt(a, b, 0x7362)
    low2 = prmt(c, d, 0x5140)
    high2 = prmt(c, d, 0x7362)
    return prmt(low, low2, 0x5410), prmt(low, low2, 0x7632), prmt(high, high2, 0x5410), prmt(high, high2, 0x7632)


@triton.jit
def rounded(t, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Returns a word whose low byte is t rounded to LOW..HIGH."""
    return (tl.minimum(tl.maximum(t, LOW), HIGH) + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def bytes_of(a, b, c, d):
    """Returns the word of the low bytes of a, b, c and d."""
    return prmt(prmt(a, b, 0x0040), prmt(c, d, 0x0040), 0x5410)


@triton.jit
def window_of(words, AT: tl.constexpr, NEXT: tl.constexpr, BYTES: tl.constexpr):
    """Returns the 4 pixels from byte BYTES of words[AT] on; words[NEXT] has the following 4."""
    if BYTES == 0:
        return words[AT]
    else:
        return funnel(words[AT], words[NEXT], BYTES)
