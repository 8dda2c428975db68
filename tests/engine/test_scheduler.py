"""Who computes what when: pages, sharing, giving way, and a device of plain Python that finds every wrong page.

The device remembers which text each place of each page was written for. Its "model" draws a token that depends on the whole
text, read through the pages: a page that is another's, stale, reused too early or not written yet gives another token.
"""

from __future__ import annotations

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


def next_token(text):
    return (sum((i + 1) * (t + 1) for i, t in enumerate(text)) + len(text)) % VOCAB


def alone(prompt, limit):
    """What a sequence draws if nobody else is there."""
    text = list(prompt)
    for _ in range(limit):
        text.append(next_token(text))
    return text[len(prompt) :]


class Device:
    """Pages whose places hold tokens; tables and the token that each slot computes next."""

    def __init__(self, pages):
        self.pages = [[None] * PAGE for _ in range(pages)]
        self.tables, self.tokens, self.positions = {}, {}, {}

    def write(self, slot, position, token):
        page = self.tables[slot, position // PAGE]
        assert page != DUMMY_PAGE
        self.pages[page][position % PAGE] = token

    def text(self, slot, count):
        return [self.pages[self.tables[slot, i // PAGE]][i % PAGE] for i in range(count)]

    def run(self, planned):
        """Everything of a round in the order of its launches; the tokens drawn, by sequence."""
        drawn = []
        for slot, place, page in planned.new_pages:
            self.tables[slot, place] = page
        for sequence in planned.decoding:
            slot, position = sequence.slot, self.positions[sequence.slot]
            self.write(slot, position, self.tokens[slot])
            drawn.append((sequence, self.draw(slot, position + 1)))
        for chunk in planned.chunks:  # all are written before any is read
            for position, token in zip(range(chunk.begin, chunk.end), chunk.tokens, strict=True):
                self.write(chunk.sequence.slot, position, token)
        for chunk in planned.chunks:
            assert self.text(chunk.sequence.slot, chunk.end) == chunk.sequence.tokens[: chunk.end]
            if chunk.last:
                drawn.append((chunk.sequence, self.draw(chunk.sequence.slot, chunk.end)))
        return drawn

    def draw(self, slot, count):
        text = self.text(slot, count)
        assert None not in text
        self.tokens[slot], self.positions[slot] = next_token(text), count
        return self.tokens[slot]


class Host:
    """Rounds as the engine does them, `ahead` of what is read."""

    def __init__(self, slots, pages, chunk, ahead=True, sharing=True, invariant=False):
        self.scheduler = Scheduler(slots, BlockPool(pages), chunk, prefix_caching=sharing, invariant=invariant)
        self.device, self.ahead = Device(pages), ahead
        self.flying = deque()
        self.rounds = []

    def round(self):
        planned = self.scheduler.schedule()
        earlier = len(self.flying)
        if planned:
            self.flying.append(self.device.run(planned))
            self.rounds.append(planned)
        for _ in range(earlier if planned and self.ahead else len(self.flying)):
            for sequence, token in self.flying.popleft():
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
            self.round()
        assert all(sequence.finish_reason is not None for sequence in sequences), "sequences wait for ever"
        self.check_idle()

    def check_idle(self):
        """Once nobody is there, every page and slot is free again."""
        while self.flying:
            self.round()
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.pages.available == self.scheduler.pages.count - 1


def sequence_of(prompt, limit, **options):
    return Sequence(Request(prompt, limit, **options))


def prompt(length, seed=0):
    return [(seed * 7 + i * i) % VOCAB for i in range(length)]


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 400])
@pytest.mark.parametrize("ahead", [True, False])
def test_texts_at_the_borders_of_pages_and_pieces(length, ahead):
    host = Host(2, 20, 256, ahead)
    sequence = sequence_of(prompt(length), 140)
    host.scheduler.add(sequence)
    host.finish([sequence])
    assert [d.token for d in sequence.sampled] == alone(sequence.request.prompt, 140)


def test_prompts_that_begin_alike_share_pages():
    host = Host(4, 40, 512)
    first, second = sequence_of(prompt(300), 3), sequence_of([*prompt(300), 1, 2], 3)
    host.scheduler.add(first)
    host.finish([first])
    host.scheduler.add(second)
    host.finish([second])
    assert (first.cached_tokens, second.cached_tokens) == (0, 256)
    assert [d.token for d in second.sampled] == alone(second.request.prompt, 3)
    third = sequence_of(prompt(256), 2)  # its last token has to be computed, so only one page can be another's
    host.scheduler.add(third)
    host.finish([third])
    assert third.cached_tokens == 128


def test_a_dialogue_comes_back_with_its_answer():
    host = Host(4, 40, 512)
    first = sequence_of(prompt(200), 100)
    host.scheduler.add(first)
    host.finish([first])
    second = sequence_of([*first.tokens, 3, 3], 5)
    host.scheduler.add(second)
    host.finish([second])
    assert second.cached_tokens == 256 and [d.token for d in second.sampled] == alone(second.request.prompt, 5)


def test_out_of_pages_the_newest_waits():
    """Three texts that need 3 pages each, in 7: all begin, the newest gives way, none is lost."""
    host = Host(4, 8, 512, sharing=False)
    sequences = [sequence_of(prompt(130, seed), 200) for seed in range(3)]
    for sequence in sequences:
        host.scheduler.add(sequence)
    host.finish(sequences)
    assert [[d.token for d in r.sampled] for r in sequences] == [alone(r.request.prompt, r.request.limit) for r in sequences]
    begun = [planned.admitted for planned in host.rounds if planned.admitted]
    assert begun[0] == sequences and len(begun) > 1, "somebody had to give way"
    assert all(sequence is not sequences[0] for again in begun[1:] for sequence in again), "never the oldest"


def test_what_cannot_ever_run_is_refused():
    scheduler = Scheduler(1, BlockPool(3), 128)
    scheduler.add(sequence_of(prompt(200), 56))
    with pytest.raises(ValueError, match=r"needs 257 tokens of cache \(prompt and limit\), there are 256"):
        scheduler.add(sequence_of(prompt(200), 57))
    assert len(scheduler.waiting) == 1
    with pytest.raises(ValueError, match="whole pages of 128 tokens, got 100"):
        Scheduler(1, BlockPool(3), 100)
    with pytest.raises(ValueError, match="at least 2 pages"):
        BlockPool(1)


def test_invariant_pieces_do_not_depend_on_others():
    """Begins of chunks are multiples of the chunk, shared pages or not, and nobody gives way."""
    host = Host(3, 30, 256, invariant=True)
    sequences = [sequence_of(prompt(400 + 10 * i), 150) for i in range(4)]
    for sequence in sequences:
        host.scheduler.add(sequence)
    host.finish(sequences)
    assert all(chunk.begin % 256 == 0 for planned in host.rounds for chunk in planned.chunks)
    assert [r for planned in host.rounds for r in planned.admitted] == sequences
    assert [r.cached_tokens for r in sequences][1:] == [256, 256, 256]


def test_a_round_has_room_for_others_pieces():
    host = Host(8, 60, 256)
    sequences = [sequence_of(prompt(60, seed), 1) for seed in range(5)]
    for sequence in sequences:
        host.scheduler.add(sequence)
    host.round()
    assert [len(chunk.tokens) for chunk in host.rounds[0].chunks] == [60, 60, 60, 60]
    host.finish(sequences)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # rounds before it comes
        st.integers(1, 300),  # tokens of the prompt
        st.integers(0, 2),  # which text: few, so that many begin alike
        st.integers(1, 150),  # limit
        st.one_of(st.none(), st.integers(0, 60)),  # rounds until it is given up
        st.booleans(),  # ends at token 0
    ),
    min_size=1,
    max_size=8,
)


@given(
    ARRIVALS, st.integers(1, 4), st.integers(5, 14), st.sampled_from([128, 256]), st.booleans(), st.booleans(), st.booleans()
)
def test_any_order_of_arrivals_gives_what_each_draws_alone(arrivals, slots, pages, chunk, ahead, sharing, invariant):
    host = Host(slots, pages, chunk, ahead, sharing, invariant)
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
        host.round()
    sequences = [sequence for _, sequence, _ in coming]
    host.finish(sequences)
    for sequence in sequences:
        drawn, expected = [d.token for d in sequence.sampled], alone(sequence.request.prompt, sequence.request.limit)
        if sequence.request.stop_token_ids and 0 in expected:
            expected = expected[: expected.index(0) + 1]
        assert drawn == expected[: len(drawn)]
        assert sequence.finish_reason is FinishReason.CANCELLED or len(drawn) == len(expected)
