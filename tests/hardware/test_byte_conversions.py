"""Every conversion to 8-bit operands, over every code at every position of a word, executed bit-exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowbit.formats import FloatFormat, decode, float_format, int_format, uint_format
from lowbit.hardware.byte_conversions import byte_conversion

FLOATS = [float_format(e, m) for e, m in ((3, 3), (3, 2), (2, 3), (2, 2), (2, 1))]
CASES = [(int_format(b), "s8") for b in range(2, 8)] + [(int_format(b), "e4m3") for b in (2, 3, 4)]
CASES += [(f, "e4m3") for f in FLOATS]


def pack(codes, conversion):
    """Packs codes [cases, registers, 4] into words, bit by bit."""
    if conversion.stored:
        codes = np.array(conversion.stored, np.uint8)[codes]
    words = [np.zeros(len(codes), np.uint32) for _ in range(conversion.fields.words)]
    for register, places in enumerate(conversion.fields.places):
        for element in range(4):
            for bit, (word, at) in enumerate(places):
                part = (codes[:, register, element].astype(np.uint32) >> np.uint32(bit)) & np.uint32(1)
                words[word] |= part << np.uint32(at + 8 * element)
    return words


@pytest.mark.parametrize(("fmt", "operand"), CASES, ids=lambda c: getattr(c, "name", c))
def test_every_code_in_every_place(fmt, operand):
    c = byte_conversion(fmt, operand)
    places = 4 * c.registers
    every = np.arange(1 << fmt.bits, dtype=np.uint8)
    codes = np.random.default_rng(0).choice(every, (places, len(every), places))
    for place in range(places):
        codes[place, :, place] = every
    codes = codes.reshape(-1, c.registers, 4)
    held = torch.from_numpy(c.run(pack(codes, c)).copy())
    numbers = held.view(torch.int8 if operand == "s8" else torch.float8_e4m3fn).double() * c.scale_factor
    expected = decode(torch.from_numpy(codes), fmt, torch.float64)
    assert torch.equal(numbers, expected)
    if isinstance(fmt, FloatFormat):
        assert torch.equal(numbers.signbit(), expected.signbit()), "the sign of zero is kept"


def test_what_int4_costs():
    assert byte_conversion(int_format(4), "s8").program.count("integer") == 3, "for eight weights"
    # Three shifts are fused with the following addition (LEA): 8 instructions for eight weights.
    assert byte_conversion(int_format(4), "e4m3").program.count("integer") == 11
    assert byte_conversion(float_format(3, 2), "e4m3").integer_per_weight <= 0.9


@pytest.mark.parametrize(
    ("fmt", "operand", "why"),
    [
        (int_format(8), "s8", "needs no conversion"),
        (uint_format(4), "s8", "has zero points"),
        (float_format(3, 2), "s8", "values that int8 does not have"),
        (int_format(5), "e4m3", "int8 activations take it"),
        (float_format(5, 1), "e4m3", "values that e4m3 does not have"),
    ],
)
def test_what_does_not_fit_says_why(fmt, operand, why):
    with pytest.raises(ValueError, match=why):
        byte_conversion(fmt, operand)
