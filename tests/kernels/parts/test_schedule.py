"""The order of tiles, split-K and stream-K, and their reductions."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.schedule import (
    first_token_of,
    iterations_of,
    k_range_of,
    reduce_splits,
    reduce_splits_serially,
    reduce_stream_k,
    stream_k_range,
    tile_at,
    tile_count,
    workspace_offsets,
    workspace_pointers,
)
from tests.kernels.parts.plain import GL, Integer, Pointer, plain


@pytest.mark.parametrize(
    ("tokens", "channels", "splits", "group"), [(1, 7, 1, 2), (5, 3, 4, 2), (8, 4, 3, 8), (3, 9, 2, 8), (1, 7, 4, 0)]
)
def test_every_split_of_every_tile_once(tokens, channels, splits, group):
    config = SimpleNamespace(splits=splits, token_group=group)
    tiles = SimpleNamespace(of_tokens=tokens, of_channels=channels, iterations=10)
    tile_at_ = plain(tile_at, gl=GL, asm=lambda *given: 0)
    order = [tile_at_(index, tiles, config) for index in range(plain(tile_count)(tiles, config))]
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
    config, tiles = SimpleNamespace(splits=splits), SimpleNamespace(iterations=iterations)
    shares = [plain(iterations_of, k_range_of=plain(k_range_of))(split, tiles, config) for split in range(splits)]
    assert shares[0][0] == 0 and shares[-1][1] == iterations
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
    assert all(end - begin >= iterations // splits for begin, end in shares)


@pytest.mark.parametrize(("rows", "columns"), [(64, 8), (128, 16), (256, 64), (128, 128)])
def test_the_last_block_gets_the_sum_of_all_splits(rows, columns):
    """Whichever block arrives last gets the sum of all splits. Then the counters are zero again, and no other tile has changed.
    The words of a warp are adjacent for any number of row blocks."""
    splits, tile = 3, Integer(1)
    config = SimpleNamespace(rows=rows, columns=columns, accumulator=None, splits=splits)
    of = plain(workspace_offsets, gl=GL)(config)
    assert sorted(of.reshape(-1)) == list(range(rows * columns))
    assert np.array_equal(plain(workspace_pointers, gl=GL)(Pointer(None, 5), config).index, of + 5)
    for row_block in range(rows // 16):
        group, lane = np.arange(8)[:, None], np.arange(4)[None, :]
        words = of[16 * row_block + group, 2 * lane].reshape(-1)
        assert np.array_equal(words, words[0] + np.arange(32)) and words[0] % 32 == 0
    partial, arrived = np.full(3 * splits * rows * columns, np.nan), np.zeros(3, dtype=int)
    at = SimpleNamespace(partial=Pointer(partial), arrived=Pointer(arrived))
    sums = np.random.default_rng(0).integers(0, 100, (splits, rows, columns))
    reduce = plain(reduce_splits, gl=GL, barrier=lambda: None, workspace_offsets=plain(workspace_offsets, gl=GL))
    results = [reduce(at, sums[split], tile, split, config) for split in (2, 0, 1)]
    assert [bool(last) for last, _ in results] == [False, False, True]
    assert np.array_equal(results[-1][1], sums.sum(0)) and not arrived.any()
    one = splits * rows * columns
    assert np.isnan(partial[:one]).all() and np.isnan(partial[2 * one :]).all() and not np.isnan(partial[one : 2 * one]).any()


def test_splits_in_turn_add_up_the_same():
    """Serial split-K adds in the order of K. A tile needs workspace for one partial sum, and its counter ends at zero."""
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
    function = plain(
        reduce_splits_serially, gl=gl, barrier=lambda: None, workspace_offsets=plain(workspace_offsets, gl=GL), run=run
    )
    results = [function(at, sums[split], tile, split, config) for split in range(splits)]
    assert [bool(last) for last, _ in results] == [False, False, True] and not arrived.any()
    assert np.array_equal(results[-1][1], (sums[0] + sums[1]) + sums[2])
    assert waited == [(1, 1, 1), (1, 2, 2)] and np.isnan(partial[: rows * columns]).all()


SHARED = [
    (1, 7, 5, 3),
    (2, 5, 4, 3),
    (3, 9, 6, 4),
    (1, 40, 32, 132),
    (8, 40, 10, 132),
    (2, 133, 70, 132),
    (1, 2, 400, 132),
    (5, 1, 8, 2),
]
"""(tiles along tokens, tiles along channels, iterations, blocks). There are fewer tiles than blocks, a few more, or many times
as many."""


def shared_work(shape, **more):
    """The work of each block as the kernel computes it: (index, tile, first iteration, iteration after the last)."""
    tokens, channels, iterations, blocks = shape
    tiles = SimpleNamespace(of_tokens=tokens, of_channels=channels, iterations=iterations)
    config, work = SimpleNamespace(splits=0, token_group=2, accumulator=None, **more), []
    for block in range(blocks):
        gl = SimpleNamespace(
            **vars(GL), maximum=max, program_id=lambda axis, block=block: Integer(block), num_programs=lambda axis: blocks,
            float32=None, inline_asm_elementwise=lambda text, takes, given, **_: given[0].memory[given[0].index] + given[1],
        )  # fmt: skip
        names = {"gl": gl, "stream_k_range": plain(stream_k_range, gl=gl)}
        names["iterations_of"] = plain(iterations_of, **names)
        mine = []
        for index in range(block, plain(tile_count, **names)(tiles, config), blocks):
            token_tile, channel_tile, split = plain(tile_at, **names)(index, tiles, config)
            mine.append((index, (token_tile, channel_tile), *names["iterations_of"](split, tiles, config)))
        work.append((mine, names))
    return work, tiles, config


@pytest.mark.parametrize("shape", SHARED)
def test_shares_are_equal_and_cover_every_tile_once(shape):
    tokens, channels, iterations, blocks = shape
    work = [mine for mine, _ in shared_work(shape)[0]]
    done = sorted((tile, k) for mine in work for _, tile, begin, end in mine for k in range(begin, end))
    assert done == sorted(itertools.product(itertools.product(range(tokens), range(channels)), range(iterations)))
    counts = [sum(end - begin for _, _, begin, end in mine) for mine in work]
    assert max(counts) - min(counts) <= 1 and all(begin < end for mine in work for _, _, begin, end in mine)
    for mine in work:
        assert len([1 for _, _, begin, _ in mine if begin > 0]) <= 1, "memory has one place for each block"
        whole = [end - begin == iterations for _, _, begin, end in mine][: tokens * channels // blocks]
        assert all(whole), "undivided tiles first"


class Turns:
    """A model of counters for blocks that run as Python threads: a wait blocks until enough arrivals."""

    def __init__(self, arrived):
        self.changed, self.arrived, self.waits = threading.Condition(), arrived, []

    def wait(self, block, pointer, least):
        with self.changed:
            self.waits.append((block, int(least)))
            assert self.changed.wait_for(lambda: self.arrived[pointer.index] >= least, timeout=20), "nobody comes"

    def add(self, pointer, value, sem):
        with self.changed:
            self.arrived[pointer.index] += value
            self.changed.notify_all()


@pytest.mark.parametrize("at_once", [1, 5, 200])
@pytest.mark.parametrize("shape", [*SHARED[:4], SHARED[-2]])
def test_shares_meet_in_the_order_of_k(shape, at_once):
    """Stream-K adds in the order of K. However few blocks run at once, no block waits for one that has not started. Counters
    end at zero."""
    rows, columns = 64, 8
    work, tiles, config = shared_work(shape, rows=rows, columns=columns)
    rng, blocks = np.random.default_rng(0), shape[-1]
    sums = {(tile, begin): rng.standard_normal((rows, columns)) for mine, _ in work for _, tile, begin, _ in mine}
    expected: dict[tuple[int, int], np.ndarray] = {}
    for tile, begin in sorted(sums):
        expected[tile] = expected[tile] + sums[tile, begin] if begin else sums[tile, begin]
    partial, arrived = np.full(blocks * rows * columns, np.nan), np.zeros(blocks, dtype=int)
    at, turns, results = SimpleNamespace(partial=Pointer(partial), arrived=Pointer(arrived)), Turns(arrived), {}
    room = threading.Semaphore(at_once)

    def block(number):
        mine, names = work[number]
        gl = SimpleNamespace(**{**vars(names["gl"]), "atomic_add": turns.add})
        workspace = plain(
            reduce_stream_k, **{**names, "gl": gl}, barrier=lambda: None, workspace_pointers=plain(workspace_pointers, gl=GL),
            run=lambda text, takes, given: turns.wait(number, *given),
        )  # fmt: skip
        for index, tile, begin, _ in mine:
            last, total = workspace(at, sums[tile, begin], Integer(index), tiles, config)
            if last:
                assert tile not in results
                results[tile] = total
        room.release()

    threads = []
    for number in range(blocks):
        assert room.acquire(timeout=20), "a block waits for one that has not started"
        threads.append(threading.Thread(target=block, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert results.keys() == expected.keys() and not arrived.any()
    assert all(np.array_equal(results[tile], expected[tile]) for tile in expected)
