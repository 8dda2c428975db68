"""Who computes what in the next round: requests join and leave at every step, long prompts in pieces between the steps.

    waiting --(a slot, and pages for the prompt)--> prompt --(its last piece)--> stepping --(end, or given up)--> gone
       ^                                                            |
       +---------------- no page left: the newest gives way --------+

Plain Python over numbers: nothing here knows of tensors, so that every order of arrivals can be tried in a test.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lowbit.engine.pages import Pages, pages_for
from lowbit.engine.request import End, Request
from lowbit.kernels.choose.attention import PAGE


@dataclass(frozen=True)
class Piece:
    """Tokens `begin` to `end` of a request's text, to be computed at once; after the `last` one a token is drawn."""

    request: Request
    begin: int
    tokens: tuple[int, ...]
    last: bool

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


@dataclass
class Round:
    """What to compute next, in this order: new pages, pieces of prompts, one step of `steps`."""

    joined: list[Request] = field(default_factory=list)
    grown: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, place in its table, page)."""
    pieces: list[Piece] = field(default_factory=list)
    steps: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pieces or self.steps)


class Batch:
    """Requests over `slots` places and the pages of a cache.

    A round computes at most `piece` tokens of prompts, but at least one piece. Pieces end at multiples of `piece`, and with
    `invariant` shared pages do too: what is computed together never depends on who else is there. A request is then given all
    the pages that it may ever need at once, since what gives way and starts again computes in other pieces.
    """

    def __init__(self, slots: int, pages: Pages, piece: int, *, sharing: bool = True, invariant: bool = False) -> None:
        if piece % PAGE:
            raise ValueError(f"pieces of prompts are whole pages of {PAGE} tokens, got {piece}")
        self.pages, self.piece, self.sharing, self.invariant = pages, piece, sharing, invariant
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
            if request.end is End.FAILED:
                self.pages.withdraw(request.pages)
            else:
                self._publish(request)
            self._leave(request)

    def give_up(self, planned: Round | None) -> list[Request]:
        """Lets go of all that a round was for, since it failed: nobody may share pages that it should have filled. None: it
        failed while it was planned, so that nobody knows how far any of those who run is."""
        if planned is None:
            planned = Round(joined=list(self.running), pieces=[Piece(request, 0, (), False) for request in self.running])
        for piece in planned.pieces:
            self.pages.withdraw(piece.request.pages[piece.begin // PAGE :])
        found = dict.fromkeys([*planned.joined, *planned.steps, *(piece.request for piece in planned.pieces)])
        lost = [request for request in found if request.slot is not None]  # others were dropped, or wait again
        for request in lost:
            self._leave(request)
            if request in self.waiting:
                self.waiting.remove(request)
        return lost

    def drop(self, piece: Piece, planned: Round) -> None:
        """Lets go of a request whose piece of a round cannot be computed. Who joined in the round to share its pages waits
        again: nobody has written them."""
        unwritten = set(piece.request.pages[piece.begin // PAGE :])
        self.pages.withdraw(list(unwritten))
        self._leave(piece.request)
        back = []
        for request in planned.joined:
            first = next((i for i, page in enumerate(request.pages) if page in unwritten), None)
            if first is not None:
                unwritten.update(request.pages[first:])
                self.pages.withdraw(request.pages[first:])
                self._leave(request)
                request.launched = len(request.drawn)
                back.append(request)
        self.waiting.extendleft(reversed(back))

    def plan(self) -> Round:
        """The next round, taken as launched: the numbers of the requests are already those after it."""
        planned = Round()
        for request in list(self.running):
            if self._steps(request) and not self._grow(request, planned):
                self._give_way(planned)
        planned.steps = [request for request in self.running if self._steps(request)]
        for request in planned.steps:
            request.computed = request.position + 1
            request.launched += 1
        left = self._pieces_of_running(planned)
        while self.waiting and self._free_slots and left > 0:
            request = self.waiting[0]
            if request.unread or not self._join(request, planned):
                break
            self.waiting.popleft()
            left = self._add_piece(request, planned, left)
        return planned

    def _steps(self, request: Request) -> bool:
        """Whether a step draws one more token of a request."""
        return request.drawing and request.launched < request.limit

    # ---- pages and slots

    def _grow(self, request: Request, planned: Round) -> bool:
        """Gives a request the page of its next token, if it has none."""
        while len(request.pages) * PAGE <= request.position:
            page = self.pages.take()
            if page is None:
                return False
            planned.grown.append((request.row, len(request.pages), page))
            request.pages.append(page)
        return True

    def _give_way(self, planned: Round) -> None:
        """Puts the newest requests back in front of the queue until every step of the others has its page."""
        while self.running:
            newest = self.running[-1]
            planned.grown = [(slot, place, page) for slot, place, page in planned.grown if slot != newest.slot]
            self._publish(newest)
            self._leave(newest)
            self.waiting.appendleft(newest)
            if all(self._grow(request, planned) for request in self.running if self._steps(request)):
                return

    def _join(self, request: Request, planned: Round) -> bool:
        """A slot and pages for the text as it is, those that others have computed among them; False if there are too few."""
        tokens = request.tokens
        unit = self.piece // PAGE if self.invariant else 1
        most = (len(tokens) - 1) // PAGE // unit * unit  # the last token has to be computed, for its logits
        shared = self.pages.match(tokens, most) if self.sharing else []
        extra = len(shared) % unit
        self.pages.release(shared[len(shared) - extra :])
        shared = shared[: len(shared) - extra]
        whole = len(request.prompt) + request.limit if self.invariant else len(tokens)
        needed = pages_for(whole) - len(shared)
        if needed > self.pages.available:
            self.pages.release(shared)
            return False
        taken = [self.pages.take() for _ in range(needed)]
        request.pages = [*shared, *(page for page in taken if page is not None)]
        request.slot = self._free_slots.pop()
        request.computed = len(shared) * PAGE
        request.shared = min(len(shared) * PAGE, len(request.prompt))
        self.running.append(request)
        planned.joined.append(request)
        planned.grown += [(request.slot, place, page) for place, page in enumerate(request.pages)]
        return True

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        assert request.slot is not None
        self._free_slots.append(request.slot)
        self.pages.release(request.pages)
        request.slot, request.pages = None, []
        request.computed, request.drawing = 0, False

    def _publish(self, request: Request) -> None:
        """Lets later requests share what is computed of a text, of an answer too: a dialogue comes back with it."""
        if self.sharing:
            known = request.prompt if self.invariant else request.tokens
            self.pages.publish(request.pages, known[: min(request.computed, len(known))])

    # ---- pieces of prompts

    def _pieces_of_running(self, planned: Round) -> int:
        """Pieces of requests that have begun; how many tokens the round has left for others."""
        left = self.piece
        for request in self.running:
            if left > 0 and not request.drawing:
                left = self._add_piece(request, planned, left)
        return left

    def _add_piece(self, request: Request, planned: Round, left: int) -> int:
        """The next piece of a request, if the round has room; the room left, 0 if it had not."""
        tokens = request.tokens
        begin = request.computed
        end = min(len(tokens), (begin // self.piece + 1) * self.piece)
        if end - begin > left and left < self.piece:
            return 0
        last = end == len(tokens)
        planned.pieces.append(Piece(request, begin, tuple(tokens[begin:end]), last))
        request.computed = end
        request.drawing = last
        request.launched += last
        if self.sharing:
            self.pages.publish(request.pages, tokens[:end])
        return left - (end - begin)
