"""State shared by the routes: model, engine thread, quota of sequences, readiness."""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbit.engine import CompiledGrammar, Engine, Grammar, GrammarCompiler, GrammarsUnavailable
from lowbit.models.generation import sampling_settings
from lowbit.serve.chat import TokenTexts
from lowbit.serve.errors import ApiError, refused, unavailable
from lowbit.serve.limits import MOST_GRAMMAR_CHARACTERS, Limits
from lowbit.serve.metrics import Metrics
from lowbit.serve.prompts import Prompts
from lowbit.serve.tools import answer_format
from lowbit.serve.worker import MOST_FAILURES, Worker


def configured(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the sampling settings of the model's generation config, which are the defaults of requests. Raises ValueError for
    impossible values.
    """
    try:
        return sampling_settings(model.generation_config.to_diff_dict())
    except ValueError as error:
        raise ValueError(f"generation_config.json of {model.name_or_path}: {error}") from None


GRAMMARS_KEPT = 64
"""Number of compiled grammars that are kept for later requests."""


class Grammars:
    """Compiles the grammars of requests. `refusal` says why it cannot; it is "" if it can."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab: int, stop_token_ids: Sequence[int]) -> None:
        self.refusal = ""
        try:
            self._compile = functools.lru_cache(GRAMMARS_KEPT)(GrammarCompiler(tokenizer, vocab, stop_token_ids).compile)
        except GrammarsUnavailable as error:
            self.refusal = str(error)

    def compile(self, grammar: Grammar, param: str) -> CompiledGrammar:
        """Returns the compiled grammar of the field `param`. Raises ApiError, naming the field, if that is not possible."""
        if self.refusal:
            raise refused(param, self.refusal, "unsupported")
        if len(grammar.text) > MOST_GRAMMAR_CHARACTERS:
            why = f"a grammar has at most {MOST_GRAMMAR_CHARACTERS:,} characters, this one has {len(grammar.text):,}"
            raise refused(param, why)
        try:
            return self._compile(grammar)
        except ValueError as error:
            raise refused(param, str(error), "invalid_grammar") from error


def is_local(host: str) -> bool:
    """True for a loopback address, which only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class State(str, Enum):
    """State of a server; it accepts requests when READY."""

    WARMING = "warming up"
    READY = "ready"
    DRAINING = "shutting down"


@dataclass
class SequenceQuota:
    """Limits running and queued sequences. A request takes quota for its sequences and gives it back at its end."""

    count: int
    taken: int = 0

    def take(self, sequences: int) -> None:
        """Takes quota for a request's sequences; raises ApiError 429 if it is exhausted."""
        if self.taken + sequences > self.count:
            taken = f"{self.taken:,} of {self.count:,} sequences are being computed or wait"
            why = f"{taken}, {sequences:,} more do not fit; try again"
            raise ApiError(429, why, code="queue_full", headers={"retry-after": "1"})
        self.taken += sequences

    def give_back(self, sequences: int) -> None:
        """Gives back the quota of one request."""
        self.taken -= sequences


@dataclass
class Service:
    """One model, served as `name`, and its adapters, served under their own names. Raises ValueError for an adapter with the
    model's name.

    key: API key that clients must send, None for no key. local: only this machine can connect. defaults: default sampling
    settings of requests (`configured`). The server starts `worker`.
    """

    name: str
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    limits: Limits
    key: str | None = None
    local: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    state: State = State.WARMING
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        engine = self.engine
        self.adapters = () if engine.adapters is None else engine.adapters.names
        if self.name in self.adapters:
            raise ValueError(f"the model and an adapter are both named {self.name!r}: give the model another name (--name)")
        self.metrics = Metrics(engine)
        self.quota = SequenceQuota(self.limits.max_sequences)
        most = min(self.limits.max_prompt, engine.max_length - 1)
        self.vocab = engine.vocab
        self.grammars = Grammars(self.tokenizer, self.vocab, engine.stop_token_ids)
        self.prompts = Prompts(self.tokenizer, most, self.vocab, self.limits)
        self.worker = Worker(engine, self.metrics, self.prompts, grammars=not self.grammars.refusal)
        self.token_texts = TokenTexts(self.tokenizer)
        self.answer_format = answer_format(self.tokenizer)

    def report(self) -> list[str]:
        """Returns lines that say what answers may consist of: structured output, tool calls, reasoning."""
        structured = self.grammars.refusal or "by llguidance"
        formats = self.answer_format.report() if self.prompts.has_template else []
        return [f"structured output: {structured}", *formats]

    def check_key(self, authorization: str | None) -> None:
        """Raises ApiError unless the header has the key. The comparison takes constant time."""
        if self.key is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        expected, actual = (hashlib.sha256(value.encode()).digest() for value in (self.key, given.strip()))
        if not hmac.compare_digest(expected, actual) or scheme.lower() != "bearer":
            why = "this server asks for its API key, as `Authorization: Bearer KEY`"
            raise ApiError(401, why, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def check_ready(self) -> None:
        """Raises ApiError unless the server is ready."""
        if self.state is not State.READY:
            raise unavailable(f"the server is {self.state.value}", 5)

    def check_model(self, name: str) -> None:
        """Raises ApiError unless `name` is the name of the model or of an adapter."""
        if name != self.name and name not in self.adapters:
            known = f"only {self.name!r}" if not self.adapters else ", ".join(map(repr, (self.name, *self.adapters)))
            raise ApiError(404, f"model: there is {known} here, got {name!r}", "model", "model_not_found")

    def adapter_of(self, name: str) -> str | None:
        """Returns the adapter that a request for the model `name` is computed with; None for the model itself."""
        return name if name in self.adapters else None

    @property
    def healthy(self) -> bool:
        """False if the engine thread is dead or the last MOST_FAILURES sequences all failed."""
        return not self.worker.dead and self.worker.failures < MOST_FAILURES
