"""Many sequences at once from one model: requests come and go at every step, and the host is a step ahead of the GPU.

    engine = Engine(model)
    request = engine.submit(Request(prompt, limit=100))
    for sampled in engine.stream(request): ...

A round (`Engine.step`) plans, launches what is planned, and only then reads what the round before has sampled: the GPU never
waits for Python. So a text that ends is computed one token further, which nobody reads. Whoever waits for a text does the
rounds for all of them; several threads may wait. What is submitted or cancelled meanwhile waits for no round: it is noted, and
the next round begins with it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbit.engine.block_pool import BlockPool, pages_for
from lowbit.engine.cache import Cache, CacheBudget
from lowbit.engine.chain import Chain
from lowbit.engine.check import LARGEST_DIFFERENCE, TOKENS, difference_to, kernel_refusals
from lowbit.engine.decode_runner import DecodeRunner, DecodeStep, ModelProgram, filters, sample_tokens
from lowbit.engine.failure import Attempt, StepFailed, in_words
from lowbit.engine.family import recognise
from lowbit.engine.forward import ForwardProgram
from lowbit.engine.graphs import Graphs
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.program import DecodeProgram
from lowbit.engine.request import FinishReason, Request, SampledToken
from lowbit.engine.scheduler import PrefillChunk, Scheduler, SchedulerOutput
from lowbit.engine.slots import Slots, on_device
from lowbit.engine.warm_up import Stage, WarmUpRun
from lowbit.hardware.machine import machine_of
from lowbit.ops.sample import top_logprobs

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import Wanted

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 1024
"""Tokens of prompts between two steps: enough for the tensor cores, and tens of milliseconds at most for those who wait."""


@dataclass
class InFlightStep:
    """What was launched: whose tokens, in the order of rows, where they will be, and how many rows were read."""

    requests: list[Request]
    tokens: Tensor
    logprobs: Tensor
    top_logprobs: tuple[Tensor, Tensor] | None
    done: torch.cuda.Event | None
    read: int = 0


class Engine:
    """Generates sequences with a causal language model of Transformers.

    `max_concurrent` requests are computed at once, others wait; a request has at most `max_length` tokens (default: as many as
    the model has positions, as far as the cache holds them). `cache_bytes`: memory for keys and values (default: most of what a
    GPU has free). `batch_invariant`: a text has the same bits whoever is computed beside it, for models whose quantized layers
    were made so (`nn.linear.make_batch_invariant`). `prefix_caching`: prompts that begin alike share what is computed. The decode
    program takes the model's weights over into forms of its own, without a second copy. Raises ValueError where not even one
    request fits into the cache. `forward`: computes by the model's own forward, one text at a time, as models do that no decode
    program knows. `async_scheduling`: reads what was sampled a round later, which a GPU does not wait for. `stop_token_ids`: tokens that
    `Sampling.min_new_tokens` holds back (default: the end-of-text tokens of the model's generation config). `progress` is told
    how far kernels are compiled that a round waits for, and at the end that all are.
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
        stop_token_ids: Sequence[int] | None = None,
        progress: Callable[[Stage], object] | None = None,
    ) -> None:
        if max_concurrent < 1:
            raise ValueError(f"an engine computes at least 1 request at once, got max_concurrent={max_concurrent}")
        if max_length is not None and max_length < 2:
            raise ValueError(f"a text has at least 2 tokens, a prompt's and one more, got max_length={max_length}")
        self.device = model.device
        on_gpu = self.device.type == "cuda"
        positions = _positions(model)
        self.max_length = min(max_length or positions, positions)
        # Whatever the caller's mode is: the weights that a program joins stay the model's, which may be trained.
        with torch.inference_mode(next(model.parameters()).is_inference()):
            self.program, self.difference = _program(model, self.max_length, batch_invariant, forward)
        self._positions, self._cache_budget = (
            positions,
            CacheBudget.for_device(self.device, cache_bytes),
        )  # what the program leaves
        pages = 1 + max_concurrent * pages_for(self.max_length)
        if isinstance(self.program, DecodeProgram):
            spec = self.program.cache_spec
            if max_length is None:
                self.max_length = min(self.max_length, self._cache_budget.longest(spec))
            pages = self._cache_budget.pages(spec, max_concurrent, self.max_length)
            self.program.cache = Cache(spec, pages, self.device)
        caches = prefix_caching and isinstance(self.program, DecodeProgram)
        self.scheduler = Scheduler(
            max_concurrent, BlockPool(pages), chunk_tokens, prefix_caching=caches, invariant=batch_invariant
        )
        vocab = model.config.get_text_config().vocab_size
        self.stop_token_ids = [
            token for token in (_eos_tokens(model) if stop_token_ids is None else stop_token_ids) if 0 <= token < vocab
        ]  # no other is ever sampled
        self.slots = Slots(max_concurrent, self.max_length, vocab, self.stop_token_ids, self.device)
        captures = on_gpu and isinstance(self.program, DecodeProgram)
        graphs = Graphs(self.device) if captures else None
        self.decode_runner = DecodeRunner(self.program, self.slots, max_concurrent, graphs=graphs, invariant=batch_invariant)
        self.prefill_runner = PrefillRunner(
            self.program, self.slots, min(chunk_tokens, max_concurrent * self.max_length), graphs=graphs
        )
        self._warm_up_run: WarmUpRun | None = None
        if captures and isinstance(self.program, DecodeProgram):
            self._warm_up_run = WarmUpRun(
                self.program, self.decode_runner, self.prefill_runner, max_concurrent, self.max_length
            )
        self._progress = progress or (lambda stage: None)
        self._async_scheduling = async_scheduling
        self._in_flight: deque[InFlightStep] = deque()
        self._lock = threading.Lock()
        """Of rounds, and of all that they plan with."""
        self._doing: int | None = None
        """The thread that does a round."""
        self._noting = threading.RLock()
        """Of what other threads note of a request meanwhile: never held for longer than that takes. The collector may end a
        stream that was given up while this thread holds it."""
        self._ended: deque[Request] = deque()
        """Requests that have ended, and may still hold slots and pages."""
        self._broken = ""

    # ---- what callers do

    def submit(self, request: Request) -> Request:
        """Queues a request, at once, whoever is doing a round; raises ValueError for one that can never run here, RuntimeError
        when the GPU computes nothing any more."""
        if self._broken:
            raise RuntimeError(f"the GPU of this engine failed, start another process: {self._broken}")
        most = len(request.prompt) + request.limit
        reasons = self.scheduler.refusals(request)
        if most > self.max_length:
            asked = f"this request has {len(request.prompt):,} tokens and asks for {request.limit:,} more"
            raise ValueError(f"a text has at most {self.max_length:,} tokens here, {asked}; {self._limit(most)}")
        if reasons:
            raise ValueError(f"this request {'; '.join(reasons)}")
        vocab = self.slots.sampling.counts.shape[1]
        for what, tokens in (("prompt", request.prompt), ("logit_bias", [token for token, _ in request.sampling.bias])):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
                wrong = next(token for token in tokens if not 0 <= token < vocab)
                raise ValueError(f"tokens are from 0 to {vocab - 1}, this {what} has {wrong}")
        with self._noting:
            if self._broken:  # meanwhile
                raise RuntimeError(f"the GPU of this engine failed, start another process: {self._broken}")
            if request.submitted or request.finish_reason is not None:
                raise ValueError("this request was submitted before: make another one")
            request.submitted = True
            self.scheduler.add(request)
        return request

    def _limit(self, tokens: int) -> str:
        """Why a text cannot have so many tokens, and what to do."""
        if tokens > self._positions:
            return f"the model has {self._positions:,} positions: shorten the prompt or ask for fewer new tokens"
        if isinstance(self.program, DecodeProgram) and tokens > self._cache_budget.longest(self.program.cache_spec):
            return self._cache_budget.refusal(self.program.cache_spec, tokens)
        return "so says max_length of the engine: make one with more, or ask for fewer tokens"

    def cancel(self, request: Request) -> None:
        """Ends a request where it is, at once, whoever is doing a round; one that has ended stays as it is."""
        self._end(request, FinishReason.CANCELLED)
        # Else the round that is being done lets go of it, or the next. It may be this thread's: in the middle of one the
        # collector ends streams that were given up.
        if self._lock.acquire(blocking=False):
            try:
                self._free_finished()
            finally:
                self._lock.release()

    def stream(self, request: Request) -> Generator[SampledToken, None, None]:
        """The tokens of a submitted request as they come; giving the iterator up cancels the request. Raises RequestFailed at
        the end of a text that failed."""
        read = 0
        try:
            while True:
                ended = request.finish_reason is not None  # asked first: another thread may read the last tokens now
                while read < len(request.sampled):
                    yield request.sampled[read]
                    read += 1
                if ended:
                    break
                with contextlib.suppress(StepFailed):  # others' perhaps
                    self.step()
        finally:
            self.cancel(request)
        request.check()

    def generate(self, requests: Iterable[Request]) -> list[Request]:
        """Submits requests and runs until all of them have ended; if something fails on the way, none of them stays behind.
        Raises RequestFailed, once all have ended, if one of them failed."""
        submitted: list[Request] = []
        try:
            for request in requests:
                submitted.append(self.submit(request))
            while any(request.finish_reason is None for request in submitted):
                with contextlib.suppress(StepFailed):  # others' perhaps
                    self.step()
        finally:
            for request in submitted:
                self.cancel(request)
        for request in submitted:
            request.check()
        return submitted

    @torch.inference_mode()
    def step(self) -> None:
        """One round: launches what is due, then reads what the round before has sampled.

        A request that fails by itself ends as failed, `Request.error` says why, and nobody else notices: one whose prompt or
        `on_token` raises an error, or whose logits are no numbers. Raises StepFailed where that cannot be told apart, and all
        requests of the round have ended so; then `submit` says whether the GPU still computes.
        """
        if self._doing == threading.get_ident():
            raise RuntimeError("this thread is doing a round: what a round calls, a watch or progress, cannot do another")
        with self._lock:
            self._doing = threading.get_ident()
            try:
                self._step()
            finally:
                self._doing = None

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
        """Compiles every kernel, by several processes where Triton's cache does not have it; says how far it is before each."""
        if self._warm_up_run is None:
            return
        with self._lock:
            wanted = self._warm_up_run.kernels(self._warm_up_run.everything())
        yield from self._compiled(wanted)

    def warm_up(self) -> Iterator[Stage]:
        """Compiles every kernel and captures every graph, so that no request waits for either; says what comes before each."""
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
        """How sequences are computed, a line each."""
        if self.program.reasons:
            return [f"through Transformers' forward, one text at a time: {'; '.join(self.program.reasons)}"]
        assert isinstance(self.program, DecodeProgram) and self.program.cache is not None
        decoder = self.program.decoder
        return [
            f"decode program of {decoder.family}, {len(decoder.layers)} layers; logits differ from Transformers' forward by "
            f"{self.difference:.1e}, relatively",
            f"cache: {self.program.cache}",
            *self._launches(),
        ]

    def _launches(self) -> list[str]:
        assert isinstance(self.program, DecodeProgram)
        if isinstance(self.program.chain, Chain):
            return [f"steps of up to {self.program.chain.most} tokens: 5 launches a layer"]
        return [f"small steps take as many launches a layer as larger ones: {'; '.join(self.program.chain)}"]

    # ---- a round

    def _launch_next(self) -> SchedulerOutput:
        """Plans and launches a round; if that fails, all that it was for ends and everything else goes on."""
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
        if self._warm_up_run is not None and (parts := self._warm_up_run.parts_of(planned)):
            with Attempt("compiling kernels"):  # whatever it is, it shows itself again where a kernel is launched
                self._compile(self._warm_up_run.kernels(parts))
        for request in planned.admitted:
            sampled = [each.token for each in request.sampled]
            self.slots.sampling.set(request.row, request.sampling, request.prompt, sampled)
        last = [chunk for chunk in planned.chunks if chunk.last]
        ends = [(chunk.request.row, chunk.end - 1) for chunk in last]
        self.slots.update(planned.new_pages, ends)
        if planned.decoding:
            rows = [request.row for request in planned.decoding]
            longest = max(request.computed for request in planned.decoding)
            self._copy_results(planned.decoding, self.decode_runner.launch(rows, filters(planned.decoding), longest))
        if planned.chunks and self.program.computes_together:
            self._launch_chunks(planned.chunks, planned)
        elif planned.chunks:
            self._launch_one_by_one(planned.chunks, planned)

    def _compiled(self, wanted: Sequence[Wanted]) -> Iterator[Stage]:
        if wanted:
            from lowbit.kernels.parts.compile import compiled

            for done in compiled(wanted, machine_of(self.device).arch.sm):
                yield Stage("kernels", done, len(wanted))

    def _compile(self, wanted: Sequence[Wanted]) -> None:
        """Compiles the kernels of a round before it launches them, where one after the other would be."""
        for stage in self._compiled(wanted):
            self._progress(stage)
        if wanted:
            self._progress(Stage("kernels", len(wanted), len(wanted)))

    def _launch_chunks(self, chunks: Sequence[PrefillChunk], planned: SchedulerOutput) -> None:
        """Computes chunks of prompts together; if that raises an error, one by one, so that those fail that do so alone."""
        with Attempt("computing a prompt") as tried:
            logits = self.prefill_runner.launch(chunks)
        if not tried.error:
            requests = [chunk.request for chunk in chunks if chunk.last]
            if logits is not None:
                rows = on_device([request.row for request in requests], self.device)
                self._copy_results(requests, sample_tokens(logits, rows, self.slots, filters(requests)))
        elif len(chunks) > 1:
            self._launch_one_by_one(chunks, planned)
        else:
            self.scheduler.drop(chunks[0], planned)
            self._fail([chunks[0].request], tried.error)

    def _launch_one_by_one(self, chunks: Sequence[PrefillChunk], planned: SchedulerOutput) -> None:
        for chunk in chunks:
            if chunk.request.slot is not None:  # else it waits again, for pages that one before should have filled
                self._launch_chunks([chunk], planned)

    def _fail(self, requests: Sequence[Request], error: str) -> None:
        """Ends requests as failed, and all there are where the GPU does not compute any more."""
        for request in requests:
            self._end(request, FinishReason.FAILED, error)
        with Attempt("waiting for the GPU") as tried:
            _wait_for(self.device)
        if tried.error:  # a CUDA error stays: nothing is ever computed after it in this process
            with self._noting:  # who submits is told, or is among them
                self._broken = tried.error
                everybody = (*self.scheduler.running, *self.scheduler.waiting)
            for request in everybody:
                self._end(request, FinishReason.FAILED, tried.error)
            self._in_flight.clear()

    def _fail_step(self, requests: Sequence[Request], error: BaseException) -> None:
        """The same for those of a round; raises StepFailed, so that others than these can go on."""
        self._fail(requests, in_words(error))
        if requests and isinstance(error, Exception):
            logger.warning("a round failed", exc_info=error)
            count = f"{len(requests)} request{'s' if len(requests) > 1 else ''}"
            raise StepFailed(f"a round of {count} failed: {in_words(error)}") from error

    def _copy_results(self, requests: Sequence[Request], step: DecodeStep) -> None:
        """Sends what a step draws on its way to the host."""
        most = max(request.top_logprobs for request in requests)
        top = None
        if most:
            values, ids = top_logprobs(step.logits[: len(requests)], most)
            top = _to_host(values), _to_host(ids)
        tokens, logprobs = _to_host(step.tokens), _to_host(step.logprobs)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
        self._in_flight.append(InFlightStep(list(requests), tokens, logprobs, top, done))

    def _read(self, launched: InFlightStep) -> None:
        try:
            if launched.done is not None:
                launched.done.synchronize()
        except RuntimeError as error:
            self._in_flight.clear()
            self._fail_step(self.scheduler.abort_step(None), error)
            raise
        tokens, logprobs = launched.tokens.tolist(), launched.logprobs.tolist()
        beside = None if launched.top_logprobs is None else [part.tolist() for part in launched.top_logprobs]
        while launched.read < len(launched.requests):
            row, request = launched.read, launched.requests[launched.read]
            launched.read += 1  # first: an interrupt must not repeat a token
            if request.finish_reason is not None:
                continue  # it ended, or was given up, while this was computed
            if math.isnan(logprobs[row]):
                self._end(request, FinishReason.FAILED, "the model's logits are NaN or infinite")
                continue
            top: tuple[tuple[int, float], ...] = ()
            if beside is not None and request.top_logprobs:
                values, ids = (part[row][: request.top_logprobs] for part in beside)
                top = tuple(zip(ids, values, strict=True))
            self._take(request, SampledToken(tokens[row], logprobs[row], top))

    def _take(self, request: Request, sampled: SampledToken) -> None:
        request.sampled.append(sampled)
        stopped = False
        if request.on_token is not None:
            try:
                with Attempt("a caller's watch") as tried:
                    stopped = request.on_token(sampled)
            except BaseException as error:  # an interrupt
                self._end(request, FinishReason.FAILED, in_words(error))
                raise
            if tried.error:
                self._end(request, FinishReason.FAILED, tried.error)
        if sampled.token in request.stop_token_ids or stopped:
            self._end(request, FinishReason.STOP)
        elif len(request.sampled) == request.limit:
            self._end(request, FinishReason.LENGTH)

    def _end(self, request: Request, end: FinishReason, error: str = "") -> None:
        """Ends a request if nobody has; what it holds is let go of by the thread that does the rounds."""
        with self._noting:
            if request.finish_reason is not None:
                return
            request.error, request.finish_reason = error, end
        if end is FinishReason.FAILED:
            logger.warning(f"a text failed: {error}")
        self._ended.append(request)

    def _free_finished(self) -> None:
        """Takes back the slots and pages of requests that have ended."""
        while self._ended:
            self.scheduler.remove(self._ended.popleft())


def _wait_for(device: torch.device) -> None:
    """Waits until a GPU has done all it was given; raises RuntimeError if it fails."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to_host(values: Tensor) -> Tensor:
    """A copy in the host's memory, on its way."""
    if values.device.type != "cuda":
        return values.clone()
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def _program(model: PreTrainedModel, positions: int, batch_invariant: bool, forward: bool) -> tuple[ModelProgram, float]:
    """The decode program of a model and how far its logits are from the model's own; its forward where there is none."""
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
    if not difference <= LARGEST_DIFFERENCE:  # nor if it is no number
        return ForwardProgram(model, (f"the decode program of {decoder.family} differs from it by {difference:.2g}",)), 0.0
    return program, difference


def _positions(model: PreTrainedModel) -> int:
    """How many tokens a text may have."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 20)


def _eos_tokens(model: PreTrainedModel) -> list[int]:
    """The model's end-of-text tokens."""
    config = model.generation_config
    given = config.eos_token_id if config is not None else None
    return [] if given is None else [given] if isinstance(given, int) else list(given)
