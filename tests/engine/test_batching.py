"""Who computes what when: pages, sharing, giving way, and a device of plain Python that finds every wrong page.

The device remembers which text each place of each page was written for. Its "model" draws a token that depends on the whole
text, read through the pages: a page that is another's, stale, reused too early or not written yet gives another token.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.engine.batching import Batch
from lowbit.engine.pages import NOBODYS, Pages
from lowbit.engine.request import Drawn, End, Request
from lowbit.kernels.choose.attention import PAGE

VOCAB = 5


def next_token(text):
    return (sum((i + 1) * (t + 1) for i, t in enumerate(text)) + len(text)) % VOCAB


def alone(prompt, limit):
    """What a request draws if nobody else is there."""
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
        assert page != NOBODYS
        self.pages[page][position % PAGE] = token

    def text(self, slot, count):
        return [self.pages[self.tables[slot, i // PAGE]][i % PAGE] for i in range(count)]

    def run(self, planned):
        """Everything of a round in the order of its launches; the tokens drawn, by request."""
        drawn = []
        for slot, place, page in planned.grown:
            self.tables[slot, place] = page
        for request in planned.steps:
            slot, position = request.slot, self.positions[request.slot]
            self.write(slot, position, self.tokens[slot])
            drawn.append((request, self.draw(slot, position + 1)))
        for piece in planned.pieces:  # all are written before any is read
            for position, token in zip(range(piece.begin, piece.end), piece.tokens, strict=True):
                self.write(piece.request.slot, position, token)
        for piece in planned.pieces:
            assert self.text(piece.request.slot, piece.end) == piece.request.tokens[: piece.end]
            if piece.last:
                drawn.append((piece.request, self.draw(piece.request.slot, piece.end)))
        return drawn

    def draw(self, slot, count):
        text = self.text(slot, count)
        assert None not in text
        self.tokens[slot], self.positions[slot] = next_token(text), count
        return self.tokens[slot]


class Host:
    """Rounds as the engine does them, `ahead` of what is read."""

    def __init__(self, slots, pages, piece, ahead=True, sharing=True, invariant=False):
        self.batch = Batch(slots, Pages(pages), piece, sharing=sharing, invariant=invariant)
        self.device, self.ahead = Device(pages), ahead
        self.flying = deque()
        self.rounds = []

    def round(self):
        planned = self.batch.plan()
        earlier = len(self.flying)
        if planned:
            self.flying.append(self.device.run(planned))
            self.rounds.append(planned)
        for _ in range(earlier if planned and self.ahead else len(self.flying)):
            for request, token in self.flying.popleft():
                if request.end is None:
                    request.drawn.append(Drawn(token, 0.0))
                    if token in request.ends or len(request.drawn) == request.limit:
                        self.end(request, End.LENGTH)

    def end(self, request, end):
        self.batch.remove(request)
        request.end = end

    def finish(self, requests):
        for _ in range(5000):
            if all(request.end is not None for request in requests):
                break
            self.round()
        assert all(request.end is not None for request in requests), "requests wait for ever"
        self.check_idle()

    def check_idle(self):
        """Once nobody is there, every page and slot is free again."""
        while self.flying:
            self.round()
        assert not self.batch.running and not self.batch.waiting
        assert self.batch.pages.available == self.batch.pages.count - 1


def prompt(length, seed=0):
    return [(seed * 7 + i * i) % VOCAB for i in range(length)]


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 400])
@pytest.mark.parametrize("ahead", [True, False])
def test_texts_at_the_borders_of_pages_and_pieces(length, ahead):
    host = Host(2, 20, 256, ahead)
    request = Request(prompt(length), 140)
    host.batch.add(request)
    host.finish([request])
    assert [d.token for d in request.drawn] == alone(request.prompt, 140)


def test_prompts_that_begin_alike_share_pages():
    host = Host(4, 40, 512)
    first, second = Request(prompt(300), 3), Request([*prompt(300), 1, 2], 3)
    host.batch.add(first)
    host.finish([first])
    host.batch.add(second)
    host.finish([second])
    assert (first.shared, second.shared) == (0, 256)
    assert [d.token for d in second.drawn] == alone(second.prompt, 3)
    third = Request(prompt(256), 2)  # its last token has to be computed, so only one page can be another's
    host.batch.add(third)
    host.finish([third])
    assert third.shared == 128


def test_a_dialogue_comes_back_with_its_answer():
    host = Host(4, 40, 512)
    first = Request(prompt(200), 100)
    host.batch.add(first)
    host.finish([first])
    second = Request([*first.tokens, 3, 3], 5)
    host.batch.add(second)
    host.finish([second])
    assert second.shared == 256 and [d.token for d in second.drawn] == alone(second.prompt, 5)


def test_out_of_pages_the_newest_waits():
    """Three texts that need 3 pages each, in 7: all begin, the newest gives way, none is lost."""
    host = Host(4, 8, 512, sharing=False)
    requests = [Request(prompt(130, seed), 200) for seed in range(3)]
    for request in requests:
        host.batch.add(request)
    host.finish(requests)
    assert [[d.token for d in r.drawn] for r in requests] == [alone(r.prompt, r.limit) for r in requests]
    begun = [[request.number for request in planned.joined] for planned in host.rounds if planned.joined]
    assert begun[0] == [r.number for r in requests] and len(begun) > 1, "somebody had to give way"
    assert all(number != requests[0].number for again in begun[1:] for number in again), "never the oldest"


def test_what_cannot_ever_run_is_refused():
    batch = Batch(1, Pages(3), 128)
    assert not batch.refusals(Request(prompt(200), 56))
    assert batch.refusals(Request(prompt(200), 57)) == ("needs 257 tokens of cache (prompt and limit), there are 256",)
    with pytest.raises(ValueError, match="whole pages of 128 tokens, got 100"):
        Batch(1, Pages(3), 100)
    with pytest.raises(ValueError, match="at least 2 pages"):
        Pages(1)


def test_invariant_pieces_do_not_depend_on_others():
    """Begins of pieces are multiples of the piece, shared pages or not, and nobody gives way."""
    host = Host(3, 30, 256, invariant=True)
    requests = [Request(prompt(400 + 10 * i), 150) for i in range(4)]
    for request in requests:
        host.batch.add(request)
    host.finish(requests)
    assert all(piece.begin % 256 == 0 for planned in host.rounds for piece in planned.pieces)
    assert sorted(r.number for planned in host.rounds for r in planned.joined) == [r.number for r in requests]
    assert [r.shared for r in requests][1:] == [256, 256, 256]


def test_a_round_has_room_for_others_pieces():
    host = Host(8, 60, 256)
    requests = [Request(prompt(60, seed), 1) for seed in range(5)]
    for request in requests:
        host.batch.add(request)
    host.round()
    assert [len(piece.tokens) for piece in host.rounds[0].pieces] == [60, 60, 60, 60]
    host.finish(requests)


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
def test_any_order_of_arrivals_gives_what_each_draws_alone(arrivals, slots, pages, piece, ahead, sharing, invariant):
    host = Host(slots, pages, piece, ahead, sharing, invariant)
    coming = [
        (wait, Request(prompt(length, seed), limit, ends=frozenset({0} if ends else ())), cancel)
        for wait, length, seed, limit, cancel, ends in arrivals
    ]
    coming = [(wait, r, cancel) for wait, r, cancel in coming if not host.batch.refusals(r)]
    for now in range(80):
        for wait, request, cancel in coming:
            if wait == now:
                host.batch.add(request)
            if cancel is not None and wait + cancel == now and request.end is None:
                host.end(request, End.CANCELLED)
        host.round()
    requests = [request for _, request, _ in coming]
    host.finish(requests)
    for request in requests:
        drawn, expected = [d.token for d in request.drawn], alone(request.prompt, request.limit)
        if request.ends and 0 in expected:
            expected = expected[: expected.index(0) + 1]
        assert drawn == expected[: len(drawn)]
        assert request.end is End.CANCELLED or len(drawn) == len(expected)
