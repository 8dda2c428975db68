"""Weights and constants of two 1 x 1 convolutions for one kernel, the second of which reads the output of the first,
and of a 3 x 3 convolution before them.

Weights are stages of 16 KB in the order in which the kernel reads them, so one pointer walks through all of them. The
first convolution is computed 128 outputs at a time, in chunks; the second one 128 outputs at a time, over all of its K.
Threads load operand A of these from packed pixels, 16 bytes at a time, so K is in the order of these bytes. The 3 x 3
convolution is computed 128 outputs at a time, over the taps of 128 channels, then over those of the next ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import CODES, U4_STEPS, ConvLayer
from lowbit.pack.conv_block import loaded_order
from lowbit.pack.conv_layout import ConvLayout, Shape, column_order, lane_constants
from lowbit.pack.conv_weight import swizzled

STEP = 128
"""Number of channels in a k block, and number of outputs that are computed in one iteration."""

CHUNK, SHORTCUT_CHUNK = 64, 32
"""Number of outputs of the first convolution that are one product, without and with a shortcut or 512 channels. Registers hold
two chunks of sums without a shortcut, and one with it."""

STAGE_BYTES = STEP * STEP
"""Bytes of a stage of weights: 128 outputs of one k block, or tiles of fewer outputs and more blocks."""


def block_order(x: str, channels: int) -> tuple[int, ...]:
    """Returns, for each index along K, which of `channels` channels (a multiple of 128) it is, if each of a row's four threads
    loads 16 bytes of every 64 bytes of the row."""
    span = 64 * 8 // CODES[x].bits
    return tuple(first + channel for first in range(0, channels, span) for channel in loaded_order(x, span))


def tap_order(x: str) -> tuple[int, ...]:
    """Returns, for each index along K of a tap, which of 128 channels it is: of 4-bit codes first the low halves of bytes, then
    the high halves."""
    return tuple(range(STEP)) if x == "s8" else (*range(0, STEP, 2), *range(1, STEP, 2))


@dataclass(frozen=True)
class PairLayout:
    """All weights and constants of two convolutions, int8: stages, then constants.

    `storage` is the storage of all activations; the first convolution has `channels` inputs and `expanded` outputs and, if
    `entry` is not 0, a shortcut of `entry` channels; the second one has `following` outputs, or is not there if that is 0.
    With `window` a 3 x 3 convolution of `channels` channels is before them.
    """

    storage: str
    channels: int
    expanded: int
    following: int
    entry: int = 0
    window: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes [O, C, R, S] of the weights: the 3 x 3 convolution if there is one, the first convolution, its shortcut if
        there is one, the second one."""
        window: list[Shape] = [(self.channels, self.channels, 3, 3)] if self.window else []
        shortcut: list[Shape] = [(self.expanded, self.entry, 1, 1)] if self.entry else []
        second: list[Shape] = [(self.following, self.expanded, 1, 1)] if self.following else []
        return (*window, (self.expanded, self.channels, 1, 1), *shortcut, *second)

    @property
    def chunk(self) -> int:
        """Number of outputs of the first convolution that are one product."""
        return SHORTCUT_CHUNK if self.entry or self.channels > 256 else CHUNK

    @property
    def stages(self) -> int:
        """Number of stages of weights."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) // STAGE_BYTES

    @property
    def constants(self) -> int:
        """Number of float32 constants: s and b of the first convolution, of the second one, then the shortcut's s, or s and b
        of the 3 x 3 convolution."""
        return (2 + (self.entry > 0)) * self.expanded + 2 * self.following + 2 * self.channels * self.window

    @property
    def iteration(self) -> tuple[tuple[int, int], ...]:
        """The stages of 128 outputs of the first convolution, in order: (0, or 1 for the shortcut, index of the stage). The
        next stage of a product comes when the previous one is used up."""
        tiles, order = STAGE_BYTES // (self.chunk * STEP), []
        for chunk in range(STEP // self.chunk):
            for product, channels in enumerate((self.channels, self.entry)):
                first, count = chunk * channels // STEP, channels // STEP
                order += [(product, at // tiles) for at in range(first, first + count) if at % tiles == 0]
        return tuple(order)

    def arrange(self, weights: tuple[Tensor, ...]) -> Tensor:
        """Returns the elements of the weights, of any type, in stages [stages, bytes]."""
        windows, firsts = weights[: self.window], weights[self.window : self.window + 1 + (self.entry > 0)]
        stages = [self._chunks(weight).reshape(self.expanded // STEP, -1, STAGE_BYTES) for weight in firsts]
        steps = torch.stack([stages[product][:, number] for product, number in self.iteration], 1)
        parts = [*(self._taps(weight) for weight in windows), steps.reshape(-1, STAGE_BYTES)]
        return torch.cat(parts + [self._passes(weight) for weight in weights[self.window + len(firsts) :]])

    def pack_layers(self, third: ConvLayer, following: ConvLayer, window: ConvLayer | None = None) -> Tensor:
        """Returns the int8 bytes of two layers, the first of which includes the shortcut, and of the 3 x 3 convolution.
        Raises ValueError for other shapes."""
        shortcut = () if third.second is None else (third.second.weight,)
        weights = (*(() if window is None else (window.weight,)), third.weight, *shortcut, following.weight)
        found = tuple(tuple(weight.shape) for weight in weights)
        if found != self.shapes:
            raise ValueError(f"the weights of a pair are {list(self.shapes)}, got {list(found)}")
        steps = U4_STEPS if self.storage == "u4" else 1.0  # factor of codes in registers: u4 codes are the upper half of a byte
        constants = [(values, self.expanded) for values in (third.s / steps, third.b)]
        constants += [(values, self.following) for values in (following.s / steps, following.b)]
        if third.second is not None:
            constants.append((third.second.s / steps, self.expanded))
        if window is not None:
            constants += [(values, self.channels) for values in (window.s / steps, window.b)]
        packed = [lane_constants(values, self.storage, outputs).view(torch.int8) for values, outputs in constants]
        return torch.cat([self.arrange(weights).reshape(-1), *packed])

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Returns the weights [O, C, 1, 1]; the inverse of `pack_layers`, without the constants."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        numbers = torch.arange(sum(sizes), device=packed.device).split(sizes)
        places = self.arrange(tuple(part.reshape(shape) for part, shape in zip(numbers, self.shapes, strict=True))).flatten()
        found = torch.empty_like(packed[: sum(sizes)])
        found[places] = packed[: sum(sizes)]
        return tuple(part.reshape(shape) for part, shape in zip(found.split(sizes), self.shapes, strict=True))

    def _chunks(self, weight: Tensor) -> Tensor:
        """Returns tiles [chunks, k blocks, chunk, 128] of one product of the first convolution."""
        rows = torch.tensor(column_order(self.storage, self.expanded), device=weight.device)
        places = torch.tensor(block_order(self.storage, weight.shape[1]), device=weight.device)
        matrix = weight[:, :, 0, 0][rows][:, places]
        return swizzled(matrix.reshape(-1, self.chunk, weight.shape[1] // STEP, STEP).transpose(1, 2).contiguous())

    def _passes(self, weight: Tensor) -> Tensor:
        """Returns the stages of the second convolution, by tiles of 128 outputs, then blocks of 128 channels."""
        rows = torch.tensor(column_order(self.storage, self.following), device=weight.device)
        places = torch.tensor(block_order(self.storage, self.expanded), device=weight.device)
        matrix = weight[:, :, 0, 0][rows][:, places].reshape(-1, STEP, self.expanded // STEP, STEP).transpose(1, 2)
        return swizzled(matrix.contiguous()).reshape(-1, STAGE_BYTES)

    def _taps(self, weight: Tensor) -> Tensor:
        """Returns the stages of the 3 x 3 convolution, by tiles of 128 outputs, blocks of 128 channels, taps."""
        rows = torch.tensor(column_order(self.storage, self.channels), device=weight.device)
        order = torch.tensor(tap_order(self.storage), device=weight.device)
        blocks = weight[rows].reshape(self.channels // STEP, STEP, self.channels // STEP, STEP, 9)[:, :, :, order]
        return swizzled(blocks.permute(0, 2, 4, 1, 3).contiguous()).reshape(-1, STAGE_BYTES)


@dataclass(frozen=True)
class ThirdStages(ConvLayout):
    """Layout of the weights of one 1 x 1 convolution, as the first one of a pair without a second one: int8 [stages, bytes]."""

    pair: PairLayout

    def refusals(self, shape: Shape) -> tuple[str, ...]:
        return () if tuple(shape) == self.pair.shapes[0] else (f"weights are {list(self.pair.shapes[0])}",)

    def arrange(self, weight: Tensor) -> Tensor:
        return self.pair.arrange((weight,))

    def constants(self, values: Tensor) -> Tensor:
        return lane_constants(values, self.pair.storage, self.pair.expanded)
