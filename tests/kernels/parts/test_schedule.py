"""Order of tiles, shares of K, and the meeting of splits."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.schedule import count, first_token_of, iterations_of, meet, meet_in_turn, part_of, places, tile_at
from tests.kernels.parts.plain import GL, Integer, Pointer, plain


@pytest.mark.parametrize(
    ("tokens", "channels", "splits", "group"), [(1, 7, 1, 2), (5, 3, 4, 2), (8, 4, 3, 8), (3, 9, 2, 8), (1, 7, 4, 0)]
)
def test_every_split_of_every_tile_once(tokens, channels, splits, group):
    config = SimpleNamespace(splits=splits, token_group=group, stream_k=False)
    tiles = SimpleNamespace(of_tokens=tokens, of_channels=channels, iterations=10)
    tile_at_ = plain(tile_at, gl=GL, asm=lambda *given: 0)
    order = [tile_at_(index, tiles, config) for index in range(plain(count)(tiles, config))]
    assert sorted(order) == [(t, c, s) for t in range(tokens) for c in range(channels) for s in range(splits)]
    assert [s for _, _, s in order] == list(range(splits)) * (tokens * channels), "splits of a tile run side by side"
    groups = [t // max(group, 1) for t, _, _ in order]
    assert groups == sorted(groups), "all channels for a group of tokens, then the next group"


@pytest.mark.parametrize(("tokens", "expected"), [(1, [0]), (64, [0]), (65, [0, 1]), (128, [0, 64]), (150, [0, 64, 86])])
def test_tiles_of_tokens_are_full_where_there_are_as_many(tokens, expected):
    tiles = SimpleNamespace(tokens=tokens)
    gl = SimpleNamespace(minimum=min, maximum=max)
    for full, begins in ((True, expected), (False, list(range(0, tokens, 64)))):
        config = SimpleNamespace(tile_tokens=64, last_is_full=full)
        assert [plain(first_token_of, gl=gl)(tile, tiles, config) for tile in range(-(-tokens // 64))] == begins


@pytest.mark.parametrize(("iterations", "splits"), [(10, 1), (10, 3), (7, 4), (4, 4)])
def test_splits_share_k(iterations, splits):
    config, tiles = SimpleNamespace(splits=splits, stream_k=False), SimpleNamespace(iterations=iterations)
    shares = [plain(iterations_of, part_of=plain(part_of))(split, tiles, config) for split in range(splits)]
    assert shares[0][0] == 0 and shares[-1][1] == iterations
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
    assert all(end - begin >= iterations // splits for begin, end in shares)


@pytest.mark.parametrize(("rows", "columns"), [(64, 8), (128, 16), (256, 64), (128, 128)])
def test_the_last_block_gets_the_sum_of_all_splits(rows, columns):
    """Whichever comes last; the counters are then zero again, and no other tile has been touched. Words of a warp are
    neighbours, however many strips it has."""
    splits, tile = 3, Integer(1)
    config = SimpleNamespace(rows=rows, columns=columns, accumulator=None, splits=splits)
    of = plain(places, gl=GL)(config)
    assert sorted(of.reshape(-1)) == list(range(rows * columns))
    for strip in range(rows // 16):
        group, lane = np.arange(8)[:, None], np.arange(4)[None, :]
        words = of[16 * strip + group, 2 * lane].reshape(-1)
        assert np.array_equal(words, words[0] + np.arange(32)) and words[0] % 32 == 0
    partial, arrived = np.full(3 * splits * rows * columns, np.nan), np.zeros(3, dtype=int)
    at = SimpleNamespace(partial=Pointer(partial), arrived=Pointer(arrived))
    sums = np.random.default_rng(0).integers(0, 100, (splits, rows, columns))
    results = [
        plain(meet, gl=GL, barrier=lambda: None, places=plain(places, gl=GL))(at, sums[split], tile, split, config)
        for split in (2, 0, 1)
    ]  # fmt: skip
    assert [bool(last) for last, _ in results] == [False, False, True]
    assert np.array_equal(results[-1][1], sums.sum(0)) and not arrived.any()
    one = splits * rows * columns
    assert np.isnan(partial[:one]).all() and np.isnan(partial[2 * one :]).all() and not np.isnan(partial[one : 2 * one]).any()


def test_splits_in_turn_add_up_the_same():
    """In the order of K whatever the sums; one sum of memory for a tile, and the counter is zero again."""
    rows, columns, splits, tile = 64, 16, 3, Integer(1)
    config = SimpleNamespace(rows=rows, columns=columns, accumulator=None, splits=splits)
    partial, arrived = np.full(2 * rows * columns, np.nan), np.zeros(2, dtype=int)
    at = SimpleNamespace(partial=Pointer(partial), arrived=Pointer(arrived))
    sums = np.random.default_rng(0).standard_normal((splits, rows, columns))
    waited = []
    gl = SimpleNamespace(
        **vars(GL),
        float32=None,
        inline_asm_elementwise=lambda text, takes, given, **_: given[0].memory[given[0].index] + given[1],
    )
    run = lambda text, takes, given: waited.append((int(given[0].index), int(arrived[1]), given[1]))  # noqa: E731
    function = plain(meet_in_turn, gl=gl, barrier=lambda: None, places=plain(places, gl=GL), run=run)
    results = [function(at, sums[split], tile, split, config) for split in range(splits)]
    assert [bool(last) for last, _ in results] == [False, False, True] and not arrived.any()
    assert np.array_equal(results[-1][1], (sums[0] + sums[1]) + sums[2])
    assert waited == [(1, 1, 1), (1, 2, 2)] and np.isnan(partial[: rows * columns]).all()
