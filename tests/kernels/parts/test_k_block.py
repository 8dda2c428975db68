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


@pytest.mark.parametrize(("fmt", "group"), [("int4", 32), ("int4", 64), ("int4", 128), ("int8", 0), ("int8", 128)])
def test_raw_codes(fmt, group):
    """Raw codes name their operands and need sums of x. They take fewer instructions than converted codes."""
    converted, raw = (KBlock(fmt, "fp16", 8, group, "none", "fp16", is_raw, 2) for is_raw in (False, True))
    assert KBlock.takes_raw(fmt, "fp16", group, "none")
    check_operands(raw.asm, raw.constraints)
    check_operands(raw.sum_asm, raw.sum_constraints)
    assert raw.sums == 4 * max(raw.groups, 1) and converted.sums == 0
    assert raw.asm.count("mma.sync") == converted.asm.count("mma.sync") == BLOCK_MMAS
    assert "sub.f16x2" in converted.asm and "f16x2" not in raw.asm
    assert raw.factor == 2.0**24 * converted.factor


def test_formats_without_raw_codes():
    """Raw codes are refused for other widths, for bf16, with zeros, and with row scales that would not undo the factor."""
    kinds = [("int4", "fp16", 0, "none"), ("int4", "bf16", 128, "none"), ("int4", "fp16", 128, "integer"),
             ("int3", "fp16", 128, "none"), ("fp8_e4m3", "fp16", 0, "none"), ("dense", "fp16", 0, "none")]  # fmt: skip
    assert not any(KBlock.takes_raw(*kind) for kind in kinds)
