"""Speculation: several tokens of a sequence are guessed, and one step computes and samples after all of them.

The last token of a sequence and each guess are a row of the step. Each row samples the next token with the logits, the counter
and the seed that a step of its own would have. A guess is accepted if the row before it sampled the same token. Otherwise the
sampled token is kept, and the rows after it are dropped. So a sequence has the same tokens as without guesses. This is
rejection sampling with a proposal of one token: a guess x is accepted with the probability p(x), and the token that replaces it
is distributed as p without x.

Guesses come from a draft model (draft.py), or from the sequence itself: its last tokens are looked up in its earlier text, and
the tokens that followed them there are the guesses (prompt lookup; Saxena, 2023). Where a grammar allows one continuation only
(grammar.py), its tokens are guesses that are always right. A lookup takes microseconds. So each new token is compared with a
guess, also in steps that verify none, to estimate the share of right guesses in this sequence. A step verifies only guesses
that are expected to pay. In prose few guesses are right, so no guess is verified and nothing is lost.
"""

from __future__ import annotations

import statistics
from collections import abc, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowbit.engine.sequence import FIRST_SHARE, Sequence
from lowbit.kernels.reference import sampling

if TYPE_CHECKING:
    from lowbit.engine.draft import DraftModel

MOST_DRAFTS = 7
"""Maximum number of guessed tokens of a sequence in a step. With the token before them they are 8 rows, the tile of one
mma.sync."""

MOST_ROWS = 64
"""Maximum number of rows of a step with guesses. Steps with more rows need more than the five launches a layer of
engine/chain.py."""

NGRAMS = (3, 2)
"""How many last tokens of a sequence are looked up. The first number is tried first."""

LOOKED_UP = 8192
"""Number of last tokens of a prompt in which a lookup searches. Their index takes some milliseconds and 2 MB."""

REMEMBERED = 8
"""Number of latest guesses over which the share of right guesses is averaged, with falling weights."""

FORGOTTEN = 128
"""Number of tokens after which a draft model's share of right guesses has mostly returned to FIRST_SHARE. So a sequence in
which guesses did not pay gets guesses again after some hundred tokens."""

STEP_COST, VERIFY_COST = 50.0, 10.0
"""Cost of a step, and additional cost of a step that verifies guesses. The unit is the cost of a row. A step of Llama-3-8B's
shape in int4 takes 1.5 ms, and 0.03 ms more for each row up to 64 rows (docs/internals/engine.md). A step with guesses has one
more launch a layer, and the host must read its tokens before it launches the next step: about 0.3 ms together. Small models and
plain steps in one launch pay more for it, so on a GPU the second number is that of the engine's own steps (`StepClock`) as soon
as it is known.
"""

MEASURED, ENOUGH = 9, 3
"""A cost is the median of the latest measurements, as soon as there are so many."""

MOST_COST = 2 * STEP_COST
"""Largest measured cost. With it guesses of a sequence that repeats a text still pay, so that they are measured again."""


class StepClock:
    """Measures what steps with guesses cost beside plain ones, by the times at which the host has read their tokens."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._costs: deque[float] = deque(maxlen=MEASURED)
        self._ratios: deque[float] = deque(maxlen=MEASURED)
        self._last: tuple[int, int, float] | None = None

    def read(self, sequences: int, guesses: int, now: float, alone: bool = True) -> None:
        """Takes the time `now`, in seconds, at which the tokens of a step were read. `alone`: see `InFlightStep`."""
        last, self._last = self._last, (sequences, guesses, now) if alone else None
        if last is None or self._last is None or last[0] != sequences:
            return
        taken = now - last[2]
        if not guesses:
            if not last[1]:  # launched ahead, while the step before was running
                self._plain.setdefault(sequences, deque(maxlen=MEASURED)).append(taken)
            return
        plain = self._plain.get(sequences, ())
        if len(plain) >= ENOUGH:
            ratio = taken / max(statistics.median(plain), 1e-9)
            self._ratios.append(ratio)
            cost = ratio * (STEP_COST + sequences) - STEP_COST - sequences - guesses
            self._costs.append(min(max(cost, 0.0), MOST_COST))

    @property
    def verify_cost(self) -> float | None:
        """Additional cost of a step that verifies guesses, in units of a row; None if it is not known."""
        return statistics.median(self._costs) if len(self._costs) >= ENOUGH else None

    @property
    def ratio(self) -> float | None:
        """Time of a step with guesses relative to a plain one; None if it is not known."""
        return statistics.median(self._ratios) if len(self._ratios) >= ENOUGH else None


class PromptLookup:
    """Guesses the next tokens of a sequence from its own earlier tokens. `share`: share of its latest guesses that were
    right."""

    def __init__(self, tokens: abc.Sequence[int]) -> None:
        self._tokens = list(tokens[-LOOKED_UP:])
        self._after = [_indexed(self._tokens, n) for n in NGRAMS]
        self._match = self._search()
        self.share = FIRST_SHARE

    def append(self, token: int) -> None:
        """Adds the sequence's next token, and updates `share` by whether the token was guessed right."""
        tokens, match = self._tokens, self._match
        right = match is not None and tokens[match] == token
        if match is not None:
            self.share += (right - self.share) / REMEMBERED
        for n, after in zip(NGRAMS, self._after, strict=True):
            if len(tokens) >= n:
                after[tuple(tokens[-n:])] = len(tokens)
        tokens.append(token)
        self._match = match + 1 if match is not None and right else self._search()

    @property
    def guesses(self) -> bool:
        """True if there is a guess."""
        return self._match is not None

    def draft(self, count: int) -> tuple[int, ...]:
        """Returns `count` guessed tokens. If the match reaches the end of the sequence, its own guesses continue it."""
        assert self._match is not None
        guessed: list[int] = []
        for at in range(self._match, self._match + count):
            guessed.append(self._tokens[at] if at < len(self._tokens) else guessed[at - len(self._tokens)])
        return tuple(guessed)

    def _search(self) -> int | None:
        """Returns the index of the token that followed the latest earlier occurrence of the last tokens; None if there is
        none."""
        for n, after in zip(NGRAMS, self._after, strict=True):
            found = after.get(tuple(self._tokens[-n:]))
            if found is not None:
                return found
        return None


