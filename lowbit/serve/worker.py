"""The thread that owns the engine. It runs commands of the event loop, steps the engine and delivers the outputs.

    event loop --commands (a queue)--> thread: engine.step() --outputs of all sequences of a step, one wake-up--> collectors

Neither side blocks on the other. Outputs that a client has not fetched stay in its collector.
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
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lowbit.engine import Detokenizer, Engine, EngineFailed, FinishReason, Request, SampledToken, Sequence, StepFailed
from lowbit.engine.engine import Pooling
from lowbit.engine.warm_up import Stage
from lowbit.serve.errors import ApiError, failed, refused
from lowbit.serve.metrics import Metrics
from lowbit.serve.prompts import Prompts

logger = logging.getLogger("lowbit.serve")

MOST_FAILURES = 5
"""Number of consecutive failed sequences after which /health reports failure, since a failed GPU does not recover."""


@dataclass(frozen=True)
class SequenceOutput:
    """New output of sequence `index` of a request. The last output has the finish reason, and an error if the sequence failed.
    `text_offsets`: the index in the sequence's text, in characters, at which each token begins.
    """

    index: int
    text: str
    sampled: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    error: ApiError | None = None
    text_offsets: tuple[int, ...] = ()

    def followed_by(self, later: SequenceOutput) -> SequenceOutput:
        """Returns this output joined with a later one of the same sequence."""
        text, sampled, text_offsets = (
            self.text + later.text,
            self.sampled + later.sampled,
            self.text_offsets + later.text_offsets,
        )
        return SequenceOutput(self.index, text, sampled, later.finish_reason, later.error, text_offsets)


class OutputCollector:
    """Collects the outputs of the sequences of one HTTP request, for one reader on the event loop."""

    def __init__(self) -> None:
        self._outputs: list[SequenceOutput] = []
        self._ready = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        """Adds an output. Call on the event loop."""
        self._outputs.append(output)
        self._ready.set()

    async def fetch(self) -> list[SequenceOutput]:
        """Waits for outputs and returns them, one joined output per sequence."""
        await self._ready.wait()
        self._ready.clear()
        joined: dict[int, SequenceOutput] = {}
        for output in self._outputs:
            before = joined.get(output.index)
            joined[output.index] = output if before is None else before.followed_by(output)
        self._outputs = []
        return list(joined.values())


@dataclass(eq=False)
class ServedSequence:
    """A sequence of an HTTP request: the engine's request, its state, its detokenizer, and output that is not delivered yet.
    `state` is None until the worker has submitted the request. `first`: time of the first token. `shown`, `fresh`: text and
    tokens that are not delivered yet.
    """

    request: Request
    stream: Detokenizer
    collector: OutputCollector
    index: int
    submitted: float = field(default_factory=time.monotonic)
    first: float | None = None
    state: Sequence | None = None
    hidden: frozenset[int] = frozenset()
    """Tokens without text, besides stop tokens."""
    shown: str = ""
    fresh: list[SampledToken] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request = replace(self.request, on_token=self._on_token)

    def _on_token(self, sampled: SampledToken) -> bool:
        """Adds a token, in the engine's thread; returns True if it completes a stop string."""
        self.fresh.append(sampled)
        self.text_offsets.append(len(self.stream.text))  # a token that is part of a character has that character's offset
        if sampled.token not in self.request.stop_token_ids and sampled.token not in self.hidden:
            self.shown += self.stream.push(sampled.token)
        return self.stream.stopped

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the engine finished the sequence; None if it did not."""
        return None if self.state is None else self.state.finish_reason

    @property
    def submitted_state(self) -> Sequence:
        """The engine's state; requires that the sequence was submitted."""
        assert self.state is not None
        return self.state

    def take(self, error: ApiError | None = None) -> SequenceOutput | None:
        """Returns the output since the last call; None if there is none."""
        end = self.finish_reason
        if end in (FinishReason.STOP, FinishReason.LENGTH):
            self.shown += self.stream.finish()
            end = FinishReason.STOP if self.stream.stopped else end  # held-back text may complete a stop string
        if not (self.fresh or end or error):
            return None
        output = SequenceOutput(self.index, self.shown, tuple(self.fresh), end, error, tuple(self.text_offsets))
        self.shown, self.fresh, self.text_offsets = "", [], []
        return output


Command = Callable[[], None]


