"""Choice of kernel and tile for a mixed-precision GEMM: candidates of all kernels, measured ones first, then by cost.

Pure functions of a shape and a machine: no GPU is queried, so a laptop can explain what a server would choose.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose import tuned
from lowbit.kernels.choose.candidate import first_feasible, ordered
from lowbit.kernels.choose.large_m import invariant_tiles, mma_candidate, mma_tiles, wgmma_candidate, wgmma_tiles
from lowbit.kernels.choose.measured import MEASURED
from lowbit.kernels.choose.small_m import ring_candidate, ring_tiles
from lowbit.kernels.choose.tiles import INVARIANT_WARPS, KINDS, RING_TOKENS, GemmCandidate, GemmShape, RingTile, Tile, WgmmaTile


def candidates(shape: GemmShape, machine: Machine, *, batch_invariant: bool = False) -> list[GemmCandidate]:
    """All candidates for a shape: measured ones first (from `lowbit tune`, then from MEASURED), then by cost, infeasible ones
    last.

    With `batch_invariant`, only tiles whose sums do not depend on m: row i of y then has the same bits in any batch.
    """
    wgmma = "wgmma" in machine.arch.features
    if wgmma:
        rows = [wgmma_candidate(tile, shape, machine) for tile in wgmma_tiles(shape)]
    else:
        many = shape.m > RING_TOKENS
        rows = [mma_candidate(tile, shape, machine) for tile in mma_tiles(shape, machine)] if many else []
    if batch_invariant and wgmma:
        return ordered([wgmma_candidate(tile, shape, machine) for tile in invariant_tiles(shape, machine)])
    if shape.m <= RING_TOKENS or not wgmma:
        rings = [ring_candidate(tile, shape, machine) for tile in ring_tiles(shape, machine)]
        if batch_invariant:  # the number of warps that share K fixes the order of summation
            return ordered([row for row in rings if (row.tile.warps_k, row.tile.splits) == (INVARIANT_WARPS, 1)])  # type: ignore[union-attr]
        rows = rows + rings
    here = tuned.first(rows, machine.tuned, shape, KINDS, lambda tile: _candidate(tile, shape, machine))
    if here is not None:
        return ordered(here)
    known = {row.tile: row for row in MEASURED if row.holds_for(shape, machine)}
    return ordered([replace(row, measured=known[row.tile]) if row.tile in known else row for row in rows])


@functools.lru_cache(maxsize=4096)
def choose(shape: GemmShape, machine: Machine, batch_invariant: bool = False) -> Tile:
    """The first feasible candidate; raises ValueError with the reasons against each when there is none."""
    return first_feasible(candidates(shape, machine, batch_invariant=batch_invariant), shape, machine)


def _candidate(tile: Tile, shape: GemmShape, machine: Machine) -> GemmCandidate:
    if isinstance(tile, RingTile):
        return ring_candidate(tile, shape, machine)
    return wgmma_candidate(tile, shape, machine) if isinstance(tile, WgmmaTile) else mma_candidate(tile, shape, machine)
