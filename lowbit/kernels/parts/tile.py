"""The tile of y that a block computes with wgmma: layouts, stages and barriers. Base classes of kernel configurations."""

from __future__ import annotations

import torch

from lowbit.kernels.parts.cluster_split_k import ClusterExchange
from lowbit.kernels.parts.gluon import gl
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.scaled_epilogue import OUTPUTS, TYPES
from lowbit.kernels.parts.smem import UNIT, Regions

STAGE_K = 128
"""Number of 8-bit columns of K in a stage; a row is then as wide as the widest swizzle, 128 bytes."""

TILE_K = gl.constexpr(STAGE_K)
OPERAND_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


class Warps:
    """Base class of configurations with `warps` warps."""

    @property
    def warps(self) -> int:
        raise NotImplementedError

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def threads_layout(self) -> gl.BlockedLayout:
        """One element per thread."""
        return gl.BlockedLayout([1], [32], [self.warps], [0])


class Warpgroups(Warps):
    """Base class of configurations whose math warps are `warpgroups` warpgroups of four warps."""

    warpgroups: int

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups


class WarpgroupTile(Warpgroups):
    """A tile of 64 * warpgroups rows, 16 per warp, with `stages` stages of both operands in shared memory."""

    stages: int

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def regions(self) -> Regions:
        """Regions of shared memory; the last one is `barriers`."""
        raise NotImplementedError

    @property
    def barriers(self) -> StageBarriers:
        return StageBarriers(UNIT * self.regions.start("barriers"), self.stages, self.warps)


class ByteTypes:
    """Data types of a product with 8-bit x."""

    x_type: torch.dtype
    y_type: torch.dtype

    @property
    def x(self) -> gl.dtype:
        return TYPES[self.x_type][0]

    @property
    def y(self) -> gl.dtype:
        return OUTPUTS[self.y_type]

    @property
    def sums(self) -> gl.dtype:
        """Type of the sums in the tensor core."""
        return gl.int32 if self.x_type == torch.int8 else gl.float32


class ByteTile(WarpgroupTile, ByteTypes):
    """Base class of configurations for 8-bit activations: a tile with `columns` columns, whose rows are operand A.

    With `tokens_are_rows`, rows are tokens and columns are rows of w; without, the other way round.
    """

    tokens_are_rows: bool
    columns: int
    promote: bool
    paired: bool
    store_by_tma: bool

    last_is_full = False
    """True if the last of several token tiles begins early enough to be full. Here it does not: for a tile that starts at any
    token the epilogue needs more registers, which spill (sub_byte_scaled_gemm.py, 48 bytes with Triton 3.9)."""
    x_shared_layout = OPERAND_LAYOUT

    @property
    def operand_regions(self) -> tuple[tuple[str, int], ...]:
        raise NotImplementedError

    @property
    def regions(self) -> Regions:
        y = self.rows * self.store_columns * 2 if self.store_by_tma else 0
        return Regions((*self.operand_regions, ("y", y), ("barriers", UNIT)))

    @property
    def tile_tokens(self) -> int:
        return self.rows if self.tokens_are_rows else self.columns

    @property
    def tile_channels(self) -> int:
        return self.columns if self.tokens_are_rows else self.rows

    @property
    def x_block(self) -> tuple[int, int]:
        """[tokens, columns of K] of one TMA copy of x."""
        return self.tile_tokens, STAGE_K

    @property
    def stages_ahead(self) -> int:
        """Number of stages whose weights are loaded before the previous kernel has finished. They are few where x is large: the
        copies of x, which must wait for that kernel, are queued behind those of the weights."""
        return self.stages if self.tile_tokens < 128 else 2

    @property
    def store_columns(self) -> int:
        """Number of columns of a tile that are stored at a time through shared memory."""
        return self.columns // 2 if self.paired else min(self.columns, 128)

    @property
    def stores(self) -> int:
        return self.columns // self.store_columns

    @property
    def by_halves(self) -> bool:
        """True if promoted sums are computed first for one half of the columns, then for the other, since registers do not hold
        sums and totals of all columns."""
        return self.promote and self.columns == 256

    @property
    def store_block(self) -> list[int]:
        """[tokens, channels] of one TMA store."""
        return [self.rows, self.store_columns] if self.tokens_are_rows else [self.store_columns, self.rows]

    @property
    def exchange(self) -> ClusterExchange:
        return ClusterExchange(self.barriers.end, self.warps, 4 * self.rows * self.store_columns)

    @property
    def total(self) -> gl.dtype:
        """Type of the sums over all of K."""
        return gl.float32 if self.promote else self.sums

    @property
    def accumulator(self) -> gl.NVMMADistributedLayout:
        # Triton fails to compile integer wgmma of 256 columns; two of 128 are as fast.
        columns = min(self.columns, 128) if self.x_type == torch.int8 else self.columns
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, columns, 32])

    @property
    def store_layout(self) -> gl.NVMMADistributedLayout:
        """The accumulator of `store_columns` columns."""
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, self.store_columns, 32])
