"""Router of a mixture of experts: experts and weights of each token, and its slots sorted by expert. Plain Triton.

Reads   logits fp16, bf16 or fp32 [T, E], any row stride, and a bias fp32 [E] or None; or experts int32 or int64 [T, top_k] and
        weights [T, top_k] of another router
Writes  the tensors of `Routing` (ops/route.py), all of their elements
Choose  scores of some tokens a block, a row of columns each; top_k rounds of two integer reductions: the largest key, and the
        lowest column that has it. Groups are blocks of columns of one size, a power of two
Sort    counting sort: a histogram of experts for each chunk of 32 slots, its prefix sums over chunks and then over experts, and
        the rank within a chunk by comparison with the slots before. The slot that begins a tile writes the tile
Few     one launch for up to 64 tokens (1,024 slots with padding). Where their logits are too many for one block, the last
        block to finish sorts
Many    choose; counts of chunks of 512 slots; their prefix sums; place. `group` has no first launch
Overlap the next kernel may start at once; the bias is read before the wait for the previous kernel (programmatic dependent
        launch, sm_90)
Exact   scores in float32. Positions are integers: they depend neither on the grid nor on the order of blocks.
        Tested: tests/kernels/elementwise/test_route.py
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
from lowbit.kernels.reference.route import RouterRule, RoutingTensors, tile_bound

FEW_TOKENS, FEW_SLOTS = 64, 1024
"""Most tokens, and most slots with padding, of the path with one launch."""

MOST_EXPERTS = 1024
"""The histograms of the chunks of a block take 64 bytes of shared memory an expert: 64 KiB, which every GPU has."""

ONE_BLOCK, BLOCK = 4096, 2048
"""Most logits of a single block, and logits of a block where there are several. Not measured yet: with 8 a thread, a round of
the choice is some 130 instructions a warp."""

CHUNK, MANY_CHUNK = 32, 512
"""Slots of a histogram; slots of a block where there are many."""

COLUMNS, ROWS = 32, 128
"""Experts of a block of `sum_counts`, and chunks that it reads at a time."""

_NEVER = tl.constexpr(-(1 << 31))
"""Key of a column that is not to be chosen; below that of -inf."""


@dataclass(frozen=True)
class ChooseConfig:
    """Compile-time configuration of the choice: `rule` for `experts` experts, of `tokens` tokens a block.

    `slots` are the columns of the choices of a token, a power of two.
    """

    rule: RouterRule
    experts: int
    bias: bool
    tokens: int
    slots: int
    overlap: bool
    digest: str = source_digest()

    @property
    def size(self) -> int:
        """Experts of a group."""
        return self.experts // self.rule.groups

    @property
    def members(self) -> int:
        """Columns of a group."""
        return int(triton.next_power_of_2(self.size))

    @property
    def groups(self) -> int:
        """Groups with padding."""
        return int(triton.next_power_of_2(self.rule.groups))

    @property
    def columns(self) -> int:
        """Columns of a token's logits."""
        return self.groups * self.members

    @property
    def sigmoid(self) -> bool:
        """Whether scores are sigmoids."""
        return self.rule.score == "sigmoid"

    @property
    def top2(self) -> bool:
        """Whether a group's score is the sum of its two largest."""
        return self.rule.group_score == "top2"

    @property
    def corrected(self) -> bool:
        """Whether the bias is added for the choice alone."""
        return self.bias and self.rule.bias_use == "choice"

    @property
    def biased(self) -> bool:
        """Whether the bias is added to the logits."""
        return self.bias and self.rule.bias_use == "logits"

    @property
    def by_logit(self) -> bool:
        """Whether the choice compares logits."""
        return self.rule.chooses_by_logit(self.bias)

    @property
    def whole(self) -> bool:
        """Whether the sum over all experts is needed: not where only quotients of scores are."""
        quotients = self.rule.softmax_over_selected or (self.rule.normalize and self.rule.epsilon == 0)
        return not self.sigmoid and not (quotients and self.by_logit)

    @property
    def normalize(self) -> bool:
        """Whether weights are divided by their sum."""
        return self.rule.normalize or self.rule.softmax_over_selected


