"""The large-M GEMMs of sm_90 and sm_80: candidate tiles, reasons against them, modelled time.

Costs are modelled microseconds and only have to order the candidates. Their constants were fitted to weights of the "tuned"
half (benchmarks/grid.py) in benchmarks/results/h200/2026-11-23-choice.json, 2026-11-23-choice-middle.json and
2026-11-24-choice.json (H200, Triton 3.6, torch 2.11; docs/log).
"""

from __future__ import annotations

from dataclasses import replace

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.tiles import GemmCandidate, GemmShape, MmaTile, WgmmaTile

# ---- the large-M GEMM of sm_90


def wgmma_tiles(shape: GemmShape, y_tiles: float = 1, *, in_chain: bool = False) -> list[WgmmaTile]:
    """Candidate tiles of the large-M GEMM of sm_90. Besides the stages, shared memory holds `y_tiles` tiles of y: half a tile
    with a gate, two tiles with a residual (y and h). With `in_chain` it also holds sums of squares (parts/large_m_epilogue.py).
    """
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
"""Number of tokens of the smallest stream-K tile. Smaller tiles use split-K; stream-K was not measured for them."""
INVARIANT_PARTS = 8
"""Limit of the number of ranges that batch-invariant sums divide K into."""


def invariant_tiles(shape: GemmShape, machine: Machine) -> list[WgmmaTile]:
    """Batch-invariant tiles. All divide K into the same ranges. The number of ranges is chosen so that split-K fills the GPU at
    small M. At large M one block sums the ranges one after the other (`sections`)."""
    parts = max(1, min(INVARIANT_PARTS, machine.sm_count // -(-shape.n // 128), shape.steps(128) // 4))
    plain = [tile for tile in wgmma_tiles(shape) if tile.splits == 1]
    if parts == 1:
        return plain
    few = [replace(tile, splits=parts) for tile in plain]
    return few + [replace(tile, sections=parts) for tile in plain if tile.tokens <= SECTION_TOKENS[tile.warpgroups]]


SECTION_TOKENS = {2: 128, 4: 32}
"""By number of warpgroups, the tokens of the largest tile with sections. Its registers must hold two sets of sums, those of a
section and the total. With 4 warpgroups 64 tokens spill 24 bytes (Triton 3.6)."""


_STAGE_CYCLES = {
    # (tokens, warpgroups): cycles for 64 columns of K of a tile. The first number is for codes of up to 4 bits, fitted to int4,
    # mostly with group scales; the second for codes of more bits, mostly without. Fitted to times of whole kernels, like the
    # constants below (see the module docstring).
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
"""TMA cycles for each token that is missing in a tile, per 64 columns of K. A partly filled tile is slower than a full one: a
tile of 128 rows x 256 tokens took 506 us with M 256, 825 us with M 128 and 970 us with M 96 (N 152064, K 5120)."""


def _too_few_stages(stages: int, least: int, shape: GemmShape) -> tuple[str, ...]:
    return () if stages >= least else (f"{shape.bits}-bit tiles leave room for {stages} stages, {least} are needed",)


LEAST_STAGES = 4
"""Least number of stages of the large-M GEMM. An iteration uses two stages, and waits for its first one before it frees the two
of the previous iteration."""


def wgmma_candidate(tile: WgmmaTile, shape: GemmShape, machine: Machine) -> GemmCandidate:
    """A tile of the large-M GEMM of sm_90 with its reasons and its modelled time."""
    reasons = _too_few_stages(tile.stages, LEAST_STAGES, shape) + share_refusals(tile, shape, machine.sm_count)
    return GemmCandidate(tile, reasons, _wgmma_cost(tile, shape, machine))


def _wgmma_waves(tile: WgmmaTile, shape: GemmShape, sm_count: int) -> tuple[int, int]:
    """Number of full waves of tiles (without splits), and number of remaining tiles."""
    return divmod(-(-shape.m // tile.tokens) * -(-shape.n // tile.rows), sm_count)


LEAST_SHARE = 2
"""Least number of main-loop iterations (128 columns of K) per block for stream-K. With fewer, waiting for the other blocks
costs more than the iterations."""


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
    # A tile lacks tokens only if it is the only token tile, or the last one with stream-K. In other cases the last token tile
    # begins earlier, so that it is full.
    missing = max(tile.tokens - shape.m, 0) if tile.splits else -shape.m % tile.tokens
    copied = 8 * tile.rows * shape.bits + 128 * (tile.tokens - missing)
    stage_us = max(full, copied / _L2_BYTES_PER_CYCLE + _MISSING_CYCLES * missing) / 1755
    # Memory time of one tile's weights at the bandwidth of the whole GPU. A wave takes this times its number of tiles, since in
    # a wave that does not fill the GPU each SM gets more bandwidth.
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
"""Factor on the memory time of weights; microseconds of the stream-K reduction per KiB (256 sums) of a tile; factor on the
main-loop time of stream-K, so that it is chosen only where it is better than whole tiles by a margin.

The second constant was fitted to 12 times on an H200, 2026-11-23, int4 in groups of 128, N 5120 K 13824, N 6144 K 4096, N 4096
K 14336, M 256 and 1024. There tiles of 128 tokens took 7 to 10 us longer than waves that could be divided anywhere at no cost,
and tiles of 256 tokens 17 to 23 us. Only a part of a wave is divided now. Its reduction took 0.107 and 0.124 us per KiB
(2026-11-24)."""
_SECTION_US = 0.03
"""Microseconds of each section after the first, since the pipeline drains between sections. Measured on an H200, 2026-11-23,
int4, 4096 x 4096, 256 tokens: two waves of tiles of 128 rows x 64 tokens take 18.59 us in four sections, 18.42 us in one."""


# ---- the large-M GEMM of sm_80


_MMA_SHARES = {
    # (tokens, row blocks, warps_n, warps_m): fraction of the peak rate of mma.sync that the main loop reaches with int4, groups
    # of 128, fp16 (H200, 2026-11-23; docs/log). Codes of more bits and zero points took up to a tenth longer.
    (128, 2, 8, 1): 0.714,
    (64, 2, 8, 1): 0.711,
    (128, 2, 4, 2): 0.672,
    (64, 2, 4, 2): 0.557,
    (32, 2, 4, 2): 0.375,
    (64, 1, 4, 2): 0.313,
}
_MMA_STAGES = 4
"""Largest number of stages that was worth its shared memory. Small tiles, which stall more, have up to 6 stages."""


def mma_tiles(shape: GemmShape, machine: Machine) -> list[MmaTile]:
    """Candidate tiles of the large-M GEMM of sm_80."""
    tiles = []
    for tokens, row_blocks, warps_n, warps_m in _MMA_SHARES:
        if row_blocks * warps_n > shape.row_blocks:
            continue
        small = tokens * row_blocks * warps_n <= 64 * 8
        room = machine.arch.shared_per_block_bytes // _mma_stage_bytes(tokens, row_blocks * warps_n, shape.bits)
        stages = min(room, _MMA_STAGES * 3 // 2 if small else _MMA_STAGES)
        blocks = -(-shape.m // tokens) * -(-shape.row_blocks // (row_blocks * warps_n))
        for splits in (1, 2, 3, 4, 8):
            if splits == 1 or (splits <= shape.steps(64) and blocks * splits <= 2 * machine.sm_count):
                tiles.append(MmaTile(tokens, row_blocks, warps_n, warps_m, stages, splits))
    return tiles


def _mma_stage_bytes(tokens: int, row_blocks: int, bits: int) -> int:
    """Bytes of shared memory of a stage. Assumes the largest scales, those of groups of 16 with zeros."""
    return 128 * tokens + row_blocks * (128 * bits + 256)


def mma_candidate(tile: MmaTile, shape: GemmShape, machine: Machine) -> GemmCandidate:
    """A tile of the large-M GEMM of sm_80 with its reasons and its modelled time."""
    return GemmCandidate(tile, _too_few_stages(tile.stages, 2, shape), _mma_cost(tile, shape, machine))


def _mma_cost(tile: MmaTile, shape: GemmShape, machine: Machine) -> float:
    """The launch, then the longer of two times: waves of tiles at their fraction of the rate of mma.sync, or weights at memory
    bandwidth. With splits also the reduction through L2."""
    of_rows = -(-shape.row_blocks // (tile.row_blocks * tile.warps_n))
    waves = -(-(-(-shape.m // tile.tokens) * of_rows * tile.splits) // machine.sm_count)
    share = _MMA_SHARES[tile.tokens, tile.row_blocks, tile.warps_n, tile.warps_m]
    stage_us = 2 * tile.rows * tile.tokens * 64 / (share * machine.peak_mma_fp16 / machine.sm_count) * 1e6
    main_us = waves * (-(-shape.steps(64) // tile.splits) * stage_us + 2.0)
    meet_us = waves * (1.5 + tile.tokens * tile.rows * 4.5e-5 * tile.splits) if tile.splits > 1 else 0.0
    memory_us = 1.11 * shape.n * shape.k * shape.bits / 8 / machine.read_bytes * 1e6
    return 1.5 + max(main_us, memory_us) + meet_us
