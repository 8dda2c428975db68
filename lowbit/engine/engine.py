"""Many texts at once from one model: requests come and go at every step, and the host is a step ahead of the GPU.

    engine = Engine(model)
    request = engine.submit(Request(prompt, limit=100))
    for drawn in engine.stream(request): ...

A round (`Engine.step`) plans, launches what is planned, and only then reads what the round before has drawn: the GPU never
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

from lowbit.engine.batching import Batch, Piece, Round
from lowbit.engine.cache import Cache, Room
from lowbit.engine.chain import Chain
from lowbit.engine.check import LARGEST_DIFFERENCE, TOKENS, difference_to, kernel_refusals
from lowbit.engine.failure import Attempt, RoundFailed, in_words
from lowbit.engine.family import recognise
from lowbit.engine.forward import ForwardProgram
from lowbit.engine.graphs import Graphs
from lowbit.engine.pages import Pages
from lowbit.engine.program import DecodeProgram
from lowbit.engine.prompts import Prompts
from lowbit.engine.request import Drawn, End, Request
from lowbit.engine.slots import Slots, on_device
from lowbit.engine.steps import Program, Step, Steps, draw, filters
from lowbit.engine.warm_up import Rehearsal, Stage
from lowbit.hardware.machine import machine_of
from lowbit.ops.sample import top_logprobs

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import Wanted

logger = logging.getLogger(__name__)

PIECE = 1024
"""Tokens of prompts between two steps: enough for the tensor cores, and tens of milliseconds at most for those who wait."""


@dataclass
class Launched:
    """What was launched: whose tokens, in the order of rows, where they will be, and how many rows were read."""

    requests: list[Request]
    tokens: Tensor
    logprobs: Tensor
    likeliest: tuple[Tensor, Tensor] | None
    done: torch.cuda.Event | None
    read: int = 0


class Engine:
    """Generates texts with a causal language model of Transformers.

    `max_concurrent` requests are computed at once, others wait; a request has at most `max_length` tokens (default: as many as
    the model has positions, as far as the cache holds them). `cache_bytes`: memory for keys and values (default: most of what a
    GPU has free). `batch_invariant`: a text has the same bits whoever is computed beside it, for models whose quantized layers
    were made so (`nn.linear.make_batch_invariant`). `sharing`: prompts that begin alike share what is computed. The decode
    program takes the model's weights over into forms of its own, without a second copy. Raises ValueError where not even one
    request fits into the cache. `forward`: computes by the model's own forward, one text at a time, as models do that no decode
    program knows. `ahead`: reads what was drawn a round later, which a GPU does not wait for. `ends`: tokens that
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
        piece: int = PIECE,
        batch_invariant: bool = False,
        sharing: bool = True,
        forward: bool = False,
        ahead: bool = True,
        ends: Sequence[int] | None = None,
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
        allocated = isinstance(self.program, DecodeProgram)
        self._positions = positions
        self._room = Room.on(self.device, cache_bytes, allocated=allocated)  # what the program leaves
        if max_length is None:
            self.max_length = min(self.max_length, self._room.longest(self.program.page_bytes))
        pages = self._room.pages(self.program.page_bytes, max_concurrent, self.max_length)
        if isinstance(self.program, DecodeProgram):
            self.program.cache = Cache(self.program.cache_spec, pages, self.device)
        self.batch = Batch(max_concurrent, Pages(pages), piece, sharing=sharing and allocated, invariant=batch_invariant)
        vocab = model.config.get_text_config().vocab_size
        self.ends = [end for end in (_ends(model) if ends is None else ends) if 0 <= end < vocab]  # no other is ever drawn
        self.slots = Slots(max_concurrent, self.max_length, vocab, self.ends, self.device)
        captures = on_gpu and isinstance(self.program, DecodeProgram)
        graphs = Graphs(self.device) if captures else None
        self.steps = Steps(self.program, self.slots, max_concurrent, graphs=graphs, invariant=batch_invariant)
        self.prompts = Prompts(self.program, self.slots, min(piece, max_concurrent * self.max_length), graphs=graphs)
        self._rehearsal: Rehearsal | None = None
        if captures and isinstance(self.program, DecodeProgram):
            self._rehearsal = Rehearsal(self.program, self.steps, self.prompts, max_concurrent, self.max_length)
        self._progress = progress or (lambda stage: None)
        self._ahead = ahead
        self._flying: deque[Launched] = deque()
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
        reasons = self.batch.refusals(request)
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
            if request.submitted or request.end is not None:
                raise ValueError("this request was submitted before: make another one")
            request.submitted = True
            self.batch.add(request)
        return request

    def _limit(self, tokens: int) -> str:
        """Why a text cannot have so many tokens, and what to do."""
        if tokens > self._positions:
            return f"the model has {self._positions:,} positions: shorten the prompt or ask for fewer new tokens"
        if tokens > self._room.longest(self.program.page_bytes):
            return self._room.refusal(self.program.page_bytes, tokens)
        return "so says max_length of the engine: make one with more, or ask for fewer tokens"

    def cancel(self, request: Request) -> None:
        """Ends a request where it is, at once, whoever is doing a round; one that has ended stays as it is."""
        self._end(request, End.CANCELLED)
        # Else the round that is being done lets go of it, or the next. It may be this thread's: in the middle of one the
        # collector ends streams that were given up.
        if self._lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def stream(self, request: Request) -> Generator[Drawn, None, None]:
        """The tokens of a submitted request as they come; giving the iterator up cancels the request. Raises TextFailed at
        the end of a text that failed."""
        read = 0
        try:
            while True:
                ended = request.end is not None  # asked first: another thread may read the last tokens now
                while read < len(request.drawn):
                    yield request.drawn[read]
                    read += 1
                if ended:
                    break
                with contextlib.suppress(RoundFailed):  # others' perhaps
                    self.step()
        finally:
            self.cancel(request)
        request.check()

    def generate(self, requests: Iterable[Request]) -> list[Request]:
        """Submits requests and runs until all of them have ended; if something fails on the way, none of them stays behind.
        Raises TextFailed, once all have ended, if one of them failed."""
        submitted: list[Request] = []
        try:
            for request in requests:
                submitted.append(self.submit(request))
            while any(request.end is None for request in submitted):
                with contextlib.suppress(RoundFailed):  # others' perhaps
                    self.step()
        finally:
            for request in submitted:
                self.cancel(request)
        for request in submitted:
            request.check()
        return submitted

    @torch.inference_mode()
    def step(self) -> None:
        """One round: launches what is due, then reads what the round before has drawn.

        A request that fails by itself ends as failed, `Request.error` says why, and nobody else notices: one whose prompt or
        `watch` raises an error, or whose logits are no numbers. Raises RoundFailed where that cannot be told apart, and all
        requests of the round have ended so; then `submit` says whether the GPU still computes.
        """
        if self._doing == threading.get_ident():
            raise RuntimeError("this thread is doing a round: what a round calls, a watch or progress, cannot do another")
        with self._lock:
            self._doing = threading.get_ident()
            try:
                self._round()
            finally:
                self._doing = None

    def _round(self) -> None:
        self._let_go()
        earlier = len(self._flying)
        planned = self._launch_next()
        if not (planned and self._ahead):
            earlier = len(self._flying)
        for _ in range(min(earlier, len(self._flying))):
            self._read(self._flying[0])
            self._flying.popleft()
        self._let_go()

    def compile(self) -> Iterator[Stage]:
        """Compiles every kernel, by several processes where Triton's cache does not have it; says how far it is before each."""
        if self._rehearsal is None:
            return
        with self._lock:
            wanted = self._rehearsal.kernels(self._rehearsal.everything())
        yield from self._compiled(wanted)

    def warm_up(self) -> Iterator[Stage]:
        """Compiles every kernel and captures every graph, so that no request waits for either; says what comes before each."""
        yield from self.compile()
        variants = self.steps.variants() if self.steps.graphs else []
        total = len(variants) + len(self.prompts.forms)
        for done, variant in enumerate(variants):
            size, filtered, reach = variant
            yield Stage(f"step of {size}{' with filters' if filtered else ''}, up to {reach:,} tokens", done, total)
            with self._lock, torch.inference_mode():
                self.steps.captured(variant)
        for done, form in enumerate(self.prompts.forms, len(variants)):
            yield Stage(f"prompts of {form.tokens:,} tokens that see {form.keys:,}", done, total)
            with self._lock, torch.inference_mode():
                self.prompts.captured(form)

    def report(self) -> list[str]:
        """How texts are computed, a line each."""
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

    def _launch_next(self) -> Round:
        """Plans and launches a round; if that fails, all that it was for ends and everything else goes on."""
        planned = None
        try:
            planned = self.batch.plan()
            if planned:
                self._launch(planned)
            return planned
        except BaseException as error:
            self._fail_round(self.batch.give_up(planned), error)
            raise

    def _launch(self, planned: Round) -> None:
        self.program.keep(self.batch.running)  # not of requests that were preempted
        if self._rehearsal is not None and (parts := self._rehearsal.of_round(planned)):
            with Attempt("compiling kernels"):  # whatever it is, it shows itself again where a kernel is launched
                self._compile(self._rehearsal.kernels(parts))
        for request in planned.joined:
            drawn = [each.token for each in request.drawn]
            self.slots.sampling.set(request.row, request.sampling, request.prompt, drawn)
        last = [piece for piece in planned.pieces if piece.last]
        ends = [(piece.request.row, piece.end - 1) for piece in last]
        self.slots.update(planned.grown, ends)
        if planned.steps:
            rows = [request.row for request in planned.steps]
            longest = max(request.computed for request in planned.steps)
            self._fly(planned.steps, self.steps.launch(rows, filters(planned.steps), longest))
        if planned.pieces and self.program.computes_together:
            self._launch_pieces(planned.pieces, planned)
        elif planned.pieces:
            self._launch_one_by_one(planned.pieces, planned)

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

    def _launch_pieces(self, pieces: Sequence[Piece], planned: Round) -> None:
        """Computes pieces of prompts together; if that raises an error, one by one, so that those fail that do so alone."""
        with Attempt("computing a prompt") as tried:
            logits = self.prompts.launch(pieces)
        if not tried.error:
            requests = [piece.request for piece in pieces if piece.last]
            if logits is not None:
                rows = on_device([request.row for request in requests], self.device)
                self._fly(requests, draw(logits, rows, self.slots, filters(requests)))
        elif len(pieces) > 1:
            self._launch_one_by_one(pieces, planned)
        else:
            self.batch.drop(pieces[0], planned)
            self._fail([pieces[0].request], tried.error)

    def _launch_one_by_one(self, pieces: Sequence[Piece], planned: Round) -> None:
        for piece in pieces:
            if piece.request.slot is not None:  # else it waits again, for pages that one before should have filled
                self._launch_pieces([piece], planned)

    def _fail(self, requests: Sequence[Request], error: str) -> None:
        """Ends requests as failed, and all there are where the GPU does not compute any more."""
        for request in requests:
            self._end(request, End.FAILED, error)
        with Attempt("waiting for the GPU") as tried:
            _wait_for(self.device)
        if tried.error:  # a CUDA error stays: nothing is ever computed after it in this process
            with self._noting:  # who submits is told, or is among them
                self._broken = tried.error
                everybody = (*self.batch.running, *self.batch.waiting)
            for request in everybody:
                self._end(request, End.FAILED, tried.error)
            self._flying.clear()

    def _fail_round(self, requests: Sequence[Request], error: BaseException) -> None:
        """The same for those of a round; raises RoundFailed, so that others than these can go on."""
        self._fail(requests, in_words(error))
        if requests and isinstance(error, Exception):
            logger.warning("a round failed", exc_info=error)
            count = f"{len(requests)} request{'s' if len(requests) > 1 else ''}"
            raise RoundFailed(f"a round of {count} failed: {in_words(error)}") from error

    def _fly(self, requests: Sequence[Request], step: Step) -> None:
        """Sends what a step draws on its way to the host."""
        most = max(request.likeliest for request in requests)
        likeliest = None
        if most:
            values, ids = top_logprobs(step.logits[: len(requests)], most)
            likeliest = _to_host(values), _to_host(ids)
        tokens, logprobs = _to_host(step.tokens), _to_host(step.logprobs)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
        self._flying.append(Launched(list(requests), tokens, logprobs, likeliest, done))

    def _read(self, launched: Launched) -> None:
        try:
            if launched.done is not None:
                launched.done.synchronize()
        except RuntimeError as error:
            self._flying.clear()
            self._fail_round(self.batch.give_up(None), error)
            raise
        tokens, logprobs = launched.tokens.tolist(), launched.logprobs.tolist()
        beside = None if launched.likeliest is None else [part.tolist() for part in launched.likeliest]
        while launched.read < len(launched.requests):
            row, request = launched.read, launched.requests[launched.read]
            launched.read += 1  # first: an interrupt must not repeat a token
            if request.end is not None:
                continue  # it ended, or was given up, while this was computed
            if math.isnan(logprobs[row]):
                self._end(request, End.FAILED, "the model's logits are NaN or infinite")
                continue
            likeliest: tuple[tuple[int, float], ...] = ()
            if beside is not None and request.likeliest:
                values, ids = (part[row][: request.likeliest] for part in beside)
                likeliest = tuple(zip(ids, values, strict=True))
            self._take(request, Drawn(tokens[row], logprobs[row], likeliest))

    def _take(self, request: Request, drawn: Drawn) -> None:
        request.drawn.append(drawn)
        stopped = False
        if request.watch is not None:
            try:
                with Attempt("a caller's watch") as tried:
                    stopped = request.watch(drawn)
            except BaseException as error:  # an interrupt
                self._end(request, End.FAILED, in_words(error))
                raise
            if tried.error:
                self._end(request, End.FAILED, tried.error)
        if drawn.token in request.ends or stopped:
            self._end(request, End.STOP)
        elif len(request.drawn) == request.limit:
            self._end(request, End.LENGTH)

    def _end(self, request: Request, end: End, error: str = "") -> None:
        """Ends a request if nobody has; what it holds is let go of by the thread that does the rounds."""
        with self._noting:
            if request.end is not None:
                return
            request.error, request.end = error, end
        if end is End.FAILED:
            logger.warning(f"a text failed: {error}")
        self._ended.append(request)

    def _let_go(self) -> None:
        """Takes back the slots and pages of requests that have ended."""
        while self._ended:
            self.batch.remove(self._ended.popleft())
        self.program.keep(self.batch.running)


def _wait_for(device: torch.device) -> None:
    """Waits until a GPU has done all it was given; raises RuntimeError if it fails."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to_host(values: Tensor) -> Tensor:
    """A copy in the host's memory, on its way."""
    if values.device.type != "cuda":
        return values.clone()
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def _program(model: PreTrainedModel, positions: int, batch_invariant: bool, forward: bool) -> tuple[Program, float]:
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


def _ends(model: PreTrainedModel) -> list[int]:
    """The model's end-of-text tokens."""
    config = model.generation_config
    given = config.eos_token_id if config is not None else None
    return [] if given is None else [given] if isinstance(given, int) else list(given)
