"""The engine: continuous batching of requests over one model. The host schedules one step ahead of the GPU.

    engine = Engine(model)
    sequence = engine.submit(Request(prompt, limit=100))
    for sampled in engine.stream(sequence): ...

`Engine.step` schedules and launches a step, and only then reads the tokens of the step before, so that the GPU is busy while
Python runs. A finished sequence therefore runs one extra step; its token is discarded. Any thread that waits for a sequence
runs steps for all sequences. `submit` and `cancel` do not block on a running step: the next step takes their effects.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import abc, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbit.engine.block_pool import BlockPool
from lowbit.engine.cache import CacheBudget
from lowbit.engine.check import LARGEST_DIFFERENCE, TOKENS, difference_to, kernel_refusals
from lowbit.engine.decode_runner import DecodeRunner, DecodeStep, ModelProgram, filters, sample_tokens
from lowbit.engine.deprecated import sequence_of
from lowbit.engine.failure import StepFailed, log_failure, one_line
from lowbit.engine.family import recognise
from lowbit.engine.forward import ForwardProgram
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.program import DecodeProgram
from lowbit.engine.request import Request, SampledToken
from lowbit.engine.scheduler import PrefillChunk, Scheduler, SchedulerOutput
from lowbit.engine.sequence import FinishReason, Sequence
from lowbit.engine.slots import Slots, on_device
from lowbit.engine.warm_up import Stage, WarmUpRun
from lowbit.hardware.machine import machine_of
from lowbit.ops.sample import top_logprobs

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import RecordedKernel

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 1024
"""Prompt tokens in a step: enough to fill the tensor cores, and at most tens of milliseconds between two tokens of others."""


@dataclass
class InFlightStep:
    """A launched step: the sequence of each row, host copies of its results, and how many rows were read."""

    sequences: list[Sequence]
    tokens: Tensor
    logprobs: Tensor
    top_logprobs: tuple[Tensor, Tensor] | None
    done: torch.cuda.Event | None
    read: int = 0


class Engine:
    """Generates sequences with a causal language model of Transformers.

    The decode program takes the model's weights over into its own layout, without a second copy.

    Args:
        max_concurrent: requests computed at once; others wait in a queue.
        max_length: tokens of a request, prompt included (default: the model's positions, as far as the cache holds them).
        cache_bytes: memory for keys and values (default: most of a GPU's free memory).
        chunk_tokens: prompt tokens in a step, a multiple of the page of 128 tokens.
        batch_invariant: results do not depend on the other requests of a step; for models whose quantized layers were made so
            (`nn.linear.make_batch_invariant`).
        prefix_caching: prompts with a common prefix share its keys and values.
        forward: computes by the model's own forward, one sequence at a time, as for models without a decode program.
        async_scheduling: reads the tokens of a step after the next one is launched.
        stop_token_ids: tokens that `Sampling.min_new_tokens` suppresses (default: the model's end-of-text tokens).
        progress: called with the progress of kernels that a step compiles, and once all are compiled.

    Raises ValueError if the cache holds not even one request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int = 64,
        max_length: int | None = None,
        cache_bytes: int | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        batch_invariant: bool = False,
        prefix_caching: bool = True,
        forward: bool = False,
        async_scheduling: bool = True,
        stop_token_ids: abc.Sequence[int] | None = None,
        progress: Callable[[Stage], object] | None = None,
    ) -> None:
        if max_concurrent < 1:
            raise ValueError(f"an engine computes at least 1 request at once, got max_concurrent={max_concurrent}")
        if max_length is not None and max_length < 2:
            raise ValueError(f"a sequence has at least 2 tokens, one of them the prompt's, got max_length={max_length}")
        self.device = model.device
        positions = _positions(model)
        self.max_length = min(max_length or positions, positions)
        # In the caller's mode: the weights that a program joins stay the model's, and may be trained.
        with torch.inference_mode(next(model.parameters()).is_inference()):
            self.program, self.difference = _program(model, self.max_length, batch_invariant, forward)
        self._positions = positions
        paged = self.program.is_paged
        self._cache_budget = CacheBudget.for_device(self.device, cache_bytes, allocated=paged)  # of what the program leaves
        if max_length is None:
            self.max_length = min(self.max_length, self._cache_budget.longest(self.program.page_bytes))
        pages = self._cache_budget.pages(self.program.page_bytes, max_concurrent, self.max_length)
        self.program.allocate_cache(pages)
        self.scheduler = Scheduler(
            max_concurrent,
            BlockPool(pages),
            chunk_tokens,
            prefix_caching=prefix_caching and paged,
            invariant=batch_invariant,
        )
        vocab = model.config.get_text_config().vocab_size
        stops = _eos_tokens(model) if stop_token_ids is None else stop_token_ids
        self.stop_token_ids = [token for token in stops if 0 <= token < vocab]  # no other can be sampled
        self.slots = Slots(max_concurrent, self.max_length, vocab, self.stop_token_ids, self.device)
        graphs = self.program.graphs()
        self.decode_runner = DecodeRunner(self.program, self.slots, max_concurrent, graphs=graphs, invariant=batch_invariant)
        self.prefill_runner = PrefillRunner(
            self.program, self.slots, min(chunk_tokens, max_concurrent * self.max_length), graphs=graphs
        )
        self._warm_up_run: WarmUpRun | None = None
        if graphs is not None:
            self._warm_up_run = WarmUpRun(
                self.program, self.decode_runner, self.prefill_runner, max_concurrent, self.max_length
            )
        self._progress = progress or (lambda stage: None)
        self._async_scheduling = async_scheduling
        self._in_flight: deque[InFlightStep] = deque()
        self._lock = threading.Lock()
        """Held during a step; it guards the scheduler, the slots and the runners."""
        self._stepping_thread: int | None = None
        self._state_lock = threading.RLock()
        """Guards the state of sequences that other threads change during a step. Held only briefly. Reentrant: the garbage
        collector may close an abandoned stream, which cancels its sequence, while this thread holds the lock."""
        self._finished: deque[Sequence] = deque()
        """Finished sequences that may still have slots and pages."""
        self._gpu_error = ""

    # ---- public methods

    def submit(self, request: Request) -> Sequence:
        """Queues a request without waiting for a running step, and returns its sequence. Raises ValueError for a request that
        can never run here or was submitted before, and RuntimeError after a GPU error."""
        if self._gpu_error:
            raise RuntimeError(f"the GPU of this engine failed, start another process: {self._gpu_error}")
        most = request.most_tokens
        reasons = self.scheduler.refusals(request)
        if most > self.max_length:
            wanted = f"this request has {len(request.prompt):,} tokens and asks for {request.limit:,} more"
            raise ValueError(f"a sequence has at most {self.max_length:,} tokens here, {wanted}; {self._limit(most)}")
        if reasons:
            raise ValueError(f"this request {'; '.join(reasons)}")
        vocab = self.slots.sampling.counts.shape[1]
        for what, tokens in (("prompt", request.prompt), ("logit_bias", [token for token, _ in request.sampling.bias])):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
                wrong = next(token for token in tokens if not 0 <= token < vocab)
                raise ValueError(f"tokens are from 0 to {vocab - 1}, this {what} has {wrong}")
        with self._state_lock:
            if self._gpu_error:  # set by a step since the check above
                raise RuntimeError(f"the GPU of this engine failed, start another process: {self._gpu_error}")
            sequence = Sequence.start(request)
            self.scheduler.add(sequence)
        return sequence

    def _limit(self, tokens: int) -> str:
        """Why a sequence cannot have so many tokens, and what to do."""
        if tokens > self._positions:
            return f"the model has {self._positions:,} positions: shorten the prompt or ask for fewer new tokens"
        if tokens > self._cache_budget.longest(self.program.page_bytes):
            return self._cache_budget.refusal(self.program.page_bytes, tokens)
        return "so says max_length of the engine: make one with more, or ask for fewer tokens"

    def cancel(self, sequence: Sequence | Request) -> None:
        """Finishes a sequence without waiting for a running step; does nothing if it has finished. Deprecated: a request
        instead of its sequence."""
        self._finish(sequence_of(sequence), FinishReason.CANCELLED)
        # Otherwise the running step frees it, or the next. The running step may be this thread's: during a step the garbage
        # collector may close an abandoned stream.
        if self._lock.acquire(blocking=False):
            try:
                self._free_finished()
            finally:
                self._lock.release()

    def stream(self, sequence: Sequence | Request) -> Generator[SampledToken, None, None]:
        """Yields the tokens of a sequence; closing the generator cancels it. Raises RequestFailed at the end if the sequence
        failed. Deprecated: a request instead of its sequence."""
        return self._stream(sequence_of(sequence))

    def _stream(self, sequence: Sequence) -> Generator[SampledToken, None, None]:
        read = 0
        try:
            while True:
                ended = sequence.finish_reason is not None  # read first: another thread may append the last tokens now
                while read < len(sequence.sampled):
                    yield sequence.sampled[read]
                    read += 1
                if ended:
                    break
                with contextlib.suppress(StepFailed):  # `check` raises if this sequence failed
                    self.step()
        finally:
            self.cancel(sequence)
        sequence.check()

    def generate(self, requests: Iterable[Request]) -> list[Sequence]:
        """Submits requests and returns their sequences when all have finished; an error cancels those that have not. Raises
        RequestFailed, once all have finished, if one of them failed."""
        sequences: list[Sequence] = []
        try:
            for request in requests:
                sequences.append(self.submit(request))
            while any(sequence.finish_reason is None for sequence in sequences):
                with contextlib.suppress(StepFailed):  # `check` raises if one of these sequences failed
                    self.step()
        finally:
            for sequence in sequences:
                self.cancel(sequence)
        for sequence in sequences:
            sequence.check()
        return sequences

    @torch.inference_mode()
    def step(self) -> None:
        """Runs one step: launches the scheduled work, then reads the tokens of the step before.

        A sequence fails alone if its prompt or its `on_token` raises an error or its logits are NaN or infinite;
        `Sequence.error` says why. Raises StepFailed for other errors, after all sequences of the step have failed. If the GPU
        itself failed, `submit` raises from then on.
        """
        if self._stepping_thread == threading.get_ident():
            raise RuntimeError("this thread is running a step: on_token and progress cannot run another one")
        with self._lock:
            self._stepping_thread = threading.get_ident()
            try:
                self._step()
            finally:
                self._stepping_thread = None

    def _step(self) -> None:
        self._free_finished()
        earlier = len(self._in_flight)
        planned = self._launch_next()
        if not (planned and self._async_scheduling):
            earlier = len(self._in_flight)
        for _ in range(min(earlier, len(self._in_flight))):
            self._read(self._in_flight[0])
            self._in_flight.popleft()
        self._free_finished()

    def compile(self) -> Iterator[Stage]:
        """Compiles every kernel that Triton's cache lacks, in several processes; yields the progress before each."""
        if self._warm_up_run is None:
            return
        with self._lock:
            kernels = self._warm_up_run.kernels(self._warm_up_run.all_parts())
        yield from self._compiled(kernels)

    def warm_up(self) -> Iterator[Stage]:
        """Compiles every kernel and captures every graph before the first request; yields the progress before each."""
        yield from self.compile()
        variants = self.decode_runner.variants() if self.decode_runner.graphs else []
        total = len(variants) + len(self.prefill_runner.graph_shapes)
        for done, variant in enumerate(variants):
            size, filtered, reach = variant
            yield Stage(f"step of {size}{' with filters' if filtered else ''}, up to {reach:,} tokens", done, total)
            with self._lock, torch.inference_mode():
                self.decode_runner.captured(variant)
        for done, shape in enumerate(self.prefill_runner.graph_shapes, len(variants)):
            yield Stage(f"prompts of {shape.tokens:,} tokens that see {shape.keys:,}", done, total)
            with self._lock, torch.inference_mode():
                self.prefill_runner.captured(shape)

    def report(self) -> list[str]:
        """How sequences are computed, as lines of text."""
        return self.program.report(self.difference)

    # ---- a step

    def _launch_next(self) -> SchedulerOutput:
        """Schedules and launches a step; if that raises an error, its sequences fail and others continue."""
        planned = None
        try:
            planned = self.scheduler.schedule()
            if planned:
                self._launch(planned)
            return planned
        except BaseException as error:
            self._fail_step(self.scheduler.abort_step(planned), error)
            raise

    def _launch(self, planned: SchedulerOutput) -> None:
        self.program.keep(self.scheduler.running)  # not of sequences that were preempted
        if self._warm_up_run is not None and (parts := self._warm_up_run.parts_of(planned)):
            try:
                self._compile(self._warm_up_run.kernels(parts))
            except Exception as error:  # noqa: BLE001 - the launch below raises it again, where it can be handled
                log_failure("compiling kernels", error)
        for sequence in planned.admitted:
            tokens = [sampled.token for sampled in sequence.sampled]
            self.slots.sampling.set(sequence.running_slot, sequence.request.sampling, sequence.request.prompt, tokens)
        last = [chunk for chunk in planned.chunks if chunk.last]
        self.slots.update(planned.new_pages, [(chunk.sequence.running_slot, chunk.end - 1) for chunk in last])
        if planned.decoding:
            rows = [sequence.running_slot for sequence in planned.decoding]
            longest = max(sequence.computed_tokens for sequence in planned.decoding)
            self._copy_results(planned.decoding, self.decode_runner.launch(rows, filters(planned.decoding), longest))
        if planned.chunks and self.program.is_paged:
            self._launch_chunks(planned.chunks, planned)
        elif planned.chunks:
            self._launch_one_by_one(planned.chunks, planned)

    def _compiled(self, kernels: abc.Sequence[RecordedKernel]) -> Iterator[Stage]:
        if kernels:
            from lowbit.kernels.parts.compile import compiled

            for done in compiled(kernels, machine_of(self.device).arch.sm):
                yield Stage("kernels", done, len(kernels))

    def _compile(self, kernels: abc.Sequence[RecordedKernel]) -> None:
        """Compiles the kernels of a step in parallel; its launches would compile them one after the other."""
        for stage in self._compiled(kernels):
            self._progress(stage)
        if kernels:
            self._progress(Stage("kernels", len(kernels), len(kernels)))

    def _launch_chunks(self, chunks: abc.Sequence[PrefillChunk], planned: SchedulerOutput) -> None:
        """Computes prefill chunks in one batch; if that raises an error, one by one, so that only those at fault fail."""
        try:
            logits = self.prefill_runner.launch(chunks)
        except Exception as error:  # noqa: BLE001 - a prompt may raise anything, and other sequences must continue
            line = log_failure("computing a prompt", error)
        else:
            if logits is not None:
                sequences = [chunk.sequence for chunk in chunks if chunk.last]
                rows = on_device([sequence.running_slot for sequence in sequences], self.device)
                self._copy_results(sequences, sample_tokens(logits, rows, self.slots, filters(sequences)))
            return
        if len(chunks) > 1:
            self._launch_one_by_one(chunks, planned)
        else:
            self.scheduler.drop(chunks[0], planned)
            self._fail([chunks[0].sequence], line)

    def _launch_one_by_one(self, chunks: abc.Sequence[PrefillChunk], planned: SchedulerOutput) -> None:
        for chunk in chunks:
            if chunk.sequence.slot is not None:  # None: requeued, since an earlier chunk did not fill the pages that it shares
                self._launch_chunks([chunk], planned)

    def _fail(self, sequences: abc.Sequence[Sequence], error: str) -> None:
        """Marks sequences as failed; all sequences after a GPU error."""
        for sequence in sequences:
            self._finish(sequence, FinishReason.FAILED, error)
        try:
            _wait_for(self.device)
        except Exception as raised:  # noqa: BLE001 - a CUDA error is permanent: nothing runs after it in this process
            line = log_failure("waiting for the GPU", raised)
            with self._state_lock:  # `submit` raises from now on; sequences queued before are in `everybody`
                self._gpu_error = line
                everybody = (*self.scheduler.running, *self.scheduler.waiting)
            for sequence in everybody:
                self._finish(sequence, FinishReason.FAILED, line)
            self._in_flight.clear()

    def _fail_step(self, sequences: abc.Sequence[Sequence], error: BaseException) -> None:
        """Marks the sequences of a step as failed; raises StepFailed if there are any and the error is no interrupt."""
        self._fail(sequences, one_line(error))
        if sequences and isinstance(error, Exception):
            logger.warning("a step failed", exc_info=error)
            count = f"{len(sequences)} request{'s' if len(sequences) > 1 else ''}"
            raise StepFailed(f"a step of {count} failed: {one_line(error)}") from error

    def _copy_results(self, sequences: abc.Sequence[Sequence], step: DecodeStep) -> None:
        """Starts the copies of a step's results to the host."""
        most = max(sequence.request.top_logprobs for sequence in sequences)
        top = None
        if most:
            values, ids = top_logprobs(step.logits[: len(sequences)], most)
            top = _to_host(values), _to_host(ids)
        tokens, logprobs = _to_host(step.tokens), _to_host(step.logprobs)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
        self._in_flight.append(InFlightStep(list(sequences), tokens, logprobs, top, done))

    def _read(self, launched: InFlightStep) -> None:
        """Waits for the results of a step, and appends its tokens to their sequences."""
        try:
            if launched.done is not None:
                launched.done.synchronize()
        except RuntimeError as error:
            self._in_flight.clear()
            self._fail_step(self.scheduler.abort_step(None), error)
            raise
        tokens, logprobs = launched.tokens.tolist(), launched.logprobs.tolist()
        top_of_rows = None if launched.top_logprobs is None else [part.tolist() for part in launched.top_logprobs]
        while launched.read < len(launched.sequences):
            row, sequence = launched.read, launched.sequences[launched.read]
            launched.read += 1  # first: an interrupt must not repeat a token
            if sequence.finish_reason is not None:
                continue  # finished or cancelled while this step ran
            if math.isnan(logprobs[row]):
                self._finish(sequence, FinishReason.FAILED, "the model's logits are NaN or infinite")
                continue
            top: tuple[tuple[int, float], ...] = ()
            if top_of_rows is not None and sequence.request.top_logprobs:
                values, ids = (part[row][: sequence.request.top_logprobs] for part in top_of_rows)
                top = tuple(zip(ids, values, strict=True))
            self._append(sequence, SampledToken(tokens[row], logprobs[row], top))

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        """Appends a token to its sequence, and finishes the sequence if it was the last one."""
        sequence.sampled.append(sampled)
        stopped = False
        if sequence.request.on_token is not None:
            try:
                stopped = sequence.request.on_token(sampled)
            except Exception as error:  # noqa: BLE001 - the caller's code may raise anything, and other sequences must continue
                self._finish(sequence, FinishReason.FAILED, log_failure("a caller's on_token", error))
            except BaseException as error:  # an interrupt
                self._finish(sequence, FinishReason.FAILED, one_line(error))
                raise
        if sampled.token in sequence.request.stop_token_ids or stopped:
            self._finish(sequence, FinishReason.STOP)
        elif len(sequence.sampled) == sequence.request.limit:
            self._finish(sequence, FinishReason.LENGTH)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """Finishes a sequence that has not finished; the thread that runs steps frees its slot and pages."""
        with self._state_lock:
            if sequence.finish_reason is not None:
                return
            sequence.error, sequence.finish_reason = error, reason
        if reason is FinishReason.FAILED:
            logger.warning(f"a request failed: {error}")
        self._finished.append(sequence)

    def _free_finished(self) -> None:
        """Frees the slots and pages of finished sequences, and what the program holds for them."""
        while self._finished:
            self.scheduler.remove(self._finished.popleft())
        self.program.keep(self.scheduler.running)


def _wait_for(device: torch.device) -> None:
    """Synchronizes with a GPU; raises RuntimeError after a CUDA error."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to_host(values: Tensor) -> Tensor:
    """A copy in host memory, complete once the stream has run so far."""
    if values.device.type != "cuda":
        return values.clone()
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def _program(model: PreTrainedModel, positions: int, batch_invariant: bool, forward: bool) -> tuple[ModelProgram, float]:
    """The decode program of a model, and the relative difference of its logits from the model's; a `ForwardProgram` and 0 if
    the model has none."""
    if forward:
        on_cpu = model.device.type == "cpu"
        reason = "on a CPU that is faster for one user" if on_cpu else "the engine was made so, with forward=True"
        return ForwardProgram(model, (reason,)), 0.0
    decoder = recognise(model, max(positions, TOKENS + 1))
    if isinstance(decoder, tuple):
        return ForwardProgram(model, decoder), 0.0
    refused = kernel_refusals(decoder, model.dtype) if model.device.type == "cuda" else ()
    if refused:
        return ForwardProgram(model, refused), 0.0

    def make() -> DecodeProgram:
        return DecodeProgram(decoder, model.dtype, model.device, batch_invariant=batch_invariant)

    program, difference = difference_to(model, make)
    if not difference <= LARGEST_DIFFERENCE:  # or NaN
        return ForwardProgram(model, (f"the decode program of {decoder.family} differs from it by {difference:.2g}",)), 0.0
    return program, difference


def _positions(model: PreTrainedModel) -> int:
    """Tokens that a sequence of the model may have."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 20)


def _eos_tokens(model: PreTrainedModel) -> list[int]:
    """The model's end-of-text tokens."""
    config = model.generation_config
    given = config.eos_token_id if config is not None else None
    return [] if given is None else [given] if isinstance(given, int) else list(given)
