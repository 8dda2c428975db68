"""The clients of `python -m benchmarks serve`: many concurrent streams in a process separate from the server.

64 streams produce an event every few milliseconds each. Clients that create objects per event, such as httpx, saturate before
the server does. Here a response costs a C parser (httptools), one clock read per received part, and one JSON parse at its end.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools

LEAST_TOKENS = 4
"""Fewest tokens of a prompt or output of a mix."""

MOST_TRIES = 10_000
"""Most attempts to draw lengths that the model can hold. After as many the mix is rejected as too long for the model."""

AFTER_FAILURE_SECONDS = 0.1
"""Pause of a stream after a failed request, to avoid flooding an unreachable server."""

LAST_SECONDS = 60.0
"""Time limit for outstanding requests after the last arrival."""

PATH = "/v1/completions"
P90 = 1.2815515655446004
"""90th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts and outputs in tokens: log-normal with these medians and 90th percentiles, or constant."""

    name: str
    prompt: int
    output: int
    prompt_p90: int | None = None
    output_p90: int | None = None

    def draw(self, rng: random.Random, most: int) -> tuple[int, int]:
        """Returns the lengths of a request of at most `most` tokens in total; longer ones are sampled again. Raises
        ValueError if no sample fits."""
        for _ in range(MOST_TRIES):
            lengths = _length(rng, self.prompt, self.prompt_p90), _length(rng, self.output, self.output_p90)
            if sum(lengths) <= most:
                return lengths
        raise ValueError(f"requests of the mix {self.name} are longer than the {most:,} tokens that a text has here")


def _length(rng: random.Random, median: int, p90: int | None) -> int:
    if p90 is None:
        return median
    return max(LEAST_TOKENS, round(rng.lognormvariate(math.log(median), math.log(p90 / median) / P90)))


def fixed(prompt: int, output: int) -> Mix:
    """Returns a mix of constant lengths."""
    return Mix(f"{prompt}/{output}", prompt, output)


SHAREGPT = Mix("ShareGPT-like", 3957, 416, 39366, 841)
"""Prompts include their conversation. After redrawing requests of more than 8,192 tokens, medians and 90th percentiles match
openchat_sharegpt4 in Table 2 of Sarathi-Serve (Agrawal et al., OSDI 2024), which drops such requests too: prompts 1,730 and
5,696 tokens, outputs 415 and 834. The parameters are fitted; a third of the draws is too long."""


class Prompts:
    """Random tokens below `vocab`, reproducible by seed. No two prompts share a prefix, so prefix caching has no effect."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.made = vocab, 0
        self._rng = random.Random(seed)
        self._tokens = self._rng.choices(range(vocab), k=1 << 17)

    def __call__(self, length: int) -> list[int]:
        self.made += 1
        begin = self._rng.randrange(len(self._tokens) - length)
        own = [self.made % self.vocab, self.made // self.vocab % self.vocab]
        return [*own, *self._tokens[begin + 2 : begin + length]][:length]


@dataclass
class RequestRecord:
    """Outcome of a request: times (`time.perf_counter`) when it was due and of its first and last text, received tokens, and
    the error. `cut`: the measurement ended first."""

    due: float
    expected_tokens: int = 0
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    error: str | None = None
    cut: bool = False

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        assert self.first is not None
        return self.first - self.due

    @property
    def token_s(self) -> float | None:
        """Mean seconds between tokens; None for a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.first is not None and self.tokens > 1 else None

    def tokens_between(self, begin: float, end: float) -> float:
        """Returns the tokens in an interval. The first counts when it arrived; the others are spread evenly after it."""
        if self.first is None or not self.tokens:
            return 0.0
        inside = float(begin <= self.first < end)
        if self.tokens > 1 and self.last > self.first:
            share = max(0.0, min(end, self.last) - max(begin, self.first)) / (self.last - self.first)
            return inside + share * (self.tokens - 1)
        return inside


@dataclass(frozen=True)
class SteadyState:
    """The part of a closed loop in which all streams run: after each has received a first token."""

    begin: float
    end: float
    tokens_per_s: float


def steady(answers: Sequence[RequestRecord], streams: int, end: float) -> SteadyState | None:
    """Returns the steady state, or None if one of the streams had no token before `end`. `answers` are in the order of their
    requests; the first `streams` of them started the streams."""
    begun = [answer.first for answer in answers[:streams]]
    if len(begun) < streams or None in begun:
        return None
    begin = max(first for first in begun if first is not None)
    if begin >= end:
        return None
    return SteadyState(begin, end, sum(answer.tokens_between(begin, end) for answer in answers) / (end - begin))


@dataclass
class RequestBuilder:
    """Builds requests to the model `name` at `host`:`port` with prompts from `prompts`."""

    host: str
    port: int
    name: str
    prompts: Prompts

    def request(self, prompt: int, output: int) -> bytes:
        """Returns the bytes of a request, header and body."""
        fields: dict[str, Any] = {
            "model": self.name, "prompt": self.prompts(prompt), "max_tokens": output, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        body = json.dumps(fields).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass(eq=False)
class Client(asyncio.Protocol):
    """A connection with one request at a time. It cannot be reused once `over` is set."""

    over: bool = False
    transport: asyncio.Transport | None = None
    answer: RequestRecord | None = None
    done: asyncio.Future[None] | None = None
    parts: list[bytes] = field(default_factory=list)

    async def send(self, builder: RequestBuilder, request: bytes, answer: RequestRecord) -> None:
        """Sends a request and waits until its response has ended; fills in `answer`. Connects at the first call."""
        loop = asyncio.get_running_loop()
        self.answer, self.done, self.parts = answer, loop.create_future(), []
        self.parser = httptools.HttpResponseParser(self)
        try:
            if self.transport is None:
                self.transport, _ = await loop.create_connection(lambda: self, builder.host, builder.port)
            self.transport.write(request)
            await self.done
        except OSError as error:
            answer.error = f"no connection: {type(error).__name__}"
            self.close()
        except asyncio.CancelledError:
            answer.cut = True
            answer.tokens = sum(part.count(b"data: ") for part in self.parts)
            self.close()
            raise
        finally:
            self.answer = self.done = None

    def close(self) -> None:
        """Closes the connection."""
        self.over = True
        if self.transport is not None:
            self.transport.abort()

    # ---- callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Parses a part of the response."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Marks the client as over, whoever closed the connection."""
        self.over = True
        self._end("the connection was closed")

    # ---- callbacks of the parser

    def on_body(self, body: bytes) -> None:
        """Stores events and their times. The first event has text, the last ones the usage."""
        if self.answer is not None:
            now = time.perf_counter()
            if self.answer.first is None:
                self.answer.first = now
            self.answer.last = now
            self.parts.append(body)

    def on_message_complete(self) -> None:
        """Checks status and number of tokens at the end of a response."""
        if self.answer is None:
            return
        if not self.parser.should_keep_alive():
            self.close()
        status = self.parser.get_status_code()
        text = b"".join(self.parts)
        if status != 200:
            self.answer.first = None
            self._end(f"status {status}")
        elif not text.endswith(b"data: [DONE]\n\n"):
            self._end("an error in the stream")
        else:
            self.answer.tokens = json.loads(text.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]["completion_tokens"]
            wrong = self.answer.tokens != self.answer.expected_tokens
            self._end(f"{self.answer.tokens} of {self.answer.expected_tokens} tokens" if wrong else None)

    def _end(self, error: str | None) -> None:
        if self.done is not None and not self.done.done():
            assert self.answer is not None
            self.answer.error = error
            self.done.set_result(None)


LengthSampler = Callable[[], tuple[int, int]]
"""Returns the lengths of the next prompt and output."""


async def closed_loop(
    builder: RequestBuilder,
    mixes: Sequence[LengthSampler],
    streams: int,
    seconds: float,
    look: Callable[[list[list[RequestRecord]]], None],
) -> tuple[list[list[RequestRecord]], float]:
    """Runs `streams` clients, each sending its next request as soon as the previous one has ended, for `seconds` per mix
    without a pause between mixes.

    Returns the records by the mix in which they were sent, and the end time. Requests that still run then are cut. The first
    outputs have different lengths, so that the streams do not end together. `look` is called once a second.
    """
    answers: list[list[RequestRecord]] = []
    begin = time.perf_counter()
    end = begin + seconds * len(mixes)

    async def stream(number: int) -> None:
        client = Client()
        lengths = staggered(lambda: mixes[len(answers) - 1](), number, streams)
        try:
            while time.perf_counter() < end:
                prompt, output = next(lengths)
                request = builder.request(prompt, output)
                client = Client() if client.over else client
                answer = RequestRecord(time.perf_counter(), output)
                answers[-1].append(answer)
                await client.send(builder, request, answer)
                if answer.error:
                    await asyncio.sleep(AFTER_FAILURE_SECONDS)
        finally:
            client.close()

    tasks = [asyncio.ensure_future(stream(number)) for number in range(streams)]
    try:
        for number in range(len(mixes)):
            answers.append([])
            while (left := begin + seconds * (number + 1) - time.perf_counter()) > 0:
                await asyncio.wait(tasks, timeout=min(left, 1.0))
                look(answers)
    finally:
        await _cancelled(tasks)
    return answers, end


def staggered(mix: LengthSampler, number: int, streams: int) -> Iterator[tuple[int, int]]:
    """Yields the lengths of the requests of stream `number`. The first output is shortened to a share of its length."""
    prompt, output = mix()
    yield prompt, max(1, output * (number + 1) // streams)
    while True:
        yield mix()


Arrival = tuple[float, int, bytes]
"""Due time of a request in seconds after the first one, its output tokens, and its bytes."""


def arrivals(builder: RequestBuilder, mix: LengthSampler, rate: float, seconds: float, rng: random.Random) -> list[Arrival]:
    """Returns requests with Poisson arrivals, `rate` per second on average."""
    due, made = 0.0, []
    while (due := due + rng.expovariate(rate)) < seconds:
        prompt, output = mix()
        made.append((due, output, builder.request(prompt, output)))
    return made


async def open_loop(builder: RequestBuilder, requests: Sequence[Arrival], seconds: float) -> asyncio.Task[list[RequestRecord]]:
    """Sends each request when it is due, for `seconds`, whatever the state of earlier ones. Returns a task with all records.
    Requests without an end LAST_SECONDS after the last arrival have failed."""
    idle: list[Client] = []
    answers: list[RequestRecord] = []
    tasks: list[asyncio.Future[None]] = []

    async def one(request: bytes, answer: RequestRecord) -> None:
        client = idle.pop() if idle else Client()
        client = Client() if client.over else client
        await client.send(builder, request, answer)
        idle.append(client)

    async def ended() -> list[RequestRecord]:
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_SECONDS)
        await _cancelled(tasks)
        for client in idle:
            client.close()
        for answer in answers:
            if answer.cut:
                answer.error = "no end in time"
        return answers

    begin = time.perf_counter()
    for due, output, request in requests:
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        answers.append(RequestRecord(begin + due, output))
        tasks.append(asyncio.ensure_future(one(request, answers[-1])))
    await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
    return asyncio.ensure_future(ended())


async def one_by_one(
    builder: RequestBuilder, prompt: int, output: int, most: int, seconds: float, between: Callable[[], None] = lambda: None
) -> list[RequestRecord]:
    """Sends up to `most` requests in sequence and calls `between` before each."""
    answers: list[RequestRecord] = []
    end = time.perf_counter() + seconds
    client = Client()
    try:
        while len(answers) < most and time.perf_counter() < end:
            between()
            request = builder.request(prompt, output)
            client = Client() if client.over else client
            answers.append(RequestRecord(time.perf_counter(), output))
            await client.send(builder, request, answers[-1])
    finally:
        client.close()
    return answers


async def _cancelled(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
