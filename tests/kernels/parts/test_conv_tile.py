"""Tiles of the convolution kernels: shared memory without overlaps, and layouts that give each word and constant to a
thread.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.choose.conv import UNIT
from lowbit.kernels.parts.conv_tile import UNIT_WORDS, WgmmaConv
from lowbit.pack.conv_layout import held_columns
from tests.kernels.parts.plain import check_operands

TILES = [
    WgmmaConv("u4", "u4", "u4", True, 2, 64, 32, 4),
    WgmmaConv("u4", "s8", None, True, 1, 128, 64, 3, second="s8"),
    WgmmaConv("s8", "s8", "u4", False, 2, 128, 128, 3),
    WgmmaConv("s8", "u4", "s8", True, 4, 64, 64, 3, resident=9),
]


def places(layout):
    """The coordinates of the element in each register of each thread: [registers, threads, dimensions]."""
    groups = (layout.reg_bases, layout.lane_bases + layout.warp_bases)
    bases = [np.array(group).reshape(-1, len(layout.shape)) for group in groups]
    sums = [sum((np.arange(2 ** len(b)) >> i & 1)[:, None] * base for i, base in enumerate(b)) for b in bases]
    return sums[0][:, None] + sums[1][None]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_parts_of_memory_follow_each_other(tile):
    assert UNIT * tile.w_unit == tile.stages * tile.x_bytes and tile.x_bytes % UNIT == 0
    assert UNIT * tile.barrier_unit == UNIT * tile.w_unit + tile.w_tiles * tile.w_tile_bytes
    assert tile.barriers.start == UNIT * tile.barrier_unit and tile.weights.start == tile.barriers.end
    assert tile.weights.end <= tile.shared_bytes and UNIT_WORDS.value * 4 == UNIT
    check_operands(tile.register_fence, "=r" + ",r" * (2 * tile.ring.registers + 1))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_word_of_codes_has_one_thread(tile):
    for words in {tile.out_words, tile.residual_words} - {0}:
        found = places(tile.words_layout(words))
        shape = (tile.pixels, tile.units, 4, words)
        numbers = np.ravel_multi_index(tuple(found.reshape(-1, 4).T), shape)
        assert found.shape[1] == tile.threads and len(np.unique(numbers)) == len(numbers) == np.prod(shape)
        thread = np.arange(tile.threads)
        assert np.array_equal(found[0, :, 0], thread // 32 * 16 + thread % 32 // 4), "rows as sums lie"
        assert np.array_equal(found[0, :, 2], thread % 4)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_thread_has_the_constants_of_its_columns(tile):
    found = places(tile.constants_layout)
    for q in range(4):
        columns = [16 * block + 8 * (value // 2) + 2 * lane + value % 2 for block, lane, value in found[:, q]]
        assert sorted(columns) == sorted(held_columns(tile.outputs)[q])
