"""Which tile attends over a paged cache in a decode step: candidates, why some cannot, what each would cost, the choice.

Pure functions of a shape and a machine, without Triton. What a step costs depends on contexts that change from step to step
while the grid of a captured graph does not, so a tile is chosen for several: all rows at those of COMMON or at the longest a
slot can have, and the same with one row at the longest, whose last programs run alone.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.candidate import Candidate, first_that_can, ordered

PAGE = 128
"""Tokens of a page."""

COMMON = (256, 1024)
"""Tokens of contexts that are taken for common."""

INVARIANT_ROWS = 16
"""Rows for which the tile is chosen that all batches have under `batch_invariant`."""

GROUP_ROWS = 16
"""Rows of q of a tile of mma.sync: the heads that share a kv head, filled up."""


@dataclass(frozen=True)
class AttentionShape:
    """What attention computes, of every token and layer alike.

    `scale` is the factor of q . k. The first `rotary_dim` elements of each head of q and k turn, the first half of them with
    the second. `softcap`: scores s become softcap * tanh(s / softcap); 0: they do not. `window`: a token sees the last
    `window` tokens, itself included; 0: all. If gammas are given, heads of q and k are RMS-normed before they turn, with
    `norm_eps`, and a gamma counts as `norm_offset` + gamma.
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
        """Heads of q that share a head of k and v."""
        return self.heads // self.kv_heads

    @property
    def features(self) -> int:
        """Elements of a token's q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def lanes(self) -> int:
        """Elements of a head, filled up to a power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of a token in 16 bits."""
        return 4 * self.kv_heads * self.head_dim


def shape_refusals(shape: AttentionShape) -> tuple[str, ...]:
    """Why a shape is none; empty if plain torch can compute it."""
    reasons = []
    if min(shape.heads, shape.kv_heads, shape.head_dim) < 1 or shape.heads % max(shape.kv_heads, 1):
        reasons.append(f"{shape.heads} heads are no multiple of {shape.kv_heads} kv heads")
    if shape.rotary_dim % 2 or not 0 <= shape.rotary_dim <= shape.head_dim:
        reasons.append(f"rotary_dim is even and at most head_dim {shape.head_dim}, got {shape.rotary_dim}")
    if shape.window < 0 or shape.softcap < 0:
        reasons.append(f"window and softcap are 0 (none) or more, got {shape.window} and {shape.softcap}")
    return tuple(reasons)


def attention_refusals(shape: AttentionShape) -> tuple[str, ...]:
    """Why sm80/paged_attention.py cannot compute a shape; empty if it can."""
    reasons = list(shape_refusals(shape))
    if shape.head_dim % 8 or not 16 <= shape.head_dim <= 256:
        reasons.append(f"heads have 16 to 256 elements, a multiple of 8, got {shape.head_dim}")
    if not reasons and shape.group > GROUP_ROWS:
        reasons.append(f"at most {GROUP_ROWS} heads share a kv head, got {shape.group}")
    return tuple(reasons)


@dataclass(frozen=True)
class DecodeTile:
    """Configuration of sm80/paged_attention.py: the tokens of a row are cut into at most `splits` parts of at least `chunk`
    tokens; a program of `warps` warps reads one part of one kv head, `block` tokens at a time and one block ahead."""

    splits: int
    chunk: int
    block: int
    warps: int

    def __str__(self) -> str:
        parts = f"at most {self.splits} parts of at least {self.chunk} tokens" if self.splits > 1 else "tokens not cut"
        return f"{parts}, {self.block} tokens at a time by {self.warps} warp{'s' if self.warps > 1 else ''}"

    def active(self, tokens: int) -> int:
        """Parts of so many tokens that have work, as the kernel counts them."""
        blocks = -(-tokens // self.block)
        parts = max(1, min(self.splits, -(-blocks * self.block // self.chunk)))
        return max(1, -(-blocks // max(1, -(-blocks // parts))))


def candidates_decode(
    rows: int, shape: AttentionShape, longest: int, machine: Machine, *, batch_invariant: bool = False
) -> list[Candidate[DecodeTile]]:
    """Every tile considered for `rows` rows and contexts up to `longest` tokens, the cheapest first, those that cannot last.

    Costs are the geometric mean of the modelled microseconds at contexts of COMMON and at the longest. With `batch_invariant`
    they are those of INVARIANT_ROWS rows: a row is then cut in the same way in every batch.
    """
    rows = INVARIANT_ROWS if batch_invariant else rows
    contexts = [*(min(size, longest) for size in COMMON), longest]
    found = []
    for tile in _tiles(shape, longest):
        pairs = [(size, most) for size in contexts for most in ((size, longest) if rows > 1 else (size,))]
        costs = [modelled_us(tile, rows, shape, *pair, machine) for pair in pairs]
        found.append(Candidate(tile, _reasons(tile, shape), math.prod(costs) ** (1 / len(costs))))
    return ordered(found)


@functools.lru_cache(maxsize=4096)
def choose_decode(
    rows: int, shape: AttentionShape, longest: int, machine: Machine, batch_invariant: bool = False
) -> DecodeTile:
    """The cheapest of the candidates that can; raises ValueError with everybody's reasons when none can."""
    return first_that_can(candidates_decode(rows, shape, longest, machine, batch_invariant=batch_invariant), shape, machine)


