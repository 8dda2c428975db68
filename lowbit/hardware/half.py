"""Converts pairs of fp16 or bf16 in 32-bit registers to float64 and back, with a single rounding.

A register holds two halves; the low one is element 0. float64 holds every fp16 and bf16 value exactly.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

HalfType = Literal["fp16", "bf16"]
Words = npt.NDArray[np.uint32]
Float64 = npt.NDArray[np.float64]

MANTISSA_BITS: dict[HalfType, int] = {"fp16": 10, "bf16": 7}
"""Number of explicit mantissa bits."""

BIAS: dict[HalfType, int] = {"fp16": 15, "bf16": 127}
"""Exponent bias; the smallest normal exponent is 1 - bias."""

_CANONICAL_NAN = 0x7FFF


def widen_half(words: Words, dtype: HalfType) -> Float64:
    """Returns the two halves of every register: float64 [..., 2] for uint32 [...]."""
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)
    with np.errstate(invalid="ignore"):  # a signalling NaN raises the flag on conversion
        if dtype == "fp16":
            return halves.astype(np.uint16).view(np.float16).astype(np.float64)
        return (halves << np.uint32(16)).view(np.float32).astype(np.float64)


def round_half(value: Float64, error: Float64, dtype: HalfType) -> Words:
    """Returns registers uint32 [...] of the sum value + error, float64 [..., 2], rounded once to nearest even. `error` is exact
    and smaller than the last bit of `value`.

    The sum is first rounded to odd in float64, then to the half. float64 has 53 bits and a half at most 11, so the result is
    the same as with one correct rounding (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008). NaN
    becomes the canonical 0x7fff.
    """
    bits = np.ascontiguousarray(value).view(np.int64)
    # If the sum is inexact and its last bit is 0, it moves one step towards the error. Its bits are changed as an integer.
    toward_zero = (error < 0) != (value < 0)
    odd = bits + np.where((error != 0) & (bits & 1 == 0), np.where(toward_zero, -1, 1), 0)
    exact = odd.view(np.float64)

    precision = MANTISSA_BITS[dtype] + 1
    finite = np.isfinite(exact)
    _, exponent = np.frexp(np.where(finite, exact, 0.0))
    quantum = np.maximum(exponent, 2 - BIAS[dtype]) - precision  # subnormals have the spacing of the smallest normal number
    rounded = np.ldexp(np.rint(np.ldexp(np.where(finite, exact, 0.0), -quantum)), quantum)
    rounded = np.where(np.abs(rounded) >= 2.0 ** (BIAS[dtype] + 1), np.copysign(np.inf, rounded), rounded)
    return _pack(np.where(finite, rounded, exact), dtype)


def _pack(value: Float64, dtype: HalfType) -> Words:
    """Returns registers of values, which the half type must represent exactly."""
    if dtype == "fp16":
        halves = value.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        halves = value.astype(np.float32).view(np.uint32) >> np.uint32(16)
    halves = np.where(np.isnan(value), np.uint32(_CANONICAL_NAN), halves)
    return halves[..., 0] | halves[..., 1] << np.uint32(16)


def half_bits(value: float, dtype: HalfType) -> int:
    """Returns the 16 bits of a number; raises ValueError if the half type does not represent it exactly."""
    word = round_half(np.array([value, 0.0]), np.zeros(2), dtype)
    if widen_half(word, dtype)[0] != value:
        raise ValueError(f"{value} is not a {dtype} number")
    return int(word) & 0xFFFF


def both_halves(bits: int) -> int:
    """Returns a register with a 16-bit pattern in both halves."""
    return bits | bits << 16


def half_pair(value: float, dtype: HalfType) -> int:
    """Returns a register with a number in both halves; raises ValueError if the half type does not represent it exactly."""
    return both_halves(half_bits(value, dtype))
