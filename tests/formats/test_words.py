from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats import pack_words, packed_bytes, unpack_words


@given(bits=st.integers(2, 8), n=st.integers(1, 5), k=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_round_trip_and_bit_order(bits, n, k, seed):
    codes = torch.randint(0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_words(codes, bits)
    assert packed.shape == (n, packed_bytes(k, bits))
    assert torch.equal(unpack_words(packed, bits, k), codes)
    # The definition: a row is one little-endian integer with code i at bit i * bits.
    for row, data in zip(codes.tolist(), packed.tolist(), strict=True):
        assert int.from_bytes(bytes(data), "little") == sum(c << (i * bits) for i, c in enumerate(row))


def test_wrong_size_is_refused():
    with pytest.raises(ValueError, match="9 codes of 6 bits are 7 bytes a row, got 8"):
        unpack_words(torch.zeros(3, 8, dtype=torch.uint8), 6, 9)
