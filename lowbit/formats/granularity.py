"""Granularities: how many elements of a matrix [N, K] share one scale.

Rows are output channels of weights. `block` returns the rows and columns that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole matrix: [N, K] -> [1, 1]."""

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return max(shape[0], 1), max(shape[1], 1)


@dataclass(frozen=True)
class PerChannel:
    """One scale per output channel (coarse-grained, "CGQ"): [N, K] -> [N, 1]."""

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 1, max(shape[1], 1)


@dataclass(frozen=True)
class PerGroup:
    """One scale per `size` neighbours along K (fine-grained, "FGQ"): [N, K] -> [N, ceil(K / size)].

    The last group is shorter when `size` does not divide K: K = 576 in groups of 128 has 5 scales, the last for 64.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a group has at least 1 element, got {self.size}")

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 1, self.size


@dataclass(frozen=True)
class PerBlock:
    """One scale per block of n x k weights: [N, K] -> [ceil(N / n), ceil(K / k)]; blocks at the edges may be smaller."""

    n: int
    k: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise ValueError(f"a block has at least 1 x 1 elements, got {self.n} x {self.k}")

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        return self.n, self.k


Granularity = PerTensor | PerChannel | PerGroup | PerBlock


def scale_shape(granularity: Granularity, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the shape of the scales of a matrix of `shape` [N, K]."""
    n, k = granularity.block(shape)
    return -(-shape[0] // n), -(-shape[1] // k)


def spread(scale: Tensor, granularity: Granularity, shape: tuple[int, int]) -> Tensor:
    """Returns scales (or zeros) of `scale_shape` expanded to one value per element, [N, K].

    Raises ValueError when the scales do not have the granularity's shape.
    """
    expected = scale_shape(granularity, shape)
    if tuple(scale.shape) != expected:
        raise ValueError(f"{granularity} of a {shape} matrix has scales of shape {expected}, got {tuple(scale.shape)}")
    n, k = granularity.block(shape)
    rows = scale.repeat_interleave(n, dim=0)[: shape[0]] if n > 1 else scale
    return rows.repeat_interleave(k, dim=1)[:, : shape[1]] if k > 1 else rows
