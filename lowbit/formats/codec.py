"""Real numbers to codes and back: round to nearest, ties to even, saturating.

Rounding and special values, the same for every format:

- Values are rounded to the nearest representable one; a tie goes to the even code (integers: the even value).
- Beyond the largest finite value they saturate to it. `saturate=False` is the OCP 8-bit specification's other mode:
  infinity where the format has one (what torch does for float8_e5m2), NaN where it has only that (torch saturates
  float8_e4m3fn by 2.13); it is an error for other formats.
- Infinity is a value beyond the largest. NaN becomes the format's NaN, keeping its sign bit clear; a format without
  NaN refuses it (`ValueError`), since no code could stand for it.
- The sign of zero is kept by float formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.number import FloatFormat, IntFormat, NumberFormat, code_values


def encode(x: Tensor, fmt: NumberFormat, *, saturate: bool = True) -> Tensor:
    """Codes (uint8, same shape) of the values `x` (any float dtype) in `fmt`.

    Raises ValueError for NaN in a format that has none, and for `saturate=False` in a format without a special value.
    """
    x = x.to(torch.float32) if x.dtype != torch.float64 else x
    if isinstance(fmt, IntFormat):
        return _encode_int(x, fmt, saturate)
    return _encode_float(x, fmt, saturate)


def decode(codes: Tensor, fmt: NumberFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values (`dtype`, same shape) of `codes` (uint8). Exact: fp16 and bf16 hold every format's values but those whose
    exponent is out of their range (fp16: 6 and more exponent bits)."""
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
    magnitude = x.abs()
    # The binade of each value: frexp gives m in [0.5, 1), so 2^(e-1) <= magnitude < 2^e. Subnormals share the lowest.
    lowest = 1 - fmt.bias
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=lowest)
    exponent = torch.where(magnitude == 0, lowest, exponent)  # frexp gives zero the exponent 0
    # Steps of the value inside its binade. The factor is a power of two, so `round` is the only rounding.
    steps = torch.ldexp(magnitude, fmt.mantissa - exponent)
    # Even steps are even codes, but for formats without mantissa, where the exponent's own last bit decides a tie.
    tie_down = (steps == 1.5) & ((exponent - lowest) % 2 == 1) & (fmt.mantissa == 0)
    steps = torch.where(tie_down, 1.0, steps.round())
    # steps = 2^M + m in a normal binade: adding (E - 1) 2^M gives the code, and a carry moves on to the next binade.
    code = steps + (exponent - lowest) * (1 << fmt.mantissa)
    over = {"none": fmt.max_code, "nan": fmt.max_code + 1, "ieee": fmt.max_code + 1}[fmt.special]
    code = code.nan_to_num(nan=0.0, posinf=float(over)).clamp(max=fmt.max_code if saturate else over)
    code = code.to(torch.uint8)
    if fmt.special != "none":
        all_ones = (1 << (fmt.bits - 1)) - 1
        code = torch.where(x.isnan(), torch.full_like(code, all_ones), code)
    sign = (torch.signbit(x) & ~x.isnan()).to(torch.uint8) << (fmt.bits - 1)
    return code | sign


def _refuse_nan(x: Tensor, fmt: NumberFormat) -> None:
    if not x.is_meta and bool(x.isnan().any()):
        raise ValueError(f"{int(x.isnan().sum())} of {x.numel()} values are NaN, which {fmt.name} cannot hold")
