"""From accumulators to memory, on arrays: each group of a thread's columns is adjacent channels with the right constants."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import conv_epilogue
from lowbit.kernels.parts.conv_tile import WgmmaConv
from lowbit.pack.conv_layout import column_constants, column_order, group_order, lane_constants, unit_channels
from tests.kernels.parts.plain import GL, Array, plain

NAMES = SimpleNamespace(**{**vars(GL), "arange": lambda first, end, layout: np.arange(first, end).view(Array)})


@pytest.mark.parametrize("y", ["u4", "s8"])
@pytest.mark.parametrize("outputs", [64, 128])
def test_columns_of_a_group_are_neighbouring_channels(y, outputs):
    tile = WgmmaConv("u4", y, None, True, 1, outputs, 32, 3)
    columns = np.broadcast_to(np.arange(outputs), (tile.pixels, outputs)).view(Array)
    by_groups = plain(conv_epilogue.by_groups, gl=NAMES)
    split = plain(conv_epilogue.split_groups, gl=NAMES, by_groups=by_groups)(columns, tile)
    order, unit = column_order(y, outputs), unit_channels(y, outputs)
    assert len(split) == 8 and split[0].shape == (tile.pixels, tile.units, 4, tile.groups)
    for i, held in enumerate(split):
        for u, q, group in np.ndindex(tile.units, 4, tile.groups):
            assert order[held[0, u, q, group]] == u * unit + q * unit // 4 + 8 * group + group_order(y)[i]


@pytest.mark.parametrize("outputs", [64, 128])
def test_constants_find_their_columns(outputs):
    tile = WgmmaConv("u4", "u4", None, True, 1, outputs, 32, 3)
    places = plain(conv_epilogue.places_of_constants, gl=NAMES)(tile)
    values = torch.rand(outputs)
    found = lane_constants(values, "u4", outputs).numpy()[np.asarray(places)].view(Array)
    columns = plain(conv_epilogue.by_columns, gl=NAMES)(found, tile)
    assert np.array_equal(columns, column_constants(values, "u4", outputs).numpy())


def test_words_lie_behind_each_other_in_a_pixel():
    tile = WgmmaConv("u4", "u4", "u4", True, 1, 64, 32, 3)
    at, exists = plain(conv_epilogue.codes_at, gl=NAMES)(1000, 5, 2, 60, 7, 2, tile)
    pixel, lane, word = np.ogrid[:64, :4, :2]
    assert np.array_equal(at[:, 0], 1000 + (((pixel + 5) * 7 + 2) * 4 + lane) * 2 + word)
    assert np.array_equal(exists.ravel(), np.arange(64) + 5 < 60)


def test_a_value_for_each_pixel_stays():
    tile = WgmmaConv("u4", "u4", None, True, 1, 64, 32, 3)
    per_column = plain(conv_epilogue.per_column, gl=NAMES)
    values = np.arange(64.0).view(Array)
    assert np.array_equal(per_column(values, tile), np.tile(values, (64, 1)))
    both = np.arange(64.0 * 64).reshape(64, 64).view(Array)
    assert per_column(both, tile) is both
