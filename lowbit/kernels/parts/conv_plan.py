"""Base classes of convolution layers prepared for one kernel: memory of the output, grid, compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.formats.conv import ConvSpec, stored_dtype
from lowbit.kernels.choose.conv import ConvTile
from lowbit.kernels.parts.gluon import CompiledKernel
from lowbit.kernels.parts.launch import is_recording, record_kernel
from lowbit.pack.conv_layout import PackedConv, unit_channels
from lowbit.pack.nhwc64 import padded_channels, pixel_elements
from lowbit.pack.stem import StemImages


class ConvLauncher:
    """Launcher of a kernel that is compiled once for each image width. Later calls may differ in grid, addresses and
    numbers."""

    def __init__(self, function: Any, **options: Any) -> None:
        self.function, self.options = function, options
        self.kernels: dict[int, CompiledKernel] = {}

    def __call__(self, width: int, grid: tuple[int, int, int], warps: int, *arguments: Any) -> None:
        """Launches the kernel, or records it inside `recording`. `width` is 0 where the configuration, the last argument, does
        not depend on it."""
        kernel = self.kernels.get(width)
        if is_recording():
            if kernel is None:
                record_kernel((self, width), self.function, arguments, {"num_warps": warps, **self.options})
        elif kernel is None:
            self.kernels[width] = self.function[grid](*arguments, num_warps=warps, **self.options)
        else:
            kernel[grid](*arguments)


class PlainLauncher:
    """Launcher of a kernel of Triton that may be compiled for more than one shape, as Triton decides at each launch."""

    def __init__(self, function: Any, **options: Any) -> None:
        self.function, self.options = function, options

    def __call__(self, blocks: int, *arguments: Any) -> None:
        """Launches the kernel in `blocks` thread blocks, or records it inside `recording`."""
        if is_recording():
            record_kernel(self, self.function, arguments, self.options)
        else:
            self.function[(blocks,)](*arguments, **self.options)


def most_registers(blocks: int, threads: int) -> int:
    """Largest number of registers per thread with which `blocks` blocks fit on an SM."""
    return min(65536 // (blocks * threads) // 8 * 8, 255)


class ConvPlan:
    """A layer prepared for one kernel, on one GPU. With `images` the layer is a stem, whose input they pack."""

    def __init__(self, spec: ConvSpec, packed: PackedConv, images: StemImages | None = None) -> None:
        self.spec, self.packed, self.images = spec, packed, images

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the output: packed codes [N, Ho, Wo, bytes], or values [N, Ho, Wo, O]."""
        height, width = self.spec.output_size(size[1], size[2]) if self.images is None else self.images.output
        return size[0], height, width, pixel_elements(self.spec.y, self.spec.outputs)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Returns y of packed x [N, H, W, bytes]. `residual` and `second` must be given if the layer has them; y is written to
        `out` if given."""
        raise NotImplementedError

    def output(self, x: Tensor, out: Tensor | None) -> Tensor:
        """`out`, or memory for the output of x where it is None."""
        if out is not None:
            return out
        return torch.empty(self.output_shape(tuple(x.shape)), dtype=stored_dtype(self.spec.y), device=x.device)


class TiledConvPlan(ConvPlan):
    """A layer for a persistent grid. Each block computes tiles of pixels, all for the same range of output channels."""

    def __init__(
        self, spec: ConvSpec, packed: PackedConv, tile: ConvTile, sm_count: int, images: StemImages | None = None
    ) -> None:
        super().__init__(spec, packed, images)
        self.tile, self.sm_count = tile, sm_count
        self.across = padded_channels(spec.outputs) // tile.outputs
        self.units = padded_channels(spec.outputs) // unit_channels(spec.y, tile.outputs)

    def rows_of_tiles(self, pixels: int) -> tuple[int, int]:
        """Returns the number of tiles of one range of output channels, and the number of these that run at a time."""
        down = -(-pixels // self.tile.pixels)
        return down, max(1, min(down, self.sm_count * self.tile.blocks // self.across))