def _indexed(tokens: list[int], n: int) -> dict[tuple[int, ...], int]:
    """Returns an index of all runs of n tokens, except the run at the end: the position of the token that followed the latest
    occurrence of each."""
    return dict(zip(zip(*(tokens[i:] for i in range(n)), strict=False), range(n, len(tokens)), strict=False))


@dataclass
class Speculation:
    """Decides which guesses a step verifies, up to `most` for each sequence, and counts them. The model `draft` guesses if
    there is one, else prompt lookup does. stopped: True if nothing is guessed any more.

    steps: number of steps with guesses. sequences: number of sequences in these steps, counted in each step. drafted: number of
    verified guesses. accepted: number of guesses that were right. waits: number of plain steps that were launched only after
    the tokens before them had been read, since guesses seemed to pay. draft_cost: cost of a step of the draft model. measured:
    whether costs are those that `clock` measures. Those of a draft model are assumed ones.
    """

    most: int
    draft: DraftModel | None = None
    draft_cost: float = 0.0
    stopped: bool = False
    steps: int = 0
    sequences: int = 0
    drafted: int = 0
    accepted: int = 0
    waits: int = 0
    measured: bool = False
    clock: StepClock = field(default_factory=StepClock)

    @property
    def verify_cost(self) -> float:
        """Additional cost of a step that verifies guesses, in units of a row."""
        measured = self.clock.verify_cost if self.measured and self.draft is None else None
        return VERIFY_COST if measured is None else measured

    @property
    def speedup(self) -> float | None:
        """Tokens of a sequence in a step with guesses, by the measured time of such a step relative to a plain one; None if it
        is not known."""
        ratio = self.clock.ratio
        return None if ratio is None else self.tokens_per_step / ratio

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a sequence got from a step with guesses; 1 before the first such step."""
        return 1 + self.accepted / self.sequences if self.sequences else 1.0

    def __str__(self) -> str:
        source = "from its own text" if self.draft is None else "by a draft model"
        return f"steps verify up to {self.most} guessed tokens of a sequence, {source}"

    def follow(self, sequence: Sequence) -> None:
        """Updates the state of speculation of a sequence after the host has read a token of it."""
        if self.draft is not None:
            sequence.share += (FIRST_SHARE - sequence.share) / FORGOTTEN
        elif sequence.lookup is not None:
            sequence.lookup.append(sequence.sampled[-1].token)
        elif is_supported(sequence):
            sequence.lookup = PromptLookup(sequence.tokens)

    def plan(self, sequences: abc.Sequence[Sequence], unread: bool = False) -> dict[Sequence, int]:
        """Returns how many guesses of each sequence a step verifies; an empty dict if guesses are not expected to pay. unread:
        True if the host has not read the tokens of the step in flight.

        Guesses are added in order of falling probability of being right, while each raises the expected tokens of the step
        relative to its cost. The step must also have more tokens for its cost than a step without guesses. All sequences share
        the steps of a draft model, so each number of guesses from 1 to `most` is tried.
        """
        forced = {sequence: len(tokens) for sequence in sequences if (tokens := forced_tokens(sequence, unread))}
        shares = {sequence: share for sequence in sequences if (share := self._share(sequence)) is not None}
        if self.stopped:
            shares = {}
        if not (shares or forced) or len(sequences) >= MOST_ROWS:
            return {}
        depths = [self.most] if self.draft is None or not shares else range(1, self.most + 1)
        # With a grammar every step reads the tokens before it, also one without guesses.
        waiting = VERIFY_COST if any(sequence.grammar is not None for sequence in sequences) else self.verify_cost
        best, chosen = len(sequences) / (STEP_COST + len(sequences)), dict[Sequence, int]()
        for depth in depths:
            drafting = (depth + 1) * self.draft_cost if shares else 0.0
            cost = STEP_COST + waiting + len(sequences) + drafting
            most = {s: min(n, self.most) for s, n in forced.items()}
            rate, counts = _rows(shares, most, len(sequences), depth, cost)
            if rate > best and counts:
                best, chosen = rate, counts
        return chosen

    def _share(self, sequence: Sequence) -> float | None:
        """Returns the share of a sequence's latest guesses that were right; None if nothing can be guessed now."""
        if self.draft is not None:
            return sequence.share if sequence.sampled and is_supported(sequence) else None
        return sequence.lookup.share if sequence.lookup is not None and sequence.lookup.guesses else None

    def guess(self, counts: abc.Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Returns counts[sequence] guesses of each sequence. A draft model computes its guesses now (`DraftModel.guess`)."""
        guessed = {sequence: forced_tokens(sequence)[:k] for sequence, k in counts.items() if sequence.grammar is not None}
        others = {sequence: k for sequence, k in counts.items() if sequence.grammar is None}
        if self.draft is not None:
            return guessed | (self.draft.guess(others) if others else {})
        return guessed | {sequence: sequence.lookup.draft(k) for sequence, k in others.items() if sequence.lookup is not None}

    def count(self, sequences: abc.Sequence[Sequence], drafted: abc.Sequence[int], accepted: abc.Sequence[int]) -> None:
        """Counts a step that verified guesses. `drafted`, `accepted`: numbers of guesses and of right guesses of each of its
        sequences."""
        self.steps += 1
        self.sequences += len(drafted)
        self.drafted += sum(drafted)
        self.accepted += sum(accepted)
        if self.draft is None:
            return
        for sequence, guesses, right in zip(sequences, drafted, accepted, strict=True):
            for i in range(min(guesses, right + 1)):
                sequence.share += ((i < right) - sequence.share) / REMEMBERED


def _rows(
    shares: dict[Sequence, float], forced: dict[Sequence, int], count: int, depth: int, cost: float
) -> tuple[float, dict[Sequence, int]]:
    """Returns (expected tokens per cost, guesses of each sequence) of a step of `count` sequences that costs `cost` without
    guesses. Each sequence has up to `depth` guesses, or its forced tokens, which are always right. Guesses are added in order
    of falling probability, while they raise the tokens per cost."""
    rows = [
        (share**i, -number, sequence)
        for number, (sequence, share, most) in enumerate(
            (*((s, share, depth) for s, share in shares.items()), *((s, 1.0, most) for s, most in forced.items()))
        )
        if share * cost > count  # otherwise not even the first guess of the sequence pays
        for i in range(1, min(most, sequence.request.limit - len(sequence.sampled) - 1) + 1)
    ]
    rows.sort(key=lambda row: row[:2], reverse=True)
    tokens, counts = float(count), dict[Sequence, int]()
    for probability, _, sequence in rows[: max(0, MOST_ROWS - count)]:
        if probability * cost <= tokens:
            break
        counts[sequence] = counts.get(sequence, 0) + 1
        tokens, cost = tokens + probability, cost + 1
    return tokens / cost, counts


def draft_step_cost(draft_bytes: int, model_bytes: int) -> float:
    """Returns the cost of a step of a draft model. It is the cost of a step of the model times the ratio of their weights in
    bytes. It is at least a tenth of a step, because of the launches."""
    return STEP_COST * min(1.0, max(0.1, draft_bytes / max(model_bytes, 1)))


def is_supported(sequence: Sequence) -> bool:
    """True if tokens of a sequence can be guessed. All rows of a step are sampled at once. But penalties of a row depend on the
    tokens that the rows before it sample, so a sequence with penalties has one row in every step. A grammar's mask depends on
    these tokens too, so only forced tokens are guessed for a sequence with a grammar.
    """
    return sequence.grammar is None and not sequence.request.sampling.flags & sampling.PENALIZED


def forced_tokens(sequence: Sequence, unread: bool = False) -> tuple[int, ...]:
    """Returns the next tokens of a sequence that its grammar forces. With `unread`, skips those that the step in flight
    samples. Empty without a grammar, with penalties, and for a finished sequence."""
    grammar = sequence.grammar
    if grammar is None or sequence.finish_reason is not None or sequence.request.sampling.flags & sampling.PENALIZED:
        return ()
    # `forced` begins after the last token that the host has read, so the step in flight samples the first of these tokens.
    return grammar.forced[sequence.in_flight if unread else 0 :]
