"""Which tiles are timed for a GEMM, and how their times are compared."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.scaled_gemm import ScaledTile
from lowbit.kernels.choose.tiles import GemmShape, MmaTile, RingTile, WgmmaTile
from lowbit.kernels.choose.tuned import read, written
from lowbit.tune import trials
from lowbit.tune.timing import WrongResult

H200 = typical_machine(90)


@pytest.mark.parametrize(
    "tile",
    [
        RingTile(8, 3, 2, 1, 16, 1, 1), WgmmaTile(64, 2, 8, 4, 2), ScaledTile(True, 2, 256, 4, 2, 8, True),
        MmaTile(128, 2, 8, 1, 4, 2, 2, True),
    ],
)  # fmt: skip
def test_a_tile_is_read_as_it_was_written(tile):
    again = read(written(tile, trials.TILES), trials.TILES)
    assert again == tile and again.__class__ is tile.__class__


def test_the_chosen_tile_is_tried_first_and_those_of_more_tokens_too():
    of = trials.products_of("w6e3m2a16", H200)
    for m in (1, 8, 16, 64, 512):
        tiles = trials.candidate_tiles(of, m, 5120, 13824, (1, 8, 16, 32, 64, 512))
        assert tiles[0] == choose(GemmShape(m, 5120, 13824, 6), H200)
        assert len(tiles) == len(set(tiles)) >= 2
    assert choose(GemmShape(32, 5120, 13824, 6), H200) in trials.candidate_tiles(of, 8, 5120, 13824, (8, 16, 32))


def test_neighbours_are_within_what_the_kernels_take():
    shape = GemmShape(16, 4096, 4096, 4)
    assert trials.neighbours(RingTile(16, 4, 2, 1, 8, 2), shape, H200) == [RingTile(16, 4, 1, 1, 8, 2)]
    assert trials.neighbours(WgmmaTile(16, 2, 8, 1, 2), shape, H200) == [WgmmaTile(16, 2, 8, 4, 2)]  # 32 tiles, 132 SMs
    assert trials.neighbours(WgmmaTile(16, 2, 8, 1, 2), GemmShape(16, 28672, 4096, 4), H200) == []


def test_kernels_of_a_run_do_not_depend_on_sizes():
    """Compiled kernels do not depend on N and K: two weights with the same tiles share kernels. Runs without a GPU."""
    asked = trials.TrialGrid(((8192, 8192), (16384, 8192)), ("w8a16",), (4096,))
    both = trials.kernels(asked, H200)
    one = trials.kernels(trials.TrialGrid(((8192, 8192),), ("w8a16",), (4096,)), H200)
    assert one and {str(each) for each in one} <= {str(each) for each in both} and len(both) < 2 * len(one)


def test_graphs_hold_a_round_of_weights_or_as_many_as_fit():
    assert trials.launches(5.0, 18) == trials.MOST_LAUNCHES
    assert trials.launches(50.0, 4) == 10
    assert trials.launches(50.0, 40) == 40
    assert trials.launches(500.0, 40) == 5
    assert trials.launches(5000.0, 2) == 2


def test_the_chosen_tile_is_always_timed_again():
    tiles = [RingTile(8, row_blocks, 1, 1, 8, 1) for row_blocks in range(1, 7)]
    times = dict(zip(tiles, (10.0, 9.0, 9.1, 9.2, 9.3, 12.0), strict=True))
    assert trials.finalists(times, tiles[0]) == [tiles[1], tiles[2], tiles[3], tiles[0]]
    assert trials.finalists({tiles[1]: 9.0}, tiles[0]) == [tiles[1]]  # the chosen one failed


def test_a_wrong_row_is_found():
    reference = torch.randn(64, 256, dtype=torch.float16)
    trials.check(reference * 1.0005, reference)
    wrong = reference.clone()
    wrong[3] = 0
    with pytest.raises(WrongResult, match="worst row 1"):
        trials.check(wrong, reference)
    wrong[3, 5] = float("nan")
    with pytest.raises(WrongResult):
        trials.check(wrong, reference)
