"""Products by wgmma on registers that the kernel allocates itself. Tests the descriptors of the weights, constraints, loads and
stores."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.thread_product import (
    ThreadProduct,
    fence_asm,
    fence_constraints,
    load_asm,
    load_constraints,
    shared_asm,
    store_asm,
    store_constraints,
    wait_asm,
    wait_constraints,
)
from tests.kernels.parts.plain import check_operands, operands
from tests.kernels.parts.threads import run


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("outputs", "row_bytes"), [(64, 32), (64, 64), (32, 64)])
def test_a_product_reads_its_piece(outputs, row_bytes, adds):
    part = ThreadProduct(outputs, row_bytes, True, 20480)
    text = part.start(3, 2, adds)
    count = len(part.constraints(2, adds).split(","))
    assert operands(text) == set(range(count)) - (set(range(part.sums, 2 * part.sums)) if adds else set())
    places = [16 * int(n) for n in re.findall(r"add.u32 low, \$\d+, (\d+);", text)]
    # One piece holds two steps of K if its rows are wider than 32 bytes, otherwise one step.
    wanted = [20480 + (3 + 32 * i // row_bytes) * outputs * row_bytes + 32 * i % row_bytes for i in range(2)]
    assert places == wanted and text.count(f"m64n{outputs}k32.s32.u8.s8") == 2
    assert [int(flag) for flag in re.findall(r"setp.ne.b32 add, (\d), 0", text)] == [int(adds), 1]
    assert "s8.s8" in ThreadProduct(outputs, row_bytes, False, 0).start(0, 1, adds)


def test_the_base_is_a_descriptors_address():
    (base,) = run(ThreadProduct(64, 32, True, 0).base, [np.zeros(32)], 1, start=1024)
    assert (base == 1024 // 16).all()


@pytest.mark.parametrize("words", [2, 4])
def test_words_of_memory(words):
    check_operands(load_asm.fn(64, words), load_constraints.fn(words))
    check_operands(store_asm.fn(64, words), store_constraints.fn(words))
    assert f"ld.global.v{words}.b32" in load_asm.fn(64, words) and "+64]" in store_asm.fn(64, words)
    check_operands(shared_asm.fn(128), "=f,=f,=f,=f,r")


def test_registers_wait_and_are_kept():
    check_operands(fence_asm.fn(8), fence_constraints.fn(8))
    assert wait_constraints.fn(3) == "=r,=r,=r,0,1,2" and wait_asm.fn(1) == "wgmma.wait_group.sync.aligned 1;"