@dataclass(frozen=True)
class SortConfig:
    """Compile-time configuration of the sort of `top_k` slots a token by expert; `slots` a block, a power of two."""

    experts: int
    top_k: int
    tile_rows: int
    slots: int
    overlap: bool
    digest: str = source_digest()

    @property
    def bins(self) -> int:
        """Experts with padding."""
        return int(triton.next_power_of_2(self.experts))

    @property
    def chunk(self) -> int:
        """Slots whose ranks are found by comparison."""
        return CHUNK if self.slots <= 512 else 2 * CHUNK

    @property
    def chunks(self) -> int:
        """Histograms of a block."""
        return self.slots // self.chunk


@triton.jit
def sortable(x):
    """int32 keys that are in the order of float32 x; NaN counts as -inf, and zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, tl.where(x == x, x, float("-inf"))).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def take_best(keys, i, END: tl.constexpr):
    """Returns the lowest index i that has the largest key of a row [.., END], and the keys without it."""
    index = tl.min(tl.where(keys == tl.max(keys, 1)[:, None], i[None, :], END), 1)
    return index, tl.where(i[None, :] == index[:, None], _NEVER, keys)


@triton.jit
def kept_groups(choice, C: tl.constexpr):
    """Which columns are of the best groups: int32 [tokens, columns], 0 or 1. In `choice` nothing is NaN."""
    R: tl.constexpr = C.rule
    members = tl.reshape(choice, [C.tokens, C.groups, C.members])
    best = tl.max(members, 2)
    if C.top2:
        i = tl.arange(0, C.members)[None, None, :]
        first = tl.min(tl.where(members == best[:, :, None], i, C.members), 2)
        best = best + tl.max(tl.where(i == first[:, :, None], float("-inf"), members), 2)
    group = tl.arange(0, C.groups)
    keys = tl.where((group < R.groups)[None, :], sortable(best), _NEVER)
    kept = tl.zeros([C.tokens, C.groups], tl.int32)
    for _ in range(R.top_groups):
        index, keys = take_best(keys, group, C.groups)
        kept = tl.where(group[None, :] == index[:, None], 1, kept)
    return tl.reshape(tl.broadcast_to(kept[:, :, None], [C.tokens, C.groups, C.members]), [C.tokens, C.columns])


@triton.jit
def score_of(x, largest, C: tl.constexpr):
    """Scores of logits, not yet divided by a sum."""
    return 1.0 / (1.0 + tl.exp(-x)) if C.sigmoid else tl.exp(x - largest)


@triton.jit
def total_of(powers):
    """Sums of the rows of numbers from 0 to 1, in units of 2^-40: integers, whose sum depends on no order. NaN counts as 0."""
    parts = (tl.where(powers == powers, powers, 0.0) * 1099511627776.0).to(tl.int64)
    return tl.sum(parts, 1).to(tl.float32) * (1.0 / 1099511627776.0)


@triton.jit
def keys_of(x, added, largest, total, column, C: tl.constexpr):
    """Keys of columns in the order in which they are chosen, int32 [tokens, columns]."""
    exists = ((column % C.members < C.size) & (column // C.members < C.rule.groups))[None, :]
    choice = x
    if not C.by_logit:
        choice = score_of(x, largest[:, None], C)
        if not C.sigmoid:
            choice = choice / total[:, None]
        if C.corrected:
            choice += added
    choice = tl.where((choice == choice) & exists, choice, float("-inf"))
    keys = tl.where(exists, sortable(choice), _NEVER)
    if C.rule.groups > 1:
        keys = tl.where(kept_groups(choice, C) != 0, keys, _NEVER)
    return keys


@triton.jit
def choose(logits, bias, token, T, stride, C: tl.constexpr):
    """Experts int32 and weights float32 of tokens, both [tokens, slots], zero from column top_k on."""
    column = tl.arange(0, C.columns)
    expert = column // C.members * C.size + column % C.members
    exists = (column % C.members < C.size) & (column // C.members < C.rule.groups)
    added = 0.0
    if C.bias:
        added = tl.load(bias + expert, mask=exists, other=0.0)[None, :]
    if C.overlap:
        cuda.gdc_wait()
    row = logits + token.to(tl.int64) * stride
    here = token < T
    x = tl.load(row[:, None] + expert[None, :], mask=here[:, None] & exists[None, :], other=float("-inf")).to(tl.float32)
    if C.biased:
        x += added
    largest = tl.max(tl.where(x == x, x, float("-inf")), 1)
    wrong = tl.max((x != x).to(tl.int32), 1) != 0
    total = tl.full([C.tokens], 1.0, tl.float32)
    if not C.sigmoid:
        wrong |= tl.abs(largest) == float("inf")
        if C.whole:
            total = total_of(tl.exp(x - largest[:, None]))
    keys = keys_of(x, added, largest, total, column, C)
    s = tl.arange(0, C.slots)[None, :]
    chosen, weights = tl.zeros([C.tokens, C.slots], tl.int32), tl.zeros([C.tokens, C.slots], tl.float32)
    selected = tl.zeros([C.tokens], tl.float32)
    for turn in range(C.rule.top_k):
        best, keys = take_best(keys, column, C.columns)
        best = best // C.members * C.size + best % C.members
        value = tl.load(row + best, mask=here, other=0.0).to(tl.float32)
        if C.biased:
            value += tl.load(bias + best)
        weight = score_of(value, largest, C) / total
        selected += weight  # in the order of the choice, whatever the layout of the block
        chosen, weights = tl.where(s == turn, best[:, None], chosen), tl.where(s == turn, weight[:, None], weights)
    if C.normalize:
        weights = weights / (selected + C.rule.epsilon)[:, None]
    return chosen, tl.where(wrong[:, None], float("nan"), weights * C.rule.scale)


@triton.jit
def ranked(expert, here, C: tl.constexpr):
    """(rank [slots], counts [bins]) of a block of slots: how many slots before it have the same expert, and how many slots each
    expert has. Slots that are not `here` count as none."""
    chunked = tl.reshape(expert, [C.chunks, C.chunk])
    i = tl.arange(0, C.chunk)
    before = (chunked[:, :, None] == chunked[:, None, :]) & (i[None, None, :] < i[None, :, None])
    rank = tl.reshape(tl.sum(before.to(tl.int32), 2), [C.slots])
    bin = tl.where(here, tl.arange(0, C.slots) // C.chunk * C.bins + expert, 0)
    counts = tl.histogram(bin, C.chunks * C.bins, mask=here)
    if C.chunks > 1:
        table = tl.reshape(counts, [C.chunks, C.bins])
        earlier = tl.reshape(tl.cumsum(table, 0) - table, [C.chunks * C.bins])
        rank += tl.gather(earlier, bin, 0)
        counts = tl.sum(table, 0)
    return rank, counts


@triton.jit
def begins(counts, C: tl.constexpr):
    """(first position, first tile) of each expert, [bins], of the number of its slots."""
    tiles = (counts + (C.tile_rows - 1)) // C.tile_rows
    return tl.cumsum(counts, 0) - counts, tl.cumsum(tiles, 0) - tiles


@triton.jit
def tile_number(counts, C: tl.constexpr):
    """The number of tiles."""
    return tl.sum((counts + (C.tile_rows - 1)) // C.tile_rows, 0)


@triton.jit
def place(expert, here, slot, rank, counts, order, tiles, C: tl.constexpr):
    """Stores slots at their positions, and tiles by the slots that begin them. `rank` is that among all slots."""
    begin, first_tile = begins(counts, C)
    known = tl.where(here, expert, 0)
    position = tl.gather(begin, known, 0) + rank
    tl.store(order + position, slot, mask=here)
    tile = tiles + (tl.gather(first_tile, known, 0) + rank // C.tile_rows) * 3
    starts = here & (rank % C.tile_rows == 0)
    tl.store(tile, expert, mask=starts)
    tl.store(tile + 1, position, mask=starts)
    tl.store(tile + 2, tl.minimum(tl.gather(counts, known, 0) - rank, C.tile_rows), mask=starts)


@triton.jit
def store_totals(counts, offsets, tile_count, C: tl.constexpr):
    """Stores the first position of each expert, and the number of tiles."""
    e = tl.arange(0, C.bins)
    tl.store(offsets + 1 + e, tl.cumsum(counts, 0), mask=e < C.experts)
    tl.store(offsets, 0)
    tl.store(tile_count, tile_number(counts, C))


@triton.jit
def sort_few(expert, here, slot, slots, bound, order, offsets, tiles, tile_count, C: tl.constexpr, TILES: tl.constexpr):
    """Sorts all slots in one block; 3 * `bound` <= TILES."""
    rank, counts = ranked(expert, here, C)
    place(expert, here, slot, rank, counts, order, tiles, C)
    store_totals(counts, offsets, tile_count, C)
    i = tl.arange(0, C.slots)
    tl.store(order + i, -1, mask=(i >= tl.sum(counts, 0)) & (i < slots))
    i = tl.arange(0, TILES)
    tl.store(tiles + i, 0, mask=(i >= tile_number(counts, C) * 3) & (i < bound * 3))


@triton.jit
def known_expert(given, here, C: tl.constexpr):
    """int32 experts of any integers: -1 for those that are not among the experts, and where not `here`."""
    return tl.where(here & (given >= 0) & (given < C.experts), given, -1).to(tl.int32)


@triton.jit(do_not_specialize=["T", "stride", "bound"])
def route_few(
    experts, weights, order, offsets, tiles, tile_count, logits, bias, arrived, T, stride, bound,
    C: tl.constexpr, S: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of some tokens; the last block sorts the slots of all."""
    if C.overlap:
        cuda.gdc_launch_dependents()
    token = tl.program_id(0) * C.tokens + tl.arange(0, C.tokens)
    s = tl.arange(0, C.slots)
    expert, weight = choose(logits, bias, token, T, stride, C)
    slot = token[:, None] * S.top_k + s[None, :]
    valid = (token < T)[:, None] & (s < S.top_k)[None, :]
    tl.store(experts + slot, expert, mask=valid)
    tl.store(weights + slot, weight, mask=valid)
    i = tl.arange(0, S.slots)
    here = (i // C.slots < T) & (i % C.slots < S.top_k)
    all_slots = i // C.slots * S.top_k + i % C.slots
    if BLOCKS == 1:
        of_slots = tl.where(here, tl.reshape(expert, [S.slots]), -1)
        sort_few(of_slots, here, all_slots, T * S.top_k, bound, order, offsets, tiles, tile_count, S, TILES)
    elif last_to_arrive(arrived, BLOCKS):
        of_slots = tl.load(experts + all_slots, mask=here, other=-1)
        sort_few(of_slots, here, all_slots, T * S.top_k, bound, order, offsets, tiles, tile_count, S, TILES)


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
    sort_few(expert, here, slot, slots, bound, order, offsets, tiles, tile_count, S, TILES)


@triton.jit(do_not_specialize=["T", "stride"])
def choose_many(experts, weights, logits, bias, T, stride, C: tl.constexpr):
    """Chooses the experts of some tokens."""
    if C.overlap:
        cuda.gdc_launch_dependents()
    token = tl.program_id(0) * C.tokens + tl.arange(0, C.tokens)
    s = tl.arange(0, C.slots)
    expert, weight = choose(logits, bias, token, T, stride, C)
    slot = token[:, None] * C.rule.top_k + s[None, :]
    valid = (token < T)[:, None] & (s < C.rule.top_k)[None, :]
    tl.store(experts + slot, expert, mask=valid)
    tl.store(weights + slot, weight, mask=valid)


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
    """Replaces the counts of a chunk by the sums of those before, for some experts, and stores the totals."""
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
    rank, _ = ranked(expert, here, S)
    rank += tl.load(before + p * S.bins + expert, mask=here, other=0)
    place(expert, here, slot, rank, counts, order, tiles, S)
    tl.store(order + slot, -1, mask=(slot >= tl.sum(counts, 0)) & (slot < slots))
    if p == 0:
        store_totals(counts, offsets, tile_count, S)
    used = tile_number(counts, S) * 3
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
        self.count = Launcher(count_slots, (self.chunks, 1, 1), 4, overlap=overlap)
        self.sum = Launcher(sum_counts, (-(-bins // COLUMNS), 1, 1), 4, overlap=overlap)
        self.place = Launcher(place_slots, (self.chunks, 1, 1), 8, overlap=overlap)

    def __call__(self, made: RoutingTensors, experts: Tensor | None, weights: Tensor | None) -> None:
        """Sorts the slots of the given experts; None: of those in `made`."""
        space = torch.empty((self.chunks + 1, self.config.bins), dtype=torch.int32, device=made.order.device)
        totals, counts = space[0], space[1:]
        self.count(counts, made.experts, made.weights, experts, weights, self.slots, self.config)
        self.sum(counts, totals, self.chunks, COLUMNS, ROWS, self.config)
        self.place(*made[2:], made.experts, counts, totals, self.slots, self.bound, self.config)


def _few(tokens: int, slots: int) -> bool:
    return tokens <= FEW_TOKENS and slots <= FEW_SLOTS


class RoutePlan:
    """A routing of `tokens` tokens, 1 or more, to `experts` experts under `rule`: made once, called many times.

    `bias` says whether there is one. A plan serves one GPU, one type and alignment of logits.
    """

    def __init__(self, tokens: int, experts: int, rule: RouterRule, bias: bool, tile_rows: int, machine: Machine) -> None:
        self.tokens, self.experts, self.top_k, self.tile_rows = tokens, experts, rule.top_k, tile_rows
        self.bound = tile_bound(tokens * rule.top_k, experts, tile_rows)
        overlap = machine.arch.sm >= 90
        padded = int(triton.next_power_of_2(tokens))
        slots = int(triton.next_power_of_2(rule.top_k))
        few = _few(tokens, padded * slots)
        if few:
            slots = max(slots, CHUNK // padded)
        columns = ChooseConfig(rule, experts, bias, 1, slots, overlap).columns
        one = few and padded * columns <= ONE_BLOCK
        block = padded if one else min(max(BLOCK // columns, 1), padded)
        self.blocks = -(-tokens // block)
        self.choose = ChooseConfig(rule, experts, bias, block, slots, overlap)
        warps = min(max(block * columns // 256, 1), 8)
        self.launch = Launcher(route_few if few else choose_many, (self.blocks, 1, 1), warps, overlap=overlap)
        sorted_at_once = padded * slots if few else MANY_CHUNK
        self.sort = SortConfig(experts, rule.top_k, tile_rows, sorted_at_once, overlap)
        self.many = None if few else _SortMany(tokens * rule.top_k, self.bound, self.sort)

    @property
    def counters(self) -> int:
        """int32 counters that a call needs, zero before and after."""
        return int(self.many is None and self.blocks > 1)

    def __call__(self, logits: Tensor, bias: Tensor | None, arrived: Tensor) -> RoutingTensors:
        """Routes logits [T, E]; `arrived` are the counters, all tensors on the current device."""
        made = _outputs(self.tokens, self.top_k, self.experts, self.tile_rows, logits.device)
        sizes = self.tokens, logits.stride(0)
        if self.many:
            self.launch(made.experts, made.weights, logits, bias, *sizes, self.choose)
            self.many(made, None, None)
        else:
            tiles = int(triton.next_power_of_2(3 * self.bound))
            constants = self.choose, self.sort, self.blocks, tiles
            self.launch(*made, logits, bias, arrived, *sizes, self.bound, *constants)
        return made


class GroupPlan:
    """A routing of `tokens` tokens, 1 or more, to `top_k` given ones of `experts` experts: made once, called many times.

    A plan serves one GPU and one type and alignment of experts and weights, which are contiguous.
    """

    def __init__(self, tokens: int, top_k: int, experts: int, tile_rows: int, machine: Machine) -> None:
        self.tokens, self.top_k, self.experts, self.tile_rows = tokens, top_k, experts, tile_rows
        self.bound = tile_bound(tokens * top_k, experts, tile_rows)
        overlap = machine.arch.sm >= 90
        padded = max(int(triton.next_power_of_2(tokens * top_k)), CHUNK)
        few = _few(tokens, padded)
        self.sort = SortConfig(experts, top_k, tile_rows, padded if few else MANY_CHUNK, overlap)
        warps = min(max(padded // 32, 2), 8)
        self.launch = Launcher(group_few, (1, 1, 1), warps, overlap=overlap)
        self.many = None if few else _SortMany(tokens * top_k, self.bound, self.sort)

    def __call__(self, experts: Tensor, weights: Tensor) -> RoutingTensors:
        """Sorts the slots of experts and weights [T, top_k] on the current device."""
        made = _outputs(self.tokens, self.top_k, self.experts, self.tile_rows, experts.device)
        if self.many:
            self.many(made, experts, weights)
        else:
            tiles = int(triton.next_power_of_2(3 * self.bound))
            self.launch(*made, experts, weights, self.tokens * self.top_k, self.bound, self.sort, tiles)
        return made
