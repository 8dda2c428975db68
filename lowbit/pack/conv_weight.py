"""Weights of convolutions in the order in which the wgmma kernels copy them to shared memory: one weight tile per tile of
outputs and step of K.

A step is one tap of the window and some consecutive input channels: `step_bytes` of each packed pixel. For every plane, its
weight tile has a matrix [outputs, step_bytes] of int8 weights, K-major, in the swizzle that wgmma reads. 4-bit activations have
two planes, since unpacking a word gives one register of even channels (low halves) and one of odd channels (high halves). K may
be in any order that both operands share. Columns are in the order of pack/conv_layout.py. Source: the swizzle of wgmma's
shared-memory operands, PTX ISA.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import CODES, ProductSpec
from lowbit.pack.conv_layout import ConvLayout, Shape, by_columns, lane_constants
from lowbit.pack.nhwc64 import padded_channels
from lowbit.pack.stem import StemImages


def swizzled(matrix: Tensor) -> Tensor:
    """Returns rows [.., rows, bytes] of 32, 64 or 128 bytes with their 16-byte chunks in the swizzle of wgmma and TMA."""
    rows, row_bytes = matrix.shape[-2:]
    chunks = row_bytes // 16
    row = torch.arange(rows, device=matrix.device)
    source = torch.arange(chunks, device=matrix.device)[None, :] ^ (row * row_bytes // 128 % chunks)[:, None]
    index = (source[..., None] * 16 + torch.arange(16, device=matrix.device)).reshape(rows, row_bytes)
    return matrix.gather(-1, index.expand(matrix.shape))


def planes(x: str) -> int:
    """Returns the number of weight matrices of a step: one for each code in a byte of x."""
    return 8 // CODES[x].bits


@dataclass(frozen=True)
class WgmmaTiles(ConvLayout):
    """int8 [tiles of outputs, steps, planes, outputs, step_bytes] for inputs stored as `x` and outputs as `y`.

    Steps are ordered by tap, then by block of channels; with `taps_first` by block of channels, then by tap. With `images` the
    weights are those of a stem, over rows of packed pixels.
    """

    x: str
    y: str
    outputs: int
    step_bytes: int
    taps_first: bool = False
    images: StemImages | None = None

    def refusals(self, shape: Shape) -> tuple[str, ...]:
        o64, c64 = padded_channels(shape[0]), padded_channels(shape[1])
        pixel_bytes = c64 * CODES[self.x].bits // 8
        if self.step_bytes in (32, 64, 128) and pixel_bytes % self.step_bytes == 0 and o64 % self.outputs == 0:
            return ()
        return (
            f"steps of {self.step_bytes} bytes and tiles of {self.outputs} outputs do not divide {c64} channels of {self.x} "
            f"and {o64} outputs",
        )

    def arrange(self, weight: Tensor) -> Tensor:
        full = by_columns(weight if self.images is None else self.images.arrange(weight), self.y, self.outputs)
        tiles, outputs, channels, taps = full.shape
        both = planes(self.x)
        blocks = channels // (self.step_bytes * both)
        full = full.reshape(tiles, outputs, blocks, self.step_bytes, both, taps)
        steps = (2, 5) if self.taps_first else (5, 2)
        tiled = swizzled(full.permute(0, *steps, 4, 1, 3).contiguous())
        return tiled.reshape(tiles, taps * blocks, both, outputs, self.step_bytes)

    def constants(self, values: Tensor) -> Tensor:
        return lane_constants(values, self.y, self.outputs)

    def of_second(self, product: ProductSpec) -> WgmmaTiles:
        return dataclasses.replace(self, x=product.x)