def _tiles(shape: AttentionShape, longest: int) -> list[DecodeTile]:
    """A warp has 2048 elements each of the keys and values under way: 64 registers a thread."""
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


START_US = 2.6
"""Launch, the loads that need one another (row, position, page, keys), q, and the store."""
TURN_US = (0.3, 0.32)
"""A turn of the loop, in which one block of keys and values arrives and is multiplied: constant, and for each warp."""
READ_SHARE = (1.03, 0.02)
"""Time over that of the bare read where memory binds: of one warp, and for each one more, which waits for the others."""
MEET_US = (0.5, 0.4)
"""The parts of a row meet: the counter, and a round of reading what `combine` holds at a time."""
EMPTY_US = 0.7
"""A program without work: two loads that need each other."""
# Fitted to six timings of an experiment, H200, 2026-11-22, 32 heads over 8 kv heads of 128, random pages: 5.7 us at batch 1 and
# context 1024 (16 parts, 32 tokens by 2 warps), 20.6 and 125 at batch 16 and contexts 1024 and 8192 (8 parts, 16 tokens by
# 1 warp), 65.5 and 475 at batch 64 (2 parts), 16.7 at batch 1 and 8192 (its combine spilled at 32 parts, this one does not).
# Not yet measured: the share of each constant, other blocks, contexts beyond 8192. `python -m lowbit.bench.attention` does.


def registers(tile: DecodeTile, shape: AttentionShape) -> int:
    """Of a thread, about: q, sums, one block of keys and one of values, and the rest."""
    lanes = shape.lanes
    return min(255, lanes // 4 + lanes // (2 * tile.warps) + tile.block * lanes // (32 * tile.warps) + 90)


def resident(tile: DecodeTile, shape: AttentionShape) -> int:
    """Programs that share an SM."""
    return max(1, min(32, 65536 // (32 * tile.warps * registers(tile, shape))))


def combine_round(warps: int, shape: AttentionShape) -> int:
    """Parts that the program which comes last reads at a time: 64 registers a thread, a power of two."""
    group = 1 << (shape.group - 1).bit_length()
    return max(1, min(16, 2048 * warps // (group * shape.lanes)))


def modelled_us(tile: DecodeTile, rows: int, shape: AttentionShape, context: int, longest: int, machine: Machine) -> float:
    """Time of one launch for `rows` rows of `context` tokens each, one of which has `longest` instead."""
    tokens, most = (min(size, shape.window) if shape.window else size for size in (context, longest))
    active = tile.active(tokens)
    places = machine.sm_count * resident(tile, shape)
    waves = -(-rows * shape.kv_heads * active // places)
    turn_us = TURN_US[0] + TURN_US[1] * tile.warps
    turns = max(waves * -(-tokens // (active * tile.block)), -(-most // (tile.active(most) * tile.block)))
    share = READ_SHARE[0] + READ_SHARE[1] * (tile.warps - 1)
    memory_us = 1e6 * share * rows * tokens * shape.token_bytes / machine.read_bytes
    meet_us = 0.0 if active == 1 else MEET_US[0] + MEET_US[1] * -(-active // combine_round(tile.warps, shape))
    empty_us = EMPTY_US * rows * shape.kv_heads * (tile.splits - active) / places
    return START_US + max(memory_us, turns * turn_us) + meet_us + empty_us
