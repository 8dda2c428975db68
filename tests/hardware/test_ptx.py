"""Emulated instructions against independent definitions: truth tables, byte lists, NumPy and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.hardware.half import widen_half
from lowbit.hardware.ptx import Builder, lut

WORD = st.integers(0, 2**32 - 1)


def one(build, *inputs):
    """Runs a program of one output on scalars."""
    names = [f"i{n}" for n in range(len(inputs))]
    b = Builder(names)
    return int(b.build([build(b, *names)]).run([np.uint32(i) for i in inputs])[0])


@pytest.mark.parametrize("table", range(256))
def test_lop3_is_its_truth_table(table):
    """Bit i of the table is the result for input bits a, b, c with i = 4 a + 2 b + c."""
    a, b, c = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    got = one(lambda p, x, y, z: p.lop3(x, y, z, table), a, b, c)
    assert got == table * 0x01010101


@given(WORD, WORD, WORD)
def test_lut_of_a_function_computes_it(a, b, c):
    for f in (
        lambda a, b, c: a & b & c,
        lambda a, b, c: a | b | c,
        lambda a, b, c: a & b & ~c,
        lambda a, b, c: (a & b | c) ^ a,
    ):
        assert one(lambda p, x, y, z, f=f: p.lop3(x, y, z, lut(f)), a, b, c) == f(a, b, c) & 0xFFFFFFFF


def test_published_tables():
    assert lut(lambda a, b, c: a & b & c) == 0x80
    assert lut(lambda a, b, c: a | b | c) == 0xFE
    assert lut(lambda a, b, c: a & b & ~c) == 0x40
    assert lut(lambda a, b, c: (a & b | c) ^ a) == 0x1A
    assert lut(lambda a, b, c: (a & b) | c) == 0xEA


@given(WORD, WORD, st.integers(0, 0xFFFF))
def test_prmt_picks_bytes(a, b, selector):
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    expected = []
    for i in range(4):
        digit = (selector >> (4 * i)) & 0xF
        byte = source[digit & 7]
        expected.append((0xFF if byte & 0x80 else 0) if digit & 8 else byte)
    assert one(lambda p, x, y: p.prmt(x, y, selector), a, b) == int.from_bytes(bytes(expected), "little")


@given(WORD, st.integers(-31, 31))
def test_shifts(a, amount):
    expected = a >> amount if amount >= 0 else (a << -amount) & 0xFFFFFFFF
    assert one(lambda p, x: p.shift(x, amount), a) == expected


@given(WORD, WORD)
def test_words_are_added_with_wrap_around(a, b):
    assert one(lambda p, x, y: p.add_words(x, y), a, b) == (a + b) % 2**32


def special_words(n=200_000):
    rng = np.random.default_rng(0)
    return rng.integers(0, 2**32, n, dtype=np.uint32)


@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_arithmetic_equals_torch(operation, dtype):
    """16-bit floats of all kinds, including subnormals, infinities and NaN (a NaN result is the canonical 0x7fff)."""
    a, b = special_words(), special_words()[::-1].copy()
    builder = Builder(["a", "b"])
    (got,) = builder.build([getattr(builder, operation)(dtype, "a", "b")]).run([a, b])
    kind = torch.float16 if dtype == "fp16" else torch.bfloat16
    x, y = (torch.from_numpy(w.view(np.int16).copy()).view(kind).double() for w in (a, b))
    exact = {"add": x + y, "sub": x - y, "mul": x * y}[operation]
    # float64 holds products of 16-bit floats exactly. It also holds sums exactly, unless the terms are far apart. Rounding
    # twice is harmless then.
    expected = exact.float().to(kind) if operation == "mul" and dtype == "bf16" else exact.to(kind)
    got = torch.from_numpy(got.view(np.int16).copy())
    nan = expected.isnan()
    assert torch.equal(got[~nan], expected.view(torch.int16)[~nan])
    assert (got[nan] == 0x7FFF).all()


def exact_half(value: Fraction, dtype: str) -> float:
    """The 16-bit float nearest to a fraction, ties to even, found by search over the adjacent grid points."""
    mantissa, lowest, top = {"fp16": (10, -14, 15), "bf16": (7, -126, 127)}[dtype]
    if value == 0:
        return 0.0
    sign, magnitude = (-1 if value < 0 else 1), abs(value)
    exponent = lowest
    while exponent < top and magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - mantissa)
    units = magnitude / step
    below = units.numerator // units.denominator
    rest = units - below
    below += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1)
    rounded = below * step
    if rounded >= Fraction(2) ** (top + 1):
        return sign * float("inf")
    return sign * float(rounded)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_fma_rounds_once(dtype):
    """Against exact fractions, on random 16-bit floats and on sums constructed to be next to a tie."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, (3, 1500), dtype=np.uint32)
    one_bits = 0x3C00 if dtype == "fp16" else 0x3F80
    # (1 + u)(1 + u) + c with c = 2^-24 and 2^-40: the product is a tie, which the tiny addend breaks.
    tie = np.array([one_bits + 1, one_bits + 1, 0x0001 if dtype == "fp16" else 0x2B80], np.uint32)
    words = np.concatenate([words, np.repeat(tie[:, None], 4, axis=1)], axis=1)
    words[2, -2:] ^= 0x8000
    b = Builder(["a", "b", "c"])
    (got,) = b.build([b.fma(dtype, "a", "b", "c")]).run(list(words))
    values, result = [widen_half(w, dtype) for w in words], widen_half(got, dtype)
    checked = 0
    for i in np.ndindex(result.shape):
        x, y, z = (float(v[i]) for v in values)
        if not np.isfinite([x, y, z]).all():
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert result[i] == exact_half(exact, dtype), (x, y, z)
        checked += 1
    assert checked > 2000


def test_registers_are_written_once_and_read_after():
    from lowbit.hardware.ptx import Mov, Program

    with pytest.raises(ValueError, match="which nothing wrote before"):
        Program(("a",), ("r",), (Mov("r", "x"),))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a second time"):
        Program(("a",), ("a",), (Mov("a", 1),))
    with pytest.raises(ValueError, match="written by no instruction"):
        Program(("a",), ("r",), ())


def test_printed_forms():
    b = Builder(["w"])
    program = b.build([b.sub("fp16", b.masked_or("w", 0x000F000F, 0x64006400), b.constant(0x64086408))])
    assert ("lop3.b32" in program.ptx() and "sub.f16x2" in program.ptx()) or "sub.rn.f16x2" in program.ptx()
    assert b.masked_or("w", 0x000F000F, 0x64006400) == b.masked_or("w", 0x000F000F, 0x64006400), "asked twice, emitted once"
