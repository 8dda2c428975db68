"""Choice of tile for a GEMM with 8-bit activations: candidates, reasons against them, cost model.

Pure functions of a shape and a machine, like choose/gemm.py. Costs only have to order the candidates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose import tuned
from lowbit.kernels.choose.candidate import Candidate, first_feasible, ordered


@dataclass(frozen=True)
class ScaledShape:
    """The shape of y[m, n] = x[m, k] . w[n, k]^T with 8-bit x and codes of `bits` bits.

    `integer`: True for int8, False for fp8. `grouped`: w has scales of groups of 128; `blocks`, `x_blocks`: w, x have scales of
    blocks. `fast_accum`: sums of fp8 x times fp8 w stay in the tensor core. `ops` never sets it for codes of fewer bits. As
    small e4m3 numbers they lose more precision there: after 1104 columns of K the error was 5e-3 (int4) and 1e-2 (fp6_e3m2),
    see docs/internals/numerics.md.
    """

    m: int
    n: int
    k: int
    bits: int
    integer: bool = True
    grouped: bool = False
    blocks: bool = False
    x_blocks: bool = False
    fast_accum: bool = False

    @property
    def promoted(self) -> bool:
        """True if sums over 128 columns of K are promoted to fp32, because scales change there or because fp8 sums would lose
        precision."""
        return self.grouped or self.blocks or self.x_blocks or not (self.integer or self.fast_accum)


@dataclass(frozen=True)
class ScaledTile:
    """Configuration of kernels/sm90/scaled_gemm.py, and of sub_byte_scaled_gemm.py for fewer than 8 bits, which document it."""

    tokens_are_rows: bool
    warpgroups: int
    columns: int
    stages: int
    splits: int
    token_group: int
    pair: bool = False
    """True for cluster split-K: the two splits are computed by a cluster of two blocks, each of which stores one half of the
    columns."""

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def tokens(self) -> int:
        return self.rows if self.tokens_are_rows else self.columns

    @property
    def channels(self) -> int:
        return self.columns if self.tokens_are_rows else self.rows

    def __str__(self) -> str:
        order = "x . w^T" if self.tokens_are_rows else "w . x^T"
        split = "K split over a pair of blocks" if self.pair else f"K split {self.splits}"
        return f"wgmma 8-bit {order}, {self.tokens} tokens x {self.channels} channels, {self.stages} stages, {split}"


KINDS: dict[str, type[Any]] = {"scaled": ScaledTile}
"""Types of tiles by their names in files."""


def candidates_scaled(shape: ScaledShape, machine: Machine, *, batch_invariant: bool = False) -> list[Candidate[ScaledTile]]:
    """All candidates for a shape: the one measured by `lowbit tune` first, then by cost, infeasible ones last.

    With `batch_invariant` only tiles whose sums do not depend on m, so that row i of y has the same bits in any batch. These
    are all tiles where sums are exact integers, else the tiles that do not split K.
    """
    tiles = [tile for tile in _tiles(shape) if not (batch_invariant and shape.promoted and tile.splits > 1)]

    def candidate(tile: ScaledTile) -> Candidate[ScaledTile]:
        return Candidate(tile, _reasons(tile, shape), _cost(tile, shape, machine))

    rows = [candidate(tile) for tile in tiles]
    here = None if batch_invariant else tuned.first(rows, machine.tuned, shape, KINDS, candidate)
    return ordered(rows if here is None else here)


@functools.lru_cache(maxsize=4096)
def choose_scaled(shape: ScaledShape, machine: Machine, batch_invariant: bool = False) -> ScaledTile:
    """The first feasible candidate; raises ValueError with the reasons against each when there is none."""
    return first_feasible(candidates_scaled(shape, machine, batch_invariant=batch_invariant), shape, machine)


def shared_bytes(tile: ScaledTile, shape: ScaledShape) -> int:
    """Bytes of shared memory for a tile's stages, its store and its barriers."""
    return tile.stages * _stage_bytes(tile, shape) + _store_bytes(tile) + 1024


def _stage_bytes(tile: ScaledTile, shape: ScaledShape) -> int:
    of_scales = 2 * tile.channels if shape.grouped else 0
    return 128 * tile.tokens + 16 * shape.bits * tile.channels + of_scales


