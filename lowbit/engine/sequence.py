"""A sequence, the state of a submitted request: its sampled tokens, its finish reason, its slot and its pages."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from lowbit.engine.failure import RequestFailed
from lowbit.engine.request import Request, SampledToken

FIRST_SHARE = 0.5
"""Assumed share of right guesses of a new sequence."""

if TYPE_CHECKING:
    from lowbit.engine.grammar import GrammarState
    from lowbit.engine.speculation import PromptLookup


class FinishReason(str, Enum):
    """Why a sequence finished."""

    STOP = "stop"
    """A stop token or a stop string, or `Request.on_token` returned True."""
    LENGTH = "length"
    """The limit of tokens."""
    CANCELLED = "cancelled"
    """The caller cancelled the sequence."""
    FAILED = "failed"
    """Its prompt or its `on_token` raised an error, or its logits are NaN or infinite: `Sequence.error` says which."""
    NONE = "none"
    """Not finished yet: used in DeepSpeed-MII's streams, never in a finished response."""


@dataclass(eq=False)
class Sequence:
    """The state of a submitted request, which `Engine.submit` returns. Only the engine changes it.

    sampled: tokens that the host has read. finish_reason: None until the sequence finishes; set after `error`, which says why
    it failed. cached_tokens: prompt tokens whose keys and values were in the prefix cache.
    """

    request: Request
    sampled: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0

    slot: int | None = None
    """Its row in the device's page tables and sampling settings; None unless the sequence is running."""
    pages: list[int] = field(default_factory=list)
    """Its pages of the KV cache, in order."""
    computed_tokens: int = 0
    """Number of tokens whose keys and values are in the pages once all launched work has run."""
    launched_tokens: int = 0
    """Number of sampled tokens, with those that the host has not read yet: one of a step with guesses, until it is read."""
    prefilled: bool = False
    """True once the prompt is computed: each step then samples one more token."""
    grammar: GrammarState | None = None
    """How far the sampled tokens have followed the request's grammar; None without one."""
    grammar_failed: bool = False
    """True if the sequence failed since its grammar cannot be followed any further: the request is at fault."""

    adapter: int = -1
    """Number of its LoRA adapter among the engine's; -1 without one. Cached pages are shared within one adapter."""

    lookup: PromptLookup | None = None
    """Guesses its next tokens; None without speculation by prompt lookup."""
    share: float = FIRST_SHARE
    """Share of a draft model's guesses that were right lately."""
    drafted_tokens: int = 0
    """Number of tokens whose keys and values are in the pages of a draft model."""

    @classmethod
    def start(cls, request: Request) -> Sequence:
        """Returns a new sequence of a request. Raises ValueError if the request has one already."""
        if request._sequence is not None:
            raise ValueError("this request was submitted before: create another one")
        sequence = cls(copy.copy(request))  # a copy avoids a reference cycle, which only the garbage collector would free
        sequence.grammar = None if request.grammar is None else request.grammar.start()
        object.__setattr__(request, "_sequence", sequence)
        return sequence

    def check(self) -> None:
        """Raises RequestFailed if the sequence failed."""
        if self.finish_reason is FinishReason.FAILED:
            raise RequestFailed(f"this request failed after {len(self.sampled):,} tokens: {self.error}")

    @property
    def tokens(self) -> list[int]:
        """The prompt and all sampled tokens that the host has read."""
        return [*self.request.prompt, *(sampled.token for sampled in self.sampled)]

    @property
    def in_flight(self) -> int:
        """Number of sampled tokens that the host has not read yet."""
        return self.launched_tokens - len(self.sampled)

    @property
    def running_slot(self) -> int:
        """The slot of a running sequence."""
        assert self.slot is not None
        return self.slot

    @property
    def position(self) -> int:
        """Position of the last sampled token, which the next step computes."""
        return len(self.request.prompt) + self.launched_tokens - 1
