"""The order of instructions within a stage: all copies and all dequantization have a place, before the instructions that use
them. The main loop around a stage is tested in tests/kernels/parts/test_mma_loop.py."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.mma_loop import STEPS, StageOrder
from lowbit.kernels.parts.tile_stage import StageCopy, TileStage

CASES = [
    (tokens, row_blocks, count) for tokens in (8, 16, 32, 64, 128, 256) for row_blocks in (1, 2, 4) for count in (1, 3, 7, 20)
]


def order(tokens, row_blocks, count):
    return StageOrder(tokens, row_blocks, tuple(StageCopy("x", turn) for turn in range(count)))


@pytest.mark.parametrize(("tokens", "row_blocks", "count"), CASES)
def test_every_copy_starts_before_the_next_stage_is_waited_for(tokens, row_blocks, count):
    made = order(tokens, row_blocks, count)
    firsts = [made.first_copy(position) for position in range(made.positions + 1)]
    assert firsts == sorted(firsts) and firsts[0] == 0
    waited = made.positions - made.ahead
    assert set(firsts[waited:]) == {count}, "all of them before"
    assert max(b - a for a, b in itertools.pairwise(firsts)) <= -(-count // waited) * 2, "spread over the stage"


@pytest.mark.parametrize(("tokens", "row_blocks", "count"), CASES)
def test_every_strip_is_decoded_once_a_step_of_words_that_are_there(tokens, row_blocks, count):
    made = order(tokens, row_blocks, count)
    for step in range(STEPS):
        positions = range(step * made.chunks, (step + 1) * made.chunks)
        dequantized = [row_block for p in positions for row_block in range(made.first_row_block(p), made.end_row_block(p))]
        assert dequantized == list(range(row_blocks))
        assert {made.next_step(p) for p in positions} == {(step + 1) % STEPS}
    before = [p for p in range(made.positions) if p < made.positions - made.ahead and made.next_step(p) == 0]
    assert all(made.first_row_block(p) == made.end_row_block(p) for p in before), "of the next stage none before it is there"


def test_chunks_of_a_large_tile():
    made = order(128, 2, 7)
    assert (made.chunks, made.positions, made.ahead) == (4, 16, 4)
    assert [made.first_copy(p) for p in range(17)] == [0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 5, *[7] * 6]


@pytest.mark.parametrize(("fmt", "slices"), [("int3", 1), ("int7", 1), ("int4", 2)])
def test_copies_of_a_stage_are_all_its_vectors(fmt, slices):
    stage = TileStage(Dequantizer(fmt, "fp16", 64, "integer", "fp16"), 128, 16, 3, 8, slices)
    made = StageOrder(128, 2, stage.copies)
    kinds = [made.copy(i) for i in range(made.copy_count)]
    assert len(set(kinds)) == len(kinds)
    assert [sum(copy.of == of for copy in kinds) for of in ("x", "scales")] == [stage.x_copies, stage.scale_copies]
    for plane in range(len(stage.planes)):
        assert sum(copy.of == "codes" and copy.plane == plane for copy in kinds) == stage.code_copies(plane)
