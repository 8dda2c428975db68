"""Converts codes to fp16 or bf16 without a conversion instruction: by a few logic operations and at most one arithmetic
instruction for two weights.

`cvt` runs at a quarter of the rate of logic operations. So weights are converted by building the bits of a half:

Integers   fp16: the half 2^10 = 1024 is 0x6400. With a code c in its low mantissa bits it is exactly 2^10 + c. Subtracting
           2^10 + offset leaves the value. A code may also stay s bits above bit 0, which saves a shift: one fma computes
           (2^10 + 2^s c) * 2^-s - (2^(10-s) + offset). For s = 4 and offset 8 the factor is 1/16 and the constant 64 + 8.
           bf16 has only 7 mantissa bits, too few for that. But its subnormal numbers and the next binade have the same
           spacing, so a number is linear in its low 8 bits: the masked code is the number c 2^(s-133). One fma multiplies it by
           2^(127-s) and subtracts offset 2^-6. The weight's scale includes the missing factor 2^6.
           For 8-bit codes in fp16, PRMT combines codes with the byte 0x64. Selector 0x5250 takes bytes 0 and 2 of the codes
           (digits 0 and 2), and puts byte 1 of the second operand (digit 5), 0x64, into the upper byte of each half.
Floats     The sign is moved to bit 15, exponent and mantissa to the lowest exponent bits and the highest mantissa bits of the
           half. Since the half's exponent bias is larger, the number is too small by a factor of 2^(bias_half - bias), also if
           it is subnormal. In fp16 the weight's scale includes this factor at no cost (`scale_factor`, 2^12 for e3m2). In bf16
           it would be 2^120 or more, so the program multiplies by it. Codes of infinity and NaN (e5m2, e4m3) never occur in
           weights; e4m3's two NaN codes would be read as +-480.

The order of codes in words is that of `hardware.fields`. For 4 and 8 bits it is also FasterTransformer's order (nibbles e7 e5
e3 e1 e6 e4 e2 e0, bytes e3 e1 e2 e0, from the top).

Source: FasterTransformer and CUTLASS, FastInterleavedAndBiasedNumericArrayConverter (LOP3 0xEA, 1032, 1/16 and -72; PRMT, 1024
and 1152); FP6-LLM, arXiv:2401.14112 (bias shift). Integers as bf16's subnormal numbers are this library's own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.formats import FloatFormat, IntFormat, NumberFormat
from lowbit.hardware.fields import FieldOrder, Slot, field_order
from lowbit.hardware.half import BIAS, MANTISSA_BITS, HalfType, widen_half
from lowbit.hardware.ptx import Builder, Program, Words

_BOTH = 0x00010001  # the same bits in both halves of a register
_FP16_MAGIC = 0x6400  # 1024
_MISSING = 2.0**6
"""Factor by which integers are too small in bf16, whose largest power of two is 2^127 instead of 2^133."""


@dataclass(frozen=True)
class Conversion:
    """A program that converts words of codes to registers of two halves, where value = half * `scale_factor`.

    Inputs are the words of `fields` in order; outputs are `registers` f16x2 or bf16x2 registers, element 0 in the low half.
    """

    format: NumberFormat
    dtype: HalfType
    fields: FieldOrder
    program: Program
    scale_factor: float

    @property
    def name(self) -> str:
        return f"{self.format.name} -> {self.dtype}"

    @property
    def registers(self) -> int:
        return len(self.program.outputs)

    @property
    def integer_per_weight(self) -> float:
        """Number of integer (logic, shift, permute) instructions per weight."""
        return self.program.count("integer") / (2 * self.registers)

    @property
    def half_per_weight(self) -> float:
        """Number of half-precision arithmetic instructions per weight; each computes two halves."""
        return self.program.count("half") / (2 * self.registers)

    def run(self, words: Sequence[npt.ArrayLike]) -> npt.NDArray[np.float64]:
        """Executes the program bit-exactly; returns the halves [.., registers, 2] as float64. Multiplied by `scale_factor` they
        are the values."""
        out: Sequence[Words] = self.program.run(words)
        return np.stack([widen_half(register, self.dtype) for register in out], axis=-2)


@functools.cache
def conversion(fmt: NumberFormat, dtype: HalfType) -> Conversion:
    """Returns the conversion of `fmt` to `dtype` ("fp16" or "bf16").

    Raises ValueError for floats whose exponents do not fit: e5m0, e5m1 and six or more exponent bits in fp16.
    """
    fields = field_order(fmt)
    builder = Builder([f"w{i}" for i in range(fields.words)])
    codes = placed_codes(builder, fields)
    factor = 1.0
    if isinstance(fmt, FloatFormat):
        outputs, factor = _float_outputs(builder, fmt, dtype, codes)
    elif fmt.bits == 8:
        outputs, factor = _byte_outputs(builder, fmt, dtype)
    else:
        outputs, factor = _integer_outputs(builder, fmt, dtype, codes)
    return Conversion(fmt, dtype, fields, builder.build(outputs), factor)


@dataclass(frozen=True)
class SubnormalCodes:
    """A program that converts words of integer codes to registers of subnormal numbers by masks and shifts only. The numbers
    are code * 2^(up - 24) in fp16 and code * 2^(up - 133) in bf16. `up` has one number for each register: the position of the
    codes' lowest bit within the half."""

    fields: FieldOrder
    program: Program
    up: tuple[int, ...]


