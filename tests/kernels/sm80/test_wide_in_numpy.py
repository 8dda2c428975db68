"""Registers as operand A of the kernel for many tokens: the matrix that it makes of them is the one that mma.sync sees."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.kernels.sm80.wide_mixed_gemm import join, operand_of
from tests.kernels.parts.plain import GL, Array, plain


def elements_of(text, constraints, inputs, dtype, is_pure, pack):
    """Elements of whole registers, which are numbers of registers here."""
    (whole,) = inputs
    return whole * pack + np.arange(pack)


@pytest.mark.parametrize(("warps_n", "strips"), [(4, 4), (2, 2), (8, 1)])
@pytest.mark.parametrize("turn_registers", [4, 8, 16])
def test_the_matrix_is_what_the_instruction_reads(warps_n, strips, turn_registers):
    lanes = 32 * warps_n
    decode = SimpleNamespace(turn_registers=turn_registers, operand_type=None)
    config = SimpleNamespace(
        decode=decode, registers_layout=None, operand_layout=None, strips=strips, warps_n=warps_n, rows=16 * strips * warps_n
    )
    joined = plain(join, gl=GL)
    joined.__globals__["join"] = joined
    of = plain(operand_of, gl=SimpleNamespace(**vars(GL), inline_asm_elementwise=elements_of), join=joined, STEP_REGISTERS=4)
    count = strips * turn_registers
    registers = tuple((np.arange(lanes) * count + i).view(Array) for i in range(count))
    for step in range(turn_registers // 4):
        made = of(registers, step, config)
        for strip in range(strips):
            for warp in range(warps_n):
                held = (np.arange(32)[:, None] + 32 * warp) * count + strip * turn_registers + 4 * step + np.arange(4)
                expected = MMA_M16N8K16_F16.a.scatter(2 * held[..., None] + np.arange(2))
                first = 16 * (strip * warps_n + warp)
                assert np.array_equal(made[first : first + 16], expected)
