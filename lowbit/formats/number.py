"""Integer and float formats of at most 8 bits.

A *code* is an unsigned integer of `bits` bits. An integer format decodes it as `code - offset` (offset binary, as
GPTQ, AWQ and compressed-tensors files store it, and as the fast conversions with +8 and +128 expect it). A float format
reads it as sign | exponent | mantissa, most significant bit first.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class IntFormat:
    """Integers of `bits` bits (2 to 8); value = code - offset.

    `int4` is IntFormat(4, offset=8) and spans -8..7; `uint4` is IntFormat(4, offset=0) and spans 0..15. Schemes with zero
    points use unsigned formats.
    """

    bits: int
    offset: int

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"integer formats have 2 to 8 bits, got {self.bits}")
        if self.offset not in (0, 1 << (self.bits - 1)):
            raise ValueError(f"offset of a {self.bits}-bit integer is 0 or {1 << (self.bits - 1)}, got {self.offset}")

    @property
    def signed(self) -> bool:
        return self.offset > 0

    @property
    def name(self) -> str:
        return f"{'int' if self.signed else 'uint'}{self.bits}"

    @property
    def max(self) -> float:
        """Largest value."""
        return float((1 << self.bits) - 1 - self.offset)

    @property
    def min(self) -> float:
        """Smallest value."""
        return float(-self.offset)

    def value_of(self, code: int) -> float:
        """Value of one code."""
        return float(code - self.offset)


@dataclass(frozen=True)
class FloatFormat:
    """Floats of 1 sign, `exponent` and `mantissa` bits, at most 8 bits in all.

    value = (-1)^s 2^(E-bias) (1 + m/2^M) for E > 0 and (-1)^s 2^(1-bias) m/2^M (a subnormal) for E = 0, with
    bias = 2^(exponent-1) - 1. `special` states which codes are not finite:

    - "none": all are finite (fp4_e2m1, fp5_e2m2, fp6_e3m2, fp6_e2m3 and every other format of less than 8 bits);
    - "nan": only the all-ones code of either sign is NaN, no infinity (fp8_e4m3, torch.float8_e4m3fn);
    - "ieee": the top exponent holds infinity (mantissa 0) and NaN (fp8_e5m2, torch.float8_e5m2).
    """

    exponent: int
    mantissa: int
    special: str = "none"

    def __post_init__(self) -> None:
        if self.exponent < 1 or self.mantissa < 0 or not 3 <= self.bits <= 8:
            raise ValueError(
                f"a float format has at least 1 exponent bit and 3 to 8 bits in all (sign included), "
                f"got e{self.exponent}m{self.mantissa}"
            )
        if self.special not in ("none", "nan", "ieee"):
            raise ValueError(f"special is 'none', 'nan' or 'ieee', got {self.special!r}")

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def name(self) -> str:
        return f"fp{self.bits}_e{self.exponent}m{self.mantissa}"

    def value_of(self, code: int) -> float:
        """Value of one code, infinity and NaN included."""
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        field = (code >> self.mantissa) & ((1 << self.exponent) - 1)
        fraction = code & ((1 << self.mantissa) - 1)
        top = (1 << self.exponent) - 1
        if self.special == "ieee" and field == top:
            return sign * float("inf") if fraction == 0 else float("nan")
        if self.special == "nan" and field == top and fraction == (1 << self.mantissa) - 1:
            return float("nan")
        step = 2.0 ** (max(field, 1) - self.bias - self.mantissa)
        return sign * step * (fraction + (1 << self.mantissa if field else 0))

    @functools.cached_property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        return {
            "none": (1 << (self.bits - 1)) - 1,
            "nan": (1 << (self.bits - 1)) - 2,
            "ieee": (1 << (self.bits - 1)) - 1 - (1 << self.mantissa),
        }[self.special]

    @functools.cached_property
    def max(self) -> float:
        """Largest finite value: 28 for fp6_e3m2, 448 for fp8_e4m3."""
        return self.value_of(self.max_code)

    @property
    def min(self) -> float:
        """Smallest finite value, -max."""
        return -self.max


NumberFormat = IntFormat | FloatFormat


def int_format(bits: int) -> IntFormat:
    """Returns the signed integer format of `bits` bits: `int_format(4)` is int4."""
    return IntFormat(bits, 1 << (bits - 1))


def uint_format(bits: int) -> IntFormat:
    """Returns the unsigned integer format of `bits` bits: `uint_format(4)` is uint4."""
    return IntFormat(bits, 0)


def float_format(exponent: int, mantissa: int) -> FloatFormat:
    """Returns the eXmY format: e4m3 and e5m2 as in torch, all others without NaN and infinity."""
    special = {(4, 3): "nan", (5, 2): "ieee"}.get((exponent, mantissa), "none")
    return FloatFormat(exponent, mantissa, special)


_INT_NAME = re.compile(r"(u?)int(\d)")
_FLOAT_NAME = re.compile(r"fp(\d)_e(\d)m(\d)")


@functools.cache
def number_format(name: str) -> NumberFormat:
    """Returns the format called `name`: `int2`..`int8`, `uint2`..`uint8`, or `fp<bits>_e<X>m<Y>` such as `fp6_e3m2`.

    Raises ValueError with the supported names.
    """
    if match := _INT_NAME.fullmatch(name):
        bits = int(match[2])
        return uint_format(bits) if match[1] else int_format(bits)
    if match := _FLOAT_NAME.fullmatch(name):
        bits, exponent, mantissa = int(match[1]), int(match[2]), int(match[3])
        if bits == 1 + exponent + mantissa:
            return float_format(exponent, mantissa)
        raise ValueError(
            f"{name!r}: 1 sign + {exponent} exponent + {mantissa} mantissa bits are {1 + exponent + mantissa}, not {bits}"
        )
    raise ValueError(
        f"unknown number format {name!r}; supported: int2..int8, uint2..uint8, fp<bits>_e<X>m<Y> of at most 8 bits"
    )
