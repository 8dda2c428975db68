"""Pipeline stages: the addresses of their barriers, and the order of stages and phases."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.pipeline import StageBarriers, advance, previous
from tests.kernels.parts.plain import GL, check_operands, plain

BARRIERS = StageBarriers(start=2048, stages=6, readers=8)


@pytest.mark.parametrize(("stages", "readers"), [(6, 8), (8, 16), (1, 4), (8, 4)])
def test_every_barrier_is_made_once(stages, readers):
    """The first lanes of the warps initialise all barriers, each once. Constants in the PTX state which barriers each warp
    takes."""
    barriers = StageBarriers(start=2048, stages=stages, readers=readers)
    turns = re.findall(
        r"add.u32 number, warp, (\d+); setp.lt.u32 p, number, (\d+); setp.eq.and.u32 p, lane, 0, p;", barriers.init
    )
    (full,) = set(re.findall(r"setp.lt.u32 q, number, (\d+);\nselp.b32 count, 1, (\d+), q;", barriers.init))
    (at,) = set(re.findall(r"@p mbarrier.init\S* \[at\+(\d+)\], count;", barriers.init))
    numbers = [int(first) + warp for first, _ in turns for warp in range(readers)]
    made = sorted((int(at) + 8 * n, 1 if n < int(full[0]) else int(full[1])) for n in numbers if n < int(turns[0][1]))
    assert made == [(2048 + 8 * i, 1 if i < stages else readers) for i in range(2 * stages)]
    assert barriers.end == made[-1][0] + 8


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
