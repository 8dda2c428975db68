"""A row in the registers of a thread block: THREADS * VECTOR * CHUNKS elements, in 16-byte vectors where rows are 16-byte
aligned.

Values are tuples of CHUNKS tensors [THREADS, VECTOR]; `i` are the element indices of the first tensor. Used by kernels of
elementwise/ that hold a whole row in registers, such as quantize_rows.py and norm.py. Tested: tests/kernels/parts/test_rows.py
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(base, row, stride, VECTORS: tl.constexpr):
    """Returns the address of a row. With VECTORS the stride counts units of 8 elements, so that the compiler can prove that
    vectors are aligned; else it counts elements."""
    start = row.to(tl.int64) * stride
    if VECTORS:
        start = start * 8
    return base + start


@triton.jit
def loaded(base, i, K: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Loads a row of K elements in chunks of STEP, zeros beyond K."""
    chunks = ()
    for c in tl.static_range(CHUNKS):
        if K == STEP * CHUNKS:
            chunks += (tl.load(base + c * STEP + i),)
        else:
            chunks += (tl.load(base + c * STEP + i, mask=c * STEP + i < K, other=0.0),)
    return chunks


@triton.jit
def floats(chunks, CHUNKS: tl.constexpr):
    """Converts chunks to float32."""
    values = ()
    for c in tl.static_range(CHUNKS):
        values += (chunks[c].to(tl.float32),)
    return values


@triton.jit
def rounded_to(values, TYPE: tl.constexpr, CHUNKS: tl.constexpr):
    """Rounds chunks of float32 to another type."""
    made = ()
    for c in tl.static_range(CHUNKS):
        made += (values[c].to(TYPE),)
    return made


@triton.jit
def squares_of(values, CHUNKS: tl.constexpr):
    """Returns each thread's sum of squares."""
    made = values[0] * values[0]
    for c in tl.static_range(1, CHUNKS):
        made = tl.fma(values[c], values[c], made)
    return tl.sum(made, axis=1)


@triton.jit
def sum_of(values, CHUNKS: tl.constexpr):
    """Returns each thread's sum."""
    made = values[0]
    for c in tl.static_range(1, CHUNKS):
        made += values[c]
    return tl.sum(made, axis=1)


@triton.jit
def merged(total, squares, count, other_total, other_squares, other_count):
    """Merges the sums, sums of squared differences from the mean, and counts of two sets (Chan, Golub, LeVeque 1979). Unlike a
    variance from sums of x^2, this subtracts no large numbers from each other."""
    both = count + other_count
    weight = tl.maximum(count * other_count * both, 1.0)  # avoids rsqrt(0) where a set is empty
    apart = (total * other_count - other_total * count) * tl.rsqrt(weight)
    return total + other_total, tl.fma(apart, apart, squares + other_squares), both


@triton.jit
def moments(values, i, K: tl.constexpr, THREADS: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns mean and variance of a row with one reduction across warps, which merges the statistics that each warp computed
    around its own mean."""
    WARPS: tl.constexpr = THREADS // 32
    total = tl.sum(tl.reshape(sum_of(values, CHUNKS), (WARPS, 32)), axis=1)
    if K == STEP * CHUNKS:
        count = tl.full((WARPS,), K // WARPS, tl.float32)
    else:
        exist = ()
        for c in tl.static_range(CHUNKS):
            exist += (tl.where(c * STEP + i < K, 1.0, 0.0),)
        count = tl.sum(tl.reshape(sum_of(exist, CHUNKS), (WARPS, 32)), axis=1)
    near = tl.broadcast_to((total / tl.maximum(count, 1.0))[:, None], (WARPS, 32))
    apart = ()
    for c in tl.static_range(CHUNKS):
        difference = values[c] - tl.reshape(near, (THREADS,))[:, None]
        if K != STEP * CHUNKS:
            difference = tl.where(c * STEP + i < K, difference, 0.0)
        apart += (difference,)
    squares = tl.sum(tl.reshape(squares_of(apart, CHUNKS), (WARPS, 32)), axis=1)
    total, squares, _ = tl.reduce((total, squares, count), 0, merged)
    return tl.div_rn(total, K * 1.0), squares / K  # the mean of equal elements is exact, so their variance is 0


@triton.jit
def add_and_store(sums, row, halves, others, i, K: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns x + residual in x's type and stores it."""
    made = ()
    for c in tl.static_range(CHUNKS):
        total = (halves[c].to(tl.float32) + others[c].to(tl.float32)).to(halves[c].dtype)
        if K == STEP * CHUNKS:
            tl.store(row_of(sums, row, K, False) + c * STEP + i, total)
        else:
            tl.store(row_of(sums, row, K, False) + c * STEP + i, total, mask=c * STEP + i < K)
        made += (total,)
    return made


@triton.jit
def sigmoid(value):
    """Returns 1 / (1 + exp(-value)) in float32, computed as the square of rsqrt(1 + exp(-value)), at a third of the cost of a
    division."""
    root = tl.rsqrt(1.0 + tl.exp2(value * -1.4426950408889634))
    return root * root
