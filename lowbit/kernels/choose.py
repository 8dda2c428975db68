"""Which kernel and which tile multiply a problem: candidates, why some cannot, what each would cost, the choice.

Pure functions of a problem and a device row: no GPU is asked, so a laptop can say what a server would do and why. Costs are
modelled microseconds; their constants were measured on an H200 (2026-11-21, Triton 3.6, torch 2.11; docs/log.md) and
only have to put the candidates in the right order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lowbit.hardware.device import Device

RING_TOKENS = 16
"""Up to here the ring kernel is the faster one: it is bound by memory, the wgmma kernel by the latency of decoding."""

SMALL_TOKENS = 8
"""Tokens of one mma.sync: up to here x costs little."""


@dataclass(frozen=True)
class GemmShape:
    """What decides about speed: y[m, n] = x[m, k] . w[n, k]^T with codes of `bits` bits."""

    m: int
    n: int
    k: int
    bits: int

    @property
    def strips(self) -> int:
        """Strips of 16 rows of w."""
        return -(-self.n // 16)

    def steps(self, size: int) -> int:
        """Steps of `size` k that cover K."""
        return -(-self.k // size)


@dataclass(frozen=True)
class RingTile:
    """Configuration of kernels/sm80/mixed_gemm.py; see there."""

    tokens: int
    strips: int
    rounds: int
    warps_n: int
    warps_k: int
    splits: int

    @property
    def block_strips(self) -> int:
        return self.strips * self.warps_n

    def __str__(self) -> str:
        return (
            f"ring {self.block_strips * 16} rows x {self.tokens} tokens, {self.warps_n} x {self.warps_k} warps of "
            f"{self.strips} strips, ring of {self.strips * self.rounds}, K split {self.splits}"
        )


@dataclass(frozen=True)
class WgmmaTile:
    """Configuration of kernels/sm90/mixed_gemm.py; see there."""

    tokens: int
    warpgroups: int
    step: int
    stages: int
    splits: int
    token_group: int

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    def __str__(self) -> str:
        return (
            f"wgmma {self.rows} rows x {self.tokens} tokens, k {64 * self.step} a step, {self.stages} stages, "
            f"K split {self.splits}"
        )


Tile = RingTile | WgmmaTile


@dataclass(frozen=True)
class Candidate:
    """A tile with its reasons against the problem (empty: it can) and its modelled time."""

    tile: Tile
    reasons: tuple[str, ...]
    cost_us: float


def candidates(shape: GemmShape, device: Device, *, batch_invariant: bool = False) -> list[Candidate]:
    """Every tile considered for a problem, cheapest first, those that cannot last.

    With `batch_invariant`, only tiles whose sums do not depend on m: row i of y then has the same bits in any batch.
    """
    rows = [_wgmma_candidate(tile, shape, device) for tile in _wgmma_tiles(shape)] if "wgmma" in device.features else []
    if batch_invariant:
        return _ordered([row for row in rows if isinstance(row.tile, WgmmaTile) and row.tile.splits == 1])
    if shape.m <= RING_TOKENS or not rows:
        rows = [_ring_candidate(tile, shape, device) for tile in _ring_tiles(shape, device)]
    return _ordered(rows)


@functools.lru_cache(maxsize=4096)
def choose(shape: GemmShape, device: Device, batch_invariant: bool = False) -> Tile:
    """The cheapest tile that can; raises ValueError with everybody's reasons when none can."""
    rows = candidates(shape, device, batch_invariant=batch_invariant)
    for row in rows:
        if not row.reasons:
            return row.tile
    listed = "\n".join(f"  {row.tile}: {'; '.join(row.reasons)}" for row in rows)
    raise ValueError(f"no tile for {shape} on {device.product}:\n{listed}")


def _ordered(rows: list[Candidate]) -> list[Candidate]:
    return sorted(rows, key=lambda row: (bool(row.reasons), row.cost_us))


# ---- the ring kernel


