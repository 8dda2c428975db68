"""The thread that owns the engine: takes orders from the event loop, does the rounds, and brings what they draw back.

    event loop --orders (a queue)--> thread: engine.step() --pieces of all texts of a round, one wake-up--> mailboxes

The event loop never waits for the engine, nor the engine for a client: what a client has not fetched yet lies in its mailbox,
at most the text that was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowbit.engine import Drawn, End, Engine, Request, TextStream
from lowbit.engine.warm_up import Stage
from lowbit.ops import UnsupportedProblem
from lowbit.serve.errors import ApiError, failed, refused
from lowbit.serve.metrics import Metrics
from lowbit.serve.prompts import Prompts

logger = logging.getLogger("lowbit.serve")

ROUND_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError,
    UnsupportedProblem,
)  # fmt: skip
"""What a round raises: errors of torch and Triton among RuntimeError, those of tokenizers that meet odd tokens. They end the
texts of that round; anything else ends the thread, and with it the server."""

MOST_FAILURES = 5
"""Texts that fail with none between them that does not before the server calls itself ill: a GPU that has failed stays so."""


@dataclass(frozen=True)
class Piece:
    """What came of the text `index` of a mailbox: characters, tokens, and at its end why, with the error if it failed.
    `places`: where in the text each token begins, in characters."""

    index: int
    text: str
    drawn: tuple[Drawn, ...]
    end: End | None = None
    error: ApiError | None = None
    places: tuple[int, ...] = ()

    def followed_by(self, later: Piece) -> Piece:
        """Both as one."""
        text, drawn, places = self.text + later.text, self.drawn + later.drawn, self.places + later.places
        return Piece(self.index, text, drawn, later.end, later.error, places)


class Mailbox:
    """Pieces of the texts of one HTTP request, for one reader on the event loop."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._came = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Called on the event loop."""
        self._pieces.append(piece)
        self._came.set()

    async def fetch(self) -> list[Piece]:
        """All that has come since, at least one piece; of each text at most one, in the order in which they came."""
        await self._came.wait()
        self._came.clear()
        joined: dict[int, Piece] = {}
        for piece in self._pieces:
            before = joined.get(piece.index)
            joined[piece.index] = piece if before is None else before.followed_by(piece)
        self._pieces = []
        return list(joined.values())


@dataclass(eq=False)
class Text:
    """A text that is being generated, the text `index` of its mailbox."""

    request: Request
    stream: TextStream
    mailbox: Mailbox
    index: int
    submitted: float = field(default_factory=time.monotonic)
    first: float | None = None
    shown: str = ""
    fresh: list[Drawn] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request.watch = self._watch

    def _watch(self, drawn: Drawn) -> bool:
        """Takes a token, in the engine's thread; whether it completes a stop string."""
        self.fresh.append(drawn)
        self.places.append(len(self.stream.text))  # a token within a character has the place of that
        if drawn.token not in self.request.ends:
            self.shown += self.stream.push(drawn.token)
        return self.stream.stopped

    def take(self, error: ApiError | None = None) -> Piece | None:
        """What is new since the last call, None if nothing is."""
        end = self.request.end
        if end in (End.STOP, End.LENGTH):
            self.shown += self.stream.finish()
            end = End.STOP if self.stream.stopped else end  # what was held back may complete a stop string
        if not (self.fresh or end or error):
            return None
        piece = Piece(self.index, self.shown, tuple(self.fresh), end, error, tuple(self.places))
        self.shown, self.fresh, self.places = "", [], []
        return piece


Order = Callable[[], None]


