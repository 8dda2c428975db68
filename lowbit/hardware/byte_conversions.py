"""Converts codes to int8 or fp8 e4m3 operands, four in a register, by logic operations and integer additions only.

Integers to s8     The code is moved to the top of its byte, and its top bit is flipped. The result is a two's complement number
                   that is too large by a factor of 2^(8 - bits); the weight's scale compensates this (`scale_factor`). 8
                   weights of 4 bits take a shift and 2 LOP3: (w << 4) & 0xF0F0F0F0 ^ 0x80808080 and w & 0xF0F0F0F0 ^
                   0x80808080.
Floats to e4m3     The sign is moved to bit 7, the exponent to the lowest exponent bits and the mantissa to the highest mantissa
                   bits of e4m3. The number is then too small by a factor of 2^(7 - bias), also if it is subnormal.
Integers to e4m3   The bytes 0x00 to 0x0F of e4m3 are the numbers 0 to 15 times 2^-9, since subnormal numbers and the binade
                   above them have the same spacing. So a byte with a 4-bit magnitude is the number. Codes are stored as sign
                   and magnitude (`stored`). For a negative number, the magnitude minus one is stored, so that -8 fits. The
                   conversion adds 0x81 to a negative number: the sign bit and the missing one. 8 weights of 4 bits take 8
                   instructions, 3 of them LEA.

The order of codes in words is that of `hardware.fields` for operands of 8 bits. All values are exact; tests run every program
on every code. Source: this library.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from lowbit.formats import FloatFormat, IntFormat, NumberFormat
from lowbit.hardware.conversions import placed_codes
from lowbit.hardware.fields import FieldOrder, Slot, field_order
from lowbit.hardware.ptx import Builder, Program

ByteOperand = Literal["s8", "e4m3"]

_FOUR = 0x01010101
"""Factor that repeats the bits of a byte in all four bytes of a register."""

_E4M3_BIAS = 7
_E4M3_MANTISSA = 3


@dataclass(frozen=True)
class ByteConversion:
    """A program that converts words of codes to registers of four operands, where value = operand * `scale_factor`.

    Inputs are the words of `fields` in order. Element 0 of an output is in its lowest byte. `stored[code]` is the number that
    is stored in words in place of a code; empty if codes are stored unchanged.
    """

    format: NumberFormat
    operand: ByteOperand
    fields: FieldOrder
    program: Program
    scale_factor: float
    stored: tuple[int, ...] = ()

    @property
    def registers(self) -> int:
        return len(self.program.outputs)

    @property
    def integer_per_weight(self) -> float:
        """Number of integer (logic, shift, add) instructions per weight."""
        return self.program.count("integer") / (4 * self.registers)

    def run(self, words: Sequence[npt.ArrayLike]) -> npt.NDArray[np.uint8]:
        """Executes the program bit-exactly; returns the bytes of the operands [.., registers, 4]."""
        out = np.stack(self.program.run(words), axis=-1)
        return np.ascontiguousarray(out).astype("<u4").view(np.uint8).reshape(*out.shape, 4)


@functools.cache
def byte_conversion(fmt: NumberFormat, operand: ByteOperand) -> ByteConversion:
    """Returns the conversion of `fmt` to `operand`.

    Raises ValueError for formats that the operand does not hold exactly or that need no conversion (8 bits).
    """
    refusal = _refusal(fmt, operand)
    if refusal:
        raise ValueError(refusal)
    fields = field_order(fmt, 8)
    b = Builder([f"w{i}" for i in range(fields.words)])
    codes = placed_codes(b, fields)
    stored: tuple[int, ...] = ()
    if operand == "s8":
        up = 8 - fmt.bits
        outputs = [_moved(b, word, slot, [bit + up for bit in range(fmt.bits)], flip=0x80) for word, slot in codes]
        factor = 2.0**-up
    elif isinstance(fmt, FloatFormat):
        up = _E4M3_MANTISSA - fmt.mantissa
        places = [*(bit + up for bit in range(fmt.bits - 1)), 7]
        outputs = [_moved(b, word, slot, places) for word, slot in codes]
        factor = 2.0 ** (_E4M3_BIAS - fmt.bias)
    else:
        outputs = [_with_one_for_the_sign(b, word, slot) for word, slot in codes]
        factor = 2.0 ** (_E4M3_BIAS - 1 + _E4M3_MANTISSA)
        stored = tuple(_sign_and_magnitude(code - fmt.offset, fmt.bits) for code in range(1 << fmt.bits))
    return ByteConversion(fmt, operand, fields, b.build(outputs), factor, stored)


def _refusal(fmt: NumberFormat, operand: ByteOperand) -> str:
    """Returns the reasons why the operand cannot hold the format; empty if it can."""
    if fmt.bits == 8:
        return f"{fmt.name} needs no conversion: its bytes are the operand"
    if isinstance(fmt, IntFormat) and not fmt.signed:
        return f"{fmt.name} has zero points, which 8-bit operands do not take"
    if operand == "s8" and isinstance(fmt, FloatFormat):
        return f"{fmt.name} has values that int8 does not have; e4m3 activations take it"
    if isinstance(fmt, IntFormat):
        return (
            f"{fmt.name} has values that e4m3 does not have; int8 activations take it"
            if fmt.bits > 4 and operand == "e4m3"
            else ""
        )
    fits = fmt.mantissa <= _E4M3_MANTISSA and 2 <= fmt.exponent <= 3
    return "" if fits else f"{fmt.name} has values that e4m3 does not have"


def _sign_and_magnitude(value: int, bits: int) -> int:
    return value if value >= 0 else (1 << (bits - 1)) | (-value - 1)


def _with_one_for_the_sign(b: Builder, word: str, slot: Slot) -> str:
    """Returns one register. Each byte has the magnitude from bit 0 on and the sign in bit 7; one is added to the magnitude if
    the sign is set.

    The GPU shifts the sign and adds it in one instruction (LEA).
    """
    low, sign = slot[0], slot[-1]
    at_zero, negative = b.shift(word, low), b.mask(word, _FOUR << sign)
    mask = _FOUR * ((1 << (len(slot) - 1)) - 1)
    if sign == 7:
        both = b.masked_or(at_zero, mask, negative)
    else:
        both = b.add_words(b.shift(negative, sign - 7), b.mask(at_zero, mask))
    return b.add_words(b.shift(negative, sign), both)


def _moved(b: Builder, word: str, slot: Slot, places: Sequence[int], flip: int = 0) -> str:
    """Returns one register. In each byte, bit i of the code moves from bit slot[i] to bit places[i]. Then the bits of `flip`
    are inverted."""
    views: dict[int, int] = {}
    for bit, place in zip(slot, places, strict=True):
        views[bit - place] = views.get(bit - place, 0) | 1 << place
    result: str | int = 0
    for number, (shift, mask) in enumerate(views.items()):
        view = b.shift(word, shift)
        if number == 0:
            result = b.masked_xor(view, mask * _FOUR, flip * _FOUR) if flip else b.mask(view, mask * _FOUR)
        else:  # `result` has 0 in the places of these bits, or 1 if they are to be flipped
            result = b.masked_xor(view, mask * _FOUR, result)
    assert isinstance(result, str)
    return result