def _store_bytes(tile: ScaledTile) -> int:
    if tile.pair:
        return tile.rows * tile.columns
    return 2 * tile.rows * min(tile.columns, 128) if tile.splits == 1 else 0


SHARED_BYTES = 230_400
"""Usable bytes of shared memory: the 227 KiB of a block, less what Triton reserves and what rounding regions up to 1 KiB adds.
"""
MOST_STAGES, MOST_NARROW_STAGES = {8: 20, 16: 20}, {8: 10, 16: 10, 128: 6}
"""Limits of stages by columns of a tile, for 8-bit and for sub-byte weights; 12 for other columns. More would fit but are
slower: 10 stages of sub-byte weights leave room for a block of the next kernel (e4m3, M 16, 8192 x 8192: 13.8 us, with 16
stages 14.8; H200, 2026-11-21)."""


def _tiles(shape: ScaledShape) -> list[ScaledTile]:
    """Candidate tiles. A tile has at most as many tokens as M rounded up to a power of two. K has at most one split per 512
    columns, since each split costs a start."""
    narrow = shape.bits < 8
    tiles = []
    # Block scales of x are faster with tokens as rows (`swapped`): a thread then loads the scales of two tokens, not of a
    # quarter of the tile's tokens. Tiles of 256 columns, which are computed in two halves, are also a little faster then (1.27
    # against 1.3 in `_cost`).
    for swapped in (False, True) if shape.promoted and not narrow and shape.m > 128 else (False,):
        for warpgroups in (2, 4) if narrow else (1, 2):
            for columns in (8, 16, 32, 64, 128, 256):
                for splits, pair in ((1, False), (2, True), (2, False), (3, False), (4, False), (6, False), (8, False)):
                    tile = ScaledTile(swapped, warpgroups, columns, 2, splits, 8, pair)
                    if splits > max(-(-shape.k // 512), 1) or tile.tokens > max(8, 2 * shape.m - 1):
                        continue
                    room = (SHARED_BYTES - _store_bytes(tile) - 1024) // _stage_bytes(tile, shape)
                    stages = min((MOST_NARROW_STAGES if narrow else MOST_STAGES).get(columns, 12), room)
                    tiles.append(replace(tile, stages=stages // 2 * 2 if narrow else stages))
    return tiles


def _reasons(tile: ScaledTile, shape: ScaledShape) -> tuple[str, ...]:
    reasons = []
    if tile.stages < 2:
        reasons.append(f"leaves room for {tile.stages} stages, 2 are needed")
    # Promoted sums take a second set of registers. 256 columns are then multiplied one half at a time, which excludes block
    # scales.
    halves = (
        tile.warpgroups == 2 and (tile.splits == 1 or tile.pair) and shape.k > 0 and not shape.blocks and not shape.x_blocks
    )
    most = (256 if halves else 128 if tile.warpgroups <= 2 else 16) if shape.promoted else (256 if tile.warpgroups <= 2 else 64)
    if tile.columns > most:
        reasons.append(f"has sums of {tile.columns} columns, more than the registers hold")
    if tile.pair and tile.columns < 16:
        reasons.append("has no two halves of 8 columns")
    if shape.blocks and tile.channels > 128:
        reasons.append("reaches beyond one block of scales")
    return tuple(reasons)


CLOCK_MHZ = 1755
L2_BYTES_PER_CYCLE = 50
"""L2 bandwidth of one SM. Tiles of 64 x 128 to 64 x 256 with M 128 and 256 all reached 11.5 TB/s on 132 SMs."""
_FEW_BUSY = 1.18
"""Largest factor on the L2 bandwidth of an SM where other SMs have no block. N 2048, K 2048, M 128 takes 4.2 us with 64 blocks
of 64 x 64; with main loops as slow as those of 128 blocks it would take 5.8. The constants here were fitted to the shapes of
`lowbit bench choice` and to weights of medium size (H200, 2026-11-23; docs/log)."""
_LEAST_CYCLES = 215
"""Least number of cycles for a stage of 8-bit weights of any size."""

_NARROW_STAGE_US = {
    # (promoted sums, int8): microseconds for 128 columns of K of a tile of 128 channels, by tokens of the tile; from whole
    # kernels, H200, 2026-11-21, N 8192. Promoted sums of 256 tokens were measured as ratios to 128 tokens, with K 8192 and
    # 28672, M 1024 and 4096.
    ("whole", True): {8: 0.2, 16: 0.2, 32: 0.22, 64: 0.25, 128: 0.31, 256: 0.71},
    ("grouped", True): {8: 0.2, 16: 0.21, 32: 0.25, 64: 0.3, 128: 0.46, 256: 0.85},
    ("grouped", False): {8: 0.25, 16: 0.26, 32: 0.29, 64: 0.33, 128: 0.49, 256: 0.93},
    ("promoted", False): {8: 0.25, 16: 0.26, 32: 0.29, 64: 0.31, 128: 0.45, 256: 0.8},
}


_PAIR_US = 0.5
"""Microseconds to synchronise the two blocks of a cluster split-K, without the exchange of sums: N 576, K 2048, M 16 took 2.7
us with tiles of 64 x 16 by clusters, 3.3 us by single blocks (H200, 2026-11-23,
benchmarks/results/h200/2026-11-23-choice.json)."""
_MOST_X = 3
"""Limit of the modelled time for x and for weights that are read again, as a multiple of the weights' memory time, since these
reads come from L2. N 576, K 2048, M 1024 takes 6 us with tiles of 64 x 128; without the limit x alone was modelled as 10 us
(same file)."""


def _cost(tile: ScaledTile, shape: ScaledShape, machine: Machine) -> float:
    """Launch, then waves of tiles at the slowest rate of tensor cores, L2 and memory, and the split-K reduction."""
    tiles = -(-shape.m // tile.tokens) * -(-shape.n // tile.channels) * tile.splits
    waves = -(-tiles // machine.sm_count)
    steps = -(-shape.k // (128 * tile.splits))
    read = machine.read_bytes
    memory_us = shape.n * shape.k * shape.bits / 8 / read * 1e6
    if shape.bits < 8:
        kind = "grouped" if shape.grouped else "promoted" if shape.promoted else "whole"
        per_stage = _NARROW_STAGE_US[kind, shape.integer][tile.columns] * (1.75 if tile.warpgroups == 4 else 1.0)
        per_stage *= 1.15 if tile.pair and tile.columns == 256 else 1.0  # M 256, K 28672: 111 us; two tiles of 128 take 103
    else:
        halves = 1.27 if tile.tokens_are_rows and not tile.pair else 1.3
        slower = (halves if tile.columns == 256 else 1.4) if shape.promoted else 1.12
        share = min(_FEW_BUSY, max(1.0, machine.sm_count / tiles))
        from_l2 = _stage_bytes(tile, shape) / (L2_BYTES_PER_CYCLE * share)
        per_stage = max(from_l2, tile.rows * tile.columns / 32 * slower, _LEAST_CYCLES) / CLOCK_MHZ
        per_stage *= 1.05 if shape.promoted and tile.columns < 256 else 1.0
    kib = tile.rows * tile.columns / 256
    store_us = waves * tile.rows * tile.columns * 4e-5
    meet_us = 0.55 + waves * 0.055 * kib * tile.splits if tile.splits > 1 else 0.0
    if tile.pair:  # 128 x 256 sums: 7,400 cycles follow the last product, of which 2,350 remain without the exchange
        meet_us = _PAIR_US + 0.034 * kib + 2.5 * (waves - 1)
    # Where memory is the bottleneck, tokens cost a little, and weights cost more, since each token tile reads them again. A
    # cluster's tile has 128 channels and reads x half as often as tiles of 64 channels, which single blocks use for so few
    # tokens.
    x_us = shape.m * shape.k * (1.5e-6 if tile.pair else 2.7e-6) + 0.6 * (-(-shape.m // tile.tokens) - 1)
    x_us = min(x_us, _MOST_X * memory_us)
    if shape.x_blocks and not tile.tokens_are_rows:
        per_stage *= 1 + tile.columns / 256
    return 2.5 + max(waves * steps * per_stage, memory_us + x_us) + store_us + meet_us
