"""Every layout is lossless, for every width and ragged shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.hardware.mma import MMA_M16N8K16_F16, MMA_M16N8K32_S8, wgmma_f16
from lowbit.pack import ColumnMajorTileInterleave, FragmentOrder, Layout, PackedTensor, RowMajor, pack

LAYOUTS: list[Layout] = [
    RowMajor(),
    ColumnMajorTileInterleave(),
    FragmentOrder(MMA_M16N8K16_F16),
    FragmentOrder(wgmma_f16(128)),
    FragmentOrder(MMA_M16N8K32_S8),
]


def test_codes_are_checked() -> None:
    with pytest.raises(ValueError, match="codes of 4 bits are below 16, got 16"):
        RowMajor().pack(torch.full((2, 2), 16, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match=r"codes are a uint8 tensor \[N, K\], got torch.int32 \[2, 2\]"):
        RowMajor().pack(torch.zeros(2, 2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="codes have 2 to 8 bits, got 9"):
        RowMajor().pack(torch.zeros(2, 2, dtype=torch.uint8), 9)


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
    packed = pack(codes, bits, layout)
    assert tuple(tuple(plane.shape) for plane in packed.planes) == layout.plane_shapes(bits, (n, k))
    assert all(plane.dtype == layout.plane_dtype and plane.is_contiguous() for plane in packed.planes)
    assert torch.equal(packed.unpack(), codes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_whole_tiles_cost_no_padding(layout: Layout, bits: int) -> None:
    assert pack(random_codes(128, 192, bits), bits, layout).nbytes == 128 * 192 * bits // 8


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_transposed_codes_are_packed_alike(layout: Layout) -> None:
    codes = random_codes(64, 128, 4)
    strided = codes.t().contiguous().t()
    assert all(torch.equal(a, b) for a, b in zip(layout.pack(strided, 4), layout.pack(codes, 4), strict=True))


def test_row_major_picture() -> None:
    codes = torch.tensor([[0b000001, 0b000010, 0b000100, 0b111000]], dtype=torch.uint8)
    (plane,) = RowMajor().pack(codes, 6)
    # low 2 of k1, k0 | low 4 of k2, high 4 of k1 | k3, high 2 of k2
    assert plane.tolist() == [[0b10_000001, 0b0100_0000, 0b111000_00]]


def test_codes_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="codes of 3 bits are below 8"):
        RowMajor().pack(torch.full((2, 2), 8, dtype=torch.uint8), 3)


def test_planes_of_another_shape_are_refused() -> None:
    packed = pack(random_codes(4, 8, 4), 4, RowMajor())
    with pytest.raises(ValueError, match=r"RowMajor\(\) holds 4-bit codes of shape \(4, 10\)"):
        PackedTensor(packed.planes, RowMajor(), 4, (4, 10))
    with pytest.raises(ValueError, match=r"torch\.uint8 planes"):
        RowMajor().unpack((packed.planes[0].to(torch.int32),), 4, (4, 8))


def test_moving_keeps_the_layout() -> None:
    packed = pack(random_codes(5, 70, 6), 6, FragmentOrder(MMA_M16N8K16_F16))
    moved = packed.to("cpu")
    assert (moved.layout, moved.bits, moved.shape) == (packed.layout, 6, (5, 70))
    assert torch.equal(moved.unpack(), packed.unpack())
