"""Bottleneck blocks prepared for the kernel of sm_90 that runs them whole: packed weights, what fits, the launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit.hardware.device import device_for
from lowbit.kernels.conv_reference import ConvLayer
from lowbit.kernels.gluon import CompiledKernel
from lowbit.kernels.sm90.conv_block import CHANNELS, BlockConv, block_conv
from lowbit.kernels.sm90.conv_plan import BLOCK_BYTES
from lowbit.kernels.sm90.conv_strip import strip_rows
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_block import linked_channels, linked_order, loaded_order, pack_columns, pack_rows
from lowbit.pack.conv_weight import column_order, pack_conv_weight, pack_lane_constants
from lowbit.pack.nhwc64 import Nhwc64

EXPANDED = 256
"""Channels of y."""

WARPGROUPS = 4
"""Of an SM, in two blocks where they fit, else in one: what registers allow."""


def block_config(storage: str, width: int, following: int, shortcut: bool) -> BlockConv:
    """What is compiled for images of this width."""
    for warpgroups in (WARPGROUPS // 2, WARPGROUPS):
        row_bytes = Nhwc64(storage).pixel_bytes(CHANNELS)  # type: ignore[arg-type]
        rows, unit = strip_rows(64 * warpgroups, width, 3, row_bytes), 2048 // row_bytes
        config = BlockConv(storage, warpgroups, -(-rows // unit) * unit, EXPANDED, 32, following, shortcut, not shortcut)
        if blocks_of(config) * warpgroups == WARPGROUPS:
            break
    return config


def blocks_of(config: BlockConv) -> int:
    """Blocks that share an SM."""
    fit = device_for(90).shared_per_sm_bytes // (config.shared_bytes + BLOCK_BYTES)
    return max(1, min(WARPGROUPS // config.warpgroups, fit))


class PreparedBlock:
    """The second and third convolution of a bottleneck block and the first one of the next, as the kernel reads them."""

    def __init__(self, second: ConvLayer, third: ConvLayer, following: ConvLayer, sm_count: int) -> None:
        self.second, self.third, self.following, self.sm_count = second, third, following, sm_count
        self.storage, self.outputs = second.x, following.weight.shape[0]
        self.shortcut = third.second is not None
        self.chunk = self.config(1).chunk
        self.weight = torch.cat([*self._pack_weights(), *self._pack_constants()])
        self.map = functools.lru_cache(maxsize=64)(self._map)
        self.kernels: dict[BlockConv, CompiledKernel] = {}

    def _pack_weights(self) -> list[Tensor]:
        """All weights in the order in which they lie in shared memory."""
        x = self.storage
        rows = column_order(x, EXPANDED)
        pieces = [pack_conv_weight(self.second.weight, x, "f32", CHANNELS, self._row_bytes)]  # type: ignore[arg-type]
        pieces.append(pack_rows(self.third.weight[:, :, 0, 0], rows, linked_order(CHANNELS), self.chunk))
        if self.third.second is not None:
            entry = loaded_order(x)  # type: ignore[arg-type]
            pieces.append(pack_rows(self.third.second.weight[:, :, 0, 0], rows, entry, self.chunk))
        places = linked_channels(x, EXPANDED, self.chunk)  # type: ignore[arg-type]
        pieces.append(pack_columns(self.following.weight[:, :, 0, 0], column_order(x, self.outputs), places, self.chunk))
        return [piece.reshape(-1) for piece in pieces]

    def _pack_constants(self) -> list[Tensor]:
        """All constants in the order in which they lie in shared memory, as bytes."""
        second, third, following = self.second, self.third, self.following
        linked = 16.0 if self.storage == "u4" else 1.0  # what bytes of codes in registers are of the codes
        constants = [(second.s, "f32", CHANNELS), (second.b, "f32", CHANNELS)]
        constants += [(values, following.y, self.outputs) for values in (following.s / linked, following.b)]
        constants += [(values, third.y, EXPANDED) for values in (third.s / linked, third.b)]
        if third.second is not None:
            constants.append((third.second.s, third.y, EXPANDED))
        return [pack_lane_constants(values, y, outputs).view(torch.int8) for values, y, outputs in constants]

    @property
    def _row_bytes(self) -> int:
        return Nhwc64(self.storage).pixel_bytes(CHANNELS)  # type: ignore[arg-type]

    def config(self, width: int) -> BlockConv:
        """What is compiled for images of this width."""
        return block_config(self.storage, width, self.outputs, self.shortcut)

    def _map(self, rows: int, box: int, address: int, device: torch.device) -> Tensor:
        return row_map(rows, self._row_bytes, box, self._row_bytes, address, device)

    def __call__(self, x: Tensor, added: Tensor, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Writes (y, z) of packed x [N, H, W, bytes]; `added` is the residual, or the input of the shortcut."""
        n, height, width, _ = x.shape
        config, pixels = self.config(width), n * height * width
        tiles, blocks = -(-pixels // config.pixels), blocks_of(config)
        grid = (min(tiles, self.sm_count * blocks), 1, 1)
        line, column_step = divmod(grid[0] * config.pixels, width)
        y, z, codes = (tensor.view(-1).view(torch.int32) for tensor in (*out, added))
        arguments = (
            y, z, codes, self.third.g, pixels, height, width, tiles, (line % height << 16) + column_step,
            self.map(pixels, config.rows // config.boxes, x.data_ptr(), x.device), self.weight, config,
        )  # fmt: skip
        kernel = self.kernels.get(config)
        if kernel is None:
            registers = 65536 // (blocks * config.threads)
            self.kernels[config] = block_conv[grid](*arguments, num_warps=config.warps, maxnreg=registers, launch_pdl=True)
        else:
            kernel[grid](*arguments)
        return out
