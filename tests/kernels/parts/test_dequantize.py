"""PTX that dequantizes tiles of 16-bit operands: it reads every input word and writes every output register."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import number_format
from lowbit.hardware.conversions import subnormal_codes
from lowbit.kernels.parts.dequantize import Dequantizer
from tests.kernels.parts.plain import check_operands, operands

FORMATS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "fp6_e3m2", "fp6_e2m3", "fp5_e2m2", "fp4_e2m1", "fp8_e4m3"]


@pytest.mark.parametrize("fmt", FORMATS)
def test_planes_are_the_words_of_a_tile(fmt):
    dequantizer = Dequantizer(fmt, "fp16", 128, "none", "fp16")
    ends = [dequantizer.plane_start(p) + 32 * dequantizer.plane_words(p) for p in range(dequantizer.planes)]
    assert [dequantizer.plane_start(p) for p in range(dequantizer.planes)] == [0, *ends[:-1]] and ends[
        -1
    ] == 32 * dequantizer.bits


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("group", [0, 16, 64, 128])
def test_ptx_names_its_operands(fmt, group):
    halves = ("fp16", "bf16")
    for dtype, scale_dtype, zero in itertools.product(halves, halves, ("none", "integer", "float") if group else ("none",)):
        dequantizer = Dequantizer(fmt, dtype, group, zero, scale_dtype)
        check_operands(dequantizer.asm, dequantizer.constraints)
        assert len(dequantizer.types) == 16 and dequantizer.pair_words == (
            2 * dequantizer.scale_words if group < 128 else dequantizer.scale_words
        )


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize(("dtype", "scale_dtype"), [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "bf16")])
def test_codes_as_subnormal_numbers(bits, dtype, scale_dtype):
    """After masking, each register takes one fma, in bf16 and in fp16."""
    dequantizer = Dequantizer(f"int{bits}", dtype, 64, "none", scale_dtype, True)
    check_operands(dequantizer.asm, dequantizer.constraints)
    scales = len(set(subnormal_codes(number_format(f"int{bits}"), "bf16").up))
    own = 0 if dtype == "fp16" else scales + 1  # bf16 also multiplies by fma: the scale of each bit position, and the offset
    assert dequantizer.asm.count(f"fma.rn.{'f16x2' if dtype == 'fp16' else 'bf16x2'}") == 16 + own
    assert "sub." not in dequantizer.asm and dequantizer.epilogue_factor == 2.0**24


@pytest.mark.parametrize("bits", range(2, 8))
def test_scales_with_more_digits_than_bf16(bits):
    """bf16 weights with fp16 scales never use the subnormal dequantization, so that the flag changes nothing."""
    plain, marked = (Dequantizer(f"int{bits}", "bf16", 64, "none", "fp16", subnormal) for subnormal in (False, True))
    assert plain.asm == marked.asm and marked.epilogue_factor == 1.0


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("group", "subnormal"), [(0, False), (16, False), (32, True), (128, True)])
def test_turns_are_a_tile(fmt, group, subnormal):
    """The dequantization blocks of a tile cover it: each has whole matrix instructions and uses only its own words and
    groups.
    """
    subnormal = subnormal and fmt in SUBNORMAL
    halves = ("fp16", "bf16")
    for dtype, scale_dtype, zero in itertools.product(halves, halves, ("none", "integer", "float") if group else ("none",)):
        dequantizer = Dequantizer(fmt, dtype, group, zero, scale_dtype, subnormal and zero == "none")
        assert dequantizer.block_registers % 4 == 0 and dequantizer.blocks * dequantizer.block_registers == 16
        assert dequantizer.blocks * dequantizer.block_words == dequantizer.bits
        needed = [group for block in range(dequantizer.blocks) for group in dequantizer.block_groups(block)]
        assert sorted(set(needed)) == list(range(dequantizer.groups)) and needed == sorted(needed)
        if group:
            check_operands(dequantizer.prepare_asm, dequantizer.prepare_constraints)
        for block in range(dequantizer.blocks):
            text, count = dequantizer.block_asm(block), dequantizer.block_constraints(block).count(",") + 1
            if dequantizer.masked:  # groups may differ in which shifted words they need
                assert (
                    operands(text) <= set(range(count))
                    and len(operands(text)) >= dequantizer.block_registers + dequantizer.block_words
                )
            else:
                check_operands(text, dequantizer.block_constraints(block))


SUBNORMAL = ("int2", "int3", "int4", "int5", "int6", "int7")


@pytest.mark.parametrize("fmt", ["int2", "int4", "int6", "int8", "fp6_e3m2"])
@pytest.mark.parametrize(("group", "zero"), [(16, "integer"), (32, "none"), (128, "float")])
def test_turns_do_what_the_whole_does(fmt, group, zero):
    """The dequantization blocks together have the instructions of the whole tile; only names of registers and operands
    differ.
    """
    dequantizer = Dequantizer(fmt, "fp16", group, zero, "fp16")
    arithmetic = re.compile(r"(?:lop3|shr|shl|prmt|sub|mul|fma|and|or)\.\S+ ")
    whole = arithmetic.findall(dequantizer.asm)
    parts = [name for block in range(dequantizer.blocks) for name in arithmetic.findall(dequantizer.block_asm(block))]
    parts += dequantizer.groups * arithmetic.findall(dequantizer.prepare_asm)
    assert sorted(whole) == sorted(parts)