_CODE_BITS: dict[HalfType, int] = {"fp16": MANTISSA_BITS["fp16"], "bf16": MANTISSA_BITS["bf16"] + 1}
"""Number of low bits of a half in which its value is linear. Since subnormal numbers and the first binade have the same
spacing, that is one bit more than the mantissa has. Only bf16 uses this bit, for 4-bit codes that are not shifted down."""


@functools.cache
def subnormal_codes(fmt: IntFormat, dtype: HalfType) -> SubnormalCodes:
    """Returns the conversion of an integer format of up to 7 bits to subnormal halves; the caller subtracts offsets."""
    fields = field_order(fmt)
    builder = Builder([f"w{i}" for i in range(fields.words)])
    placed = list(_placed(placed_codes(builder, fields), _CODE_BITS[dtype]))
    outputs = [_moved(builder, word, slot, [bit - down for bit in slot]) for word, slot, down in placed]
    return SubnormalCodes(fields, builder.build(outputs), tuple(slot[0] - down for _, slot, down in placed))


def _placed(codes: list[tuple[str, Slot]], mantissa: int) -> Iterator[tuple[str, Slot, int]]:
    """Yields word, slot and right shift for each register. A code keeps the shift of the word's previous code, at first
    none, while it then fits into the mantissa; otherwise it is shifted down to bit 0."""
    down, before = 0, ""
    for word, slot in codes:
        if word != before or slot[0] < down:
            down, before = 0, word
        if slot[-1] - down >= mantissa:
            down = slot[0]
        yield word, slot, down


