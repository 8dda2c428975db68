"""Stages of a pipeline: where their barriers lie, and the order in which stages and phases follow each other."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.pipeline import StageBarriers, advance, previous
from tests.kernels.parts.plain import GL, check_operands, plain

BARRIERS = StageBarriers(start=2048, stages=6, readers=8)


def test_every_barrier_is_made_once():
    made = [(int(at), int(count)) for at, count in re.findall(r"init\S* \[at\+(\d+)\], (\d+);", BARRIERS.init)]
    assert made == [(2048 + 8 * i, 1) for i in range(6)] + [(2048 + 8 * (6 + i), 8) for i in range(6)]
    assert BARRIERS.end == made[-1][0] + 8


def test_ptx_names_its_operands():
    check_operands(BARRIERS.init, "=r,r")
    check_operands(BARRIERS.wait, "=r,r,r,r")
    check_operands(BARRIERS.give, "=r,r,r")
    assert "[at+2048]" in BARRIERS.wait and f"[at+{2048 + 8 * 6}]" in BARRIERS.give


@pytest.mark.parametrize("by", [1, 2])
def test_stages_go_round_and_phases_change_with_each_lap(by):
    config = SimpleNamespace(stages=6)
    stage, phase, seen = 0, 0, []
    for _ in range(3 * 6 // by):
        seen.append((stage, phase))
        stage, phase = plain(advance, gl=GL)(stage, phase, by, config)
    assert seen == [(stage, lap % 2) for lap in range(3) for stage in range(0, 6, by)]
    assert [plain(previous, gl=GL)(stage, config) for stage in range(6)] == [5, 0, 1, 2, 3, 4]
