"""Choice of kernel and tile for a GEMM of a decode step with norm, gate or residual in its epilogue, for up to 64 tokens.

In a chain of kernels other tiles are fastest than for a single kernel. With programmatic dependent launch the next GEMM's
blocks start on SMs that are free and pile up there: behind o the same gate-up kernel took 25.6 us, behind a norm 17.7. GEMMs of
one wave of blocks therefore have an SM for each block (`blocks_per_sm` 1), which took a step from 1937 to 1593 us (H200,
2026-11-22, batch 1).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.candidate import Candidate, first_feasible, ordered
from lowbit.kernels.choose.gemm import (
    DENSE_BITS,
    INVARIANT_WARPS,
    RING_TOKENS,
    SMALL_TOKENS,
    GemmShape,
    RingTile,
    WgmmaTile,
    ring_candidate,
    ring_tiles,
    wgmma_candidate,
    wgmma_tiles,
)

ChainTile = RingTile | WgmmaTile

Role = Literal["norm", "gated", "residual"]
"""Epilogue of a GEMM: norm (qkv, head), norm and gate (gate-up), or residual (o, down)."""

Y_TILES: dict[Role, float] = {"norm": 1, "gated": 0.5, "residual": 2}
"""Tiles of y's size in shared memory of the large-M GEMM: y, with a residual h too."""

CHAIN_TOKENS = 64
"""Largest M with such epilogues: that of a tile of the large-M GEMM that is fast for decoding."""

MOST_PARTS = 256
"""Limit of partial sums of squares: the next GEMM adds them up, in the small-M GEMM every warp all of them."""


@dataclass(frozen=True)
class MeasuredChain:
    """A tile of the fastest decode step tried: Llama-3-8B's shape, all kernels launched programmatically, context 1024.

    Batches 1, 4, 16 and 64 were run; `tokens` are the first and last M for which a row is used.
    """

    product: str
    date: str
    role: Role
    tokens: tuple[int, int]
    n: int
    k: int
    bits: int
    tile: ChainTile
    note: str

    def __str__(self) -> str:
        return f"measured in a step on {self.product}, {self.date}, {self.tokens[0]} to {self.tokens[1]} tokens: {self.note}"

    def holds_for(self, role: Role, shape: GemmShape, machine: Machine) -> bool:
        """True if the row applies to this GEMM."""
        same = (self.product, self.role, self.n, self.k, self.bits) == (machine.product, role, shape.n, shape.k, shape.bits)
        return same and self.tokens[0] <= shape.m <= self.tokens[1]


@dataclass(frozen=True)
class ChainCandidate(Candidate[ChainTile]):
    """A candidate with the measurement that ranks it first, if there is one."""

    measured: MeasuredChain | None = None


def chain_candidates(role: Role, shape: GemmShape, machine: Machine, *, batch_invariant: bool = False) -> list[ChainCandidate]:
    """All candidates for a GEMM in a chain: the measured one, then by cost, infeasible ones last.

    With `batch_invariant`, tiles whose sums and partial sums of squares do not depend on m: row i of y has the same bits in any
    batch.
    """
    if batch_invariant:
        one = GemmShape(1, shape.n, shape.k, shape.bits)
        tiles = [t for t in ring_tiles(one, machine) if (t.warps_k, t.splits) == (INVARIANT_WARPS, 1)]
        tokens = SMALL_TOKENS if shape.m <= SMALL_TOKENS else RING_TOKENS
        return ordered([_ring(role, t, one, machine, shape.m, tokens) for t in tiles])
    rows = []
    if shape.m > SMALL_TOKENS and "wgmma" in machine.arch.features and not shape.dense:
        tiled = wgmma_tiles(shape, Y_TILES[role], in_chain=True)
        rows = [_wgmma(role, tile, shape, machine) for tile in tiled]
    if shape.m <= RING_TOKENS or all(row.reasons for row in rows):  # the small-M GEMM takes more tokens in several blocks
        rows += [_ring(role, ring, shape, machine, shape.m) for ring in ring_tiles(shape, machine)]
    known = [row for row in MEASURED if row.holds_for(role, shape, machine)]
    first = [replace(_measured(role, row.tile, shape, machine), tile=row.tile, measured=row) for row in known]
    return ordered(first + rows)


@functools.lru_cache(maxsize=4096)
def choose_chain(role: Role, shape: GemmShape, machine: Machine, batch_invariant: bool = False) -> ChainTile:
    """The first feasible candidate; raises ValueError with the reasons against each when there is none."""
    return first_feasible(chain_candidates(role, shape, machine, batch_invariant=batch_invariant), shape, machine)


