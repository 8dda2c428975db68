"""Layouts: named, invertible orders of codes in memory.

A layout converts codes uint8 [N, K] to planes, which are tensors (every layout here has one), and back without loss:
`layout.unpack(layout.pack(codes, bits), bits, codes.shape)` equals `codes` for every shape that `refusals` accepts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Shape = tuple[int, int]


def check_bits(bits: int) -> None:
    """Raises ValueError unless 2 <= bits <= 8."""
    if not 2 <= bits <= 8:
        raise ValueError(f"codes have 2 to 8 bits, got {bits}")


def check_codes(codes: Tensor, bits: int) -> None:
    """Raises ValueError unless `codes` is a uint8 matrix [N, K] of values below 2^bits."""
    check_bits(bits)
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"codes are a uint8 tensor [N, K], got {codes.dtype} {list(codes.shape)}")
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"codes of {bits} bits are below {1 << bits}, got {int(codes.max())}")


class Layout(ABC):
    """An order of codes in memory. Subclasses are frozen dataclasses, so layouts compare by value."""

    @property
    @abstractmethod
    def plane_dtype(self) -> torch.dtype:
        """Type of the planes: uint8 bytes or int32 words."""

    @abstractmethod
    def plane_shapes(self, bits: int, shape: Shape) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the planes for codes of `bits` bits and shape (N, K)."""

    @abstractmethod
    def _pack(self, codes: Tensor, bits: int) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def _unpack(self, planes: tuple[Tensor, ...], bits: int, shape: Shape) -> Tensor: ...

    def refusals(self, bits: int, shape: Shape) -> tuple[str, ...]:
        """Returns the reasons why this layout cannot hold codes of `bits` bits and shape (N, K); empty if it can."""
        return ()

    def pack(self, codes: Tensor, bits: int) -> tuple[Tensor, ...]:
        """Returns the planes of codes uint8 [N, K]. Raises ValueError with every reason if the layout refuses them."""
        check_codes(codes, bits)
        self.check(bits, (codes.shape[0], codes.shape[1]))
        return self._pack(codes, bits)

    def unpack(self, planes: tuple[Tensor, ...], bits: int, shape: Shape) -> Tensor:
        """Returns the codes uint8 [N, K] of planes; the inverse of `pack`. Raises ValueError for planes of another shape or
        type."""
        self.check_planes(planes, bits, shape)
        return self._unpack(planes, bits, shape)

    def check(self, bits: int, shape: Shape) -> None:
        """Raises ValueError with every reason if the layout refuses codes of `bits` bits and shape (N, K)."""
        check_bits(bits)
        reasons = self.refusals(bits, shape)
        if reasons:
            raise ValueError(f"{self} cannot hold {bits}-bit codes of shape {tuple(shape)}: {'; '.join(reasons)}")

    def check_planes(self, planes: tuple[Tensor, ...], bits: int, shape: Shape) -> None:
        """Raises ValueError unless `planes` have the type and the shapes that codes of `bits` bits and `shape` need."""
        self.check(bits, shape)
        expected = self.plane_shapes(bits, shape)
        found = tuple(tuple(plane.shape) for plane in planes)
        if found != expected or any(plane.dtype != self.plane_dtype for plane in planes):
            raise ValueError(
                f"{self} holds {bits}-bit codes of shape {tuple(shape)} in {self.plane_dtype} planes {expected}, "
                f"got {', '.join(f'{plane.dtype} {tuple(plane.shape)}' for plane in planes)}"
            )
