"""codes, scale = quantize(f(x)): quantizes activations to int8 or 8-bit floats in one pass, alone or fused with a preceding
norm or gate f.

Reads   x fp16 or bf16 [M, K], any row stride; depending on `before` also residual [M, K], weight and bias [K] (norms), up [M,
        K] (silu)
f       "": x; "rms_norm", "layer_norm": the norm of x, or of x + residual, which is rounded to x's type and written; "silu":
        silu(x) * up. Its result is then rotated in blocks of `hadamard` channels, in registers (parts/rotation.py)
Writes  codes int8 or float8 in rows that start at multiples of 16 bytes, with zeros from K up to the next multiple; scale fp32
        [M, 1], or [M, ceil(K / group)] for groups; zero int32 [M, 1] if asymmetric. With a given scale (and zero) only codes
        are written
Blocks  one token each, in chunks of 8 elements per thread, up to 64 in all. One reduction across warps gives the scale and
        RMSNorm's sum of squares; LayerNorm needs one before it, for mean and variance. With many rows a row is read again from
        cache once its scale is known: this takes fewer registers, so more rows are in flight. Rotated values stay in registers,
        since computing them again costs more than a read
Overlap lets the next kernel start at once, and reads RMSNorm's weights before the previous kernel has finished (programmatic
        dependent launch, sm_90)
Exact   without f, codes and scales are bit-equal to reference/. A NaN counts as the largest magnitude; where codes have zero
        points, it is ordered by its bits. Divisions are true divisions, values are rounded to integers by adding 1.5 * 2^23,
        and the hardware converts floats to 8 bits (sm_90). f is computed in float32 and not rounded before quantization; its
        divisions and roots may be off in the last bit. A rotated x, without a norm or gate, is first rounded to x's type, which
        gives the same bits as quantizing elementwise/rotate.py's result. RULE 0 is this library's rule; the other rules are
        those of other tools, and also bit-equal. They do not support f. Tested: tests/kernels/elementwise/
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.formats import ActivationRule, FloatFormat, NumberFormat
from lowbit.hardware.machine import Machine
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rotation import rotated
from lowbit.kernels.parts.rows import add_and_store, floats, loaded, moments, rounded_to, row_of, sigmoid, squares_of
from lowbit.kernels.reference.activations import CODE_DTYPES, FBGEMM_CEILING, FLOORS, SMALLEST_SCALE

# Quantization of activations by the rules of other tools (formats.ActivationRule), and helpers that this library's rule shares.
#
# The functions compute a row's scale from its largest magnitude or its range, and codes from values and scale. Results are
# bit-equal to reference/: divisions are true divisions, each result is rounded to x's dtype under compressed-tensors' rule, and
# NaN is kept. Inputs and outputs are float32. Tested: tests/kernels/elementwise/test_rules.py

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
    """Returns the larger of two numbers; NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ordered(value):
    """Maps float32 to an integer of the same order; on integers the function is its own inverse."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(bits):
    """Returns the float32 for which `ordered` returns `bits`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def nearest(value):
    """Rounds values, |value| < 2^22, to the nearest integer, ties to even. Callers compute a preceding product with `fma`, so
    that it is not fused with this addition and each rounds once."""
    shifted = value + 12582912.0
    return shifted.to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def rounded(value, TYPE: tl.constexpr):
    """Rounds float32 values to TYPE and back."""
    return value.to(TYPE).to(tl.float32)


@triton.jit
def given_scale(scale, TYPE: tl.constexpr, RULE: tl.constexpr):
    """Returns a per-tensor scale in the form by which the rule divides."""
    if RULE == 1:
        scale = rounded(scale, TYPE)
    return scale


@triton.jit
def not_zero(scale, TYPE: tl.constexpr):
    """Replaces a scale of 0 by the epsilon of TYPE, as compressed-tensors does for zeros and for values whose scale underflows
    in TYPE."""
    return tl.where(scale == 0.0, 0.0009765625 if tl.float16 == TYPE else 0.0078125, scale)


@triton.jit
def scale_by_rule(largest, LARGEST: tl.constexpr, TYPE: tl.constexpr, RULE: tl.constexpr):
    """Returns the scale for values up to `largest` by another tool's rule."""
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
def low_and_high(values, CHUNKS: tl.constexpr):
    """Returns the smallest and the largest of 0 and all values of a row."""
    lowest = tl.zeros_like(values[0]).to(tl.int32)
    highest = lowest
    for c in tl.static_range(CHUNKS):
        bits = ordered(values[c])
        lowest = tl.minimum(lowest, bits)
        highest = tl.maximum(highest, bits)
    return from_ordered(tl.min(tl.min(lowest, axis=1), axis=0)), from_ordered(tl.max(tl.max(highest, axis=1), axis=0))


