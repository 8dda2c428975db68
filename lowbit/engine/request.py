"""One text to be generated: what was asked, how far it is, and why it ended."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from lowbit.engine.failure import RequestFailed
from lowbit.ops.sample import Sampling, is_whole

MOST_LOGPROBS = 20
"""Likeliest tokens that can be asked for beside each one sampled, OpenAI's limit."""


class FinishReason(str, Enum):
    """Why a text ended."""

    STOP = "stop"
    """An end-of-text token, or `on_token` said so."""
    LENGTH = "length"
    """The limit of tokens."""
    CANCELLED = "cancelled"
    """The caller gave it up."""
    FAILED = "failed"
    """Computing it, or its `on_token`, raised an error, or its logits are no numbers: `Request.error` says which."""


class SampledToken(NamedTuple):
    """A token, the logarithm of the probability that the model itself gave it, the most likely (token, logarithm) beside it."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


_numbers = itertools.count()


@dataclass(eq=False)
class Request:
    """A text that an engine generates after `prompt`, at most `limit` tokens.

    `stop_token_ids`: tokens that end it, beside `limit`. `on_token` is called with each token in order and ends the text by returning True.
    `top_logprobs`: how many of the most likely tokens to report with each one. What follows is the engine's: `sampled` grows from
    step to step, `finish_reason` is set when there will be no more, `error` before it if it failed. Raises ValueError for a field of
    another type or out of its range.
    """

    prompt: Sequence[int]
    limit: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()
    on_token: Callable[[SampledToken], bool] | None = None
    top_logprobs: int = 0

    sampled: list[SampledToken] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str = field(default="", init=False)
    cached_tokens: int = field(default=0, init=False)
    """Tokens of the prompt that others' pages held already."""

    submitted: bool = field(default=False, init=False)
    number: int = field(default_factory=lambda: next(_numbers), init=False)
    slot: int | None = field(default=None, init=False)
    pages: list[int] = field(default_factory=list, init=False)
    computed: int = field(default=0, init=False)
    """Tokens whose keys and values are in the pages, or will be when what is launched has run."""
    launched: int = field(default=0, init=False)
    """Tokens sampled, those on the GPU that nobody has read yet among them."""
    prefilled: bool = field(default=False, init=False)
    """Whether all tokens known are computed, so that each step draws one more."""

    def __post_init__(self) -> None:
        if isinstance(self.prompt, (str, bytes)) or not isinstance(self.prompt, Sequence):
            raise ValueError(f"a prompt is a list of token numbers, got a {type(self.prompt).__name__}: encode text first")
        if len(self.prompt) == 0:
            raise ValueError("a prompt has at least one token, got none")
        _check_tokens("a prompt", self.prompt)
        if not is_whole(self.limit):
            raise ValueError(f"the limit of a request is a whole number of tokens, got {self.limit!r}")
        if self.limit < 1:
            raise ValueError(f"a request is for at least 1 token, got {self.limit}")
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling is a lowbit.engine.Sampling, got {self.sampling!r}")
        if not isinstance(self.stop_token_ids, (frozenset, set, list, tuple)):
            raise ValueError(f"stop_token_ids is a frozenset of token numbers, got {self.stop_token_ids!r}")
        _check_tokens("stop_token_ids", self.stop_token_ids)
        if self.on_token is not None and not callable(self.on_token):
            raise ValueError(f"on_token is a function of each token, got {self.on_token!r}")
        if not is_whole(self.top_logprobs) or not 0 <= self.top_logprobs <= MOST_LOGPROBS:
            raise ValueError(f"the most likely tokens can be had up to {MOST_LOGPROBS}, got {self.top_logprobs!r}")

    def check(self) -> None:
        """Raises RequestFailed if it failed."""
        if self.finish_reason is FinishReason.FAILED:
            raise RequestFailed(f"this text failed after {len(self.sampled):,} tokens: {self.error}")

    @property
    def tokens(self) -> list[int]:
        """The prompt and all tokens that were read."""
        return [*self.prompt, *(sampled.token for sampled in self.sampled)]

    @property
    def in_flight(self) -> int:
        """Tokens that are still on their way."""
        return self.launched - len(self.sampled)

    @property
    def row(self) -> int:
        """Its slot; for requests that are being computed."""
        assert self.slot is not None
        return self.slot

    @property
    def position(self) -> int:
        """Where the token stands that the next step computes: the last one sampled."""
        return len(self.prompt) + self.launched - 1


def _check_tokens(what: str, tokens: Collection[int]) -> None:
    """Raises ValueError for tokens that are not integers; which types there are is found without a loop of Python."""
    kinds = set(map(type, tokens))
    if any(kind is bool or not issubclass(kind, numbers.Integral) for kind in kinds):
        wrong = next(token for token in tokens if not is_whole(token))
        raise ValueError(f"{what} has token numbers, got {wrong!r}")
