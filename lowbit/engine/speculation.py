"""Speculation: several tokens of a sequence are guessed, and one step computes and samples after all of them.

A guess is accepted if it is the token that the step sampled before it, so a sequence has the tokens and random numbers of plain
decoding: sampling after each row takes the row's own logits, counter and seed, and a token that differs from the guess is kept
in its place. This is rejection sampling with a certain proposal: a guess x is accepted with the probability p(x), and the token
that replaces it is distributed as p without x.

Guesses come from a draft model (draft.py), or from the sequence itself: what followed its last tokens the last time (prompt
lookup; Saxena, 2023). Where a grammar allows one continuation only (grammar.py), its tokens are guesses that are always right.
Looking them up costs microseconds, so that each token, also of plain steps, tells how often such guesses are right in this
sequence. A step verifies those that pay by that share: prose costs nothing.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.engine.sequence import FIRST_SHARE, Sequence
from lowbit.kernels.reference import sampling

if TYPE_CHECKING:
    from lowbit.engine.draft import DraftModel

MOST_DRAFTS = 7
"""Maximum number of guessed tokens of a sequence in a step: 8 rows with the one before them, the tile of one mma.sync."""

MOST_ROWS = 64
"""Maximum number of rows of a step with guesses: more leave the chain of five launches a layer (engine/chain.py)."""

NGRAMS = (3, 2)
"""Numbers of last tokens that are looked up, in this order."""

LOOKED_UP = 8192
"""Maximum number of prompt tokens that are looked up, the last ones: their index takes some milliseconds and 2 MB."""

REMEMBERED = 8
"""Number of guesses over which the share of right ones is averaged, with falling weights."""

FORGOTTEN = 128
"""Number of tokens after which the share of a draft model's right guesses has mostly returned to the assumed one, so that
guesses are tried again after some hundred tokens."""

STEP_COST, VERIFY_COST = 50.0, 10.0
"""Costs of a step and of verifying in it, in those of a row. A step of Llama-3-8B's shape in int4 takes 1.5 ms, and
0.03 ms a row up to 64 rows (docs/internals/engine.md). Verifying adds a launch a layer, and the host reads the tokens before
the next step is launched: about 0.3 ms together. Other models differ less in these ratios than texts differ in their shares.
"""


class PromptLookup:
    """Guesses the next tokens of a sequence by its own earlier tokens; `share`: of guesses that were right lately."""

    def __init__(self, tokens: abc.Sequence[int]) -> None:
        self._tokens = list(tokens[-LOOKED_UP:])
        self._after = [_indexed(self._tokens, n) for n in NGRAMS]
        self._match = self._search()
        self.share = FIRST_SHARE

    def append(self, token: int) -> None:
        """Adds the sequence's next token, and counts whether it was the guessed one."""
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
        """Returns `count` guessed tokens; a match that reaches the end of the sequence goes on with the guesses."""
        assert self._match is not None
        guessed: list[int] = []
        for at in range(self._match, self._match + count):
            guessed.append(self._tokens[at] if at < len(self._tokens) else guessed[at - len(self._tokens)])
        return tuple(guessed)

    def _search(self) -> int | None:
        """Returns the index of the token that followed the last tokens the last time; None if they are new."""
        for n, after in zip(NGRAMS, self._after, strict=True):
            found = after.get(tuple(self._tokens[-n:]))
            if found is not None:
                return found
        return None


def _indexed(tokens: list[int], n: int) -> dict[tuple[int, ...], int]:
    """Returns for each n tokens but the last ones the index of the token that followed them the last time."""
    return dict(zip(zip(*(tokens[i:] for i in range(n)), strict=False), range(n, len(tokens)), strict=False))


