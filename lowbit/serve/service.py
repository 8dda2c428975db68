"""What the routes share: the model, the engine's thread, how much of both is taken, and whether requests are welcome."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbit.engine import Engine
from lowbit.models.generation import sampling_settings
from lowbit.serve.chat import TokenTexts
from lowbit.serve.errors import ApiError, unavailable
from lowbit.serve.limits import Limits
from lowbit.serve.metrics import Metrics
from lowbit.serve.prompts import Prompts
from lowbit.serve.worker import MOST_FAILURES, Worker


def configured(model: PreTrainedModel) -> dict[str, Any]:
    """Sampling settings of the model's generation config, for requests that state none; raises ValueError for values that
    nothing can be sampled with."""
    try:
        return sampling_settings(model.generation_config.to_diff_dict())
    except ValueError as error:
        raise ValueError(f"generation_config.json of {model.name_or_path}: {error}") from None


def is_local(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class State(str, Enum):
    """What a server does with requests."""

    WARMING = "warming up"
    READY = "ready"
    DRAINING = "shutting down"


@dataclass
class Seats:
    """Places for texts, those that wait among them; taken by a request and given back at its end."""

    count: int
    taken: int = 0

    def take(self, texts: int) -> None:
        """Raises ApiError if there are not so many."""
        if self.taken + texts > self.count:
            why = f"{self.taken:,} of {self.count:,} texts are being computed or wait, {texts:,} more do not fit; try again"
            raise ApiError(429, why, code="queue_full", headers={"retry-after": "1"})
        self.taken += texts

    def give_back(self, texts: int) -> None:
        """The texts of one request, at its end."""
        self.taken -= texts


@dataclass
class Service:
    """One model as it is served under the name `name`; `key` is what clients have to know, None for nothing.

    `local`: whether only this machine can connect. `defaults`: settings for requests that do not say
    (`configured`). `worker` is started by the server.
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
        self.metrics = Metrics(engine)
        self.seats = Seats(self.limits.seats)
        most = min(self.limits.max_prompt, engine.max_length - 1)
        self.vocab = engine.slots.sampling.counts.shape[1]
        self.prompts = Prompts(self.tokenizer, most, self.vocab, self.limits)
        self.worker = Worker(engine, self.metrics, self.prompts)
        self.token_texts = TokenTexts(self.tokenizer)

    def check_key(self, authorization: str | None) -> None:
        """Raises ApiError unless the header holds the key; the time it takes says nothing of the key."""
        if self.key is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        wanted, found = (hashlib.sha256(value.encode()).digest() for value in (self.key, given.strip()))
        if not hmac.compare_digest(wanted, found) or scheme.lower() != "bearer":
            why = "this server asks for its API key, as `Authorization: Bearer KEY`"
            raise ApiError(401, why, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def check_ready(self) -> None:
        """Raises ApiError while no text can begin."""
        if self.state is not State.READY:
            raise unavailable(f"the server is {self.state.value}", 5)

    def check_model(self, name: str) -> None:
        """Raises ApiError for another model than the one that there is."""
        if name != self.name:
            raise ApiError(404, f"model: there is only {self.name!r} here, got {name!r}", "model", "model_not_found")

    @property
    def healthy(self) -> bool:
        """Whether texts come out."""
        return not self.worker.dead and self.worker.failures < MOST_FAILURES