@triton.jit
def range_by_rule(values, TYPE: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns scale and zero point by compressed-tensors' rule (`range_of` is this library's); the zero is 0 if the scale is 0
    or NaN."""
    low, high = low_and_high(values, CHUNKS)
    scale = rounded(tl.div_rn(rounded(high - low, TYPE), 255.0), TYPE)
    zero = rounded(-128.0 - rounded(tl.div_rn(low, scale), TYPE), TYPE)
    zero = tl.where(zero == zero, tl.minimum(tl.maximum(zero, -128.0), 127.0), 0.0)
    return not_zero(scale, TYPE), nearest(zero)


@triton.jit
def codes_by_rule(
    value, scale, zero, GIVEN: tl.constexpr, FORMAT: tl.constexpr, TYPE: tl.constexpr, RULE: tl.constexpr
):  # fmt: skip
    """Returns the codes of values / scale. `zero` is None for symmetric codes. GIVEN: the scale is a given per-tensor scale."""
    steps = tl.div_rn(value, scale)
    if RULE == 1:
        steps = rounded(steps, TYPE)
        if zero is not None:
            steps = rounded(steps + zero.to(tl.float32), TYPE)
        elif not GIVEN and FORMAT != 0:
            steps = steps + 0.0  # compressed-tensors adds a zero point of 0, which turns -0 into 0
    if FORMAT == 0:
        return nearest(tl.minimum(tl.maximum(steps, -128.0), 127.0)).to(tl.int8)
    else:
        return steps.to(tl.float8e4nv)  # saturates


VECTOR = 8
"""Number of 16-bit elements in 16 bytes."""

CODE_VECTOR = 16
"""Number of codes in 16 bytes."""

MOST_EACH = 64
"""Largest number of elements of a row per thread."""

FEW_PER_SM = 4
"""Up to this number of rows per SM, blocks are shaped for low latency of a row; beyond it, for many rows in flight."""

FORMATS = {"int8": 0, "fp8_e4m3": 1, "fp8_e5m2": 2}
STEPS = {"": 0, "rms_norm": 1, "layer_norm": 2, "silu": 3}
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def at_least_smallest(scale):
    """Returns the scale, but at least the smallest scale whose reciprocal is finite."""
    return tl.where(scale < _SMALLEST, _SMALLEST, scale)


@triton.jit
def sum_and_largest(total, largest, other_total, other_largest):
    """Combine function of a reduction that computes a sum and a maximum at once."""
    return total + other_total, larger(largest, other_largest)


@triton.jit
def times(values, weights, CHUNKS: tl.constexpr):
    """Multiplies in float32, chunk by chunk."""
    products = ()
    for c in tl.static_range(CHUNKS):
        products += (values[c] * weights[c].to(tl.float32),)
    return products


@triton.jit
def largest_of(values, CHUNKS: tl.constexpr):
    """Returns each thread's largest magnitude."""
    made = tl.abs(values[0])
    for c in tl.static_range(1, CHUNKS):
        made = larger(made, tl.abs(values[c]))
    return tl.reduce(made, 1, larger)


