"""An emulated warp multiplies packed bytes without a GPU: loads, conversion programs and tensor-core fragments.

Weights and activations are small integers (or few-bit floats), so every product and every sum is exact and the result
must equal x w^T to the last bit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lowbit.formats import NumberFormat, decode, float_format, int_format, uint_format
from lowbit.hardware.conversions import conversion
from lowbit.hardware.mma import MMA_M16N8K16_F16, MMA_M16N8K32_S8, Fragment
from lowbit.pack import ColumnMajorTileInterleave, FragmentOrder
from lowbit.pack.fragment import word_places
from tests.hardware.emulate import Registers, Values, ldmatrix, mma

from .test_layout import random_codes

ATOM = MMA_M16N8K16_F16
FORMATS = [int_format(bits) for bits in range(2, 9)] + [
    uint_format(4),
    *(float_format(e, m) for e, m in ((3, 2), (2, 3), (2, 2), (2, 1))),
]
TILE_K = 64


def activations(m: int, k: int) -> NDArray[np.float16]:
    """Integers x [M, K] from -4 to 3 as fp16."""
    return np.random.default_rng(m * k).integers(-4, 4, (m, k)).astype(np.float16)


def registers_of(fragment: Fragment, tile: NDArray[np.generic]) -> Registers:
    """Registers [threads, registers] that hold `tile`, as if loaded element by element."""
    held: Registers = np.ascontiguousarray(fragment.gather(tile)).view(np.uint32)
    return held[..., 0]


def converted(words: Registers, fmt: NumberFormat) -> Registers:
    """Converts words [threads, words] to f16x2 registers [threads, registers]."""
    c = conversion(fmt, "fp16")
    outputs = []
    for run in range(words.shape[1] // c.fields.words):
        outputs += c.program.run([words[:, c.fields.words * run + i] for i in range(c.fields.words)])
    return np.stack(outputs, axis=1)


# ---- TensorRT-LLM's layout: interleaved lines -> shared memory -> ldmatrix -> conversion -> mma; weights are operand B


def shared_tile(packed: NDArray[np.uint8], bits: int, k_tile: int) -> NDArray[np.uint8]:
    """Shared memory [N, bytes of 64 elements of K] of one k tile: each 128-byte line is split into one row per column."""
    lines = packed.reshape(packed.shape[0], -1, 128)[:, k_tile]  # set of columns, byte
    return lines.reshape(-1, TILE_K * bits // 8)


def ldmatrix_of_columns(shared: NDArray[np.uint8]) -> Registers:
    """Words [32 lanes, words] that ldmatrix loads of 8 columns. Each 16-byte segment of the 8 rows is one 8 x 8 matrix of
    16-bit elements.
    """
    columns, row_bytes = shared.shape
    addresses = row_bytes * np.arange(columns) + 16 * np.arange(row_bytes // 16)[:, None]  # matrix, row of the matrix
    return ldmatrix(shared.ravel(), addresses)


@pytest.mark.parametrize("bits", [4, 8])
def test_interleaved_weights(bits: int) -> None:
    m, n, k = 16, 8, 192
    codes = random_codes(n, k, bits, seed=bits)
    x = activations(m, k)
    packed = ColumnMajorTileInterleave().pack(codes, bits)[0].numpy()
    total: Values = np.zeros((32, ATOM.c.registers))
    for k_tile in range(k // TILE_K):
        words = ldmatrix_of_columns(shared_tile(packed, bits, k_tile))
        b = converted(words, int_format(bits))  # registers b0 and b1 of each k step, in order
        for step in range(TILE_K // ATOM.k):
            first = TILE_K * k_tile + ATOM.k * step
            a = registers_of(ATOM.a, x[:, first : first + ATOM.k])
            total = mma(ATOM, "f16", a, b[:, 2 * step : 2 * step + 2], total)
    y = ATOM.c.scatter(total[..., None])
    np.testing.assert_array_equal(y, x.astype(np.float64) @ decode(codes, int_format(bits)).double().numpy().T)


def test_without_the_row_permutation_lanes_hold_foreign_codes() -> None:
    """With plain column-major int4, ldmatrix gives lane 0 the k of lanes 0 to 3. Step 1 of the layout, the row permutation,
    prevents this.
    """
    column = torch.arange(32, dtype=torch.uint8) % 16
    nibbles = (column[::2] | column[1::2] << 4).numpy()
    word = ldmatrix(np.tile(nibbles, 8), 16 * np.arange(8)[None, :])[0, 0]
    assert [int(word) >> (4 * slot) & 0xF for slot in range(8)] == list(range(8))  # wanted 0 1 8 9 16 17 24 25


# ---- fragment order: words from global memory directly to registers -> conversion -> mma; weights are operand A


def warp_words(plane: torch.Tensor, row_block: int, k_tile: int, bits: int) -> Registers:
    """Words [32 lanes, bits] of one tile, as the lanes of a warp load them."""
    words: Registers = plane[row_block, k_tile][word_places(bits)].numpy().view(np.uint32)
    return words


def b_of_step(x: NDArray[np.float16], k_tile: int, step: int) -> Registers:
    """B registers [32, 2] of x^T for one k step, with k in the order of the instruction."""
    first = TILE_K * k_tile + ATOM.k * step
    assert ATOM.b is not None
    return registers_of(ATOM.b, x[:, first : first + ATOM.k].T)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_fragment_order_weights(fmt: NumberFormat) -> None:
    m, n, k = 8, 64, 128
    codes = random_codes(n, k, fmt.bits, seed=fmt.bits)
    x = activations(m, k)
    (plane,) = FragmentOrder(ATOM, fmt).pack(codes, fmt.bits)
    y = np.empty((m, n))
    for warp in range(4):
        total: Values = np.zeros((32, ATOM.c.registers))
        for k_tile in range(k // TILE_K):
            a = converted(warp_words(plane, warp, k_tile, fmt.bits), fmt)
            for step in range(TILE_K // ATOM.k):
                b = b_of_step(x, k_tile, step)
                total = mma(ATOM, "f16", a[:, 4 * step : 4 * step + 4], b, total)
        y[:, 16 * warp : 16 * warp + 16] = ATOM.c.scatter(total[..., None]).T
    factor = conversion(fmt, "fp16").scale_factor  # the bias shift, folded into the scale
    np.testing.assert_array_equal(factor * y, x.astype(np.float64) @ decode(codes, fmt).double().numpy().T)


def test_int8_words_are_registers_of_the_int8_tensor_core() -> None:
    """With 8-bit operands, one XOR converts the four codes of a word from offset binary to two's complement."""
    m, n, k = 8, 64, 64
    atom = MMA_M16N8K32_S8
    assert atom.b is not None
    codes = random_codes(n, k, 8)
    x = np.random.default_rng(1).integers(-128, 128, (m, k)).astype(np.int8)
    (plane,) = FragmentOrder(atom).pack(codes, 8)
    y = np.empty((m, n))
    for warp in range(4):
        total: Values = np.zeros((32, atom.c.registers))
        a = warp_words(plane, warp, 0, 8) ^ np.uint32(0x80808080)
        for step in range(TILE_K // atom.k):
            b = registers_of(atom.b, x[:, atom.k * step : atom.k * (step + 1)].T)
            total = mma(atom, "s8", a[:, 4 * step : 4 * step + 4], b, total)
        y[:, 16 * warp : 16 * warp + 16] = atom.c.scatter(total[..., None]).T
    np.testing.assert_array_equal(y, x.astype(np.float64) @ decode(codes, int_format(8)).double().numpy().T)