def parts_of(tile: ChainTile, shape: GemmShape) -> int:
    """Partial sums of squares per token of a residual epilogue: one for each block of rows."""
    return -(-shape.n // tile.rows)


def _measured(role: Role, tile: ChainTile, shape: GemmShape, machine: Machine) -> ChainCandidate:
    if isinstance(tile, WgmmaTile):
        return _wgmma(role, tile, shape, machine)
    return _ring(role, tile, shape, machine, shape.m)


def _ring(role: Role, tile: RingTile, shape: GemmShape, machine: Machine, m: int, tokens: int = 0) -> ChainCandidate:
    """A tile of the small-M GEMM with the blocks per SM that it has in a chain of m tokens; its cost is that of shape.m.
    `tokens`: those of the final tile, if others."""
    blocks = parts_of(tile, shape) * tile.splits
    row = ring_candidate(_alone(tile, blocks, shape.m, machine), shape, machine)
    tile = _alone(replace(tile, tokens=max(tokens, tile.tokens)), blocks, m, machine)
    reasons = ring_candidate(tile, shape, machine).reasons + _too_many_parts(role, parts_of(tile, shape))
    return ChainCandidate(tile, reasons, row.cost_us)


def _alone(tile: RingTile, blocks: int, m: int, machine: Machine) -> RingTile:
    """The tile with one block per SM, if there are enough SMs; each of its token tiles takes `blocks`."""
    return replace(tile, blocks_per_sm=1 if blocks * -(-m // tile.tokens) <= machine.sm_count else 0)


def _wgmma(role: Role, tile: WgmmaTile, shape: GemmShape, machine: Machine) -> ChainCandidate:
    """A tile of the large-M GEMM, whose epilogue needs all tokens in one tile, and with a residual one tile per block."""
    row = wgmma_candidate(tile, shape, machine)
    blocks = parts_of(tile, shape)
    reasons = row.reasons
    if tile.tokens < shape.m:
        reasons += (f"has {tile.tokens} tokens, a norm needs those of all {shape.m}",)
    if role == "residual":
        reasons += _too_many_parts(role, blocks)
        if blocks * tile.splits > machine.sm_count:
            reasons += (f"its {blocks * tile.splits} blocks are more than {machine.sm_count} SMs: h waits for one of each",)
        if shape.n % 8:
            reasons += (f"rows of h, {shape.n} wide, do not start at multiples of 16 bytes",)
    return ChainCandidate(tile, reasons, row.cost_us)


def _too_many_parts(role: Role, blocks: int) -> tuple[str, ...]:
    if role != "residual" or blocks <= MOST_PARTS:
        return ()
    return (f"its {blocks} blocks would leave as many sums of squares, {MOST_PARTS} are added up",)


# ---- measured decode steps; other shapes are modelled

MEASURED: tuple[MeasuredChain, ...] = (
    MeasuredChain(
        "H200", "2026-11-22", "norm", (1, 8), 6144, 4096, 4,
        RingTile(tokens=8, strips=3, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "qkv; with o and down alone on an SM too, the step took 1593 us instead of 1937 at batch 1",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "residual", (1, 2), 4096, 4096, 4,
        RingTile(tokens=8, strips=2, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "o; a ring of 4 of 2 strips, alone on an SM",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "residual", (3, 8), 4096, 4096, 4,
        RingTile(tokens=8, strips=3, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "o; a step of 4 layers 334.2 us at batch 4, 337.4 with two strips",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "gated", (1, 8), 28672, 4096, 4,
        RingTile(tokens=8, strips=7, rounds=1, warps_n=2, warps_k=4, splits=1, blocks_per_sm=1),
        "gate-up; a step of 4 layers 309.1 us, with 256 blocks of half as many rows, two on an SM, 311.5",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "residual", (1, 2), 4096, 14336, 4,
        RingTile(tokens=8, strips=2, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "down; alone on an SM",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "residual", (3, 8), 4096, 14336, 4,
        RingTile(tokens=8, strips=2, rounds=1, warps_n=1, warps_k=16, splits=1, blocks_per_sm=1),
        "down; 80 us less in a step of batch 4 than 8 warps with a ring of 4",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "norm", (3, 8), 128256, 4096, 8,
        RingTile(tokens=8, strips=4, rounds=1, warps_n=1, warps_k=8, splits=1),
        "head; 2 us less at batch 4 than with 7 strips",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "gated", (1, 8), 28672, 4096, 6,
        RingTile(tokens=8, strips=7, rounds=1, warps_n=1, warps_k=8, splits=1),
        "gate-up; 20.5 us where the modelled one adds 29.7 to a layer",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "residual", (1, 8), 4096, 14336, 6,
        RingTile(tokens=8, strips=2, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "down; alone on an SM, 1 us less a layer",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "norm", (1, 8), 6144, 4096, 8,
        RingTile(tokens=8, strips=3, rounds=1, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "qkv; alone on an SM",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "residual", (1, 8), 4096, 4096, 8,
        RingTile(tokens=8, strips=2, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "o; with qkv and down so too, a step of 4 layers 392.4 us instead of 402.7 at batch 1",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "residual", (1, 8), 4096, 14336, 8,
        RingTile(tokens=8, strips=2, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "down; alone on an SM",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "residual", (9, 16), 4096, 4096, 4,
        WgmmaTile(tokens=16, warpgroups=2, stages=8, splits=4, token_group=2),
        "o; a step of 4 layers 449.3 us, 454.1 with 48 rows of the small-M kernel",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "residual", (9, 16), 4096, 14336, 4,
        WgmmaTile(tokens=16, warpgroups=4, stages=8, splits=8, token_group=2),
        "down; 469.5 us, 488.0 with the small-M kernel's 128 rows in 4 splits",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "gated", (9, 16), 28672, 4096, 4,
        RingTile(tokens=16, strips=7, rounds=1, warps_n=2, warps_k=4, splits=1),
        "gate-up; 488.0 us, 491.0 with 256 rows of the large-M kernel",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "residual", (9, 16), 4096, 14336, 6,
        WgmmaTile(tokens=16, warpgroups=2, stages=8, splits=4, token_group=2),
        "down; a step of 4 layers 489.9 us, 523.2 with the small-M kernel's 128 rows in 4 splits",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "norm", (1, 2), 128256, 4096, 8,
        RingTile(tokens=8, strips=7, rounds=1, warps_n=1, warps_k=8, splits=1),
        "head; the fastest of those tried at batch 1",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "norm", (9, 16), 128256, 4096, 8,
        WgmmaTile(tokens=16, warpgroups=4, stages=8, splits=1, token_group=2),
        "head; a step of 4 layers 466.8 us, 472.4 with 256 rows of the small-M kernel",
    ),
    *(
        MeasuredChain(
            "H200", "2026-11-23", "gated", (9, 16), 28672, 4096, bits,
            WgmmaTile(tokens=16, warpgroups=4, stages=8, splits=1, token_group=2),
            f"gate-up; a step of 4 layers {us} with 224 rows of the small-M kernel",
        )
        for bits, us in ((6, "523.2 us, 536.1"), (8, "512.0 us, 514.8"))
    ),
    MeasuredChain(
        "H200", "2026-11-23", "residual", (9, 16), 4096, 14336, 8,
        WgmmaTile(tokens=16, warpgroups=2, stages=8, splits=4, token_group=2),
        "down; a step of 4 layers 512.0 us, 529.1 with 64 rows of the small-M kernel in 2 splits",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "norm", (33, 64), 128256, 4096, 8,
        WgmmaTile(tokens=64, warpgroups=2, stages=8, splits=1, token_group=2),
        "head; a step of 4 layers 785.4 us, 811.5 with 256 rows in 4 stages",
    ),
    *(
        MeasuredChain(
            "H200", "2026-11-23", "residual", (9, 16), 4096, 4096, bits,
            WgmmaTile(tokens=16, warpgroups=2, stages=8, splits=4, token_group=2),
            f"o; a step of 4 layers {us}",
        )
        for bits, us in ((6, "472.1 us, 481.1 with 48 rows of the small-M kernel"), (8, "509.7 us, 512.0 with the ring kernel"))
    ),
    MeasuredChain(
        "H200", "2026-11-23", "residual", (1, 8), 4096, 14336, DENSE_BITS,
        RingTile(tokens=8, strips=2, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "down; a step of 4 layers 727.6 us, 734.8 with a ring of 2",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "norm", (1, 8), 128256, 4096, DENSE_BITS,
        RingTile(tokens=8, strips=4, rounds=1, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "head; a step of 4 layers 720.3 us, 727.6 with 128 rows of 4 warps",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "residual", (9, 16), 4096, 14336, DENSE_BITS,
        RingTile(tokens=16, strips=4, rounds=2, warps_n=1, warps_k=4, splits=2, blocks_per_sm=1),
        "down; a step of 4 layers 826.1 us, 837.0 with 128 rows in 4 splits and a ring of 2",
    ),
    MeasuredChain(
        "H200", "2026-11-23", "norm", (9, 16), 128256, 4096, DENSE_BITS,
        RingTile(tokens=16, strips=7, rounds=1, warps_n=1, warps_k=4, splits=1),
        "head; a step of 4 layers 821.2 us, 828.3 with 256 rows and a ring of 2",
    ),
)  # fmt: skip