def _ring_tiles(shape: GemmShape, device: Device) -> list[RingTile]:
    tokens = SMALL_TOKENS if shape.m <= SMALL_TOKENS else 16
    steps = -(-shape.k // 128)
    few = tokens == SMALL_TOKENS
    tiles = []
    for splits in (1,) if few else (1, 2, 4):
        for warps_n, warps_k in ((1, 16), (1, 8), (2, 4)) if few else ((1, 8), (2, 4)):
            for strips in range(1, 9):
                if strips * warps_n > shape.strips or (warps_k == 16 and strips > 4):
                    continue
                turns = -(-steps // (warps_k * splits))
                # 64 KiB of codes in flight on an SM hide the latency of memory; a longer ring only copies more of x.
                in_flight = max(1, round(65536 / (warps_n * warps_k * strips * 256 * shape.bits)))
                rounds = max(1, min(in_flight, 8 // strips, turns if turns <= 4 else 2))
                tiles.append(RingTile(tokens, strips, rounds, warps_n, warps_k, splits))
    return tiles


def _ring_candidate(tile: RingTile, shape: GemmShape, device: Device) -> Candidate:
    reasons = []
    per_round = tile.strips * (256 * shape.bits + 256) + 256 * tile.tokens
    shared = tile.warps_n * tile.warps_k * tile.rounds * per_round
    if shared > device.shared_per_block_bytes:
        reasons.append(f"needs {shared:,} bytes of shared memory, a block has {device.shared_per_block_bytes:,}")
    return Candidate(tile, tuple(reasons), _ring_cost(tile, shape, device))


def _ring_cost(tile: RingTile, shape: GemmShape, device: Device) -> float:
    """Launch, then the longest SM: its weights at its share of the memory, its x and its decoding beside them.

    x costs once per row of warps, since each warp copies its own: 16 tokens of x are as many bytes as 4 strips of int4.
    """
    blocks = -(-shape.strips // tile.block_strips) * tile.splits * -(-shape.m // tile.tokens)
    waves = -(-blocks // device.sm_count)
    read = device.measured_read_bytes or device.bandwidth_bytes
    k = shape.k / tile.splits
    weights = tile.block_strips * 16 * k * shape.bits / 8
    x = tile.warps_n * min(shape.m, tile.tokens) * k * 2
    # A block's share of the memory; the L2 serves x and weights together at about 1.15 of the memory's rate.
    memory_us = waves * max(weights * device.sm_count / read, (weights + x) * device.sm_count / (1.15 * read)) * 1e6
    steps_per_warp = -(-shape.steps(128) // (tile.warps_k * tile.splits))
    # A step of one strip occupies a warp for about 0.25 us with 16 tokens and 0.15 with 8, two warps for each scheduler.
    latency_us = waves * steps_per_warp * tile.strips * (0.16 if tile.tokens > SMALL_TOKENS else 0.1)
    meet_us = 2.5 if tile.splits > 1 else 0.0
    # More warps hide more; more blocks one after the other cost their starts.
    return 3.5 + max(memory_us, latency_us) + meet_us + 0.3 * waves - 0.02 * tile.warps_n * tile.warps_k


# ---- the wgmma kernel


def _wgmma_tiles(shape: GemmShape) -> list[WgmmaTile]:
    tiles = []
    for tokens in (16, 32, 64, 128, 256):
        for warpgroups, step in ((1, 1), (2, 1), (2, 2), (4, 1)):
            if (warpgroups == 4 and tokens > 64) or (step == 2 and tokens > 64) or (warpgroups == 1 and tokens < 256):
                continue  # more registers than there are; too little work for a block
            stage = 64 * warpgroups * 8 * shape.bits + 128 * tokens
            stored = 128 * warpgroups * tokens
            fits = (230_000 - stored) // stage // (2 * step) * (2 * step)
            stages = min(8, fits)
            turns = -(-shape.k // (128 * step))
            tiles += [WgmmaTile(tokens, warpgroups, step, stages, splits, 2) for splits in (1, 2, 3, 4, 8) if splits <= turns]
    return tiles


_STEP_CYCLES = {
    # (tokens, warpgroups): cycles for 64 k of a tile, from whole kernels on an H200 at 1.755 GHz (see the module)
    (256, 2): 1190,
    (256, 1): 690,
    (128, 2): 730,
    (64, 4): 940,
    (64, 2): 550,
    (32, 4): 890,
    (32, 2): 540,
    (16, 4): 850,
    (16, 2): 520,
}
_ONE_STEP_CYCLES = 60
"""More with step 1 than with step 2, for small tiles."""


def _wgmma_candidate(tile: WgmmaTile, shape: GemmShape, device: Device) -> Candidate:
    reasons = []
    if tile.stages < 2 * tile.step:
        reasons.append(f"{shape.bits}-bit tiles leave room for {tile.stages} stages, {2 * tile.step} are needed")
    return Candidate(tile, tuple(reasons), _wgmma_cost(tile, shape, device))


def _wgmma_cost(tile: WgmmaTile, shape: GemmShape, device: Device) -> float:
    """Launch, then waves of tiles: the steps along K, storing, and for splits the way through the L2."""
    tiles = -(-shape.m // tile.tokens) * -(-shape.n // tile.rows) * tile.splits
    waves = -(-tiles // device.sm_count)
    turns = -(-shape.steps(128 * tile.step) // tile.splits)
    cycles = _STEP_CYCLES[tile.tokens, tile.warpgroups]
    if tile.step == 1 and tile.tokens <= 64 and tile.warpgroups == 2:
        cycles += _ONE_STEP_CYCLES
    main_us = waves * turns * 2 * tile.step * cycles / 1755
    store_us = waves * tile.tokens * tile.rows * 2.2e-5
    if tile.warpgroups == 1:  # nothing multiplies while its one warpgroup stores
        store_us += 2.5 * (waves - 1)
    read = device.measured_read_bytes or device.bandwidth_bytes
    meet_us = 0.0
    if tile.splits > 1:
        sums = tile.tokens * tile.rows * 4
        meet_us = 1.5 + waves * (1.0 + sums * (tile.splits + 1) / 70e3) + tiles * sums / read * 1e6 / 2
    memory_us = shape.n * shape.k * shape.bits / 8 / read * 1e6
    return 3.5 + max(main_us, memory_us) + store_us + meet_us
