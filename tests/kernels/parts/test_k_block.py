"""One k block of mma.sync as PTX: the products, the scales and the order of operands."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.k_block import BLOCK_MMAS, KBlock
from tests.kernels.parts.plain import check_operands

FORMATS = ["int2", "int3", "uint4", "int4", "int5", "int8", "fp6_e3m2", "fp4_e2m1", "fp8_e4m3"]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [8, 16])
def test_ptx_names_its_operands(fmt, tokens):
    for group, zero in [(0, "none"), *itertools.product((16, 32, 64, 128), ("none", "integer", "float"))]:
        step = KBlock(fmt, "bf16", tokens, group, zero, "fp16")
        check_operands(step.asm, step.constraints)
        assert step.asm.count("mma.sync") == BLOCK_MMAS * step.n8_tiles and len(step.types) == step.accumulators
        if step.sums:
            check_operands(step.sum_asm, step.sum_constraints)
            assert step.sums == 2 * step.groups * step.n8_tiles and zero != "none"
