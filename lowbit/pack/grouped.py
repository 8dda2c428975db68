"""Order of the weights of a convolution in groups, for kernels/sm80/grouped_conv.py.

64 neighbouring outputs belong to few groups, whose input channels lie in few blocks of 64. The weights from these blocks to the
64 outputs become dense matrices, with zeros between different groups, so that tensor cores can multiply them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.pack.conv_layout import ConvLayout, Shape
from lowbit.pack.nhwc64 import CHANNEL_BLOCK, padded_channels


@dataclass(frozen=True)
class GroupedBlocks(ConvLayout):
    """Weights int8 [O, C / groups, R, S] as [blocks of 64 outputs, taps, `span` blocks of 64 channels, 64 outputs, 64
    channels]; constants [O], padded.

    x: storage of the input. The channels of 4-bit codes are in the order of their nibbles: even ones, then odd ones.
    """

    x: str
    groups: int
    channels: int
    outputs: int

    @property
    def inputs_of_group(self) -> int:
        """Input channels of one group."""
        return self.channels // self.groups

    @property
    def outputs_of_group(self) -> int:
        """Output channels of one group."""
        return self.outputs // self.groups

    @functools.cached_property
    def span(self) -> int:
        """Number of neighbouring blocks of 64 channels that some block of 64 outputs reads."""
        spans = []
        for first in range(0, self.outputs, CHANNEL_BLOCK):
            last = min(first + CHANNEL_BLOCK, self.outputs) - 1
            end = (last // self.outputs_of_group + 1) * self.inputs_of_group - 1
            spans.append(end // CHANNEL_BLOCK - self.first_block(first) + 1)
        return max(spans)

    def first_block(self, output: int) -> int:
        """Returns the first block of 64 input channels that is read by the outputs `output` to `output + 63`."""
        return output // self.outputs_of_group * self.inputs_of_group // CHANNEL_BLOCK

    def refusals(self, shape: Shape) -> tuple[str, ...]:
        """Returns the reasons why the layout cannot hold weights of this shape; empty if it can."""
        wanted = (self.outputs, self.inputs_of_group)
        return () if tuple(shape[:2]) == wanted else (f"weights are [{wanted[0]}, {wanted[1]}, R, S]",)

    def arrange(self, weight: Tensor) -> Tensor:
        """Returns the elements of `weight`, of any type, in memory order, with zeros between groups."""
        o, c, *window = weight.shape
        blocks = padded_channels(o) // CHANNEL_BLOCK
        dense = weight.new_zeros(padded_channels(o), self.span * CHANNEL_BLOCK, *window)
        outputs = torch.arange(o, device=weight.device)
        first = outputs // CHANNEL_BLOCK * CHANNEL_BLOCK // self.outputs_of_group * self.inputs_of_group // CHANNEL_BLOCK
        start = outputs // self.outputs_of_group * self.inputs_of_group - CHANNEL_BLOCK * first
        dense[outputs[:, None], start[:, None] + torch.arange(c, device=weight.device)] = weight
        tiles = dense.reshape(blocks, CHANNEL_BLOCK, self.span, CHANNEL_BLOCK, -1)
        if self.x == "u4":
            tiles = tiles.unflatten(3, (-1, 2)).transpose(3, 4).flatten(3, 4)
        return tiles.permute(0, 4, 2, 1, 3).contiguous()

    def constants(self, values: Tensor) -> Tensor:
        """Returns float32 constants [O], padded with zeros."""
        return functional.pad(values.float(), (0, padded_channels(values.shape[0]) - values.shape[0])).contiguous()