class Worker:
    """Steps an engine in a separate thread, from `start` to `stop`. Methods must be called on the event loop."""

    def __init__(self, engine: Engine, metrics: Metrics, prompts: Prompts, *, grammars: bool = False) -> None:
        self.engine, self.metrics, self._prompts = engine, metrics, prompts
        self._grammars = grammars
        """True if requests may have grammars, whose graphs the warm-up captures too."""
        self._embedding: set[asyncio.Future[list[float]]] = set()
        """Embeddings that requests wait for."""
        self.failures = 0
        """Number of sequences that failed since the last one that did not."""
        self.dead = False
        """True if the thread ended before `stop`."""
        self._ranks_failed = False
        """True once one of the ranks that compute the model has failed."""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._live: dict[ServedSequence, None] = {}
        """Sequences in the engine. Only the thread uses this."""
        self._open: dict[ServedSequence, None] = {}
        """Sequences whose output is not complete. Only the event loop uses this."""
        self._refusing: ApiError | None = None
        """Error of sequences that are submitted after `end_all`. Only the thread uses this."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lowbit-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop, warm: Callable[[Stage | None], None], ended: Callable[[], None]) -> None:
        """Starts the thread, which first warms up. `warm` is called before each stage of the warm-up, and with None at its end;
        `ended` is called when the thread has ended. Both run on the event loop.
        """
        self._loop, self._warm, self._ended = loop, warm, ended
        self._thread.start()

    def submit(self, sequences: abc.Sequence[ServedSequence]) -> None:
        """Submits sequences; the last output of each has a finish reason."""
        self._open.update(dict.fromkeys(sequences))
        if self.dead:
            self._fail_open()
        self._commands.put(lambda: self._submit(sequences))

    def cancel(self, sequences: abc.Sequence[ServedSequence]) -> None:
        """Cancels sequences before the next step; does nothing for finished ones."""
        for sequence in sequences:
            self._open.pop(sequence, None)
        self._commands.put(lambda: self._cancel(sequences))

    def count_failures(self, sequences: int) -> None:
        """Counts sequences that failed before they were submitted."""

        def count() -> None:
            self.failures += sequences

        self._commands.put(count)

    def end_all(self, error: ApiError) -> None:
        """Ends all sequences with an error, including those submitted later."""
        self._commands.put(lambda: self._end_all(error))

    def stop(self) -> None:
        """Ends the thread after its current step."""
        self._stopping = True
        self._commands.put(lambda: None)

    @property
    def running(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    async def embed(self, tokens: list[int], pooling: Pooling) -> list[float]:
        """Returns the embedding of a text, which the thread computes between two steps. Raises ApiError if that fails."""
        future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._commands.put(lambda: self._embed(tokens, pooling, future))
        self._embedding.add(future)
        try:
            return await future
        finally:
            self._embedding.discard(future)

    # ---- in the thread

    def _embed(self, tokens: list[int], pooling: Pooling, future: asyncio.Future[list[float]]) -> None:
        if future.cancelled():
            return
        try:
            values = self.engine.embed(tokens, pooling).tolist()
        except Exception:  # boundary of the thread: a model's forward may raise anything
            logger.exception("an embedding was not computed")
            self.failures += 1
            self._call(lambda: _end(future, failed()))
        else:
            self.failures = 0
            self._call(lambda: _end(future, values))

    def _run(self) -> None:
        try:
            if self.engine.ranks is not None:
                self.engine.ranks.on_failure = lambda: self._commands.put(self._end_with_ranks)
            if self._warm_up():
                while not (self._stopping or self._ranks_failed):
                    self._run_commands()
                    if self._live:
                        self._step()
        finally:
            gc.unfreeze()  # otherwise Triton reports leaked objects when the process ends
            self._call(self._over)

    def _end_with_ranks(self) -> None:
        """Ends this thread, and with it the server, since one of the ranks that compute the model has failed."""
        assert self.engine.ranks is not None
        logger.error("the server ends: %s", self.engine.ranks.failure)
        self._ranks_failed = True

    def _warm_up(self) -> bool:
        """Warms up; returns False if that failed or the thread is to end."""
        try:
            self._prompts.start()  # its process starts while kernels are compiled
            for stage in self.engine.warm_up(self._grammars):
                self._call(functools.partial(self._warm, stage))
                if self._stopping:
                    return False
            self.engine.generate([Request([0], 2)])  # pays other one-time costs of a first sequence
            self._prompts.check()
        except ApiError:  # the server was stopped meanwhile
            return False
        except Exception:  # boundary of the thread: the server must shut down cleanly after any error
            logger.exception("warming up failed")
            return False
        gc.collect()
        gc.freeze()  # later garbage collections skip models and kernels
        self._call(functools.partial(self._warm, None))
        return True

    def _run_commands(self) -> None:
        """Runs all queued commands; waits for one if no sequence is live."""
        if not self._live:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _submit(self, sequences: abc.Sequence[ServedSequence]) -> None:
        if self._refusing is not None:
            self._fail(sequences, self._refusing)
            return
        for sequence in sequences:
            try:
                sequence.state = self.engine.submit(sequence.request)
            except ValueError as error:
                self._fail([sequence], refused("request", str(error)))
            except EngineFailed as error:
                logger.error("a sequence was not submitted: %s", error)
                self.failures += 1
                self._fail([sequence])
            else:
                self._live[sequence] = None

    def _cancel(self, sequences: abc.Sequence[ServedSequence], reason: FinishReason = FinishReason.CANCELLED) -> None:
        for sequence in sequences:
            if sequence in self._live:
                del self._live[sequence]
                self.engine.cancel(sequence.submitted_state)
                self._count(sequence, reason)

    def _end_all(self, error: ApiError) -> None:
        self._refusing = error
        sequences = list(self._live)
        self._cancel(sequences)
        self._fail(sequences, error)

    def _fail(self, sequences: abc.Sequence[ServedSequence], error: ApiError | None = None) -> None:
        """Delivers an error as the last output of sequences."""
        self._deliver([(sequence, _failure(sequence, error)) for sequence in sequences])

    def _step(self) -> None:
        begun = time.monotonic()
        unexplained = False
        try:
            self.engine.step()
        except StepFailed:  # the engine has failed the sequences of the step
            logger.exception("a step of the engine failed")
        except Exception:  # boundary of the thread: one error must not end the server
            unexplained = True
            logger.exception("a step of the engine failed")
        outputs = self._outputs()
        if unexplained:  # no sequence is known to be at fault, and the next step may raise the error again: all fail
            lost = list(self._live)
            self.failures += len(lost)
            self._cancel(lost, FinishReason.FAILED)
            outputs += [(sequence, _failure(sequence)) for sequence in lost]
        self.metrics.rounds.observe(time.monotonic() - begun)
        self._deliver(outputs)

    def _outputs(self) -> list[tuple[ServedSequence, SequenceOutput]]:
        """Returns the outputs of a step, in the order of submission."""
        outputs, now = [], time.monotonic()
        for sequence in list(self._live):
            error = _error_of(sequence.submitted_state) if sequence.finish_reason is FinishReason.FAILED else None
            try:
                output = sequence.take(error)
            except Exception:  # a tokenizer may raise anything; other sequences must continue
                logger.exception("the last tokens of a sequence could not be decoded")
                output = _failure(sequence)
            if output is None:
                continue
            if sequence.first is None and output.sampled:
                sequence.first = now
                self.metrics.first_token.observe(now - sequence.submitted)
            if output.finish_reason:
                self.failures = self.failures + 1 if output.error is not None and output.error.status >= 500 else 0
                del self._live[sequence]
                self._count(sequence, output.finish_reason)
            outputs.append((sequence, output))
        return outputs

    def _count(self, sequence: ServedSequence, reason: FinishReason) -> None:
        self.metrics.ended(sequence.submitted_state, reason, sequence.first)

    # ---- back to the event loop

    def _deliver(self, outputs: abc.Sequence[tuple[ServedSequence, SequenceOutput]]) -> None:
        if outputs:
            self._call(lambda: self._put(outputs))

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed after a second signal
            self._loop.call_soon_threadsafe(function)

    def _put(self, outputs: abc.Sequence[tuple[ServedSequence, SequenceOutput]]) -> None:
        """Stores outputs in their collectors. Runs on the event loop."""
        for sequence, output in outputs:
            if output.finish_reason:
                self._open.pop(sequence, None)
            sequence.collector.put(output)

    def _over(self) -> None:
        """Called on the event loop when the thread has ended."""
        self.dead = not self._stopping
        self._fail_open()
        self._ended()

    def _fail_open(self) -> None:
        """Fails all open sequences. Runs on the event loop."""
        self._put([(sequence, _failure(sequence)) for sequence in list(self._open)])
        for future in list(self._embedding):
            _end(future, failed())


def _error_of(sequence: Sequence) -> ApiError:
    """Returns the error of a failed sequence. The status is 400 if the grammar of the request was at fault, else 500."""
    return ApiError(400, f"this request: {sequence.error}", code="grammar_failed") if sequence.grammar_failed else failed()


def _end(future: asyncio.Future[list[float]], result: list[float] | ApiError) -> None:
    """Sets the result or the error of a future, unless its request was cancelled."""
    if future.done():
        return
    if isinstance(result, ApiError):
        future.set_exception(result)
    else:
        future.set_result(result)


def _failure(sequence: ServedSequence, error: ApiError | None = None) -> SequenceOutput:
    """Returns the last output of a failed sequence."""
    return SequenceOutput(sequence.index, "", (), FinishReason.FAILED, error or failed())
