"""`lowbit bench serve`: what is left of the engine's speed when its texts are asked for over HTTP, and how long users wait.

A process of its own makes the model, measures its engine, and serves it on the loopback (serve_host.py); this one is the
clients (serve_load.py).
"""

from __future__ import annotations

import asyncio
import datetime
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lowbit.bench.results import default_path
from lowbit.bench.serve_host import ANSWER_ALONE, MOST_ALONE, NAME, Asked, host
from lowbit.bench.serve_load import Answered, Asker, Mix, Prompts, Steady, closed_loop, one_by_one, open_loop, steady
from lowbit.bench.serve_report import SCHEMA, SERVE
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import versions, write_json

PARTS = ("engine", "streams", "idle", "open")
"""In this order, the most important first."""

SAVED_EVERY_S = 10.0
DRAWS_OF_A_MEAN = 4096
END_SECONDS = 20.0

PROTOCOL = (
    "One process computes and serves, on the loopback; another asks. Prompts are random tokens, no two beginning alike; "
    "answers have exactly the tokens asked for, the likeliest ones, as events. engine: the closed loop of `streams` over the "
    "engine without a server and without text. streams: as many clients, each asking as soon as it is answered; tokens_per_s "
    "counts from when all have had a first token, and ratio is that by the engine's. capacity: the same of another mix. idle: "
    "one request after the other; added_ms is the time to its first token less the median of the engine's own for prompts of "
    "that length (own_first_ms). open: arrivals by chance (Poisson) at a share of the requests a second of the closed loop; "
    "times count from when a request was due, and one without an end after as many seconds more has failed. first_ms: to the "
    "first token; token_ms: of each request the mean time between its tokens; percentiles over requests. server_cpu, "
    "client_cpu: cores that each process kept busy."
)

Watch = Callable[[str], None]


class HostFailed(ValueError):
    """The process that serves did not do its part; the message says why, as far as it said so itself."""