def placed_codes(b: Builder, fields: FieldOrder) -> list[tuple[str, Slot]]:
    """Returns the word and the slot of each register. Before that, appends instructions to `b` that assemble the gathered words
    (`FieldOrder.gathered`)."""
    words = [f"w{i}" for i in range(fields.words)]
    in_all = sum(1 << start for start in range(0, 32, fields.window))  # the same bit of every element
    for pieces in fields.gathered:
        word: str | int = 0
        for piece in pieces:
            view, mask = b.shift(words[piece.word], piece.shift), piece.mask * in_all
            word = b.mask(view, mask) if word == 0 else b.masked_or(view, mask, word)
        assert isinstance(word, str)
        words.append(word)
    return [(words[r // len(fields.slots)], fields.slots[r % len(fields.slots)]) for r in range(fields.registers)]


def _moved(b: Builder, word: str, slot: Slot, places: Sequence[int], base: int = 0) -> str:
    """Returns one register. In each half, bit i of the code moves from bit slot[i] to bit places[i]; the other bits are those
    of `base`."""
    views: dict[int, int] = {}
    for bit, place in zip(slot, places, strict=True):
        views[bit - place] = views.get(bit - place, 0) | 1 << place
    result: str | int = base * _BOTH
    for shift, mask in views.items():
        view = b.shift(word, shift)
        result = b.mask(view, mask * _BOTH) if result == 0 else b.masked_or(view, mask * _BOTH, result)
    assert isinstance(result, str)
    return result


def _integer_outputs(
    b: Builder, fmt: IntFormat, dtype: HalfType, codes: list[tuple[str, Slot]]
) -> tuple[list[str], float]:  # fmt: skip
    if dtype == "bf16":
        numbers = [
            (_moved(b, word, slot, [bit - down for bit in slot]), slot[0] - down)
            for word, slot, down in _placed(codes, _CODE_BITS[dtype])
        ]
        return _from_subnormal(b, fmt, numbers)
    outputs = []
    for word, slot, down in _placed(codes, MANTISSA_BITS[dtype]):
        up = slot[0] - down
        number = _moved(b, word, slot, [bit - down for bit in slot], _FP16_MAGIC)
        minus = _half_bits(2.0 ** (10 - up) + fmt.offset, dtype) * _BOTH
        if up == 0:
            outputs.append(b.sub(dtype, number, b.constant(minus)))
        else:
            factor = b.constant(_half_bits(2.0**-up, dtype) * _BOTH)
            outputs.append(b.fma(dtype, number, factor, b.constant(minus ^ 0x8000 * _BOTH)))
    return outputs, 1.0


def _byte_outputs(b: Builder, fmt: IntFormat, dtype: HalfType) -> tuple[list[str], float]:
    if dtype == "bf16":
        nothing = b.constant(0)
        return _from_subnormal(b, fmt, [(b.prmt("w0", nothing, selector), 0) for selector in (0x4240, 0x4341)])
    magic, minus = b.constant(0x01010101 * (_FP16_MAGIC >> 8)), b.constant(_half_bits(1024.0 + fmt.offset, dtype) * _BOTH)
    return [b.sub(dtype, b.prmt("w0", magic, selector), minus) for selector in (0x5250, 0x5351)], 1.0


def _from_subnormal(b: Builder, fmt: IntFormat, numbers: list[tuple[str, int]]) -> tuple[list[str], float]:
    """Returns registers of (code - offset) / _MISSING in bf16, and _MISSING. `numbers` are pairs (register of code * 2^(up -
    133), up)."""
    minus = _half_bits(-fmt.offset / _MISSING, "bf16") * _BOTH
    outputs = []
    for number, up in numbers:
        times = b.constant(_half_bits(2.0**133 / _MISSING / 2**up, "bf16") * _BOTH)
        outputs.append(b.fma("bf16", number, times, b.constant(minus)))
    return outputs, _MISSING


def _float_outputs(b: Builder, fmt: FloatFormat, dtype: HalfType, codes: list[tuple[str, Slot]]) -> tuple[list[str], float]:
    mantissa, bias = MANTISSA_BITS[dtype], BIAS[dtype]
    room = 15 - mantissa
    if fmt.exponent > room or (fmt.exponent == room and fmt.special != "ieee"):
        raise ValueError(f"{fmt.name} has exponents that {dtype} does not have; bf16 takes it")
    magnitude = [i + mantissa - fmt.mantissa for i in range(fmt.bits - 1)]
    outputs = [_moved(b, word, slot, [*magnitude, 15]) for word, slot in codes]
    factor = 2.0 ** (bias - fmt.bias)
    if dtype == "fp16":
        return outputs, factor
    times, nothing = b.constant(_half_bits(factor, dtype) * _BOTH), b.constant(0x8000 * _BOTH)  # -0 keeps the sign of zero
    return [b.fma(dtype, output, times, nothing) for output in outputs], 1.0


def _half_bits(value: float, dtype: HalfType) -> int:
    """Returns the bits of the half that represents `value` exactly."""
    if dtype == "fp16":
        half = np.float16(value)
        assert float(half) == value
        return int(half.view(np.uint16))
    bits = int(np.float32(value).view(np.uint32))
    assert bits & 0xFFFF == 0 and float(np.float32(value)) == value
    return bits >> 16
