"""Continuous batching: which requests decode in the next step, and which prefill chunks are computed.

    waiting --(a slot, and pages for the prompt)--> prefill --(its last chunk)--> decode --(finished or cancelled)--> removed
       ^                                                             |
       +---------------- no page left: the newest is preempted ------+

Plain Python over integers, without tensors, so that a test can try any order of arrivals.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lowbit.engine.block_pool import BlockPool, pages_for
from lowbit.engine.request import FinishReason, Request
from lowbit.kernels.choose.attention import PAGE


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `begin` to `end` of a sequence, computed at once. After the `last` chunk of a prompt a token is sampled."""

    request: Request
    begin: int
    tokens: tuple[int, ...]
    last: bool

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


@dataclass
class SchedulerOutput:
    """The work of a step: page-table entries to write, prefill chunks, and a decode step of the requests `decoding`."""

    admitted: list[Request] = field(default_factory=list)
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, index in its page table, page)."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decoding)


class Scheduler:
    """Schedules requests over `slots` slots and the pages of a cache.

    A step computes at most `chunk_tokens` prompt tokens. Chunks end at multiples of `chunk_tokens`. With `invariant`, so do
    cached prefixes, and a request is given all pages that it may ever need at once: a preempted request would be computed in
    other chunks. Its results then do not depend on other requests.
    """

    def __init__(
        self, slots: int, pages: BlockPool, chunk_tokens: int, *, prefix_caching: bool = True, invariant: bool = False
    ) -> None:
        if chunk_tokens % PAGE:
            raise ValueError(f"chunks of prompts are whole pages of {PAGE} tokens, got {chunk_tokens}")
        self.pages, self.chunk_tokens, self.prefix_caching, self.invariant = pages, chunk_tokens, prefix_caching, invariant
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In the order of admission."""
        self._free_slots = list(range(slots - 1, -1, -1))

    def refusals(self, request: Request) -> tuple[str, ...]:
        """Reasons why a request can never run here; empty if it can."""
        most = len(request.prompt) + request.limit
        have = (self.pages.count - 1) * PAGE
        return (f"needs {most:,} tokens of cache (prompt and limit), there are {have:,}",) if most > have else ()

    def add(self, request: Request) -> None:
        """Queues a request without refusals. Safe from any thread: an append to a deque is atomic."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Frees the slot and pages of a request; its pages enter the prefix cache unless it failed. Work in flight still runs,
        and its results are discarded."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            if request.finish_reason is FinishReason.FAILED:
                self.pages.uncache(request.pages)
            else:
                self._cache(request)
            self._release(request)

    def abort_step(self, planned: SchedulerOutput | None) -> list[Request]:
        """Removes all requests of a failed step, and returns them; pages that it should have filled leave the prefix cache.
        None: scheduling itself failed, so that all running requests are removed."""
        if planned is None:
            planned = SchedulerOutput(
                admitted=list(self.running), chunks=[PrefillChunk(request, 0, (), False) for request in self.running]
            )
        for chunk in planned.chunks:
            self.pages.uncache(chunk.request.pages[chunk.begin // PAGE :])
        requests = dict.fromkeys([*planned.admitted, *planned.decoding, *(chunk.request for chunk in planned.chunks)])
        lost = [request for request in requests if request.slot is not None]  # not those dropped or requeued since
        for request in lost:
            self._release(request)
            if request in self.waiting:
                self.waiting.remove(request)
        return lost

    def drop(self, chunk: PrefillChunk, planned: SchedulerOutput) -> None:
        """Removes a request whose chunk could not be computed. Requests of the same step that share its unwritten pages return
        to the queue."""
        unwritten = set(chunk.request.pages[chunk.begin // PAGE :])
        self.pages.uncache(list(unwritten))
        self._release(chunk.request)
        requeued = []
        for request in planned.admitted:
            first = next((i for i, page in enumerate(request.pages) if page in unwritten), None)
            if first is not None:
                unwritten.update(request.pages[first:])
                self.pages.uncache(request.pages[first:])
                self._release(request)
                request.launched = len(request.sampled)
                requeued.append(request)
        self.waiting.extendleft(reversed(requeued))

    def schedule(self) -> SchedulerOutput:
        """Schedules the next step. The counters of its requests are advanced as if it had run."""
        planned = SchedulerOutput()
        for request in list(self.running):
            if self._decodes(request) and not self._allocate_next(request, planned):
                self._preempt(planned)
        planned.decoding = [request for request in self.running if self._decodes(request)]
        for request in planned.decoding:
            request.computed = request.position + 1
            request.launched += 1
        left = self._add_chunks_of_running(planned)
        while self.waiting and self._free_slots and left > 0:
            request = self.waiting[0]
            if request.in_flight or not self._admit(request, planned):
                break
            self.waiting.popleft()
            left = self._add_chunk(request, planned, left)
        return planned

    def _decodes(self, request: Request) -> bool:
        """True if a decode step samples one more token of a request."""
        return request.prefilled and request.launched < request.limit

    # ---- pages and slots

    def _allocate_next(self, request: Request, planned: SchedulerOutput) -> bool:
        """Allocates the page of a request's next token, if it lacks one; False if no page is free."""
        while len(request.pages) * PAGE <= request.position:
            page = self.pages.allocate()
            if page is None:
                return False
            planned.new_pages.append((request.row, len(request.pages), page))
            request.pages.append(page)
        return True

    def _preempt(self, planned: SchedulerOutput) -> None:
        """Preempts the newest requests, back to the front of the queue, until all other decoding requests have their page."""
        while self.running:
            newest = self.running[-1]
            planned.new_pages = [(slot, index, page) for slot, index, page in planned.new_pages if slot != newest.slot]
            self._cache(newest)
            self._release(newest)
            self.waiting.appendleft(newest)
            if all(self._allocate_next(request, planned) for request in self.running if self._decodes(request)):
                return

    def _admit(self, request: Request, planned: SchedulerOutput) -> bool:
        """Gives a request a slot, cached pages of its prefix and new ones; False if there are too few pages."""
        tokens = request.tokens
        unit = self.chunk_tokens // PAGE if self.invariant else 1
        most = (len(tokens) - 1) // PAGE // unit * unit  # not the last token: its logits are needed
        shared = self.pages.match_prefix(tokens, most) if self.prefix_caching else []
        extra = len(shared) % unit
        self.pages.free(shared[len(shared) - extra :])
        shared = shared[: len(shared) - extra]
        whole = len(request.prompt) + request.limit if self.invariant else len(tokens)
        needed = pages_for(whole) - len(shared)
        if needed > self.pages.available:
            self.pages.free(shared)
            return False
        new = [self.pages.allocate() for _ in range(needed)]
        request.pages = [*shared, *(page for page in new if page is not None)]
        request.slot = self._free_slots.pop()
        request.computed = len(shared) * PAGE
        request.cached_tokens = min(len(shared) * PAGE, len(request.prompt))
        self.running.append(request)
        planned.admitted.append(request)
        planned.new_pages += [(request.slot, index, page) for index, page in enumerate(request.pages)]
        return True

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        assert request.slot is not None
        self._free_slots.append(request.slot)
        self.pages.free(request.pages)
        request.slot, request.pages = None, []
        request.computed, request.prefilled = 0, False

    def _cache(self, request: Request) -> None:
        """Adds computed pages to the prefix cache, answers included: the next turn of a conversation begins with them."""
        if self.prefix_caching:
            known = request.prompt if self.invariant else request.tokens
            self.pages.cache_prefix(request.pages, known[: min(request.computed, len(known))])

    # ---- prefill chunks

    def _add_chunks_of_running(self, planned: SchedulerOutput) -> int:
        """Adds chunks of running requests; returns how many prompt tokens the step has left."""
        left = self.chunk_tokens
        for request in self.running:
            if left > 0 and not request.prefilled:
                left = self._add_chunk(request, planned, left)
        return left

    def _add_chunk(self, request: Request, planned: SchedulerOutput, left: int) -> int:
        """Adds the next chunk of a request if it fits; returns how many prompt tokens are left, 0 if it did not fit."""
        tokens = request.tokens
        begin = request.computed
        end = min(len(tokens), (begin // self.chunk_tokens + 1) * self.chunk_tokens)
        if end - begin > left and left < self.chunk_tokens:
            return 0
        last = end == len(tokens)
        planned.chunks.append(PrefillChunk(request, begin, tuple(tokens[begin:end]), last))
        request.computed = end
        request.prefilled = last
        request.launched += last
        if self.prefix_caching:
            self.pages.cache_prefix(request.pages, tokens[:end])
        return left - (end - begin)
