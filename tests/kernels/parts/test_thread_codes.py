"""Sums in registers become codes. Tests which column each register has, and the product with the constants of the columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.hardware.mma import wgmma_s8
from lowbit.kernels.parts.thread_codes import SCALED, place_of
from lowbit.kernels.reference.conv import fma
from tests.kernels.parts.threads import run


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_registers_of_columns(columns):
    """A thread has two rows, 8 apart, and in each row 8 of every group of 32 columns. A register holds columns of one group."""
    rows, places = (part.reshape(128, -1) for part in wgmma_s8(columns).c.coordinates())
    seen = []
    for group in range(columns // 32):
        for row in range(2):
            registers = [place_of.fn(group, row, i) for i in range(8)]
            seen += registers
            for thread in (0, 5, 38, 127):
                assert {int(rows[thread, r]) - int(rows[thread, 0]) for r in registers} == {8 * row}
                wanted = [32 * group + 8 * (i // 2) + 2 * (thread % 4) + i % 2 for i in range(8)]
                assert [int(places[thread, r]) for r in registers] == wanted
    assert sorted(seen) == list(range(columns // 2))


def test_sums_times_constants():
    generator = np.random.default_rng(0)
    sums = generator.integers(-(2**24), 2**24, 32).astype(np.int32)
    s, b = (generator.standard_normal(32).astype(np.float32) for _ in range(2))
    (found,) = run(SCALED.value, [sums.view(np.uint32), s.view(np.uint32), b.view(np.uint32)], 1)
    wanted = fma(*(torch.from_numpy(each) for each in (sums.astype(np.float32), s, b))).numpy()
    assert (found.view(np.float32) == wanted).all()
