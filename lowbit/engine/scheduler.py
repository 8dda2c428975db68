"""Who computes what in the next round: requests join and leave at every step, long prompts in chunks between the steps.

    waiting --(a slot, and pages for the prompt)--> prompt --(its last chunk)--> stepping --(end, or given up)--> gone
       ^                                                            |
       +---------------- no page left: the newest gives way --------+

Plain Python over numbers: nothing here knows of tensors, so that every order of arrivals can be tried in a test.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lowbit.engine.block_pool import BlockPool, pages_for
from lowbit.engine.request import FinishReason, Request
from lowbit.kernels.choose.attention import PAGE


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `begin` to `end` of a request's text, to be computed at once; after the `last` one a token is sampled."""

    request: Request
    begin: int
    tokens: tuple[int, ...]
    last: bool

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


@dataclass
class SchedulerOutput:
    """What to compute next, in this order: new pages, chunks of prompts, one step of `steps`."""

    admitted: list[Request] = field(default_factory=list)
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, place in its table, page)."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decoding)


class Scheduler:
    """Requests over `slots` places and the pages of a cache.

    A round computes at most `chunk_tokens` tokens of prompts, but at least one chunk. Chunks end at multiples of `chunk_tokens`, and
    with `invariant` shared pages do too: what is computed together never depends on who else is there. A request is then given all
    the pages that it may ever need at once, since what gives way and starts again computes in other chunks.
    """

    def __init__(
        self, slots: int, pages: BlockPool, chunk_tokens: int, *, prefix_caching: bool = True, invariant: bool = False
    ) -> None:
        if chunk_tokens % PAGE:
            raise ValueError(f"chunks of prompts are whole pages of {PAGE} tokens, got {chunk_tokens}")
        self.pages, self.chunk_tokens, self.prefix_caching, self.invariant = pages, chunk_tokens, prefix_caching, invariant
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In the order in which they joined."""
        self._free_slots = list(range(slots - 1, -1, -1))

    def refusals(self, request: Request) -> tuple[str, ...]:
        """Why a request can never run here; empty if it can."""
        most = len(request.prompt) + request.limit
        have = (self.pages.count - 1) * PAGE
        return (f"needs {most:,} tokens of cache (prompt and limit), there are {have:,}",) if most > have else ()

    def add(self, request: Request) -> None:
        """Queues a request that `refusals` has nothing against; at any time: an append to a deque is one step."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Lets go of whatever a request holds, which others may share unless it failed; what of it is on the GPU still runs,
        and nobody reads it."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            if request.finish_reason is FinishReason.FAILED:
                self.pages.uncache(request.pages)
            else:
                self._publish(request)
            self._leave(request)

    def abort_step(self, planned: SchedulerOutput | None) -> list[Request]:
        """Lets go of all that a round was for, since it failed: nobody may share pages that it should have filled. None: it
        failed while it was planned, so that nobody knows how far any of those who run is."""
        if planned is None:
            planned = SchedulerOutput(
                admitted=list(self.running), chunks=[PrefillChunk(request, 0, (), False) for request in self.running]
            )
        for chunk in planned.chunks:
            self.pages.uncache(chunk.request.pages[chunk.begin // PAGE :])
        found = dict.fromkeys([*planned.admitted, *planned.decoding, *(chunk.request for chunk in planned.chunks)])
        lost = [request for request in found if request.slot is not None]  # others were dropped, or wait again
        for request in lost:
            self._leave(request)
            if request in self.waiting:
                self.waiting.remove(request)
        return lost

    def drop(self, chunk: PrefillChunk, planned: SchedulerOutput) -> None:
        """Lets go of a request whose chunk of a round cannot be computed. Who joined in the round to share its pages waits
        again: nobody has written them."""
        unwritten = set(chunk.request.pages[chunk.begin // PAGE :])
        self.pages.uncache(list(unwritten))
        self._leave(chunk.request)
        back = []
        for request in planned.admitted:
            first = next((i for i, page in enumerate(request.pages) if page in unwritten), None)
            if first is not None:
                unwritten.update(request.pages[first:])
                self.pages.uncache(request.pages[first:])
                self._leave(request)
                request.launched = len(request.sampled)
                back.append(request)
        self.waiting.extendleft(reversed(back))

    def schedule(self) -> SchedulerOutput:
        """The next round, taken as launched: the numbers of the requests are already those after it."""
        planned = SchedulerOutput()
        for request in list(self.running):
            if self._steps(request) and not self._grow(request, planned):
                self._preempt(planned)
        planned.decoding = [request for request in self.running if self._steps(request)]
        for request in planned.decoding:
            request.computed = request.position + 1
            request.launched += 1
        left = self._add_chunks_of_running(planned)
        while self.waiting and self._free_slots and left > 0:
            request = self.waiting[0]
            if request.in_flight or not self._join(request, planned):
                break
            self.waiting.popleft()
            left = self._add_chunk(request, planned, left)
        return planned

    def _steps(self, request: Request) -> bool:
        """Whether a step draws one more token of a request."""
        return request.prefilled and request.launched < request.limit

    # ---- pages and slots

    def _grow(self, request: Request, planned: SchedulerOutput) -> bool:
        """Gives a request the page of its next token, if it has none."""
        while len(request.pages) * PAGE <= request.position:
            page = self.pages.allocate()
            if page is None:
                return False
            planned.new_pages.append((request.row, len(request.pages), page))
            request.pages.append(page)
        return True

    def _preempt(self, planned: SchedulerOutput) -> None:
        """Puts the newest requests back in front of the queue until every step of the others has its page."""
        while self.running:
            newest = self.running[-1]
            planned.new_pages = [(slot, place, page) for slot, place, page in planned.new_pages if slot != newest.slot]
            self._publish(newest)
            self._leave(newest)
            self.waiting.appendleft(newest)
            if all(self._grow(request, planned) for request in self.running if self._steps(request)):
                return

    def _join(self, request: Request, planned: SchedulerOutput) -> bool:
        """A slot and pages for the text as it is, those that others have computed among them; False if there are too few."""
        tokens = request.tokens
        unit = self.chunk_tokens // PAGE if self.invariant else 1
        most = (len(tokens) - 1) // PAGE // unit * unit  # the last token has to be computed, for its logits
        shared = self.pages.match_prefix(tokens, most) if self.prefix_caching else []
        extra = len(shared) % unit
        self.pages.free(shared[len(shared) - extra :])
        shared = shared[: len(shared) - extra]
        whole = len(request.prompt) + request.limit if self.invariant else len(tokens)
        needed = pages_for(whole) - len(shared)
        if needed > self.pages.available:
            self.pages.free(shared)
            return False
        taken = [self.pages.allocate() for _ in range(needed)]
        request.pages = [*shared, *(page for page in taken if page is not None)]
        request.slot = self._free_slots.pop()
        request.computed = len(shared) * PAGE
        request.cached_tokens = min(len(shared) * PAGE, len(request.prompt))
        self.running.append(request)
        planned.admitted.append(request)
        planned.new_pages += [(request.slot, place, page) for place, page in enumerate(request.pages)]
        return True

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        assert request.slot is not None
        self._free_slots.append(request.slot)
        self.pages.free(request.pages)
        request.slot, request.pages = None, []
        request.computed, request.prefilled = 0, False

    def _publish(self, request: Request) -> None:
        """Lets later requests share what is computed of a text, of an answer too: a dialogue comes back with it."""
        if self.prefix_caching:
            known = request.prompt if self.invariant else request.tokens
            self.pages.cache_prefix(request.pages, known[: min(request.computed, len(known))])

    # ---- chunks of prompts

    def _add_chunks_of_running(self, planned: SchedulerOutput) -> int:
        """Pieces of requests that have begun; how many tokens the round has left for others."""
        left = self.chunk_tokens
        for request in self.running:
            if left > 0 and not request.prefilled:
                left = self._add_chunk(request, planned, left)
        return left

    def _add_chunk(self, request: Request, planned: SchedulerOutput, left: int) -> int:
        """The next chunk of a request, if the round has room; the room left, 0 if it had not."""
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
