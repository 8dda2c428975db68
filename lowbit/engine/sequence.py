"""A sequence, the state of a submitted request: its sampled tokens, its finish reason, its slot and its pages."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from lowbit.engine.failure import RequestFailed
from lowbit.engine.request import Request, SampledToken

FIRST_SHARE = 0.5
"""Share of guesses that is assumed to be right in a new sequence."""

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
    """Its prompt or its `on_token` raised an error, its grammar cannot be followed, its logits are NaN or infinite, or its step
    or the engine failed: `Sequence.error` says which."""
    NONE = "none"
    """Not finished yet. DeepSpeed-MII's streams have it; a finished response never does."""


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
    """Number of sampled tokens, including those that the host has not read yet. A step with guesses counts as one token until
    it is read."""
    prefilled: bool = False
    """True once the prompt is computed. From then on each step samples a token."""
    grammar: GrammarState | None = None
    """The state of the request's grammar after the sampled tokens; None without a grammar."""
    grammar_failed: bool = False
    """True if the sequence failed because its grammar cannot be followed any further. The request is then at fault."""

    adapter: int = -1
    """Index of its LoRA adapter among the engine's; -1 without one. Only sequences with the same adapter share cached pages."""

    lookup: PromptLookup | None = None
    """Guesses its next tokens by prompt lookup; None without it."""
    share: float = FIRST_SHARE
    """Share of the draft model's latest guesses that were right."""
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
        """Position of the last sampled token, which is the input of the next step."""
        return len(self.request.prompt) + self.launched_tokens - 1
