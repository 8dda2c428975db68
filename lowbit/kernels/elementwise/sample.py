"""Sampling of the next token of each row from its logits, bit-equal to reference/sampling.py. Plain Triton.

Reads   logits fp16, bf16 or fp32 [B, V], any row stride; slots of rows; settings of slots, 64 bytes each; counts int32 [V] and
        bias fp32 [V] of the slots that use them; masks of slots with a grammar, a bit per token
Writes  token and log-probability of each row. Without OF_ROWS also for each slot: its token, position and number of tokens, and
        the count of the token. Nothing is written for the last slot, a dummy that padding rows map to
Passes  survey: each block computes for a chunk of 2048 tokens the largest raw logit, the sum of exponentials of raw logits, and
        the largest adjusted logit. The last block to arrive for a row combines its chunks, and samples greedy rows. With ADJUST
        False (all rows greedy, no adjustments) no other pass runs
        weigh: each block computes the mass of a chunk, an exact integer. For rows without top-k and top-p, the last block
        samples a chunk, then a token within it. For other rows, each block also counts its tokens in 20 levels of mass (two
        octaves each), from which the last block computes the levels that top-k or top-p can keep; tokens in these levels are
        candidates
        collect: appends the keys of candidates to a list, in the order of tokens
        settle: one block per row searches the list for the thresholds of top-k and top-p, two bits at a time, and samples
Rows    with OF_ROWS each row has settings of its own, so several rows may be successive tokens of one slot. The kernel `accept`
        then advances the slots
Overlap each pass may start while the previous one runs (programmatic dependent launch, sm_90). Before the wait it only reads
        the slots of rows and their settings, which no kernel writes
Invalid rows with a NaN or +inf, or with -inf alone, get the log-probability NaN; their token is sampled as if NaN were -inf
Exact   sums of masses are integers and chunks depend on V alone, so a row's token and log-probability depend on neither B nor
        other rows. The log-probability is float32 with sums in a fixed order. Tested: tests/kernels/elementwise/test_sample.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.kernels.elementwise.masses import added, drawn, fraction, mass_up_to, masses, share, target_of, threshold
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.reference import sampling
from lowbit.kernels.reference.sampling import SampleInputs

SIZE = 2048
"""Number of tokens per chunk. A vocabulary of 128256 then takes 63 blocks, and a thread has one 16-byte vector of 16-bit
logits."""

WARPS = 8
TILE, SEARCH_WARPS = 4096, 16
"""Number of keys that a block of `settle` reads at a time, and its number of warps."""

LEVELS = 20
"""Number of levels of mass. A level spans two octaves, which are 2^16 keys."""

HEAD = 4
"""Number of 32-bit words per row that one pass stores for later passes."""

_WORDS, _HEAD, _LEVELS = tl.constexpr(sampling.WORDS), tl.constexpr(HEAD), tl.constexpr(LEVELS)
_TEMPERATURE, _TOP_K = tl.constexpr(sampling.TEMPERATURE), tl.constexpr(sampling.TOP_K)
_TOP_P, _MIN_P = tl.constexpr(sampling.TOP_P), tl.constexpr(sampling.MIN_P)
_REPETITION, _PRESENCE = tl.constexpr(sampling.REPETITION), tl.constexpr(sampling.PRESENCE)
_FREQUENCY, _MINIMUM = tl.constexpr(sampling.FREQUENCY), tl.constexpr(sampling.MINIMUM)
_SEED, _FLAGS, _GENERATED = tl.constexpr(sampling.SEED), tl.constexpr(sampling.FLAGS), tl.constexpr(sampling.GENERATED)
_PENALIZED, _BIASED = tl.constexpr(sampling.PENALIZED), tl.constexpr(sampling.BIASED)
_CUT, _HELD, _PROMPT = tl.constexpr(sampling.CUT), tl.constexpr(sampling.HELD), tl.constexpr(sampling.PROMPT)
_MASKED, _MASK = tl.constexpr(sampling.MASKED), tl.constexpr(sampling.MASK)
_KEYS, _KEY_SCALE = tl.constexpr(sampling.KEYS), tl.constexpr(sampling.KEY_SCALE)
_BEST, _LARGEST, _LOG_SUM, _LEVEL = (tl.constexpr(i) for i in range(4))


@triton.jit
def real(pointer):
    """Loads a float32 that is stored in an array of 32-bit words."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def distances(x, largest):
    """Returns largest - x. Where x equals largest this is 0, also if both are infinite."""
    return tl.where(x == largest, 0.0, largest - x)


