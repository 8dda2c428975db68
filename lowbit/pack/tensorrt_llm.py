"""ColumnMajorTileInterleave: int4 and int8 weights as TensorRT-LLM and FasterTransformer store them for sm_75 to sm_89, and
the two orders that TensorRT-LLM has for other GPUs.

On disk they keep w^T row-major: int8 [K, N * bits / 8], signed; at 4 bits two columns a byte, the even n in the low
nibble. Four invertible steps convert it to the order of their kernels. At 4 bits (differences at 8 bits in brackets):

    1 permute rows         of each 32 (16) rows: 0 1 8 9 16 17 24 25 | 2 3 10 11 18 19 26 27 | ... (0 1 8 9 | 2 3 10 11 | ...)
                           ldmatrix gives a lane 4 neighbouring bytes; now they belong to the lane's B fragments
    2 to column-major      [K, N] -> [N, K]: k runs fastest
    3 interleave columns   [N, K] -> [N/4, K/64, 4 n, 64 k] (2 n): a 128-byte line holds 64 elements along K of 4
                           neighbouring n; storing it to shared-memory rows of 64 elements undoes the step
    4 bias and order       + 8 (+ 128), then in each 32-bit word nibbles 7 5 3 1 6 4 2 0 (bytes 3 1 2 0), highest first:
                           LOP3 with 0x000f000f takes elements 0 and 1, so the conversion outputs elements in order

With 4-bit weights and fp8 activations a line holds 128 elements along K, not 64, of 2 columns, and rows are in the order of
m16n8k32's fragment: 0 1 2 3 16 17 18 19 | 4 5 6 7 20 21 22 23 | ...

The result depends on the generation of kernels, so it is never a storage format of this library. Kernels of sm_120 and newer
read the order of sm_80. For sm_90 step 3 is omitted (`PermutedColumnMajor`); for sm_90 in earlier releases and for sm_100 all
steps but step 2 are omitted (`SignedColumnMajor`). Their code requires N to be a multiple of 8 at least; the steps only need a
multiple of 4 (2, 1). Source: TensorRT-LLM and FasterTransformer, preprocess_weights_for_mixed_gemm in cutlass_preprocessors
(.cpp, .cc) and in tensorrt_llm/quantization/functional.py.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowbit.formats.words import pack_words, unpack_words
from lowbit.hardware.fields import WORD_BITS
from lowbit.hardware.mma import b_fragment
from lowbit.pack.layout import Layout, Shape

_LINE_BITS = 1024  # of a cache line of 128 bytes


class PreprocessingStep(Protocol):
    """One step of the preprocessing. It maps elements, one per uint8 of the tensor, and `undo(apply(x))` is x."""

    def apply(self, elements: Tensor) -> Tensor: ...

    def undo(self, elements: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PermuteRows:
    """Step 1, [K, N] -> [K, N]: within each 32 rows (16 at 8 bits), the rows of one lane's B fragments become adjacent."""

    bits: int
    activation_bits: int = 16

    def order(self) -> list[int]:
        """Source row of each row: 0 1 8 9 16 17 24 25 2 3 ... at 4 bits. Computed from the B fragment of mma.m16n8k16 (m16n8k32
        for 8-bit activations)."""
        fragment = b_fragment(k=256 // self.activation_bits, bits=self.activation_bits)
        k, n = fragment.coordinates()
        column = k[n[:, 0, 0] == 0].reshape(4, -1)  # the 4 lanes that hold column 0; k of a lane in register order
        steps = WORD_BITS // self.bits // column.shape[1]  # number of k steps whose elements fill one 32-bit register
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
    """Step 3, [N, K] -> [N / c, K * c]: tiles of 64 rows of K alternate between c neighbouring columns; c is 4 at 4 bits, 2 at
    8 bits. For 8-bit activations tiles have 128 rows of K, and c is 2 at 4 bits."""

    bits: int
    activation_bits: int = 16

    @property
    def tile_k(self) -> int:
        """Number of elements along K in a tile: 128 bytes of activations."""
        return _LINE_BITS // self.activation_bits

    @property
    def columns(self) -> int:
        """Number of columns whose tiles share a 128-byte line."""
        return self.activation_bits // self.bits

    def apply(self, elements: Tensor) -> Tensor:
        n, k = elements.shape
        tiled = elements.reshape(n // self.columns, self.columns, k // self.tile_k, self.tile_k)  # set, column, k_tile, k
        return tiled.transpose(1, 2).flatten(1)  # set, (k_tile, column, k)

    def undo(self, elements: Tensor) -> Tensor:
        tiled = torch.unflatten(elements, 1, (-1, self.columns, self.tile_k))  # set, k_tile, column, k
        return tiled.transpose(1, 2).flatten(2).flatten(0, 1)  # (set, column), (k_tile, k)


@dataclass(frozen=True)
class BiasAndRegisterOrder:
    """Step 4, [..., L] -> [..., L]: adds 2^(bits-1), and moves even elements before odd elements in each 32-bit register."""

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
    """Returns 2^(bits-1). Adding it to a two's complement number flips the top bit, which converts between signed and offset
    binary."""
    return 1 << (bits - 1)


class _Preprocessed(Layout):
    """Base class of layouts that are a sequence of steps. The plane has the same bytes as TensorRT-LLM's int8 [K, N * bits / 8]
    tensor after preprocessing. Codes [N, K] of this library are offset binary (value + 8 or + 128)."""

    @abstractmethod
    def steps(self, bits: int) -> tuple[PreprocessingStep, ...]:
        """Returns the steps in order, from signed elements [K, N] to the elements of the plane."""

    @abstractmethod
    def columns(self, bits: int) -> int:
        """Returns the number of columns of w^T in one row of the plane; N must be a multiple of it."""

    @abstractmethod
    def step_k(self, bits: int) -> int:
        """Returns the number that K must be a multiple of."""

    @property
    def plane_dtype(self) -> torch.dtype:
        return torch.uint8

    def plane_shapes(self, bits: int, shape: Shape) -> tuple[tuple[int, ...], ...]:
        columns = self.columns(bits)
        return ((shape[0] // columns, shape[1] * columns * bits // 8),)

    def refusals(self, bits: int, shape: Shape) -> tuple[str, ...]:
        if bits not in (4, 8):
            return (f"it holds 4-bit and 8-bit codes, not {bits}-bit ones",)
        reasons = []
        if shape[1] % self.step_k(bits):
            reasons.append(f"K must be a multiple of {self.step_k(bits)}")
        if shape[0] % self.columns(bits):
            reasons.append(f"N must be a multiple of {self.columns(bits)}")
        return tuple(reasons)

    def _pack(self, codes: Tensor, bits: int) -> tuple[Tensor, ...]:
        elements = (codes ^ _sign_bit(bits)).t()  # signed, [K, N]
        for step in self.steps(bits):
            elements = step.apply(elements)
        return (pack_words(elements, bits),)

    def _unpack(self, planes: tuple[Tensor, ...], bits: int, shape: Shape) -> Tensor:
        elements = unpack_words(planes[0], bits, shape[1] * self.columns(bits))
        for step in reversed(self.steps(bits)):
            elements = step.undo(elements)
        return (elements.t() ^ _sign_bit(bits)).contiguous()


@dataclass(frozen=True)
class ColumnMajorTileInterleave(_Preprocessed):
    """The order for sm_75 to sm_89, sm_120 and newer: all four steps, biased codes in one plane uint8 [N / c, K * c * bits / 8]
    with c = 4 or 2 columns. K must be a multiple of 64, N of c. With `activation_bits` 8 and 4-bit codes, tiles have 128 rows
    of K, and c is 2."""

    activation_bits: int = 16

    def steps(self, bits: int) -> tuple[PreprocessingStep, ...]:
        width = self.activation_bits
        return PermuteRows(bits, width), ToColumnMajor(), InterleaveColumns(bits, width), BiasAndRegisterOrder(bits)

    def columns(self, bits: int) -> int:
        return InterleaveColumns(bits, self.activation_bits).columns

    def step_k(self, bits: int) -> int:
        return InterleaveColumns(bits, self.activation_bits).tile_k

    def refusals(self, bits: int, shape: Shape) -> tuple[str, ...]:
        if self.activation_bits == 8 and bits != 4:
            return (f"it holds 4-bit codes for activations of 8 bits, not {bits}-bit ones",)
        return super().refusals(bits, shape)


@dataclass(frozen=True)
class PermutedColumnMajor(_Preprocessed):
    """The order for sm_90: all steps except step 3, which interleaves columns. One plane uint8 [N, K * bits / 8]; K must be a
    multiple of 32 at 4 bits, of 16 at 8."""

    def steps(self, bits: int) -> tuple[PreprocessingStep, ...]:
        return PermuteRows(bits), ToColumnMajor(), BiasAndRegisterOrder(bits)

    def columns(self, bits: int) -> int:
        return 1

    def step_k(self, bits: int) -> int:
        return len(PermuteRows(bits).order())


@dataclass(frozen=True)
class SignedColumnMajor(_Preprocessed):
    """The order for sm_90 in earlier releases, and for sm_100: w [N, K] row by row in two's complement, the even k in the low
    nibble. One plane uint8 [N, K * bits / 8]."""

    def steps(self, bits: int) -> tuple[PreprocessingStep, ...]:
        return (ToColumnMajor(),)

    def columns(self, bits: int) -> int:
        return 1

    def step_k(self, bits: int) -> int:
        return 8 // bits


def to_signed_row_major(codes: Tensor, bits: int) -> Tensor:
    """Converts codes uint8 [N, K] to the tensor on disk, int8 [K, ceil(N * bits / 8)]: signed, even n in the low nibble."""
    return pack_words((codes ^ _sign_bit(bits)).t(), bits).view(torch.int8)


def from_signed_row_major(stored: Tensor, bits: int, n: int) -> Tensor:
    """Returns the codes uint8 [n, K] of the tensor on disk, int8 [K, ceil(n * bits / 8)]; the inverse of
    `to_signed_row_major`."""
    return (unpack_words(stored.view(torch.uint8), bits, n).t() ^ _sign_bit(bits)).contiguous()
