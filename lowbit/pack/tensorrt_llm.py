"""ColumnMajorTileInterleave: int4 and int8 weights as TensorRT-LLM and FasterTransformer store them for sm_75 to sm_89.

On disk they keep w^T row-major: int8 [K, N * bits / 8], signed; at 4 bits two columns a byte, the even n in the low
nibble. Four steps, each invertible, make of it what their kernels read. At 4 bits (differences at 8 bits in brackets):

    1 permute rows         rows of each 32 (16) k: 0 1 8 9 16 17 24 25 | 2 3 10 11 18 19 26 27 | ... (0 1 8 9 | 2 3 10 11 | ...)
                           ldmatrix gives a lane 4 neighbouring bytes; now they are the k of its own B fragments
    2 to column-major      [K, N] -> [N, K]: k runs fastest
    3 interleave columns   [N, K] -> [N/4, K/64, 4 n, 64 k] (2 n): a 128-byte line holds 64 k of 4 neighbouring n, and
                           storing it to shared-memory rows of 64 k undoes the step
    4 bias and order       + 8 (+ 128), then in each 32-bit word nibbles 7 5 3 1 6 4 2 0 (bytes 3 1 2 0), highest first:
                           LOP3 with 0x000f000f takes elements 0 and 1, so the conversion puts out the natural order

The result belongs to one generation of kernels (those for sm_90 read plain column-major weights), so it is never a
storage format of this library. Their code asks for N in multiples of 8 at least; the steps need 4 (2). Source:
TensorRT-LLM and FasterTransformer, cutlass_preprocessors (.cpp, .cc), preprocess_weights_for_mixed_gemm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowbit.formats.words import pack_words, unpack_words
from lowbit.hardware.fields import WORD_BITS
from lowbit.hardware.mma import b_fragment
from lowbit.pack.layout import Layout, Shape

TILE_K = 64  # one step of K: 128 bytes of 16-bit activations
_LINE_BITS = 1024  # of a cache line of 128 bytes


class Step(Protocol):
    """One step of the preprocessing. It maps elements, one per uint8 of the tensor, and `undo(apply(x))` is x."""

    def apply(self, elements: Tensor) -> Tensor: ...

    def undo(self, elements: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PermuteRows:
    """Step 1, [K, N] -> [K, N]: inside each 32 (16 at 8 bits) rows, those of one lane's B fragments come together."""

    bits: int

    def order(self) -> list[int]:
        """Row to read at each place: 0 1 8 9 16 17 24 25 2 3 ... at 4 bits, from the B fragment of mma.m16n8k16."""
        fragment = b_fragment(k=16, bits=16)
        k, n = fragment.coordinates()
        column = k[n[:, 0, 0] == 0].reshape(4, -1)  # the 4 lanes that hold column 0; k of a lane in register order
        steps = WORD_BITS // self.bits // column.shape[1]  # k steps whose elements fill one 32-bit register
        order = column[:, None, :] + fragment.rows * np.arange(steps)[None, :, None]  # lane, step, element
        return [int(row) for row in order.ravel()]

    def apply(self, elements: Tensor) -> Tensor:
        order = torch.tensor(self.order(), device=elements.device)
        return torch.unflatten(elements, 0, (-1, len(order)))[:, order].flatten(0, 1)

    def undo(self, elements: Tensor) -> Tensor:
        order = torch.tensor(self.order(), device=elements.device)
        return torch.unflatten(elements, 0, (-1, len(order)))[:, torch.argsort(order)].flatten(0, 1)


@dataclass(frozen=True)
class ToColumnMajor:
    """Step 2, [K, N] -> [N, K]: rows of the new tensor are columns of w^T, contiguous along K."""

    def apply(self, elements: Tensor) -> Tensor:
        return elements.t().contiguous()

    def undo(self, elements: Tensor) -> Tensor:
        return elements.t().contiguous()


