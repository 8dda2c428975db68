"""The thread that owns the engine: takes orders from the event loop, does the rounds, and brings what they draw back.

    event loop --orders (a queue)--> thread: engine.step() --outputs of all sequences of a round, one wake-up--> collectors

The event loop never waits for the engine, nor the engine for a client: what a client has not fetched yet lies in its collector,
at most the text that was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowbit.engine import Detokenizer, Engine, FinishReason, Request, SampledToken
from lowbit.engine.warm_up import Stage
from lowbit.ops import UnsupportedProblem
from lowbit.serve.errors import ApiError, failed, refused
from lowbit.serve.metrics import Metrics

logger = logging.getLogger("lowbit.serve")

ROUND_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError,
    UnsupportedProblem,
)  # fmt: skip
"""What a round raises: errors of torch and Triton among RuntimeError, those of tokenizers that meet odd tokens. They end the
sequences of that round; anything else ends the thread, and with it the server."""

MOST_FAILURES = 5
"""Texts that fail with none between them that does not before the server calls itself ill: a GPU that has failed stays so."""


@dataclass(frozen=True)
class SequenceOutput:
    """What came of the text `index` of a collector: characters, tokens, and at its end why, with the error if it failed.
    text_offsets: where in the text each token begins, in characters."""

    index: int
    text: str
    sampled: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    error: ApiError | None = None
    text_offsets: tuple[int, ...] = ()

    def followed_by(self, later: SequenceOutput) -> SequenceOutput:
        """Both as one."""
        text, sampled, text_offsets = (
            self.text + later.text,
            self.sampled + later.sampled,
            self.text_offsets + later.text_offsets,
        )
        return SequenceOutput(self.index, text, sampled, later.finish_reason, later.error, text_offsets)


class OutputCollector:
    """Pieces of the sequences of one HTTP request, for one reader on the event loop."""

    def __init__(self) -> None:
        self._outputs: list[SequenceOutput] = []
        self._came = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        """Called on the event loop."""
        self._outputs.append(output)
        self._came.set()

    async def fetch(self) -> list[SequenceOutput]:
        """All that has come since, at least one output; of each text at most one, in the order in which they came."""
        await self._came.wait()
        self._came.clear()
        joined: dict[int, SequenceOutput] = {}
        for output in self._outputs:
            before = joined.get(output.index)
            joined[output.index] = output if before is None else before.followed_by(output)
        self._outputs = []
        return list(joined.values())


@dataclass(eq=False)
class SequenceState:
    """A text that is being generated, the text `index` of its collector."""

    request: Request
    stream: Detokenizer
    collector: OutputCollector
    index: int
    submitted: float = field(default_factory=time.monotonic)
    first: float | None = None
    shown: str = ""
    fresh: list[SampledToken] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request.on_token = self._on_token

    def _on_token(self, sampled: SampledToken) -> bool:
        """Takes a token, in the engine's thread; whether it completes a stop string."""
        self.fresh.append(sampled)
        self.text_offsets.append(len(self.stream.text))  # a token within a character has the place of that
        if sampled.token not in self.request.stop_token_ids:
            self.shown += self.stream.push(sampled.token)
        return self.stream.stopped

    def take(self, error: ApiError | None = None) -> SequenceOutput | None:
        """What is new since the last call, None if nothing is."""
        end = self.request.finish_reason
        if end in (FinishReason.STOP, FinishReason.LENGTH):
            self.shown += self.stream.finish()
            end = FinishReason.STOP if self.stream.stopped else end  # what was held back may complete a stop string
        if not (self.fresh or end or error):
            return None
        output = SequenceOutput(self.index, self.shown, tuple(self.fresh), end, error, tuple(self.text_offsets))
        self.shown, self.fresh, self.text_offsets = "", [], []
        return output


Command = Callable[[], None]


