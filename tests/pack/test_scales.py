from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.hardware.mma import MMA_M16N8K16_F16, MMA_M16N8K32_S8, wgmma_f16
from lowbit.pack import ScaleOrder


def test_a_thread_reads_the_scales_of_its_two_rows() -> None:
    scales = torch.arange(128)[:, None] * 10 + torch.arange(3)  # row, group of K
    packed = ScaleOrder(MMA_M16N8K16_F16).pack(scales)
    assert packed.shape == (2, 3, 64)
    for tile in range(2):
        for group_of_k in range(3):
            for warp in range(4):
                for group in range(8):
                    row = 64 * tile + 16 * warp + group
                    pair = packed[tile, group_of_k, 16 * warp + 2 * group :][:2]
                    assert pair.tolist() == [10 * row + group_of_k, 10 * (row + 8) + group_of_k]


@pytest.mark.parametrize("strips", [2, 4])
def test_a_warp_of_several_strips_reads_them_together(strips: int) -> None:
    order = ScaleOrder(MMA_M16N8K16_F16, strips)
    assert order.per_thread == 2 * strips
    packed = order.pack(torch.arange(64)[:, None])[0, 0]
    for warp in range(4 // strips):
        for group in range(8):
            first = 16 * strips * warp + 2 * strips * group
            rows = [16 * (strips * warp + strip) + group + half for strip in range(strips) for half in (0, 8)]
            assert packed[first : first + 2 * strips].tolist() == rows


def test_wgmma_orders_rows_like_four_warps_of_mma_sync() -> None:
    expected = ScaleOrder(MMA_M16N8K16_F16).rows().tolist()
    assert ScaleOrder(wgmma_f16(64)).rows().tolist() == expected
    assert ScaleOrder(MMA_M16N8K32_S8).rows().tolist() == expected


@settings(deadline=None, max_examples=40)
@given(n=st.integers(0, 200), groups=st.integers(1, 5), strips=st.sampled_from([1, 2, 4]))
def test_round_trip(n: int, groups: int, strips: int) -> None:
    scales = torch.randn(n, groups, generator=torch.Generator().manual_seed(n)).to(torch.float16)
    order = ScaleOrder(MMA_M16N8K16_F16, strips)
    packed = order.pack(scales)
    assert packed.dtype == torch.float16
    assert torch.equal(order.unpack(packed, n), scales)
    whole = order.unpack(packed, packed.shape[0] * 64)
    assert not whole[n:].any()


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"3 fragments of mma\.m16n8k16\.f16"):
        ScaleOrder(MMA_M16N8K16_F16, 3)
    with pytest.raises(ValueError, match=r"2 fragments of wgmma\.m64n64k16\.f16"):
        ScaleOrder(wgmma_f16(64), 2)
    with pytest.raises(ValueError, match=r"scales of 65 rows are \[2, G, 64\], got \[1, 3, 64\]"):
        ScaleOrder(MMA_M16N8K16_F16).unpack(torch.zeros(1, 3, 64), 65)
