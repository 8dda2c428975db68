"""Taps by address: a thread loads the row at its address, or zeros outside the image; copies are boxes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.sm90.conv_block import ZERO_BYTES, StripTaps
from tests.kernels.parts.plain import check_operands, operands
from tests.kernels.parts.test_strip_ring import ROWS, START, fragments, memory
from tests.kernels.parts.threads import run


def taps(bits, row_bytes, boxes=1):
    strips = StageBarriers(40000, 2, 4)
    return StripTaps(strips, StageBarriers(40032, 1, 4), 39936, 2048, 30000, ROWS, row_bytes, 9 * 4096, bits, boxes)


@pytest.mark.parametrize(("bits", "row_bytes"), [(4, 32), (4, 64), (8, 64), (8, 128)])
def test_a_tap_is_loaded_as_it_lies(bits, row_bytes):
    part = taps(bits, row_bytes)
    rows = torch.randint(0, 256, (2, ROWS, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    thread = np.arange(128)
    row = 7 + (thread >> 5) * 16 + (thread & 15)
    (place,) = run(part.place, [row, thread], 1, start=START)
    inside = (row % 5 > 0).astype(np.uint32)
    zeros = np.full(128, START + part.zeros)
    made = run(part.tap, [place, zeros, inside], part.loaded, memory(rows, part), START)
    pixels = rows[0, 7:71].numpy().copy()
    pixels[np.arange(7, 71) % 5 == 0] = 0
    assert fragments(made, pixels)
    check_operands(part.tap, part.tap_constraints)


def test_threads_of_a_row_have_their_own_16_bytes():
    (place,) = run(taps(4, 32).lane_place, [np.full(128, 512), np.arange(128)], 1, start=START)
    assert np.array_equal(place, START + 512 + 16 * (np.arange(128) % 4))


@pytest.mark.parametrize("boxes", [1, 2])
def test_a_strip_comes_in_boxes(boxes):
    part = taps(8, 64, boxes)
    assert operands(part.copy_strip) == {0, 1, 2, 3, 4, 5} and part.copy_strip.count("cp.async.bulk.tensor.2d") == boxes
    assert f"[bar+40000], {ROWS * 64};" in part.copy_strip, "the bytes of all boxes"
    assert (f"add.s32 row, row, {ROWS // 2};" in part.copy_strip) == (boxes == 2)
    assert part.row_bytes <= ZERO_BYTES
