"""Layers prepared for the convolution kernel for many channels of sm_90 (conv_deep.py): when, with which memory, the launch."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import ACTIVATIONS, CODES, ConvLayer, SecondProduct
from lowbit.kernels.gluon import CompiledKernel
from lowbit.kernels.sm90.conv import UNIT
from lowbit.kernels.sm90.conv_deep import TAIL_UNITS, DeepConv, deep_conv
from lowbit.kernels.sm90.conv_plan import ConvTile, Operand
from lowbit.kernels.sm90.conv_strip import MOST_ROWS, strip_rows
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_weight import pack_lane_constants, unit_channels
from lowbit.pack.nhwc64 import Nhwc64, padded_channels

OUTPUTS = 128
"""Of a tile."""

SHARED_UNITS = 227
"""KiB of shared memory that the blocks of an SM may have."""

NARROW_COST = 1.2
"""Time of 64 pixels of a tile of 64 against that of a third of a tile of 192 (H200, 2026-11-21, ResNet-50, batch 32)."""

RESIDUAL_STAGES = 3
"""Tiles of residual codes under way."""

MOST_X_STAGES = 8
"""Of them there is no use for more."""


def deep_refusals(layer: ConvLayer) -> tuple[str, ...]:
    """Why the kernel cannot run a layer; empty if it can."""
    reasons = []
    outputs, channels = padded_channels(layer.weight.shape[0]), padded_channels(layer.weight.shape[1])
    if outputs % 128 or channels % 128:
        reasons.append(f"{channels} channels and {outputs} outputs are not both multiples of 128")
    if layer.residual not in (None, layer.y):
        reasons.append(f"its residual is stored as {layer.residual}, its output as {layer.y}")
    if layer.y not in ACTIVATIONS:
        reasons.append(f"its output is stored as {layer.y}, not as codes")
    if layer.second is not None and (layer.second.x != layer.x or padded_channels(layer.second.weight.shape[1]) % 128):
        reasons.append("its second product reads another storage, or channels that are no multiple of 128")
    return tuple(reasons)


@dataclass(frozen=True)
class DeepTile:
    """What only speed depends on: warpgroups of 64 pixels that multiply (1 or 3), blocks that share an SM."""

    multipliers: int
    blocks: int


WIDE = DeepTile(3, 1)


def deep_tile(layer: ConvLayer, pixels: int, sm_count: int) -> DeepTile | None:
    """The tile for a layer with so many output pixels; None where the kernel cannot run it.

    The one with which the busiest processor has less to do. H200, 2026-11-21, ResNet-50: small tiles win at batches 1 and 8 and
    in the last stages up to batch 64, large ones else; the better one wins over choose_tile's tiles in nearly every layer.
    """
    if deep_refusals(layer):
        return None
    across = padded_channels(layer.weight.shape[0]) // OUTPUTS
    wide, narrow = (-(-pixels // size) * across for size in (64 * WIDE.multipliers, 64))
    if NARROW_COST * -(-narrow // sm_count) < WIDE.multipliers * -(-wide // sm_count):
        return DeepTile(1, 1 if narrow <= sm_count else 2)
    return WIDE


class DeepOperand(Operand):
    """One product; all taps of a block of channels follow one another, as they read the same strip."""

    def __init__(self, layer: ConvLayer | SecondProduct, y: str, tile: ConvTile) -> None:
        super().__init__(layer.weight, layer.x, layer.stride, layer.padding, y, tile)
        taps = self.kernel[0] * self.kernel[1]
        self.weight = self.weight.unflatten(1, (taps, -1)).transpose(1, 2).flatten(1, 2).contiguous()


class PreparedDeep:
    """A layer as the kernel reads it, on one GPU."""

    def __init__(self, layer: ConvLayer, tile: DeepTile, sm_count: int) -> None:
        self.layer, self.sm_count, self.blocks = layer, sm_count, tile.blocks
        self.outputs = layer.weight.shape[0]
        step_bytes = 16 * CODES[layer.x].bits
        self.tile = ConvTile(tile.multipliers, OUTPUTS, step_bytes, 0, tile.blocks)
        self.first = DeepOperand(layer, layer.y, self.tile)
        self.s = pack_lane_constants(layer.s, layer.y, OUTPUTS)
        self.b = pack_lane_constants(layer.b, layer.y, OUTPUTS)
        self.second: Operand | None = None
        self.s2: Tensor | None = None
        if layer.second is not None:
            self.second = DeepOperand(layer.second, layer.y, self.tile)
            self.s2 = pack_lane_constants(layer.second.s, layer.y, OUTPUTS)
        self.map = functools.lru_cache(maxsize=64)(row_map)
        self.kernels: dict[DeepConv, CompiledKernel] = {}

    def config(self, width: int) -> DeepConv:
        """What is compiled for images of this width."""
        layer, side, step_bytes, pixels = self.layer, self.layer.kernel[0], self.tile.step_bytes, 64 * self.tile.warpgroups
        keeps_size = layer.stride == (1, 1) and layer.kernel == (side, side) and layer.padding == (side // 2, side // 2)
        rows = strip_rows(pixels, width, side, step_bytes)
        strips = keeps_size and side % 2 == 1 and rows <= MOST_ROWS and layer.second is None
        if not strips:
            rows = pixels
        config = DeepConv(
            layer.x, layer.y, layer.residual, layer.relu, self.tile.warpgroups + 1, OUTPUTS, step_bytes, 0, rows=rows,
            second=None if layer.second is None else layer.second.x, kernel=side if strips else 1, strips=strips,
            residual_stages=0 if layer.residual is None else RESIDUAL_STAGES, odd=self.first.steps % 2 == 1,
        )  # fmt: skip
        return self._stages(config)

    def _stages(self, config: DeepConv) -> DeepConv:
        """The same with stages for the memory there is: weights stay if x then has stages enough."""
        units = (
            (SHARED_UNITS + 1) // self.blocks - 1 - TAIL_UNITS - config.residual_stages * 4 * config.residual_tile_words // UNIT
        )
        x_units, w_units = config.x_bytes // UNIT, config.w_bytes // UNIT
        steps = self.first.steps + (0 if self.second is None else self.second.steps)
        least = 2 if config.kernel > 1 else 4
        if steps * w_units + least * x_units <= units:
            x_stages = min((units - steps * w_units) // x_units, MOST_X_STAGES)
            return dataclasses.replace(config, stages=steps, x_stages=x_stages, resident=steps * config.planes)
        x_stages = least if config.kernel > 1 else units // (x_units + w_units)
        return dataclasses.replace(config, stages=(units - x_stages * x_units) // w_units, x_stages=x_stages)

    def output_shape(self, size: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the output: packed codes [N, Ho, Wo, bytes]."""
        return size[0], *self.layer.output_size(size[1], size[2]), Nhwc64(self.layer.y).pixel_bytes(self.outputs)

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, second: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """y of packed x [N, H, W, bytes]; `residual` and `second` as the layer has them; `out` is written if given."""
        shape = self.output_shape(tuple(x.shape))
        layer, config = self.layer, self.config(x.shape[2])
        if out is None:
            out = torch.empty(shape, dtype=torch.uint8, device=x.device)
        pixels = shape[0] * shape[1] * shape[2]
        across, down = padded_channels(self.outputs) // OUTPUTS, -(-pixels // config.tile_pixels)
        stride = max(1, min(down, self.sm_count * self.blocks // across))
        operand, other = self.first.arguments(x), (None, None) + (0,) * 8
        if self.second is not None and second is not None:
            other = self.second.arguments(second)
        if config.strips:
            rows = x.shape[0] * x.shape[1] * x.shape[2]
            operand = (self.map(rows, x.shape[3], config.rows, config.step_bytes, x.data_ptr(), x.device), *operand[1:])
        residual_map = None
        if residual is not None:
            residual_map = self.map(
                pixels, shape[3], config.tile_pixels, config.residual_row_bytes, residual.data_ptr(), x.device, False
            )  # fmt: skip
        arguments = (
            out.view(torch.int32), residual_map, self.s, self.b, layer.g, self.s2,
            pixels, padded_channels(self.outputs) // unit_channels(layer.y, OUTPUTS), shape[1], shape[2], across, down,
            *operand, *other, config,
        )  # fmt: skip
        grid = (stride * across, 1, 1)
        kernel = self.kernels.get(config)
        if kernel is None:
            self.kernels[config] = deep_conv[grid](*arguments, num_warps=config.warps, maxnreg=128, launch_pdl=True)
        else:
            kernel[grid](*arguments)
        return out
