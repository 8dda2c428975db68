"""The interleaved layout against loops written from the description of the four steps, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lowbit.pack import ColumnMajorTileInterleave, PermutedColumnMajor, SignedColumnMajor
from lowbit.pack.tensorrt_llm import (
    BiasAndRegisterOrder,
    InterleaveColumns,
    PermuteRows,
    ToColumnMajor,
    from_signed_row_major,
    to_signed_row_major,
)

from .test_layout import random_codes

ROWS_INT4 = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]
ROWS_INT4 += [4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31]
ROWS_INT8 = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
ROWS_INT4_FP8 = [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23]
ROWS_INT4_FP8 += [8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31]


def preprocessed(values: NDArray[np.int64], bits: int, fp8: bool = False, interleave: bool = True) -> bytes:
    """The bytes of signed values [K, N] after the four steps, computed element by element. `fp8` is for 8-bit activations;
    `interleave` may be off.
    """
    k_size, n_size = values.shape
    rows = ROWS_INT4_FP8 if fp8 else ROWS_INT4 if bits == 4 else ROWS_INT8
    tile_k = 128 if fp8 else 64
    columns = 1024 // (tile_k * bits) if interleave else 1
    stream: list[int] = []
    for first in range(0, n_size, columns):
        for tile in range(0, k_size, tile_k):
            for n in range(first, first + columns):
                for k in range(tile, tile + tile_k):
                    read = k - k % len(rows) + rows[k % len(rows)]
                    stream.append(int(values[read, n]) + (1 << (bits - 1)))
    slots = [7, 5, 3, 1, 6, 4, 2, 0] if bits == 4 else [3, 1, 2, 0]  # element of each slot, highest slot first
    out = b""
    for start in range(0, len(stream), len(slots)):
        word = 0
        for element in slots:
            word = word << bits | stream[start + element]
        out += word.to_bytes(4, "little")
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(4, 64), (8, 64), (12, 192)])
def test_bytes(bits: int, shape: tuple[int, int]) -> None:
    codes = random_codes(*shape, bits, seed=sum(shape))
    (plane,) = ColumnMajorTileInterleave().pack(codes, bits)
    values = codes.t().numpy().astype(np.int64) - (1 << (bits - 1))
    assert plane.numpy().tobytes() == preprocessed(values, bits)


@pytest.mark.parametrize("shape", [(4, 128), (6, 384)])
def test_bytes_for_activations_of_8_bits(shape: tuple[int, int]) -> None:
    layout = ColumnMajorTileInterleave(activation_bits=8)
    codes = random_codes(*shape, 4, seed=sum(shape))
    (plane,) = layout.pack(codes, 4)
    values = codes.t().numpy().astype(np.int64) - 8
    assert plane.numpy().tobytes() == preprocessed(values, 4, fp8=True)
    assert torch.equal(layout.unpack((plane,), 4, shape), codes)
    assert "4-bit codes for activations of 8 bits" in layout.refusals(8, shape)[0]
    assert layout.refusals(4, (3, 64)) == ("K must be a multiple of 128", "N must be a multiple of 2")


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_for_other_generations(bits: int) -> None:
    codes = random_codes(5, 192, bits)
    values = codes.t().numpy().astype(np.int64) - (1 << (bits - 1))
    (hopper,) = PermutedColumnMajor().pack(codes, bits)
    assert hopper.numpy().tobytes() == preprocessed(values, bits, interleave=False)
    (signed,) = SignedColumnMajor().pack(codes, bits)
    nibbles = values.T & ((1 << bits) - 1)  # [N, K]
    rows = nibbles if bits == 8 else nibbles[:, ::2] | nibbles[:, 1::2] << 4
    assert signed.numpy().tolist() == rows.tolist()
    for layout, plane in ((PermutedColumnMajor(), hopper), (SignedColumnMajor(), signed)):
        assert torch.equal(layout.unpack((plane,), bits, (5, 192)), codes)


@pytest.mark.parametrize(("bits", "order"), [(4, ROWS_INT4), (8, ROWS_INT8)])
def test_row_order(bits: int, order: list[int]) -> None:
    step = PermuteRows(bits)
    assert step.order() == order
    elements = torch.arange(64, dtype=torch.uint8)[:, None].expand(64, 3)
    assert step.apply(elements)[:, 2].tolist() == order + [len(order) + row for row in order] + (
        [32 + row for row in order] + [48 + row for row in order] if bits == 8 else []
    )


def test_column_interleave() -> None:
    elements = torch.arange(8)[:, None] * 1000 + torch.arange(128)  # n, k
    line = InterleaveColumns(4).apply(elements)
    assert line.shape == (2, 512)
    assert line[0, [0, 63, 64, 192, 255, 256]].tolist() == [0, 63, 1000, 3000, 3063, 64]
    assert line[1, 0] == 4000
    pair = InterleaveColumns(8).apply(elements)
    assert pair.shape == (4, 256)
    assert pair[0, [0, 64, 128]].tolist() == [0, 1000, 64]


def test_bias_and_register_order() -> None:
    signed = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    assert BiasAndRegisterOrder(4).apply(signed).tolist() == [8, 10, 12, 14, 9, 11, 13, 15]
    minus_eight_is_code_zero = torch.full((8,), 0x8, dtype=torch.uint8)
    assert not BiasAndRegisterOrder(4).apply(minus_eight_is_code_zero).any()
    assert BiasAndRegisterOrder(8).apply(signed).tolist() == [128, 130, 129, 131, 132, 134, 133, 135]


@pytest.mark.parametrize("bits", [4, 8])
@settings(deadline=None, max_examples=15)
@given(n=st.integers(1, 6), k=st.integers(1, 4), seed=st.integers(0, 99))
def test_each_step_has_its_inverse(bits: int, n: int, k: int, seed: int) -> None:
    elements = random_codes(64 * k, 4 * n, bits, seed)
    for step in ColumnMajorTileInterleave().steps(bits):
        after = step.apply(elements)
        assert torch.equal(step.undo(after), elements)
        elements = after


def test_transpose() -> None:
    elements = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    assert ToColumnMajor().apply(elements).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_disk_form_is_signed_with_the_even_column_low() -> None:
    codes = torch.tensor([[7], [10]], dtype=torch.uint8)  # n = 0: -1, n = 1: +2
    stored = to_signed_row_major(codes, 4)
    assert stored.dtype == torch.int8
    assert stored.view(torch.uint8).tolist() == [[0x2F]]
    assert to_signed_row_major(torch.tensor([[0], [255]], dtype=torch.uint8), 8).tolist() == [[-128, 127]]


@pytest.mark.parametrize("bits", [4, 8])
def test_disk_form_round_trip(bits: int) -> None:
    codes = random_codes(7, 10, bits)
    assert torch.equal(from_signed_row_major(to_signed_row_major(codes, bits), bits, 7), codes)


def test_refusals_name_every_reason() -> None:
    layout = ColumnMajorTileInterleave()
    with pytest.raises(ValueError, match="K must be a multiple of 64; N must be a multiple of 4"):
        layout.pack(random_codes(6, 100, 4), 4)
    assert layout.refusals(8, (6, 64)) == ()
    assert layout.refusals(8, (5, 64)) == ("N must be a multiple of 2",)
    with pytest.raises(ValueError, match="it holds 4-bit and 8-bit codes, not 6-bit ones"):
        layout.pack(random_codes(4, 64, 6), 6)
