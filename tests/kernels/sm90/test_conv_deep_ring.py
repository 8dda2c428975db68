"""Stages of weights: each barrier expects as many bytes as its copies transfer."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.sm90.conv_deep import WeightRing
from tests.kernels.parts.plain import operands


def test_a_stage_is_filled_when_it_was_read():
    ring = WeightRing(StageBarriers(50000, 5, 12), 8192, 16384, 50176, 2, 512)
    assert operands(ring.copy) == {0, 1, 2, 3}
    assert f"[bar+{50000 + 8 * 5}], $2" in ring.copy, "its empty barrier"
    assert "add.u32 bar, bar, 50000; add.u32 to, to, 8192;" in ring.copy and ring.copy.count("16384") == 3


@pytest.mark.parametrize("tables", [2, 3])
def test_constants_come_with_the_first_weights(tables):
    ring = WeightRing(StageBarriers(50000, 5, 12), 8192, 16384, 50176, tables, 512)
    text = ring.copy_constants
    assert operands(text) == set(range(tables + 1)) and f"[bar], {512 * tables};" in text and "add.u32 bar, at, 50000;" in text
    assert [int(start) for start in re.findall(r"add.u32 to, at, (\d+);", text)] == [50176 + 512 * i for i in range(tables)]
