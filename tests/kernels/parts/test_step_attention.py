"""How tokens of a row are split in a decode step of one launch: as the table in Python says. What a split computes is tested in
test_split_attention.py, the whole stage in tests/kernels/sm90/test_decode_step.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lowbit.kernels.choose.decode_step import StepTable
from tests.kernels.sass import compile_kernel
from tests.kernels.sm90.decode_step_case import small_table
from tests.kernels.warps import execute

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.split_attention import SplitTask
from lowbit.kernels.parts.step_attention import active_splits


@dataclass(frozen=True)
class Splits:
    table: StepTable


@gluon.jit
def splits_of(out, positions, firsts, table, C: gl.constexpr):
    """out int32 [3, 32]: number of splits, tokens of each, and where they start, for 32 rows."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    task = SplitTask(0, 0, 0, gl.load(positions + lane), gl.load(firsts + lane), table)
    active, tokens, start = active_splits(task, C)
    gl.store(out + lane, active)
    gl.store(out + 32 + lane, tokens)
    gl.store(out + 64 + lane, start)


@pytest.mark.parametrize("blocks", [2, 16])
def test_splits_cover_the_tokens_before_the_new_one(blocks):
    table = small_table(blocks=blocks)
    share = table.share_tokens
    positions = torch.tensor([0, 1, share, share + 1, 2 * share, 2 * share + 1, 3 * share, *range(500, 25_000, 980)][:32]).int()
    firsts = torch.where(torch.arange(32) % 2 == 0, 0, (positions - 300).clamp(0)).int()
    names = {"out": "*i32", "positions": "*i32", "firsts": "*i32", "table": "*i32"}
    kernel = compile_kernel(splits_of, names, Splits(table), list(names), 1, 90)
    out, unread = torch.full((3, 32), -1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    execute(kernel.ptx, kernel.shared_bytes, (out, positions, firsts, unread), 1, 32)
    for position, first, (active, tokens, start) in zip(positions.tolist(), firsts.tolist(), out.T.tolist(), strict=True):
        assert start == first // share * share
        assert (active, tokens) == table.active(position - start)
        assert active <= table.splits and start + active * tokens >= position, "every token is in a split"
        assert active == 1 or start + (active - 1) * tokens < position, "no split is empty"
