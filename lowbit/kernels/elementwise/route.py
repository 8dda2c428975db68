"""Router of a mixture of experts: experts and weights of each token, and its slots sorted by expert. Plain Triton.

Reads   logits fp16, bf16 or fp32 [T, E], any row stride, and a bias fp32 [E] or None; or experts int32 or int64 [T, top_k] and
        weights [T, top_k] of another router
Writes  the tensors of `Routing` (ops/route.py), all of their elements
Choose  a token's logits are in one warp, which runs top_k iterations of two integer reductions: the largest key, and the lowest
        expert with that key. With groups, a thread has one expert of each group
Sort    a counting sort. Slots are counted by expert in each chunk of slots, with prefix sums over chunks and then over experts.
        The rank of a slot within its chunk is found by comparison with the slots before it. The first slot of a tile writes the
        tile's entry
Few     one launch for up to 64 tokens (1,024 slots with padding). If there are too many logits for one block, each block ranks
        its slots, and the last block to finish sorts all slots
Many    four launches: choose experts; count the slots of each chunk of 64; prefix sums of the counts; store slots at their
        positions. If experts are given (`GroupPlan`) there is no first launch
Product `route_tokens`, for up to 16 tokens, also computes the logits. A block multiplies x by 16 experts' rows of the router's
        weight over a part of K with mma.sync; it loads its first weights before the wait for the previous kernel. The last
        block adds the parts in order and routes. With `squares`, x is h * gamma * factor and not yet divided by the rms of h
        (kernels/parts/epilogue.py). The logits are then divided by it, and the blocks of the first experts also write the
        normalised x, each its part of K
Overlap the next kernel may start at once; the bias is read before the wait for the previous kernel (programmatic dependent
        launch, sm_90)
Exact   scores in float32. Positions are integers: they depend neither on the grid nor on the order of blocks. Tested:
        tests/kernels/elementwise/test_route.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.elementwise.sample import last_to_arrive
from lowbit.kernels.parts.gluon import source_digest
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.reference.route import SLOT_BITS, RouterRule, RoutingTensors, tile_bound

FEW_TOKENS, FEW_SLOTS = 64, 1024
"""Largest numbers of tokens and of slots (with padding) for routing in one launch."""

FEWEST_SLOTS = 32
"""Smallest number of slots of a block, with padding: one for each thread of a warp."""

ONE_BLOCK, MOST_WARPS, FEWEST_WARPS = 1024, 8, 4
"""Largest number of logits that a single block routes, and the limits of a block's warps. On an H200 (2026-11-28, 128 experts,
top 8) 16 tokens take 3.5 us in two blocks, 3.8 us in one block, and 5.1 us in one block of 16 warps. 32 tokens take 3.8 us in
four blocks and 7.2 us in one."""

SORT_WARPS = 16
"""Largest number of warps of the block that sorts given experts in one launch."""

MANY_WARPS = 2
"""Number of warps where slots of many tokens are placed, MANY_CHUNK at a time: one thread for each slot."""

BLOCK = 8
"""Number of tokens per block, one warp each, where there are several blocks. With fewer warps, sorting 512 slots by 512 experts
would spill registers."""

CHUNK, SHORT_TABLE, MANY_CHUNK = 32, 4096, 64
"""CHUNK: number of slots that are compared with each other. It is doubled where a block has only one chunk, or where the table
of counts by expert and chunk would have more than SHORT_TABLE entries. MANY_CHUNK: number of slots per block where several
launches sort. Such a block is one chunk: with blocks of 512 slots, the table of counts by chunk and expert took 13 of 19 us
(H200, 2026-11-28, 128 experts)."""

COLUMNS, ROWS = 32, 128
"""Number of experts per block of `sum_counts`, and number of chunks that it reads at a time."""

_BITS, _FIELD = tl.constexpr(SLOT_BITS), tl.constexpr((1 << SLOT_BITS) - 1)

_NEVER = tl.constexpr(-(1 << 31))
"""Key of a column that must not be chosen; it is below the key of -inf."""


def _power(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return int(triton.next_power_of_2(n))


@dataclass(frozen=True)
class ChooseConfig:
    """Compile-time configuration of the choice of experts: `rule` for `experts` experts and `tokens` tokens per block.

    `slots`: number of columns for the chosen experts of a token, a power of two.
    """

    rule: RouterRule
    experts: int
    bias: bool
    tokens: int
    slots: int
    overlap: bool
    digest: str = source_digest()

    @property
    def lanes(self) -> int:
        """Number of columns of a row of logits, a power of two: the experts of a group, or without groups at most the threads
        of a warp."""
        if self.rule.groups > 1:
            return _power(self.experts // self.rule.groups)
        return min(_power(self.experts), 32)

    @property
    def size(self) -> int:
        """Number of experts per row of logits."""
        return self.experts // self.rule.groups if self.rule.groups > 1 else self.lanes

    @property
    def rows(self) -> int:
        """Number of rows into which a token's logits are divided: one for each group, or without groups one for each `lanes`
        experts."""
        return -(-self.experts // self.size)

    @property
    def columns(self) -> int:
        """Number of logits of a token, with padding."""
        return self.rows * self.lanes

    @property
    def sigmoid(self) -> bool:
        """True if scores are sigmoids."""
        return self.rule.score == "sigmoid"

    @property
    def top2(self) -> bool:
        """True if a group's score is the sum of its two largest scores."""
        return self.rule.group_score == "top2"

    @property
    def corrected(self) -> bool:
        """True if the bias is added to scores for the choice only."""
        return self.bias and self.rule.bias_use == "choice"

    @property
    def biased(self) -> bool:
        """True if the bias is added to the logits."""
        return self.bias and self.rule.bias_use == "logits"

    @property
    def by_logit(self) -> bool:
        """True if the choice compares logits."""
        return self.rule.chooses_by_logit(self.bias)

    @property
    def whole(self) -> bool:
        """True if the softmax's sum over all experts is needed. It cancels if the choice compares logits and weights are
        divided by their sum."""
        quotients = self.rule.softmax_over_selected or (self.rule.normalize and self.rule.epsilon == 0)
        return not self.sigmoid and not (quotients and self.by_logit)

    @property
    def normalize(self) -> bool:
        """True if weights are divided by their sum."""
        return self.rule.normalize or self.rule.softmax_over_selected


