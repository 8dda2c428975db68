"""Which tile multiplies a product of a decode step whose norm, gate or residual is at its end: up to 16 tokens, ring kernel.

In a chain of kernels other tiles are fast than alone. With programmatic launch the next product's blocks start on SMs that are
free and pile up there: behind o the same gate-up kernel took 25.6 us, behind a norm 17.7. Products of one wave of blocks
therefore have an SM for each block (`blocks_per_sm` 1), which took a step from 1937 to 1593 us (H200, 2026-11-22, batch 1).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.candidate import Candidate, first_that_can, ordered
from lowbit.kernels.choose.mixed_gemm import (
    INVARIANT_WARPS,
    RING_TOKENS,
    SMALL_TOKENS,
    GemmShape,
    RingTile,
    ring_candidate,
    ring_tiles,
)

Role = Literal["norm", "gated", "residual"]
"""What is at a product's end: the norm (qkv, head), norm and gate (gate-up), or the residual (o, down)."""

MOST_PARTS = 256
"""Blocks that may leave sums of squares: each warp of the next product adds up all of them, 8 at a time."""


@dataclass(frozen=True)
class MeasuredChain:
    """A tile of the fastest step that was tried, Llama-3-8B's shape, all kernels launched programmatically, context 1024.

    Batches 1, 4 and 16 were run; `tokens` are the m, first and last, for which they stand.
    """

    product: str
    date: str
    role: Role
    tokens: tuple[int, int]
    n: int
    k: int
    bits: int
    tile: RingTile
    note: str

    def __str__(self) -> str:
        return f"measured in a step on {self.product}, {self.date}, {self.tokens[0]} to {self.tokens[1]} tokens: {self.note}"

    def holds_for(self, role: Role, shape: GemmShape, machine: Machine) -> bool:
        """Whether the product is this one."""
        same = (self.product, self.role, self.n, self.k, self.bits) == (machine.product, role, shape.n, shape.k, shape.bits)
        return same and self.tokens[0] <= shape.m <= self.tokens[1]


@dataclass(frozen=True)
class ChainCandidate(Candidate[RingTile]):
    """A candidate with the measurement that puts it first, if there is one."""

    measured: MeasuredChain | None = None


def chain_candidates(role: Role, shape: GemmShape, machine: Machine, *, batch_invariant: bool = False) -> list[ChainCandidate]:
    """Every tile considered for a product in a chain: the measured one, then the cheapest first, those that cannot last.

    With `batch_invariant`, tiles whose sums and parts do not depend on m: row i of y has the same bits in any batch.
    """
    if batch_invariant:
        one = GemmShape(1, shape.n, shape.k, shape.bits)
        tiles = [t for t in ring_tiles(one, machine) if (t.warps_k, t.splits) == (INVARIANT_WARPS, 1)]
        tokens = SMALL_TOKENS if shape.m <= SMALL_TOKENS else RING_TOKENS
        rows = [_candidate(role, t, one, machine, tokens) for t in tiles]
        return ordered(rows)
    known = [row for row in MEASURED if row.holds_for(role, shape, machine)]
    rows = [replace(_candidate(role, row.tile, shape, machine), tile=row.tile, measured=row) for row in known]
    return ordered(rows + [_candidate(role, tile, shape, machine) for tile in ring_tiles(shape, machine)])


@functools.lru_cache(maxsize=4096)
def choose_chain(role: Role, shape: GemmShape, machine: Machine, batch_invariant: bool = False) -> RingTile:
    """The first of the candidates that can; raises ValueError with everybody's reasons when none can."""
    return first_that_can(chain_candidates(role, shape, machine, batch_invariant=batch_invariant), shape, machine)


def _candidate(role: Role, tile: RingTile, shape: GemmShape, machine: Machine, tokens: int = 0) -> ChainCandidate:
    """A tile with the blocks of an SM that it has in a chain. `tokens`: those that it is made for in the end, if others."""
    row = ring_candidate(tile, shape, machine)
    blocks = -(-shape.strips // tile.block_strips)
    reasons = row.reasons
    if tokens > tile.tokens:
        tile = replace(tile, tokens=tokens)
        reasons = ring_candidate(tile, shape, machine).reasons
    if role == "residual" and blocks > MOST_PARTS:
        reasons += (f"its {blocks} blocks would leave as many sums of squares, {MOST_PARTS} are added up",)
    alone = blocks * tile.splits <= machine.sm_count
    return ChainCandidate(replace(tile, blocks_per_sm=1 if alone else 0), reasons, row.cost_us)


# ---- where a step was measured; other rows are modelled

MEASURED: tuple[MeasuredChain, ...] = (
    MeasuredChain(
        "H200", "2026-11-22", "norm", (1, 8), 6144, 4096, 4,
        RingTile(tokens=8, strips=3, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "qkv; with o and down alone on an SM too, the step took 1593 us instead of 1937 at batch 1",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "residual", (1, 8), 4096, 4096, 4,
        RingTile(tokens=8, strips=2, rounds=2, warps_n=1, warps_k=8, splits=1, blocks_per_sm=1),
        "o; a ring of 4 of 2 strips, alone on an SM",
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
        "H200", "2026-11-22", "residual", (9, 16), 4096, 4096, 4,
        RingTile(tokens=16, strips=2, rounds=2, warps_n=1, warps_k=16, splits=1),
        "o; tried at batch 16, where the fastest variant took 2758 us and 8 kernels a layer 2765",
    ),
    MeasuredChain(
        "H200", "2026-11-22", "gated", (9, 16), 28672, 4096, 4,
        RingTile(tokens=16, strips=7, rounds=1, warps_n=2, warps_k=4, splits=1),
        "gate-up; in all variants at batch 16, of which the fastest took 2758 us",
    ),
)  # fmt: skip
