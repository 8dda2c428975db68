"""The small-M GEMM: candidate tiles, reasons against them, modelled time.

Costs are modelled microseconds and only have to order the candidates. Their constants were fitted to weights of the "tuned"
half (benchmarks/grid.py) in benchmarks/results/h200/2026-11-23-choice.json, 2026-11-23-choice-middle.json and
2026-11-24-choice.json (H200, Triton 3.6, torch 2.11; docs/log). The constants of tiles of 16 tokens were fitted to measurements
of 2026-11-21. Tiles of more tokens than M are candidates too, since tokens are padded.
"""

from __future__ import annotations

import math

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.tiles import DENSE_BITS, RING_TOKENS, SMALL_TOKENS, GemmCandidate, GemmShape, RingTile


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
            for row_blocks in range(1, 9):
                if row_blocks * warps_n > shape.row_blocks or (warps_k == 16 and row_blocks > 4):
                    continue
                iterations = -(-steps // (warps_k * splits))
                # 64 KiB of codes in flight on an SM hide the latency of memory; a longer ring only copies more of x.
                in_flight = max(1, round(65536 / (warps_n * warps_k * row_blocks * 256 * shape.bits)))
                rounds = max(1, min(in_flight, 8 // row_blocks, iterations if iterations <= 4 else 2))
                tiles.append(RingTile(tokens, row_blocks, rounds, warps_n, warps_k, splits))
    return tiles


def _dense_tiles(shape: GemmShape) -> list[RingTile]:
    """Candidate tiles for 16-bit weights, whose slots are 4 KiB. The rings of a block take 64 or 128 KiB; where a warp has many
    row blocks, they have fewer slots than row blocks."""
    tokens = SMALL_TOKENS if shape.m <= SMALL_TOKENS else RING_TOKENS
    steps, tiles = shape.steps(128), []
    for splits in (1,) if tokens == SMALL_TOKENS else (1, 2, 4):
        for warps_n, warps_k in ((1, 8), (2, 4), (1, 4)):
            for row_blocks in range(1, 9):
                if row_blocks * warps_n > shape.row_blocks:
                    continue
                for kib in (64, 128):
                    slots = kib // (4 * warps_n * warps_k)
                    rounds = min(max(1, slots // row_blocks), -(-steps // (warps_k * splits)))
                    fewer = max(size for size in range(1, min(slots, row_blocks) + 1) if row_blocks % size == 0)
                    if fewer == 1 < row_blocks:
                        continue
                    tiles.append(
                        RingTile(tokens, row_blocks, rounds, warps_n, warps_k, splits, slots=fewer if fewer < row_blocks else 0)
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
    """Bytes of shared memory of a block's rings, with group scales for each row block."""
    of_scales = 0 if shape.dense else 256
    x_slots = max(1, tile.depth // tile.row_blocks)
    return tile.warps_n * tile.warps_k * (tile.depth * (256 * shape.bits + of_scales) + 256 * tile.tokens * x_slots)


_RESIDENT = {
    # bits of a code: number of blocks (8 warps, 8 tokens) that fit the registers of an SM, by row blocks (Triton 3.6, sm_90).
    # With 8 bits and 2 row blocks 4 blocks would fit without group scales; with group scales they would spill two words.
    4: (4, 3, 2, 2, 2, 2, 2, 1),
    6: (4, 4, 3, 3, 3, 2, 2, 2),
    8: (4, 3, 3, 3, 2, 2, 2, 2),
    DENSE_BITS: (2, 2, 2, 2, 2, 2, 1, 1),
}


def _resident(tile: RingTile, shape: GemmShape, machine: Machine) -> int:
    """Number of blocks that share an SM, limited by shared memory and registers. Codes of up to 4 bits are assumed to have
    group scales."""
    bits = next(bits for bits in _RESIDENT if shape.bits <= bits)
    warps = tile.warps_n * tile.warps_k
    of_scales = 0 if bits == 4 else 256 * warps * tile.rounds * tile.row_blocks
    by_shared = machine.arch.shared_per_sm_bytes // (_ring_bytes(tile, shape) - of_scales + 1024)
    most = tile.blocks_per_sm or by_shared
    return max(1, min(most, by_shared, 8 * _RESIDENT[bits][tile.row_blocks - 1] // warps))


_TAIL, _SLOTS, _PAIR = 0.099, 0.092, 0.028
"""Fractions by which memory time grows. _TAIL: some SMs have fewer blocks than the busiest. _SLOTS: SMs have room for more
blocks, and those of the next kernel pile up on a few of them. _PAIR: there are two rows of warps, and several blocks share an
SM."""
_STEP_US, _WIDE_STEP_US = 0.0113, 0.0301
"""SM time for one row block of one k block: for codes of up to 4 bits with group scales, and for codes of more bits, which
usually have none."""


def _ring_cost(tile: RingTile, shape: GemmShape, machine: Machine) -> float:
    """Cost of small-M tiles of 8 tokens: launch, then the larger of memory time and instruction time.

    Memory time is that of all bytes at the bandwidth of the whole GPU, plus the fractions _TAIL, _SLOTS and _PAIR. For
    instruction time K is rounded up to whole iterations of all warps.
    """
    if tile.tokens > SMALL_TOKENS:
        return _wide_ring_cost(tile, shape, machine)
    share = -(-shape.row_blocks // tile.tile_row_blocks) * tile.splits * -(-shape.m // tile.tokens) / machine.sm_count
    busiest = math.ceil(share)
    room = _resident(tile, shape, machine)
    together = min(room, busiest)
    steps = -(-shape.steps(128) // (tile.warps_k * tile.splits * tile.rounds)) * tile.rounds * tile.row_blocks
    free = min(math.ceil(share / room) * room / share - 1, 1.5)
    uneven = _TAIL * (busiest / share - 1) + _SLOTS * free + (_PAIR if tile.warps_n == 2 and room > 1 else 0)
    weights = shape.n * shape.k * shape.bits / 8 * (1 + uneven)
    x = share * machine.sm_count * tile.warps_n * min(shape.m, tile.tokens) * shape.k / tile.splits * 2
    memory_us = (weights + 0.43 * x) / machine.read_bytes * 1e6
    warps = tile.warps_n * tile.warps_k
    decode_us = busiest * steps * warps * (_WIDE_STEP_US if shape.bits > 4 else _STEP_US)
    turns_us = math.ceil(busiest / together) * steps * 0.0094 + (busiest - together) * 1.55 / together**2
    # Where memory time and instruction time are close, the total is longer than either.
    return 0.50 + (memory_us**4 + decode_us**4) ** 0.25 + turns_us + 0.0026 * warps


def _wide_ring_cost(tile: RingTile, shape: GemmShape, machine: Machine) -> float:
    """Cost of small-M tiles of 16 tokens: launch, then the time of the busiest SM. That is about the longest of three times:
    weights at its share of memory bandwidth, weights and x from L2, and dequantization.

    Each row of warps copies all of x, since every warp has its own copy. 16 tokens of x are as many bytes as 4 row blocks of
    int4.
    """
    blocks = -(-shape.row_blocks // tile.tile_row_blocks) * tile.splits * -(-shape.m // tile.tokens)
    waves = -(-blocks // machine.sm_count)
    read = machine.read_bytes
    k = shape.k / tile.splits
    weights = tile.tile_row_blocks * 16 * k * shape.bits / 8
    x = tile.warps_n * min(shape.m, tile.tokens) * k * 2
    # A block's share of memory bandwidth; L2 delivers x and weights together at about 1.15 times that rate.
    memory_us = waves * max(weights * machine.sm_count / read, (weights + x) * machine.sm_count / (1.15 * read)) * 1e6
    steps_per_warp = -(-shape.steps(128) // (tile.warps_k * tile.splits))
    # A warp needs about 0.32 us for one k block of one row block, with two warps per scheduler.
    latency_us = waves * steps_per_warp * tile.row_blocks * 0.16
    meet_us = 2.5 if tile.splits > 1 else 0.0
    # More warps hide more latency. Each wave of blocks costs a start.
    starts_us = 0.3 + (waves - 1) * 2.2
    return 1.2 + 1.05 * max(memory_us, latency_us) + meet_us + starts_us - 0.02 * tile.warps_n * tile.warps_k