def run(asked: Asked, path: Path | None, watch: Watch) -> tuple[Path, dict[str, Any]]:
    """Measures everything and returns the result file, which is written after each part, and its document. Raises HostFailed
    when the process that serves does."""
    if path is not None:
        check_file(path, SERVE)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=host, args=(asked, other), daemon=False)
    process.start()
    other.close()
    try:
        return _Run(asked, pipe, path, watch).all()
    finally:
        pipe.close()
        process.join(END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


class _Run:
    """One run: the document, its file, and the process that serves."""

    def __init__(self, asked: Asked, pipe: Connection, path: Path | None, watch: Watch) -> None:
        self.asked, self.pipe, self.watch = asked, pipe, watch
        self.about = self._hear("about")
        today = datetime.date.today()
        self.path = path or default_path(self.about["machine"]["device"], today).with_name(f"{today.isoformat()}-serve.json")
        check_file(self.path, SERVE)
        self.rows: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {
            "result": SERVE, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "machine": self.about["machine"],
            "versions": versions(("transformers", "fastapi", "uvicorn", "httptools")), "engine": self.about["engine"],
            "asked": {**asdict(asked), "folder": None if asked.folder is None else asked.folder.name}, "protocol": PROTOCOL,
            "rows": self.rows,
        }  # fmt: skip
        self.own_first_s: float | None = None
        self.capacity: dict[Mix, float] = {}

    def all(self) -> tuple[Path, dict[str, Any]]:
        """Every part that was asked for."""
        asked = self.asked
        if "engine" in asked.parts:
            self._engine()
        if "idle" in asked.parts:
            self.own_first_s = statistics.median(self._hear("alone"))
        server, port = self._hear("address")
        # Other tokens than those whose pages the engine may still hold.
        asker = Asker(server, port, NAME, Prompts(self.about["vocab"], asked.seed + 1))
        if "streams" in asked.parts:
            asyncio.run(self._closed("streams", asker, asked.mixes[0], asked.seconds))
        if "idle" in asked.parts:
            asyncio.run(self._idle(asker))
        if "open" in asked.parts:
            for mix in asked.mixes:
                asyncio.run(self._open(asker, mix))
        self.document["complete"] = True
        write_json(self.path, self.document)
        return self.path, self.document

    def _hear(self, word: str) -> Any:
        """The value of the next `word` of the other process; tells what it says meanwhile."""
        while True:
            try:
                said, value = self.pipe.recv()
            except EOFError:
                raise HostFailed("the process that serves has ended, before its work was done") from None
            if said == "failed":
                raise HostFailed(f"the process that serves failed: {value}")
            if said == word:
                return value
            assert said == "watch", said
            self.watch(value)

    def _server_cpu(self) -> float:
        try:
            self.pipe.send("cpu")
        except OSError as error:
            raise HostFailed("the process that serves has ended, before its work was done") from error
        value: float = self._hear("cpu")
        return value

    def _add(self, part: str, mix: Mix, answers: Sequence[Answered], **more: Any) -> dict[str, Any]:
        """A row of the results, saved."""
        row = {**_row(part, mix, self.asked, answers), **more}
        self.rows.append(row)
        write_json(self.path, self.document)
        return row

    def _lengths(self, mix: Mix, part: str) -> Callable[[], tuple[int, int]]:
        rng = random.Random(f"{self.asked.seed} {part} {mix.name}")
        return lambda: mix.draw(rng, self.about["max_length"])

    def _engine(self) -> None:
        answers, end, cpu = self._hear("engine")
        found = steady(answers, self.asked.streams, end)
        mix = self.asked.mixes[0]
        self._add("engine", mix, answers, **self._rates(found, mix), seconds=self.asked.each, server_cpu=cpu)

    def _rates(self, found: Steady | None, mix: Mix) -> dict[str, float | None]:
        """Tokens and requests a second; a request is as many tokens as those of a mix have on average."""
        if found is None:
            return {"tokens_per_s": None, "requests_per_s": None}
        draw = self._lengths(mix, "mean")
        mean = statistics.fmean(draw()[1] for _ in range(DRAWS_OF_A_MEAN))
        return {"tokens_per_s": found.tokens_per_s, "requests_per_s": found.tokens_per_s / mean}

    async def _closed(self, part: str, asker: Asker, mix: Mix, seconds: float) -> None:
        streams = self.asked.streams
        begun, client, server = time.perf_counter(), time.process_time(), self._server_cpu()
        self.watch(f"{streams} streams of {mix.name} for {seconds:.0f} s")
        row = self._add(part, mix, [], seconds=0.0)
        saved = begun

        def update(answers: list[Answered], now: float) -> None:
            found = steady(answers, streams, now)
            row.update(_row(part, mix, self.asked, answers), **self._rates(found, mix), seconds=now - begun)
            own = next((r["tokens_per_s"] for r in self.rows if r["part"] == "engine"), None)
            if part == "streams" and own and row["tokens_per_s"]:
                row["ratio"] = row["tokens_per_s"] / own

        def look(answers: list[Answered]) -> None:
            nonlocal saved
            now = time.perf_counter()
            if now - saved > SAVED_EVERY_S:
                saved = now
                update(answers, now)
                write_json(self.path, self.document)
                rate = row["tokens_per_s"]
                self.watch(f"{now - begun:.0f} s, {row['failed']} failed, {f'{rate:,.0f}' if rate else 'no'} tokens/s")

        answers, end = await closed_loop(asker, self._lengths(mix, part), streams, seconds, look)
        update(answers, end)
        row |= self._cores(begun, client, server)
        write_json(self.path, self.document)
        if row["requests_per_s"]:
            self.capacity[mix] = row["requests_per_s"]

    async def _idle(self, asker: Asker) -> None:
        self.watch("one request after the other")
        prompt, output = self._lengths(self.asked.mixes[0], "idle")()
        answers = await one_by_one(asker, prompt, min(output, ANSWER_ALONE), MOST_ALONE, self.asked.each)
        assert self.own_first_s is not None
        own = self.own_first_s
        added = percentiles([1e3 * (answer.first_s - own) for answer in _good(answers)])
        self._add("idle", self.asked.mixes[0], answers, own_first_ms=1e3 * own, added_ms=added)

    async def _open(self, asker: Asker, mix: Mix) -> None:
        if mix not in self.capacity:
            await self._closed("capacity", asker, mix, self.asked.each)
        if mix not in self.capacity:
            why = f"not all streams came to a first token in {self.asked.each:.0f} s: give them longer (--each)"
            self._add("open", mix, [], error=why)
            return
        for load in self.asked.loads:
            rate = load / 100 * self.capacity[mix]
            self.watch(f"{mix.name}, {rate:.3g} requests a second, {load} % of capacity, for {self.asked.each:.0f} s")
            begun, client, server = time.perf_counter(), time.process_time(), self._server_cpu()
            rng = random.Random(f"{self.asked.seed} {load}")
            answers = await open_loop(asker, self._lengths(mix, "open"), rate, self.asked.each, rng)
            more = self._cores(begun, client, server)
            self._add("open", mix, answers, load=load, requests_per_s=rate, seconds=self.asked.each, **more)

    def _cores(self, begun: float, client: float, server: float) -> dict[str, float]:
        took = time.perf_counter() - begun
        return {"server_cpu": (self._server_cpu() - server) / took, "client_cpu": (time.process_time() - client) / took}


def _good(answers: Sequence[Answered]) -> list[Answered]:
    return [answer for answer in answers if answer.error is None and not answer.cut and answer.first is not None]


def _row(part: str, mix: Mix, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
    good = _good(answers)
    errors = Counter(answer.error for answer in answers if answer.error)
    return {
        "part": part, "mix": mix.name, "streams": asked.streams, "load": None, "requests": len(answers),
        "failed": errors.total(), "errors": dict(errors), "cut": sum(answer.cut and not answer.error for answer in answers),
        "seconds": None, "tokens_per_s": None, "requests_per_s": None, "ratio": None, "own_first_ms": None, "added_ms": None,
        "first_ms": percentiles([1e3 * answer.first_s for answer in good]),
        "token_ms": percentiles([1e3 * each for answer in good if (each := answer.token_s) is not None]),
        "server_cpu": None, "client_cpu": None, "error": None,
    }  # fmt: skip


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The 50th, 95th and 99th, of values in between straight lines; None of none."""
    if not values:
        return None
    if len(values) == 1:
        return dict.fromkeys(("p50", "p95", "p99"), values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}
