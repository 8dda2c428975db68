"""A request: a prompt and how to continue it. Its state during computation is a `Sequence`."""

from __future__ import annotations

import numbers
from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lowbit.ops.sample import Sampling, is_whole

if TYPE_CHECKING:
    from lowbit.engine.grammar import CompiledGrammar
    from lowbit.engine.sequence import Sequence

MOST_LOGPROBS = 20
"""Upper limit of `Request.top_logprobs`, as in OpenAI's API."""


class SampledToken(NamedTuple):
    """A sampled token with its log-probability under the model, before temperature and filters. `top_logprobs`: the most likely
    tokens at its position, each as (token, log-probability)."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt that an engine continues by at most `limit` tokens. `Engine.submit` returns its `Sequence`.

    Args:
        prompt: token ids, at least one.
        stop_token_ids: tokens after which the sequence finishes.
        on_token: called with each sampled token in order; the sequence finishes if it returns True.
        top_logprobs: number of most likely tokens to report with each sampled token, up to 20.
        grammar: restricts the sequence's text; the sequence finishes when its text is complete. It cannot be combined with
            `Sampling.min_new_tokens`, which would suppress the stop token that ends a complete text.
        adapter: name of the engine's LoRA adapter that computes the sequence; None for the model without an adapter.

    Raises ValueError for a field of a wrong type or out of its range.
    """

    prompt: abc.Sequence[int]
    limit: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()
    on_token: abc.Callable[[SampledToken], bool] | None = None
    top_logprobs: int = 0
    grammar: CompiledGrammar | None = None
    adapter: str | None = None
    _sequence: Sequence | None = field(default=None, init=False, repr=False)
    """Set once by `Sequence.start`. Deprecated attributes of this class read the sequence's state through it."""

    def __post_init__(self) -> None:
        if isinstance(self.prompt, (str, bytes)) or not isinstance(self.prompt, abc.Sequence):
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
            raise ValueError(f"top_logprobs is a whole number up to {MOST_LOGPROBS}, got {self.top_logprobs!r}")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise ValueError(f"adapter is the name of an adapter, got {self.adapter!r}")
        if self.grammar is not None and self.sampling.min_new_tokens:
            raise ValueError(f"a grammar ends its text by itself, got min_new_tokens={self.sampling.min_new_tokens} with one")

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of its sequence, prompt included."""
        return len(self.prompt) + self.limit


def _check_tokens(what: str, tokens: abc.Collection[int]) -> None:
    """Raises ValueError for tokens that are not integers. Only the set of their types is checked: it is built without a Python
    loop over the tokens."""
    kinds = set(map(type, tokens))
    if any(kind is bool or not issubclass(kind, numbers.Integral) for kind in kinds):
        wrong = next(token for token in tokens if not is_whole(token))
        raise ValueError(f"{what} has token numbers, got {wrong!r}")
