"""Orders of a convolution's weights and constants in memory: the base class of layouts, and the assignment of output channels
to the columns that a thread holds.

A layout defines the position of each weight by `arrange`, which moves elements of any type and pads with zeros; packing and its
inverse follow from it. A thread holds some columns of a tile of sums. These should be neighbouring output channels, 16 bytes of
them if the tile is wide enough, so that a thread stores its results without an exchange. So all permutations are applied to
weights and constants, none to activations. Source: accumulator and operand A of wgmma, PTX ISA (hardware/mma.py).
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
"""Number of columns that are requantized together: one word of 4-bit codes, or two words of 8-bit codes."""

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedConv:
    """A layer's tensors for one kernel: weights in a layout, s and b in the order of the layout's columns, g; weights and s of
    a second product, if there is one."""

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
        """Returns the elements of `weight`, of any type, in memory order, padded with zeros."""

    @abstractmethod
    def constants(self, values: Tensor) -> Tensor:
        """Returns float32 constants [O] in the order in which the kernel loads them, padded with zeros."""

    def of_second(self, product: ProductSpec) -> ConvLayout:
        """Returns the layout of a second product's weights, for a layer whose first product has this layout."""
        raise ValueError(f"{self} is of one product")

    def pack(self, weight: Tensor) -> Tensor:
        """Returns weights in memory order. Raises ValueError with every reason why the layout refuses them."""
        self._check(tuple(weight.shape))
        return self.arrange(weight)

    def unpack(self, packed: Tensor, shape: Shape) -> Tensor:
        """Returns weights [O, C, R, S] of this shape; the inverse of `pack`."""
        self._check(shape)
        count = torch.Size(shape).numel()
        places = self.arrange(torch.arange(1, count + 1, device=packed.device).reshape(shape)).flatten()
        found = packed.new_zeros(count + 1)
        found[places] = packed.flatten()
        return found[1:].reshape(shape)

    def pack_layer(self, layer: ConvLayer) -> PackedConv:
        """Returns all packed tensors of a layer. Raises ValueError as `pack` does."""
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
    """Returns the columns of sums [64, columns] that each of a row's four threads holds, in the order of its registers."""
    rows, places = (part[:4, :, 0] for part in wgmma_s8(columns).c.coordinates())
    return tuple(tuple(int(place) for place, row in zip(places[q], rows[q], strict=True) if row == 0) for q in range(4))


@functools.cache
def held_places(count: int) -> tuple[tuple[int, ...], ...]:
    """Returns the indices along K of operand A [64, count] that each of a row's four threads holds, register by register."""
    rows, places = (part[:4].reshape(4, -1) for part in wgmma_s8(64).a.tiled(64, count).coordinates())
    return tuple(tuple(int(place) for place, row in zip(places[q], rows[q], strict=True) if row == 0) for q in range(4))


def group_order(y: str) -> tuple[int, ...]:
    """Returns, for each of the 8 columns of a group that a thread holds, its channel within the group.

    For 4-bit codes, the bytes of the first four columns become the low halves of a word's bytes, those of the last four the
    high halves.
    """
    return (0, 2, 4, 6, 1, 3, 5, 7) if y == "u4" else (0, 1, 2, 3, 4, 5, 6, 7)


def unit_channels(y: str, outputs: int) -> int:
    """Returns the number of channels that the four threads of a row store with one instruction each: 16 bytes per thread, or
    less if a tile has fewer channels."""
    return min(outputs, 4 * 128 // CODES[y].bits) if y in ACTIVATIONS else outputs


@functools.cache
def column_order(y: str, outputs: int) -> tuple[int, ...]:
    """Returns the output channel (within a tile of `outputs`) of each column of the product; y is the storage of the output."""
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
    """Returns weights [O, C, R, S] with outputs and channels padded with zeros to multiples of 64."""
    o, c = weight.shape[:2]
    return functional.pad(weight, (0, 0, 0, 0, 0, padded_channels(c) - c, 0, padded_channels(o) - o))


def by_columns(weight: Tensor, y: str, outputs: int) -> Tensor:
    """Returns weights [O, C, R, S] as [tiles, outputs, C, taps]: padded, in tiles of `outputs` outputs in the order of
    columns."""
    full = filled_up(weight)
    columns = torch.tensor(column_order(y, outputs), device=weight.device)
    return full.reshape(-1, outputs, full.shape[1], full.shape[2] * full.shape[3])[:, columns]


def column_constants(values: Tensor, y: str, outputs: int) -> Tensor:
    """Returns constants [O] in the order of columns, padded with zeros: float32 [tiles of outputs * outputs]."""
    columns = torch.tensor(column_order(y, outputs), device=values.device)
    full = functional.pad(values.float(), (0, padded_channels(values.shape[0]) - values.shape[0]))
    return full.reshape(-1, outputs)[:, columns].reshape(-1).contiguous()


def lane_constants(values: Tensor, y: str, outputs: int) -> Tensor:
    """Returns `column_constants` with each 16 columns of a tile reordered: the 4 columns of each of four lanes are contiguous,
    so that a lane loads them with one 16-byte load."""
    columns = column_constants(values, y, outputs).reshape(-1, 2, 4, 2)
    return columns.permute(0, 2, 1, 3).reshape(-1).contiguous()
