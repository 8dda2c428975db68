"""Choice of kernel and tile for a GEMM of a decode step with norm, gate or residual in its epilogue, for up to 64 tokens.

The fastest tile in a chain of kernels is not the fastest tile of a single kernel. With programmatic dependent launch the next
GEMM's blocks start on SMs that are free, and pile up there. The same gate-up kernel took 25.6 us after the output projection
and 17.7 us after a norm kernel. A GEMM of one wave therefore has one block per SM (`blocks_per_sm` 1), which shortened a step
from 1937 to 1593 us (H200, 2026-11-22, batch 1).
"""

from __future__ import annotations

import functools
from dataclasses import replace

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.candidate import Candidate, first_feasible, ordered
from lowbit.kernels.choose.large_m import wgmma_candidate, wgmma_tiles
from lowbit.kernels.choose.measured import MEASURED_CHAINS
from lowbit.kernels.choose.small_m import ring_candidate, ring_tiles
from lowbit.kernels.choose.tiles import (
    INVARIANT_WARPS,
    RING_TOKENS,
    SMALL_TOKENS,
    ChainTile,
    GemmShape,
    RingTile,
    Role,
    WgmmaTile,
)

ChainCandidate = Candidate[ChainTile]

Y_TILES: dict[Role, float] = {"norm": 1, "gated": 0.5, "residual": 2}
"""Shared memory that the large-M GEMM's epilogue takes, in tiles: one for y, half of one with a gate, and with a residual two,
for y and h."""

CHAIN_TOKENS = 64
"""Largest M with these epilogues: the number of tokens of a large-M tile that is still fast in a decode step."""

MOST_PARTS = 256
"""Limit of partial sums of squares per token. The next GEMM adds them up; in the small-M GEMM every warp adds all of them."""


def chain_candidates(role: Role, shape: GemmShape, machine: Machine, *, batch_invariant: bool = False) -> list[ChainCandidate]:
    """All candidates for a GEMM in a chain: the measured one first, then by cost, infeasible ones last.

    With `batch_invariant` only tiles whose sums and partial sums of squares do not depend on m, so that row i of y has the same
    bits in any batch.
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
    known = [row for row in MEASURED_CHAINS if row.holds_for(role, shape, machine)]
    first = [replace(_measured(role, row.tile, shape, machine), tile=row.tile, measured=row) for row in known]
    return ordered(first + rows)


@functools.lru_cache(maxsize=4096)
def choose_chain(role: Role, shape: GemmShape, machine: Machine, batch_invariant: bool = False) -> ChainTile:
    """The first feasible candidate; raises ValueError with the reasons against each when there is none."""
    return first_feasible(chain_candidates(role, shape, machine, batch_invariant=batch_invariant), shape, machine)


def parts_of(tile: ChainTile, shape: GemmShape) -> int:
    """Number of partial sums of squares per token that a residual epilogue writes: one for each tile of channels."""
    return -(-shape.n // tile.rows)


def _measured(role: Role, tile: ChainTile, shape: GemmShape, machine: Machine) -> ChainCandidate:
    if isinstance(tile, WgmmaTile):
        return _wgmma(role, tile, shape, machine)
    return _ring(role, tile, shape, machine, shape.m)


def _ring(role: Role, tile: RingTile, shape: GemmShape, machine: Machine, m: int, tokens: int = 0) -> ChainCandidate:
    """A tile of the small-M GEMM, with its blocks per SM in a chain of m tokens and its cost for shape.m tokens. The returned
    tile has at least `tokens` tokens."""
    blocks = parts_of(tile, shape) * tile.splits
    row = ring_candidate(_alone(tile, blocks, shape.m, machine), shape, machine)
    tile = _alone(replace(tile, tokens=max(tokens, tile.tokens)), blocks, m, machine)
    reasons = ring_candidate(tile, shape, machine).reasons + _too_many_parts(role, parts_of(tile, shape))
    return ChainCandidate(tile, reasons, row.cost_us)


def _alone(tile: RingTile, blocks: int, m: int, machine: Machine) -> RingTile:
    """The tile with one block per SM, if there are enough SMs for all blocks; each token tile takes `blocks` blocks."""
    return replace(tile, blocks_per_sm=1 if blocks * -(-m // tile.tokens) <= machine.sm_count else 0)


def _wgmma(role: Role, tile: WgmmaTile, shape: GemmShape, machine: Machine) -> ChainCandidate:
    """A tile of the large-M GEMM. Its epilogue needs all tokens in one tile, and with a residual also one tile per block."""
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
