"""Orders of a convolution's numbers in memory: what every layout can do, and the columns that a thread holds of its sums.

A layout says where each weight lies (`arrange`, which moves elements and fills up with zeros, whatever their type); packing and
its inverse follow from that. A thread holds some columns of a tile of sums, and it is to hold neighbouring channels of the
output, 16 bytes of them where the tile is wide enough, so that it stores what it has computed without an exchange. So weights
and constants, not activations, carry every permutation.
Source: accumulator and operand A of wgmma, PTX ISA (hardware/mma.py).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.formats.conv import ACTIVATIONS, CODES, ConvLayer, ProductSpec
from lowbit.hardware.mma import wgmma_s8
from lowbit.pack.nhwc64 import padded_channels

GROUP = 8
"""Columns that are requantized together: one word of 4-bit codes, two of 8-bit ones."""

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedConv:
    """A layer's numbers as one kernel reads them: weights in a layout, s and b in the order of its columns, g; those of a
    second product, if there is one."""

    weight: Tensor
    s: Tensor
    b: Tensor
    g: float = 0.0
    weight2: Tensor | None = None
    s2: Tensor | None = None


class ConvLayout(ABC):
    """An order of weights int8 [O, C, R, S] in memory. Subclasses are frozen dataclasses, so layouts compare by value."""

    @abstractmethod
    def refusals(self, shape: Shape) -> tuple[str, ...]:
        """Returns the reasons why the layout cannot hold weights of this shape; empty if it can."""

    @abstractmethod
    def arrange(self, weight: Tensor) -> Tensor:
        """The elements of `weight`, of any type, in memory order, padded with zeros."""

    @abstractmethod
    def constants(self, values: Tensor) -> Tensor:
        """Constants [O] of the outputs, float32, in the order in which the kernel loads them, padded with zeros."""

    def of_second(self, product: ProductSpec) -> ConvLayout:
        """The layout of a second product's weights beside this one's."""
        raise ValueError(f"{self} is of one product")

    def pack(self, weight: Tensor) -> Tensor:
        """Weights in memory order. Raises ValueError with every reason when the layout refuses them."""
        self._check(tuple(weight.shape))
        return self.arrange(weight)

    def unpack(self, packed: Tensor, shape: Shape) -> Tensor:
        """Weights [O, C, R, S] of this shape; the inverse of `pack`."""
        self._check(shape)
        count = torch.Size(shape).numel()
        places = self.arrange(torch.arange(1, count + 1, device=packed.device).reshape(shape)).flatten()
        found = packed.new_zeros(count + 1)
        found[places] = packed.flatten()
        return found[1:].reshape(shape)

    def pack_layer(self, layer: ConvLayer) -> PackedConv:
        """All numbers of a layer. Raises ValueError as `pack` does."""
        weight2 = s2 = None
        if layer.second is not None and layer.spec.second is not None:
            weight2 = self.of_second(layer.spec.second).pack(layer.second.weight)
            s2 = self.constants(layer.second.s)
        return PackedConv(self.pack(layer.weight), self.constants(layer.s), self.constants(layer.b), layer.g, weight2, s2)

    def _check(self, shape: Shape) -> None:
        reasons = self.refusals(shape)
        if reasons:
            raise ValueError(f"{self} cannot hold weights {list(shape)}: {'; '.join(reasons)}")


@functools.cache
def held_columns(columns: int) -> tuple[tuple[int, ...], ...]:
    """The columns of sums [64, columns] that each of a row's four threads holds, in the order of its registers."""
    rows, places = (part[:4, :, 0] for part in wgmma_s8(columns).c.coordinates())
    return tuple(tuple(int(place) for place, row in zip(places[q], rows[q], strict=True) if row == 0) for q in range(4))


@functools.cache
def held_places(count: int) -> tuple[tuple[int, ...], ...]:
    """The indices along K of operand A [64, count] that each of a row's four threads holds, register by register."""
    rows, places = (part[:4].reshape(4, -1) for part in wgmma_s8(64).a.tiled(64, count).coordinates())
    return tuple(tuple(int(place) for place, row in zip(places[q], rows[q], strict=True) if row == 0) for q in range(4))


def group_order(y: str) -> tuple[int, ...]:
    """Channel within a group of 8 of the i-th column that a thread holds.

    For 4-bit codes bytes of the first four columns give the low halves of a word and those of the last four the high halves.
    """
    return (0, 2, 4, 6, 1, 3, 5, 7) if y == "u4" else (0, 1, 2, 3, 4, 5, 6, 7)


def unit_channels(y: str, outputs: int) -> int:
    """Channels that the four threads of a row store with one instruction each: 16 bytes a thread where there are so many."""
    return min(outputs, 4 * 128 // CODES[y].bits) if y in ACTIVATIONS else outputs


@functools.cache
def column_order(y: str, outputs: int) -> tuple[int, ...]:
    """Output channel (within a tile of `outputs`) of each column of the product; y is the storage of the output."""
    if y not in ACTIVATIONS:
        return tuple(range(outputs))
    unit = unit_channels(y, outputs)
    order = [0] * outputs
    for first in range(0, outputs, unit):
        for q, held in enumerate(held_columns(unit)):
            for i, column in enumerate(held):
                group, inside = divmod(i, GROUP)
                order[first + column] = first + q * (unit // 4) + group * GROUP + group_order(y)[inside]
    return tuple(order)


def filled_up(weight: Tensor) -> Tensor:
    """Weights [O, C, R, S] with outputs and channels filled up to whole 64 with zeros."""
    o, c = weight.shape[:2]
    return functional.pad(weight, (0, 0, 0, 0, 0, padded_channels(c) - c, 0, padded_channels(o) - o))


def by_columns(weight: Tensor, y: str, outputs: int) -> Tensor:
    """[tiles, outputs, C, taps] of weights [O, C, R, S]: tiles of `outputs` in the order of their columns, filled up."""
    full = filled_up(weight)
    columns = torch.tensor(column_order(y, outputs), device=weight.device)
    return full.reshape(-1, outputs, full.shape[1], full.shape[2] * full.shape[3])[:, columns]


def column_constants(values: Tensor, y: str, outputs: int) -> Tensor:
    """Constants [O] in the order of the columns, filled up with zeros: float32 [tiles of outputs * outputs]."""
    columns = torch.tensor(column_order(y, outputs), device=values.device)
    full = functional.pad(values.float(), (0, padded_channels(values.shape[0]) - values.shape[0]))
    return full.reshape(-1, outputs)[:, columns].reshape(-1).contiguous()


def lane_constants(values: Tensor, y: str, outputs: int) -> Tensor:
    """As `column_constants`, but of each 16 columns of a tile, the 4 of a lane (of four) are neighbours: one load of 16
    bytes."""
    columns = column_constants(values, y, outputs).reshape(-1, 2, 4, 2)
    return columns.permute(0, 2, 1, 3).reshape(-1).contiguous()