class Worker:
    """Does an engine's rounds in a thread of its own, from `start` to `stop`; methods are for the event loop."""

    def __init__(self, engine: Engine, metrics: Metrics, prompts: Prompts) -> None:
        self.engine, self.metrics, self._prompts = engine, metrics, prompts
        self.failures = 0
        """Texts that have failed one after the other."""
        self.dead = False
        """Whether the thread has ended before it was told to."""
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._live: dict[Text, None] = {}
        """Texts that the engine has; of the thread alone."""
        self._open: dict[Text, None] = {}
        """Texts for which somebody waits; of the event loop alone."""
        self._refusing: ApiError | None = None
        """What texts that come after `end_all` are told; of the thread alone."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lowbit-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop, warm: Callable[[Stage | None], None], ended: Callable[[], None]) -> None:
        """Warms up, then waits for texts. On the loop, `warm` is called before each stage and with None at the end, `ended`
        when the thread is over."""
        self._loop, self._warm, self._ended = loop, warm, ended
        self._thread.start()

    def submit(self, texts: Sequence[Text]) -> None:
        """Generates texts; whatever comes of them, the last piece of each has an end or an error."""
        self._open.update(dict.fromkeys(texts))
        if self.dead:
            self._forsake()
        self._orders.put(lambda: self._submit(texts))

    def cancel(self, texts: Sequence[Text]) -> None:
        """Ends texts before the next step; those that have ended stay as they are."""
        for text in texts:
            self._open.pop(text, None)
        self._orders.put(lambda: self._cancel(texts))

    def count_failures(self, texts: int) -> None:
        """Counts texts that failed before they were submitted."""

        def count() -> None:
            self.failures += texts

        self._orders.put(count)

    def end_all(self, error: ApiError) -> None:
        """Ends all texts that there are or come, with an error for those who wait for them."""
        self._orders.put(lambda: self._end_all(error))

    def stop(self) -> None:
        """Tells the thread to end after the round that it does."""
        self._stopping = True
        self._orders.put(lambda: None)

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    # ---- in the thread

    def _run(self) -> None:
        try:
            if self._warm_up():
                while not self._stopping:
                    self._obey()
                    if self._live:
                        self._round()
        finally:
            gc.unfreeze()  # else what Triton holds counts as lost when the process ends
            self._call(self._over)

    def _warm_up(self) -> bool:
        """Whether texts can be computed now."""
        try:
            self._prompts.start()  # its process imports and loads while kernels are compiled
            for stage in self.engine.warm_up():
                self._call(functools.partial(self._warm, stage))
                if self._stopping:
                    return False
            self.engine.generate([Request([0], 2)])  # what a first text costs beside kernels and graphs
            self._prompts.check()
        except ApiError:  # the server was told to end meanwhile
            return False
        except ROUND_ERRORS as error:
            logger.error("warming up failed: %s: %s", type(error).__name__, error)
            return False
        gc.collect()
        gc.freeze()  # what is there now stays: no collection walks through models and kernels while texts wait
        self._call(functools.partial(self._warm, None))
        return True

    def _obey(self) -> None:
        """Follows all orders that are there; waits for one if there is nothing else to do."""
        if not self._live:
            self._orders.get()()
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            order()

    def _submit(self, texts: Sequence[Text]) -> None:
        if self._refusing is not None:
            self._abandon(texts, self._refusing)
            return
        for text in texts:
            try:
                self.engine.submit(text.request)
            except ValueError as error:
                self._abandon([text], refused("request", str(error)))
            except RuntimeError as error:  # of an engine that computes nothing any more
                logger.error("a text was not taken: %s", error)
                self.failures += 1
                self._abandon([text])
            else:
                self._live[text] = None

    def _cancel(self, texts: Sequence[Text], end: End = End.CANCELLED) -> None:
        for text in texts:
            if text in self._live:
                del self._live[text]
                self.engine.cancel(text.request)
                self._count(text, end)

    def _end_all(self, error: ApiError) -> None:
        self._refusing = error
        texts = list(self._live)
        self._cancel(texts)
        self._abandon(texts, error)

    def _abandon(self, texts: Sequence[Text], error: ApiError | None = None) -> None:
        """Tells those who wait that nothing more comes."""
        said = error or failed()
        self._bring([(text, Piece(text.index, "", (), End.FAILED, said)) for text in texts])

    def _round(self) -> None:
        begun = time.monotonic()
        error: BaseException | None = None
        try:
            self.engine.step()
        except ROUND_ERRORS as raised:
            error = raised
            logger.error("a round of the engine failed: %s: %s", type(raised).__name__, str(raised)[:500])
        pieces = self._pieces()
        if error is not None and not any(piece.end for _, piece in pieces):
            # The engine did not say whose fault it was: nobody may wait for ever.
            lost = list(self._live)
            self.failures += len(lost)
            self._cancel(lost, End.FAILED)
            pieces += [(text, Piece(text.index, "", (), End.FAILED, failed())) for text in lost]
        self.metrics.rounds.observe(time.monotonic() - begun)
        self._bring(pieces)

    def _pieces(self) -> list[tuple[Text, Piece]]:
        """What the round has brought, in the order of submission."""
        pieces, now = [], time.monotonic()
        for text in list(self._live):
            error = failed() if text.request.end is End.FAILED else None
            try:
                piece = text.take(error)
            except ROUND_ERRORS as raised:  # its last tokens are no text
                logger.error("a text could not be ended: %s: %s", type(raised).__name__, str(raised)[:500])
                piece = Piece(text.index, "", (), End.FAILED, failed())
            if piece is None:
                continue
            if text.first is None and piece.drawn:
                text.first = now
                self.metrics.first_token.observe(now - text.submitted)
            if piece.end:
                self.failures = self.failures + 1 if piece.end is End.FAILED else 0
                del self._live[text]
                self._count(text, piece.end)
            pieces.append((text, piece))
        return pieces

    def _count(self, text: Text, end: End) -> None:
        self.metrics.ended(text.request, end, text.first)

    # ---- back to the event loop

    def _bring(self, pieces: Sequence[tuple[Text, Piece]]) -> None:
        if pieces:
            self._call(lambda: self._put(pieces))

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: a second signal ended the server at once
            self._loop.call_soon_threadsafe(function)

    def _put(self, pieces: Sequence[tuple[Text, Piece]]) -> None:
        """On the event loop."""
        for text, piece in pieces:
            if piece.end:
                self._open.pop(text, None)
            text.mailbox.put(piece)

    def _over(self) -> None:
        """On the event loop, when the thread has ended."""
        self.dead = not self._stopping
        self._forsake()
        self._ended()

    def _forsake(self) -> None:
        """On the event loop: nobody waits for what never comes."""
        self._put([(text, Piece(text.index, "", (), End.FAILED, failed())) for text in list(self._open)])
