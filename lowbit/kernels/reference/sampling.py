"""Sampling of the next token of each request from its logits: penalties, top-k, top-p, min-p, sampling. Plain torch reference.

Order of operations as in Transformers (generation/logits_process.py): end-of-text tokens are banned before the minimum,
repetition penalty, presence and frequency penalty (OpenAI's, of generated tokens alone), bias, the grammar's mask, temperature,
top-k, top-p, min-p.

Each adjusted logit becomes an integer key, and all later arithmetic is on integers. So a kernel on any GPU, in blocks of any
size, samples the same token. With m the largest adjusted logit of a row, the key of a logit l is floor((m - l) * 2^15 * log2(e)
/ temperature). Its probability mass is the integer 2^(40 - key / 2^15), rounded down. It is 0 for keys of 40 * 2^15 and more
(logits 27.7 below m at temperature 1). Sums of masses are exact in 64 bits for up to 2^23 tokens. Tokens with the same key
(probabilities within 2e-5 of each other) count as equal: at a threshold of top-k or top-p all of them are kept. The random
number R has 64 bits: Philox4x32-10 (Salmon et al. 2011) of the seed and the number of tokens generated so far. The sampled
token is the first whose cumulative mass, in the order of tokens, exceeds R * total / 2^64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WORDS = 16
"""Number of 32-bit words of a slot's settings. One copy sets all of them, and they fit one cache line."""

TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, MINIMUM, SEED = range(9)
FLAGS, GENERATED, MASK = 10, 11, 12
"""Indices of words of a slot's settings; the seed takes two words. Word MASK is the slot's row in `masks`."""

PENALIZED, BIASED, CUT, HELD, MASKED = 1, 2, 4, 8, 16
"""Bits of the flags word, set if the slot has a repetition, presence or frequency penalty; a logit bias; top-k or top-p; a
minimum number of tokens; a mask of allowed tokens."""

PROMPT = 1 << 30
"""Bit of a token's count that is set if the prompt contains the token."""

OCTAVE_BITS = 15
"""A mass halves every 2^OCTAVE_BITS keys."""

MASS_BITS = 40
"""log2 of the mass of the most likely token."""

KEYS = MASS_BITS << OCTAVE_BITS
"""Keys from here on have mass 0."""

KEY_SCALE = float(torch.tensor(2**OCTAVE_BITS / math.log(2), dtype=torch.float32))
"""Keys per logit difference of 1, in float32."""

COEFFICIENTS = (1488514810, 515782961, 118750274, 19769430, 2029222)
"""Coefficients c0 to c4 in units of 2^-31: for f in [0, 1), 2^-f is 1 - c0 f + c1 f^2 - c2 f^3 + c3 f^4 - c4 f^5 with an error
of at most 9e-8. Fitted for this module."""

FRACTION_BITS = 24
"""top-p and min-p are multiples of 2^-24."""


def philox(seed: int, counter: int) -> int:
    """64 random bits: the first two words, low and high, of Philox4x32-10 under the key `seed` (64 bits) at `counter` (32
    bits)."""
    low = 0xFFFFFFFF
    c = [counter & low, 0, 0, 0]
    keys = [seed & low, seed >> 32 & low]
    for _ in range(10):
        one, other = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [other >> 32 ^ c[1] ^ keys[0], other & low, one >> 32 ^ c[3] ^ keys[1], one & low]
        keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
    return c[1] << 32 | c[0]


def masses(keys: Tensor) -> Tensor:
    """Returns int64 masses 2^(40 - key / 2^15) of int64 keys in [0, KEYS], 0 at KEYS: an integer
    polynomial, rounded down."""
    fraction = (keys & ((1 << OCTAVE_BITS) - 1)) << (32 - OCTAVE_BITS)
    power = torch.full_like(keys, COEFFICIENTS[-1])
    for c in (*COEFFICIENTS[-2::-1], 1 << 31):
        power = c - (power * fraction >> 32)
    return torch.where(keys < KEYS, (power << MASS_BITS - 31) >> (keys >> OCTAVE_BITS), 0)


def distances(x: Tensor, largest: Tensor) -> Tensor:
    """Returns largest - x. Where x equals largest this is 0, also if both are infinite."""
    return torch.where(x == largest, 0.0, largest - x)


def cleaned(logits: Tensor) -> Tensor:
    """Converts logits to float32; NaN becomes -inf."""
    x = logits.float()
    return torch.where(x.isnan(), float("-inf"), x)


def is_distribution(logits: Tensor) -> bool:
    """True if the softmax of the logits is defined: -inf is allowed, but not everywhere; NaN and +inf are not."""
    return float(logits.float().amax()) not in (math.inf, -math.inf) and not bool(logits.isnan().any())


def adjusted(x: Tensor, words: Tensor, counts: Tensor, bias: Tensor, mask: Tensor, ends: Tensor) -> Tensor:
    """Applies the settings `words` int32 [WORDS] of a slot, counts int32 [V], bias float32 [V] and mask int32 [ceil(V / 32)] to
    logits x float32 [V], before temperature."""
    floats, flags = words.view(torch.float32), int(words[FLAGS])
    if flags & HELD and words[GENERATED] < words[MINIMUM]:
        x = x.index_fill(0, ends.long(), float("-inf"))
    if flags & PENALIZED:
        x = torch.where(counts != 0, torch.where(x > 0, x / floats[REPETITION], x * floats[REPETITION]), x)
        generated = counts & (PROMPT - 1)
        x = x - floats[FREQUENCY] * generated.float()
        x = x - torch.where(generated > 0, floats[PRESENCE], 0.0)
    x = x + bias if flags & BIASED else x
    return torch.where(allowed(mask, len(x)), x, float("-inf")) if flags & MASKED else x


