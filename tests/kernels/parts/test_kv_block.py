"""Packed blocks as PTX: every code in every field becomes its value, and instruction counts. Products are tested in
tests/kernels/sm80/test_packed_attention.py, which executes the whole kernel."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from lowbit.formats.kv import KVFormat, dequantize_rows
from lowbit.hardware.half import widen_half

pytest.importorskip("triton", reason="the kernel is written in Gluon")

from lowbit.kernels.parts.kv_block import KVBlock, code_program

FORMATS = [KVFormat("fp8", 8), KVFormat("int8", 8), KVFormat("int4", 4)]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_code_in_every_field(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.uint32)
    values = dequantize_rows(torch.arange(1 << fmt.bits, dtype=torch.uint8), torch.ones(()).half(), fmt, torch.float64)
    expected = values.numpy() + fmt.offset  # offsets of codes are subtracted later, from the sums
    expected = np.where(np.isnan(expected), np.where(codes == 127, 480.0, -480.0), expected)  # codes of NaN become numbers
    program, fields = code_program(fmt.name), 16 // fmt.bits
    for field in range(fields):
        for half in (0, 1):
            other = np.uint32(0xFFFFFFFF ^ ((1 << fmt.bits) - 1) << (16 * half + fmt.bits * field))
            for rest in (np.uint32(0), other):
                outputs = program.run([codes << np.uint32(16 * half + fmt.bits * field) | rest])
                found = widen_half(outputs[field], "fp16")[:, half]
                factor = 2.0**8 if fmt.name == "fp8" else 2.0**20 if fmt.bits == 4 and field % 2 else 2.0**24
                np.testing.assert_array_equal(found * factor, expected)


def test_instructions_per_value():
    counts = {fmt.name: code_program(fmt.name).count("integer") / (32 // fmt.bits) for fmt in FORMATS}
    assert counts == {"fp8": 1.75, "int8": 0.5, "int4": 0.625}


@pytest.mark.parametrize(("k", "v"), [("int4", "int4"), ("fp8", "int4"), ("int8", "fp8")])
def test_operands_of_a_block(k, v):
    block = KVBlock(k, v, 96)
    assert (block.k_vectors, block.v_vectors) == tuple(3 if fmt == "int4" else 6 for fmt in (k, v))
    assert block.score_asm.count("mma.sync") == 12 and block.value_asm.count("mma.sync") == 12 + (2 if v != "fp8" else 0)
    for text, constraints in (
        (block.score_asm, block.score_constraints),
        (block.value_asm, block.value_constraints),
        (block.load_asm(block.k_vectors), block.load_constraints(block.k_vectors)),
    ):
        operands = {int(number) for number in re.findall(r"\$(\d+)", text)}
        assert operands == set(range(constraints.count(",") + 1))
    assert [block.value_factor(i) for i in range(4)] == ([2.0**24] * 2 + [2.0**20] * 2 if v == "int4" else [2.0**8] * 4)
