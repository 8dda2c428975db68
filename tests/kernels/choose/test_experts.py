"""The choice of tile for products of experts: rows per tile, expected numbers of tiles, candidates that fit."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit.hardware.machine import MACHINES, typical_machine
from lowbit.kernels.choose.experts import (
    ExpertShape,
    candidates,
    choose,
    expert_blocks,
    experts_hit,
    most_slots,
    ring_bytes,
    tile_rows_for,
    tiles_expected,
)
from lowbit.kernels.choose.tiles import INVARIANT_WARPS, MmaTile, RingTile, WgmmaTile
from tests.kernels.routing import choices, routing_of

H200 = typical_machine(90)
MODELS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral-8x7B": (8, 2, 4096, 14336), "gpt-oss-20b": (32, 4, 2880, 2880),
    "OLMoE-1B-7B": (64, 8, 2048, 1024),
}  # fmt: skip
"""(experts, experts per token, hidden size, size of an expert)."""


@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "rows"), [(1, 8, 128, 8), (16, 8, 128, 8), (64, 2, 8, 16), (40, 4, 32, 8)]
)
def test_expected_tiles_are_those_of_random_choices(tokens, top_k, count, rows):
    generator, found, hit = torch.Generator().manual_seed(tokens), [], []
    for _ in range(300):
        routing = routing_of(choices(tokens, top_k, count, generator), count, rows)
        found.append(int(routing.tile_count))
        hit.append(int((routing.offsets.diff() > 0).sum()))
    mean, deviation = tiles_expected(tokens, top_k, count, rows)
    found, hit = torch.tensor(found).double(), torch.tensor(hit).double()
    assert abs(found.mean() - mean) <= 0.02 * mean and abs(hit.mean() - experts_hit(tokens, top_k, count)) <= 0.02 * mean
    # The experts share a fixed number of slots. So their numbers of tiles vary less than independent ones.
    assert float(found.std()) <= deviation + 0.3


def test_more_rows_take_larger_tiles():
    rows = [tile_rows_for(tokens, 8, 128, 4) for tokens in (1, 4, 16, 64, 256, 1024, 4096)]
    assert rows == sorted(rows) and rows[:4] == [8, 8, 8, 8] and rows[-1] == 128
    assert {tile_rows_for(tokens, 8, 128, 4, batch_invariant=True) for tokens in (1, 64, 1024, 65536)} == {8, 16}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.product)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_tile_that_fits(name, machine):
    count, top_k, hidden, size = MODELS[name]
    for bits in (4, 6, 8):
        for n, k, per_slot in ((2 * size, hidden, False), (hidden, size, True)):
            for tokens in (1, 4, 16, 64, 256, 1024):
                rows = tile_rows_for(tokens, top_k, count, bits)
                shape = ExpertShape(tokens, top_k, count, n, k, bits, rows, per_slot)
                tile = choose(shape, machine)
                assert isinstance(tile, RingTile if rows <= 16 else MmaTile | WgmmaTile) and tile.tokens == rows
                if isinstance(tile, RingTile):
                    assert ring_bytes(tile, shape) <= machine.arch.shared_per_block_bytes
                    assert (
                        tile.depth <= most_slots(rows, bits, tile.row_blocks)
                        and 1 <= expert_blocks(shape, tile, machine) <= machine.sm_count
                    )
                assert math.isfinite(candidates(shape, machine)[0].cost_us)


def test_batch_invariant_tiles_share_k_alike():
    for tokens, rows in ((1, 8), (300, 16)):
        shape = ExpertShape(tokens, 8, 128, 1536, 2048, 4, rows)
        tiles = [row.tile for row in candidates(shape, H200, batch_invariant=True)]
        assert tiles and {tile.warps_k for tile in tiles} == {INVARIANT_WARPS}
    with pytest.raises(ValueError, match="batch-invariant products of experts have tiles of 8, 16 rows, .* tiles of 64"):
        choose(ExpertShape(300, 8, 128, 1536, 2048, 4, 64), H200, True)
    with pytest.raises(ValueError, match="have tiles of 8, 16, 64, 128 rows, the routing has tiles of 32"):
        choose(ExpertShape(300, 8, 128, 1536, 2048, 4, 32), H200)


def test_one_token_of_qwen3_is_one_wave():
    """8 experts x 96 row blocks make 128 tasks of 6 row blocks, and 8 x 128 make 128 tasks of 8: one wave on 132 SMs."""
    for n, k, row_blocks in ((1536, 2048, 6), (2048, 768, 8)):
        tile = choose(ExpertShape(1, 8, 128, n, k, 4, 8, n == 2048), H200)
        assert tile.tile_row_blocks == row_blocks
