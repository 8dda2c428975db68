from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.pack.bits import check_codes, join_planes, pack_plane, plane_widths, split_planes, unpack_plane


@pytest.mark.parametrize("bits", range(2, 9))
def test_planes_are_powers_of_two_and_add_up(bits: int) -> None:
    widths = plane_widths(bits)
    assert sum(widths) == bits
    assert list(widths) == sorted(widths, reverse=True)
    assert set(widths) <= {1, 2, 4, 8}


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_code_is_split_and_joined(bits: int) -> None:
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    planes = split_planes(codes, bits)
    for code in range(1 << bits):
        digits = f"{code:0{bits}b}"
        for width, plane in zip(plane_widths(bits), planes, strict=True):
            assert plane[code] == int(digits[:width], 2)  # high-order bits first
            digits = digits[width:]
    assert torch.equal(join_planes(planes, bits), codes)


def test_fp6_e3m2_splits_into_sign_exponent_and_mantissa() -> None:
    high, low = split_planes(torch.tensor([0b1_101_10], dtype=torch.uint8), 6)
    assert (high.item(), low.item()) == (0b1101, 0b10)


def test_plane_words_by_hand() -> None:
    fields = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0xF, 9], dtype=torch.uint8)
    words = pack_plane(fields, 4)
    assert [word & 0xFFFFFFFF for word in words.tolist()] == [0xF7654321, 0x00000009]


@settings(deadline=None, max_examples=60)
@given(width=st.sampled_from([1, 2, 4, 8]), rows=st.integers(0, 3), k=st.integers(0, 70), seed=st.integers(0, 99))
def test_plane_words_round_trip(width: int, rows: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    fields = torch.randint(0, 1 << width, (rows, k), dtype=torch.uint8, generator=generator)
    words = pack_plane(fields, width)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-k * width // 32))
    assert torch.equal(unpack_plane(words, width, k), fields)
    padded = unpack_plane(words, width, words.shape[1] * 32 // width)
    assert not padded[:, k:].any()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 to 8 bits, got 9"):
        plane_widths(9)
    with pytest.raises(ValueError, match="got 1 planes"):
        join_planes((torch.zeros(3, dtype=torch.uint8),), 6)
    with pytest.raises(ValueError, match="9 fields of 4 bits are 2 words"):
        unpack_plane(torch.zeros(1, dtype=torch.int32), 4, 9)
    with pytest.raises(ValueError, match="below 16, got 16"):
        check_codes(torch.full((1, 1), 16, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match="uint8 tensor"):
        check_codes(torch.zeros(2, 2), 4)
