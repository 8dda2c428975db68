from __future__ import annotations

import numpy as np
import pytest

from lowbit.hardware.mma import MMA_M16N8K16_F16, MMA_M16N8K32_S8, MmaAtom, wgmma_f16
from tests.hardware.emulate import ldmatrix, mma, register_values


@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_ldmatrix_gives_each_lane_four_neighbouring_bytes(matrices: int) -> None:
    rng = np.random.default_rng(matrices)
    shared = rng.integers(0, 256, 2048, dtype=np.uint8)
    addresses = 16 * rng.permutation(128)[: 8 * matrices].reshape(matrices, 8)
    registers = ldmatrix(shared, addresses)
    assert registers.shape == (32, matrices)
    for lane in range(32):
        for matrix in range(matrices):
            start = addresses[matrix, lane // 4] + 4 * (lane % 4)
            assert registers[lane, matrix] == int.from_bytes(shared[start : start + 4].tobytes(), "little")


def test_ldmatrix_refuses_what_the_device_refuses() -> None:
    shared = np.zeros(1024, dtype=np.uint8)
    with pytest.raises(ValueError, match="1, 2 or 4 matrices"):
        ldmatrix(shared, np.zeros((3, 8), dtype=np.int64))
    with pytest.raises(ValueError, match="multiples of 16"):
        ldmatrix(shared, np.full((1, 8), 8))


def test_ldmatrix_of_a_16_bit_matrix_is_the_a_fragment_of_mma() -> None:
    """The four 8 x 8 matrices of a row-major 16 x 16 tile, rows first, become registers a0 to a3."""
    tile = np.arange(256, dtype=np.uint16).reshape(16, 16)
    origin = np.array([(0, 0), (8, 0), (0, 8), (8, 8)])  # row, column of each matrix
    addresses = 2 * ((origin[:, :1] + np.arange(8)) * 16 + origin[:, 1:])
    registers = ldmatrix(tile.view(np.uint8).ravel(), addresses)
    held = np.ascontiguousarray(registers).view(np.uint16).reshape(32, 4, 2)
    np.testing.assert_array_equal(held, MMA_M16N8K16_F16.a.gather(tile))


@pytest.mark.parametrize(
    ("atom", "operand", "dtype"),
    [(MMA_M16N8K16_F16, "f16", np.float16), (MMA_M16N8K32_S8, "s8", np.int8), (MMA_M16N8K32_S8, "u8", np.uint8)],
)
def test_mma_multiplies(atom: MmaAtom, operand: str, dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(0)
    assert atom.b is not None
    a = rng.integers(0, 100, (atom.m, atom.k)).astype(dtype)
    b = rng.integers(0, 100, (atom.k, atom.n)).astype(dtype)
    c = rng.integers(-5, 5, (atom.m, atom.n)).astype(np.float64)
    held_a = atom.a.gather(a).view(np.uint32)[..., 0]
    held_b = atom.b.gather(b).view(np.uint32)[..., 0]
    d = mma(atom, operand, held_a, held_b, atom.c.gather(c)[..., 0])
    np.testing.assert_array_equal(atom.c.scatter(d[..., None]), a.astype(np.float64) @ b.astype(np.float64) + c)


def test_bf16_is_the_upper_half_of_a_float() -> None:
    registers = np.array([[0x3F804000]], dtype=np.uint32)  # low half 0x4000 = 2.0, high half 0x3F80 = 1.0
    np.testing.assert_array_equal(register_values(registers, "bf16"), [[[2.0, 1.0]]])


def test_mma_refuses_other_operands() -> None:
    none = np.zeros((32, 4), dtype=np.uint32)
    acc = np.zeros((32, 4))
    with pytest.raises(ValueError, match="takes f16 or bf16 operands, got s8"):
        mma(MMA_M16N8K16_F16, "s8", none, none[:, :2], acc)
    with pytest.raises(ValueError, match="from shared memory"):
        mma(wgmma_f16(8), "f16", none, none, acc)
    with pytest.raises(ValueError, match="operand is f16"):
        register_values(none, "e4m3")
