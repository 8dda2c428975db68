"""Choice of kernel and tile for a mixed-precision GEMM: candidates, reasons against them, cost model, measured exceptions.

Pure functions of a shape and a machine: no GPU is queried, so a laptop can explain what a server would choose. Costs are
modelled microseconds and only have to order the candidates. Their constants were fitted to the tuned halves of
benchmarks/results/h200/2026-11-23-choice.json, 2026-11-23-choice-middle.json and 2026-11-24-choice.json (H200, Triton 3.6,
torch 2.11; docs/log), those of small-M tiles of 16 tokens to shapes of 2026-11-21. Tiles of more tokens than M are
candidates too: tokens are padded.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from lowbit.hardware.arch import Arch
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose import tuned
from lowbit.kernels.choose.candidate import Candidate, first_feasible, ordered

RING_TOKENS = 16
"""Largest M of the small-M GEMM. Beyond it the large-M GEMM wins: its warps share x, while here each warp copies its own."""

INVARIANT_WARPS = 8
"""Warps that share K in batch-invariant small-M tiles."""

DENSE_BITS = 16
"""Bits of weights that are not quantized (pack/dense.py), which only the small-M GEMM multiplies."""

SMALL_TOKENS = 8
"""Tokens of one mma.sync: up to here the small-M GEMM has tiles of 8 tokens, for which x costs little."""


@dataclass(frozen=True)
class GemmShape:
    """The shape of y[m, n] = x[m, k] . w[n, k]^T with codes of `bits` bits, or 16-bit weights (`DENSE_BITS`)."""

    m: int
    n: int
    k: int
    bits: int

    @property
    def strips(self) -> int:
        """m16 row blocks of w."""
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
    """Configuration of kernels/sm80/small_m_gemm.py; see there. `strips`: m16 row blocks per warp. `rounds`: k blocks per
    iteration. `blocks_per_sm`: limit of blocks per SM; 0: as many as fit. `slots` of a warp's ring; 0: one for each row block
    and k block."""

    tokens: int
    strips: int
    rounds: int
    warps_n: int
    warps_k: int
    splits: int
    blocks_per_sm: int = 0
    slots: int = 0

    @property
    def block_strips(self) -> int:
        return self.strips * self.warps_n

    @property
    def rows(self) -> int:
        return 16 * self.block_strips

    @property
    def depth(self) -> int:
        """Slots of a warp's ring."""
        return self.slots or self.strips * self.rounds

    def __str__(self) -> str:
        few = f", {self.blocks_per_sm} block{'s' * (self.blocks_per_sm > 1)} an SM" if self.blocks_per_sm else ""
        return (
            f"ring {self.block_strips * 16} rows x {self.tokens} tokens, {self.warps_n} x {self.warps_k} warps of "
            f"{self.strips} strips, ring of {self.depth}, K split {self.splits}{few}"
        )


