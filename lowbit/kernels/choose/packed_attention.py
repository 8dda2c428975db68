"""Choice of the splits and of the limit of registers of decode attention over packed pages: candidates, cost model. Without
Triton.

A program has 4 warps and reads a split of one row and kv head, page by page; a kv head with more than 8 query heads has several
programs. The cases that a cost averages over are those of choose/attention.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from lowbit.formats.kv import KVScheme
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.attention import (
    COMMON,
    INVARIANT_ROWS,
    PAGE,
    PARTS,
    AttentionShape,
    DecodeTile,
    attention_refusals,
)
from lowbit.kernels.choose.candidate import Candidate, first_feasible, ordered
from lowbit.pack.kv_pages import kv_refusals, padded_head, page_bytes

HEADS = 8
"""Largest number of query heads of a program."""

WARPS = 4

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

CHUNKS = (128, 256, 512, 1024)
"""Smallest numbers of tokens of a split, whole pages."""


def register_words(shape: AttentionShape, kv: KVScheme) -> int:
    """Number of registers of a thread that hold 32 tokens' codes, q and sums."""
    head = padded_head(shape.head_dim)
    return head * (kv.k.bits + kv.v.bits) // 32 + head // 4 + head // 8


def register_limits(shape: AttentionShape, kv: KVScheme) -> tuple[int, ...]:
    """Limits of registers per thread to choose from; 0: no limit. With 128, 168 and 255 registers 4, 3 and 2 programs share an
    SM.

    Up to 60 `register_words` ptxas takes 96 to 128 registers without a limit (Triton 3.9), so 4 programs fit; with a limit some
    spill. int4 with heads of 128 elements has 80 words and a choice. With 128 registers 4 programs fit, but with Triton 3.6 the
    main loop has 8 spill instructions of 474; with 168 it has none of 454. Which one is faster depends on the waves of programs
    (H200, 2026-11-28, Triton 3.6, us): 16 rows of 8192 tokens 43 with 128 registers and 40.5 with 168; 64 rows of 1024
    tokens 22.7 and 32.6, since their 512 programs fit the GPU with 128 registers only. Elsewhere the smaller limit spills more.
    """
    words = register_words(shape, kv)
    return (0,) if words <= 60 else (128, 168) if words <= 80 else (168,) if words <= 120 else (255,)


EARLY_KEYS_REGISTERS = 168
"""Limits of registers from which on the next keys are loaded before the softmax, while values are multiplied after it. Left to
itself, ptxas moves these loads to the last third of the main loop (Triton 3.6: instruction 313 of 474 for int4, 573 of 756 for
fp8), so that keys have less time to arrive. With 128 registers the earlier loads spill 9 registers. On one H200, 2026-11-29
(benchmarks/results/h200/2026-11-29-attention.json), heads of 128, us early / late: int4 16 x 8,192 39.8 / 40.7, 16 x 32,768
137.4 / 144.8; fp8 64 x 1,024 42.7 / 43.4; int8 1 x 1,024 5.02 / 4.87. Not timed with 255 registers (heads of 256)."""


@dataclass(frozen=True)
class PackedTile(DecodeTile):
    """Configuration of sm80/packed_attention.py. `registers` is the limit per thread; 0: none. `tight`: a larger limit would
    avoid spills. `early_keys`: the next keys are loaded before the softmax."""

    registers: int = 0
    tight: bool = False
    early_keys: bool = False

    @property
    def resident(self) -> int:
        """Number of programs that share an SM."""
        return 65536 // (32 * self.warps * (-(-(self.registers or 128) // 8) * 8))

    def __str__(self) -> str:
        registers = f"at most {self.registers}" if self.registers else "any number of"
        return f"{super().__str__()}, {registers} registers{', early keys' if self.early_keys else ''}"


PackedCandidate = Candidate[PackedTile]


def candidates_packed(
    rows: int, shape: AttentionShape, kv: KVScheme, longest: int, machine: Machine, *, batch_invariant: bool = False
) -> list[PackedCandidate]:
    """All candidates for `rows` rows and contexts up to `longest` tokens by cost, infeasible ones last.

    The cost is the geometric mean of the modelled microseconds of the cases. With `batch_invariant` it is computed for
    INVARIANT_ROWS rows, so that a row is split in the same way in every batch.
    """
    rows = INVARIANT_ROWS if batch_invariant else rows
    contexts = [*(min(size, longest) for size in COMMON), *(int(part * longest) for part in PARTS)]
    reasons = (*attention_refusals(shape), *kv_refusals(kv, shape.head_dim))
    found = []
    for tile in _tiles(shape, kv, longest):
        pairs = [*((size, size) for size in contexts), *([(contexts[-2], longest)] if rows > 1 else [])]
        costs = [packed_us(tile, rows, shape, kv, *pair, machine) for pair in pairs]
        found.append(PackedCandidate(tile, reasons, math.prod(costs) ** (1 / len(costs))))
    return ordered(found)


