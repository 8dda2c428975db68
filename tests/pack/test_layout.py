"""Every layout is lossless, for every width and ragged shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.hardware.mma import MMA_M16N8K16_F16, MMA_M16N8K32_S8, wgmma_f16
from lowbit.pack import ColumnMajorTileInterleave, FragmentOrder, Layout

FRAGMENTS = FragmentOrder(MMA_M16N8K16_F16)
LAYOUTS: list[Layout] = [
    ColumnMajorTileInterleave(),
    FRAGMENTS,
    FragmentOrder(wgmma_f16(128)),
    FragmentOrder(MMA_M16N8K32_S8),
]


def test_codes_are_checked() -> None:
    with pytest.raises(ValueError, match="codes of 4 bits are below 16, got 16"):
        FRAGMENTS.pack(torch.full((2, 2), 16, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match=r"codes are a uint8 tensor \[N, K\], got torch.int32 \[2, 2\]"):
        FRAGMENTS.pack(torch.zeros(2, 2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="codes have 2 to 8 bits, got 9"):
        FRAGMENTS.pack(torch.zeros(2, 2, dtype=torch.uint8), 9)


def random_codes(n: int, k: int, bits: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(deadline=None, max_examples=40)
@given(bits=st.integers(2, 8), n=st.integers(0, 80), k=st.integers(0, 200), seed=st.integers(0, 999))
def test_round_trip_or_refusal(layout: Layout, bits: int, n: int, k: int, seed: int) -> None:
    if isinstance(layout, ColumnMajorTileInterleave):  # draw a shape it accepts more often than by chance
        bits, n, k = (4, 8)[bits % 2], n - n % 2, k - k % 64
    codes = random_codes(n, k, bits, seed)
    if layout.refusals(bits, (n, k)):
        with pytest.raises(ValueError, match="cannot hold"):
            layout.pack(codes, bits)
        return
    planes = layout.pack(codes, bits)
    assert tuple(tuple(plane.shape) for plane in planes) == layout.plane_shapes(bits, (n, k))
    assert all(plane.dtype == layout.plane_dtype and plane.is_contiguous() for plane in planes)
    assert torch.equal(layout.unpack(planes, bits, (n, k)), codes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_whole_tiles_cost_no_padding(layout: Layout, bits: int) -> None:
    planes = layout.pack(random_codes(128, 192, bits), bits)
    assert sum(plane.nbytes for plane in planes) == 128 * 192 * bits // 8


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_transposed_codes_are_packed_alike(layout: Layout) -> None:
    codes = random_codes(64, 128, 4)
    strided = codes.t().contiguous().t()
    assert all(torch.equal(a, b) for a, b in zip(layout.pack(strided, 4), layout.pack(codes, 4), strict=True))


def test_planes_of_another_shape_are_refused() -> None:
    planes = FRAGMENTS.pack(random_codes(4, 8, 4), 4)
    with pytest.raises(ValueError, match=r"holds 4-bit codes of shape \(40, 10\)"):
        FRAGMENTS.unpack(planes, 4, (40, 10))
    with pytest.raises(ValueError, match=r"torch\.int32 planes"):
        FRAGMENTS.unpack((planes[0].to(torch.int64),), 4, (4, 8))