@dataclass
class Speculation:
    """Decides which guesses a step verifies, up to `most` of a sequence, and counts them. `draft` guesses if there is one, else
    the sequences' own texts. stopped: nothing is guessed any more.

    steps: steps with guesses. sequences: sequences in these steps, each of which would have sampled one token. drafted,
    accepted: guesses that were verified, and those that were right. draft_cost: cost of a step of the draft model.
    """

    most: int
    draft: DraftModel | None = None
    draft_cost: float = 0.0
    stopped: bool = False
    steps: int = 0
    sequences: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence had of a step with guesses, on average; 1 before the first one."""
        return 1 + self.accepted / self.sequences if self.sequences else 1.0

    def __str__(self) -> str:
        source = "from its own text" if self.draft is None else "by a draft model"
        return f"steps verify up to {self.most} guessed tokens of a sequence, {source}"

    def follow(self, sequence: Sequence) -> None:
        """Adds the token of a sequence that the host has read last."""
        if self.draft is not None:
            sequence.share += (FIRST_SHARE - sequence.share) / FORGOTTEN
        elif sequence.lookup is not None:
            sequence.lookup.append(sequence.sampled[-1].token)
        elif is_supported(sequence):
            sequence.lookup = PromptLookup(sequence.tokens)

    def plan(self, sequences: abc.Sequence[Sequence], unread: bool = False) -> dict[Sequence, int]:
        """Returns how many guesses of each sequence a step verifies; none if they are not expected to pay. unread: the host has
        not read the tokens of the step in flight.

        Rows are added by falling probability, as long as each is expected to sample more tokens for its cost than the step
        without it. The step must then do so beside one without guesses. Steps of a draft model are shared by all sequences, so
        their number is tried from 1 to `most`.
        """
        forced = {sequence: len(tokens) for sequence in sequences if (tokens := forced_tokens(sequence, unread))}
        shares = {sequence: share for sequence in sequences if (share := self._share(sequence)) is not None}
        if self.stopped:
            shares = {}
        if not (shares or forced) or len(sequences) >= MOST_ROWS:
            return {}
        depths = [self.most] if self.draft is None or not shares else range(1, self.most + 1)
        best, chosen = len(sequences) / (STEP_COST + len(sequences)), dict[Sequence, int]()
        for depth in depths:
            drafting = (depth + 1) * self.draft_cost if shares else 0.0
            cost = STEP_COST + VERIFY_COST + len(sequences) + drafting
            rate, counts = _rows(shares, {s: min(n, self.most) for s, n in forced.items()}, len(sequences), depth, cost)
            if rate > best and counts:
                best, chosen = rate, counts
        return chosen

    def _share(self, sequence: Sequence) -> float | None:
        """Returns the share of a sequence's guesses that were right lately; None if nothing is guessed."""
        if self.draft is not None:
            return sequence.share if sequence.sampled and is_supported(sequence) else None
        return sequence.lookup.share if sequence.lookup is not None and sequence.lookup.guesses else None

    def guess(self, counts: abc.Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Returns as many guesses of each sequence; those of a draft model are computed now (`DraftModel.guess`)."""
        guessed = {sequence: forced_tokens(sequence)[:k] for sequence, k in counts.items() if sequence.grammar is not None}
        others = {sequence: k for sequence, k in counts.items() if sequence.grammar is None}
        if self.draft is not None:
            return guessed | (self.draft.guess(others) if others else {})
        return guessed | {sequence: sequence.lookup.draft(k) for sequence, k in others.items() if sequence.lookup is not None}

    def count(self, sequences: abc.Sequence[Sequence], drafted: abc.Sequence[int], accepted: abc.Sequence[int]) -> None:
        """Counts a verified step: guesses, and those that were right, of each of its sequences."""
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
    """Returns (tokens per cost, guesses of each sequence) of a step of `count` sequences: rows of up to `depth` guesses, and of
    forced tokens, which are always right, are added by falling probability while they raise the tokens per cost."""
    rows = [
        (share**i, -number, sequence)
        for number, (sequence, share, most) in enumerate(
            (*((s, share, depth) for s, share in shares.items()), *((s, 1.0, most) for s, most in forced.items()))
        )
        if share * cost > count  # else not even its first guess pays
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
    """Returns the cost of a step of a draft model: its share of the weights, but at least a tenth of a step, for its
    launches."""
    return STEP_COST * min(1.0, max(0.1, draft_bytes / max(model_bytes, 1)))


def is_supported(sequence: Sequence) -> bool:
    """True if tokens of a sequence can be guessed. All rows are sampled at once, but penalties count the tokens of the rows
    before: such sequences have one row in every step. A grammar's mask depends on them too, so that of its sequences only
    forced tokens are guessed.
    """
    return sequence.grammar is None and not sequence.request.sampling.flags & sampling.PENALIZED


def forced_tokens(sequence: Sequence, unread: bool = False) -> tuple[int, ...]:
    """Returns the next tokens of a sequence that its grammar forces, after its tokens in flight if these are `unread`; empty
    without a grammar, with penalties, and for a finished sequence."""
    grammar = sequence.grammar
    if grammar is None or sequence.finish_reason is not None or sequence.request.sampling.flags & sampling.PENALIZED:
        return ()
    # The step in flight samples the first forced token of the state that the host has read.
    return grammar.forced[sequence.in_flight if unread else 0 :]
