"""The measurement of attention tiles: which tiles it would time, and one row on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.tuning.attention import CONTEXTS, LLAMA, ROWS, Timed, make_batch, tiles_to_time, time_tiles
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.attention import DecodeTile, attention_refusals, choose_decode
from lowbit.kernels.reference.attention import decode_reference

gpu = pytest.mark.gpu


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_chosen_tile_and_others_of_all_warps_are_timed(rows, context):
    machine = typical_machine(90)
    tiles = tiles_to_time(rows, context, LLAMA, machine, 6)
    assert not attention_refusals(LLAMA)
    assert tiles[0] == choose_decode(rows, LLAMA, context + 128, machine)
    assert {tile.warps for tile in tiles} == {1, 2, 4} and len(set(tiles)) == len(tiles) <= 30


def test_a_batch_has_pages_of_its_own_for_each_row():
    batch = make_batch(3, 256, LLAMA, torch.float32, 2, "cpu")
    assert sorted(batch.tables.flatten().tolist()) == list(range(9)) and len(batch.caches) == 2
    k, v = batch.caches[0]
    out = decode_reference(batch.qkv, k, v, batch.tables, batch.positions, batch.rows, batch.cos_sin, LLAMA)
    assert out.isfinite().all()


def test_a_row_says_what_was_found():
    tile = DecodeTile(16, 64, 32, 2)
    line = str(Timed(1, 1024, tile, True, 5.7, 5.8, 0.92))
    assert line.startswith("B   1 context   1024 *     5.70 us, 0.16 of the bandwidth, model 5.80 us: at most 16 parts")
    assert "out of memory" in str(Timed(1, 1024, tile, False, None, 5.8, 0.92, "out of memory"))


@gpu
def test_tiles_are_timed_and_checked():
    machine = machine_of("cuda")
    tiles = tiles_to_time(4, 1000, LLAMA, machine, 3)
    rows = list(time_tiles(4, 1000, LLAMA, torch.float16, tiles, machine))
    assert [row.error for row in rows] == [None] * len(tiles) and rows[0].chosen
    assert all(row.us is not None and row.us > row.limit_us for row in rows)
