"""Quantization of activations by the rules of other tools (formats.ActivationRule), and what it shares with the own rule.

A row's scale from its largest magnitude or its range, and codes from values and scale, bit-equal to reference/: true
divisions, each result rounded to x's type under compressed-tensors' rule, and NaN kept. Values come and go as float32.
Tested: tests/kernels/parts/test_rules.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowbit.formats import ActivationRule
from lowbit.kernels.reference.activations import FBGEMM_CEILING, FLOORS

RULES = {
    ActivationRule.OWN: 0,
    ActivationRule.COMPRESSED_TENSORS: 1,
    ActivationRule.FINEGRAINED_FP8: 2,
    ActivationRule.FBGEMM: 3,
}
_FINEGRAINED_FLOOR = tl.constexpr(FLOORS[ActivationRule.FINEGRAINED_FP8])
_FBGEMM_FLOOR = tl.constexpr(FLOORS[ActivationRule.FBGEMM])
_FBGEMM_CEILING = tl.constexpr(FBGEMM_CEILING)


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if there is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ordered(value):
    """An integer that orders like the float32 `value`, and back: the function is its own inverse on integers."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(bits):
    """The float32 whose `ordered` is `bits`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def nearest(value):
    """Nearest integer, ties to even, of |value| < 2^22. The product before it is made by `fma`, so that the sum here is no part
    of it: one rounding each."""
    shifted = value + 12582912.0
    return shifted.to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def rounded(value, TYPE: tl.constexpr):
    """float32 values as they are after rounding to TYPE."""
    return value.to(TYPE).to(tl.float32)


@triton.jit
def given_scale(scale, TYPE: tl.constexpr, RULE: tl.constexpr):
    """A scale that is one for all, as it is divided by."""
    if RULE == 1:
        scale = rounded(scale, TYPE)
    return scale


@triton.jit
def not_zero(scale, TYPE: tl.constexpr):
    """compressed-tensors' scale of zeros, and of what is so small that its scale is 0 in TYPE: that type's epsilon."""
    return tl.where(scale == 0.0, 0.0009765625 if tl.float16 == TYPE else 0.0078125, scale)


@triton.jit
def scale_by_rule(largest, LARGEST: tl.constexpr, TYPE: tl.constexpr, RULE: tl.constexpr):
    """The scale of values up to `largest` as another tool has it."""
    if RULE == 3:
        largest = tl.where(largest > _FBGEMM_CEILING, _FBGEMM_CEILING, largest)
    scale = tl.div_rn(largest, LARGEST)
    if RULE == 1:
        scale = not_zero(rounded(scale, TYPE), TYPE)
    else:
        FLOOR: tl.constexpr = _FINEGRAINED_FLOOR if RULE == 2 else _FBGEMM_FLOOR
        scale = tl.where(scale < FLOOR, FLOOR, scale)
    return scale


@triton.jit
def range_by_rule(values, TYPE: tl.constexpr, CHUNKS: tl.constexpr):
    """`range_of` as compressed-tensors has it; the zero is 0 where a scale is 0 or no number."""
    lowest = tl.zeros_like(values[0]).to(tl.int32)
    highest = lowest
    for c in tl.static_range(CHUNKS):
        bits = ordered(values[c])
        lowest = tl.minimum(lowest, bits)
        highest = tl.maximum(highest, bits)
    low = from_ordered(tl.min(tl.min(lowest, axis=1), axis=0))
    high = from_ordered(tl.max(tl.max(highest, axis=1), axis=0))
    scale = rounded(tl.div_rn(rounded(high - low, TYPE), 255.0), TYPE)
    zero = rounded(-128.0 - rounded(tl.div_rn(low, scale), TYPE), TYPE)
    zero = tl.where(zero == zero, tl.minimum(tl.maximum(zero, -128.0), 127.0), 0.0)
    return not_zero(scale, TYPE), nearest(zero)


@triton.jit
def codes_by_rule(
    value, scale, zero, GIVEN: tl.constexpr, FORMAT: tl.constexpr, TYPE: tl.constexpr, RULE: tl.constexpr
):  # fmt: skip
    """Codes of values / scale; `zero` None where there is none. GIVEN: the scale is one for all."""
    steps = tl.div_rn(value, scale)
    if RULE == 1:
        steps = rounded(steps, TYPE)
        if zero is not None:
            steps = rounded(steps + zero.to(tl.float32), TYPE)
        elif not GIVEN and FORMAT != 0:
            steps = steps + 0.0  # compressed-tensors adds zero points that are 0: negative zeros become positive
    if FORMAT == 0:
        return nearest(tl.minimum(tl.maximum(steps, -128.0), 127.0)).to(tl.int8)
    else:
        return steps.to(tl.float8e4nv)  # saturates
