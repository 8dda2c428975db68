"""The scheduler: pages, prefix caching, preemption. A device in plain Python finds every wrong page.

The device stores the token of each row of each page. Its "model" samples a token that depends on all tokens of a sequence, read
through the page table. A page that belongs to another sequence, is stale, reused too early or not written yet gives another
token.
"""

from __future__ import annotations

import sys
import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.engine.block_pool import DUMMY_PAGE, BlockPool
from lowbit.engine.request import Request, SampledToken
from lowbit.engine.scheduler import Scheduler
from lowbit.engine.sequence import FinishReason, Sequence
from lowbit.kernels.choose.attention import PAGE

VOCAB = 5


def next_token(tokens):
    return (sum((i + 1) * (t + 1) for i, t in enumerate(tokens)) + len(tokens)) % VOCAB


def alone(prompt, limit):
    """The tokens that a request samples without others."""
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Device:
    """Pages whose rows store tokens, page tables, and the token that each slot computes next."""

    def __init__(self, pages):
        self.pages = [[None] * PAGE for _ in range(pages)]
        self.tables, self.tokens, self.positions = {}, {}, {}

    def write(self, slot, position, token):
        page = self.tables[slot, position // PAGE]
        assert page != DUMMY_PAGE
        self.pages[page][position % PAGE] = token

    def read(self, slot, count):
        return [self.pages[self.tables[slot, i // PAGE]][i % PAGE] for i in range(count)]

    def run(self, scheduled, guesses):
        """Runs a step in the order of its launches; returns the sampled tokens, by sequence. guesses: of each sequence, of
        which the step verifies the first ones."""
        sampled = []
        for slot, place, page in scheduled.new_pages:
            self.tables[slot, place] = page
        for sequence in scheduled.decoding:
            slot, position = sequence.slot, self.positions[sequence.slot]
            rows = (self.tokens[slot], *guesses.get(sequence, ())[: scheduled.drafts.get(sequence, 0)])
            for i, token in enumerate(rows):
                self.write(slot, position + i, token)
            for i in range(len(rows)):
                sampled.append((sequence, self.sample(slot, position + i + 1)))
                if i + 1 < len(rows) and rows[i + 1] != self.tokens[slot]:
                    break
        for chunk in scheduled.chunks:  # all chunks are written before any is read
            for position, token in zip(range(chunk.begin, chunk.end), chunk.tokens, strict=True):
                self.write(chunk.sequence.slot, position, token)
        for chunk in scheduled.chunks:
            assert self.read(chunk.sequence.slot, chunk.end) == chunk.sequence.tokens[: chunk.end]
            if chunk.last:
                sampled.append((chunk.sequence, self.sample(chunk.sequence.slot, chunk.end)))
        return sampled

    def sample(self, slot, count):
        tokens = self.read(slot, count)
        assert None not in tokens
        self.tokens[slot], self.positions[slot] = next_token(tokens), count
        return self.tokens[slot]


class Host:
    """Steps as the engine runs them: with `ahead`, a step is launched before the results of the one before are read. `guesses`:
    in some steps that many tokens of each sequence are guessed, some of them wrong. `budget`: of prompt tokens beside decoding
    sequences."""

    def __init__(self, slots, pages, chunk, ahead=True, sharing=True, invariant=False, guesses=0, budget=None):
        self.budget = budget
        self.guesses, self.verified = guesses, 0
        self.scheduler = Scheduler(slots, BlockPool(pages), chunk, prefix_caching=sharing, invariant=invariant)
        self.device, self.ahead = Device(pages), ahead
        self.flying = deque()
        self.steps = []

    def step(self):
        verifies = self.guesses and len(self.steps) % 5 < 3
        if verifies or any(self.flying_drafts):
            while self.flying:
                self.read()
        scheduled = self.scheduler.schedule(self.budget)
        guesses = {sequence: self.guessed(sequence) for sequence in scheduled.decoding} if verifies else {}
        self.scheduler.add_drafts(scheduled, {sequence: len(guessed) for sequence, guessed in guesses.items()})
        earlier = len(self.flying)
        if scheduled:
            self.flying.append((self.device.run(scheduled, guesses), scheduled.drafts))
            self.steps.append(scheduled)
        for _ in range(earlier if scheduled and self.ahead else len(self.flying)):
            self.read()

    @property
    def flying_drafts(self):
        return [drafts for _, drafts in self.flying]

    def guessed(self, sequence):
        request, known = sequence.request, len(sequence.sampled)
        right = alone(request.prompt, request.limit)[known : min(known + self.guesses, request.limit - 1)]
        return tuple(token if (i + len(self.steps)) % 4 else (token + 1) % VOCAB for i, token in enumerate(right))

    def read(self):
        """Reads the oldest step in flight; guesses that were right advance their sequences first."""
        sampled, drafts = self.flying.popleft()
        for sequence in drafts:
            if sequence.slot is not None:
                count = sum(each is sequence for each, _ in sampled) - 1
                self.scheduler.accept(sequence, count)
                self.verified += count
        for sequence, token in sampled:
            if sequence.finish_reason is None:
                sequence.sampled.append(SampledToken(token, 0.0))
                if token in sequence.request.stop_token_ids or len(sequence.sampled) == sequence.request.limit:
                    self.end(sequence, FinishReason.LENGTH)

    def end(self, sequence, end):
        self.scheduler.remove(sequence)
        sequence.finish_reason = end

    def finish(self, sequences):
        for _ in range(5000):
            if all(sequence.finish_reason is not None for sequence in sequences):
                break
            self.step()
        assert all(sequence.finish_reason is not None for sequence in sequences), "sequences wait for ever"
        self.check_idle()

    def check_idle(self):
        """Checks that without sequences every page and slot is free."""
        while self.flying:
            self.step()
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.pages.available == self.scheduler.pages.count - 1


def sequence_of(prompt, limit, **options):
    return Sequence(Request(prompt, limit, **options))


def prompt(length, seed=0):
    return [(seed * 7 + i * i) % VOCAB for i in range(length)]


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 400])
@pytest.mark.parametrize("ahead", [True, False])
def test_sequences_at_the_borders_of_pages_and_chunks(length, ahead):
    host = Host(2, 20, 256, ahead)
    sequence = sequence_of(prompt(length), 140)
    host.scheduler.add(sequence)
    host.finish([sequence])
    assert [d.token for d in sequence.sampled] == alone(sequence.request.prompt, 140)


def test_prompts_with_a_common_prefix_share_pages():
    host = Host(4, 40, 512)
    first, second = sequence_of(prompt(300), 3), sequence_of([*prompt(300), 1, 2], 3)
    host.scheduler.add(first)
    host.finish([first])
    host.scheduler.add(second)
    host.finish([second])
    assert (first.cached_tokens, second.cached_tokens) == (0, 256)
    assert [d.token for d in second.sampled] == alone(second.request.prompt, 3)
    third = sequence_of(prompt(256), 2)  # its last token is computed for its logits, so only one page is reused
    host.scheduler.add(third)
    host.finish([third])
    assert third.cached_tokens == 128


def test_a_follow_up_turn_reuses_the_pages_of_the_answer():
    host = Host(4, 40, 512)
    first = sequence_of(prompt(200), 100)
    host.scheduler.add(first)
    host.finish([first])
    second = sequence_of([*first.tokens, 3, 3], 5)
    host.scheduler.add(second)
    host.finish([second])
    assert second.cached_tokens == 256 and [d.token for d in second.sampled] == alone(second.request.prompt, 5)


def test_the_newest_is_preempted():
    """Three sequences that need 3 pages each, in 7 pages: all are admitted, the newest is preempted, none is lost."""
    host = Host(4, 8, 512, sharing=False)
    sequences = [sequence_of(prompt(130, seed), 200) for seed in range(3)]
    for sequence in sequences:
        host.scheduler.add(sequence)
    host.finish(sequences)
    assert [[d.token for d in r.sampled] for r in sequences] == [alone(r.request.prompt, r.request.limit) for r in sequences]
    begun = [scheduled.admitted for scheduled in host.steps if scheduled.admitted]
    assert begun[0] == sequences and len(begun) > 1, "none was preempted"
    assert all(sequence is not sequences[0] for again in begun[1:] for sequence in again), "the oldest was preempted"


def test_sequences_that_can_never_run_are_refused():
    scheduler = Scheduler(1, BlockPool(3), 128)
    scheduler.add(sequence_of(prompt(200), 56))
    with pytest.raises(ValueError, match=r"needs 257 tokens of cache \(prompt and limit\), there are 256"):
        scheduler.add(sequence_of(prompt(200), 57))
    assert len(scheduler.waiting) == 1
    with pytest.raises(ValueError, match="whole pages of 128 tokens, got 100"):
        Scheduler(1, BlockPool(3), 100)
    with pytest.raises(ValueError, match="at least 2 pages"):
        BlockPool(1)


def test_guesses_have_pages_as_far_as_there_are_any():
    """Sequences whose guesses reach over the border of a page, in a cache that is full."""
    host = Host(4, 6, 128, sharing=False, guesses=7)
    sequences = [sequence_of(prompt(120, seed), 100) for seed in range(3)]
    for sequence in sequences:
        host.scheduler.add(sequence)
    host.finish(sequences)
    assert [[d.token for d in r.sampled] for r in sequences] == [alone(r.request.prompt, r.request.limit) for r in sequences]
    counts = {count for scheduled in host.steps for count in scheduled.drafts.values()}
    assert host.verified > 50 and max(counts) == 7 and len(counts) > 3


def test_invariant_chunks_do_not_depend_on_others():
    """Chunks begin at multiples of the chunk size, with cached prefixes or not, and no sequence is preempted."""
    host = Host(3, 30, 256, invariant=True)
    sequences = [sequence_of(prompt(400 + 10 * i), 150) for i in range(4)]
    for sequence in sequences:
        host.scheduler.add(sequence)
    host.finish(sequences)
    assert all(chunk.begin % 256 == 0 for scheduled in host.steps for chunk in scheduled.chunks)
    assert [r for scheduled in host.steps for r in scheduled.admitted] == sequences
    assert [r.cached_tokens for r in sequences][1:] == [256, 256, 256]


def test_a_step_has_chunks_of_several_prompts():
    host = Host(8, 60, 256)
    sequences = [sequence_of(prompt(60, seed), 1) for seed in range(5)]
    for sequence in sequences:
        host.scheduler.add(sequence)
    host.step()
    assert [len(chunk.tokens) for chunk in host.steps[0].chunks] == [60, 60, 60, 60]
    host.finish(sequences)


def test_tokens_that_wait_are_counted_while_another_thread_submits():
    scheduler, done = Scheduler(64, BlockPool(200), 128), threading.Event()
    for i in range(40):
        scheduler.add(Sequence.start(Request([1] * (i + 1), 2)))
    assert scheduler.waiting_tokens == 40 * 41 // 2

    def come_and_go():
        while not done.is_set():
            scheduler.waiting.append(scheduler.waiting.popleft())

    switches, thread = sys.getswitchinterval(), threading.Thread(target=come_and_go)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        counts = {scheduler.waiting_tokens for _ in range(4000)}
    finally:
        sys.setswitchinterval(switches)
        done.set()
        thread.join()
    assert min(counts) >= 40 * 41 // 2 - 40 and max(counts) <= 40 * 41 // 2


@pytest.mark.parametrize("budget", [1, 5, 15, 16, 100])
def test_prompts_advance_beside_a_sequence_that_decodes_on(budget):
    """Also by a budget that is smaller than the least part of a chunk."""
    host = Host(2, 8, 128, budget=budget)
    long, other = sequence_of(prompt(3, 0), 300), sequence_of(prompt(40, 1), 1)
    host.scheduler.add(long)
    host.step()
    host.scheduler.add(other)
    for _ in range(-(-40 // budget) + 3):
        host.step()
    assert long.finish_reason is None and other.finish_reason is not None


def test_a_budget_splits_chunks_beside_decoding_sequences():
    """Only then; `invariant` keeps whole chunks."""
    for invariant in (False, True):
        host = Host(4, 40, 256, sharing=False, invariant=invariant, budget=100)
        first, second = sequence_of(prompt(10), 60), sequence_of(prompt(600), 3)
        for sequence in (first, second):
            host.scheduler.add(sequence)
            host.step()
        host.finish([first, second])
        counts = [sum(len(c.tokens) for c in s.chunks) for s in host.steps if s.chunks and s.decoding]
        assert counts == ([256, 256, 88] if invariant else [100, 100, 56, 100, 100, 56, 88])
        assert [d.token for d in second.sampled] == alone(second.request.prompt, 3)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps before it is submitted
        st.integers(1, 300),  # tokens of the prompt
        st.integers(0, 2),  # which prompt: few, so that many have a common prefix
        st.integers(1, 150),  # limit
        st.one_of(st.none(), st.integers(0, 60)),  # steps until it is cancelled
        st.booleans(),  # token 0 is a stop token
    ),
    min_size=1,
    max_size=8,
)


@given(
    ARRIVALS,
    st.integers(1, 4),
    st.integers(5, 14),
    st.sampled_from([128, 256]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1, 7]),
    st.sampled_from([None, 1, 100]),
)
def test_any_order_of_arrivals_gives_the_tokens_of_each_alone(
    arrivals, slots, pages, chunk, ahead, sharing, invariant, guesses, budget
):
    host = Host(slots, pages, chunk, ahead, sharing, invariant, guesses, budget)
    coming = [
        (wait, sequence_of(prompt(length, seed), limit, stop_token_ids=frozenset({0} if ends else ())), cancel)
        for wait, length, seed, limit, cancel, ends in arrivals
    ]
    coming = [(wait, r, cancel) for wait, r, cancel in coming if r.request.most_tokens <= (pages - 1) * PAGE]
    for now in range(80):
        for wait, sequence, cancel in coming:
            if wait == now:
                host.scheduler.add(sequence)
            if cancel is not None and wait + cancel == now and sequence.finish_reason is None:
                host.end(sequence, FinishReason.CANCELLED)
        host.step()
    sequences = [sequence for _, sequence, _ in coming]
    host.finish(sequences)
    for sequence in sequences:
        sampled, expected = [d.token for d in sequence.sampled], alone(sequence.request.prompt, sequence.request.limit)
        if sequence.request.stop_token_ids and 0 in expected:
            expected = expected[: expected.index(0) + 1]
        assert sampled == expected[: len(sampled)]
        assert sequence.finish_reason is FinishReason.CANCELLED or len(sampled) == len(expected)
