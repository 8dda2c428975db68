"""Bottleneck blocks prepared for the kernel of sm_90 that runs them whole: packed weights, what fits, the launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import CODES, ConvLayer
from lowbit.hardware.arch import arch_for
from lowbit.kernels.gluon import CompiledKernel, gl, source_digest
from lowbit.kernels.parts.requantize import LinkedRequantize, Requantize
from lowbit.kernels.parts.stages import StageBarriers
from lowbit.kernels.parts.strip_taps import ZERO_BYTES, StripTaps
from lowbit.kernels.parts.thread_product import ThreadProduct
from lowbit.kernels.sm90.conv import UNIT
from lowbit.kernels.sm90.conv_block import block_conv
from lowbit.kernels.sm90.conv_plan import BLOCK_BYTES
from lowbit.kernels.sm90.conv_strip import MOST_ROWS, STRIPS, strip_rows
from lowbit.kernels.sm90.tensor_map import row_map
from lowbit.pack.conv_block import linked_channels, linked_order, loaded_order, pack_columns, pack_rows
from lowbit.pack.conv_weight import column_order, pack_conv_weight, pack_lane_constants
from lowbit.pack.nhwc64 import Nhwc64

CHANNELS = 64
"""Of x, entry and middle."""

EXPANDED = 256
"""Channels of y."""

PIECE = 32
"""Outputs of y at a time: two pieces under way fit into the registers. 64, one after the other: 74.9 us instead of 71.9."""

WARPGROUPS = 4
"""Of an SM: what registers allow; in two blocks where they fit, else in one."""

REGISTERS = 65536 // (128 * WARPGROUPS)


@dataclass(frozen=True)
class BlockConv:
    """All that is fixed when the kernel is compiled; x, y and z have one storage.

    A tile is 64 * warpgroups pixels, `rows` those of a strip. `expanded` outputs of y are computed `chunk` at a time;
    `following` are those of z. With `shortcut` the residual is a product of entry. `ahead`: one piece of y is multiplied while
    the one before it is requantized.
    """

    storage: str
    warpgroups: int
    rows: int
    expanded: int = 256
    chunk: int = 64
    following: int = 64
    shortcut: bool = False
    ahead: bool = True
    digest: str = source_digest()

    @property
    def bits(self) -> int:
        return CODES[self.storage].bits

    @property
    def pixels(self) -> int:
        return 64 * self.warpgroups

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def threads_layout(self) -> gl.BlockedLayout:
        """One element per thread."""
        return gl.BlockedLayout([1], [32], [self.warps], [0])

    @property
    def row_bytes(self) -> int:
        """Bytes of a pixel of x."""
        return CHANNELS * self.bits // 8

    @property
    def strip_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def boxes(self) -> int:
        """Copies of a strip."""
        return -(-self.rows // MOST_ROWS)

    @property
    def planes(self) -> int:
        """Halves of a byte that hold a code."""
        return 8 // self.bits

    @property
    def starts(self) -> tuple[int, ...]:
        """Bytes at which the four weights and the constants start in shared memory, and at which they end."""
        size = self.expanded * CHANNELS
        sizes = (9 * CHANNELS * CHANNELS, size, size * self.shortcut, self.expanded * self.following, 4 * self.constants)
        return tuple(STRIPS * self.strip_bytes + sum(sizes[:i]) for i in range(6))

    @property
    def constants(self) -> int:
        """Numbers: s and b of the second convolution, of the next one, of the third one, and the shortcut's s."""
        return 2 * CHANNELS + 2 * self.following + (2 + self.shortcut) * self.expanded

    @property
    def tail(self) -> int:
        """Where barriers start."""
        return -(-self.starts[5] // UNIT) * UNIT

    @property
    def shared_bytes(self) -> int:
        return self.tail + UNIT

    @property
    def strip(self) -> StripTaps:
        """Copies and reads."""
        strips, weights = StageBarriers(self.tail, STRIPS, self.warps), StageBarriers(self.tail + 16 * STRIPS, 1, self.warps)
        return StripTaps(
            strips, weights, self.tail + 2 * ZERO_BYTES, 0, self.starts[0], self.rows, self.row_bytes,
            self.starts[5] - self.starts[0], self.bits, self.boxes,
        )  # fmt: skip

    @property
    def second(self) -> ThreadProduct:
        """The 3 x 3 convolution, a tap of one plane a piece."""
        return ThreadProduct(CHANNELS, self.row_bytes, self.bits == 4, self.starts[0])

    @property
    def third(self) -> ThreadProduct:
        """A piece of the third convolution."""
        return ThreadProduct(self.chunk, CHANNELS, self.bits == 4, self.starts[1])

    @property
    def entry(self) -> ThreadProduct:
        """A piece of the shortcut."""
        return ThreadProduct(self.chunk, CHANNELS, self.bits == 4, self.starts[2])

    @property
    def next(self) -> ThreadProduct:
        """64 outputs of the next block's first convolution."""
        return ThreadProduct(CHANNELS, self.chunk, self.bits == 4, self.starts[3])

    @property
    def middle_codes(self) -> Requantize:
        return LinkedRequantize(self.storage, None, True, False)

    @property
    def y_codes(self) -> Requantize:
        return LinkedRequantize(self.storage, None if self.shortcut else self.storage, True)

    @property
    def z_codes(self) -> Requantize:
        return Requantize(self.storage, None, True)

    @property
    def chunks(self) -> int:
        """Pieces of y."""
        return self.expanded // self.chunk

    @property
    def group_words(self) -> int:
        """Words of codes of 8 columns."""
        return self.bits // 4

    @property
    def unit_groups(self) -> int:
        """Groups of 8 columns whose words of a pixel, 4, a thread loads and stores at once."""
        return 4 // self.group_words

    @property
    def units(self) -> int:
        """Loads and stores of a pixel of y."""
        return self.expanded // (32 * self.unit_groups)

    @property
    def parts(self) -> int:
        """Pieces of y in a unit."""
        return self.chunks // self.units

    @property
    def halves(self) -> int:
        """Pieces of 64 outputs of z."""
        return self.following // CHANNELS

    @property
    def z_words(self) -> int:
        """Words that a thread stores of a pixel of z at once."""
        return min(4, 2 * self.halves * self.group_words)


def block_config(storage: str, width: int, following: int, shortcut: bool) -> BlockConv:
    """What is compiled for images of this width."""
    for warpgroups in (WARPGROUPS // 2, WARPGROUPS):
        row_bytes = Nhwc64(storage).pixel_bytes(CHANNELS)
        rows, unit = strip_rows(64 * warpgroups, width, 3, row_bytes), 2048 // row_bytes
        config = BlockConv(storage, warpgroups, -(-rows // unit) * unit, EXPANDED, PIECE, following, shortcut, not shortcut)
        if blocks_of(config) * warpgroups == WARPGROUPS:
            break
    return config


def blocks_of(config: BlockConv) -> int:
    """Blocks that share an SM."""
    fit = arch_for(90).shared_per_sm_bytes // (config.shared_bytes + BLOCK_BYTES)
    return max(1, min(WARPGROUPS // config.warpgroups, fit))


class PreparedBlock:
    """The second and third convolution of a bottleneck block and the first one of the next, as the kernel reads them."""

    def __init__(self, second: ConvLayer, third: ConvLayer, following: ConvLayer, sm_count: int) -> None:
        self.second, self.third, self.following, self.sm_count = second, third, following, sm_count
        self.storage, self.outputs = second.x, following.weight.shape[0]
        self.shortcut = third.second is not None
        self.weight = torch.cat([*self._pack_weights(), *self._pack_constants()])
        self.map = functools.lru_cache(maxsize=64)(self._map)
        self.kernels: dict[BlockConv, CompiledKernel] = {}

    def _pack_weights(self) -> list[Tensor]:
        """All weights in the order in which they lie in shared memory."""
        x = self.storage
        rows = column_order(x, EXPANDED)
        pieces = [pack_conv_weight(self.second.weight, x, "f32", CHANNELS, self._row_bytes)]
        pieces.append(pack_rows(self.third.weight[:, :, 0, 0], rows, linked_order(CHANNELS), PIECE))
        if self.third.second is not None:
            entry = loaded_order(x)
            pieces.append(pack_rows(self.third.second.weight[:, :, 0, 0], rows, entry, PIECE))
        places = linked_channels(x, EXPANDED, PIECE)
        pieces.append(pack_columns(self.following.weight[:, :, 0, 0], column_order(x, self.outputs), places, PIECE))
        return [piece.reshape(-1) for piece in pieces]

    def _pack_constants(self) -> list[Tensor]:
        """All constants in the order in which they lie in shared memory, as bytes."""
        second, third, following = self.second, self.third, self.following
        steps = 16.0 if self.storage == "u4" else 1.0  # what bytes of codes in registers are of the codes
        constants = [(values, "f32", CHANNELS) for values in (second.s / steps, second.b)]
        constants += [(values, following.y, self.outputs) for values in (following.s / steps, following.b)]
        constants += [(values, third.y, EXPANDED) for values in (third.s / steps, third.b)]
        if third.second is not None:
            constants.append((third.second.s / steps, third.y, EXPANDED))
        return [pack_lane_constants(values, y, outputs).view(torch.int8) for values, y, outputs in constants]

    @property
    def _row_bytes(self) -> int:
        return Nhwc64(self.storage).pixel_bytes(CHANNELS)

    def config(self, width: int) -> BlockConv:
        """What is compiled for images of this width."""
        return block_config(self.storage, width, self.outputs, self.shortcut)

    def _map(self, rows: int, box: int, address: int, device: torch.device) -> Tensor:
        return row_map(rows, self._row_bytes, box, self._row_bytes, address, device)

    def __call__(self, x: Tensor, added: Tensor, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Writes (y, z) of packed x [N, H, W, bytes]; `added` is the residual, or the input of the shortcut."""
        n, height, width, _ = x.shape
        pixels = n * height * width
        config = self.config(width)
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
            self.kernels[config] = block_conv[grid](*arguments, num_warps=config.warps, maxnreg=REGISTERS, launch_pdl=True)
        else:
            kernel[grid](*arguments)
        return out
