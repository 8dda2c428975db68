"""What Prometheus reads at /metrics: requests, tokens, queue, time to first token, time per token, pages of the cache."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lowbit.engine import Engine, FinishReason, Request

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
TOKEN_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """Counters of one server; nothing in them is a part of a request's text."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        kept: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("lowbit_requests", "HTTP requests by endpoint and status.", ("endpoint", "status"), **kept)
        self.texts = Counter("lowbit_texts", "Texts by why they ended.", ("end",), **kept)
        self.prompt_tokens = Counter("lowbit_prompt_tokens", "Tokens of prompts.", **kept)
        self.shared_tokens = Counter("lowbit_prompt_tokens_shared", "Those that were in the cache already.", **kept)
        self.tokens = Counter("lowbit_generated_tokens", "Tokens of texts.", **kept)
        self.first_token = Histogram(
            "lowbit_time_to_first_token_seconds",
            "From an encoded prompt to its first token.",
            buckets=SECONDS,
            **kept,
        )
        self.token = Histogram(
            "lowbit_time_per_token_seconds", "Mean time between the tokens of a text.", buckets=TOKEN_SECONDS, **kept
        )
        self.rounds = Histogram("lowbit_round_seconds", "Rounds of the engine.", buckets=TOKEN_SECONDS, **kept)
        scheduler = engine.scheduler
        gauges = (
            ("lowbit_texts_running", "Texts being computed.", lambda: len(scheduler.running)),
            ("lowbit_texts_waiting", "Texts that wait for a place.", lambda: len(scheduler.waiting)),
            ("lowbit_kv_pages_used", "Pages of keys and values that a text holds.",
             lambda: scheduler.pages.count - 1 - scheduler.pages.available),
            ("lowbit_kv_pages", "Pages of keys and values.", lambda: scheduler.pages.count - 1),
        )  # fmt: skip
        for name, meaning, value in gauges:
            Gauge(name, meaning, **kept).set_function(value)

    def ended(self, request: Request, end: FinishReason, first: float | None) -> None:
        """Counts a text that has ended, with the end that its client is told: what the engine held back may complete a stop
        string later. `first`: when its first token came, by `time.monotonic`."""
        self.texts.labels(end.value).inc()
        self.prompt_tokens.inc(len(request.prompt))
        self.shared_tokens.inc(request.cached_tokens)
        self.tokens.inc(len(request.sampled))
        if first is not None and len(request.sampled) > 1:
            self.token.observe((time.monotonic() - first) / (len(request.sampled) - 1))

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