@triton.jit
def layer_normalized(
    values, weight, bias, eps, i, K: tl.constexpr, THREADS: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Returns the LayerNorm of a row; `bias` may be None. Weights are loaded only when mean and variance are known, which takes
    fewer registers, so more rows are in flight."""
    mean, variance = moments(values, i, K, THREADS, STEP, CHUNKS)
    inverse = tl.rsqrt(variance + eps)
    shift = -mean * inverse
    weights = loaded(weight, i, K, STEP, CHUNKS)
    if bias is not None:
        biases = loaded(bias, i, K, STEP, CHUNKS)
    made = ()
    for c in tl.static_range(CHUNKS):
        value = tl.fma(values[c], inverse, shift)
        if bias is None:
            value = value * weights[c].to(tl.float32)
        else:
            value = tl.fma(value, weights[c].to(tl.float32), biases[c].to(tl.float32))
        made += (value,)
    return made


@triton.jit
def silu(values, CHUNKS: tl.constexpr):
    """values / (1 + exp(-values)), chunk by chunk."""
    made = ()
    for c in tl.static_range(CHUNKS):
        made += (values[c] * sigmoid(values[c]),)
    return made


@triton.jit
def rotated_before(values, BLOCK: tl.constexpr, BEFORE: tl.constexpr, TYPE: tl.constexpr, CHUNKS: tl.constexpr):
    """Rotates values in blocks of BLOCK channels (0: no rotation). If they are x, without a norm or gate, the result is rounded
    to x's dtype."""
    if BLOCK > 0:
        values = rotated(values, BLOCK, CHUNKS)
        if BEFORE == 0:
            values = floats(rounded_to(values, TYPE, CHUNKS), CHUNKS)
    return values


@triton.jit
def range_of(values, factor, CHUNKS: tl.constexpr):
    """Returns scale and zero point for the range of 0 and all values, each multiplied by `factor` > 0."""
    low, high = low_and_high(values, CHUNKS)
    low, high = low * factor, high * factor
    scale = at_least_smallest(tl.div_rn(high - low, 255.0))
    return scale, -128 - nearest(tl.fma(low, tl.div_rn(1.0, scale), 0.0))


@triton.jit
def codes_of(value, inverse, zero, FORMAT: tl.constexpr, SATURATE: tl.constexpr, ONCE: tl.constexpr):
    """Returns the codes of float32 values; `zero` is None for symmetric codes. Without SATURATE the caller guarantees that no
    |value * inverse| exceeds the range. With ONCE an int8 code that need not saturate is rounded once: its product is not
    rounded before."""
    if FORMAT == 0:
        if ONCE and not SATURATE:
            code = tl.fma(value, inverse, 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        else:
            steps = tl.fma(value, inverse, 0.0)
            if SATURATE:
                steps = tl.minimum(tl.maximum(steps, -1024.0), 1024.0)
            code = nearest(steps)
        if zero is not None:
            code = code + zero
        if SATURATE:
            code = tl.minimum(tl.maximum(code, -128), 127)
        code = code.to(tl.int8)
    elif FORMAT == 1:
        code = (value * inverse).to(tl.float8e4nv)
    else:
        code = (value * inverse).to(tl.float8e5)
    return code


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr, EXACT: tl.constexpr):
    """Returns the scale for values up to `largest`; EXACT: by a true division."""
    return at_least_smallest(tl.div_rn(largest, LARGEST) if EXACT else largest * (1.0 / LARGEST))


@triton.jit
def inverse_of(scale, factor, EXACT: tl.constexpr):
    """Returns the factor that turns values into codes. It is finite, so that zeros stay zeros. With EXACT it is 1 / scale by a
    true division."""
    return tl.div_rn(1.0, scale) if EXACT else tl.minimum(1.0 / scale * factor, 3.0e38)


@triton.jit
def scale_under(largest, factor, LARGEST: tl.constexpr, EXACT: tl.constexpr, TYPE: tl.constexpr, RULE: tl.constexpr):
    """Returns the scale by RULE for values up to `largest` * `factor`. `factor` > 0 is 1 except under this library's rule."""
    if RULE == 0:
        scale = scale_of(largest * factor, LARGEST, EXACT)
    else:
        scale = scale_by_rule(largest, LARGEST, TYPE, RULE)
    return scale


@triton.jit
def range_under(values, factor, TYPE: tl.constexpr, RULE: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns scale and zero point for values times `factor`, by RULE."""
    if RULE == 0:
        scale, zero = range_of(values, factor, CHUNKS)
    else:
        scale, zero = range_by_rule(values, TYPE, CHUNKS)
    return scale, zero


@triton.jit
def codes_under(
    value, scale, factor, zero, GIVEN: tl.constexpr, SATURATE: tl.constexpr, FORMAT: tl.constexpr, EXACT: tl.constexpr,
    TYPE: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Returns the codes of values times `factor`, by RULE. GIVEN: the scale is a given per-tensor scale."""
    if RULE == 0:
        code = codes_of(value, inverse_of(scale, factor, EXACT), zero, FORMAT, SATURATE, not EXACT)
    else:
        code = codes_by_rule(value, scale, zero, GIVEN, FORMAT, TYPE, RULE)
    return code


@triton.jit(do_not_specialize=["x_stride", "beside_stride", "code_vectors", "eps"])
def quantize_rows(
    codes, scales, zeros, sums, x, beside, weight, bias, static, static_zero, x_stride, beside_stride, code_vectors, eps,
    K: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    BEFORE: tl.constexpr, FORMAT: tl.constexpr, LARGEST: tl.constexpr, VECTORS: tl.constexpr, AGAIN: tl.constexpr,
    OVERLAP: tl.constexpr, RULE: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """Quantizes one token, CHUNKS * THREADS * VECTOR elements. GROUP 0: one scale per token. HADAMARD 0: no rotation."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    EARLY: tl.constexpr = BEFORE == 1 and VECTOR * CHUNKS <= 32  # with more, x would not fit the registers
    if EARLY:
        weights = loaded(weight, i, K, STEP, CHUNKS)
    if OVERLAP:
        cuda.gdc_wait()
    of_row = row_of(x, row, x_stride, VECTORS)
    halves = loaded(of_row, i, K, STEP, CHUNKS)
    if beside is not None:
        others = loaded(row_of(beside, row, beside_stride, VECTORS), i, K, STEP, CHUNKS)
    if sums is not None:
        halves = add_and_store(sums, row, halves, others, i, K, STEP, CHUNKS)
    values = floats(halves, CHUNKS)
    TYPE: tl.constexpr = x.dtype.element_ty
    factor = 1.0  # common factor of all values, applied to the scale at the end
    if BEFORE == 1:
        squares = squares_of(values, CHUNKS)
        if not EARLY:
            weights = loaded(weight, i, K, STEP, CHUNKS)
        values = times(values, weights, CHUNKS)
    elif BEFORE == 2:
        values = layer_normalized(values, weight, bias, eps, i, K, THREADS, STEP, CHUNKS)
    elif BEFORE == 3:
        values = times(silu(values, CHUNKS), others, CHUNKS)
    values = rotated_before(values, HADAMARD, BEFORE, TYPE, CHUNKS)
    together: tl.constexpr = BEFORE == 1 and static is None and zeros is None and GROUP == 0
    if together:
        total, largest = tl.reduce((squares, largest_of(values, CHUNKS)), 0, sum_and_largest)
        factor = tl.rsqrt(total / K + eps)
    elif BEFORE == 1:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    zero = None
    if static is not None:
        scale = given_scale(tl.load(static), TYPE, RULE)
        if static_zero is not None:
            zero = tl.load(static_zero)
    elif GROUP == 0 and zeros is None:
        if not together:
            largest = tl.reduce(largest_of(values, CHUNKS), 0, larger)
        scale = scale_under(largest, factor, LARGEST, BEFORE == 0, TYPE, RULE)
        tl.store(scales + row, scale)
    elif GROUP == 0:
        scale, zero = range_under(values, factor, TYPE, RULE, CHUNKS)
        tl.store(scales + row, scale)
        tl.store(zeros + row, zero)
    saturate: tl.constexpr = static is not None or zeros is not None
    if AGAIN and (BEFORE == 1 or static is None):
        values = floats(loaded(of_row, i, K, STEP, CHUNKS), CHUNKS)
        if BEFORE == 1:
            values = times(values, loaded(weight, i, K, STEP, CHUNKS), CHUNKS)
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    code_row = row_of(codes, row, code_vectors * 2, True)
    for c in tl.static_range(CHUNKS):
        if GROUP == 0:
            code = codes_under(values[c], scale, factor, zero, static is not None, saturate, FORMAT, BEFORE == 0, TYPE, RULE)
        else:
            tiles = tl.reshape(values[c], (STEP // GROUP, GROUP))
            highest = tl.reduce(tl.abs(tiles), 1, larger, keep_dims=True)
            scale = scale_under(highest, factor, LARGEST, BEFORE == 0, TYPE, RULE)
            group = c * (STEP // GROUP) + tl.arange(0, STEP // GROUP)[:, None]
            tl.store(scales + row.to(tl.int64) * GROUPS + group, scale, mask=group < GROUPS)
            code = codes_under(tiles, scale, factor, None, False, False, FORMAT, BEFORE == 0, TYPE, RULE)
            code = tl.reshape(code, (THREADS, VECTOR))
        if zero is not None:
            code = tl.where(c * STEP + i < K, code, 0)
        if K == STEP * CHUNKS:
            tl.store(code_row + c * STEP + i, code)
        else:
            tl.store(code_row + c * STEP + i, code, mask=(c * STEP + i) // 16 < code_vectors)


@dataclass(frozen=True)
class QuantizeRequest:
    """What a call computes: the fused operation before quantization, the format, the group size (0: one scale per token),
    whether a scale is given (and, if not symmetric, a zero), whether there are zero points and a residual, the rule, and the
    channels of a rotated block (0: no rotation)."""

    before: str
    fmt: NumberFormat
    group: int = 0
    static: bool = False
    symmetric: bool = True
    residual: bool = False
    rule: ActivationRule = ActivationRule.OWN
    hadamard: int = 0


def shape_of(few: bool, k: int, request: QuantizeRequest) -> tuple[int, int, bool, int]:
    """Returns threads per block, contiguous elements per thread, True if x is loaded again when the scale is known, and the
    register limit (0: none). Chosen by timings on one H200, 2026-11-21, Triton 3.6, with 16 to 16384 rows of 4096, 8192 and
    28672 elements."""
    wanted = 512 if few else 128 if request.before == "layer_norm" else max(k // 32, 1)

    def cost(shape: tuple[int, int]) -> tuple[float, ...]:
        threads, vector = shape
        each = -(-k // (threads * vector)) * vector
        too_many = each > (32 if request.residual else MOST_EACH)
        return each > MOST_EACH, too_many, threads * each, -vector, abs(math.log2(threads / wanted))

    halves = request.residual and request.hadamard <= 32 * VECTOR // 2  # a rotated block lies within one warp
    vectors = (VECTOR, VECTOR // 2) if halves else (VECTOR,)
    threads, vector = min(((t, p) for p in vectors for t in (32, 64, 128, 256, 512, 1024)), key=cost)
    each = -(-k // (threads * vector)) * vector
    again = request.before in ("", "rms_norm") and not (
        (few and each <= 32) or request.residual or request.group or request.hadamard
    )
    if request.residual:
        registers = 64 if threads == 1024 else 0
    elif request.before == "layer_norm":
        registers = 64 if each <= 32 else 128 if each == MOST_EACH else 0
    elif each <= 32:
        registers = 0
    else:  # rotated values stay in registers; with 512 threads only one block would fit
        registers = 80 if request.hadamard and threads <= 256 else 64
    return threads, vector, again, min(registers, 65536 // threads)


class QuantizePlan:
    """The plan of a call for one shape: created once, called many times.

    `vectors` promises that K and all row strides are multiples of 8 and that all tensors start at multiples of 16 bytes. A plan
    serves one GPU, one alignment and one set of dtypes.
    """

    def __init__(self, m: int, k: int, request: QuantizeRequest, vectors: bool, machine: Machine) -> None:
        self.m, self.k, self.request = m, k, request
        self.code_vectors = -(-k // CODE_VECTOR)
        self.x_unit = VECTOR if vectors else 1
        threads, vector, again, registers = shape_of(m <= FEW_PER_SM * machine.sm_count, k, request)
        group = 0 if not request.group or request.group >= k else request.group
        vector = max(vector, group // threads)
        chunks = -(-self.code_vectors * CODE_VECTOR // (threads * vector))
        integer = 127.5 if request.rule is ActivationRule.COMPRESSED_TENSORS else 127.0
        largest = request.fmt.max if isinstance(request.fmt, FloatFormat) else integer
        overlap = machine.arch.sm >= 90
        self.constants = (
            k, threads, vector, chunks, group, STEPS[request.before], FORMATS[request.fmt.name], largest, vectors, again,
            overlap, RULES[request.rule], request.hadamard,
        )  # fmt: skip
        self.launch = Launcher(quantize_rows, (m, 1, 1), threads // 32, overlap=overlap, registers=registers)

    def __call__(
        self, x: Tensor, beside: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, eps: float,
        zero: Tensor | None = None, total: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Returns codes [M, K], then scale, zero and x + residual, as far as requested; all tensors on the current device. x +
        residual is written to `total`, which is contiguous and may be x itself."""
        request, on = self.request, x.device
        codes = torch.empty((self.m, self.code_vectors * CODE_VECTOR), dtype=CODE_DTYPES[request.fmt.name], device=on)
        groups = -(-self.k // request.group) if request.group else 1
        scales = None if request.static else torch.empty((self.m, groups), dtype=torch.float32, device=on)
        zeros = None if request.symmetric or request.static else torch.empty((self.m, groups), dtype=torch.int32, device=on)
        sums = torch.empty((self.m, self.k), dtype=x.dtype, device=on) if request.residual and total is None else total
        if self.m:
            strides = x.stride(0) // self.x_unit, 0 if beside is None else beside.stride(0) // self.x_unit
            arguments = (codes, scales, zeros, sums, x, beside, weight, bias, scale, zero, *strides, self.code_vectors, eps)
            self.launch(*arguments, *self.constants)
        made = (codes[:, : self.k], scales, zeros, sums)
        return [t for t in made if t is not None]
