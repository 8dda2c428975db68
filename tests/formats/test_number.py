"""Formats are compared with independent facts: exact fractions, torch's fp8 types, the tables of the papers."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from lowbit.formats import code_values, float_format, int_format, number_format, uint_format
from tests.formats import ALL_FORMATS, FLOAT_FORMATS


@pytest.mark.parametrize("fmt", FLOAT_FORMATS, ids=lambda f: f.name)
def test_float_values_by_exact_fractions(fmt):
    bias = 2 ** (fmt.exponent - 1) - 1
    for code, value in enumerate(code_values(fmt).tolist()):
        bits = f"{code:0{fmt.bits}b}"
        sign, field, fraction = bits[0], int(bits[1 : 1 + fmt.exponent], 2), int(bits[1 + fmt.exponent :] or "0", 2)
        if value != value or abs(value) == float("inf"):
            assert fmt.special != "none" and field == 2**fmt.exponent - 1
            continue
        if field == 0:
            exact = Fraction(fraction, 2**fmt.mantissa) * Fraction(2) ** (1 - bias)
        else:
            exact = (1 + Fraction(fraction, 2**fmt.mantissa)) * Fraction(2) ** (field - bias)
        assert Fraction(value) == (-exact if sign == "1" else exact)


@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_decodes_as_torch(name, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(code_values(number_format(name)).nan_to_num(nan=7e7), codes.view(dtype).float().nan_to_num(nan=7e7))


def test_published_ranges():
    assert number_format("fp6_e3m2").max == 28  # 2^4 x 1.75, ZeroQuant(4+2)
    assert number_format("fp6_e2m3").max == 7.5
    assert number_format("fp5_e2m2").max == 7
    assert number_format("fp4_e2m1").max == 6
    assert number_format("fp8_e4m3").max == 448
    assert number_format("fp8_e5m2").max == 57344
    assert (int_format(4).min, int_format(4).max) == (-8, 7)
    assert (uint_format(4).min, uint_format(4).max) == (0, 15)


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda f: f.name)
def test_name_round_trip(fmt):
    assert number_format(fmt.name) == fmt


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("int1", "have 2 to 8 bits, got 1"), ("int9", "have 2 to 8 bits, got 9"), ("fp6_e3m3", "mantissa bits are 7, not 6"),
        ("fp9_e4m4", "3 to 8 bits in all .* got e4m4"), ("fp2_e1m0", "3 to 8 bits in all .* got e1m0"),
        ("nf4", "unknown number format 'nf4'; supported: int2..int8"), ("", "unknown number format ''; supported: int2..int8"),
    ],
)  # fmt: skip
def test_unknown_names_are_refused(bad, why):
    with pytest.raises(ValueError, match=why):
        number_format(bad)


def test_float_format_bounds():
    with pytest.raises(ValueError, match="at least 1 exponent bit"):
        float_format(0, 3)