def shared_by(tile: RingTile, arch: Arch) -> int:
    """Bytes of shared memory that limit a tile to its blocks per SM; a block takes 1 KiB besides. 0: no limit."""
    if not tile.blocks_per_sm:
        return 0
    return min(arch.shared_per_sm_bytes // (tile.blocks_per_sm + 1) + 2048, arch.shared_per_block_bytes)


@dataclass(frozen=True)
class WgmmaTile:
    """Configuration of kernels/sm90/large_m_gemm.py; see there. `splits` 0: stream-K. `sections`: a block sums that many ranges
    of K one after the other, with the bits of as many splits.
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
    """Configuration of kernels/sm80/large_m_gemm.py; see there. A warp has `strips` m16 row blocks; `warps_k` warps share K.
    With `in_turn` the split-K reduction is serial."""

    tokens: int
    strips: int
    warps_n: int
    warps_m: int
    stages: int
    splits: int
    token_group: int = 2
    in_turn: bool = False
    warps_k: int = 1

    @property
    def rows(self) -> int:
        return 16 * self.strips * self.warps_n

    def __str__(self) -> str:
        of_k = f" x {self.warps_k}" if self.warps_k > 1 else ""
        return (
            f"mma {self.rows} rows x {self.tokens} tokens, {self.warps_n} x {self.warps_m} warps{of_k}, {self.stages} stages, "
            f"K split {self.splits}{' in turn' if self.in_turn else ''}"
        )


Tile = RingTile | WgmmaTile | MmaTile
KINDS: dict[str, type[Any]] = {"ring": RingTile, "wgmma": WgmmaTile, "mma": MmaTile}
"""Names of tiles in files."""


@dataclass(frozen=True)
class Measured:
    """A measured exception to the cost model: for a shape, `tile` took `us` where the modelled choice took `instead_us`."""

    product: str
    date: str
    shape: GemmShape
    tile: Tile
    us: float
    instead_us: float

    def __str__(self) -> str:
        margin = 100 * (1 - self.us / self.instead_us)
        return f"measured on {self.product}, {self.date}, M {self.shape.m}: {self.us:g} us, {margin:.0f} % less than modelled"

    def holds_for(self, shape: GemmShape, machine: Machine) -> bool:
        """True for this shape, or one with fewer tokens, down to half as many."""
        same = (self.product, self.shape.n, self.shape.k, self.shape.bits) == (machine.product, shape.n, shape.k, shape.bits)
        return same and self.shape.m < 2 * shape.m <= 2 * self.shape.m


@dataclass(frozen=True)
class GemmCandidate(Candidate[Tile]):
    """A candidate with the measurement that ranks it first, if there is one."""

    measured: Measured | tuned.TunedRow | None = None


def candidates(shape: GemmShape, machine: Machine, *, batch_invariant: bool = False) -> list[GemmCandidate]:
    """All candidates for a shape: measured ones first (those of `lowbit tune` before MEASURED), then by cost, infeasible ones
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
        if batch_invariant:  # the slices of K are fixed by the warps that share K
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


# ---- the small-M GEMM


def ring_tiles(shape: GemmShape, machine: Machine) -> list[RingTile]:
    """Candidate tiles of the small-M GEMM."""
    if shape.dense:
        return _dense_tiles(shape)
    tokens = SMALL_TOKENS if shape.m <= SMALL_TOKENS else 16
    steps = -(-shape.k // 128)
    few = tokens == SMALL_TOKENS
    tiles = []
    for splits in (1,) if few else (1, 2, 4):
        for warps_n, warps_k in ((1, 16), (1, 8), (2, 4)) if few else ((1, 8), (2, 4)):
            for strips in range(1, 9):
                if strips * warps_n > shape.strips or (warps_k == 16 and strips > 4):
                    continue
                iterations = -(-steps // (warps_k * splits))
                # 64 KiB of codes in flight on an SM hide the latency of memory; a longer ring only copies more of x.
                in_flight = max(1, round(65536 / (warps_n * warps_k * strips * 256 * shape.bits)))
                rounds = max(1, min(in_flight, 8 // strips, iterations if iterations <= 4 else 2))
                tiles.append(RingTile(tokens, strips, rounds, warps_n, warps_k, splits))
    return tiles


def _dense_tiles(shape: GemmShape) -> list[RingTile]:
    """Candidate tiles for 16-bit weights, whose slots are 4 KiB: rings of 64 and of 128 KiB per block, with fewer slots than
    row blocks where a block has many of them."""
    tokens = SMALL_TOKENS if shape.m <= SMALL_TOKENS else RING_TOKENS
    steps, tiles = shape.steps(128), []
    for splits in (1,) if tokens == SMALL_TOKENS else (1, 2, 4):
        for warps_n, warps_k in ((1, 8), (2, 4), (1, 4)):
            for strips in range(1, 9):
                if strips * warps_n > shape.strips:
                    continue
                for kib in (64, 128):
                    slots = kib // (4 * warps_n * warps_k)
                    rounds = min(max(1, slots // strips), -(-steps // (warps_k * splits)))
                    fewer = max(size for size in range(1, min(slots, strips) + 1) if strips % size == 0)
                    if fewer == 1 < strips:
                        continue
                    tiles.append(
                        RingTile(tokens, strips, rounds, warps_n, warps_k, splits, slots=fewer if fewer < strips else 0)
                    )
    return list(dict.fromkeys(tiles))


def ring_candidate(tile: RingTile, shape: GemmShape, machine: Machine) -> GemmCandidate:
    """A tile of the small-M GEMM with its reasons and its modelled time."""
    reasons = []
    shared = _ring_bytes(tile, shape)
    if shared > machine.arch.shared_per_block_bytes:
        reasons.append(f"needs {shared:,} bytes of shared memory, a block has {machine.arch.shared_per_block_bytes:,}")
    return GemmCandidate(tile, tuple(reasons), _ring_cost(tile, shape, machine))


def _ring_bytes(tile: RingTile, shape: GemmShape) -> int:
    """Shared memory of a block's rings, with group scales for each row block."""
    of_scales = 0 if shape.dense else 256
    x_slots = max(1, tile.depth // tile.strips)
    return tile.warps_n * tile.warps_k * (tile.depth * (256 * shape.bits + of_scales) + 256 * tile.tokens * x_slots)


_RESIDENT = {
    # bits: blocks of 8 warps and 8 tokens that fit the registers of an SM, by row blocks (Triton 3.6, sm_90).
    # At 8 bits and 2 row blocks 4 would fit without group scales, with them only by spilling two words.
    4: (4, 3, 2, 2, 2, 2, 2, 1),
    6: (4, 4, 3, 3, 3, 2, 2, 2),
    8: (4, 3, 3, 3, 2, 2, 2, 2),
    DENSE_BITS: (2, 2, 2, 2, 2, 2, 1, 1),
}


def _resident(tile: RingTile, shape: GemmShape, machine: Machine) -> int:
    """Blocks that share an SM, by shared memory and by registers. Codes of up to 4 bits are assumed to have group scales."""
    bits = next(bits for bits in _RESIDENT if shape.bits <= bits)
    warps = tile.warps_n * tile.warps_k
    of_scales = 0 if bits == 4 else 256 * warps * tile.rounds * tile.strips
    by_shared = machine.arch.shared_per_sm_bytes // (_ring_bytes(tile, shape) - of_scales + 1024)
    most = tile.blocks_per_sm or by_shared
    return max(1, min(most, by_shared, 8 * _RESIDENT[bits][tile.strips - 1] // warps))


_TAIL, _SLOTS, _PAIR = 0.099, 0.092, 0.028
"""Fractions of the memory time lost: on SMs with fewer blocks than the busiest; where not all places for blocks are taken,
since the next kernel's blocks pile up on a few SMs; by two rows of warps where several blocks share an SM."""
_STEP_US, _WIDE_STEP_US = 0.0113, 0.0301
"""SM time for one row block of one k block: with group scales; and for codes of more than 4 bits, which usually have none."""


def _ring_cost(tile: RingTile, shape: GemmShape, machine: Machine) -> float:
    """Cost of small-M tiles of 8 tokens: launch, then the larger of memory time and instruction time.

    An SM gets its share of the memory bandwidth only while all SMs have work. K is rounded up to iterations of all warps.
    """
    if tile.tokens > SMALL_TOKENS:
        return _wide_ring_cost(tile, shape, machine)
    share = -(-shape.strips // tile.block_strips) * tile.splits * -(-shape.m // tile.tokens) / machine.sm_count
    busiest = math.ceil(share)
    room = _resident(tile, shape, machine)
    together = min(room, busiest)
    steps = -(-shape.steps(128) // (tile.warps_k * tile.splits * tile.rounds)) * tile.rounds * tile.strips
    free = min(math.ceil(share / room) * room / share - 1, 1.5)
    uneven = _TAIL * (busiest / share - 1) + _SLOTS * free + (_PAIR if tile.warps_n == 2 and room > 1 else 0)
    weights = shape.n * shape.k * shape.bits / 8 * (1 + uneven)
    x = share * machine.sm_count * tile.warps_n * min(shape.m, tile.tokens) * shape.k / tile.splits * 2
    memory_us = (weights + 0.43 * x) / machine.read_bytes * 1e6
    warps = tile.warps_n * tile.warps_k
    decode_us = busiest * steps * warps * (_WIDE_STEP_US if shape.bits > 4 else _STEP_US)
    turns_us = math.ceil(busiest / together) * steps * 0.0094 + (busiest - together) * 1.55 / together**2
    # Where the two are close they cost more than the larger one.
    return 0.50 + (memory_us**4 + decode_us**4) ** 0.25 + turns_us + 0.0026 * warps


def _wide_ring_cost(tile: RingTile, shape: GemmShape, machine: Machine) -> float:
    """Cost of small-M tiles of 16 tokens: launch, then the longest SM: its weights at its share of bandwidth, its x,
    dequantization.

    x costs once per row of warps, since each warp copies its own: 16 tokens of x are as many bytes as 4 row blocks of int4.
    """
    blocks = -(-shape.strips // tile.block_strips) * tile.splits * -(-shape.m // tile.tokens)
    waves = -(-blocks // machine.sm_count)
    read = machine.read_bytes
    k = shape.k / tile.splits
    weights = tile.block_strips * 16 * k * shape.bits / 8
    x = tile.warps_n * min(shape.m, tile.tokens) * k * 2
    # A block's share of memory bandwidth; the L2 serves x and weights together at about 1.15 of the memory's rate.
    memory_us = waves * max(weights * machine.sm_count / read, (weights + x) * machine.sm_count / (1.15 * read)) * 1e6
    steps_per_warp = -(-shape.steps(128) // (tile.warps_k * tile.splits))
    # A k block of one row block occupies a warp for about 0.32 us, two warps for each scheduler.
    latency_us = waves * steps_per_warp * tile.strips * 0.16
    meet_us = 2.5 if tile.splits > 1 else 0.0
    # More warps hide more latency; blocks one after the other cost a start each.
    starts_us = 0.3 + (waves - 1) * 2.2
    return 1.2 + 1.05 * max(memory_us, latency_us) + meet_us + starts_us - 0.02 * tile.warps_n * tile.warps_k


# ---- the large-M GEMM of sm_90


def wgmma_tiles(shape: GemmShape, y_tiles: float = 1, *, in_chain: bool = False) -> list[WgmmaTile]:
    """Candidate tiles of the large-M GEMM of sm_90. Beside its stages, shared memory holds `y_tiles` tiles of y (half a tile
    with a gate, h too with a residual), and with norm or residual squares (parts/large_m_epilogue.py)."""
    tiles = []
    for tokens, warpgroups in _STAGE_CYCLES:
        stage = 64 * warpgroups * 8 * shape.bits + 128 * tokens
        stored = int(y_tiles * 128 * warpgroups * tokens) + (64 * tokens + 1024 if in_chain else 0)
        stages = min(8, (230_000 - stored) // stage // 2 * 2)
        iterations = shape.steps(128)
        tiles += [WgmmaTile(tokens, warpgroups, stages, splits, 2) for splits in (1, 2, 3, 4, 8) if splits <= iterations]
        if not in_chain and tokens >= SHARED_TOKENS:
            tiles.append(WgmmaTile(tokens, warpgroups, stages, 0, 2))
    return tiles


SHARED_TOKENS = 128
"""Tokens of the smallest stream-K tile: for fewer tokens there is split-K, and nothing was measured."""
INVARIANT_PARTS = 8
"""Limit of ranges of K in batch-invariant sums."""


def invariant_tiles(shape: GemmShape, machine: Machine) -> list[WgmmaTile]:
    """Batch-invariant tiles: all cut K into the same ranges, as many as fill the GPU at small M with splits. At large M a block
    sums them one after the other (sections)."""
    parts = max(1, min(INVARIANT_PARTS, machine.sm_count // -(-shape.n // 128), shape.steps(128) // 4))
    plain = [tile for tile in wgmma_tiles(shape) if tile.splits == 1]
    if parts == 1:
        return plain
    few = [replace(tile, splits=parts) for tile in plain]
    return few + [replace(tile, sections=parts) for tile in plain if tile.tokens <= SECTION_TOKENS[tile.warpgroups]]


SECTION_TOKENS = {2: 128, 4: 32}
"""Tokens of the largest tile whose registers hold sums twice; 64 by 4 warpgroups spill 24 bytes (Triton 3.6)."""


_STAGE_CYCLES = {
    # (tokens, warpgroups): cycles for 64 k of a tile of int4, mostly with group scales; of codes of more bits, mostly without.
    # Fitted to whole kernels, like the constants below (see the module docstring).
    (256, 2): (1297, 1209),
    (128, 2): (691, 630),
    (64, 4): (848, 769),
    (64, 2): (522, 435),
    (32, 4): (613, 706),
    (32, 2): (438, 425),
    (16, 4): (600, 650),
    (16, 2): (502, 453),
}
_L2_BYTES_PER_CYCLE = 50
"""Bytes per cycle that an SM reads from L2 (choose/scaled_gemm.py)."""
_MISSING_CYCLES = 3.6
"""TMA cycles for 64 k of a token that does not exist. 128 x 256 tokens took 506 us of 256 tokens, 825 of 128 and 970 of 96 (N
152064, K 5120): a partly filled tile is slower than a full one."""


def _too_few_stages(stages: int, least: int, shape: GemmShape) -> tuple[str, ...]:
    return () if stages >= least else (f"{shape.bits}-bit tiles leave room for {stages} stages, {least} are needed",)


LEAST_STAGES = 4
"""Stages of the large-M GEMM: it waits for the first stage of an iteration before it frees those of the previous one."""


def wgmma_candidate(tile: WgmmaTile, shape: GemmShape, machine: Machine) -> GemmCandidate:
    """A tile of the large-M GEMM of sm_90 with its reasons and its modelled time."""
    reasons = _too_few_stages(tile.stages, LEAST_STAGES, shape) + share_refusals(tile, shape, machine.sm_count)
    return GemmCandidate(tile, reasons, _wgmma_cost(tile, shape, machine))


def _wgmma_waves(tile: WgmmaTile, shape: GemmShape, sm_count: int) -> tuple[int, int]:
    """Full waves of tiles (without splits), and the number of remaining tiles."""
    return divmod(-(-shape.m // tile.tokens) * -(-shape.n // tile.rows), sm_count)


LEAST_SHARE = 2
"""Iterations of 128 k that a block has at least with stream-K: it waits for others, which costs more than those take."""


def share_refusals(tile: WgmmaTile, shape: GemmShape, sm_count: int) -> tuple[str, ...]:
    """Reasons against stream-K for a problem; empty if it is feasible or not requested."""
    waves, left = _wgmma_waves(tile, shape, sm_count)
    if tile.splits or left * shape.steps(128) >= LEAST_SHARE * sm_count:
        return ()
    return (
        f"{left} tiles of {shape.steps(128)} x 128 k beside {waves} whole waves are too little for {sm_count} blocks to share",
    )


def _wgmma_cost(tile: WgmmaTile, shape: GemmShape, machine: Machine) -> float:
    """Launch, then waves of tiles: the main loop, the store, and for split-K and stream-K the reduction through L2."""
    waves, left = _wgmma_waves(tile, shape, machine.sm_count)
    iterations = shape.steps(128)
    kib = tile.tokens * tile.rows / 256
    full = _STAGE_CYCLES[tile.tokens, tile.warpgroups][shape.bits > 4]
    # Only a single token tile may be partly filled, or the last one with stream-K; else the last one begins earlier.
    missing = max(tile.tokens - shape.m, 0) if tile.splits else -shape.m % tile.tokens
    copied = 8 * tile.rows * shape.bits + 128 * (tile.tokens - missing)
    stage_us = max(full, copied / _L2_BYTES_PER_CYCLE + _MISSING_CYCLES * missing) / 1755
    # Each tile's share of memory time: in a wave that does not fill the GPU an SM gets more bandwidth.
    weights_us = _WEIGHTS * shape.n * shape.k * shape.bits / 8 / machine.read_bytes * 1e6 / (waves * machine.sm_count + left)
    if tile.splits == 0:
        turns = waves + 1
        shared = -(-left * iterations // machine.sm_count)
        main_us = waves * max(2 * iterations * stage_us, machine.sm_count * weights_us)
        main_us = (main_us + max(2 * shared * stage_us, left * weights_us)) * _SHARED_MARGIN
        meet_us = kib * _SHARED_US
    else:
        turns, alone = divmod((waves * machine.sm_count + left) * tile.splits, machine.sm_count)
        turn_us = 2 * -(-iterations // tile.splits) * stage_us
        main_us = turns * max(turn_us, machine.sm_count * weights_us / tile.splits)
        main_us += max(turn_us, alone * weights_us / tile.splits) if alone else 0
        turns += alone > 0
        meet_us = turns * (0.74 + kib * (0.057 + 0.0176 * tile.splits)) if tile.splits > 1 else 0.0
        meet_us += turns * (tile.sections - 1) * _SECTION_US
    store_us = turns * tile.tokens * tile.rows * 2.4e-05
    return 1.15 + main_us + store_us + meet_us


_WEIGHTS, _SHARED_US, _SHARED_MARGIN = 1.11, 0.145, 1.03
"""Factor on the memory time of weights; reduction time per KiB of 256 sums with stream-K; margin that stream-K must gain over
whole tiles. Of 12 times on an H200, 2026-11-23, int4 in groups of 128, N 5120 K 13824, N 6144 K 4096, N 4096 K 14336, M 256 and
1024: beyond waves that could be cut anywhere, tiles of 128 tokens took 7 to 10 us and of 256 tokens 17 to 23. What is shared
now, less than one wave, is reduced in two thirds of that (2026-11-24: 0.107 and 0.124)."""
_SECTION_US = 0.03
"""Cost of each further section: the pipeline drains. Measured on an H200, 2026-11-23, int4, 4096 x 4096, 256 tokens: two waves
of 128 rows x 64 tokens take 18.59 us in four sections, 18.42 in one."""


# ---- the large-M GEMM of sm_80


_MMA_SHARES = {
    # (tokens, row blocks, warps_n, warps_m): fraction of the rate of mma.sync in the main loop: int4, groups of 128, fp16,
    # H200, 2026-11-23 (docs/log). Codes of more bits and zero points took up to a tenth longer.
    (128, 2, 8, 1): 0.714,
    (64, 2, 8, 1): 0.711,
    (128, 2, 4, 2): 0.672,
    (64, 2, 4, 2): 0.557,
    (32, 2, 4, 2): 0.375,
    (64, 1, 4, 2): 0.313,
}
_MMA_STAGES = 4
"""Most stages that were worth their shared memory; small tiles, which stall more, have half as many again."""


def mma_tiles(shape: GemmShape, machine: Machine) -> list[MmaTile]:
    """Candidate tiles of the large-M GEMM of sm_80."""
    tiles = []
    for tokens, strips, warps_n, warps_m in _MMA_SHARES:
        if strips * warps_n > shape.strips:
            continue
        small = tokens * strips * warps_n <= 64 * 8
        room = machine.arch.shared_per_block_bytes // _mma_stage_bytes(tokens, strips * warps_n, shape.bits)
        stages = min(room, _MMA_STAGES * 3 // 2 if small else _MMA_STAGES)
        blocks = -(-shape.m // tokens) * -(-shape.strips // (strips * warps_n))
        for splits in (1, 2, 3, 4, 8):
            if splits == 1 or (splits <= shape.steps(64) and blocks * splits <= 2 * machine.sm_count):
                tiles.append(MmaTile(tokens, strips, warps_n, warps_m, stages, splits))
    return tiles


def _mma_stage_bytes(tokens: int, strips: int, bits: int) -> int:
    """Shared memory of a stage, with the largest scales: groups of 16 with zeros."""
    return 128 * tokens + strips * (128 * bits + 256)


def mma_candidate(tile: MmaTile, shape: GemmShape, machine: Machine) -> GemmCandidate:
    """A tile of the large-M GEMM of sm_80 with its reasons and its modelled time."""
    return GemmCandidate(tile, _too_few_stages(tile.stages, 2, shape), _mma_cost(tile, shape, machine))


def _mma_cost(tile: MmaTile, shape: GemmShape, machine: Machine) -> float:
    """Launch, then waves of tiles at their fraction of the rate of mma.sync, or weights at memory bandwidth; for splits the
    reduction through L2."""
    of_rows = -(-shape.strips // (tile.strips * tile.warps_n))
    waves = -(-(-(-shape.m // tile.tokens) * of_rows * tile.splits) // machine.sm_count)
    share = _MMA_SHARES[tile.tokens, tile.strips, tile.warps_n, tile.warps_m]
    stage_us = 2 * tile.rows * tile.tokens * 64 / (share * machine.peak_mma_fp16 / machine.sm_count) * 1e6
    main_us = waves * (-(-shape.steps(64) // tile.splits) * stage_us + 2.0)
    meet_us = waves * (1.5 + tile.tokens * tile.rows * 4.5e-5 * tile.splits) if tile.splits > 1 else 0.0
    memory_us = 1.11 * shape.n * shape.k * shape.bits / 8 / machine.read_bytes * 1e6
    return 1.5 + max(main_us, memory_us) + meet_us


# ---- measured exceptions, where the model is wrong by more than 3 %: rows printed by `python -m benchmarks tiles`

MEASURED: tuple[Measured, ...] = (
    Measured(
        "H200", "2026-11-21", GemmShape(m=16, n=6144, k=4096, bits=4),
        RingTile(tokens=16, strips=6, rounds=1, warps_n=1, warps_k=8, splits=2), 7.8, 8.4,
    ),
    Measured(
        "H200", "2026-11-21", GemmShape(m=128, n=6144, k=4096, bits=4),
        WgmmaTile(tokens=128, warpgroups=2, stages=8, splits=2, token_group=2), 18.3, 19.0,
    ),
    Measured(
        "H200", "2026-11-21", GemmShape(m=1, n=4096, k=4096, bits=4),
        RingTile(tokens=8, strips=2, rounds=4, warps_n=1, warps_k=8, splits=1), 4.5, 4.9,
    ),
    Measured(
        "H200", "2026-11-21", GemmShape(m=256, n=4096, k=4096, bits=4),
        WgmmaTile(tokens=128, warpgroups=2, stages=8, splits=2, token_group=2), 18.4, 19.1,
    ),
    Measured(
        "H200", "2026-11-21", GemmShape(m=1, n=4096, k=14336, bits=4),
        RingTile(tokens=8, strips=2, rounds=2, warps_n=1, warps_k=8, splits=1), 11.8, 12.8,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=1, n=4096, k=4096, bits=6),
        RingTile(tokens=8, strips=2, rounds=1, warps_n=1, warps_k=16, splits=1), 4.9, 5.7,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=4, n=15360, k=5120, bits=6),
        RingTile(tokens=8, strips=2, rounds=2, warps_n=2, warps_k=4, splits=1), 16.9, 20.7,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=16, n=5120, k=13824, bits=6),
        WgmmaTile(tokens=16, warpgroups=2, stages=8, splits=3, token_group=2), 18.7, 21.3,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=16, n=5120, k=13824, bits=8),
        WgmmaTile(tokens=16, warpgroups=2, stages=8, splits=3, token_group=2), 21.2, 22.1,
    ),
    Measured(
        "H200", "2026-11-23", GemmShape(m=16, n=5120, k=1280, bits=8),
        WgmmaTile(tokens=16, warpgroups=4, stages=8, splits=4, token_group=2), 5.6, 5.9,
    ),
)  # fmt: skip
