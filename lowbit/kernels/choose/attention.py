"""Choice of tile for paged attention in a decode step: candidates, reasons against them, cost model.

Pure functions of a shape and a machine, without Triton. Contexts change from step to step, but the grid of a captured graph
does not. So a tile is chosen for a mix of cases. In most of them all rows have the same context: one of COMMON, or one of PARTS
times the longest. In the last case one row has the longest context and all others about half of it (PARTS[1]), so the programs
of the long row run on alone.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.candidate import Candidate, first_feasible, ordered
from lowbit.pack import kv_pages

PAGE = kv_pages.PAGE
"""Number of tokens per page."""

COMMON = (300, 1100)
"""Contexts in tokens that are considered common. They are not multiples of tile sizes, since real contexts rarely are."""

PARTS = (0.3, 0.55, 0.9)
"""Fractions of the longest context that the cost averages over, besides COMMON."""

INVARIANT_ROWS = 16
"""Number of rows assumed in the choice of `batch_invariant` tiles."""

GROUP_ROWS = 16
"""Rows of q in one tile of mma.sync: the query heads that share a kv head, padded to 16."""


@dataclass(frozen=True)
class AttentionShape:
    """Parameters of attention, the same for every token and layer.

    `scale` is the factor of q . k. RoPE rotates the first `rotary_dim` elements of each head of q and k, the first half of them
    with the second. `softcap`: scores s become softcap * tanh(s / softcap); 0: no softcap. `window`: a token attends to the
    last `window` tokens, itself included; 0: all. If gammas are given, heads of q and k are RMS-normed before RoPE, with
    `norm_eps`; the factor is `norm_offset` + gamma.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rotary_dim: int
    softcap: float = 0.0
    window: int = 0
    norm_eps: float = 0.0
    norm_offset: float = 0.0

    @property
    def group(self) -> int:
        """Number of query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def features(self) -> int:
        """Number of elements of one token's q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def lanes(self) -> int:
        """Number of elements of a head, padded to a power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in 16 bits."""
        return 4 * self.kv_heads * self.head_dim


def shape_refusals(shape: AttentionShape) -> tuple[str, ...]:
    """Reasons why a shape is invalid; empty if plain torch can compute it."""
    reasons = []
    if min(shape.heads, shape.kv_heads, shape.head_dim) < 1 or shape.heads % max(shape.kv_heads, 1):
        reasons.append(f"{shape.heads} heads are no multiple of {shape.kv_heads} kv heads")
    if shape.rotary_dim % 2 or not 0 <= shape.rotary_dim <= shape.head_dim:
        reasons.append(f"rotary_dim is even and at most head_dim {shape.head_dim}, got {shape.rotary_dim}")
    if shape.window < 0 or shape.softcap < 0:
        reasons.append(f"window and softcap are 0 (none) or more, got {shape.window} and {shape.softcap}")
    return tuple(reasons)


def attention_refusals(shape: AttentionShape) -> tuple[str, ...]:
    """Reasons why sm80/paged_attention.py cannot compute a shape; empty if it can."""
    reasons = list(shape_refusals(shape))
    if shape.head_dim % 8 or not 16 <= shape.head_dim <= 256:
        reasons.append(f"heads have 16 to 256 elements, a multiple of 8, got {shape.head_dim}")
    if not reasons and shape.group > GROUP_ROWS:
        reasons.append(f"at most {GROUP_ROWS} heads share a kv head, got {shape.group}")
    return tuple(reasons)


