"""A warp in NumPy: ldmatrix from a byte array and mma.sync on register fragments, bit for bit.

For tests and the walkthrough: these two instructions and the conversion programs show, without a GPU, how packed bytes become a
product. Registers are uint32 arrays [lanes, registers].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.hardware.mma import Indices, MmaAtom

Registers = NDArray[np.uint32]
Values = NDArray[np.float64]

LANES = 32
_MATRIX_ROWS = 8
_ROW_BYTES = 16


def ldmatrix(shared: NDArray[np.uint8], addresses: Indices) -> Registers:
    """ldmatrix.sync.aligned.m8n8.x1/.x2/.x4.b16: registers [32, matrices] from `shared` bytes.

    `addresses` [matrices, 8] holds the byte address of each 16-byte row; on the device lane 8i + r passes that of row r
    of matrix i. Lane l receives bytes 4 (l % 4) to 4 (l % 4) + 3 of row l // 4 of every matrix, whatever they contain.
    Raises ValueError for another number of matrices than 1, 2 or 4, or an address that is no multiple of 16. Source:
    PTX ISA, ldmatrix.
    """
    if addresses.ndim != 2 or addresses.shape[0] not in (1, 2, 4) or addresses.shape[1] != _MATRIX_ROWS:
        raise ValueError(f"ldmatrix takes 8 row addresses for each of 1, 2 or 4 matrices, got shape {addresses.shape}")
    if np.any(addresses % _ROW_BYTES):
        raise ValueError("ldmatrix row addresses are multiples of 16 bytes")
    rows = shared[addresses[:, :, None] + np.arange(_ROW_BYTES)]  # [matrix, row, byte]
    words: Registers = np.ascontiguousarray(rows).view("<u4")  # [matrix, row, word]: lane = 4 * row + word
    registers: Registers = words.reshape(-1, LANES).T
    return registers.astype(np.uint32)


def register_values(registers: Registers, operand: str) -> Values:
    """The values [lanes, registers, elements] of registers that hold packed "f16", "bf16", "s8" or "u8" (`operand`)."""
    packed = np.ascontiguousarray(registers)
    if operand == "f16":
        values: NDArray[Any] = packed.view(np.float16)
    elif operand == "bf16":
        values = (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif operand in ("s8", "u8"):
        values = packed.view(np.int8 if operand == "s8" else np.uint8)
    else:
        raise ValueError(f"operand is f16, bf16, s8 or u8, got {operand!r}")
    return values.reshape(*registers.shape, -1).astype(np.float64)


def mma(atom: MmaAtom, operand: str, a: Registers, b: Registers, c: Values) -> Values:
    """The D fragment [32, registers] = A B + C of one mma.sync, from A and B registers of type `operand`.

    Sums in float64, so the result is exact whenever the true sum fits 53 bits; tensor cores round or truncate sums of
    floats in their own way, which is not modelled. Raises ValueError when the instruction takes B from shared memory or
    does not support the operand type.
    """
    if atom.b is None:
        raise ValueError(f"{atom} takes B from shared memory, not from registers")
    if operand not in atom.operands:
        raise ValueError(f"{atom} takes {' or '.join(atom.operands)} operands, got {operand}")
    a_tile: Values = atom.a.scatter(register_values(a, operand))
    b_tile: Values = atom.b.scatter(register_values(b, operand))
    product: Values = atom.c.gather(a_tile @ b_tile)[..., 0]  # one element per register
    return c + product
