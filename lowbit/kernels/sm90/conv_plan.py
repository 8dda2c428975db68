"""Layers prepared for the convolution kernel of sm_90: packed weights, descriptors, the choice of tile, the launch."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import ConvLayer, stored_dtype
from lowbit.hardware.arch import arch_for
from lowbit.kernels.gluon import CompiledKernel
from lowbit.kernels.sm90.conv import WgmmaConv, wgmma_conv
from lowbit.kernels.sm90.tensor_map import PixelWindows, tensor_map, windows_of
from lowbit.pack.conv_weight import pack_conv_weight, pack_lane_constants, unit_channels
from lowbit.pack.nhwc64 import Nhwc64, padded_channels, pixel_elements
from lowbit.pack.stem import PIXEL_BYTES, WINDOW_PIXELS, StemImages


@dataclass(frozen=True)
class ConvTile:
    """What only speed depends on: pixels / 64 and channels of a tile, bytes of a step, stages, blocks that share an SM."""

    warpgroups: int
    outputs: int
    step_bytes: int
    stages: int
    blocks: int


def choose_tile(layer: ConvLayer, pixels: int) -> ConvTile:
    """A tile for a layer with so many output pixels, for one that conv_deep_plan.py refuses.

    The numbers were measured on an H200, 2026-11-21, ResNet-50, batch 128, before that kernel took most of the layers.
    """
    o64 = padded_channels(layer.weight.shape[0])
    sides = [(layer.x, layer.weight.shape[1])]
    if layer.second is not None:
        sides.append((layer.second.x, layer.second.weight.shape[1]))
    pixel_bytes = [Nhwc64(x).pixel_bytes(channels) for x, channels in sides]
    four = any(x == "u4" for x, _ in sides)
    most = 64 if four else 128
    step_bytes = max(step for step in (32, 64, 128) if step <= most and all(size % step == 0 for size in pixel_bytes))
    if layer.second is not None:
        if o64 % 128:
            return ConvTile(2, 64, step_bytes, 4, 2)
        return ConvTile(2, 128, min(step_bytes, 64), 4, 1) if four else ConvTile(1, 128, min(step_bytes, 64), 3, 3)
    if o64 % 128:
        return ConvTile(2, 64, step_bytes, 4, 2) if four else ConvTile(1, 64, step_bytes, 3, 4)
    if layer.residual is not None:
        return ConvTile(1, 128, min(step_bytes, 64), 3, 3) if four or pixel_bytes[0] <= 128 else ConvTile(2, 64, 128, 4, 2)
    if four:
        few = pixels * o64 < 600 * 128 * 128 or layer.kernel != (1, 1)
        return ConvTile(1, 128, step_bytes, 3, 3) if few or step_bytes == 32 else ConvTile(2, 128, step_bytes, 4, 2)
    if step_bytes == 128 and pixels * o64 <= 132 * 64 * 64:  # the classifier: 7.1 us instead of 12.9
        return ConvTile(1, 64, step_bytes, 4, 3)
    return ConvTile(1, 64, step_bytes, 4, 4) if step_bytes == 64 else ConvTile(2, 128, step_bytes, 3, 2)


BLOCK_BYTES = 1024
"""Shared memory of each block that the system uses."""

STEM_TILE = ConvTile(2, 64, 64, 4, 3)
"""The tile of a stem; its steps are rows of the window."""


class Operand:
    """One product of a layer as the kernel reads it: packed weights and the windows of its input."""

    def __init__(
        self, weight: Tensor, x: str, stride: tuple[int, int], padding: tuple[int, int], y: str, tile: ConvTile
    ) -> None:
        self.kernel = (int(weight.shape[2]), int(weight.shape[3]))
        self.stride, self.padding, self.tile = stride, padding, tile
        self.weight = pack_conv_weight(weight, x, y, tile.outputs, tile.step_bytes)
        self.map = functools.lru_cache(maxsize=64)(self._map)

    def _map(self, size: tuple[int, ...], address: int, device: torch.device) -> Tensor:
        windows = windows_of(
            size, self.kernel, self.stride, self.padding, 64 * self.tile.warpgroups, self.tile.step_bytes
        )  # fmt: skip
        return tensor_map(windows, address, device)

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return int(self.weight.shape[1])

    def blocks(self, x: Tensor) -> int:
        """Steps of a tap."""
        return x.shape[3] // self.tile.step_bytes

    def arguments(self, x: Tensor) -> tuple[object, ...]:
        """What the kernel is given for an input: descriptor, weights, steps, and how windows lie."""
        blocks = self.blocks(x)
        taps = self.kernel[0] * self.kernel[1]
        return (
            self.map(tuple(x.shape), x.data_ptr(), x.device), self.weight, blocks * taps, blocks, self.kernel[1],
            self.kernel[0], *self.stride, -self.padding[0], -self.padding[1],
        )  # fmt: skip


class StemOperand(Operand):
    """The product of a stem: its input is what `images` packs."""

    def __init__(self, weight: Tensor, images: StemImages, y: str, tile: ConvTile) -> None:
        super().__init__(images.pack_weight(weight), "s8", (1, 1), (images.before[0], 0), y, tile)
        self.images = images

    def _map(self, size: tuple[int, ...], address: int, device: torch.device) -> Tensor:
        n, rows, columns, _ = size
        down, across = self.images.output
        row_bytes = columns * PIXEL_BYTES
        first = (-self.padding[0], 0)
        last = (first[0] + down - rows, 0)
        windows = PixelWindows(
            (n, rows, across, PIXEL_BYTES * WINDOW_PIXELS), (PIXEL_BYTES, row_bytes, rows * row_bytes), (1, 1), first, last,
            64 * self.tile.warpgroups, self.tile.step_bytes,
        )  # fmt: skip
        return tensor_map(windows, address, device)

    def blocks(self, x: Tensor) -> int:
        return PIXEL_BYTES * WINDOW_PIXELS // self.tile.step_bytes


class PreparedConv:
    """A layer as the kernel reads it, on one GPU: weights and constants packed for a tile.

    With `images`, its input is what they pack: a stem.
    """

    def __init__(self, layer: ConvLayer, tile: ConvTile, sm_count: int, images: StemImages | None = None) -> None:
        self.layer, self.tile, self.sm_count, self.images = layer, tile, sm_count, images
        self.outputs = layer.weight.shape[0]
        if images is None:
            self.first = Operand(layer.weight, layer.x, layer.stride, layer.padding, layer.y, tile)
        else:
            self.first = StemOperand(layer.weight, images, layer.y, tile)
        self.second: Operand | None = None
        self.s = pack_lane_constants(layer.s, layer.y, tile.outputs)
        self.b = pack_lane_constants(layer.b, layer.y, tile.outputs)
        self.s2: Tensor | None = None
        if layer.second is not None:
            p = layer.second
            self.second = Operand(p.weight, p.x, p.stride, p.padding, layer.y, tile)
            self.s2 = pack_lane_constants(p.s, layer.y, tile.outputs)
        self.config = WgmmaConv(
            layer.x, layer.y, layer.residual, layer.relu, tile.warpgroups, tile.outputs, tile.step_bytes, tile.stages,
            None if layer.second is None else layer.second.x,
        )  # fmt: skip
        pieces = self.first.steps * self.config.planes
        if self.second is not None:
            pieces += self.second.steps * self.config.second_planes
        kept = dataclasses.replace(self.config, resident=pieces)
        if tile.blocks * (kept.shared_bytes + BLOCK_BYTES) <= arch_for(90).shared_per_sm_bytes:
            self.config = kept
        self.kernel: CompiledKernel | None = None

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the output: packed codes [N, Ho, Wo, bytes], or values [N, Ho, Wo, O]."""
        height, width = self.layer.output_size(size[1], size[2]) if self.images is None else self.images.output
        return size[0], height, width, pixel_elements(self.layer.y, self.outputs)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """y of packed x [N, H, W, bytes]; `residual` and `second` as the layer has them; `out` is written if given."""
        shape = self.output_shape(tuple(x.shape))
        layer, tile = self.layer, self.tile
        if out is None:
            out = torch.empty(shape, dtype=stored_dtype(layer.y), device=x.device)
        pixels = shape[0] * shape[1] * shape[2]
        across = padded_channels(self.outputs) // tile.outputs
        down = -(-pixels // self.config.pixels)
        stride = max(1, min(down, self.sm_count * tile.blocks // across))
        line, column_step = divmod(stride * self.config.pixels, shape[2])
        image_step, row_step = divmod(line, shape[1])
        arguments = (
            out.view(torch.int32) if self.config.stores_codes else out,
            None if residual is None else residual.view(torch.int32), self.s, self.b, layer.g, self.s2, pixels, self.outputs,
            padded_channels(self.outputs) // unit_channels(layer.y, tile.outputs), shape[1], shape[2], across, down,
            column_step, row_step, image_step, *self.first.arguments(x),
            *((None, None) + (0,) * 8 if self.second is None or second is None else self.second.arguments(second)),
            self.config,
        )  # fmt: skip
        grid = (stride * across, 1, 1)
        if self.kernel is None:
            registers = min(65536 // (tile.blocks * self.config.threads) // 8 * 8, 255)
            self.kernel = wgmma_conv[grid](*arguments, num_warps=self.config.warps, maxnreg=registers, launch_pdl=True)
        else:
            self.kernel[grid](*arguments)
        return out
