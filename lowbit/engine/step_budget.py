"""How many prompt tokens a step computes beside sequences that decode, so that their next tokens come within a stated time.

Dynamic SplitFuse (DeepSpeed-FastGen, arXiv:2401.08671): prompts are split so that steps have a steady size. Here the size
follows the measured time of steps, which depends on model, format, GPU, contexts and the number of sequences.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

STEP_MS = 15.0
"""Default limit on a GPU. A prompt of 512 tokens takes 13.6 ms, one of 256 7.5, and a step of 64 sequences of 1,024 tokens 4.9
(Llama-3-8B's shape in int4, H200, docs/internals/engine.md)."""

LEAST_TOKENS = 64
"""A step computes at least so many prompt tokens, whatever they take: prompts must come to an end."""

FIRST_TOKENS = 256
"""Budget before the first measurement."""

AIM = 0.9
"""Share of the limit that steps are to take, since their times vary."""

SPREAD = 4
"""Prompt tokens that wait are spread over so many steps, as far as these fill the tiles of a forward, so that each of a stream
of prompts makes several steps a bit longer instead of one five times as long (16.6 ms at the 99th percentile of the time
between tokens for a median of 3.0: 32 users of Llama-3-8B's shape in int4, prompts of 512 tokens, H200, 2026-11-28)."""

EVEN_STEPS = 3
"""Prompt tokens that take so many steps or fewer are divided equally. Tokens of a sequence then come at equal intervals: a
prompt of 512 tokens would else lengthen two steps to 8 ms and one to 5."""

FASTEST, SLOWEST = 1.25, 0.5
"""Limits of the factor by which one measurement changes the budget."""


class StepBudget:
    """The prompt tokens of steps that also decode: at most `most`, and as many as take `step_ms` milliseconds with everything
    else of the step (None: no limit)."""

    def __init__(self, step_ms: float | None, most: int, device: torch.device) -> None:
        self.step_ms, self._most, self._device = step_ms, most, device
        self._tokens = float(most if step_ms is None else min(most, FIRST_TOKENS))
        self._running: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.steps = 0
        """Number of steps that computed prompt tokens and decoded."""
        self.prompt_tokens = 0
        """Number of prompt tokens in these steps."""

    def next(self, waiting: int, filled: Sequence[int] = ()) -> int:
        """Reads the measurements of finished steps, and returns the budget of the next one. waiting: prompt tokens that are
        still to be computed. filled: ascending numbers of prompt tokens that fill the tiles of a forward
        (`MixedRunner.steady_tokens`); none if forwards have any size."""
        while self._running and self._running[0][2].query():
            tokens, begin, end = self._running.popleft()
            self.observe(tokens, begin.elapsed_time(end))
        if self.step_ms is None:
            return self.tokens
        if not filled or self.tokens < filled[0]:
            return min(self.tokens, max(LEAST_TOKENS, -(-waiting // (64 * SPREAD)) * 64))
        size = max(tokens for tokens in filled if tokens <= max(filled[0], min(self.tokens, waiting // SPREAD)))
        steps = -(-waiting // size)
        return -(-waiting // steps) if 0 < steps <= EVEN_STEPS else size

    @property
    def tokens(self) -> int:
        """Maximum number of prompt tokens of a step that also decodes; from 128 on a multiple of 64, the sizes of ragged.py."""
        return int(self._tokens) if self._tokens < 128 else int(self._tokens) // 64 * 64

    @contextlib.contextmanager
    def timed(self, tokens: int, captures: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Measures the step with `tokens` prompt tokens that is launched inside. A step that captures a graph, by the number
        that `captures` returns, is not measured: capturing takes longer than the step."""
        captured = captures()
        self.steps += 1
        self.prompt_tokens += tokens
        if self.step_ms is None:
            yield
        elif self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(self._device)
            begin.record(stream)
            yield
            end.record(stream)
            if captures() == captured:
                self._running.append((tokens, begin, end))
        else:
            started = time.perf_counter()
            yield
            if captures() == captured:
                self.observe(tokens, 1e3 * (time.perf_counter() - started))

    def observe(self, tokens: int, taken_ms: float) -> None:
        """Adapts the budget to a step of `tokens` prompt tokens that took `taken_ms`. The time of a step grows less than in
        proportion to its tokens, so the budget settles."""
        assert self.step_ms is not None
        factor = min(FASTEST, max(SLOWEST, AIM * self.step_ms / max(taken_ms, 1e-3)))
        if factor < 1 or 2 * tokens >= self._tokens:  # a small step says nothing about a large one
            self._tokens = max(float(min(LEAST_TOKENS, self._most)), min(self._tokens * factor, float(self._most)))
