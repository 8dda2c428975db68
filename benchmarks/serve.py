"""`python -m benchmarks serve`: tokens per second over HTTP relative to the engine alone, and latencies of users.

A second process loads the model, measures its engine and serves it on the loopback (serve_host.py). This process runs the
clients (serve_load.py).
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import gc
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import default_path
from benchmarks.serve_host import NAME, ServeConfig, host
from benchmarks.serve_load import (
    LAST_SECONDS,
    LengthSampler,
    Mix,
    Prompts,
    RequestBuilder,
    RequestRecord,
    SteadyState,
    arrivals,
    closed_loop,
    one_by_one,
    open_loop,
    steady,
)
from benchmarks.serve_report import SCHEMA, SERVE
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import versions, write_json

PARTS = ("engine", "streams", "idle", "open")
"""Parts in the order of measurement, the most important first."""

SAVED_EVERY_S = 10.0
DRAWS_OF_A_MEAN = 4096
END_SECONDS = 20.0

MOST_ALONE = 200
"""Number of requests whose first token is timed on an idle server."""

ANSWER_ALONE = 8
"""Output tokens of each of these requests."""

PROTOCOL = (
    "One process computes and serves, on the loopback; another sends requests. Prompts are random tokens, no two beginning "
    "alike; answers have exactly the requested number of tokens, greedy, as events. engine: the closed loop of `streams` over "
    "the engine without a server and without text. streams: as many clients, each sending its next request when it is "
    "answered, for an equal time by each mix of lengths, without a pause; answers count for the mix of their request; "
    "tokens_per_s counts from when all streams have had a first token of the mix, and ratio is that by the engine's. "
    "capacity: the same of a mix that was not streamed. idle: one request after the other, and between two one of the "
    "serving process to its engine; "
    "added_ms is the time to its first token less the median of the engine's own (own_first_ms); own_ms are percentiles "
    "of the engine's own, samples_ms all times in order. open: arrivals by chance (Poisson) at a share of the closed loop's "
    "requests a second, the shares one after the other without a pause; times count from when a request was due, and one "
    f"without an end {LAST_SECONDS:.0f} s after the last arrival has failed. first_ms: to the first token; token_ms: of each "
    "request the mean time between its tokens; percentiles over requests. server_cpu, client_cpu: cores that each process kept "
    "busy while requests were sent."
)

ProgressCallback = Callable[[str], None]


class HostFailed(ValueError):
    """The serving process failed; the message has its reason if it sent one."""


def run(config: ServeConfig, path: Path | None, progress: ProgressCallback) -> tuple[Path, dict[str, Any]]:
    """Measures everything and writes the result file after each part. Returns its path and document. Raises HostFailed if
    the serving process fails."""
    if path is not None:
        check_file(path, SERVE)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=host, args=(config, other), daemon=False)
    process.start()
    other.close()
    try:
        return _Run(config, pipe, path, progress).all()
    finally:
        pipe.close()
        process.join(END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


class _Run:
    """State of one run: the document, its file and the serving process."""

    def __init__(self, config: ServeConfig, pipe: Connection, path: Path | None, progress: ProgressCallback) -> None:
        self.config, self.pipe, self._progress, self._begun = config, pipe, progress, time.monotonic()
        self.about = self._hear("about")
        today = datetime.date.today()
        self.path = path or default_path(self.about["machine"]["device"], today).with_name(f"{today.isoformat()}-serve.json")
        check_file(self.path, SERVE)
        self.rows: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {
            "result": SERVE, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "machine": self.about["machine"],
            "versions": versions(("transformers", "fastapi", "uvicorn", "httptools")), "engine": self.about["engine"],
            "asked": {**asdict(config), "folder": None if config.folder is None else config.folder.name}, "protocol": PROTOCOL,
            "rows": self.rows,
        }  # fmt: skip
        self.capacity: dict[Mix, float] = {}
        self._mean = functools.cache(self._mean_output)

    def all(self) -> tuple[Path, dict[str, Any]]:
        """Runs every configured part."""
        config = self.config
        if "engine" in config.parts:
            self._engine()
        server, port = self._hear("address")
        # A different seed: prompts must not reuse pages that the engine has cached.
        builder = RequestBuilder(server, port, NAME, Prompts(self.about["vocab"], config.seed + 1))
        gc.collect()
        gc.freeze()  # the garbage collector then skips all objects that exist now, such as modules
        try:
            if "streams" in config.parts:
                asyncio.run(self._closed("streams", builder, config.mixes, config.seconds / len(config.mixes)))
            if "idle" in config.parts:
                asyncio.run(self._idle(builder))
            if "open" in config.parts:
                for mix in config.mixes:
                    asyncio.run(self._open(builder, mix))
        finally:
            gc.unfreeze()
        self.document["complete"] = True
        write_json(self.path, self.document)
        self.progress("all parts are measured")
        return self.path, self.document

    def progress(self, text: str) -> None:
        """Reports progress with the elapsed seconds."""
        self._progress(f"{time.monotonic() - self._begun:4.0f} s  {text}")

    def _hear(self, word: str) -> Any:
        """Returns the value of the next message `word` of the serving process; reports its progress messages meanwhile."""
        while True:
            try:
                said, value = self.pipe.recv()
            except EOFError:
                raise HostFailed("the process that serves has ended, before its work was done") from None
            if said == "failed":
                raise HostFailed(f"the process that serves failed: {value}")
            if said == word:
                return value
            assert said == "progress", said
            self.progress(value)

    def _ask(self, word: str, value: Any = None) -> float:
        """Sends a message to the serving process and returns its reply."""
        try:
            self.pipe.send((word, value))
        except OSError as error:
            raise HostFailed("the process that serves has ended, before its work was done") from error
        answer: float = self._hear(word)
        return answer

    def _add(self, part: str, mix: Mix, answers: Sequence[RequestRecord], **more: Any) -> dict[str, Any]:
        """Appends a row to the results and saves them."""
        row = {**_row(part, mix, self.config, answers), **more}
        self.rows.append(row)
        write_json(self.path, self.document)
        return row

    def _lengths(self, mix: Mix, part: str) -> LengthSampler:
        rng = random.Random(f"{self.config.seed} {part} {mix.name}")
        return lambda: mix.draw(rng, self.about["max_length"])

    def _engine(self) -> None:
        answers, end, cpu = self._hear("engine")
        found = steady(answers, self.config.streams, end)
        mix = self.config.mixes[0]
        self._add("engine", mix, answers, **self._rates(found, mix), seconds=self.config.each, server_cpu=cpu)

    def _rates(self, found: SteadyState | None, mix: Mix) -> dict[str, float | None]:
        """Returns tokens and requests per second. Requests are not counted: their rate is that of tokens divided by the mix's
        mean output."""
        if found is None:
            return {"tokens_per_s": None, "requests_per_s": None}
        return {"tokens_per_s": found.tokens_per_s, "requests_per_s": found.tokens_per_s / self._mean(mix)}

    def _mean_output(self, mix: Mix) -> float:
        draw = self._lengths(mix, "mean")
        return statistics.fmean(draw()[1] for _ in range(DRAWS_OF_A_MEAN))

    async def _closed(self, part: str, builder: RequestBuilder, mixes: Sequence[Mix], seconds: float) -> None:
        """Runs the closed loop of each mix for `seconds` and adds a row for each."""
        streams = self.config.streams
        self.progress(f"{streams} streams for {seconds:.0f} s of {', then '.join(mix.name for mix in mixes)}")
        begun = saved = time.perf_counter()
        own = next((row["tokens_per_s"] for row in self.rows if row["part"] == "engine"), None)
        rows: list[dict[str, Any]] = []
        marks: list[_Mark] = []
        cores: list[dict[str, float]] = []

        def update(answers: list[list[RequestRecord]], number: int, now: float) -> None:
            start, row, mix = begun + number * seconds, rows[number], mixes[number]
            end = min(now, start + seconds)
            row |= _row(part, mix, self.config, answers[number]) | self._rates(steady(answers[number], streams, end), mix)
            row["seconds"] = end - start
            if part == "streams" and mix == self.config.mixes[0] and own and row["tokens_per_s"]:
                row["ratio"] = row["tokens_per_s"] / own

        def look(answers: list[list[RequestRecord]]) -> None:
            nonlocal saved
            now = time.perf_counter()
            if len(rows) < len(answers):
                if rows:
                    cores.append(self._cores(marks[-1]))
                    update(answers, len(rows) - 1, now)
                marks.append(self._mark())
                rows.append(self._add(part, mixes[len(rows)], [], seconds=0.0))
            elif now - saved > SAVED_EVERY_S:
                saved = now
                update(answers, len(rows) - 1, now)
                write_json(self.path, self.document)
                rate = rows[-1]["tokens_per_s"]
                failed = sum(row["failed"] for row in rows)
                self.progress(f"{rows[-1]['mix']}: {failed} failed, {f'{rate:,.0f}' if rate else 'no'} tokens/s")

        answers, end = await closed_loop(builder, [self._lengths(mix, part) for mix in mixes], streams, seconds, look)
        cores.append(self._cores(marks[-1]))
        for number, row in enumerate(rows):
            update(answers, number, end)
            row |= cores[number]
        write_json(self.path, self.document)
        self.capacity |= {mix: row["requests_per_s"] for mix, row in zip(mixes, rows, strict=True) if row["requests_per_s"]}

    async def _idle(self, builder: RequestBuilder) -> None:
        """Alternates requests over HTTP and requests of the serving process, so that both see the same machine state."""
        self.progress("one request after the other")
        prompt, output = self._lengths(self.config.mixes[0], "idle")()
        limit = min(output, ANSWER_ALONE)
        own: list[float] = []

        def alone() -> None:
            own.append(1e3 * self._ask("alone", (prompt, limit)))

        answers = await one_by_one(builder, prompt, limit, MOST_ALONE, self.config.each, alone)
        good = _good(answers)
        median = statistics.median(own)
        first, token = [1e3 * answer.first_s for answer in good], [1e3 * (answer.token_s or 0.0) for answer in good]
        samples = {"own": own, "first": first, "token": token}
        self._add(
            "idle", self.config.mixes[0], answers, own_first_ms=median, own_ms=percentiles(own),
            added_ms=percentiles([each - median for each in first]),
            samples_ms={name: [round(each, 3) for each in times] for name, times in samples.items()},
        )  # fmt: skip

    async def _open(self, builder: RequestBuilder, mix: Mix) -> None:
        each = self.config.each
        if mix not in self.capacity:
            await self._closed("capacity", builder, [mix], each)
        if mix not in self.capacity:
            why = f"not all streams came to a first token in {each:.0f} s: give them longer (--each)"
            self._add("open", mix, [], error=why)
            return
        prepared = []  # prepared before the measurement
        lengths = self._lengths(mix, "open")
        for load in self.config.loads:
            rate = load / 100 * self.capacity[mix]
            prepared.append((load, rate, arrivals(builder, lengths, rate, each, random.Random(f"{self.config.seed} {load}"))))
        ending = []
        for load, rate, requests in prepared:
            self.progress(f"{mix.name}, {rate:.3g} requests a second, {load} % of capacity, for {each:.0f} s")
            mark = self._mark()
            answers = await open_loop(builder, requests, each)
            about = {"load": load, "requests_per_s": rate, "seconds": each, **self._cores(mark)}
            ending.append(asyncio.ensure_future(self._ended(mix, answers, about)))
        await asyncio.gather(*ending)

    async def _ended(self, mix: Mix, answers: asyncio.Task[list[RequestRecord]], about: dict[str, Any]) -> None:
        """Adds the row of a load after its requests have ended; the next load may already run."""
        self._add("open", mix, await answers, **about)

    def _mark(self) -> _Mark:
        return _Mark(time.perf_counter(), time.process_time(), self._ask("cpu"))

    def _cores(self, begun: _Mark) -> dict[str, float]:
        now = self._mark()
        took = now.time - begun.time
        return {"server_cpu": (now.server - begun.server) / took, "client_cpu": (now.client - begun.client) / took}


class _Mark(NamedTuple):
    """A point in time, and the CPU seconds of both processes."""

    time: float
    client: float
    server: float


def _good(answers: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [answer for answer in answers if answer.error is None and not answer.cut and answer.first is not None]


def _row(part: str, mix: Mix, config: ServeConfig, answers: Sequence[RequestRecord]) -> dict[str, Any]:
    good = _good(answers)
    errors = Counter(answer.error for answer in answers if answer.error)
    return {
        "part": part, "mix": mix.name, "streams": config.streams, "load": None, "requests": len(answers),
        "failed": errors.total(), "errors": dict(errors), "cut": sum(answer.cut and not answer.error for answer in answers),
        "seconds": None, "tokens_per_s": None, "requests_per_s": None, "ratio": None, "own_first_ms": None, "added_ms": None,
        "first_ms": percentiles([1e3 * answer.first_s for answer in good]),
        "token_ms": percentiles([1e3 * each for answer in good if (each := answer.token_s) is not None]),
        "server_cpu": None, "client_cpu": None, "error": None,
    }  # fmt: skip


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Returns the 50th, 95th and 99th percentile with linear interpolation; None for no values."""
    if not values:
        return None
    if len(values) == 1:
        return dict.fromkeys(("p50", "p95", "p99"), values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}
