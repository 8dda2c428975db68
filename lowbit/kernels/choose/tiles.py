"""Shape of a mixed-precision GEMM, and the tiles of its three kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lowbit.hardware.arch import Arch
from lowbit.kernels.choose.candidate import Candidate

RING_TOKENS = 16
"""Largest M of the small-M GEMM. Beyond it the large-M GEMM is faster: its warps share x, while each warp of the small-M GEMM
copies x for itself."""

INVARIANT_WARPS = 8
"""Number of warps that share K in batch-invariant small-M tiles."""

DENSE_BITS = 16
"""Value of `bits` for weights that are not quantized (pack/dense.py); only the small-M GEMM multiplies them."""

SMALL_TOKENS = 8
"""Number of tokens of one mma.sync. Up to this M the small-M GEMM has tiles of 8 tokens, for which x costs little."""


@dataclass(frozen=True)
class GemmShape:
    """The shape of y[m, n] = x[m, k] . w[n, k]^T with codes of `bits` bits, or 16-bit weights (`DENSE_BITS`)."""

    m: int
    n: int
    k: int
    bits: int

    @property
    def row_blocks(self) -> int:
        """Number of m16 row blocks of w."""
        return -(-self.n // 16)

    @property
    def dense(self) -> bool:
        """True if weights are 16-bit floats instead of codes."""
        return self.bits == DENSE_BITS

    def steps(self, size: int) -> int:
        """Number of k blocks of `size` that cover K."""
        return -(-self.k // size)


@dataclass(frozen=True)
class RingTile:
    """Configuration of kernels/sm80/small_m_gemm.py, which documents it. `row_blocks`: m16 row blocks per warp. `rounds`: k
    blocks per iteration. `blocks_per_sm`: limit of blocks per SM; 0: as many as fit. `slots`: number of slots in a warp's ring;
    0: one for each row block and k block of an iteration."""

    tokens: int
    row_blocks: int
    rounds: int
    warps_n: int
    warps_k: int
    splits: int
    blocks_per_sm: int = 0
    slots: int = 0

    @property
    def tile_row_blocks(self) -> int:
        return self.row_blocks * self.warps_n

    @property
    def rows(self) -> int:
        return 16 * self.tile_row_blocks

    @property
    def depth(self) -> int:
        """Number of slots in a warp's ring."""
        return self.slots or self.row_blocks * self.rounds

    def __str__(self) -> str:
        few = f", {self.blocks_per_sm} block{'s' * (self.blocks_per_sm > 1)} an SM" if self.blocks_per_sm else ""
        return (
            f"ring {self.tile_row_blocks * 16} rows x {self.tokens} tokens, {self.warps_n} x {self.warps_k} warps of "
            f"{self.row_blocks} row blocks, ring of {self.depth}, K split {self.splits}{few}"
        )


def shared_by(tile: RingTile, arch: Arch) -> int:
    """Bytes of shared memory that a block must allocate so that no more than the tile's blocks per SM fit; CUDA reserves 1 KiB
    more. 0: no limit."""
    if not tile.blocks_per_sm:
        return 0
    return min(arch.shared_per_sm_bytes // (tile.blocks_per_sm + 1) + 2048, arch.shared_per_block_bytes)


@dataclass(frozen=True)
class WgmmaTile:
    """Configuration of kernels/sm90/large_m_gemm.py, which documents it. `splits` 0: stream-K. `sections`: one block sums that
    many ranges of K one after the other; the result has the same bits as with that many splits.
    """

    tokens: int
    warpgroups: int
    stages: int
    splits: int
    token_group: int
    sections: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    def __str__(self) -> str:
        of_k = f"K split {self.splits}" if self.sections == 1 else f"{self.sections} parts of K in turn"
        of_k = of_k if self.splits else "equal shares of the last wave (stream-K)"
        return f"wgmma {self.rows} rows x {self.tokens} tokens, {self.stages} stages, {of_k}"


@dataclass(frozen=True)
class MmaTile:
    """Configuration of kernels/sm80/large_m_gemm.py, which documents it. `row_blocks`: m16 row blocks per warp; `warps_k` warps
    share K. With `in_turn` the split-K reduction is serial."""

    tokens: int
    row_blocks: int
    warps_n: int
    warps_m: int
    stages: int
    splits: int
    token_group: int = 2
    in_turn: bool = False
    warps_k: int = 1

    @property
    def rows(self) -> int:
        return 16 * self.row_blocks * self.warps_n

    def __str__(self) -> str:
        of_k = f" x {self.warps_k}" if self.warps_k > 1 else ""
        return (
            f"mma {self.rows} rows x {self.tokens} tokens, {self.warps_n} x {self.warps_m} warps{of_k}, {self.stages} stages, "
            f"K split {self.splits}{' in turn' if self.in_turn else ''}"
        )


Tile = RingTile | WgmmaTile | MmaTile
KINDS: dict[str, type[Any]] = {"ring": RingTile, "wgmma": WgmmaTile, "mma": MmaTile}
"""Types of tiles by their names in files."""

GemmCandidate = Candidate[Tile]

ChainTile = RingTile | WgmmaTile
Role = Literal["norm", "gated", "residual"]
"""Epilogue of a GEMM of a decode step: "norm" (qkv projection, head), "gated" (norm and gate, for the gate-up projection), or
"residual" (output and down projections)."""
