"""Regions of shared memory: in order, without gaps or overlaps, and together the size of the kernel's allocation."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.smem import UNIT, Regions


def test_regions_follow_each_other_at_multiples_of_the_unit():
    regions = Regions((("x", 4096), ("w0", 100), ("w1", 0), ("y", 1025), ("barriers", UNIT)))
    assert [regions.start(name) for name, _ in regions.sizes] == [0, 4, 5, 5, 7]
    for (name, size), (following, _) in zip(regions.sizes, regions.sizes[1:], strict=False):
        assert regions.end(name) == regions.start(following)
        assert 0 <= UNIT * (regions.end(name) - regions.start(name)) - size < UNIT
    assert regions.end("barriers") == regions.units == 8 and regions.bytes == 8 * UNIT


def test_an_unknown_region_is_an_error():
    with pytest.raises(ValueError, match="scales"):
        Regions((("x", 1024),)).start("scales")
