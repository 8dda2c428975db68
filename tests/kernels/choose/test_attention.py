"""The choice of tile for paged attention: the number of parts agrees with the kernel, measured cases, refusals."""

from __future__ import annotations

import itertools

import pytest

from lowbit.hardware.machine import MACHINES, typical_machine
from lowbit.kernels.choose.attention import (
    AttentionShape,
    DecodeTile,
    attention_refusals,
    candidates_decode,
    choose_decode,
    combine_round,
    modelled_us,
    registers,
)

H200 = typical_machine(90)
LLAMA = AttentionShape(32, 8, 128, 128**-0.5, 128)


def shape(heads, kv_heads, head_dim, **options):
    return AttentionShape(heads, kv_heads, head_dim, 1.0, **{"rotary_dim": head_dim, **options})


@pytest.mark.parametrize(
    ("rows", "context", "tile", "us"),
    [  # measured by python -m benchmarks.tuning.attention, H200, 2026-11-22
        (1, 8192, DecodeTile(32, 64, 64, 4), 15.1),
        (1, 32768, DecodeTile(32, 64, 64, 4), 46.3),
        (4, 1024, DecodeTile(16, 64, 16, 1), 10.8),
        (4, 8192, DecodeTile(16, 64, 32, 2), 39.5),
        (16, 256, DecodeTile(4, 64, 16, 1), 9.8),
        (16, 1024, DecodeTile(4, 64, 16, 1), 28.0),
        (16, 1024, DecodeTile(8, 64, 16, 1), 20.9),
        (16, 1024, DecodeTile(16, 64, 16, 1), 25.6),
        (16, 8192, DecodeTile(8, 64, 16, 1), 129.5),
        (64, 1024, DecodeTile(2, 256, 16, 1), 66.4),
        (64, 8192, DecodeTile(2, 256, 16, 1), 490.4),
    ],
)
def test_the_model_is_near_what_was_measured(rows, context, tile, us):
    assert abs(modelled_us(tile, rows, LLAMA, context, context, H200) / us - 1) < 0.25


@pytest.mark.parametrize(("rows", "longest"), itertools.product((1, 4, 16, 64), (2048, 8192, 65536)))
def test_the_choice_is_near_the_best_that_was_measured(rows, longest):
    """`best` is from the measurement above: the microseconds of the fastest of up to ten tiles for each batch and context."""
    best = {(1, 1024): 5.2, (1, 8192): 15.1, (4, 1024): 10.1, (4, 8192): 39.5, (4, 32768): 130.9, (16, 1024): 20.9,
            (16, 8192): 129.5, (16, 32768): 495.0, (64, 1024): 66.4, (64, 8192): 490.4, (64, 32768): 1974.5}  # fmt: skip
    tile = choose_decode(rows, LLAMA, longest, H200)
    for (at, context), us in best.items():
        if at == rows and context <= longest // 2:
            assert modelled_us(tile, rows, LLAMA, context, context, H200) < 1.3 * us, (context, tile)


def test_a_part_is_whole_blocks():
    with pytest.raises(ValueError, match="64 tokens are no multiple of 128"):
        DecodeTile(4, 64, 128, 4)


def test_parts_have_work_and_cover_all_tokens():
    for tile in (DecodeTile(16, 64, 32, 2), DecodeTile(7, 48, 16, 1), DecodeTile(1, 64, 64, 1), DecodeTile(64, 128, 128, 4)):
        for tokens in range(0, 3000, 7):
            active, blocks = tile.active(tokens), -(-tokens // tile.block)
            per = max(1, -(-blocks // active))
            assert 1 <= active <= tile.splits
            assert blocks == 0 or (active - 1) * per < blocks <= active * per, "no part is empty, none is left over"


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.product)
@pytest.mark.parametrize(
    "given", [LLAMA, shape(16, 16, 64), shape(9, 3, 64), shape(4, 1, 256), shape(32, 2, 80), shape(40, 10, 96)]
)
def test_there_is_a_tile_for_every_batch(machine, given):
    for longest in (128, 4096, 131072):
        tiles = [choose_decode(rows, given, longest, machine) for rows in (1, 2, 8, 24, 64, 256)]
        assert all(128 % tile.block == 0 and tile.chunk % tile.block == 0 and registers(tile, given) <= 255 for tile in tiles)
        assert tiles[-1].splits <= tiles[0].splits or longest > 4096
        invariant = {choose_decode(rows, given, longest, machine, batch_invariant=True) for rows in (1, 2, 8, 24, 64, 256)}
        assert len(invariant) == 1


def test_long_contexts_keep_the_memory_busy_and_short_windows_need_few_parts():
    tile = choose_decode(1, LLAMA, 32768, H200)
    under_way = min(8 * tile.active(32768), H200.sm_count * 8) * tile.block * 128 * 4
    assert under_way > 4 << 20, "what 4.6 TB/s bring in 0.8 us"
    assert choose_decode(1, shape(32, 8, 128, window=128), 32768, H200).splits <= 2


def test_refusals_are_listed():
    assert attention_refusals(LLAMA) == ()
    assert attention_refusals(shape(34, 2, 64)) == ("at most 16 heads share a kv head, got 17",)
    assert attention_refusals(shape(5, 2, 64)) == ("5 heads are no multiple of 2 kv heads",)
    assert attention_refusals(shape(8, 2, 100)) == ("heads have 16 to 256 elements, a multiple of 8, got 100",)
    assert attention_refusals(shape(8, 2, 512, rotary_dim=64)) == ("heads have 16 to 256 elements, a multiple of 8, got 512",)
    assert attention_refusals(shape(8, 2, 64, rotary_dim=66)) == ("rotary_dim is even and at most head_dim 64, got 66",)
    with pytest.raises(ValueError, match="at most 16 heads share a kv head, got 32"):
        choose_decode(1, shape(32, 1, 64), 1024, H200)


def test_candidates_say_why_not():
    wide = candidates_decode(1, shape(8, 2, 256), 4096, H200)
    assert {row.tile.warps for row in wide if not row.reasons} == {4}
    assert {reason for row in wide for reason in row.reasons} == {
        "a product takes 16 tokens, not 8", "its warps would all multiply the same 16 tokens",
    }  # fmt: skip
    assert str(DecodeTile(16, 64, 32, 2)) == "at most 16 parts of at least 64 tokens, 32 tokens at a time by 2 warps"
    assert str(DecodeTile(1, 64, 16, 1)) == "tokens not cut, 16 tokens at a time by 1 warp"


def test_a_round_of_the_combination_fits_the_registers():
    assert [combine_round(warps, LLAMA) for warps in (1, 2, 4)] == [8, 16, 16]
    assert [combine_round(1, shape(heads, 1, 256)) for heads in (1, 8, 16)] == [16, 2, 1]
