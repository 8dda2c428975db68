"""Continuous batching: which sequences decode in the next step, and which prefill chunks are computed.

    waiting --(a slot, and pages for the prompt)--> prefill --(its last chunk)--> decode --(finished or cancelled)--> removed
       ^                                                             |
       +---------------- no page left: the newest is preempted ------+

Plain Python on integers without tensors, so that tests can try any order of arrivals.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowbit.engine.block_pool import BlockPool, pages_for
from lowbit.engine.sequence import FinishReason, Sequence
from lowbit.kernels.choose.attention import PAGE

LEAST_PART = 16
"""A chunk is split to fill a step from this number of tokens on; each part costs a launch of attention its own block."""


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `begin` to `end` of a sequence, computed at once. After the `last` chunk of a prompt a token is sampled."""

    sequence: Sequence
    begin: int
    tokens: tuple[int, ...]
    last: bool

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


@dataclass
class SchedulerOutput:
    """The work of a step: page-table entries to write, prefill chunks, and a decode step of the sequences `decoding`."""

    admitted: list[Sequence] = field(default_factory=list)
    new_pages: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, index in its page table, page)."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, int] = field(default_factory=dict)
    """Numbers of guessed tokens of decoding sequences, which the step verifies."""

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decoding)


class Scheduler:
    """Schedules sequences over `slots` slots and the pages of a cache.

    A step computes at most `chunk_tokens` prompt tokens, and chunks end at multiples of `chunk_tokens`. With `invariant`,
    results do not depend on other sequences: cached prefixes end at these multiples too, and a sequence gets all pages that it
    may need at once, since a preempted sequence would be computed in other chunks.
    """

    def __init__(
        self, slots: int, pages: BlockPool, chunk_tokens: int, *, prefix_caching: bool = True, invariant: bool = False
    ) -> None:
        if chunk_tokens % PAGE:
            raise ValueError(f"chunks of prompts are whole pages of {PAGE} tokens, got {chunk_tokens}")
        self.pages, self.chunk_tokens, self.prefix_caching, self.invariant = pages, chunk_tokens, prefix_caching, invariant
        self.waiting: deque[Sequence] = deque()
        """First in, first out; preempted sequences go back to the front. `schedule` takes from the front and never passes over
        a sequence that does not fit."""
        self.running: list[Sequence] = []
        """In the order of admission."""
        self._free_slots = list(range(slots - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Safe from any thread: an append to a deque is atomic. Raises ValueError for a sequence that could
        never run, since it may have more tokens than the cache."""
        most, have = sequence.request.most_tokens, (self.pages.count - 1) * PAGE
        if most > have:
            raise ValueError(f"this request needs {most:,} tokens of cache (prompt and limit), there are {have:,}")
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Frees the slot and pages of a sequence; its pages enter the prefix cache unless it failed. Work in flight still runs,
        and its results are discarded."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            if sequence.finish_reason is FinishReason.FAILED:
                self.pages.uncache(sequence.pages)
            else:
                self._cache(sequence)
            self._release(sequence)

    def abort_step(self, scheduled: SchedulerOutput | None) -> list[Sequence]:
        """Removes all sequences of a failed step, and returns them; pages that it should have filled leave the prefix cache.
        None: scheduling itself failed, so that all running sequences are removed."""
        if scheduled is None:
            scheduled = SchedulerOutput(
                admitted=list(self.running), chunks=[PrefillChunk(sequence, 0, (), False) for sequence in self.running]
            )
        for chunk in scheduled.chunks:
            self.pages.uncache(chunk.sequence.pages[chunk.begin // PAGE :])
        sequences = dict.fromkeys([*scheduled.admitted, *scheduled.decoding, *(chunk.sequence for chunk in scheduled.chunks)])
        lost = [sequence for sequence in sequences if sequence.slot is not None]  # without those dropped or requeued meanwhile
        for sequence in lost:
            self._release(sequence)
            if sequence in self.waiting:
                self.waiting.remove(sequence)
        return lost

    def drop(self, chunk: PrefillChunk, scheduled: SchedulerOutput) -> None:
        """Removes a sequence whose chunk could not be computed. Sequences of the same step that share its unwritten pages
        return to the queue."""
        unwritten = set(chunk.sequence.pages[chunk.begin // PAGE :])
        self.pages.uncache(list(unwritten))
        self._release(chunk.sequence)
        requeued = []
        for sequence in scheduled.admitted:
            first = next((i for i, page in enumerate(sequence.pages) if page in unwritten), None)
            if first is not None:
                unwritten.update(sequence.pages[first:])
                self.pages.uncache(sequence.pages[first:])
                self._release(sequence)
                sequence.launched_tokens = len(sequence.sampled)
                requeued.append(sequence)
        self.waiting.extendleft(reversed(requeued))

    def schedule(self, budget: int | None = None) -> SchedulerOutput:
        """Schedules the next step, and advances the counters of its sequences as if it had run. budget: maximum number of
        prompt tokens if sequences decode in the step (default: `chunk_tokens`); a longer chunk is split. With `invariant`
        chunks are not split.
        """
        scheduled = SchedulerOutput()
        for sequence in list(self.running):
            if self._decodes(sequence) and not self._allocate_next(sequence, scheduled):
                self._preempt(scheduled)
        scheduled.decoding = self.decoding
        for sequence in scheduled.decoding:
            sequence.computed_tokens = sequence.position + 1
            sequence.launched_tokens += 1
        limit = self.chunk_tokens
        if budget is not None and scheduled.decoding and not self.invariant:
            limit = min(limit, budget)
        left = self._add_chunks_of_running(scheduled, limit)
        while self.waiting and self._free_slots and left > 0:
            sequence = self.waiting[0]
            if sequence.in_flight or not self._admit(sequence, scheduled):
                break
            self.waiting.popleft()
            left = self._add_chunk(sequence, scheduled, left, limit)
        return scheduled

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences of which the next step samples a token, unless it preempts them."""
        # As `_decodes`, without a call for each sequence: this is read several times a step.
        return [each for each in self.running if each.prefilled and each.launched_tokens < each.request.limit]

    @property
    def waiting_tokens(self) -> int:
        """Number of prompt tokens not computed yet, of running sequences and as many waiting ones as there are free slots."""
        # A copy, which is made at once: another thread may submit a request meanwhile.
        admitted = itertools.islice(self.waiting.copy(), len(self._free_slots))
        ahead = [each for each in (*self.running, *admitted) if not each.prefilled]
        return sum(len(each.request.prompt) + len(each.sampled) - each.computed_tokens for each in ahead)

    def add_drafts(self, scheduled: SchedulerOutput, drafts: Mapping[Sequence, int]) -> None:
        """Adds guessed tokens of decoding sequences to a step, as far as there are pages for them. No sampled token of these
        sequences may be unread. The counters advance by one token until `accept` is called.
        """
        for sequence, count in drafts.items():
            while len(sequence.pages) * PAGE < sequence.computed_tokens + count:
                page = self.pages.allocate()
                if page is None:
                    break
                scheduled.new_pages.append((sequence.running_slot, len(sequence.pages), page))
                sequence.pages.append(page)
            if fitting := min(count, len(sequence.pages) * PAGE - sequence.computed_tokens):
                scheduled.drafts[sequence] = fitting

    def accept(self, sequence: Sequence, count: int) -> None:
        """Advances the counters of a sequence by `count` guessed tokens that were right."""
        sequence.computed_tokens += count
        sequence.launched_tokens += count
        sequence.drafted_tokens = min(sequence.drafted_tokens, sequence.computed_tokens)

    def _decodes(self, sequence: Sequence) -> bool:
        """True if a decode step samples one more token of a sequence."""
        return sequence.prefilled and sequence.launched_tokens < sequence.request.limit

    # ---- pages and slots

    def _allocate_next(self, sequence: Sequence, scheduled: SchedulerOutput) -> bool:
        """Allocates the page of a sequence's next token, if it lacks one; False if no page is free."""
        while len(sequence.pages) * PAGE <= sequence.position:
            page = self.pages.allocate()
            if page is None:
                return False
            scheduled.new_pages.append((sequence.running_slot, len(sequence.pages), page))
            sequence.pages.append(page)
        return True

    def _preempt(self, scheduled: SchedulerOutput) -> None:
        """Preempts the newest sequences, to the front of the queue, until all other decoding sequences have their page."""
        while self.running:
            newest = self.running[-1]
            scheduled.new_pages = [(slot, index, page) for slot, index, page in scheduled.new_pages if slot != newest.slot]
            self._cache(newest)
            self._release(newest)
            self.waiting.appendleft(newest)
            if all(self._allocate_next(sequence, scheduled) for sequence in self.running if self._decodes(sequence)):
                return

    def _admit(self, sequence: Sequence, scheduled: SchedulerOutput) -> bool:
        """Gives a sequence a slot, cached pages of its prefix and new ones; False if there are too few pages."""
        tokens = sequence.tokens
        unit = self.chunk_tokens // PAGE if self.invariant else 1
        most = (len(tokens) - 1) // PAGE // unit * unit  # not the last token: its logits are needed
        shared = self.pages.match_prefix(tokens, most, sequence.adapter) if self.prefix_caching else []
        extra = len(shared) % unit
        self.pages.free(shared[len(shared) - extra :])
        shared = shared[: len(shared) - extra]
        whole = sequence.request.most_tokens if self.invariant else len(tokens)
        needed = pages_for(whole) - len(shared)
        if needed > self.pages.available:
            self.pages.free(shared)
            return False
        new = [self.pages.allocate() for _ in range(needed)]
        sequence.pages = [*shared, *(page for page in new if page is not None)]
        sequence.slot = self._free_slots.pop()
        sequence.computed_tokens = len(shared) * PAGE
        sequence.cached_tokens = min(len(shared) * PAGE, len(sequence.request.prompt))
        self.running.append(sequence)
        scheduled.admitted.append(sequence)
        scheduled.new_pages += [(sequence.slot, index, page) for index, page in enumerate(sequence.pages)]
        return True

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        self.pages.free(sequence.pages)
        sequence.slot, sequence.pages = None, []
        sequence.computed_tokens, sequence.prefilled = 0, False

    def _cache(self, sequence: Sequence) -> None:
        """Adds computed pages to the prefix cache, including those of the output, with which the next turn of a conversation
        begins.
        """
        if self.prefix_caching:
            known = sequence.request.prompt if self.invariant else sequence.tokens
            self.pages.cache_prefix(sequence.pages, known[: min(sequence.computed_tokens, len(known))], sequence.adapter)

    # ---- prefill chunks

    def _add_chunks_of_running(self, scheduled: SchedulerOutput, limit: int) -> int:
        """Adds chunks of running sequences; returns how many of `limit` prompt tokens the step has left."""
        left = limit
        for sequence in self.running:
            if left > 0 and not sequence.prefilled:
                left = self._add_chunk(sequence, scheduled, left, limit)
        return left

    def _add_chunk(self, sequence: Sequence, scheduled: SchedulerOutput, left: int, limit: int) -> int:
        """Adds the next chunk of a sequence if it fits; returns how many prompt tokens are left, 0 if it did not fit. A chunk
        that does not fit an empty step is split, and beside decoding sequences also one that fills a step."""
        tokens = sequence.tokens
        begin = sequence.computed_tokens
        end = min(len(tokens), (begin // self.chunk_tokens + 1) * self.chunk_tokens)
        if end - begin > left:
            if left < (min(LEAST_PART, limit) if limit < self.chunk_tokens else limit):
                return 0
            end = begin + left
        last = end == len(tokens)
        scheduled.chunks.append(PrefillChunk(sequence, begin, tuple(tokens[begin:end]), last))
        sequence.computed_tokens = end
        sequence.prefilled = last
        sequence.launched_tokens += last
        if self.prefix_caching:
            self.pages.cache_prefix(sequence.pages, tokens[:end], sequence.adapter)
        return left - (end - begin)