def allowed(mask: Tensor, vocab: int) -> Tensor:
    """Returns bool [vocab]: bit t % 32 of word t // 32 of `mask` int32 [ceil(vocab / 32)] for each token t."""
    bits = mask[:, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).flatten()[:vocab] != 0


def kept(x: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Returns masses int64 [V] of adjusted logits x float32 [V], 0 for those that top-k, top-p and min-p remove.

    top-k keeps the k smallest keys (0: all). Of the rest, top-p keeps the smallest keys whose total mass reaches the fraction
    p. min-p keeps masses of at least min_p times the largest.
    """
    scale = torch.tensor(KEY_SCALE) / torch.tensor(temperature, dtype=torch.float32)
    keys = (distances(x, x.max()) * scale).clamp(max=float(KEYS)).long()
    mass = masses(keys)
    ordered, order = keys.sort()
    if 0 < top_k < len(keys):
        mass = torch.where(keys <= ordered[top_k - 1], mass, 0)
    running = mass[order].cumsum(0)
    if top_p < 1:
        last = int((running < share(int(running[-1]), top_p)).sum())
        mass = torch.where(keys <= ordered[last], mass, 0)
    return torch.where(mass >= fraction(min_p) << MASS_BITS - FRACTION_BITS, mass, 0)


def fraction(p: float) -> int:
    """floor(p * 2^24) of a float32 p."""
    return int(torch.tensor(p, dtype=torch.float32) * 2**FRACTION_BITS)


def share(total: int, p: float) -> int:
    """Returns the smallest integer mass that is at least the fraction p of the total."""
    return -(-total * fraction(p) >> FRACTION_BITS)


def sample_mass(mass: Tensor, seed: int, counter: int) -> int:
    """Samples a token: the one that the random number of (seed, counter) selects among masses int64 [V]."""
    running = mass.cumsum(0)
    target = philox(seed, counter) * int(running[-1]) >> 64
    return int((running <= target).sum())


class SampleInputs(NamedTuple):
    """The arguments of `lowbit::sample`: rows to sample, the state of all slots, and outputs; ops/sample.py documents each."""

    logits: Tensor
    rows: Tensor
    settings: Tensor
    counts: Tensor
    bias: Tensor
    masks: Tensor
    ends: Tensor
    tokens: Tensor
    positions: Tensor
    out_tokens: Tensor
    out_logprobs: Tensor
    any_filter: bool = True
    of_rows: bool = False


def sample_reference(
    logits: Tensor, rows: Tensor, words: Tensor, counts: Tensor, bias: Tensor, masks: Tensor, ends: Tensor, tokens: Tensor,
    positions: Tensor, out_tokens: Tensor, out_logprobs: Tensor, of_rows: bool = False,
) -> None:  # fmt: skip
    """Computes `ops.sample` row by row. `words`: int32 [slots, WORDS], or with `of_rows` [B, WORDS]; `ops.sample` documents the
    other arguments."""
    floats, seeds, idle = words.view(torch.float32), words.view(torch.int64)[:, SEED // 2], len(counts) - 1
    for i, slot in enumerate(rows.tolist()):
        raw, own = cleaned(logits[i]), i if of_rows else slot
        x = adjusted(raw, words[own], counts[slot], bias[slot], masks[int(words[own, MASK])], ends)
        temperature, top_k = float(floats[own, TEMPERATURE]), int(words[own, TOP_K])
        if temperature == 0:
            token = int((x == x.max()).nonzero()[0])
        else:
            mass = kept(x, temperature, top_k, float(floats[own, TOP_P]), float(floats[own, MIN_P]))
            token = sample_mass(mass, int(seeds[own]), int(words[own, GENERATED]))
        apart = distances(raw, raw.max())
        out_tokens[i] = token
        out_logprobs[i] = -apart[token] - apart.neg().exp().sum().log() if is_distribution(logits[i]) else math.nan
        if slot != idle and not of_rows:
            tokens[slot] = token
            positions[slot] += 1
            words[slot, GENERATED] += 1
            counts[slot, token] += int(words[slot, FLAGS]) & PENALIZED


class AcceptInputs(NamedTuple):
    """The arguments of `lowbit::accept`; ops/accept.py documents each."""

    rows: Tensor
    given: Tensor
    row_positions: Tensor
    ahead: Tensor
    sampled: Tensor
    settings: Tensor
    counts: Tensor
    tokens: Tensor
    positions: Tensor


def accepted(given: Sequence[int], sampled: Sequence[int]) -> int:
    """Returns how many tokens of `sampled` continue a sequence. sampled[i] was sampled after given[i]. The first one always
    continues it; a later one does if all before it do and the token that was given for it, given[i], equals sampled[i - 1]."""
    count = 1
    while count < len(given) and given[count] == sampled[count - 1]:
        count += 1
    return count


def accept_reference(a: AcceptInputs) -> None:
    """Computes `ops.accept`."""
    idle, ahead = len(a.counts) - 1, a.ahead.tolist()
    for i, slot in enumerate(a.rows.tolist()):
        if ahead[i] or slot == idle:
            continue
        rows = 1
        while i + rows < len(ahead) and ahead[i + rows] == rows:
            rows += 1
        count = accepted(a.given[i : i + rows].tolist(), a.sampled[i : i + rows].tolist())
        a.tokens[slot] = a.sampled[i + count - 1]
        a.positions[slot] = a.row_positions[i] + count
        a.settings[slot, GENERATED] += count
        if a.settings[slot, FLAGS] & PENALIZED:
            a.counts[slot] += torch.bincount(a.sampled[i : i + count], minlength=a.counts.shape[1])