@triton.jit
def given_logits(logits, at, V: tl.constexpr):
    """Loads logits of a row as float32; -inf beyond V."""
    return tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def cleaned(x):
    """Replaces NaN by -inf."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def allowed(masks, chunk, V: tl.constexpr, SIZE: tl.constexpr):
    """Returns the mask bits of a chunk's tokens. A thread loads one byte, the bits of 8 tokens."""
    byte = chunk * (SIZE // 8) + tl.arange(0, SIZE // 8)
    bits = tl.load(masks.to(tl.pointer_type(tl.uint8)) + byte, mask=byte * 8 < V, other=0).to(tl.int32)
    return tl.reshape((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1, (SIZE,)) != 0


@triton.jit
def adjusted(
    x, chunk, words, counts, bias, masks, ends, flags, V: tl.constexpr, SIZE: tl.constexpr, ENDS: tl.constexpr
):  # fmt: skip
    """Applies penalties, bias, bans and the grammar's mask, which precede the temperature, to logits x of a chunk's tokens.
    Products are `fma(a, b, 0)`, so that the compiler does not fuse them with additions."""
    at = chunk * SIZE + tl.arange(0, SIZE)
    if flags & _HELD:
        held = tl.load(words + _GENERATED) < tl.load(words + _MINIMUM)
        for e in tl.static_range(ENDS):
            x = tl.where(held & (at == tl.load(ends + e)), float("-inf"), x)
    if flags & _PENALIZED:
        count = tl.load(counts + at, mask=at < V, other=0)
        repetition = real(words + _REPETITION)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition), tl.fma(x, repetition, 0.0))
        x = tl.where(count != 0, repeated, x)
        generated = count & (_PROMPT - 1)
        x = x - tl.fma(generated.to(tl.float32), real(words + _FREQUENCY), 0.0)
        x = x - tl.where(generated > 0, real(words + _PRESENCE), 0.0)
    if flags & _BIASED:
        x = x + tl.load(bias + at, mask=at < V, other=0.0)
    if flags & _MASKED:
        x = tl.where(allowed(masks, chunk, V, SIZE), x, float("-inf"))
    return x