@functools.lru_cache(maxsize=4096)
def choose_packed(
    rows: int, shape: AttentionShape, kv: KVScheme, longest: int, machine: Machine, batch_invariant: bool = False
) -> PackedTile:
    """The first feasible candidate; raises ValueError with the reasons against each when there is none."""
    found = candidates_packed(rows, shape, kv, longest, machine, batch_invariant=batch_invariant)
    return first_feasible(found, shape, machine)


def _tiles(shape: AttentionShape, kv: KVScheme, longest: int) -> list[PackedTile]:
    splits = [(1, PAGE)] + [
        (splits, chunk)
        for chunk in CHUNKS
        for fewer, splits in itertools.pairwise(SPLITS)
        if fewer * chunk < longest  # with `fewer` splits, splits can still be longer than `chunk`
    ]
    limits = register_limits(shape, kv)
    return [packed_tile(*each, limits, registers) for registers in limits for each in splits]


def packed_tile(splits: int, chunk: int, limits: tuple[int, ...], registers: int) -> PackedTile:
    """Returns the tile with one of a shape's `register_limits`."""
    tight, early_keys = registers < max(limits), registers >= EARLY_KEYS_REGISTERS
    return PackedTile(splits, chunk, PAGE, WARPS, registers=registers, tight=tight, early_keys=early_keys)


START_US = 3.4
"""Fixed time of a launch: start, the dependent loads (row, position, page, keys), RoPE, rotation and rounding of q and of the
new token, the sum over warps and the store."""
TURN_US = (1.1, 0.4)
"""Latency of a page: for a program that is alone on the GPU, and what is added where every SM has a program."""
TIGHT_US = 0.6
"""What the smaller of two limits of registers adds to the latency of a page where every SM has a program."""
WAVE_US = 1.0
"""Additional time of each wave of programs after the first."""
MEET_US = (0.8, 0.03)
"""Reduction of a row's splits: time of the counter, and of every 4 splits that `combine` reads."""
# The constants are fitted by hand to 15 timings of fp8 (H200, 2026-11-28, 32 heads over 8 kv heads of 128, 1 to 64 rows of 1024
# to 32768 tokens, Triton 3.6, `python -m benchmarks.tuning.attention --kv fp8`). Of these, 14 are within 7 %; two splits of 64
# rows of 1024 tokens are 13 % off. TIGHT_US is fitted to six timings of int4 with 128 registers, of which five are within 4 %,
# and 1 row of 131072 tokens is 7 % off; the only timing with 168 registers, 16 rows of 8192 tokens, is 5 % below the model.


def packed_us(
    tile: PackedTile, rows: int, shape: AttentionShape, kv: KVScheme, context: int, longest: int, machine: Machine
) -> float:  # fmt: skip
    """Modelled time of one launch for `rows` rows of `context` tokens each, one of which has `longest` instead.

    Programs run in waves of as many as fit the GPU. A page takes the time in which memory reads one page for each program of
    the wave, or the latency of its loads, whichever is more.
    """
    tokens, most = (min(size, shape.window) if shape.window else size for size in (context, longest))
    active, groups = tile.active(tokens), -(-shape.group // HEADS)
    programs, places = rows * shape.kv_heads * groups * active, machine.sm_count * tile.resident
    pages, most_pages = (-(-size // (tile.active(size) * PAGE)) for size in (tokens, most))
    waves = [places] * (programs // places) + ([programs % places] if programs % places else [])
    busy_us = sum(pages * page_us(count, shape, kv, machine, tile.tight) for count in waves)
    alone = shape.kv_heads * groups * tile.active(most)
    alone_us = max(0, most_pages - pages) * page_us(alone, shape, kv, machine, tile.tight)
    meet_us = 0.0 if tile.active(most) == 1 else MEET_US[0] + MEET_US[1] * -(-tile.active(most) // 4)
    return START_US + busy_us + alone_us + WAVE_US * (len(waves) - 1) + meet_us


def page_us(programs: int, shape: AttentionShape, kv: KVScheme, machine: Machine, tight: bool) -> float:
    """Modelled time in which `programs` programs that run at once process one page each."""
    groups = -(-shape.group // HEADS)  # programs of the same kv head and row read the same pages, all but one from L2
    memory_us = 1e6 * programs / groups * token_bytes(shape, kv) / shape.kv_heads * PAGE / machine.read_bytes
    latency_us = TURN_US[0] + (TURN_US[1] + TIGHT_US * tight) * min(1.0, programs / machine.sm_count)
    return math.hypot(memory_us**2, latency_us**2) ** 0.5


def token_bytes(shape: AttentionShape, kv: KVScheme) -> float:
    """Bytes of the keys, values and scales of a token."""
    return page_bytes(kv, shape.kv_heads, shape.head_dim, torch.float16) / PAGE
