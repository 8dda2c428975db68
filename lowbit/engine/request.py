"""A request: a prompt, how to continue it, the tokens sampled so far, and why it finished."""

from __future__ import annotations

import itertools
import numbers
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from lowbit.engine.failure import RequestFailed
from lowbit.ops.sample import Sampling, is_whole

MOST_LOGPROBS = 20
"""Upper limit of `Request.top_logprobs`, as in OpenAI's API."""


class FinishReason(str, Enum):
    """Why a sequence finished."""

    STOP = "stop"
    """A stop token or a stop string, or `Request.on_token` returned True."""
    LENGTH = "length"
    """The limit of tokens."""
    CANCELLED = "cancelled"
    """The caller cancelled the request."""
    FAILED = "failed"
    """Its prompt or its `on_token` raised an error, or its logits are NaN or infinite: `Request.error` says which."""
    NONE = "none"
    """Not finished yet: in streams of DeepSpeed-MII, never in a finished response."""


class SampledToken(NamedTuple):
    """A sampled token with its log-probability under the model, before temperature and filters; `top_logprobs`: the most likely
    tokens at its position, each as (token, log-probability)."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def likeliest(self) -> tuple[tuple[int, float], ...]:
        """Deprecated name of `top_logprobs`."""
        _warn("SampledToken", "likeliest", "top_logprobs")
        return self.top_logprobs


_numbers = itertools.count()


@dataclass(eq=False)
class Request:
    """A prompt that an engine continues by at most `limit` tokens.

    Args:
        prompt: token ids, at least one.
        stop_token_ids: tokens after which the sequence finishes.
        on_token: called with each sampled token in order; the sequence finishes if it returns True.
        top_logprobs: number of most likely tokens to report with each sampled token, up to 20.

    The engine sets the other fields: it appends to `sampled`, and sets `finish_reason` at the end, after `error` if the request
    failed. Raises ValueError for a field of a wrong type or out of its range.
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
    """Prompt tokens whose keys and values were in the prefix cache."""

    submitted: bool = field(default=False, init=False)
    number: int = field(default_factory=lambda: next(_numbers), init=False)
    slot: int | None = field(default=None, init=False)
    pages: list[int] = field(default_factory=list, init=False)
    computed: int = field(default=0, init=False)
    """Tokens whose keys and values are in the pages once all launched work has run."""
    launched: int = field(default=0, init=False)
    """Tokens sampled, including those on the GPU that the host has not read."""
    prefilled: bool = field(default=False, init=False)
    """True once the prompt is computed: each step then samples one more token."""

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
            raise ValueError(f"top_logprobs is a whole number up to {MOST_LOGPROBS}, got {self.top_logprobs!r}")

    def check(self) -> None:
        """Raises RequestFailed if the request failed."""
        if self.finish_reason is FinishReason.FAILED:
            raise RequestFailed(f"this request failed after {len(self.sampled):,} tokens: {self.error}")

    @property
    def tokens(self) -> list[int]:
        """The prompt and all sampled tokens that the host has read."""
        return [*self.prompt, *(sampled.token for sampled in self.sampled)]

    @property
    def in_flight(self) -> int:
        """Sampled tokens that the host has not read yet."""
        return self.launched - len(self.sampled)

    @property
    def row(self) -> int:
        """The slot of a running request."""
        assert self.slot is not None
        return self.slot

    @property
    def position(self) -> int:
        """Position of the token that the next step computes, the last one sampled."""
        return len(self.prompt) + self.launched - 1


def _check_tokens(what: str, tokens: Collection[int]) -> None:
    """Raises ValueError for tokens that are not integers; the set of their types is built without a Python loop."""
    kinds = set(map(type, tokens))
    if any(kind is bool or not issubclass(kind, numbers.Integral) for kind in kinds):
        wrong = next(token for token in tokens if not is_whole(token))
        raise ValueError(f"{what} has token numbers, got {wrong!r}")


_DEPRECATED = {
    "ends": "stop_token_ids",
    "watch": "on_token",
    "likeliest": "top_logprobs",
    "drawn": "sampled",
    "end": "finish_reason",
    "shared": "cached_tokens",
}
"""Fields of `Request` by their names until 2026-11."""


def _warn(owner: str, old: str, new: str) -> None:
    warnings.warn(f"{owner}.{old} is now {owner}.{new}", DeprecationWarning, stacklevel=3)


def _deprecated(old: str, new: str) -> property:
    def read(self: Request) -> Any:
        _warn("Request", old, new)
        return getattr(self, new)

    def write(self: Request, value: Any) -> None:
        _warn("Request", old, new)
        setattr(self, new, value)

    return property(read, write, doc=f"Deprecated name of `{new}`.")


def _accept_deprecated_names() -> None:
    """Adds the deprecated names to `Request`, as attributes and as arguments."""
    made = Request.__init__

    def init(self: Request, *args: Any, **arguments: Any) -> None:
        for old in {"ends", "watch", "likeliest"} & arguments.keys():
            _warn("Request", old, _DEPRECATED[old])
            arguments[_DEPRECATED[old]] = arguments.pop(old)
        made(self, *args, **arguments)

    init.__wrapped__ = made  # type: ignore[attr-defined]
    Request.__init__ = init  # type: ignore[method-assign]
    for old, new in _DEPRECATED.items():
        setattr(Request, old, _deprecated(old, new))


_accept_deprecated_names()
