"""y = requantize(x * s + b + other * g) on packed NHWC codes of 4 or 8 bits: sums and ReLUs that no convolution includes.

Computes codes in pairs, channels 2 i and 2 i + 1, which are one byte of 4-bit codes or two bytes of 8-bit codes. Plain Triton
Exact   bit for bit as `SumSpec` of formats/conv.py: every fma rounds once, and rounding to integers is adding 1.5 * 2^23.
        Tested: tests/kernels/elementwise/test_add.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import CODES, SumSpec
from lowbit.kernels.parts.code_pairs import pairs, stored

BLOCK = 1024
"""Number of pairs of codes per block: with 8-bit codes 16 bytes per thread."""


@triton.jit(do_not_specialize=["s", "b", "g"])
def sum_kernel(
    y, x, other, s, b, g, total, X_FOUR: tl.constexpr, OTHER: tl.constexpr, Y_FOUR: tl.constexpr, LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds BLOCK of `total` pairs. OTHER: bits of the other input's codes, 0 if there is no other input."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    even, odd = pairs(x, i, total, X_FOUR)
    even = tl.fma(even, s, b)
    odd = tl.fma(odd, s, b)
    if OTHER > 0:
        other_even, other_odd = pairs(other, i, total, OTHER == 4)
        even = tl.fma(other_even, g, even)
        odd = tl.fma(other_odd, g, odd)
    low = stored(even, Y_FOUR, LOW)
    high = stored(odd, Y_FOUR, LOW)
    if Y_FOUR:
        tl.store(y + i, (low | (high << 4)).to(tl.uint8), mask=i < total)
    else:
        tl.store(y.to(tl.pointer_type(tl.int16)) + i, ((low & 255) | (high << 8)).to(tl.int16), mask=i < total)


def add_codes(x: Tensor, layer: SumSpec, other: Tensor | None, out: Tensor) -> Tensor:
    """Writes the sum of packed codes uint8 [N, H, W, bytes] to `out`, packed codes of the output's storage; all on the same
    device."""
    total = x.numel() * (8 // CODES[layer.x].bits) // 2
    low = 0.0 if layer.relu else -128.0
    bits = 0 if layer.other is None else CODES[layer.other].bits
    with torch.cuda.device_of(x):
        sum_kernel[(triton.cdiv(total, BLOCK),)](
            out, x, x if other is None else other, layer.s, layer.b, layer.g, total, layer.x == "u4", bits, layer.y == "u4",
            low, BLOCK,
        )  # fmt: skip
    return out
