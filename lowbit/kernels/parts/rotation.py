"""x H for each BLOCK elements of a row in the registers of a thread block (parts/rows.py): log2(BLOCK) butterfly steps.

Exact   x is first divided by sqrt(BLOCK), a power of 2. Then each step replaces pairs of elements a, b by a + b and a - b, in
        float32. The elements of a pair are 1, 2, 4, .. apart, in this order of steps. So results have the same bits for every
        block shape and number of rows
Moves   steps within the VECTOR elements of a thread move no data; the other steps take one shuffle per element
Tested  tests/kernels/elementwise/test_rotate.py
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def within(value, APART: tl.constexpr):
    """Returns a + b and a - b for elements at distance APART within a thread; value [THREADS, VECTOR]."""
    THREADS: tl.constexpr = value.shape[0]
    VECTOR: tl.constexpr = value.shape[1]
    pairs = tl.reshape(value, (THREADS, VECTOR // (2 * APART), 2, APART))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (THREADS, VECTOR))


@triton.jit
def across(value, APART: tl.constexpr):
    """Returns a + b and a - b for elements of threads at distance APART."""
    THREADS: tl.constexpr = value.shape[0]
    VECTOR: tl.constexpr = value.shape[1]
    pairs = tl.reshape(value, (THREADS // (2 * APART), 2, APART * VECTOR))
    bits = pairs.to(tl.int32, bitcast=True)
    both = tl.xor_sum(bits, axis=1, keep_dims=True)
    other = (both ^ bits).to(tl.float32, bitcast=True)
    sign = 1.0 - 2.0 * tl.arange(0, 2).to(tl.float32)
    return tl.reshape(tl.fma(pairs, sign[None, :, None], other), (THREADS, VECTOR))


@triton.jit
def rotated(values, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Multiplies chunks [THREADS, VECTOR] of float32 by H, BLOCK elements at a time."""
    VECTOR: tl.constexpr = values[0].shape[1]
    STEPS: tl.constexpr = 4 if BLOCK == 16 else 6 if BLOCK == 64 else 8
    made = ()
    for c in tl.static_range(CHUNKS):
        value = values[c] * (0.25 if BLOCK == 16 else 0.125 if BLOCK == 64 else 0.0625)
        for step in tl.static_range(STEPS):
            if 1 << step < VECTOR:
                value = within(value, 1 << step)
            else:
                value = across(value, (1 << step) // VECTOR)
        made += (value,)
    return made
