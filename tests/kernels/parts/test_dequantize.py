"""PTX that decodes tiles of 16-bit operands: every word goes in, every register comes out."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import number_format
from lowbit.hardware.conversions import subnormal_codes
from lowbit.kernels.parts.dequantize import Decode
from tests.kernels.parts.plain import check_operands, operands

FORMATS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "fp6_e3m2", "fp6_e2m3", "fp5_e2m2", "fp4_e2m1", "fp8_e4m3"]


@pytest.mark.parametrize("fmt", FORMATS)
def test_planes_are_the_words_of_a_tile(fmt):
    decode = Decode(fmt, "fp16", 128, "none", "fp16")
    ends = [decode.plane_start(p) + 32 * decode.plane_words(p) for p in range(decode.planes)]
    assert [decode.plane_start(p) for p in range(decode.planes)] == [0, *ends[:-1]] and ends[-1] == 32 * decode.bits


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("group", [0, 16, 64, 128])
def test_ptx_names_its_operands(fmt, group):
    halves = ("fp16", "bf16")
    for dtype, scale_dtype, zero in itertools.product(halves, halves, ("none", "integer", "float") if group else ("none",)):
        decode = Decode(fmt, dtype, group, zero, scale_dtype)
        check_operands(decode.asm, decode.constraints)
        assert len(decode.types) == 16 and decode.pair_words == (2 * decode.scale_words if group < 128 else decode.scale_words)


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize(("dtype", "scale_dtype"), [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "bf16")])
def test_codes_as_subnormal_numbers(bits, dtype, scale_dtype):
    """One fma for each register, after masks: in bf16 as in fp16."""
    decode = Decode(f"int{bits}", dtype, 64, "none", scale_dtype, True)
    check_operands(decode.asm, decode.constraints)
    scales = len(set(subnormal_codes(number_format(f"int{bits}"), "bf16").up))
    own = 0 if dtype == "fp16" else scales + 1  # bf16 multiplies by fma: the group's scale for each place, and by the offset
    assert decode.asm.count(f"fma.rn.{'f16x2' if dtype == 'fp16' else 'bf16x2'}") == 16 + own
    assert "sub." not in decode.asm and decode.epilogue_factor == 2.0**24


@pytest.mark.parametrize("bits", range(2, 8))
def test_scales_with_more_digits_than_bf16(bits):
    """Weights in bf16 with scales in fp16 are decoded as ever."""
    plain, marked = (Decode(f"int{bits}", "bf16", 64, "none", "fp16", subnormal) for subnormal in (False, True))
    assert plain.asm == marked.asm and marked.epilogue_factor == 1.0


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("group", "subnormal"), [(0, False), (16, False), (32, True), (128, True)])
def test_turns_are_a_tile(fmt, group, subnormal):
    """Each decodes whole matrix instructions, with the words and the groups that are its own."""
    subnormal = subnormal and fmt in SUBNORMAL
    halves = ("fp16", "bf16")
    for dtype, scale_dtype, zero in itertools.product(halves, halves, ("none", "integer", "float") if group else ("none",)):
        decode = Decode(fmt, dtype, group, zero, scale_dtype, subnormal and zero == "none")
        assert decode.turn_registers % 4 == 0 and decode.turns * decode.turn_registers == 16
        assert decode.turns * decode.turn_words == decode.bits
        needed = [group for turn in range(decode.turns) for group in decode.turn_groups(turn)]
        assert sorted(set(needed)) == list(range(decode.groups)) and needed == sorted(needed)
        if group:
            check_operands(decode.ready_asm, decode.ready_constraints)
        for turn in range(decode.turns):
            text, count = decode.turn_asm(turn), decode.turn_constraints(turn).count(",") + 1
            if decode.masked:  # codes of one group need not stay up as far as those of another
                assert operands(text) <= set(range(count)) and len(operands(text)) >= decode.turn_registers + decode.turn_words
            else:
                check_operands(text, decode.turn_constraints(turn))


SUBNORMAL = ("int2", "int3", "int4", "int5", "int6", "int7")


@pytest.mark.parametrize("fmt", ["int2", "int4", "int6", "int8", "fp6_e3m2"])
@pytest.mark.parametrize(("group", "zero"), [(16, "integer"), (32, "none"), (128, "float")])
def test_turns_do_what_the_whole_does(fmt, group, zero):
    """Line by line: only the names of registers and operands differ."""
    decode = Decode(fmt, "fp16", group, zero, "fp16")
    arithmetic = re.compile(r"(?:lop3|shr|shl|prmt|sub|mul|fma|and|or)\.\S+ ")
    whole = arithmetic.findall(decode.asm)
    parts = [name for turn in range(decode.turns) for name in arithmetic.findall(decode.turn_asm(turn))]
    parts += decode.groups * arithmetic.findall(decode.ready_asm)
    assert sorted(whole) == sorted(parts)