@triton.jit
def keys_of(
    logits, chunk, best, scale, words, counts, bias, masks, ends, flags, V: tl.constexpr, SIZE: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    """Returns the keys of a chunk's tokens; keys of tokens beyond V have mass 0."""
    at = chunk * SIZE + tl.arange(0, SIZE)
    x = adjusted(cleaned(given_logits(logits, at, V)), chunk, words, counts, bias, masks, ends, flags, V, SIZE, ENDS)
    key = tl.minimum(distances(x, best) * scale, _KEYS * 1.0).to(tl.int32)
    return tl.where(at < V, key, _KEYS)


@triton.jit
def seed_of(words):
    """Returns the seed of a slot, from two of its words."""
    return tl.load((words + _SEED).to(tl.pointer_type(tl.int64)))


@triton.jit
def least_of(words):
    """Returns the smallest mass that min-p keeps: a fraction of the largest mass, which is that of the most likely token."""
    return fraction(real(words + _MIN_P)) << 16


@triton.jit
def last_to_arrive(arrived, CHUNKS: tl.constexpr):
    """Returns True in the last block of the row to arrive; the counter is then zero again."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == CHUNKS - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def feed_back(
    token, b, slot, flags, logits, words, counts, largest, log_sum, slots, tokens, positions, out_tokens, out_logprobs,
    OF_ROWS: tl.constexpr,
):  # fmt: skip
    """Stores the sampled token of a row. Without OF_ROWS also advances the row's slot by this token."""
    x = cleaned(tl.load(logits + token).to(tl.float32))
    tl.store(out_tokens + b, token)
    tl.store(out_logprobs + b, -distances(x, largest) - log_sum)
    if (slot < slots - 1) & (not OF_ROWS):
        tl.store(tokens + slot, token)
        tl.store(positions + slot, tl.load(positions + slot) + 1)
        tl.store(words + _GENERATED, tl.load(words + _GENERATED) + 1)
        if flags & _PENALIZED:
            tl.store(counts + token, tl.load(counts + token) + 1)


@triton.jit
def survey(
    logits, rows, settings, counts, bias, masks, ends, parts, heads, arrived, tokens, positions, out_tokens, out_logprobs,
    slots,
    V: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    ENDS: tl.constexpr, ADJUST: tl.constexpr, OVERLAP: tl.constexpr, OF_ROWS: tl.constexpr,
):  # fmt: skip
    """Computes the largest logits of a chunk, and of a row; samples greedy rows."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    chunk, b = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + b)
    words = settings + (b if OF_ROWS else slot) * _WORDS
    flags = tl.load(words + _FLAGS) if ADJUST else 0
    temperature = real(words + _TEMPERATURE) if ADJUST else 0.0
    if ADJUST:
        masks += tl.load(words + _MASK).to(tl.int64) * ((V + 31) // 32)
    logits += b.to(tl.int64) * STRIDE
    counts += slot.to(tl.int64) * V
    if OVERLAP:
        cuda.gdc_wait()
    at = chunk * SIZE + tl.arange(0, SIZE)
    found = given_logits(logits, at, V)
    raw = cleaned(found)
    bias += slot.to(tl.int64) * V
    x = adjusted(raw, chunk, words, counts, bias, masks, ends, flags, V, SIZE, ENDS) if ADJUST else raw
    best, token = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    largest = tl.max(raw, 0) if ADJUST else best
    weight = tl.where(found < float("inf"), tl.exp(-distances(raw, largest)), float("nan"))  # a NaN makes all sums NaN
    total = tl.sum(tl.where(at < V, weight, 0.0), 0)
    part = parts + (b * CHUNKS + chunk) * 4
    tl.store(part, best.to(tl.int32, bitcast=True))
    tl.store(part + 1, chunk * SIZE + token)
    tl.store(part + 2, largest.to(tl.int32, bitcast=True))
    tl.store(part + 3, total.to(tl.int32, bitcast=True))
    if last_to_arrive(arrived + b, CHUNKS):
        c = tl.arange(0, PADDED)
        exists = c < CHUNKS
        of_chunks = parts + (b * CHUNKS + c) * 4
        bests = tl.load(of_chunks, mask=exists, other=-8388608).to(tl.float32, bitcast=True)  # the bits of -inf
        tops = tl.load(of_chunks + 2, mask=exists, other=-8388608).to(tl.float32, bitcast=True)
        totals = tl.load(of_chunks + 3, mask=exists, other=0).to(tl.float32, bitcast=True)
        best, first = tl.max(bests, 0, return_indices=True, return_indices_tie_break_left=True)
        largest = tl.max(tops, 0) if ADJUST else best
        log_sum = tl.log(tl.sum(totals * tl.exp(-distances(tops, largest)), 0))
        log_sum = tl.where(largest > float("-inf"), log_sum, float("nan"))
        if temperature == 0.0:
            token = tl.load(parts + (b * CHUNKS + first) * 4 + 1)
            feed_back(
                token, b, slot, flags, logits, words, counts, largest, log_sum, slots, tokens, positions, out_tokens,
                out_logprobs, OF_ROWS,
            )  # fmt: skip
        else:
            head = heads + b * _HEAD
            tl.store(head + _BEST, best.to(tl.int32, bitcast=True))
            tl.store(head + _LARGEST, largest.to(tl.int32, bitcast=True))
            tl.store(head + _LOG_SUM, log_sum.to(tl.int32, bitcast=True))


@triton.jit
def store_counts(levels, key, mass, SIZE: tl.constexpr):
    """Stores the number of a chunk's keys in each level, and returns the chunk's mass.

    The counts of 8 keys in levels 0 to 15 fit in one 64-bit word, 4 bits each. For the sum over all keys they are widened to 16
    bits, in four words: level 4 f + w is field f of word w. Levels 16 to 19 are the fields of word 4.
    """
    level = key >> 16
    one = tl.full(key.shape, 1, tl.int64)
    few = tl.where(level < 16, one << ((level & 15) * 4).to(tl.int64), 0)
    few = tl.sum(tl.reshape(few, (SIZE // 8, 8)), 1)
    rest = tl.where((level >= 16) & (level < _LEVELS), one << ((level & 3) * 16).to(tl.int64), 0)
    rest = tl.sum(tl.reshape(rest, (SIZE // 8, 8)), 1)
    FIELDS: tl.constexpr = 0x000F000F000F000F
    a, b, c = tl.reduce((few & FIELDS, (few >> 4) & FIELDS, (few >> 8) & FIELDS), 0, added)
    d, e, total = tl.reduce(((few >> 12) & FIELDS, rest, tl.sum(tl.reshape(mass, (SIZE // 8, 8)), 1)), 0, added)
    tl.store(levels, a)
    tl.store(levels + 1, b)
    tl.store(levels + 2, c)
    tl.store(levels + 3, d)
    tl.store(levels + 4, e)
    return total


@triton.jit
def look_down(
    words, head, sums, levels, offsets, total, CHUNKS: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Stores the last level of a row that top-k, or without top-k top-p, can reach. Candidates are the keys in the levels up to
    it; their numbers before each chunk and in total are stored too.

    For top-p, the mass of all levels after a level is needed. It is bounded by the largest mass of each of these levels times
    its number of tokens.
    """
    c = tl.arange(0, PADDED)[:, None]
    level = tl.arange(0, 32)[None, :]
    exist = (c < CHUNKS) & (level < _LEVELS)
    word, field = tl.where(level < 16, level % 4, 4), tl.where(level < 16, level // 4, level % 4)
    packed = tl.load(levels + c * 5 + word, mask=exist, other=0)
    count = ((packed >> (field * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)
    of_level = tl.sum(count, 0)
    top_k = tl.load(words + _TOP_K)
    if top_k > 0:
        reached = tl.cumsum(of_level, 0) >= top_k
    else:
        octave = tl.maximum(40 - 2 * tl.arange(0, 32), 0).to(tl.int64)
        most = of_level.to(tl.int64) << octave
        below = tl.sum(most, 0) - tl.cumsum(most, 0)
        reached = total - below >= share(total, real(words + _TOP_P))
    last = tl.minimum(tl.sum(1 - reached.to(tl.int32), 0), _LEVELS - 1)
    inside = tl.sum(tl.where(level <= last, count, 0), 1)
    chunk = tl.arange(0, PADDED)
    tl.store(offsets + chunk, tl.cumsum(inside, 0) - inside, mask=chunk < CHUNKS)
    tl.store(offsets + CHUNKS, tl.sum(inside, 0))
    tl.store(head + _LEVEL, last)


@triton.jit
def weigh(
    logits, rows, settings, counts, bias, masks, ends, heads, sums, levels, offsets, totals, arrived, tokens, positions,
    out_tokens, out_logprobs, slots,
    V: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    ENDS: tl.constexpr, OVERLAP: tl.constexpr, OF_ROWS: tl.constexpr,
):  # fmt: skip
    """Computes the mass of a chunk, and of a row; samples rows without top-k and top-p."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    chunk, b = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + b)
    words = settings + (b if OF_ROWS else slot) * _WORDS
    temperature, flags, least = real(words + _TEMPERATURE), tl.load(words + _FLAGS), least_of(words)
    logits += b.to(tl.int64) * STRIDE
    counts += slot.to(tl.int64) * V
    bias += slot.to(tl.int64) * V
    masks += tl.load(words + _MASK).to(tl.int64) * ((V + 31) // 32)
    head = heads + b * _HEAD
    if OVERLAP:
        cuda.gdc_wait()
    if temperature > 0.0:
        best, scale = real(head + _BEST), tl.div_rn(_KEY_SCALE, temperature)
        key = keys_of(logits, chunk, best, scale, words, counts, bias, masks, ends, flags, V, SIZE, ENDS)
        mass = masses(key)
        if flags & _CUT:
            of_this = store_counts(levels + (b * CHUNKS + chunk) * 5, key, mass, SIZE)
        else:
            of_this = tl.sum(tl.where(mass >= least, mass, 0), 0)
        tl.store(sums + b * CHUNKS + chunk, of_this)
        if last_to_arrive(arrived + b, CHUNKS):
            c = tl.arange(0, PADDED)
            of_chunk = tl.load(sums + b * CHUNKS + c, mask=c < CHUNKS, other=0)
            total = tl.sum(of_chunk, 0)
            if flags & _CUT:
                tl.store(totals + b, total)
                look_down(
                    words, head, sums, levels + b * CHUNKS * 5, offsets + b * (CHUNKS + 1), total, CHUNKS, PADDED
                )  # fmt: skip
            else:
                target = target_of(seed_of(words), tl.load(words + _GENERATED), total)
                chunk = tl.sum((tl.cumsum(of_chunk, 0) <= target).to(tl.int32), 0)
                target -= tl.sum(tl.where(c < chunk, of_chunk, 0), 0)
                key = keys_of(logits, chunk, best, scale, words, counts, bias, masks, ends, flags, V, SIZE, ENDS)
                mass = masses(key)
                running = tl.cumsum(tl.where(mass >= least, mass, 0), 0)
                token = chunk * SIZE + tl.sum((running <= target).to(tl.int32), 0)
                feed_back(
                    token, b, slot, flags, logits, words, counts, real(head + _LARGEST), real(head + _LOG_SUM), slots, tokens,
                    positions, out_tokens, out_logprobs, OF_ROWS,
                )  # fmt: skip


@triton.jit
def search(keys, n, level, total, words, TILE: tl.constexpr):
    """Returns the index of the sampled one of n candidates, after top-k, top-p and min-p. `total` is the row's mass; with
    top-k, top-p refers to the mass that top-k keeps."""
    top_k, top_p = tl.load(words + _TOP_K), real(words + _TOP_P)
    last = tl.full((), _KEYS - 1, tl.int32)
    if top_k > 0:
        last = threshold(keys, n, tl.minimum(top_k, n), level << 16, 16, False, TILE)
        total = mass_up_to(keys, n, last, 0, TILE)
    if top_p < 1.0:
        last = threshold(keys, n, share(total, top_p), tl.full((), 0, tl.int32), 22, True, TILE)
    return drawn(keys, n, last, least_of(words), seed_of(words), tl.load(words + _GENERATED), TILE)


@triton.jit
def collect(
    logits, rows, settings, counts, bias, masks, ends, heads, offsets, lists,
    V: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    ENDS: tl.constexpr, OVERLAP: tl.constexpr, OF_ROWS: tl.constexpr,
):  # fmt: skip
    """Appends the candidates of a chunk, in order, to the row's list."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    chunk, b = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + b)
    words = settings + (b if OF_ROWS else slot) * _WORDS
    temperature, flags = real(words + _TEMPERATURE), tl.load(words + _FLAGS)
    logits += b.to(tl.int64) * STRIDE
    counts += slot.to(tl.int64) * V
    bias += slot.to(tl.int64) * V
    masks += tl.load(words + _MASK).to(tl.int64) * ((V + 31) // 32)
    offset = offsets + b * (CHUNKS + 1) + chunk
    if OVERLAP:
        cuda.gdc_wait()
    if (temperature > 0.0) & ((flags & _CUT) != 0):
        before = tl.load(offset)
        if tl.load(offset + 1) > before:
            head = heads + b * _HEAD
            best, scale = real(head + _BEST), tl.div_rn(_KEY_SCALE, temperature)
            key = keys_of(logits, chunk, best, scale, words, counts, bias, masks, ends, flags, V, SIZE, ENDS)
            inside = (key >> 16 <= tl.load(head + _LEVEL)).to(tl.int32)
            tl.store(lists + b.to(tl.int64) * V + before + tl.cumsum(inside, 0) - 1, key, mask=inside != 0)


@triton.jit
def settle(
    logits, rows, settings, counts, bias, masks, ends, heads, offsets, totals, lists, tokens, positions, out_tokens,
    out_logprobs, slots,
    V: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    ENDS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr, OF_ROWS: tl.constexpr,
):  # fmt: skip
    """Samples a row with top-k or top-p: finds the sampled candidate's index in the list, then its chunk, then its token."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    b = tl.program_id(0)
    slot = tl.load(rows + b)
    words = settings + (b if OF_ROWS else slot) * _WORDS
    temperature, flags = real(words + _TEMPERATURE), tl.load(words + _FLAGS)
    logits += b.to(tl.int64) * STRIDE
    counts += slot.to(tl.int64) * V
    bias += slot.to(tl.int64) * V
    masks += tl.load(words + _MASK).to(tl.int64) * ((V + 31) // 32)
    head, offsets = heads + b * _HEAD, offsets + b * (CHUNKS + 1)
    if OVERLAP:
        cuda.gdc_wait()
    if (temperature > 0.0) & ((flags & _CUT) != 0):
        level = tl.load(head + _LEVEL)
        found = search(lists + b.to(tl.int64) * V, tl.load(offsets + CHUNKS), level, tl.load(totals + b), words, TILE)
        c = tl.arange(0, PADDED)
        before = tl.load(offsets + c, mask=c < CHUNKS, other=V)
        chunk = tl.sum((before <= found).to(tl.int32), 0) - 1
        rank = found - tl.load(offsets + chunk)
        best, scale = real(head + _BEST), tl.div_rn(_KEY_SCALE, temperature)
        key = keys_of(logits, chunk, best, scale, words, counts, bias, masks, ends, flags, V, SIZE, ENDS)
        inside = tl.cumsum((key >> 16 <= level).to(tl.int32), 0)
        token = chunk * SIZE + tl.sum((inside <= rank).to(tl.int32), 0)
        feed_back(
            token, b, slot, flags, logits, words, counts, real(head + _LARGEST), real(head + _LOG_SUM), slots, tokens,
            positions, out_tokens, out_logprobs, OF_ROWS,
        )  # fmt: skip


class SamplePlan:
    """The plan of a call for one shape: created once, called many times.

    `rows`: B. `vocab`: V. `stride`: elements between rows of logits. `slots`: number of slots. `ends`: number of stop tokens.
    `filters`, `of_rows`: `any_filter` and `of_rows` of ops/sample.py. A plan serves one GPU, one type and alignment of logits.
    """

    def __init__(
        self, rows: int, vocab: int, stride: int, slots: int, ends: int, filters: bool, overlap: bool, *, of_rows: bool = False
    ) -> None:
        self.rows, self.vocab, self.slots, self.filters = rows, vocab, slots, filters
        self.chunks = -(-vocab // SIZE)
        sizes = (vocab, stride, SIZE, self.chunks, triton.next_power_of_2(self.chunks), ends)
        grid = (self.chunks, rows, 1)
        self.survey = Launcher(survey, grid, WARPS, overlap=overlap)
        self.weigh = Launcher(weigh, grid, WARPS, overlap=overlap)
        self.collect = Launcher(collect, grid, WARPS, overlap=overlap)
        self.settle = Launcher(settle, (rows, 1, 1), SEARCH_WARPS, overlap=overlap)
        last = overlap, of_rows
        self.of_survey, self.of_chunks, self.of_settle = (*sizes, filters, *last), (*sizes, *last), (*sizes, TILE, *last)

    @property
    def workspace(self) -> tuple[int, int]:
        """Number of 32-bit words of the workspace, and of int32 counters, which are zero before and after a call."""
        return self.rows * sum(self._parts), self.rows

    @property
    def _parts(self) -> tuple[int, ...]:
        """Numbers of 32-bit words per row, for each array of the workspace."""
        if not self.filters:
            return (4 * self.chunks,)
        return (2 * self.chunks, 10 * self.chunks, 2, 4 * self.chunks, HEAD, self.chunks + 1, self.vocab)

    def __call__(self, given: SampleInputs, space: Tensor, arrived: Tensor) -> None:
        """Samples; `space` float32 and `arrived` are the workspace, all tensors on the current device."""
        logits, rows, settings, counts, bias, masks, ends, *fed, _, _ = given
        of_slots = (logits, rows, settings, counts, bias, masks, ends)
        parts = space.view(torch.int32).split([self.rows * words for words in self._parts])
        if not self.filters:
            self.survey(*of_slots, parts[0], parts[0], arrived, *fed, self.slots, *self.of_survey)
            return
        sums, levels, totals = (part.view(torch.int64) for part in parts[:3])
        chunks, heads, offsets, lists = parts[3:]
        self.survey(*of_slots, chunks, heads, arrived, *fed, self.slots, *self.of_survey)
        self.weigh(*of_slots, heads, sums, levels, offsets, totals, arrived, *fed, self.slots, *self.of_chunks)
        self.collect(*of_slots, heads, offsets, lists, *self.of_chunks)
        self.settle(*of_slots, heads, offsets, totals, lists, *fed, self.slots, *self.of_settle)
