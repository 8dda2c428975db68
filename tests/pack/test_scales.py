from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.pack import pack_scales, unpack_scales


def test_a_lane_group_reads_the_scales_of_its_two_rows() -> None:
    scales = torch.arange(128)[:, None] * 10 + torch.arange(3)  # row, group of K
    packed = pack_scales(scales)
    assert packed.shape == (8, 3, 16)
    for row_block in range(8):
        for group_of_k in range(3):
            for group in range(8):
                row = 16 * row_block + group
                pair = packed[row_block, group_of_k, 2 * group :][:2]
                assert pair.tolist() == [10 * row + group_of_k, 10 * (row + 8) + group_of_k]


@settings(deadline=None, max_examples=40)
@given(n=st.integers(0, 200), groups=st.integers(1, 5))
def test_round_trip(n: int, groups: int) -> None:
    scales = torch.randn(n, groups, generator=torch.Generator().manual_seed(n)).to(torch.float16)
    packed = pack_scales(scales)
    assert packed.dtype == torch.float16
    assert torch.equal(unpack_scales(packed, n), scales)
    whole = unpack_scales(packed, packed.shape[0] * 16)
    assert not whole[n:].any()


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"scales of 65 rows are \[5, G, 16\], got \[1, 3, 16\]"):
        unpack_scales(torch.zeros(1, 3, 16), 65)
