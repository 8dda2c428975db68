"""PTX that dequantizes tiles of 8-bit operands: it reads every input word and writes every output register."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.byte_dequantize import TILES, ByteDequantizer
from lowbit.kernels.parts.operand import REGISTERS
from tests.kernels.parts.plain import check_operands

NARROW = [*((fmt, "s8") for fmt in ("int2", "int3", "int4", "int5", "int6", "int7")),
          *((fmt, "e4m3") for fmt in ("int2", "int3", "int4", "fp6_e3m2", "fp6_e2m3", "fp5_e2m2", "fp4_e2m1"))]  # fmt: skip


@pytest.mark.parametrize(("fmt", "operand"), NARROW)
def test_ptx_names_its_operands(fmt, operand):
    dequantizer = ByteDequantizer(fmt, operand)
    check_operands(dequantizer.asm, dequantizer.constraints)
    assert len(dequantizer.types) == REGISTERS and dequantizer.operand_type.primitive_bitwidth == 8
    words = [dequantizer.plane_words(p) for p in range(dequantizer.planes)]
    assert sum(words) == dequantizer.bits and [dequantizer.plane_start(p) for p in range(dequantizer.planes)][-1] == 32 * sum(
        words[:-1]
    )
    assert dequantizer.constraints.split(",").count("r") == TILES * dequantizer.bits
