"""Weights and constants of a bottleneck block for one kernel, in which the outputs of a product are the input of the next one.

A thread requantizes its columns of a product to codes. They become its registers of operand A of the next product, without an
exchange between threads. This is possible because K may be in any order: the next product's weights are packed in the order in
which threads hold the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import U4_STEPS, ConvLayer
from lowbit.pack.conv_layout import ConvLayout, Shape, column_order, held_columns, held_places, lane_constants
from lowbit.pack.conv_weight import WgmmaTiles, swizzled
from lowbit.pack.nhwc64 import Nhwc64

CHANNELS = 64
"""Number of channels of x, of the shortcut's input and of the output of the 3 x 3 convolution."""

EXPANDED = 256
"""Number of channels of the block's output."""

CHUNK = 32
"""Number of outputs of y that are computed at a time. Registers hold two chunks in flight. With chunks of 64, one at a time,
the kernel takes 74.9 us instead of 71.9."""


def linked_order(columns: int) -> tuple[int, ...]:
    """Returns, for each index along K of a product, the column of the previous product whose codes it reads there.

    columns: number of columns of the previous product, a multiple of 32. A thread's registers of sums become its registers of
    operand A in the same order."""
    order = [0] * columns
    for places, held in zip(held_places(columns), held_columns(columns), strict=True):
        for place, column in zip(places, held, strict=True):
            order[place] = column
    return tuple(order)


def loaded_order(x: str, channels: int = CHANNELS) -> tuple[int, ...]:
    """Returns the channel (of `channels`) at each index along K, if each of a row's four threads loads the packed codes of a
    quarter of the channels, which are neighbours.

    A word of 4-bit codes gives one register of even channels, then one of odd channels.
    """
    order = []
    for k in range(channels):
        step, half, q, i = k // 32, k % 32 // 16, k % 16 // 4, k % 4
        order.append(channels // 4 * q + 8 * step + (2 * i + half if x == "u4" else 4 * half + i))
    return tuple(order)


def linked_channels(y: str, outputs: int, chunk: int) -> tuple[int, ...]:
    """Returns the channel at each index along K of a product that reads codes y of `outputs` channels, which are computed
    `chunk` columns at a time."""
    columns = column_order(y, outputs)
    return tuple(columns[first + column] for first in range(0, outputs, chunk) for column in linked_order(chunk))


@dataclass(frozen=True)
class LinkedTiles(ConvLayout):
    """Layout of weights [O, C, 1, 1] in which wgmma reads them from shared memory: rows are outputs `rows`, K is the channels
    `places`.

    Divided into chunks of `chunk` outputs, int8 [len(rows) / chunk, chunk, K]; or with `by_columns` into chunks of `chunk`
    indices along K, int8 [len(places) / chunk, O, chunk].
    """

    rows: tuple[int, ...]
    places: tuple[int, ...]
    chunk: int
    by_columns: bool = False

    def refusals(self, shape: Shape) -> tuple[str, ...]:
        wanted = (len(self.rows), len(self.places), 1, 1)
        return () if tuple(shape) == wanted else (f"weights are {list(wanted)}",)

    def arrange(self, weight: Tensor) -> Tensor:
        on = weight.device
        matrix = weight[:, :, 0, 0][torch.tensor(self.rows, device=on)][:, torch.tensor(self.places, device=on)]
        if self.by_columns:
            return swizzled(matrix.reshape(len(self.rows), -1, self.chunk).transpose(0, 1).contiguous())
        return swizzled(matrix.reshape(-1, self.chunk, len(self.places)).contiguous())

    def constants(self, values: Tensor) -> Tensor:
        raise ValueError("the constants of a block are packed together: BlockLayout.pack_layers")


@dataclass(frozen=True)
class BlockLayout:
    """All weights and constants of a block in the order of shared memory, int8: the 3 x 3 convolution, the block's last
    convolution, its shortcut if there is one, the next block's first convolution (`following` outputs), then constants.

    `storage` is the storage of all activations.
    """

    storage: str
    following: int
    shortcut: bool

    @property
    def layouts(self) -> tuple[ConvLayout, ...]:
        """The layouts of the weights, in the order of shared memory."""
        x = self.storage
        expanded = column_order(x, EXPANDED)
        second = WgmmaTiles(x, "f32", CHANNELS, Nhwc64(x).pixel_bytes(CHANNELS))
        found: list[ConvLayout] = [second, LinkedTiles(expanded, linked_order(CHANNELS), CHUNK)]
        if self.shortcut:
            found.append(LinkedTiles(expanded, loaded_order(x), CHUNK))
        places = linked_channels(x, EXPANDED, CHUNK)
        return (*found, LinkedTiles(column_order(x, self.following), places, CHUNK, by_columns=True))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes [O, C, R, S] of the weights, in the order of shared memory."""
        expansions: list[Shape] = [(EXPANDED, CHANNELS, 1, 1)] * (1 + self.shortcut)
        return ((CHANNELS, CHANNELS, 3, 3), *expansions, (self.following, EXPANDED, 1, 1))

    def pack_layers(self, second: ConvLayer, third: ConvLayer, following: ConvLayer) -> Tensor:
        """Returns the int8 bytes of three layers; the second one includes the shortcut. Raises ValueError for other shapes."""
        shortcut = () if third.second is None else (third.second.weight,)
        weights = (second.weight, third.weight, *shortcut, following.weight)
        packed = [layout.pack(weight).reshape(-1) for layout, weight in zip(self.layouts, weights, strict=True)]
        return torch.cat([*packed, *self._constants(second, third, following)])

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Returns the weights [O, C, R, S] in the order of shared memory; the inverse of `pack_layers`, without the
        constants."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        pieces = packed[: sum(sizes)].split(sizes)
        parts = zip(self.layouts, pieces, self.shapes, strict=True)
        return tuple(layout.unpack(piece, shape) for layout, piece, shape in parts)

    def _constants(self, second: ConvLayer, third: ConvLayer, following: ConvLayer) -> list[Tensor]:
        """Returns all constants in the order of shared memory, as bytes."""
        steps = U4_STEPS if self.storage == "u4" else 1.0  # factor of codes in registers: u4 codes are the upper half of a byte
        constants = [(values, "f32", CHANNELS) for values in (second.s / steps, second.b)]
        constants += [(values, following.y, self.following) for values in (following.s / steps, following.b)]
        constants += [(values, third.y, EXPANDED) for values in (third.s / steps, third.b)]
        if third.second is not None:
            constants.append((third.second.s / steps, third.y, EXPANDED))
        return [lane_constants(values, y, outputs).view(torch.int8) for values, y, outputs in constants]