@dataclass(frozen=True)
class InterleaveColumns:
    """Step 3, [N, K] -> [N / c, K * c]: tiles of 64 k of c neighbouring columns alternate; c = 4 at 4 bits, 2 at 8."""

    bits: int

    @property
    def columns(self) -> int:
        """Columns whose 64 k share one 128-byte line."""
        return _LINE_BITS // (self.bits * TILE_K)

    def apply(self, elements: Tensor) -> Tensor:
        n, k = elements.shape
        tiled = elements.reshape(n // self.columns, self.columns, k // TILE_K, TILE_K)  # set, column, k_tile, k
        return tiled.transpose(1, 2).flatten(1)  # set, (k_tile, column, k)

    def undo(self, elements: Tensor) -> Tensor:
        tiled = torch.unflatten(elements, 1, (-1, self.columns, TILE_K))  # set, k_tile, column, k
        return tiled.transpose(1, 2).flatten(2).flatten(0, 1)  # (set, column), (k_tile, k)


@dataclass(frozen=True)
class BiasAndRegisterOrder:
    """Step 4, [..., L] -> [..., L]: add 2^(bits-1); in each 32-bit register even elements first, then the odd ones."""

    bits: int

    @property
    def _register(self) -> int:
        return WORD_BITS // self.bits

    def apply(self, elements: Tensor) -> Tensor:
        biased = elements ^ _sign_bit(self.bits)
        pairs = torch.unflatten(biased, -1, (-1, self._register // 2, 2))  # register, pair, parity
        return pairs.transpose(-1, -2).flatten(-3)  # register, parity, pair

    def undo(self, elements: Tensor) -> Tensor:
        halves = torch.unflatten(elements, -1, (-1, 2, self._register // 2))  # register, parity, pair
        return halves.transpose(-1, -2).flatten(-3) ^ _sign_bit(self.bits)


def _sign_bit(bits: int) -> int:
    """Adding 2^(bits-1) to a two's complement number flips its top bit: the way between signed and offset binary."""
    return 1 << (bits - 1)


@dataclass(frozen=True)
class ColumnMajorTileInterleave(Layout):
    """Codes of 4 or 8 bits in the interleaved column-major tiles of the module's picture.

    Codes are offset binary (value + 8 or + 128). One plane uint8 [N / c, K * c * bits / 8] with c = 4 or 2 columns; it
    has the bytes of TensorRT-LLM's int8 [K, N * bits / 8] tensor after preprocessing, in the same order. K must be a
    multiple of 64, N of 4 at 4 bits and of 2 at 8 bits.
    """

    def steps(self, bits: int) -> tuple[Step, ...]:
        """The steps in order, from signed elements [K, N] to biased elements [N / c, K * c]."""
        return PermuteRows(bits), ToColumnMajor(), InterleaveColumns(bits), BiasAndRegisterOrder(bits)

    @property
    def plane_dtype(self) -> torch.dtype:
        return torch.uint8

    def plane_shapes(self, bits: int, shape: Shape) -> tuple[tuple[int, ...], ...]:
        columns = InterleaveColumns(bits).columns
        return ((shape[0] // columns, shape[1] * columns * bits // 8),)

    def refusals(self, bits: int, shape: Shape) -> tuple[str, ...]:
        if bits not in (4, 8):
            return (f"it holds 4-bit and 8-bit codes, not {bits}-bit ones",)
        reasons = []
        if shape[1] % TILE_K:
            reasons.append(f"K must be a multiple of {TILE_K}")
        if shape[0] % InterleaveColumns(bits).columns:
            reasons.append(f"N must be a multiple of {InterleaveColumns(bits).columns}")
        return tuple(reasons)

    def _pack(self, codes: Tensor, bits: int) -> tuple[Tensor, ...]:
        elements = (codes ^ _sign_bit(bits)).t()  # signed, [K, N]
        for step in self.steps(bits):
            elements = step.apply(elements)
        return (pack_words(elements, bits),)

    def _unpack(self, planes: tuple[Tensor, ...], bits: int, shape: Shape) -> Tensor:
        elements = unpack_words(planes[0], bits, shape[1] * InterleaveColumns(bits).columns)
        for step in reversed(self.steps(bits)):
            elements = step.undo(elements)
        return (elements.t() ^ _sign_bit(bits)).contiguous()


def to_signed_row_major(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K] -> the tensor on disk, int8 [K, ceil(N * bits / 8)]: signed, even n in the low nibble."""
    return pack_words((codes ^ _sign_bit(bits)).t(), bits).view(torch.int8)


def from_signed_row_major(stored: Tensor, bits: int, n: int) -> Tensor:
    """Codes uint8 [n, K] of the tensor on disk, int8 [K, ceil(n * bits / 8)]; the inverse of `to_signed_row_major`."""
    return (unpack_words(stored.view(torch.uint8), bits, n).t() ^ _sign_bit(bits)).contiguous()