class Worker:
    """Does an engine's rounds in a thread of its own, from `start` to `stop`; methods are for the event loop."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.failures = 0
        """Texts that have failed one after the other."""
        self.dead = False
        """Whether the thread has ended before it was told to."""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._live: dict[SequenceState, None] = {}
        """Texts that the engine has; of the thread alone."""
        self._open: dict[SequenceState, None] = {}
        """Texts for which somebody waits; of the event loop alone."""
        self._refusing: ApiError | None = None
        """What sequences that come after `end_all` are told; of the thread alone."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lowbit-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop, warm: Callable[[Stage | None], None], ended: Callable[[], None]) -> None:
        """Warms up, then waits for sequences. On the loop, `warm` is called before each stage and with None at the end, `ended`
        when the thread is over."""
        self._loop, self._warm, self._ended = loop, warm, ended
        self._thread.start()

    def submit(self, sequences: Sequence[SequenceState]) -> None:
        """Generates sequences; whatever comes of them, the last output of each has an end or an error."""
        self._open.update(dict.fromkeys(sequences))
        if self.dead:
            self._forsake()
        self._commands.put(lambda: self._submit(sequences))

    def cancel(self, sequences: Sequence[SequenceState]) -> None:
        """Ends sequences before the next step; those that have ended stay as they are."""
        for text in sequences:
            self._open.pop(text, None)
        self._commands.put(lambda: self._cancel(sequences))

    def end_all(self, error: ApiError) -> None:
        """Ends all sequences that there are or come, with an error for those who wait for them."""
        self._commands.put(lambda: self._end_all(error))

    def stop(self) -> None:
        """Tells the thread to end after the round that it does."""
        self._stopping = True
        self._commands.put(lambda: None)

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    # ---- in the thread

    def _run(self) -> None:
        try:
            if self._warm_up():
                while not self._stopping:
                    self._run_commands()
                    if self._live:
                        self._step()
        finally:
            gc.unfreeze()  # else what Triton holds counts as lost when the process ends
            self._call(self._over)

    def _warm_up(self) -> bool:
        """Whether sequences can be computed now."""
        try:
            for stage in self.engine.warm_up():
                self._call(functools.partial(self._warm, stage))
                if self._stopping:
                    return False
            self.engine.generate([Request([0], 2)])  # what a first text costs beside kernels and graphs
        except ROUND_ERRORS as error:
            logger.error("warming up failed: %s: %s", type(error).__name__, error)
            return False
        gc.collect()
        gc.freeze()  # what is there now stays: no collection walks through models and kernels while sequences wait
        self._call(functools.partial(self._warm, None))
        return True

    def _run_commands(self) -> None:
        """Follows all orders that are there; waits for one if there is nothing else to do."""
        if not self._live:
            self._commands.get()()
        while True:
            try:
                order = self._commands.get_nowait()
            except queue.Empty:
                return
            order()

    def _submit(self, sequences: Sequence[SequenceState]) -> None:
        if self._refusing is not None:
            self._abandon(sequences, self._refusing)
            return
        for text in sequences:
            try:
                self.engine.submit(text.request)
            except ValueError as error:
                self._abandon([text], refused("request", str(error)))
            except RuntimeError as error:  # of an engine that computes nothing any more
                logger.error("a text was not taken: %s", error)
                self.failures += 1
                self._abandon([text])
            else:
                self._live[text] = None

    def _cancel(self, sequences: Sequence[SequenceState], end: FinishReason = FinishReason.CANCELLED) -> None:
        for text in sequences:
            if text in self._live:
                del self._live[text]
                self.engine.cancel(text.request)
                self._count(text, end)

    def _end_all(self, error: ApiError) -> None:
        self._refusing = error
        sequences = list(self._live)
        self._cancel(sequences)
        self._abandon(sequences, error)

    def _abandon(self, sequences: Sequence[SequenceState], error: ApiError | None = None) -> None:
        """Tells those who wait that nothing more comes."""
        said = error or failed()
        self._bring([(text, SequenceOutput(text.index, "", (), FinishReason.FAILED, said)) for text in sequences])

    def _step(self) -> None:
        begun = time.monotonic()
        error: BaseException | None = None
        try:
            self.engine.step()
        except ROUND_ERRORS as raised:
            error = raised
            logger.error("a round of the engine failed: %s: %s", type(raised).__name__, str(raised)[:500])
        outputs = self._outputs()
        if error is not None and not any(output.finish_reason for _, output in outputs):
            # The engine did not say whose fault it was: nobody may wait for ever.
            lost = list(self._live)
            self.failures += len(lost)
            self._cancel(lost, FinishReason.FAILED)
            outputs += [(text, SequenceOutput(text.index, "", (), FinishReason.FAILED, failed())) for text in lost]
        self.metrics.rounds.observe(time.monotonic() - begun)
        self._bring(outputs)

    def _outputs(self) -> list[tuple[SequenceState, SequenceOutput]]:
        """What the round has brought, in the order of submission."""
        outputs, now = [], time.monotonic()
        for text in list(self._live):
            error = failed() if text.request.finish_reason is FinishReason.FAILED else None
            try:
                output = text.take(error)
            except ROUND_ERRORS as raised:  # its last tokens are no text
                logger.error("a text could not be ended: %s: %s", type(raised).__name__, str(raised)[:500])
                output = SequenceOutput(text.index, "", (), FinishReason.FAILED, failed())
            if output is None:
                continue
            if text.first is None and output.sampled:
                text.first = now
                self.metrics.first_token.observe(now - text.submitted)
            if output.finish_reason:
                self.failures = self.failures + 1 if output.finish_reason is FinishReason.FAILED else 0
                del self._live[text]
                self._count(text, output.finish_reason)
            outputs.append((text, output))
        return outputs

    def _count(self, text: SequenceState, end: FinishReason) -> None:
        self.metrics.ended(text.request, end, text.first)

    # ---- back to the event loop

    def _bring(self, outputs: Sequence[tuple[SequenceState, SequenceOutput]]) -> None:
        if outputs:
            self._call(lambda: self._put(outputs))

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: a second signal ended the server at once
            self._loop.call_soon_threadsafe(function)

    def _put(self, outputs: Sequence[tuple[SequenceState, SequenceOutput]]) -> None:
        """On the event loop."""
        for text, output in outputs:
            if output.finish_reason:
                self._open.pop(text, None)
            text.collector.put(output)

    def _over(self) -> None:
        """On the event loop, when the thread has ended."""
        self.dead = not self._stopping
        self._forsake()
        self._ended()

    def _forsake(self) -> None:
        """On the event loop: nobody waits for what never comes."""
        self._put([(text, SequenceOutput(text.index, "", (), FinishReason.FAILED, failed())) for text in list(self._open)])
