"""Choice of tile for a product of experts: the rows per tile in the list of tiles, then candidates, reasons against them, cost
model.

Pure functions of a shape and a machine, like choose/gemm.py. The number of rows of each expert is known only on the GPU. The
costs assume that tokens choose experts independently and uniformly; the number of experts that are read is then largest. Costs
of the kernels for many rows use constants of the dense products (docs/log/matrix-products.md, 2026-11-28).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.candidate import Candidate, first_feasible, ordered
from lowbit.kernels.choose.tiles import INVARIANT_WARPS, MmaTile, RingTile, WgmmaTile

FEW_ROWS = (8, 16)
"""Rows per tile of the kernel for few rows per expert."""

MANY_ROWS = (64, 128)
"""Rows per tile of the kernels for many rows per expert."""

LAUNCH_US = 1.2
"""Time to start and end a launch, and for a block's first loads: list of tiles, slots, x."""


@dataclass(frozen=True)
class ExpertShape:
    """Shape of y [slots, n], the product of x and `experts` weights [n, k] with codes of `bits` bits; slots = tokens * top_k.

    x has a row for each token, or with `per_slot` for each slot. `tile_rows`: the largest number of rows of a tile of the list.
    """

    tokens: int
    top_k: int
    experts: int
    n: int
    k: int
    bits: int
    tile_rows: int
    per_slot: bool = False

    @property
    def slots(self) -> int:
        """Number of rows of y."""
        return self.tokens * self.top_k

    @property
    def row_blocks(self) -> int:
        """Number of m16 row blocks of an expert's weight."""
        return -(-self.n // 16)

    def steps(self, size: int) -> int:
        """Number of k blocks of `size` that cover K."""
        return -(-self.k // size)

    @property
    def most_tiles(self) -> int:
        """Upper limit of the number of tiles, for any choice of experts."""
        return min(self.slots, self.experts) + self.slots // self.tile_rows


def experts_hit(tokens: int, top_k: int, experts: int) -> float:
    """Expected number of experts chosen by at least one token, if each token chooses top_k different experts independently and
    uniformly."""
    return experts * (1 - (1 - min(top_k / experts, 1.0)) ** tokens)


@functools.lru_cache(maxsize=4096)
def tiles_expected(tokens: int, top_k: int, experts: int, tile_rows: int) -> tuple[float, float]:
    """Mean and approximate standard deviation of the number of tiles, if tokens choose independently and uniformly. The number
    of rows of an expert is then binomial. The total number of rows is fixed, so the part of the variance that a linear
    regression on the number of rows explains is subtracted."""
    p = min(top_k / experts, 1.0)
    if p == 1.0 or tokens == 1:
        return (min(top_k, experts) * -(-tokens // tile_rows)) * 1.0, 0.0
    mean = square = product = 0.0
    for rows in range(1, tokens + 1):
        chosen = math.lgamma(tokens + 1) - math.lgamma(rows + 1) - math.lgamma(tokens - rows + 1)
        chance = math.exp(chosen + rows * math.log(p) + (tokens - rows) * math.log1p(-p))
        mean += chance * -(-rows // tile_rows)
        square += chance * (-(-rows // tile_rows)) ** 2
        product += chance * -(-rows // tile_rows) * rows
    shared = (product - mean * tokens * p) ** 2 / (tokens * p * (1 - p))
    return experts * mean, math.sqrt(max(experts * (square - mean * mean - shared), 0.0))


def tile_rows_for(tokens: int, top_k: int, experts: int, bits: int, batch_invariant: bool = False) -> int:
    """Rows per tile in the list of tiles, for a number of tokens and codes of `bits` bits. It is 8 or 16 where experts have few
    rows in the mean, and for batch-invariant sums; else 64 or 128.

    The weights of an expert with more rows than a tile are read several times, after the first time from L2. Missing rows of a
    tile cost only tensor-core time.
    """
    each = tokens * top_k / max(experts_hit(tokens, top_k, experts), 1.0)
    # Mean numbers of rows per expert up to which 8 and 16 rows per tile are used. There the modelled times of four models'
    # layers cross on an H200 (2026-11-28). Codes of more than 4 bits were not measured.
    few, some = (6.0, 24.0) if bits <= 4 else (9.0, 10.0)
    for rows, most in ((8, few), (16, math.inf if batch_invariant else some), (64, 56.0)):
        if each <= most:
            return rows
    return MANY_ROWS[-1]


ExpertTile = RingTile | MmaTile | WgmmaTile


class ExpertCandidate(Candidate[ExpertTile]):
    """A tile with its reasons and its modelled time."""


def candidates(shape: ExpertShape, machine: Machine, *, batch_invariant: bool = False) -> list[ExpertCandidate]:
    """All candidates for a shape, feasible ones first, then by cost.

    With `batch_invariant` only tiles whose order of summation depends on nothing but K, so that row i of y has the same bits in
    any batch. Raises ValueError for rows per tile that no kernel has.
    """
    rows = FEW_ROWS if batch_invariant else (*FEW_ROWS, *MANY_ROWS)
    if shape.tile_rows not in rows:
        kind = "batch-invariant products of experts have" if batch_invariant else "products of experts have"
        raise ValueError(f"{kind} tiles of {', '.join(map(str, rows))} rows, the routing has tiles of {shape.tile_rows}")
    if shape.tile_rows in FEW_ROWS:
        rings = [ring_candidate(tile, shape, machine) for tile in ring_tiles(shape)]
        return ordered([row for row in rings if not batch_invariant or row.tile.warps_k == INVARIANT_WARPS])  # type: ignore[union-attr]
    large = [mma_candidate(tile, shape, machine) for tile in mma_tiles(shape, machine)]
    if "wgmma" in machine.arch.features:
        large += [wgmma_candidate(tile, shape, machine) for tile in wgmma_tiles(shape)]
    if not large:
        raise ValueError(f"products of experts with tiles of {shape.tile_rows} rows have 64 channels or more, got {shape.n}")
    return ordered(large)


@functools.lru_cache(maxsize=4096)
def choose(shape: ExpertShape, machine: Machine, batch_invariant: bool = False) -> ExpertTile:
    """The first feasible candidate; raises ValueError with the reasons against each when there is none."""
    return first_feasible(candidates(shape, machine, batch_invariant=batch_invariant), shape, machine)


# ---- few rows per expert


def most_slots(rows: int, bits: int, row_blocks: int) -> int:
    """Limit of slots in a warp's ring, by rows per tile, bits of a code and m16 row blocks; 0 where there are too many row
    blocks. With more slots some formats with zeros or groups of 16 take more than 255 registers (Triton 3.6 and 3.9).

    With 16 rows per tile, 6 and 8 row blocks take 255 registers and spill a few once per task, not in the main loop. They are
    still faster, since more row blocks share the copies of x: at 64 tokens the products of Mixtral-8x7B take 0.86 of their time
    with 4 row blocks (H200, 2026-11-28).
    """
    if rows == FEW_ROWS[0]:
        return (4 if bits == 7 else 12) if row_blocks <= 8 else 0
    if row_blocks > 4:
        return row_blocks if row_blocks in (6, 8) and bits <= 4 else 0
    return 4 if bits > 4 or row_blocks == 4 else 8 if row_blocks < 3 else 6


def ring_tiles(shape: ExpertShape) -> list[RingTile]:
    """Candidate tiles of kernels/sm80/expert_small_m_gemm.py: every way in which 8 warps share row blocks and K."""
    steps, tiles = shape.steps(128), []
    # With 16 rows per tile and 8 x 1 warps, a thread would finish up to 32 sums. Its registers do not hold these together with
    # the zeros of groups of 16.
    for warps_n, warps_k in ((1, 8), (2, 4), (4, 2), (8, 1))[: 3 if shape.tile_rows == 16 else 4]:
        for row_blocks in range(1, 9):
            for rounds in (1, 2, 4):
                most = most_slots(shape.tile_rows, shape.bits, row_blocks)
                fits = row_blocks * warps_n <= shape.row_blocks and row_blocks * rounds <= most
                if fits and (rounds == 1 or (rounds - 1) * warps_k < steps):
                    tiles.append(RingTile(shape.tile_rows, row_blocks, rounds, warps_n, warps_k, 1))
    return tiles


def ring_bytes(tile: RingTile, shape: ExpertShape) -> int:
    """Bytes of shared memory of a block: the rings, then the sums of all warps. Assumes the largest scales, those of groups of
    16 with zeros."""
    warps = tile.warps_n * tile.warps_k
    ring = tile.depth * (256 * shape.bits + 512) + 256 * tile.tokens * tile.rounds
    return warps * (ring + 64 * tile.row_blocks * tile.tokens)


def expert_blocks(shape: ExpertShape, tile: RingTile, machine: Machine) -> int:
    """Number of blocks of a launch: as many as run at once, at most one per task."""
    most = shape.most_tiles * -(-shape.row_blocks // tile.tile_row_blocks)
    return max(1, min(most, machine.sm_count * max(tile.blocks_per_sm, 1)))


def ring_candidate(tile: RingTile, shape: ExpertShape, machine: Machine) -> ExpertCandidate:
    """A tile of the kernel for few rows with its reasons and its modelled time."""
    reasons = []
    if (needed := ring_bytes(tile, shape)) > machine.arch.shared_per_block_bytes:
        reasons.append(f"needs {needed:,} bytes of shared memory, a block has {machine.arch.shared_per_block_bytes:,}")
    return ExpertCandidate(tile, tuple(reasons), _ring_cost(tile, shape, machine))


_START_US = 2.8
"""Time of a launch besides its tasks: list of tiles, slots and x, then the first copies."""
_STEP_US, _WIDE_STEP_US = 0.0208, 0.032
"""SM time for one row block of one k block and 8 tokens, at 8 warps per SM: for codes of up to 4 bits, and for codes of more
bits. The second one is not measured."""
_SIXTEEN = (1.16, 4.64)
"""With 16 tokens, a row block takes longer by the first number plus the second number divided by the row blocks of a warp: each
warp copies x for itself."""
_TASK_US, _SLICE_US = 0.45, 0.004
"""Time of a task in addition to its copies: for two barriers and the stores, and additionally for each slice of K."""
_BUSY_SMS = 7
"""1 / 7 of the SMs can use the whole memory bandwidth, unless their instructions take longer."""
_IN_FLIGHT = 57344
"""Bytes in flight per SM that are assumed to saturate memory bandwidth in a model's step. At 16 tokens the down product of
Mixtral-8x7B took 103 us with the tile chosen for 32 KiB, and 61 us with the tile chosen for 56 KiB (H200, 2026-11-28). The
other constants were fitted with 32 KiB, to times of products alone. Modelled times of the chosen tiles differ little (3 %)."""
_TAIL = 0.126
"""Share of a task's copies that the slowest block finishes after the others."""
_DEVIATIONS = (-2.0, -1.2, -0.4, 0.4, 1.2, 2.0)
"""Numbers of tiles for which a cost is computed, in standard deviations from the mean."""


def _ring_cost(tile: RingTile, shape: ExpertShape, machine: Machine) -> float:
    """The start, then the time of the busiest block. This is about the longer of two times: its bytes at its share of the
    bandwidth, and its instructions.

    The number of tiles varies from call to call, so the cost is a mean over numbers of tiles, weighted as in a normal
    distribution. The mean number alone would not do: if that many tasks just fit the SMs, every second call has too many and is
    slow. The constants are fitted to 296 times of 23 products of four models' layers, 1 to 64 tokens (Qwen3-30B-A3B: to 256;
    H200, 2026-11-28), with 8 % of error. The chosen tile was 2 % slower than the best one in the mean, 11 % at most.
    """
    mean, deviation = tiles_expected(shape.tokens, shape.top_k, shape.experts, shape.tile_rows)
    row_bytes = 2 * shape.k * shape.bits + (shape.k // 4 if shape.bits <= 4 else 0)  # 16 rows, with scales of groups of 128
    x = tile.warps_n * shape.slots / mean * shape.k * 2
    task_bytes = tile.tile_row_blocks * row_bytes + 0.43 * x
    iterations = -(-shape.steps(128) // (tile.warps_k * tile.rounds))
    step_us = _WIDE_STEP_US if shape.bits > 4 else _STEP_US
    if tile.tokens > FEW_ROWS[0]:
        step_us *= _SIXTEEN[0] + _SIXTEEN[1] / tile.row_blocks
    decode_us = iterations * tile.depth * tile.warps_n * tile.warps_k * step_us
    in_flight = min(1.0, tile.warps_n * tile.warps_k * tile.depth * 256 * shape.bits / _IN_FLIGHT)
    total = weights = 0.0
    for z in _DEVIATIONS:
        tiles = min(max(mean + z * deviation, 1.0), shape.most_tiles)
        tasks = tiles * -(-shape.row_blocks // tile.tile_row_blocks)
        busiest = math.ceil(tasks / expert_blocks(shape, tile, machine))
        share = machine.read_bytes / max(min(tasks, machine.sm_count), machine.sm_count / _BUSY_SMS) * in_flight
        memory_us = busiest * task_bytes / share * 1e6
        us = (memory_us**4 + (busiest * decode_us) ** 4) ** 0.25 + busiest * (_TASK_US + _SLICE_US * tile.warps_k)
        weight = math.exp(-z * z / 2)
        total, weights = total + weight * us, weights + weight
    return _START_US + total / weights + _TAIL * task_bytes / machine.read_bytes * machine.sm_count * 1e6


# ---- many rows per expert


_MMA_SHARES = {
    # (tokens, row blocks, warps_n, warps_m): fraction of the rate of mma.sync in the main loop.
    (128, 2, 8, 1): 0.674,
    (64, 2, 8, 1): 0.599,
    (128, 2, 4, 2): 0.573,
    (64, 2, 4, 2): 0.5,
    (64, 1, 4, 2): 0.452,
    (128, 1, 4, 2): 0.489,
}
_MMA_TILE_US = 3.5
"""Time of a tile besides its main loop. The constants are fitted to 30 times of 10 products (H200, 2026-11-28, w4a16_g128)."""


def mma_tiles(shape: ExpertShape, machine: Machine) -> list[MmaTile]:
    """Candidate tiles of kernels/sm80/expert_large_m_gemm.py."""
    tiles = []
    for tokens, row_blocks, warps_n, warps_m in _MMA_SHARES:
        if tokens == shape.tile_rows and row_blocks * warps_n <= shape.row_blocks:
            stage = 128 * tokens + row_blocks * warps_n * (128 * shape.bits + 256)
            tiles.append(
                MmaTile(tokens, row_blocks, warps_n, warps_m, min(4, machine.arch.shared_per_block_bytes // stage), 1)
            )  # fmt: skip
    return tiles


def mma_candidate(tile: MmaTile, shape: ExpertShape, machine: Machine) -> ExpertCandidate:
    """A tile of the kernel for many rows with its reasons and its modelled time."""
    reasons = () if tile.stages >= 2 else (f"{shape.bits}-bit tiles leave room for {tile.stages} stages, 2 are needed",)
    return ExpertCandidate(tile, reasons, _mma_cost(tile, shape, machine))


def _mma_cost(tile: MmaTile, shape: ExpertShape, machine: Machine) -> float:
    """The launch, then the longer of two times: waves of tiles at their fraction of mma.sync's rate, or weights at memory
    bandwidth."""
    tiles, _ = tiles_expected(shape.tokens, shape.top_k, shape.experts, tile.tokens)
    blocks = tiles * -(-shape.row_blocks // (tile.rows // 16))
    waves = math.ceil(blocks / machine.sm_count)
    share = _MMA_SHARES[tile.tokens, tile.row_blocks, tile.warps_n, tile.warps_m]
    stage_us = 2 * tile.rows * tile.tokens * 64 / (share * machine.peak_mma_fp16 / machine.sm_count) * 1e6
    hit = experts_hit(shape.tokens, shape.top_k, shape.experts)
    memory_us = 1.11 * hit * shape.n * shape.k * shape.bits / 8 / machine.read_bytes * 1e6
    return LAUNCH_US + max(waves * (shape.steps(64) * stage_us + _MMA_TILE_US), memory_us)


_WGMMA_CYCLES = {(128, 2): (691, 630), (64, 2): (522, 435)}
"""(tokens, warpgroups): cycles for 64 columns of K of a tile in the dense product (choose/large_m.py): codes of up to 4 bits,
then of more."""
_SM_MHZ, _WGMMA_TILE_US = 1590, 2.0
"""An effective clock, lower than the real one since it includes stalls, and the time of a tile besides its main loop. Fitted to
10 times of 10 products with 5 % of error (H200, 2026-11-28, int4 in groups of 128)."""


def wgmma_tiles(shape: ExpertShape) -> list[WgmmaTile]:
    """Candidate tiles of kernels/sm90/expert_large_m_gemm.py; 4 KiB of shared memory are left to transpose y."""
    tiles = []
    for tokens, warpgroups in _WGMMA_CYCLES:
        if tokens == shape.tile_rows and 4 * warpgroups <= shape.row_blocks:
            stages = min(8, 222_000 // (512 * warpgroups * shape.bits + 128 * tokens) // 2 * 2)
            tiles.append(WgmmaTile(tokens, warpgroups, stages, 1, 1))
    return tiles


def wgmma_candidate(tile: WgmmaTile, shape: ExpertShape, machine: Machine) -> ExpertCandidate:
    """A tile of the wgmma kernel for many rows with its reasons and its modelled time."""
    few = (f"{shape.bits}-bit tiles leave room for {tile.stages} stages, 4 are needed",)
    return ExpertCandidate(tile, () if tile.stages >= 4 else few, _wgmma_cost(tile, shape, machine))


def _wgmma_cost(tile: WgmmaTile, shape: ExpertShape, machine: Machine) -> float:
    """Two launches (the first one copies x into the order of slots), then the longer of two times: waves of tiles, or weights
    at memory bandwidth."""
    tiles, _ = tiles_expected(shape.tokens, shape.top_k, shape.experts, tile.tokens)
    waves = math.ceil(tiles * -(-shape.row_blocks // (tile.rows // 16)) / machine.sm_count)
    stage_us = _WGMMA_CYCLES[tile.tokens, tile.warpgroups][shape.bits > 4] / _SM_MHZ
    hit = experts_hit(shape.tokens, shape.top_k, shape.experts)
    memory_us = 1.11 * hit * shape.n * shape.k * shape.bits / 8 / machine.read_bytes * 1e6
    copy_us = 4 * shape.slots * shape.k / machine.read_bytes * 1e6
    return 2 * LAUNCH_US + copy_us + max(waves * (2 * shape.steps(128) * stage_us + _WGMMA_TILE_US), memory_us)
