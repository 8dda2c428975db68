"""Real numbers to codes and back: round to nearest, ties to even, saturating.

Rounding and special values, the same for every format:

- Values are rounded to the nearest representable one; a tie goes to the even code (integers: the even value).
- Beyond the largest finite value they saturate to it. `saturate=False` is the OCP 8-bit specification's other mode: they become
  infinity if the format has one (as in torch for float8_e5m2), or NaN if it has only NaN (torch 2.13 saturates float8_e4m3fn
  instead). It is an error for other formats.
- Infinity is treated as a value beyond the largest. NaN becomes the format's NaN with a clear sign bit. For a format without
  NaN it is an error (`ValueError`), since no code could represent it.
- The sign of zero is kept by float formats.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit.formats.number import FloatFormat, IntFormat, NumberFormat


@functools.cache
def _values(fmt: NumberFormat) -> Tensor:
    return torch.tensor([fmt.value_of(c) for c in range(1 << fmt.bits)], dtype=torch.float32, device="cpu")


def code_values(fmt: NumberFormat) -> Tensor:
    """Returns a copy of the table that decodes the format: the values of all codes, float32 [2^bits]."""
    return _values(fmt).clone()


def encode(x: Tensor, fmt: NumberFormat, *, saturate: bool = True) -> Tensor:
    """Returns codes (uint8, same shape) of the values `x` (any float dtype) in `fmt`.

    Raises ValueError for NaN in a format that has none, and for `saturate=False` in a format without a special value.
    """
    x = x.to(torch.float32) if x.dtype != torch.float64 else x
    if isinstance(fmt, IntFormat):
        return _encode_int(x, fmt, saturate)
    return _encode_float(x, fmt, saturate)


def decode(codes: Tensor, fmt: NumberFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns values (`dtype`, same shape) of `codes` (uint8), exact unless the exponent is out of range for `dtype`.

    fp16 has too small a range for formats with 6 or more exponent bits.
    """
    if isinstance(fmt, IntFormat):
        return codes.to(dtype) - fmt.offset
    table = code_values(fmt).to(device=codes.device, dtype=dtype)
    return table[codes.to(torch.int32)]


def _encode_int(x: Tensor, fmt: IntFormat, saturate: bool) -> Tensor:
    if not saturate:
        raise ValueError(f"{fmt.name} has neither infinity nor NaN: it can only saturate")
    _refuse_nan(x, fmt)
    return (x.round().clamp(fmt.min, fmt.max) + fmt.offset).to(torch.uint8)


def _encode_float(x: Tensor, fmt: FloatFormat, saturate: bool) -> Tensor:
    if fmt.special == "none":
        if not saturate:
            raise ValueError(f"{fmt.name} has neither infinity nor NaN: it can only saturate")
        _refuse_nan(x, fmt)
    # The binade of each value: 2^e <= magnitude < 2^(e + 1).
    # A subnormal value counts as one of the lowest binade, a value that overflows as one of the binade above the largest.
    integers, mantissa, bias = (torch.int32, 23, 127) if x.dtype == torch.float32 else (torch.int64, 52, 1023)
    magnitude, lowest, next_one = x.detach().abs(), 1 - fmt.bias, (1 << fmt.exponent) - fmt.bias
    exponent = ((magnitude.view(integers) >> mantissa) - bias).clamp(lowest, next_one)
    # The magnitude in steps, the distance of neighbouring codes in its binade. The factor is a power of two, so `round` is the
    # only rounding.
    steps = magnitude * ((fmt.mantissa + bias - exponent) << mantissa).view(x.dtype)
    rounded = steps.round()
    if fmt.mantissa == 0:  # `round` gives even steps, which are even codes only if there are mantissa bits; else fix the ties
        rounded = torch.where((steps == 1.5) & ((exponent - lowest) % 2 == 1), 1.0, rounded)
    # With M mantissa bits, steps are 2^M + m in a normal binade (m: the mantissa's bits). Adding (E - 1) 2^M, with the exponent
    # bits E, gives the code. If rounding up ends the binade, the carry gives the first code of the next one.
    code = rounded + ((exponent - lowest) << fmt.mantissa)
    over = {"none": fmt.max_code, "nan": fmt.max_code + 1, "ieee": fmt.max_code + 1}[fmt.special]
    code = code.clamp(max=fmt.max_code if saturate else over)
    negative = torch.signbit(x)
    if fmt.special != "none":
        nan = x.isnan()
        code, negative = torch.where(nan, (1 << (fmt.bits - 1)) - 1, code), negative & ~nan
    return code.to(torch.uint8) | (negative.to(torch.uint8) << (fmt.bits - 1))


def _refuse_nan(x: Tensor, fmt: NumberFormat) -> None:
    if not x.is_meta and bool(x.isnan().any()):
        raise ValueError(f"{int(x.isnan().sum())} of {x.numel()} values are NaN, which {fmt.name} cannot hold")
