"""codes, scale = quantize(f(x)): activations to int8 or 8-bit floats in one pass, alone or right after what makes them.

Reads   x fp16 or bf16 [M, K], any row stride; by `before` also residual [M, K], weight and bias [K] (norms), up [M, K] (silu)
f       "": x; "rms_norm", "layer_norm": of x, or of x + residual, which is rounded to x's type and written; "silu": silu(x) up
Writes  codes int8 or float8 in rows that start at multiples of 16 bytes, zeros from K up to there; scale fp32 [M, 1], or
        [M, ceil(K / group)] for groups; zero int32 [M, 1] if asymmetric. With a given scale (and zero), codes only
Blocks  one token each; its row is read once and stays in registers, in pieces of 16 bytes; the warps meet once for the scale,
        and before that once for the sums of a norm
Overlap lets the kernel after it start at once, and reads RMSNorm's weights before the kernel before it has finished
        (programmatic dependent launch, sm_90)
Exact   without f bit-equal to kernels/reference.py: a NaN is the largest of all, and of a range by its bits; true divisions,
        rounding by adding 1.5 * 2^23, conversions of floats by the hardware (sm_90). f in float32, not rounded before it is
        quantized. Tested: tests/kernels/test_quantize_activations.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.language.extra import cuda

from lowbit.formats import FloatFormat, NumberFormat
from lowbit.hardware.device import Device
from lowbit.kernels.reference import CODE_DTYPES, SMALLEST_SCALE

PIECE = 8
"""16-bit elements in 16 bytes."""

CODE_PIECE = 16
"""Codes in 16 bytes."""

FORMATS = {"int8": 0, "fp8_e4m3": 1, "fp8_e5m2": 2}
STEPS = {"": 0, "rms_norm": 1, "layer_norm": 2, "silu": 3}
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def row_of(base, row, stride, PIECES: tl.constexpr):
    """Where a row begins; from the factor 8 the compiler sees that it may move pieces."""
    start = row.to(tl.int64) * stride
    if PIECES:
        start = start * 8
    return base + start


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
def at_least_smallest(scale):
    """The scale, but none whose reciprocal is infinite."""
    return tl.where(scale < _SMALLEST, _SMALLEST, scale)


@triton.jit
def add_both(a, b, c, d):
    """Two sums at once."""
    return a + c, b + d


@triton.jit
def row_sample(x, beside, K: tl.constexpr):
    """The mean of 32 elements of a row of x, or of x + beside."""
    at = tl.arange(0, 32) * (K // 32)
    sample = tl.load(x + at).to(tl.float32)
    if beside is not None:
        sample += tl.load(beside + at).to(tl.float32)
    return tl.sum(sample, axis=0) / 32


@triton.jit
def layer_normalized(value, i, near, weight, bias, eps, K: tl.constexpr):
    """LayerNorm of a row; `bias` None where there is none.

    Sums of differences from `near`, a number near the mean, give mean and variance at one meeting and lose nothing, as sums of
    x^2 would. Weights are asked for after it: registers that do not hold them hold more rows.
    """
    exist = i < K
    apart = tl.where(exist, value - near, 0.0)
    total, squares = tl.reduce((apart, apart * apart), 0, add_both)
    mean = total / K
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(squares / K - mean * mean, 0.0) + eps))
    value = tl.fma(apart, inverse, -mean * inverse)
    value = value * tl.load(weight + i, mask=exist, other=0.0).to(tl.float32)
    if bias is not None:
        value = value + tl.load(bias + i, mask=exist, other=0.0).to(tl.float32)
    return value


@triton.jit
def codes_of(value, inverse, zero, FORMAT: tl.constexpr, SATURATE: tl.constexpr):
    """Codes of float32 values; `zero` None where there is none. Without SATURATE no |value * inverse| is beyond the range."""
    if FORMAT == 0:
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


@triton.jit(do_not_specialize=["x_stride", "beside_stride", "code_pieces", "eps"])
def quantize_rows(
    codes, scales, zeros, sums, x, beside, weight, bias, static, static_zero, x_stride, beside_stride, code_pieces, eps,
    K: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BEFORE: tl.constexpr, FORMAT: tl.constexpr,
    LARGEST: tl.constexpr, PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token; COLUMNS and GROUP are powers of two, GROUP is COLUMNS for one scale per token."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    i = tl.arange(0, COLUMNS)
    exist = i < K
    if BEFORE == 1:
        w = tl.load(weight + i, mask=exist, other=0.0)
    if OVERLAP:
        cuda.gdc_wait()
    zero = None
    if static is not None:
        scale = tl.load(static)
        if static_zero is not None:
            zero = tl.load(static_zero)
    of_row = row_of(x, row, x_stride, PIECES)
    beside_row = None
    if beside is not None:
        beside_row = row_of(beside, row, beside_stride, PIECES)
    if BEFORE == 2:
        near = row_sample(of_row, beside_row, K)
    half = tl.load(of_row + i, mask=exist, other=0.0, eviction_policy="evict_first")
    if beside is not None:
        other = tl.load(beside_row + i, mask=exist, other=0.0, eviction_policy="evict_first")
    if sums is not None:
        half = (half.to(tl.float32) + other.to(tl.float32)).to(half.dtype)
        tl.store(row_of(sums, row, K, False) + i, half, mask=exist)
    value = half.to(tl.float32)
    if BEFORE == 1:
        # Times the weights first, which then need no registers while the sum of squares is found.
        mean_square = tl.sum(value * value, axis=0) / K
        value = value * w.to(tl.float32) * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    elif BEFORE == 2:
        value = layer_normalized(value, i, near, weight, bias, eps, K)
    elif BEFORE == 3:
        root = tl.rsqrt(1.0 + tl.exp2(value * -1.4426950408889634))  # 1 / sqrt(1 + exp(-value)): a third of a division's work
        value = value * (root * root) * other.to(tl.float32)
    tiles = tl.reshape(value, (COLUMNS // GROUP, GROUP))
    if static is None:
        group = tl.arange(0, COLUMNS // GROUP)[:, None]
        kept = group < (K + GROUP - 1) // GROUP
        target = row.to(tl.int64) * ((K + GROUP - 1) // GROUP) + group
        if zeros is None:
            largest = tl.reduce(tl.abs(tiles), 1, larger, keep_dims=True)
            scale = at_least_smallest(tl.div_rn(largest, LARGEST))
        else:
            bits = ordered(tiles)
            low = from_ordered(tl.minimum(tl.min(bits, axis=1, keep_dims=True), 0))
            high = from_ordered(tl.maximum(tl.max(bits, axis=1, keep_dims=True), 0))
            scale = at_least_smallest(tl.div_rn(high - low, 255.0))
            zero = -128 - nearest(tl.fma(low, tl.div_rn(1.0, scale), 0.0))
            tl.store(zeros + target, zero, mask=kept)
        tl.store(scales + target, scale, mask=kept)
    saturate: tl.constexpr = static is not None or zeros is not None
    code = tl.reshape(codes_of(tiles, tl.div_rn(1.0, scale), zero, FORMAT, saturate), (COLUMNS,))
    if zero is not None:
        code = tl.where(exist, code, 0)
    tl.store(row_of(codes, row, code_pieces * 2, True) + i, code, mask=i // 16 < code_pieces)


@dataclass(frozen=True)
class Request:
    """What is asked for: step before, format, group (0: per token), whether a scale is given (and a zero, if not symmetric),
    whether there are no zero points, a residual."""

    before: str
    fmt: NumberFormat
    group: int = 0
    static: bool = False
    symmetric: bool = True
    residual: bool = False


class QuantizePlan:
    """All of a call that does not depend on the tensors' contents: made once for a shape, called many times.

    `pieces` promises that K and all row strides are multiples of 8 and that all tensors start at multiples of 16 bytes. A plan
    serves one GPU, one alignment and one set of types of the tensors.
    """

    def __init__(self, m: int, k: int, request: Request, pieces: bool, device: Device) -> None:
        self.m, self.k, self.request = m, k, request
        self.code_pieces = -(-k // CODE_PIECE)
        self.x_unit = PIECE if pieces else 1
        group = request.group or k
        columns = max(256, triton.next_power_of_2(self.code_pieces * CODE_PIECE))
        span = columns if group >= k else group
        largest = request.fmt.max if isinstance(request.fmt, FloatFormat) else 127.0
        overlap = device.sm >= 90
        self.constants = (k, columns, span, STEPS[request.before], FORMATS[request.fmt.name], largest, pieces, overlap)
        self.options: dict[str, Any] = {"launch_pdl": True} if overlap else {}
        if request.before.endswith("norm"):
            # 32 elements a thread: what threads do once each costs less. As many rows at once as registers allow.
            self.options["num_warps"] = min(max(columns // 1024, 4), 32)
        else:
            self.options["num_warps"] = min(max(columns // 512, 4), 32)
        self.kernel: CompiledKernel | None = None

    def __call__(
        self, x: Tensor, beside: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, eps: float,
        zero: Tensor | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """codes [M, K], then scale, zero, sum as far as the request has them; all tensors on the current device."""
        request, on = self.request, x.device
        codes = torch.empty((self.m, self.code_pieces * CODE_PIECE), dtype=CODE_DTYPES[request.fmt.name], device=on)
        groups = -(-self.k // request.group) if request.group else 1
        scales = None if request.static else torch.empty((self.m, groups), dtype=torch.float32, device=on)
        zeros = None if request.symmetric or request.static else torch.empty((self.m, groups), dtype=torch.int32, device=on)
        sums = torch.empty((self.m, self.k), dtype=x.dtype, device=on) if request.residual else None
        if self.m:
            strides = x.stride(0) // self.x_unit, 0 if beside is None else beside.stride(0) // self.x_unit
            arguments = (codes, scales, zeros, sums, x, beside, weight, bias, scale, zero, *strides, self.code_pieces, eps)
            if self.kernel is None:
                self.kernel = quantize_rows[(self.m, 1, 1)](*arguments, *self.constants, **self.options)
            else:
                self.kernel[(self.m, 1, 1)](*arguments, *self.constants)
        made = (codes[:, : self.k], scales, zeros, sums)
        return [t for t in made if t is not None]
