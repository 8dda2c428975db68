"""Weights and constants of a bottleneck block as one kernel reads them: products whose outputs are the next product's input.

A thread that has turned its columns of a product into codes has them in the registers of operand A of the next one as they
are: K may be in any order, so the next product's weights have theirs in the order in which the columns come.
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
"""Channels of x, of the shortcut's input and of the output of the 3 x 3 convolution."""

EXPANDED = 256
"""Channels of what the block makes."""

CHUNK = 32
"""Outputs of y at a time: two chunks under way fit into the registers. 64, one after the other: 74.9 us instead of 71.9."""


def linked_order(columns: int) -> tuple[int, ...]:
    """Column of a product (of `columns`, a multiple of 32) at each place of K of the product that reads its codes: a thread's
    registers of sums, in order, are its registers of operand A."""
    order = [0] * columns
    for places, held in zip(held_places(columns), held_columns(columns), strict=True):
        for place, column in zip(places, held, strict=True):
            order[place] = column
    return tuple(order)


def loaded_order(x: str) -> tuple[int, ...]:
    """Channel of 64 at each place of K, where each thread of a row's four loads 16 neighbouring channels of packed codes.

    Of a word of 4-bit codes the even channels make one register, the odd ones the next.
    """
    order = []
    for k in range(64):
        step, half, q, i = k // 32, k % 32 // 16, k % 16 // 4, k % 4
        order.append(16 * q + 8 * step + (2 * i + half if x == "u4" else 4 * half + i))
    return tuple(order)


def linked_channels(y: str, outputs: int, chunk: int) -> tuple[int, ...]:
    """Channel at each place of K of a product that reads codes y of `outputs` channels, `chunk` columns after `chunk`."""
    columns = column_order(y, outputs)
    return tuple(columns[first + column] for first in range(0, outputs, chunk) for column in linked_order(chunk))


@dataclass(frozen=True)
class LinkedTiles(ConvLayout):
    """Weights [O, C, 1, 1]: outputs `rows`, channels `places`, as wgmma reads them from shared memory.

    Chunks of `chunk` outputs, int8 [len(rows) / chunk, chunk, K]; or, `by_columns`, of as many places of K, one after the
    other, int8 [len(places) / chunk, O, chunk].
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
    """All weights and constants of a block in the order of shared memory, int8: the 3 x 3 convolution, the one that ends the
    block, its shortcut if there is one, and the first convolution of the next block, of `following` outputs; then constants.

    `storage` is that of all activations.
    """

    storage: str
    following: int
    shortcut: bool

    @property
    def layouts(self) -> tuple[ConvLayout, ...]:
        """The layouts of the weights, in their order."""
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
        """The shapes [O, C, R, S] of the weights, in their order."""
        expansions: list[Shape] = [(EXPANDED, CHANNELS, 1, 1)] * (1 + self.shortcut)
        return ((CHANNELS, CHANNELS, 3, 3), *expansions, (self.following, EXPANDED, 1, 1))

    def pack_layers(self, second: ConvLayer, third: ConvLayer, following: ConvLayer) -> Tensor:
        """int8 bytes of three layers, the second of which has the shortcut inside. Raises ValueError for other shapes."""
        shortcut = () if third.second is None else (third.second.weight,)
        weights = (second.weight, third.weight, *shortcut, following.weight)
        packed = [layout.pack(weight).reshape(-1) for layout, weight in zip(self.layouts, weights, strict=True)]
        return torch.cat([*packed, *self._constants(second, third, following)])

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """The weights [O, C, R, S] in their order; the inverse of `pack_layers`, less the constants."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        pieces = packed[: sum(sizes)].split(sizes)
        parts = zip(self.layouts, pieces, self.shapes, strict=True)
        return tuple(layout.unpack(piece, shape) for layout, piece, shape in parts)

    def _constants(self, second: ConvLayer, third: ConvLayer, following: ConvLayer) -> list[Tensor]:
        """All constants in the order of shared memory, as bytes."""
        steps = U4_STEPS if self.storage == "u4" else 1.0  # factor by which codes are multiplied in registers
        constants = [(values, "f32", CHANNELS) for values in (second.s / steps, second.b)]
        constants += [(values, following.y, self.following) for values in (following.s / steps, following.b)]
        constants += [(values, third.y, EXPANDED) for values in (third.s / steps, third.b)]
        if third.second is not None:
            constants.append((third.second.s / steps, third.y, EXPANDED))
        return [lane_constants(values, y, outputs).view(torch.int8) for values, y, outputs in constants]
