"""Weights and constants of a bottleneck block of 128 or 256 channels for one kernel: its 3 x 3 convolution, its last one and
the first one of the next block, or the last one alone.

Weights are stages of 16 KB in the order in which the kernel reads them, so one pointer walks through all of them. The 3 x 3
convolution is computed 128 outputs at a time, over the taps of 128 channels, then over those of the next ones; the third
convolution 128 outputs at a time, in chunks; the next one 128 outputs at a time, over all of its K. Threads load operand A of
the third and the next one from packed pixels, 16 bytes at a time, so K is in the order of these bytes.
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

CHUNK, DEEP_CHUNK = 64, 32
"""Number of outputs of the third convolution that are one product, with up to 256 and with 512 channels. Registers hold x and
two chunks of sums."""

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
class DeepBlockLayout:
    """All weights and constants of a block, int8: stages, then constants.

    `storage` is the storage of all activations. The 3 x 3 convolution has `channels` channels, the third one `expanded`
    outputs, the next one `following` outputs. If `following` is 0, the third one is alone.
    """

    storage: str
    channels: int
    expanded: int
    following: int

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes [O, C, R, S] of the weights in the order of their use: of three convolutions, or of the third one."""
        third = (self.expanded, self.channels, 1, 1)
        if self.following == 0:
            return (third,)
        return (self.channels, self.channels, 3, 3), third, (self.following, self.expanded, 1, 1)

    @property
    def chunk(self) -> int:
        """Number of outputs of the third convolution that are one product."""
        return DEEP_CHUNK if self.channels > 256 else CHUNK

    @property
    def stages(self) -> int:
        """Number of stages of weights."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) // STAGE_BYTES

    @property
    def constants(self) -> int:
        """Number of float32 constants: s and b of the third convolution, of the next one, of the 3 x 3 convolution."""
        return 2 * self.expanded + (2 * self.following + 2 * self.channels if self.following else 0)

    def arrange(self, weights: tuple[Tensor, ...]) -> Tensor:
        """Returns the elements of the weights, of any type, in stages [stages, bytes]."""
        if self.following == 0:
            return self._chunks(weights[0])
        second, third, following = weights
        return torch.cat([self._taps(second), self._chunks(third), self._passes(following)])

    def pack_layers(self, second: ConvLayer, third: ConvLayer, following: ConvLayer) -> Tensor:
        """Returns the int8 bytes of three layers. Raises ValueError for other shapes."""
        weights = (second.weight, third.weight, following.weight)
        found = tuple(tuple(weight.shape) for weight in weights)
        if found != self.shapes:
            raise ValueError(f"the weights of a block are {list(self.shapes)}, got {list(found)}")
        steps = U4_STEPS if self.storage == "u4" else 1.0  # factor of codes in registers: u4 codes are the upper half of a byte
        constants = [(values, layer) for layer in (third, following, second) for values in (layer.s / steps, layer.b)]
        packed = [
            lane_constants(values, self.storage, layer.weight.shape[0]).view(torch.int8) for values, layer in constants
        ]  # fmt: skip
        return torch.cat([self.arrange(weights).reshape(-1), *packed])

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Returns the weights [O, C, R, S]; the inverse of `pack_layers`, without the constants."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        numbers = torch.arange(sum(sizes), device=packed.device).split(sizes)
        places = self.arrange(tuple(part.reshape(shape) for part, shape in zip(numbers, self.shapes, strict=True))).flatten()
        found = torch.empty_like(packed[: sum(sizes)])
        found[places] = packed[: sum(sizes)]
        return tuple(part.reshape(shape) for part, shape in zip(found.split(sizes), self.shapes, strict=True))

    def _chunks(self, weight: Tensor) -> Tensor:
        """Returns the stages of the third convolution: tiles [chunk, 128] by chunks, then k blocks."""
        rows = torch.tensor(column_order(self.storage, self.expanded), device=weight.device)
        places = torch.tensor(block_order(self.storage, weight.shape[1]), device=weight.device)
        matrix = weight[:, :, 0, 0][rows][:, places]
        tiles = matrix.reshape(-1, self.chunk, weight.shape[1] // STEP, STEP).transpose(1, 2)
        return swizzled(tiles.contiguous()).reshape(-1, STAGE_BYTES)

    def _passes(self, weight: Tensor) -> Tensor:
        """Returns the stages of the next convolution, by tiles of 128 outputs, then blocks of 128 channels."""
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
    """Layout of the weights of a third convolution alone: int8 [stages, bytes]."""

    block: DeepBlockLayout

    def refusals(self, shape: Shape) -> tuple[str, ...]:
        return () if tuple(shape) == self.block.shapes[0] else (f"weights are {list(self.block.shapes[0])}",)

    def arrange(self, weight: Tensor) -> Tensor:
        return self.block.arrange((weight,))

    def constants(self, values: Tensor) -> Tensor:
        return lane_constants(values, self.block.storage, self.block.expanded)
