"""Order of a depthwise convolution's weights and constants in memory, for kernels/sm80/depthwise.py and depthwise_quads.py.

A vector is 8 channels, a word of 4-bit codes or 64 bits of 8-bit codes of one pixel; for depthwise_quads.py it is 4 channels. A
word of weights has 4 taps of one row of a channel's window, the last one filled up with zeros. Words of the same tap and of the
same channel within their vector are neighbours, so that the lanes of a warp, which have neighbouring vectors, load neighbouring
words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as functional
from torch import Tensor

from lowbit.pack.conv_layout import ConvLayout, Shape
from lowbit.pack.nhwc64 import padded_channels

VECTOR = 8
"""Number of channels of a vector."""
TAPS_OF_WORD = 4


@dataclass(frozen=True)
class DepthwiseTaps(ConvLayout):
    """Weights int8 [C, 1, R, S] as [R, words of a row, channel within its vector, vectors, 4 taps]; constants [channel within
    its vector, vectors]."""

    channels: int = VECTOR
    """Number of channels of a vector."""

    def refusals(self, shape: Shape) -> tuple[str, ...]:
        """Returns the reasons why the layout cannot hold weights of this shape; empty if it can."""
        return () if shape[1] == 1 else (f"each output reads {shape[1]} channels, a depthwise one reads 1",)

    def arrange(self, weight: Tensor) -> Tensor:
        """Returns the elements of `weight`, of any type, in memory order, padded with zeros."""
        c, _, rows, columns = weight.shape
        after = -columns % TAPS_OF_WORD
        full = functional.pad(weight, (0, after, 0, 0, 0, 0, 0, padded_channels(c) - c))
        words = full.reshape(-1, self.channels, rows, (columns + after) // TAPS_OF_WORD, TAPS_OF_WORD)
        return words.permute(2, 3, 1, 0, 4).contiguous()

    def constants(self, values: Tensor) -> Tensor:
        """Returns float32 constants [C] in the order in which the kernel loads them, padded with zeros."""
        full = functional.pad(values.float(), (0, padded_channels(values.shape[0]) - values.shape[0]))
        return full.reshape(-1, self.channels).T.contiguous()
