"""Equal shares of K: every iteration of every tile once, blocks alike, and parts that meet in any order with the same bits."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import schedule, shares
from tests.kernels.parts.plain import GL, Pointer, plain

CASES = [(1, 7, 5, 3), (2, 5, 4, 3), (3, 9, 6, 4), (1, 40, 32, 132), (8, 40, 10, 132), (2, 133, 3, 132), (1, 2, 400, 132)]
"""Tiles of tokens, of channels, iterations, blocks: fewer tiles than blocks, a few more, many times as many."""


class Whole(int):
    """A scalar of a kernel whose sums and products are scalars too."""

    def to(self, kind):
        return self

    def __add__(self, other):
        return Whole(int(self) + other)

    def __mul__(self, other):
        return Whole(int(self) * other)


def functions(block, blocks):
    """The device functions as block `block` of `blocks` runs them."""
    gl = SimpleNamespace(
        **vars(GL), maximum=max, program_id=lambda axis: Whole(block), num_programs=lambda axis: blocks, float32="float32",
        inline_asm_elementwise=lambda text, takes, given, **_: given[0].memory[given[0].index] + given[1],
    )  # fmt: skip
    found = SimpleNamespace(gl=gl)
    found.dealt_of = plain(shares.dealt_of, gl=gl)
    found.share_of = plain(shares.share_of, gl=gl, dealt_of=found.dealt_of, Share=shares_tuple)
    found.tile_of = plain(shares.tile_of, gl=gl)
    found.stretch_of = plain(shares.stretch_of, gl=gl, tile_of=found.tile_of)
    found.blocks_of = plain(shares.blocks_of, gl=gl, dealt_of=found.dealt_of)
    return found


def shares_tuple(begin, end, first_tile, stretch_turns, whole_tile, turns):
    return SimpleNamespace(
        begin=begin, end=end, first_tile=first_tile, stretch_turns=stretch_turns, whole_tile=whole_tile, turns=turns
    )


def work_of(block, blocks, tiles):
    """(turn, tile, first iteration, the one after the last) of each turn of a block."""
    f = functions(block, blocks)
    share = f.share_of(tiles)
    return [(turn, f.tile_of(turn, share), *f.stretch_of(turn, share, tiles)) for turn in range(share.turns)]


@pytest.mark.parametrize(("tokens", "channels", "iterations", "blocks"), CASES)
def test_every_iteration_once_and_blocks_alike(tokens, channels, iterations, blocks):
    tiles = SimpleNamespace(of_tokens=tokens, of_channels=channels, iterations=iterations)
    work = [work_of(block, blocks, tiles) for block in range(blocks)]
    done = sorted((tile, k) for turns in work for _, tile, begin, end in turns for k in range(begin, end))
    assert done == [(tile, k) for tile in range(tokens * channels) for k in range(iterations)]
    assert all(begin < end for turns in work for _, _, begin, end in turns), "no turn is empty"
    counts = [sum(end - begin for _, _, begin, end in turns) for turns in work]
    assert max(counts) - min(counts) <= 1
    # Who has a part of a tile is known without asking, and each block has at most two parts: one that begins its tile.
    for block, turns in enumerate(work):
        parts = [(tile, begin) for _, tile, begin, end in turns if end - begin < iterations]
        assert len([begin for _, begin in parts if begin == 0]) <= 1 and len([begin for _, begin in parts if begin > 0]) <= 1
        for tile, _ in parts:
            first, last = functions(block, blocks).blocks_of(tile, tiles)
            assert [b for b in range(blocks) if any(t == tile for _, t, *_ in work[b])] == list(range(first, last + 1))


@pytest.mark.parametrize(("tokens", "channels", "iterations", "blocks"), CASES[:4])
def test_index_of_a_tile_and_its_iterations(tokens, channels, iterations, blocks):
    """As kernels ask for them: by a number that grows by the number of blocks, up to `count`."""
    tiles = SimpleNamespace(of_tokens=tokens, of_channels=channels, iterations=iterations)
    config = SimpleNamespace(stream_k=True, splits=1, token_group=2)
    found = []
    for block in range(blocks):
        f = functions(block, blocks)
        names = {"gl": f.gl, "share_of": f.share_of, "tile_of": f.tile_of, "stretch_of": f.stretch_of}
        for index in range(block, plain(schedule.count, **names)(tiles, config), blocks):
            token_tile, channel_tile, turn = plain(schedule.tile_at, **names)(index, tiles, config)
            assert turn == index // blocks
            begin, end = plain(schedule.iterations_of, **names)(turn, tiles, config)
            found += [(token_tile, channel_tile, k) for k in range(begin, end)]
    every = [(t, c, k) for t in range(tokens) for c in range(channels) for k in range(iterations)]
    assert sorted(found) == every


@pytest.mark.parametrize(("tokens", "channels", "iterations", "blocks"), CASES[:4])
def test_parts_meet_in_any_order(tokens, channels, iterations, blocks):
    """The block that comes last gets the sum, always in the order of K; counters are zero again."""
    rows, columns = 64, 8
    tiles = SimpleNamespace(of_tokens=tokens, of_channels=channels, iterations=iterations)
    config = SimpleNamespace(rows=rows, columns=columns, accumulator=None)
    rng = np.random.default_rng(0)
    jobs = [(block, *each) for block in range(blocks) for each in work_of(block, blocks, tiles)]
    sums = {job: rng.standard_normal((rows, columns)) for job in jobs}
    expected: dict[int, np.ndarray] = {}
    for job in sorted(jobs, key=lambda job: (job[2], job[3])):
        tile = int(job[2])
        expected[tile] = sums[job] if tile not in expected else expected[tile] + sums[job]
    for seed in range(5):
        partial, arrived = np.full(2 * blocks * rows * columns, np.nan), np.zeros(tokens * channels, dtype=int)
        at = SimpleNamespace(partial=Pointer(partial), arrived=Pointer(arrived))
        random.Random(seed).shuffle(jobs)
        results: dict[int, np.ndarray] = {}
        for job in jobs:
            block, turn, tile, *_ = job
            f = functions(block, blocks)
            meet = plain(
                schedule.meet_parts, gl=f.gl, barrier=lambda: None, places=plain(schedule.places, gl=GL), share_of=f.share_of,
                tile_of=f.tile_of, stretch_of=f.stretch_of, blocks_of=lambda *given, f=f: map(Whole, f.blocks_of(*given)),
                range=lambda first, end: map(Whole, range(first, end)),
            )  # fmt: skip
            last, total = meet(at, sums[job], Whole(turn), tiles, config)
            if last:
                assert int(tile) not in results
                results[int(tile)] = total
        assert results.keys() == expected.keys() and not arrived.any()
        assert all(np.array_equal(results[tile], expected[tile]) for tile in expected)