@dataclass(frozen=True)
class SortConfig:
    """Compile-time configuration of the sort of slots by expert: `top_k` slots per token, `slots` (a power of two) per
    block."""

    experts: int
    top_k: int
    tile_rows: int
    slots: int
    overlap: bool
    digest: str = source_digest()

    @property
    def bins(self) -> int:
        """Number of experts, padded to a power of two."""
        return _power(self.experts)

    @property
    def chunk(self) -> int:
        """Number of slots of a chunk, which are ranked by comparison with each other."""
        short = self.slots > 2 * CHUNK and self.slots // CHUNK * self.bins <= SHORT_TABLE
        return CHUNK if short else min(self.slots, 2 * CHUNK)

    @property
    def chunks(self) -> int:
        """Number of chunks in a block."""
        return self.slots // self.chunk


@dataclass(frozen=True)
class ProductConfig:
    """Compile-time configuration of the product of up to 16 tokens and a router's weight [experts, k].

    It depends on the weight alone, so that a token's logits have the same bits in any batch.
    """

    experts: int
    k: int
    rows: int = 16
    tokens: int = 16
    step: int = 256

    @property
    def columns(self) -> int:
        """Number of experts, padded to whole blocks."""
        return -(-self.experts // self.rows) * self.rows

    @property
    def parts(self) -> int:
        """Number of parts of K. The grid then has about 64 blocks, and one block can add the partial sums in a microsecond."""
        return max(1, min(max(4, 64 * self.rows // self.columns), 16, -(-self.k // self.step)))

    @property
    def part(self) -> int:
        """Number of features in a part, a multiple of `step`."""
        return -(-self.k // (self.parts * self.step)) * self.step

    @property
    def blocks(self) -> int:
        """Number of blocks of the grid."""
        return self.columns // self.rows * self.parts


@triton.jit
def sortable(x):
    """Returns int32 keys in the same order as float32 x; NaN counts as -inf, and 0 equals -0."""
    bits = tl.where(x == 0.0, 0.0, tl.where(x == x, x, float("-inf"))).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def expert_of(r, C: tl.constexpr):
    """Returns (experts [1, lanes], mask of those that exist) for row r of a token's logits."""
    lane = tl.arange(0, C.lanes)[None, :]
    expert = r * C.size + lane
    return expert, (lane < C.size) & (expert < C.experts)


@triton.jit
def loaded(base, here, C: tl.constexpr):
    """Loads rows of float32 values of all experts, from one pointer or from pointers [tokens, 1]; -inf where there is no expert
    or `here` is False."""
    ROWS: tl.constexpr = C.rows
    rows = ()
    for r in tl.static_range(ROWS):
        expert, exists = expert_of(r, C)
        rows += (tl.load(base + expert, mask=here & exists, other=float("-inf")).to(tl.float32),)
    return rows


@triton.jit
def plus(rows, others, C: tl.constexpr):
    """Returns the sums of corresponding rows."""
    ROWS: tl.constexpr = C.rows
    made = ()
    for r in tl.static_range(ROWS):
        made += (rows[r] + others[r],)
    return made


@triton.jit
def largest_of(rows, C: tl.constexpr):
    """Returns the largest number of each token [tokens] in rows [tokens, lanes], which must not contain NaN."""
    ROWS: tl.constexpr = C.rows
    best = rows[0]
    for r in tl.static_range(1, ROWS):
        best = tl.maximum(best, rows[r])
    return tl.max(best, 1)


@triton.jit
def cleaned(x):
    """Replaces NaN by -inf."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def group_keys(rows, C: tl.constexpr):
    """Returns the key [tokens] of each group. A group is one row, without NaN."""
    ROWS: tl.constexpr = C.rows
    lane = tl.arange(0, C.lanes)[None, :]
    keys = ()
    for r in tl.static_range(ROWS):
        best = tl.max(rows[r], 1)
        if C.top2:
            first = tl.min(tl.where(rows[r] == best[:, None], lane, C.lanes), 1)
            best = best + tl.max(tl.where(lane == first[:, None], float("-inf"), rows[r]), 1)
        keys += (sortable(best),)
    return keys


@triton.jit
def without_other_groups(keys, groups, C: tl.constexpr):
    """Returns keys of experts, replaced by _NEVER for experts outside the top_groups groups with the largest keys `groups`."""
    ROWS: tl.constexpr = C.rows
    TURNS: tl.constexpr = C.rule.top_groups
    for _ in tl.static_range(TURNS):
        best = groups[0]
        for r in tl.static_range(1, ROWS):
            best = tl.maximum(best, groups[r])
        index = tl.full([C.tokens], ROWS, tl.int32)
        for r in tl.static_range(ROWS):
            index = tl.where((groups[r] == best) & (index == ROWS), r, index)
        left = ()
        for r in tl.static_range(ROWS):
            left += (tl.where(index == r, _NEVER, groups[r]),)
        groups = left
    made = ()
    for r in tl.static_range(ROWS):
        made += (tl.where((groups[r] == _NEVER)[:, None], keys[r], _NEVER),)
    return made


@triton.jit
def score_of(x, largest, C: tl.constexpr):
    """Returns the scores of logits; those of softmax are not yet divided by their sum."""
    return 1.0 / (1.0 + tl.exp(-x)) if C.sigmoid else tl.exp(x - largest)


@triton.jit
def total_of(rows, largest, C: tl.constexpr):
    """Returns the softmax's sums [tokens] of exp(logit - largest). The terms, from 0 to 1, are rounded to integers in units of
    2^-40, whose sum does not depend on the order. NaN counts as 0."""
    ROWS: tl.constexpr = C.rows
    total = tl.full([C.tokens, C.lanes], 0, tl.int64)
    for r in tl.static_range(ROWS):
        power = tl.exp(cleaned(rows[r]) - largest[:, None])
        total += (tl.where(power == power, power, 0.0) * 1099511627776.0).to(tl.int64)
    return tl.sum(total, 1).to(tl.float32) * (1.0 / 1099511627776.0)


@triton.jit
def keys_of(rows, added, largest, total, C: tl.constexpr):
    """Returns rows of int32 keys; experts are chosen in falling order of their keys."""
    ROWS: tl.constexpr = C.rows
    choices = ()
    for r in tl.static_range(ROWS):
        choice = rows[r]
        if not C.by_logit:
            choice = score_of(choice, largest[:, None], C)
            if not C.sigmoid:
                choice = choice / total[:, None]
            if C.corrected:
                choice += added[r]
        choices += (tl.where(expert_of(r, C)[1], cleaned(choice), float("-inf")),)
    keys = ()
    for r in tl.static_range(ROWS):
        keys += (tl.where(expert_of(r, C)[1], sortable(choices[r]), _NEVER),)
    if C.rule.groups > 1:
        keys = without_other_groups(keys, group_keys(choices, C), C)
    return keys


@triton.jit
def take_best(keys, rows, C: tl.constexpr):
    """Returns (expert [tokens], bits of its logit, keys without this expert), for the lowest expert with the largest key."""
    ROWS: tl.constexpr = C.rows
    key = largest_of(keys, C)
    best = tl.full([C.tokens, C.lanes], C.experts, tl.int32)
    for r in tl.static_range(ROWS):
        best = tl.minimum(best, tl.where(keys[r] == key[:, None], expert_of(r, C)[0], C.experts))
    expert = tl.min(best, 1)
    left = ()
    value = tl.full([C.tokens, C.lanes], _NEVER, tl.int32)
    for r in tl.static_range(ROWS):
        of_row, exists = expert_of(r, C)  # columns beyond a row's experts have numbers of the next row
        this = (of_row == expert[:, None]) & exists
        left += (tl.where(this, _NEVER, keys[r]),)
        if not C.by_logit:
            value = tl.where(this, rows[r].to(tl.int32, bitcast=True), value)
    return expert, key ^ ((key >> 31) & 0x7FFFFFFF) if C.by_logit else tl.max(value, 1), left


@triton.jit
def choose(rows, added, C: tl.constexpr):
    """Returns experts int32 and weights float32 of tokens, both [tokens, slots]; zero from column top_k on.

    Logits are rows [tokens, lanes], -inf where there is no expert. Triton assigns tokens to warps and lanes to threads, so
    reductions stay within a warp.
    """
    ROWS: tl.constexpr = C.rows
    if C.biased:
        rows = plus(rows, added, C)
    nan = rows[0] != rows[0]
    clean = (cleaned(rows[0]),)
    for r in tl.static_range(1, ROWS):
        nan |= rows[r] != rows[r]
        clean += (cleaned(rows[r]),)
    largest = largest_of(clean, C)
    wrong = tl.max(nan.to(tl.int32), 1) != 0
    total = tl.full([C.tokens], 1.0, tl.float32)
    if not C.sigmoid:
        wrong |= tl.abs(largest) == float("inf")
        if C.whole:
            total = total_of(rows, largest, C)
    keys = keys_of(rows, added, largest, total, C)
    s = tl.arange(0, C.slots)[None, :]
    chosen, weights = tl.full([C.tokens, C.slots], 0, tl.int32), tl.full([C.tokens, C.slots], 0.0, tl.float32)
    selected = tl.full([C.tokens], 0.0, tl.float32)
    for turn in range(C.rule.top_k):
        best, bits, keys = take_best(keys, rows, C)
        weight = score_of(bits.to(tl.float32, bitcast=True), largest, C) / total
        selected += weight  # added in the order of the choice, whatever the block's layout
        chosen, weights = tl.where(s == turn, best[:, None], chosen), tl.where(s == turn, weight[:, None], weights)
    if C.normalize:
        weights = weights / (selected + C.rule.epsilon)[:, None]
    return chosen, tl.where(wrong[:, None], float("nan"), weights * C.rule.scale)


@triton.jit
def ranked(expert, C: tl.constexpr):
    """Returns (rank [slots], counts [bins]) of a block of slots. The rank of a slot is the number of earlier slots with the
    same expert; counts are the numbers of slots of each expert. A slot without an expert has expert -1.

    Tables of counts are computed by comparison. tl.histogram would take bins / 32 population counts per thread and as many
    shared atomics per warp, and a table of 16 chunks by 128 experts has 2,048 bins.
    """
    chunked = tl.reshape(expert, [C.chunks, C.chunk])
    i = tl.arange(0, C.chunk)
    # The slots of a chunk are distributed over the lanes of a warp, the slots compared with them over registers. So few values
    # are summed across warps.
    before = (tl.trans(chunked)[:, :, None] == chunked[None, :, :]) & (i[:, None, None] < i[None, None, :])
    rank = tl.reshape(tl.sum(before.to(tl.int32), 0), [C.slots])
    known = tl.maximum(expert, 0)
    if C.chunks == 1 and C.bins <= 256:
        counts = tl.histogram(known, C.bins, mask=expert >= 0)
    else:
        table = tl.sum((chunked[:, :, None] == tl.arange(0, C.bins)[None, None, :]).to(tl.int32), 1)
        counts = tl.sum(table, 0)
        if C.chunks > 1:
            earlier = tl.reshape(tl.cumsum(table, 0) - table, [C.chunks * C.bins])
            rank += tl.gather(earlier, tl.arange(0, C.slots) // C.chunk * C.bins + known, 0)
    return rank, counts


@triton.jit
def begins(counts, C: tl.constexpr):
    """Returns (begins int64 [bins], ends int64): the first slot position and first tile of each expert, from its number of
    slots `counts`; and their totals.

    Bits 0 to 20 are the number of slots of all earlier experts, bits 21 to 41 the number of their tiles, and the bits from 42
    on the number of slots of the expert. So one prefix sum, and one lookup for each slot, suffice. `ends` has the first two
    fields, for all experts.
    """
    both = counts.to(tl.int64) | (((counts + (C.tile_rows - 1)) // C.tile_rows).to(tl.int64) << _BITS)
    return (tl.cumsum(both, 0) - both) | (counts.to(tl.int64) << (2 * _BITS)), tl.sum(both, 0)


@triton.jit
def field(packed, i: tl.constexpr):
    """Returns field i of a number of `begins`, int32."""
    return ((packed >> (i * _BITS)) & _FIELD).to(tl.int32)


@triton.jit
def place(expert, here, slot, rank, begin, order, tiles, C: tl.constexpr):
    """Stores slots at their positions; the first slot of a tile also stores the tile's entry. `rank` counts all earlier slots
    of the expert."""
    of_expert = tl.gather(begin, tl.where(here, expert, 0), 0)
    position = field(of_expert, 0) + rank
    tl.store(order + position, slot, mask=here)
    tile = tiles + (field(of_expert, 1) + rank // C.tile_rows) * 3
    starts = here & (rank % C.tile_rows == 0)
    tl.store(tile, expert, mask=starts)
    tl.store(tile + 1, position, mask=starts)
    tl.store(tile + 2, tl.minimum(field(of_expert, 2) - rank, C.tile_rows), mask=starts)


@triton.jit
def store_totals(begin, ends, offsets, tile_count, C: tl.constexpr):
    """Stores the first position of each expert, the number of slots and the number of tiles."""
    e = tl.arange(0, C.bins)
    tl.store(offsets + e, field(begin, 0), mask=e < C.experts)
    tl.store(offsets + C.experts, field(ends, 0))
    tl.store(tile_count, field(ends, 1))


@triton.jit
def sort_few(expert, here, slot, rank, counts, slots, bound, order, offsets, tiles, tile_count, C: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Sorts all slots in one block; `rank` and `counts` are those of `ranked`. 3 * `bound` <= TILES."""
    begin, ends = begins(counts, C)
    place(expert, here, slot, rank, begin, order, tiles, C)
    store_totals(begin, ends, offsets, tile_count, C)
    i = tl.arange(0, C.slots)
    tl.store(order + i, -1, mask=(i >= field(ends, 0)) & (i < slots))
    i = tl.arange(0, TILES)
    tl.store(tiles + i, 0, mask=(i >= field(ends, 1) * 3) & (i < bound * 3))


@triton.jit
def known_expert(given, here, C: tl.constexpr):
    """Converts experts to int32: -1 for numbers that are not experts, and where `here` is False."""
    return tl.where(here & (given >= 0) & (given < C.experts), given, -1).to(tl.int32)


@triton.jit
def store_choice(experts, weights, chosen, weight, token, T, C: tl.constexpr):
    """Stores the experts and weights of tokens; returns (mask [tokens, slots] of slots that exist, their indices)."""
    s = tl.arange(0, C.slots)
    slot = token[:, None] * C.rule.top_k + s[None, :]
    valid = (token < T)[:, None] & (s < C.rule.top_k)[None, :]
    tl.store(experts + slot, chosen, mask=valid)
    tl.store(weights + slot, weight, mask=valid)
    return valid, slot


@triton.jit
def chosen_and_stored(experts, weights, logits, bias, T, stride, C: tl.constexpr):
    """Chooses the experts of a block of tokens and stores them. Returns (experts, mask of those that exist, indices of slots),
    [tokens, slots] each."""
    token = tl.program_id(0) * C.tokens + tl.arange(0, C.tokens)
    added = loaded(bias, True, C) if C.bias else ()
    if C.overlap:
        cuda.gdc_wait()
    rows = loaded(logits + token.to(tl.int64)[:, None] * stride, (token < T)[:, None], C)
    chosen, weight = choose(rows, added, C)
    valid, slot = store_choice(experts, weights, chosen, weight, token, T, C)
    return chosen, valid, slot


@triton.jit
def sort_chosen(chosen, valid, slot, slots, bound, order, offsets, tiles, tile_count, S: tl.constexpr, TILES: tl.constexpr):
    """Sorts the slots of a block that has chosen for all tokens."""
    here = tl.reshape(valid, [S.slots])
    expert = tl.where(here, tl.reshape(chosen, [S.slots]), -1)
    rank, counts = ranked(expert, S)
    sort_few(expert, here, tl.reshape(slot, [S.slots]), rank, counts, slots, bound, order, offsets, tiles, tile_count, S, TILES)


@triton.jit(do_not_specialize=["T", "stride", "bound"])
def route_block(
    experts, weights, order, offsets, tiles, tile_count, logits, bias, T, stride, bound, C: tl.constexpr, S: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Routes all tokens in one block."""
    if C.overlap:
        cuda.gdc_launch_dependents()
    chosen, valid, slot = chosen_and_stored(experts, weights, logits, bias, T, stride, C)
    sort_chosen(chosen, valid, slot, T * S.top_k, bound, order, offsets, tiles, tile_count, S, TILES)


@triton.jit
def inverse_rms(squares, parts, t, T, eps, unscaled, P: tl.constexpr, SQUARES: tl.constexpr):
    """Returns 1 / (rms * factor) [tokens]. `squares` [parts, T] are partial sums of squares of rows; `unscaled` is 1 /
    factor."""
    p = tl.arange(0, SQUARES)
    some = tl.load(squares + p[:, None] * T + t[None, :], mask=(p < parts)[:, None] & (t < T)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(some, 0) / P.k + eps) * unscaled


@triton.jit
def store_normed(normed, x_at, of_x, k, t, inverse, P: tl.constexpr):
    """Stores a part of K of the normalised x [T, K]; `x_at` are pointers to the part's first step."""
    for step in range(0, P.part, P.step):
        here = of_x & (k + step < P.k)[:, None]
        values = tl.load(x_at + step, mask=here, other=0.0).to(tl.float32) * inverse[None, :]
        at = normed + t.to(tl.int64)[None, :] * P.k + (k + step)[:, None]
        tl.store(at, values.to(normed.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["T", "stride", "columns", "bound", "parts", "eps", "unscaled"])
def route_tokens(
    experts, weights, order, offsets, tiles, tile_count, x, router, bias, sums, arrived, normed, squares, parts, eps, unscaled,
    T, stride, columns, bound, C: tl.constexpr, S: tl.constexpr, P: tl.constexpr, PIECES: tl.constexpr, TILES: tl.constexpr,
    SQUARES: tl.constexpr,
):  # fmt: skip
    """Multiplies tokens by some rows of the router's weight over a part of K; the last block adds the parts and routes.

    `columns` equals P.columns. It is a runtime argument because with a constant the compiler would load vectors and divide a
    token's logits among warps.
    """
    if C.overlap:
        cuda.gdc_launch_dependents()
    e = tl.program_id(0) * P.rows + tl.arange(0, P.rows)
    t, k = tl.arange(0, P.tokens), tl.program_id(1) * P.part + tl.arange(0, P.step)
    w_at, of_w = router + e[:, None] * P.k + k[None, :], (e < C.experts)[:, None]
    added = loaded(bias, True, C) if C.bias else ()
    w = tl.load(w_at, mask=of_w & (k < P.k)[None, :], other=0.0)
    if C.overlap:
        cuda.gdc_wait()
    row = t.to(tl.int64) * stride
    if PIECES:
        row = row * 8  # lets the compiler prove the alignment of vectors
    x_at, of_x = x + row[None, :] + k[:, None], (t < T)[None, :]
    total = tl.dot(w, tl.load(x_at, mask=of_x & (k < P.k)[:, None], other=0.0))
    for step in range(P.step, P.part, P.step):
        w = tl.load(w_at + step, mask=of_w & (k + step < P.k)[None, :], other=0.0)
        total = tl.dot(w, tl.load(x_at + step, mask=of_x & (k + step < P.k)[:, None], other=0.0), total)
    if squares is not None:
        inverse = inverse_rms(squares, parts, t, T, eps, unscaled, P, SQUARES)
        total = total * inverse[None, :]
        if tl.program_id(0) == 0:
            store_normed(normed, x_at, of_x, k, t, inverse, P)
    tl.store(sums + (tl.program_id(1) * P.tokens + t)[None, :] * columns + e[:, None], total)
    PARTS: tl.constexpr = P.parts
    if last_to_arrive(arrived, P.blocks):
        token = tl.arange(0, C.tokens)
        at, here = sums + token[:, None] * columns, (token < T)[:, None]
        logits = loaded(at, here, C)
        for part in tl.static_range(1, PARTS):
            logits = plus(logits, loaded(at + part * P.tokens * columns, here, C), C)
        chosen, weight = choose(logits, added, C)
        valid, slot = store_choice(experts, weights, chosen, weight, token, T, C)
        sort_chosen(chosen, valid, slot, T * S.top_k, bound, order, offsets, tiles, tile_count, S, TILES)


@triton.jit(do_not_specialize=["T", "stride", "bound"])
def route_blocks(
    experts, weights, order, offsets, tiles, tile_count, logits, bias, ranks, counted, arrived, T, stride, bound,
    C: tl.constexpr, B: tl.constexpr, S: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of some tokens and ranks their slots with configuration B; the last of BLOCKS <= ROWS blocks sorts
    all slots, with configuration S."""
    if C.overlap:
        cuda.gdc_launch_dependents()
    chosen, valid, slot = chosen_and_stored(experts, weights, logits, bias, T, stride, C)
    own = tl.reshape(valid, [B.slots])
    own_rank, own_counts = ranked(tl.where(own, tl.reshape(chosen, [B.slots]), -1), B)
    tl.store(ranks + tl.reshape(slot, [B.slots]), own_rank, mask=own)
    e = tl.arange(0, S.bins)
    tl.store(counted + tl.program_id(0) * S.bins + e, own_counts)
    if last_to_arrive(arrived, BLOCKS):
        block = tl.arange(0, ROWS)
        table = tl.load(counted + block[:, None] * S.bins + e[None, :], mask=(block < BLOCKS)[:, None], other=0)
        before = tl.reshape(tl.cumsum(table, 0) - table, [ROWS * S.bins])
        all_slots = tl.arange(0, S.slots)
        here = all_slots < T * S.top_k
        expert = tl.load(experts + all_slots, mask=here, other=0)
        rank = tl.load(ranks + all_slots, mask=here, other=0)
        rank += tl.gather(before, all_slots // (C.tokens * S.top_k) % ROWS * S.bins + expert, 0)
        counts = tl.sum(table, 0)
        sort_few(expert, here, all_slots, rank, counts, T * S.top_k, bound, order, offsets, tiles, tile_count, S, TILES)


@triton.jit(do_not_specialize=["slots", "bound"])
def group_few(
    experts, weights, order, offsets, tiles, tile_count, given_experts, given_weights, slots, bound,
    S: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sorts slots whose experts are given."""
    if S.overlap:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    slot = tl.arange(0, S.slots)
    valid = slot < slots
    expert = known_expert(tl.load(given_experts + slot, mask=valid, other=-1), valid, S)
    here = expert >= 0
    tl.store(experts + slot, expert, mask=valid)
    tl.store(weights + slot, tl.load(given_weights + slot, mask=here, other=0.0).to(tl.float32), mask=valid)
    rank, counts = ranked(expert, S)
    sort_few(expert, here, slot, rank, counts, slots, bound, order, offsets, tiles, tile_count, S, TILES)


@triton.jit(do_not_specialize=["T", "stride"])
def choose_many(experts, weights, logits, bias, T, stride, C: tl.constexpr):
    """Chooses the experts of some tokens."""
    if C.overlap:
        cuda.gdc_launch_dependents()
    chosen_and_stored(experts, weights, logits, bias, T, stride, C)


@triton.jit(do_not_specialize=["slots"])
def count_slots(counts, experts, weights, given_experts, given_weights, slots, S: tl.constexpr):
    """Counts the slots of each expert in a chunk of slots; stores experts and weights where they are given."""
    if S.overlap:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    slot = tl.program_id(0) * S.slots + tl.arange(0, S.slots)
    valid = slot < slots
    if given_experts is None:
        expert = tl.load(experts + slot, mask=valid, other=-1)
        here = valid
    else:
        expert = known_expert(tl.load(given_experts + slot, mask=valid, other=-1), valid, S)
        here = expert >= 0
        tl.store(experts + slot, expert, mask=valid)
        tl.store(weights + slot, tl.load(given_weights + slot, mask=here, other=0.0).to(tl.float32), mask=valid)
    counted = tl.histogram(tl.where(here, expert, 0), S.bins, mask=here)
    tl.store(counts + tl.program_id(0) * S.bins + tl.arange(0, S.bins), counted)


@triton.jit(do_not_specialize=["chunks"])
def sum_counts(counts, totals, chunks, COLUMNS: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr):
    """Replaces each chunk's counts by the sums over earlier chunks, for some experts, and stores the totals."""
    if S.overlap:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = e < S.bins
    total = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, chunks, ROWS):
        chunk = start + tl.arange(0, ROWS)
        at = counts + chunk[:, None] * S.bins + e[None, :]
        mask = (chunk < chunks)[:, None] & exists[None, :]
        counted = tl.load(at, mask=mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counted, 0) - counted, mask=mask)
        total += tl.sum(counted, 0)
    tl.store(totals + e, total, mask=exists)


@triton.jit(do_not_specialize=["slots", "bound"])
def place_slots(order, offsets, tiles, tile_count, experts, before, totals, slots, bound, S: tl.constexpr):
    """Stores a chunk of slots at their positions; the first block also stores the totals."""
    if S.overlap:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    p = tl.program_id(0)
    slot = p * S.slots + tl.arange(0, S.slots)
    expert = tl.load(experts + slot, mask=slot < slots, other=-1)
    here = expert >= 0
    counts = tl.load(totals + tl.arange(0, S.bins))
    rank, _ = ranked(expert, S)
    rank += tl.load(before + p * S.bins + expert, mask=here, other=0)
    begin, ends = begins(counts, S)
    place(expert, here, slot, rank, begin, order, tiles, S)
    tl.store(order + slot, -1, mask=(slot >= field(ends, 0)) & (slot < slots))
    if p == 0:
        store_totals(begin, ends, offsets, tile_count, S)
    used = field(ends, 1) * 3
    for start in range(p * S.slots, bound * 3, tl.num_programs(0) * S.slots):
        i = start + tl.arange(0, S.slots)
        tl.store(tiles + i, 0, mask=(i >= used) & (i < bound * 3))


def _outputs(tokens: int, top_k: int, experts: int, tile_rows: int, device: torch.device) -> RoutingTensors:
    """Uninitialised tensors of a routing."""
    slots = tokens * top_k

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    tiles = integers(tile_bound(slots, experts, tile_rows), 3)
    return RoutingTensors(integers(tokens, top_k), weights, integers(slots), integers(experts + 1), tiles, integers(1))


class _SortMany:
    """The launches that sort many slots by expert."""

    def __init__(self, slots: int, bound: int, config: SortConfig) -> None:
        self.slots, self.bound, self.config = slots, bound, config
        self.chunks = -(-slots // MANY_CHUNK)
        overlap, bins = config.overlap, config.bins
        self.count = Launcher(count_slots, (self.chunks, 1, 1), MANY_WARPS, overlap=overlap)
        self.sum = Launcher(sum_counts, (-(-bins // COLUMNS), 1, 1), 4, overlap=overlap)
        self.place = Launcher(place_slots, (self.chunks, 1, 1), MANY_WARPS, overlap=overlap)

    def __call__(self, made: RoutingTensors, experts: Tensor | None, weights: Tensor | None) -> None:
        """Sorts slots by the given experts; None: by the experts in `made`."""
        space = torch.empty((self.chunks + 1, self.config.bins), dtype=torch.int32, device=made.order.device)
        totals, counts = space[0], space[1:]
        self.count(counts, made.experts, made.weights, experts, weights, self.slots, self.config)
        self.sum(counts, totals, self.chunks, COLUMNS, ROWS, self.config)
        self.place(*made[2:], made.experts, counts, totals, self.slots, self.bound, self.config)


class RoutePlan:
    """The plan of a routing of `tokens` tokens, 1 or more, to `experts` experts under `rule`: created once, called many times.

    `bias`: True if there is a bias. A plan serves one GPU, one type and alignment of logits.
    """

    def __init__(self, tokens: int, experts: int, rule: RouterRule, bias: bool, tile_rows: int, machine: Machine) -> None:
        self.tokens, self.experts, self.top_k, self.tile_rows = tokens, experts, rule.top_k, tile_rows
        self.bound = tile_bound(tokens * rule.top_k, experts, tile_rows)
        overlap = machine.arch.sm >= 90
        padded, slots = _power(tokens), _power(rule.top_k)
        columns = ChooseConfig(rule, experts, bias, 1, slots, overlap).columns
        self.few = tokens <= FEW_TOKENS and padded * slots <= FEW_SLOTS
        one = self.few and (padded <= BLOCK or padded * columns <= ONE_BLOCK)
        block = padded if one else BLOCK
        if self.few:
            slots = max(slots, FEWEST_SLOTS // block)
        self.blocks = -(-tokens // block)
        self.choose = ChooseConfig(rule, experts, bias, block, slots, overlap)
        function = route_block if one else route_blocks if self.few else choose_many
        # The last block sorts all slots: 512 of them take 4.4 us with 4 warps, 5.4 with 8 (H200, 2026-11-28).
        warps = FEWEST_WARPS if self.blocks > 4 else max(FEWEST_WARPS, min(block, MOST_WARPS))
        self.launch = Launcher(function, (self.blocks, 1, 1), warps, overlap=overlap)

        def sort(slots: int) -> SortConfig:
            return SortConfig(experts, rule.top_k, tile_rows, slots, overlap)

        self.sorts = (sort(block * slots),) if one else (sort(block * slots), sort(_power(tokens * rule.top_k)))
        self.many = None if self.few else _SortMany(tokens * rule.top_k, self.bound, sort(MANY_CHUNK))

    @property
    def workspace(self) -> tuple[int, int]:
        """Number of 32-bit words of the workspace, and of int32 counters, which are zero before and after a call."""
        if not self.few or self.blocks == 1:
            return 0, 0
        return self.tokens * self.top_k + self.blocks * self.sorts[1].bins, 1

    def __call__(self, logits: Tensor, bias: Tensor | None, space: Tensor, arrived: Tensor) -> RoutingTensors:
        """Routes logits [T, E]; `space` float32 and `arrived` are the workspace, all tensors on the current device."""
        made = _outputs(self.tokens, self.top_k, self.experts, self.tile_rows, logits.device)
        sizes = self.tokens, logits.stride(0)
        tiles = _power(3 * self.bound)
        if self.many:
            self.launch(made.experts, made.weights, logits, bias, *sizes, self.choose)
            self.many(made, None, None)
        elif self.blocks == 1:
            self.launch(*made, logits, bias, *sizes, self.bound, self.choose, *self.sorts, tiles)
        else:
            words = space.view(torch.int32)
            ranks, counted = words[: self.tokens * self.top_k], words[self.tokens * self.top_k :]
            constants = self.choose, *self.sorts, self.blocks, _power(self.blocks), tiles
            self.launch(*made, logits, bias, ranks, counted, arrived, *sizes, self.bound, *constants)
        return made


class RouteTokensPlan:
    """The plan of a routing of `tokens` tokens (1 to 16) of K features by a router's weight: created once, called many times.

    `pieces` promises that the row stride of x is a multiple of 8 and that x and weight start at multiples of 16 bytes.
    `parts`: number of partial sums of squares per row, if x is not normalised yet; else 0. A plan serves one GPU, one type and
    alignment of x and weight.
    """

    def __init__(
        self, tokens: int, k: int, experts: int, rule: RouterRule, bias: bool, tile_rows: int, pieces: bool, machine: Machine,
        parts: int = 0,
    ) -> None:  # fmt: skip
        self.k, self.parts = k, parts
        self.tokens, self.experts, self.top_k, self.tile_rows = tokens, experts, rule.top_k, tile_rows
        self.bound = tile_bound(tokens * rule.top_k, experts, tile_rows)
        overlap = machine.arch.sm >= 90
        padded = max(_power(tokens), FEWEST_WARPS)
        slots = max(_power(rule.top_k), FEWEST_SLOTS // padded)
        self.choose = ChooseConfig(rule, experts, bias, padded, slots, overlap)
        self.sort = SortConfig(experts, rule.top_k, tile_rows, padded * slots, overlap)
        self.product, self.pieces = ProductConfig(experts, k), pieces
        grid = self.product.columns // self.product.rows, self.product.parts, 1
        self.launch = Launcher(route_tokens, grid, min(padded, MOST_WARPS), overlap=overlap)

    @property
    def workspace(self) -> tuple[int, int]:
        """Number of float32 elements of the workspace, and of int32 counters, which are zero before and after a call."""
        return self.product.parts * self.product.tokens * self.product.columns, 1

    def __call__(self, x: Tensor, router: Tensor, bias: Tensor | None, space: Tensor, arrived: Tensor) -> RoutingTensors:
        """Routes x [T, K] by the contiguous weight [E, K]; `space` and `arrived` are the workspace."""
        return self._call(x, router, bias, space, arrived, None, None, 0.0, 1.0)

    def norm(
        self, x: Tensor, squares: Tensor, router: Tensor, bias: Tensor | None, space: Tensor, arrived: Tensor, eps: float,
        factor: float,
    ) -> tuple[Tensor, RoutingTensors]:  # fmt: skip
        """Returns (normalised x [T, K], its routing). The given x is h * gamma * `factor`; `squares` float32 [parts, T] are
        partial sums of squares of the rows of h."""
        normed = torch.empty((self.tokens, self.k), dtype=x.dtype, device=x.device)
        return normed, self._call(x, router, bias, space, arrived, normed, squares, eps, 1.0 / factor)

    def _call(
        self, x: Tensor, router: Tensor, bias: Tensor | None, space: Tensor, arrived: Tensor, normed: Tensor | None,
        squares: Tensor | None, eps: float, unscaled: float,
    ) -> RoutingTensors:  # fmt: skip
        made = _outputs(self.tokens, self.top_k, self.experts, self.tile_rows, x.device)
        norm = normed, squares, self.parts, eps, unscaled
        sizes = self.tokens, x.stride(0) // (8 if self.pieces else 1), self.product.columns, self.bound
        constants = self.choose, self.sort, self.product, self.pieces, _power(3 * self.bound), _power(max(self.parts, 1))
        self.launch(*made, x, router, bias, space, arrived, *norm, *sizes, *constants)
        return made


class GroupPlan:
    """The plan of a sort of the slots of `tokens` tokens, 1 or more, by `top_k` given experts of `experts`: created once,
    called many times.

    A plan serves one GPU and one type and alignment of experts and weights, which are contiguous.
    """

    def __init__(self, tokens: int, top_k: int, experts: int, tile_rows: int, machine: Machine) -> None:
        self.tokens, self.top_k, self.experts, self.tile_rows = tokens, top_k, experts, tile_rows
        self.bound = tile_bound(tokens * top_k, experts, tile_rows)
        overlap = machine.arch.sm >= 90
        slots = max(_power(tokens * top_k), FEWEST_SLOTS)
        few = tokens <= FEW_TOKENS and slots <= FEW_SLOTS
        self.sort = SortConfig(experts, top_k, tile_rows, slots if few else MANY_CHUNK, overlap)
        self.launch = Launcher(group_few, (1, 1, 1), min(max(slots // 32, 2), SORT_WARPS), overlap=overlap)
        self.many = None if few else _SortMany(tokens * top_k, self.bound, self.sort)

    def __call__(self, experts: Tensor, weights: Tensor) -> RoutingTensors:
        """Sorts the slots of experts and weights [T, top_k] on the current device."""
        made = _outputs(self.tokens, self.top_k, self.experts, self.tile_rows, experts.device)
        if self.many:
            self.many(made, experts, weights)
        else:
            tiles = _power(3 * self.bound)
            self.launch(*made, experts, weights, self.tokens * self.top_k, self.bound, self.sort, tiles)
        return made
