"""Prometheus metrics at /metrics: requests, tokens, queue, time to first token, time per token, pages of the cache."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lowbit.engine import Engine, FinishReason, Sequence
from lowbit.kernels.choose.attention import PAGE

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
TOKEN_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)


class StepCollector(Collector):
    """Counts of the engine's steps, read when /metrics is requested: prompt tokens in steps that also decode, and guessed
    tokens."""

    def __init__(self, engine: Engine) -> None:
        self.budget, self.speculation = engine.step_budget, engine.speculation

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics."""
        steps = "Steps that computed prompt tokens beside decoding sequences."
        yield CounterMetricFamily("lowbit_mixed_steps", steps, value=self.budget.steps)
        yield CounterMetricFamily(
            "lowbit_mixed_prompt_tokens", "Prompt tokens in these steps.", value=self.budget.prompt_tokens
        )
        budget = "Maximum number of prompt tokens of such a step at present."
        yield GaugeMetricFamily("lowbit_mixed_step_budget", budget, value=self.budget.tokens)
        if (counts := self.speculation) is None:
            return
        counters = (
            ("lowbit_guessed_tokens", "Guessed tokens that steps verified.", counts.drafted),
            ("lowbit_accepted_tokens", "Guessed tokens that were right.", counts.accepted),
            ("lowbit_verified_sequences", "Sequences in steps that verified guesses, counted in each step.", counts.sequences),
        )
        for name, meaning, value in counters:
            yield CounterMetricFamily(name, meaning, value=value)
        meaning = "Mean tokens of a sequence in a step that verifies guesses; without guesses it is 1."
        yield GaugeMetricFamily("lowbit_tokens_per_verified_step", meaning, value=counts.tokens_per_step)
        if (ratio := counts.clock.ratio) is None or (speedup := counts.speedup) is None:
            return  # not known before some steps of both kinds have been timed
        meaning = "Time of a step that verifies guesses relative to a plain one of as many sequences, median of the latest."
        yield GaugeMetricFamily("lowbit_verified_step_time_ratio", meaning, value=ratio)
        meaning = "Tokens of a sequence in a step that verifies guesses by that time: how many times as fast these steps are."
        yield GaugeMetricFamily("lowbit_speculation_speedup", meaning, value=speedup)


class Metrics:
    """Metrics of one server; they contain no text of requests."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        registry: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("lowbit_requests", "HTTP requests by endpoint and status.", ("endpoint", "status"), **registry)
        self.texts = Counter("lowbit_texts", "Sequences by finish reason.", ("end",), **registry)
        self.prompt_tokens = Counter("lowbit_prompt_tokens", "Prompt tokens.", **registry)
        self.shared_tokens = Counter("lowbit_prompt_tokens_shared", "Prompt tokens found in the prefix cache.", **registry)
        self.tokens = Counter("lowbit_generated_tokens", "Sampled tokens.", **registry)
        self.adapters = () if engine.adapters is None else engine.adapters.names
        self.adapter_texts = Counter("lowbit_adapter_texts", "Sequences with an adapter.", ("adapter",), **registry)
        self.adapter_tokens = Counter(
            "lowbit_adapter_generated_tokens", "Sampled tokens of sequences with an adapter.", ("adapter",), **registry
        )
        for adapter in self.adapters:
            self.adapter_texts.labels(adapter)
            self.adapter_tokens.labels(adapter)
        self.first_token = Histogram(
            "lowbit_time_to_first_token_seconds",
            "From an encoded prompt to its first token.",
            buckets=SECONDS,
            **registry,
        )
        self.token = Histogram(
            "lowbit_time_per_token_seconds", "Mean time between the tokens of a sequence.", buckets=TOKEN_SECONDS, **registry
        )
        self.rounds = Histogram("lowbit_round_seconds", "Duration of the engine's steps.", buckets=TOKEN_SECONDS, **registry)
        scheduler, spec = engine.scheduler, engine.program.cache_spec

        def pages_used() -> int:
            return scheduler.pages.count - 1 - scheduler.pages.available

        gauges = (
            ("lowbit_texts_running", "Running sequences.", lambda: len(scheduler.running)),
            ("lowbit_texts_waiting", "Waiting sequences.", lambda: len(scheduler.waiting)),
            ("lowbit_kv_pages_used", "Pages of the KV cache in use.", pages_used),
            ("lowbit_kv_pages", "Pages of the KV cache.", lambda: scheduler.pages.count - 1),
            ("lowbit_kv_tokens_used", "Tokens that the KV pages in use can hold.", lambda: PAGE * pages_used()),
            ("lowbit_kv_tokens", "Tokens that all KV pages can hold.", lambda: PAGE * (scheduler.pages.count - 1)),
        )
        for name, meaning, value in gauges:
            Gauge(name, meaning, **registry).set_function(value)
        size = Gauge("lowbit_kv_bytes", "Memory of the KV cache, by format of keys and values.", ("format",), **registry)
        size.labels("16" if spec is None else str(spec.kv)).set(engine.program.page_bytes * scheduler.pages.count)

        self.registry.register(StepCollector(engine))

    def ended(self, sequence: Sequence, reason: FinishReason, first: float | None) -> None:
        """Counts a finished sequence with the finish reason sent to the client, which differs from the engine's if held-back
        text completes a stop string. `first`: time of its first token, by `time.monotonic`.
        """
        self.texts.labels(reason.value).inc()
        self.prompt_tokens.inc(len(sequence.request.prompt))
        self.shared_tokens.inc(sequence.cached_tokens)
        self.tokens.inc(len(sequence.sampled))
        if (adapter := sequence.request.adapter) is not None:
            self.adapter_texts.labels(adapter).inc()
            self.adapter_tokens.labels(adapter).inc(len(sequence.sampled))
        if first is not None and len(sequence.sampled) > 1:
            self.token.observe((time.monotonic() - first) / (len(sequence.sampled) - 1))

    def page(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
