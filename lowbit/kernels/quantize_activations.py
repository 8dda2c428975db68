"""codes, scale = quantize(f(x)): activations to int8 or 8-bit floats in one pass, alone or right after what makes them.

Reads   x fp16 or bf16 [M, K], any row stride; by `before` also residual [M, K], weight and bias [K] (norms), up [M, K] (silu)
f       "": x; "rms_norm", "layer_norm": of x, or of x + residual, which is rounded to x's type and written; "silu": silu(x) up
Writes  codes int8 or float8 in rows that start at multiples of 16 bytes, zeros from K up to there; scale fp32 [M, 1], or
        [M, ceil(K / group)] for groups; zero int32 [M, 1] if asymmetric. With a given scale, codes only
Blocks  one token each; its row is read once and stays in registers, in pieces of 16 bytes; the warps meet once for the scale
Overlap lets the kernel after it start at once, and reads the norm's weights before the kernel before it has finished
        (programmatic dependent launch, sm_90)
Exact   without f bit-equal to kernels/reference.py: the largest |x| by its bits (so NaN is the largest of all), true divisions,
        rounding by adding 1.5 * 2^23, conversions of floats by the hardware (sm_90). f in float32, not rounded before it is
        quantized. Tested: tests/kernels/test_quantize_activations.py
"""

from __future__ import annotations

from dataclasses import dataclass

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
def magnitude(value):
    """|value| as an integer that orders like it, NaN above infinity."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


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
def normalized(value, exist, weight, bias, eps, K: tl.constexpr, BEFORE: tl.constexpr):
    """RMSNorm (1) or LayerNorm (2) of a row; `bias` None where there is none."""
    if BEFORE == 2:
        value = tl.where(exist, value - tl.sum(value, axis=0) / K, 0.0)
    mean_square = tl.sum(value * value, axis=0) / K
    value = value * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps)) * weight
    if bias is not None:
        value = value + bias
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
    codes, scales, zeros, sums, x, beside, weight, bias, static, x_stride, beside_stride, code_pieces, eps,
    K: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BEFORE: tl.constexpr, FORMAT: tl.constexpr,
    LARGEST: tl.constexpr, PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token; COLUMNS and GROUP are powers of two, GROUP is COLUMNS for one scale per token."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    i = tl.arange(0, COLUMNS)
    exist = i < K
    if weight is not None:
        w = tl.load(weight + i, mask=exist, other=0.0).to(tl.float32)
    b = None
    if bias is not None:
        b = tl.load(bias + i, mask=exist, other=0.0).to(tl.float32)
    if OVERLAP:
        cuda.gdc_wait()
    if static is not None:
        scale = tl.load(static)
    half = tl.load(row_of(x, row, x_stride, PIECES) + i, mask=exist, other=0.0, eviction_policy="evict_first")
    if beside is not None:
        other = tl.load(row_of(beside, row, beside_stride, PIECES) + i, mask=exist, other=0.0, eviction_policy="evict_first")
    if sums is not None:
        half = (half.to(tl.float32) + other.to(tl.float32)).to(half.dtype)
        tl.store(row_of(sums, row, K, False) + i, half, mask=exist)
    value = half.to(tl.float32)
    if BEFORE == 3:
        value = value / (1.0 + tl.exp(-value)) * other.to(tl.float32)
    elif BEFORE != 0:
        value = normalized(value, exist, w, b, eps, K, BEFORE)
    tiles = tl.reshape(value, (COLUMNS // GROUP, GROUP))
    zero = None
    if static is None:
        group = tl.arange(0, COLUMNS // GROUP)[:, None]
        kept = group < (K + GROUP - 1) // GROUP
        target = row.to(tl.int64) * ((K + GROUP - 1) // GROUP) + group
        if zeros is None:
            largest = tl.max(magnitude(tiles), axis=1, keep_dims=True).to(tl.float32, bitcast=True)
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
    if zeros is not None:
        code = tl.where(exist, code, 0)
    tl.store(row_of(codes, row, code_pieces * 2, True) + i, code, mask=i // 16 < code_pieces)


@dataclass(frozen=True)
class Request:
    """What is asked for: step before, format, group (0: per token), whether a scale is given, zero points, a residual."""

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
        self.options = {"num_warps": min(max(columns // 512, 4), 32)} | ({"launch_pdl": True} if overlap else {})
        self.kernel: CompiledKernel | None = None

    def __call__(
        self, x: Tensor, beside: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, eps: float
    ) -> list[Tensor]:
        """codes [M, K], then scale, zero, sum as far as the request has them; all tensors on the current device."""
        request, on = self.request, x.device
        codes = torch.empty((self.m, self.code_pieces * CODE_PIECE), dtype=CODE_DTYPES[request.fmt.name], device=on)
        groups = -(-self.k // request.group) if request.group else 1
        scales = None if request.static else torch.empty((self.m, groups), dtype=torch.float32, device=on)
        zeros = None if request.symmetric else torch.empty((self.m, groups), dtype=torch.int32, device=on)
        sums = torch.empty((self.m, self.k), dtype=x.dtype, device=on) if request.residual else None
        if self.m:
            strides = x.stride(0) // self.x_unit, 0 if beside is None else beside.stride(0) // self.x_unit
            arguments = (codes, scales, zeros, sums, x, beside, weight, bias, scale, *strides, self.code_pieces, eps)
            if self.kernel is None:
                self.kernel = quantize_rows[(self.m, 1, 1)](*arguments, *self.constants, **self.options)
            else:
                self.kernel[(self.m, 1, 1)](*arguments, *self.constants)
        made = (codes[:, : self.k], scales, zeros, sums)
        return [t for t in made if t is not None]
