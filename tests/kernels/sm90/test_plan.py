"""Host-side preparation of a plan; needs no GPU."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape
from lowbit.pack import WeightForm

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.sm90.large_m_gemm import WgmmaPlan


def plan(m, n, k, bits=6, fmt="fp6_e3m2", group=0) -> WgmmaPlan:
    shape = GemmShape(m, n, k, bits)
    form = WeightForm(fmt, group, "none", "fp16")
    tile, epilogue = choose(shape, typical_machine(90)), Epilogue(form.channel_scale, False)
    return WgmmaPlan(shape, tile, form, torch.float16, epilogue, 132)


def test_descriptors_describe_the_operands():
    made = plan(4096, 1000, 200)
    four, two, none = made.weight_descriptors(1 << 20)
    assert none is None and four.shape == [63, 4 * 32 * 6] and four.strides == [4 * 32 * 6, 1]
    assert four.block_shape == [8, 128] and two.block_shape == [8, 64]
    x = made.x_descriptor(1 << 21, 208)
    assert (x.shape, x.strides, x.block_shape) == ([4096, 200], [208, 1], [256, 64])
    y = made.y_descriptor(1 << 22)
    assert (y.shape, y.strides, y.block_shape) == ([4096, 1000], [1000, 1], [256, 128])
    assert made.x_descriptor(1 << 21, 208) is x and made.x_descriptor(1 << 21, 216) is not x
    assert plan(4096, 1001, 200).y_descriptor(1 << 22) is None, "rows of y that TMA cannot address"


def test_the_grid_and_the_turns_cover_the_product():
    made = plan(300, 5000, 1000, 4, "int4", 128)
    assert made.tiles[0] * made.tile.tokens >= 300 and made.tiles[1] * made.tile.rows >= 5000
    assert made.iterations * 128 >= 1000 > (made.iterations - 1) * 128
    assert made.last_group == 7 and made.grid[0] <= 132


def test_splits_have_room_to_meet():
    made = plan(64, 1024, 8192, 4, "int4", 128)
    assert made.tile.splits > 1
    sums, counters = made.workspace
    assert counters == made.tiles[0] * made.tiles[1]
    assert sums == counters * made.tile.splits * made.tile.tokens * made.tile.rows