@dataclass(frozen=True)
class DecodeTile:
    """Configuration of sm80/paged_attention.py: a row's context is divided into at most `splits` splits of at least `chunk`
    tokens. A program of `warps` warps reads one split of one kv head, `block` tokens at a time. With one stage the next block
    is prefetched into registers, and the first block is loaded before the wait for the previous kernel. With more stages, that
    many blocks are in shared memory."""

    splits: int
    chunk: int
    block: int
    warps: int
    stages: int = 1

    def __post_init__(self) -> None:
        if self.chunk % self.block:
            raise ValueError(f"parts are whole blocks: {self.chunk} tokens are no multiple of {self.block}")

    def __str__(self) -> str:
        parts = f"at most {self.splits} parts of at least {self.chunk} tokens" if self.splits > 1 else "tokens not cut"
        ahead = f", {self.stages} stages" if self.stages > 1 else ""
        return f"{parts}, {self.block} tokens at a time by {self.warps} warp{'s' if self.warps > 1 else ''}{ahead}"

    def active(self, tokens: int) -> int:
        """Number of splits with work at a context of `tokens`, as the kernel computes it."""
        blocks = -(-tokens // self.block)
        parts = max(1, min(self.splits, -(-blocks * self.block // self.chunk)))
        return max(1, -(-blocks // max(1, -(-blocks // parts))))


class DecodeTask(Enum):
    """What a launch of the attention of a step computes."""

    STEP = "step"
    """One new token per slot: stores its key and value, and attends to all."""
    APPEND = "append"
    """Stores the keys and values of all rows, which may be several new tokens of a slot; computes nothing else."""
    VERIFY = "verify"
    """Attends; the keys and values of all rows are in the pages."""

    @property
    def of_rows(self) -> bool:
        """True if positions are those of rows, not of slots."""
        return self is not DecodeTask.STEP

    @property
    def appends(self) -> bool:
        """True if keys and values are stored."""
        return self is not DecodeTask.VERIFY

    @property
    def attends(self) -> bool:
        """True if attention is computed."""
        return self is not DecodeTask.APPEND


@dataclass(frozen=True)
class MeasuredDecode:
    """A measured tile. It is the tile of the fastest decode step tried (programmatic dependent launch, context 1024), or the
    fastest tile for the kernel alone. It is used where `rows` and `longest` lie between their first and last values."""

    product: str
    date: str
    rows: tuple[int, int]
    longest: tuple[int, int]
    heads: tuple[int, int, int]
    tile: DecodeTile
    note: str

    def __str__(self) -> str:
        return f"measured on {self.product}, {self.date}: {self.note}"

    def holds_for(self, rows: int, shape: AttentionShape, longest: int, machine: Machine) -> bool:
        """True if the row applies."""
        same = (self.product, self.heads) == (machine.product, (shape.heads, shape.kv_heads, shape.head_dim))
        fits = self.rows[0] <= rows <= self.rows[1] and self.longest[0] <= longest <= self.longest[1]
        return same and fits and not shape.window


@dataclass(frozen=True)
class DecodeCandidate(Candidate[DecodeTile]):
    """A candidate with the measurement that ranks it first, if there is one."""

    measured: MeasuredDecode | None = None


def candidates_decode(
    rows: int, shape: AttentionShape, longest: int, machine: Machine, *, batch_invariant: bool = False
) -> list[DecodeCandidate]:
    """All candidates for `rows` rows and contexts up to `longest` tokens: the measured one, then by cost, infeasible ones last.

    The cost is the geometric mean of the modelled microseconds of the cases in the module docstring. With `batch_invariant` it
    is computed for INVARIANT_ROWS rows, so that a row is split in the same way in every batch.
    """
    rows = INVARIANT_ROWS if batch_invariant else rows
    contexts = [*(min(size, longest) for size in COMMON), *(int(part * longest) for part in PARTS)]
    known = {} if batch_invariant else {row.tile: row for row in MEASURED if row.holds_for(rows, shape, longest, machine)}
    found = []
    for tile in dict.fromkeys([*known, *_tiles(shape, longest)]):
        pairs = [*((size, size) for size in contexts), *([(contexts[-2], longest)] if rows > 1 else [])]
        costs = [modelled_us(tile, rows, shape, *pair, machine) for pair in pairs]
        cost_us = math.prod(costs) ** (1 / len(costs))
        found.append(DecodeCandidate(tile, _reasons(tile, shape), cost_us, known.get(tile)))
    return ordered(found)


@functools.lru_cache(maxsize=4096)
def choose_decode(
    rows: int, shape: AttentionShape, longest: int, machine: Machine, batch_invariant: bool = False
) -> DecodeTile:
    """The first feasible candidate; raises ValueError with the reasons against each when there is none."""
    return first_feasible(candidates_decode(rows, shape, longest, machine, batch_invariant=batch_invariant), shape, machine)


def _tiles(shape: AttentionShape, longest: int) -> list[DecodeTile]:
    """Candidate tiles. A warp has 2048 elements each of keys and of values in flight: 64 registers a thread."""
    tiles = []
    for warps in (1, 2, 4):
        block = min(PAGE, 2048 * warps // shape.lanes)
        for chunk in (64, 128, 256, 512):
            for splits in (1, 2, 4, 8, 16, 32, 64):
                if (splits == 1 and chunk > 64) or (splits > 1 and splits * chunk >= 2 * longest):
                    continue
                tiles.append(DecodeTile(splits, max(chunk, block), block, warps))
    return list(dict.fromkeys(tiles))


def _reasons(tile: DecodeTile, shape: AttentionShape) -> tuple[str, ...]:
    reasons = list(attention_refusals(shape))
    if tile.block < 16:
        reasons.append(f"a product takes 16 tokens, not {tile.block}")
    if tile.warps > 1 and tile.block <= 16:
        reasons.append("its warps would all multiply the same 16 tokens")
    return tuple(reasons)


START_US = 2.8
"""Fixed time of a launch: start, the dependent loads (row, position, page, keys), the load of q, and the store."""
TURN_US = {1: 0.87, 2: 1.5, 4: 1.79}
"""Time of a main-loop iteration by number of warps, for a program alone on an SM: it loads and multiplies one block of keys and
values."""
CROWDED = 0.41
"""Fraction by which an iteration takes longer where all SMs are full; with fewer programs the fraction is proportional."""
READ_SHARE = {1: 1.0, 2: 1.0, 4: 1.1}
"""Time relative to a plain read of memory, by number of warps; four warps lose time to their synchronisation."""
WAVE_US = 3.5
"""Additional time of each wave of programs after the first."""
MEET_US = (0.8, 0.76)
"""Reduction of a row's splits: time of the counter, and of one iteration of `combine`."""
# The constants are fitted to 167 timings, H200, 2026-11-22, 32 heads over 8 kv heads of 128, random pages, batch 1 to 64,
# contexts 256 to 32768 (`python -m benchmarks.tuning.attention --tiles 9`). The error is 8.5 % (root mean square). The tile
# chosen for one batch and context was 3.4 % slower than the best tile in the mean. For two warps 1.55 us fitted best; 1.5 is
# used because it chooses, at batch 4, the tile with which the whole step was faster (1780 us against 1847). In these timings
# `combine` read fewer splits per iteration than it does now.


def registers(tile: DecodeTile, shape: AttentionShape) -> int:
    """Estimated registers per thread: q, sums, one block of keys and one of values, and the rest."""
    lanes = shape.lanes
    return min(255, lanes // 4 + lanes // (2 * tile.warps) + tile.block * lanes // (32 * tile.warps) + 90)


def resident(tile: DecodeTile, shape: AttentionShape) -> int:
    """Number of programs that share an SM."""
    return max(1, min(32, 65536 // (32 * tile.warps * registers(tile, shape))))


def combine_round(warps: int, shape: AttentionShape) -> int:
    """Number of splits that the last program reads at a time, a power of two. They take 128 registers per thread. Where more
    than 8 query heads share a kv head they take 64, since the program's other values need more registers."""
    group = 1 << (shape.group - 1).bit_length()
    return max(1, min(16, (4096 if group <= 8 else 2048) * warps // (group * shape.lanes)))


def modelled_us(tile: DecodeTile, rows: int, shape: AttentionShape, context: int, longest: int, machine: Machine) -> float:
    """Modelled time of one launch for `rows` rows of `context` tokens each, one of which has `longest` instead."""
    tokens, most = (min(size, shape.window) if shape.window else size for size in (context, longest))
    active = tile.active(tokens)
    programs, places = rows * shape.kv_heads * active, machine.sm_count * resident(tile, shape)
    waves = -(-programs // places)
    turns = max(waves * -(-tokens // (active * tile.block)), -(-most // (tile.active(most) * tile.block)))
    turns_us = turns * TURN_US[tile.warps] * (1 + CROWDED * min(1.0, programs / places))
    memory_us = 1e6 * READ_SHARE[tile.warps] * rows * tokens * shape.token_bytes / machine.read_bytes
    meet_us = 0.0 if active == 1 else MEET_US[0] + MEET_US[1] * -(-active // combine_round(tile.warps, shape))
    return START_US + math.hypot(memory_us**2, turns_us**2) ** 0.5 + WAVE_US * (waves - 1) + meet_us


# ---- measured decode steps; other shapes are modelled, with one stage

MEASURED: tuple[MeasuredDecode, ...] = (
    MeasuredDecode(
        "H200", "2026-11-22", (3, 8), (1025, 2048), (32, 8, 128), DecodeTile(16, 128, 64, 4, stages=2),
        "batch 4, context 1024: 9 us less in a step of 4 layers than 16 parts by 2 warps",
    ),
    MeasuredDecode(
        "H200", "2026-11-23", (12, 16), (1025, 2048), (32, 8, 128), DecodeTile(8, 64, 16, 1, stages=2),
        "batch 16, context 1024: 8 us less in a step of 4 layers than with one stage",
    ),
    MeasuredDecode(
        "H200", "2026-11-23", (48, 64), (1025, 2048), (32, 8, 128), DecodeTile(1, 64, 32, 2, stages=2),
        "batch 64, context 1024: 8 to 10 us less in a step of 4 layers than in two parts by one warp",
    ),
    MeasuredDecode(
        "H200", "2026-11-22", (1, 1), (16385, 32768), (32, 8, 128), DecodeTile(32, 64, 64, 4, stages=2),
        "batch 1, context 32,700, alone: 40.8 us, 46.9 with one stage",
    ),
)  # fmt: skip
