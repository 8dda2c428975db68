"""What the two wgmma kernels for 8-bit activations have in common: the tile, where it is stored, the plan of a product."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit.kernels.choose.scaled_gemm import ScaledShape, ScaledTile
from lowbit.kernels.parts.epilogue import OUTPUTS, TYPES
from lowbit.kernels.parts.gluon import CompiledKernel, gl
from lowbit.kernels.parts.pair import Pair
from lowbit.kernels.parts.stages import StageBarriers
from lowbit.kernels.sm90.mixed_gemm import UNIT

STAGE_K = 128
"""K of a stage; a row of it is as wide as the widest swizzle."""

TILE_K = gl.constexpr(STAGE_K)
OPERAND_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


class ByteTile:
    """A tile of 64 * warpgroups rows x `columns`, rows being operand A; the base of a kernel's configuration, with its fields.

    With `tokens_are_rows`, rows are tokens and columns are rows of w; without, the other way round.
    """

    x_type: torch.dtype
    y_type: torch.dtype
    tokens_are_rows: bool
    warpgroups: int
    columns: int
    stages: int
    promote: bool
    paired: bool
    store_by_tma: bool

    @property
    def y_unit(self) -> int:
        """Where y waits to be stored in shared memory, in units."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def tokens(self) -> int:
        """The columns of a tile, as `meet` calls them."""
        return self.columns

    @property
    def tile_tokens(self) -> int:
        return self.rows if self.tokens_are_rows else self.columns

    @property
    def tile_channels(self) -> int:
        return self.columns if self.tokens_are_rows else self.rows

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stages_ahead(self) -> int:
        """Stages whose weights are asked for before x may be: not many where x is much, which then waits behind them."""
        return self.stages if self.tile_tokens < 128 else 2

    @property
    def store_columns(self) -> int:
        """Columns of a tile that wait in shared memory at once for being stored."""
        return self.columns // 2 if self.paired else min(self.columns, 128)

    @property
    def stores(self) -> int:
        return self.columns // self.store_columns

    @property
    def by_halves(self) -> bool:
        """Whether sums that are promoted are those of one half of the columns, then of the other: there is no room for both."""
        return self.promote and self.columns == 256

    @property
    def store_block(self) -> list[int]:
        """[tokens, channels] of one store."""
        return [self.rows, self.store_columns] if self.tokens_are_rows else [self.store_columns, self.rows]

    @property
    def barrier_unit(self) -> int:
        return self.y_unit + (self.rows * self.store_columns * 2 // UNIT if self.store_by_tma else 0)

    @property
    def barriers(self) -> StageBarriers:
        return StageBarriers(UNIT * self.barrier_unit, self.stages, self.warps)

    @property
    def pair(self) -> Pair:
        return Pair(UNIT * self.barrier_unit + 16 * self.stages, self.warps, 4 * self.rows * self.store_columns)

    @property
    def x(self) -> gl.dtype:
        return TYPES[self.x_type][0]

    @property
    def y(self) -> gl.dtype:
        return OUTPUTS[self.y_type]

    @property
    def sums(self) -> gl.dtype:
        """Type of the tensor core's sums."""
        return gl.int32 if self.x_type == torch.int8 else gl.float32

    @property
    def total(self) -> gl.dtype:
        """Type of the sums over all k."""
        return gl.float32 if self.promote else self.sums

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        # Integer products of 256 columns stop Triton's compiler; two of 128 are as good.
        columns = min(self.columns, 128) if self.x_type == torch.int8 else self.columns
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, columns, 32])

    @property
    def store_layout(self) -> gl.NVMMADistributedLayout:
        """The accumulator of C.store_columns columns."""
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, self.store_columns, 32])

    @property
    def threads_layout(self) -> gl.BlockedLayout:
        """One element per thread."""
        return gl.BlockedLayout([1], [32], [self.warps], [0])


def compiled(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], warps: int, cluster: int) -> CompiledKernel:
    """A Gluon kernel for its arguments, to be launched in clusters of so many blocks.

    Triton has a size of clusters for its launcher, but takes it from layouts that spread over them, which none does here.
    """
    made = kernel.warmup(*arguments, grid=grid, num_warps=warps, launch_pdl=True)
    num_warps, _, shared_bytes = made.packed_metadata
    made.packed_metadata = (num_warps, cluster, shared_bytes)
    return made


@dataclass(frozen=True)
class Address:
    """As much of a tensor as a descriptor needs: it must not keep the memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As Triton asks a tensor for it."""
        return self.address


class TilePlan:
    """All of a product that does not depend on the tensors' contents: made once for a shape, called many times.

    Descriptors say where memory is, nothing of what is in it, so those of addresses seen before serve again.
    """

    def __init__(self, shape: ScaledShape, tile: ScaledTile, config: Any, sm_count: int) -> None:
        self.shape, self.tile, self.config = shape, tile, config
        self.tiles = (-(-shape.m // config.tile_tokens), -(-shape.n // config.tile_channels))
        blocks = self.tiles[0] * self.tiles[1] * tile.splits
        # Blocks of a pair have one tile: the next one would overwrite the ring in which they meet.
        self.grid = (blocks if tile.pair else min(sm_count, blocks), 1, 1)
        self.launches = (blocks // 2, 1, 1) if tile.pair else self.grid
        self.kernel: CompiledKernel | None = None
        self.x_descriptor = functools.lru_cache(maxsize=256)(self._x_descriptor)
        self.y_descriptor = functools.lru_cache(maxsize=256)(self._y_descriptor)

    def _x_descriptor(self, address: int, stride: int) -> TensorDescriptor:
        x, block = Address(address, self.config.x_type), [self.config.tile_tokens, STAGE_K]
        return TensorDescriptor(x, [self.shape.m, self.shape.k], [stride, 1], block, OPERAND_LAYOUT)

    def _y_descriptor(self, address: int) -> TensorDescriptor | None:
        if not self.config.store_by_tma:
            return None
        layout = gl.NVMMASharedLayout.get_default_for(self.config.store_block, self.config.y)
        shape = [self.shape.m, self.shape.n]
        return TensorDescriptor(Address(address, self.config.y_type), shape, [shape[1], 1], self.config.store_block, layout)

    @property
    def workspace(self) -> tuple[int, int]:
        """Elements of the two workspaces, float32 sums and int32 counters (which are zero before and after)."""
        if self.tile.splits == 1 or self.tile.pair:
            return 0, 0
        tiles = self.tiles[0] * self.tiles[1]
        return tiles * self.tile.splits * self.config.rows * self.config.columns, tiles
