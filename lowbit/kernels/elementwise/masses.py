"""Probability masses of tokens in device code: integer masses, their sums, and searches for a threshold or a token in a list of
keys.

reference/sampling.py defines keys and masses and explains why they are integers. This file computes the same bits. Tested:
tests/kernels/elementwise/test_sample.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.kernels.reference import sampling

_KEYS = tl.constexpr(sampling.KEYS)
_C0, _C1, _C2, _C3, _C4 = (tl.constexpr(c) for c in sampling.COEFFICIENTS)


@triton.jit
def masses(key):
    """Returns int64 masses 2^(40 - key / 2^15) of keys, as `masses` of the reference."""
    f = ((key & 0x7FFF) << 17).to(tl.uint32, bitcast=True)
    power = tl.full(f.shape, _C4, tl.uint32)
    power = tl.full(f.shape, _C3, tl.uint32) - tl.umulhi(power, f)
    power = tl.full(f.shape, _C2, tl.uint32) - tl.umulhi(power, f)
    power = tl.full(f.shape, _C1, tl.uint32) - tl.umulhi(power, f)
    power = tl.full(f.shape, _C0, tl.uint32) - tl.umulhi(power, f)
    power = tl.full(f.shape, 1 << 31, tl.uint32) - tl.umulhi(power, f)
    return tl.where(key < _KEYS, (power.to(tl.int64) << 9) >> (key >> 15).to(tl.int64), 0)


@triton.jit
def fraction(p):
    """Returns p in units of 2^-24."""
    return (p * 16777216.0).to(tl.int64)


@triton.jit
def share(total, p):
    """Returns the smallest integer mass that is at least the fraction p of the total."""
    parts = fraction(p)
    return (total >> 24) * parts + (((total & 0xFFFFFF) * parts + 0xFFFFFF) >> 24)


@triton.jit
def target_of(seed, counter, total):
    """Returns the cumulative mass that the random number of a seed and a counter selects, for a total of masses."""
    low, high, _, _ = tl.philox(seed, counter, 0, 0, 0)
    random = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return tl.umulhi(random, total.to(tl.uint64)).to(tl.int64)


@triton.jit
def added(a, b, c, d, e, f):
    """Adds three values elementwise: the combine function of a reduction of three sums at once."""
    return a + d, b + e, c + f


@triton.jit
def threshold(keys, n, needed, first, BITS: tl.constexpr, MASS: tl.constexpr, TILE: tl.constexpr):
    """Returns the smallest key t in `first` + [0, 2^BITS) for which the keys up to t, among the n keys, have a total mass of at
    least `needed`. Without MASS, keys are counted instead. Each iteration narrows the range to a quarter."""
    i = tl.arange(0, TILE)
    for turn in range(BITS // 2):
        step = 1 << (BITS - 2 - 2 * turn)
        low = tl.zeros([TILE], tl.int64)
        mid = tl.zeros([TILE], tl.int64)
        high = tl.zeros([TILE], tl.int64)
        for start in range(0, n, TILE):
            key = tl.load(keys + start + i, mask=start + i < n, other=_KEYS)
            amount = masses(key) if MASS else tl.full([TILE], 1, tl.int64)
            low += tl.where(key < first + step, amount, 0)
            mid += tl.where(key < first + 2 * step, amount, 0)
            high += tl.where(key < first + 3 * step, amount, 0)
        a, b, c = tl.reduce((low, mid, high), 0, added)
        first += step * ((a < needed).to(tl.int32) + (b < needed).to(tl.int32) + (c < needed).to(tl.int32))
    return first


@triton.jit
def kept(keys, start, n, last, least, TILE: tl.constexpr):
    """Returns the masses of a tile of keys from index `start` on; 0 for keys greater than `last` and for masses below
    `least`."""
    i = start + tl.arange(0, TILE)
    key = tl.load(keys + i, mask=i < n, other=_KEYS)
    mass = masses(key)
    return tl.where((key <= last) & (mass >= least), mass, 0)


@triton.jit
def mass_up_to(keys, n, last, least, TILE: tl.constexpr):
    """Returns the total of the masses that `kept` returns for the n keys."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, n, TILE):
        total += kept(keys, start, n, last, least, TILE)
    return tl.sum(total, 0)


@triton.jit
def drawn(keys, n, last, least, seed, counter, TILE: tl.constexpr):
    """Returns the index of the key that the random number selects, by the masses of `kept`."""
    left = target_of(seed, counter, mass_up_to(keys, n, last, least, TILE))
    found = tl.full((), 0, tl.int32)
    for start in range(0, n, TILE):
        mass = kept(keys, start, n, last, least, TILE)
        found += tl.sum(((tl.cumsum(mass, 0) <= left) & (left >= 0)).to(tl.int32), 0)
        total = tl.sum(mass, 0)
        left = tl.where(left < total, -1, left - total)
    return found
