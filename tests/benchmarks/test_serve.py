"""`python -m benchmarks serve`: request lengths, clients, counted figures, and whole runs with a tiny model."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="needs the serve extra: pip install '.[serve]'")

from benchmarks import language_model, serve_host, serve_load, serve_report
from benchmarks.cli import app
from benchmarks.serve import percentiles
from benchmarks.serve_host import random_tokenizer
from benchmarks.serve_load import (
    SHAREGPT,
    Mix,
    Prompts,
    RequestBuilder,
    RequestRecord,
    arrivals,
    closed_loop,
    fixed,
    one_by_one,
    open_loop,
    staggered,
    steady,
)
from benchmarks.serve_report import failed, load, plot, tables, verdicts
from lowbit.engine import Detokenizer
from lowbit.eval.results import write_json
from tests.serve.running import NAME, running, tiny_pipeline
from tests.tiny import eager_llama, tiny_tokenizer

VOCAB = 160


def test_lengths_have_the_medians_and_percentiles_that_are_said():
    """Sampled lengths have the medians and 90th percentiles that the mix states, for requests of at most 8,192 tokens in
    total."""
    rng = random.Random(0)
    drawn = [SHAREGPT.draw(rng, 8192) for _ in range(8000)]
    assert max(map(sum, drawn)) <= 8192
    for of, median, p90 in ((0, 1730, 5696), (1, 415, 834)):
        cuts = statistics.quantiles([lengths[of] for lengths in drawn], n=10)
        assert cuts[4] == pytest.approx(median, rel=0.05) and cuts[8] == pytest.approx(p90, rel=0.05)
    assert max(sum(SHAREGPT.draw(rng, 2048)) for _ in range(500)) <= 2048
    assert fixed(512, 128).draw(rng, 640) == (512, 128)
    with pytest.raises(ValueError, match="requests of the mix 512/128 are longer than the 639 tokens that a text has here"):
        fixed(512, 128).draw(rng, 639)


def test_prompts_are_the_same_for_a_seed_and_no_two_begin_alike():
    one, other = Prompts(VOCAB, 3), Prompts(VOCAB, 3)
    made = [one(n) for n in range(1, 400)]
    assert made == [other(n) for n in range(1, 400)] and list(map(len, made)) == list(range(1, 400))
    assert all(0 <= token < VOCAB for ids in made for token in ids)
    assert len({tuple(ids[:2]) for ids in made[1:]}) == 398
    assert Prompts(VOCAB, 4)(50) != Prompts(VOCAB, 3)(50)


def test_the_first_answers_of_streams_have_different_lengths():
    first = [next(staggered(lambda: (9, 20), number, 5)) for number in range(5)]
    assert first == [(9, 4), (9, 8), (9, 12), (9, 16), (9, 20)]


def test_tokens_count_where_they_fall():
    answer = RequestRecord(0.0, 11, first=1.0, last=3.0, tokens=11)
    assert answer.first_s == 1.0 and answer.token_s == pytest.approx(0.2)
    assert answer.tokens_between(0, 9) == 11 and answer.tokens_between(2, 9) == 5 and answer.tokens_between(0, 2) == 6
    assert RequestRecord(0.0, 3).tokens_between(0, 9) == 0
    other = RequestRecord(0.0, 5, first=2.0, last=4.0, tokens=5)
    found = steady([answer, other], 2, 4.0)
    assert (found.begin, found.end) == (2.0, 4.0) and found.tokens_per_s == pytest.approx((5 + 5) / 2)
    assert steady([answer, RequestRecord(0.0, 5)], 2, 4.0) is None and steady([answer], 2, 4.0) is None


def test_percentiles():
    assert percentiles([]) is None and percentiles([2.0]) == {"p50": 2.0, "p95": 2.0, "p99": 2.0}
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_a_shape_is_served_with_random_weights(monkeypatch):
    """Runs the server process's preparation in this process, for one second of CPU time, so that a busy machine does not
    matter.
    """
    monkeypatch.setattr(serve_host, "time", SimpleNamespace(perf_counter=time.process_time, process_time=time.process_time))
    shape = dict(hidden=64, intermediate=192, layers=3, heads=4, kv_heads=2, vocab=320, theta=1e4)
    monkeypatch.setitem(language_model.SHAPES, "small", lambda: language_model._llama(**shape))
    asked = serve_host.ServeConfig(
        "small", None, "w4a16_g32", "w8a16", "bfloat16", 2, 3, (fixed(20, 6),), ("engine",), (50,), 2.0, 1.0, 0
    )  # fmt: skip
    made = serve_host._pipeline(asked, print)
    assert made.engine.max_length == serve_host.POSITIONS and len(made.model.model.layers) == 2
    answers, end, cpu = serve_host.engine_loop(made.engine, Prompts(320, 0), asked)
    ended = [answer for answer in answers if answer.tokens == answer.expected_tokens]
    assert len(ended) > 6 and cpu > 0 and not any(answer.error for answer in answers)
    assert steady(answers, 3, end).tokens_per_s > 0 and [answer.expected_tokens for answer in answers[:4]] == [2, 4, 6, 6]
    assert not made.engine.scheduler.running and not made.engine.scheduler.waiting
    assert serve_host.first_token_alone(made.engine, Prompts(320, 1)(20), 3) > 0
    assert not made.engine.scheduler.running and not made.engine._in_flight


def test_keys_and_values_of_the_served_engine(monkeypatch):
    """The engine stores keys and values in the requested format, and the tables name the format."""
    shape = dict(hidden=64, intermediate=192, layers=3, heads=4, kv_heads=2, vocab=320, theta=1e4)
    monkeypatch.setitem(language_model.SHAPES, "small", lambda: language_model._llama(**shape))
    asked = serve_host.ServeConfig(
        "small", None, "w4a16_g32", "w8a16", "bfloat16", 2, 3, (fixed(20, 6),), ("engine",), (50,), 2.0, 1.0, 0, "int4"
    )  # fmt: skip
    engine = serve_host._pipeline(asked, print).engine
    assert str(engine.program.cache_spec.kv) == "int4" and engine.report()[1].endswith("keys and values in int4")
    assert serve_report.of({"asked": asdict(asked)}) == "small, w4a16_g32, KV int4"
    assert serve_report.of({"asked": {"folder": None, "shape": "small", "scheme": None}}) == "small"


def test_every_token_of_the_tokenizer_for_random_weights_is_text():
    stream = Detokenizer(random_tokenizer(1000), [300, 301])
    assert [stream.push(token) for token in (999, 400, 256)] == [" 2e7", " 90", " 0"]


@pytest.fixture(scope="module")
def server():
    with running(tiny_pipeline(max_concurrent=4), max_concurrent=4, max_queue=2) as made:
        yield made


@pytest.fixture
def builder(server):
    host, port = server.address
    return RequestBuilder(host, port, NAME, Prompts(VOCAB, 0))


def test_a_closed_loop_asks_as_soon_as_it_is_answered(server, builder):
    looked = []
    (answers,), end = asyncio.run(closed_loop(builder, [lambda: (20, 12)], 4, 2.5, lambda found: looked.append(len(found[0]))))
    server.wait_until_free()
    whole = [answer for answer in answers if not answer.cut]
    assert len(whole) > 8 and len(answers) - len(whole) <= 4 and looked == sorted(looked) and len(looked) >= 2
    assert all(
        answer.error is None and answer.tokens == answer.expected_tokens and answer.first < answer.last for answer in whole
    )
    assert sorted(answer.expected_tokens for answer in answers[:4]) == [3, 6, 9, 12] and {
        answer.expected_tokens for answer in answers[4:]
    } == {12}
    found = steady(answers, 4, end)
    assert found.tokens_per_s == pytest.approx(sum(answer.tokens for answer in answers) / (end - found.begin), rel=0.3)


def test_a_closed_loop_goes_on_with_another_mix_without_a_pause(server, builder):
    mixes = [lambda: (20, 12), lambda: (9, 30)]
    for seconds in (1.5, 6, 24):  # runs longer if a busy machine has answered too few requests of each kind
        (first, second), end = asyncio.run(closed_loop(builder, mixes, 4, seconds, lambda found: None))
        server.wait_until_free()
        if len(first) > 8 < len(second):
            break
    turn = end - seconds
    assert {answer.expected_tokens for answer in first[4:]} == {12} and {answer.expected_tokens for answer in second} == {30}
    begun = min(answer.due for answer in second)
    assert max(answer.due for answer in first) <= begun >= turn and not any(answer.cut or answer.error for answer in first)
    streams = [answer for answer in first if answer.due < turn < answer.last]
    assert 1 <= len(streams) <= 4, "what runs then is not cut"
    assert begun - max(answer.last for answer in first) < 0.5


def test_one_after_the_other_meets_an_engine_that_does_nothing(server, builder, monkeypatch):
    """Requests one after the other find an idle engine. Each prompt is one prefill chunk, and no earlier sequence is running,
    in flight or waiting to be freed.
    """
    engine, prompt, found = server.engine, server.engine.program.prompt, []

    def watched(pieces, slots):
        found.append(
            (
                len(pieces),
                pieces[0].begin,
                pieces[0].last,
                len(engine.scheduler.running),
                len(engine._in_flight),
                len(engine._finished),
            )
        )
        return prompt(pieces, slots)

    asyncio.run(one_by_one(builder, 20, 8, 1, 20.0))  # ends once all sequences that were cancelled before are gone
    monkeypatch.setattr(engine.program, "prompt", watched)
    answers = asyncio.run(one_by_one(builder, 20, 8, 30, 20.0))
    assert len(answers) == 30 and not any(answer.error for answer in answers)
    assert found == [(1, 0, True, 1, 0, 0)] * 30
    server.wait_until_free()


def asked_by_chance(builder, rate, output, seconds=1.0):
    """Returns the results of requests that arrive at random times."""

    async def ask():
        return await (
            await open_loop(builder, arrivals(builder, lambda: (20, output), rate, seconds, random.Random(1)), seconds)
        )

    return asyncio.run(ask())


def test_arrivals_come_when_they_are_due_whatever_became_of_others(server, builder):
    """Requests arrive on schedule, whatever happens to earlier ones. There are more than the server accepts; refused ones count
    as failed, with the reason.
    """
    answers = asked_by_chance(builder, 300.0, 60)
    server.wait_until_free()
    due = [answer.due - answers[0].due for answer in answers]
    assert 250 < len(answers) < 350 and due == sorted(due) and due[-1] < 1.0
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.25), "exponential"
    refused = [answer for answer in answers if answer.error == "status 429"]
    answered = [answer for answer in answers if answer.error is None]
    assert refused and answered and len(refused) + len(answered) == len(answers), {answer.error for answer in answers}
    assert all(answer.tokens == 60 and answer.first_s > 0 for answer in answered)


def test_a_load_begins_while_the_one_before_comes_to_its_end(server, builder, monkeypatch):
    take = server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: time.sleep(0.02) or take())

    async def ask():
        begun = time.perf_counter()
        first = await open_loop(builder, [(0.0, 60, builder.request(20, 60)), (0.2, 60, builder.request(20, 60))], 0.3)
        asked = time.perf_counter() - begun
        second = await open_loop(builder, [(0.0, 2, builder.request(20, 2))], 0.1)
        return asked, await second, await first

    asked, (second,), first = asyncio.run(ask())
    server.wait_until_free()
    assert 0.3 <= asked < 60 * 0.02 and [answer.tokens for answer in first] == [60, 60] and second.tokens == 2
    assert second.last < max(answer.last for answer in first) and not any(answer.error for answer in [*first, second])


def test_a_request_without_an_end_in_time_has_failed(server, builder, monkeypatch):
    take = server.service.worker.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: time.sleep(0.3) or take())
    monkeypatch.setattr(serve_load, "LAST_SECONDS", 1.0)
    answers = asked_by_chance(builder, 4.0, 60)
    assert answers and {answer.error for answer in answers} == {"no end in time"}
    monkeypatch.undo()
    server.wait_until_free()


def test_clients_of_a_server_that_is_gone(builder):
    gone = RequestBuilder(builder.host, 9, NAME, builder.prompts)
    answers = asyncio.run(one_by_one(gone, 20, 4, 3, 5.0))
    assert len(answers) == 3 and all(answer.error.startswith("no connection") for answer in answers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny"
    eager_llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


SHORT = ("--prompt", "40", "--output", "12", "--streams", "4", "--each", "1")


def test_a_whole_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(serve_load, "SHAREGPT", Mix("long-like", 30, 20, 60, 40))
    path = tmp_path / "serve.json"
    command = ["serve", "--model", str(folder), "--seconds", "4", *SHORT, "--loads", "50,80", "--out", str(path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    document = load(path)
    rows = document["rows"]
    assert document["complete"] and document["machine"]["device"] == "cpu" and document["asked"]["folder"] == "tiny"
    parts = [(row["part"], row["mix"], row["load"]) for row in rows]
    mixes = ("40/12", "long-like")
    loads = [("open", mix, load) for mix in mixes for load in (50, 80)]
    assert parts == [("engine", mixes[0], None), *(("streams", mix, None) for mix in mixes), ("idle", mixes[0], None), *loads]
    assert [row["failed"] for row in rows] == [0] * 8 and all(row["requests"] for row in rows)
    engine, streams, other, idle, *arrivals = rows
    assert streams["ratio"] == pytest.approx(streams["tokens_per_s"] / engine["tokens_per_s"]) and other["ratio"] is None
    assert streams["seconds"] == pytest.approx(2) == pytest.approx(other["seconds"]) and streams["cut"] == 0
    assert all(row["server_cpu"] > 0 and row["client_cpu"] > 0 for row in (streams, other, *arrivals))
    # CPU times are compared, since a busy machine may give the processes different shares of time (1.31 was seen on one).
    assert 0.2 < streams["ratio"] * engine["server_cpu"] / streams["server_cpu"] < 1.5
    assert engine["server_cpu"] + streams["server_cpu"] > 0.1 and 0 < idle["added_ms"]["p50"] <= idle["added_ms"]["p99"]
    samples = idle["samples_ms"]
    assert len(samples["own"]) == len(samples["first"]) == len(samples["token"]) == idle["requests"]
    assert (
        idle["own_ms"]["p50"]
        == pytest.approx(idle["own_first_ms"])
        == pytest.approx(statistics.median(samples["own"]), abs=1e-3)
    )
    assert max(samples["first"]) - idle["own_first_ms"] >= idle["added_ms"]["p99"] - 1e-3
    for row, (_, mix, share) in zip(arrivals, loads, strict=True):
        capacity = (streams if mix == mixes[0] else other)["requests_per_s"]
        assert row["requests_per_s"] == pytest.approx(share / 100 * capacity)
        assert row["first_ms"]["p50"] <= row["first_ms"]["p99"] and row["token_ms"]["p50"] > 0
    whole = f"4 streams for 4 s: 0 of {streams['requests'] + other['requests']:,} requests failed (bar: none)"
    assert whole in result.output and "of the engine's own tokens a second (bar: at least 0.92)" in result.output
    pytest.importorskip("matplotlib")
    plot(document, tmp_path / "serve.png")
    assert (tmp_path / "serve-dark.png").stat().st_size > 10_000


def test_a_run_that_is_killed_keeps_what_it_had_and_leaves_no_server(folder, tmp_path):
    path = tmp_path / "serve.json"
    command = ["serve", "--model", str(folder), "--seconds", "600", "--no-sharegpt", *SHORT, "--out", str(path)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks", *command], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 90
    while not (path.exists() and len(json.loads(path.read_text())["rows"]) == 2):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    document = load(path)
    assert not document["complete"] and [row["part"] for row in document["rows"]] == ["engine", "streams"]
    assert children and document["rows"][0]["tokens_per_s"] > 0
    while subprocess.run(["ps", "-o", "pid=", *(f"-p{child}" for child in children)], capture_output=True).stdout:
        assert time.monotonic() < end, "the server outlives those who asked"
        time.sleep(0.1)


def test_what_cannot_be_served_is_said_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["serve", "--model", str(tmp_path), "--out", str(tmp_path / "serve.json")])
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "the process that serves failed: " in result.output


def document(*rows):
    return {
        "result": "lowbit bench serve", "schema": 1, "date": "2026-11-23", "complete": True, "machine": {"device": "a GPU"},
        "asked": {"folder": None, "shape": "Llama-3-8B", "scheme": "w4a16_g128"}, "rows": [*rows],
    }  # fmt: skip


def row(part, **more):
    return {
        "part": part, "mix": "512/128", "streams": 64, "load": None, "requests": 1000, "failed": 0, "errors": {}, "cut": 0,
        "seconds": 300.0, "tokens_per_s": 6000.0, "requests_per_s": 46.9, "ratio": None, "own_first_ms": None, "added_ms": None,
        "first_ms": {"p50": 20.0, "p95": 40.0, "p99": 1234.0}, "token_ms": {"p50": 5.0, "p95": 6.0, "p99": 7.0},
        "server_cpu": 0.5, "client_cpu": 0.1, "error": None,
    } | more  # fmt: skip


def test_tables_say_what_failed_and_what_was_to_come_out(tmp_path):
    rows = (
        row("streams", ratio=0.901, failed=2, errors={"status 500": 2}, seconds=200.0),
        row("streams", mix="ShareGPT-like", seconds=100.0, failed=1, errors={"status 500": 1}),
        row("idle", own_first_ms=12.3, added_ms={"p50": 2.0, "p95": 3.0, "p99": 4.5}),
        row("open", load=80), row("open", mix="ShareGPT-like", error="not all streams came to a first token"),
    )  # fmt: skip
    write_json(tmp_path / "serve.json", document(*rows))
    terminal = Console(width=80, record=True)
    terminal.print(*tables(load(tmp_path / "serve.json")))
    text = " ".join(terminal.export_text().split())
    for said in ("Llama-3-8B, w4a16_g128 on a GPU", "open at 80 %", "20 40 1,234", "0.50 0.10", "streams of 64, ShareGPT-like"):
        assert said in text
    assert "…" not in text
    assert failed(document(*rows)) == ["open, ShareGPT-like: not all streams came to a first token"]
    assert verdicts(document(*rows)) == [
        "64 streams for 300 s: 3 of 2,000 requests failed (bar: none); 3 x status 500",
        "0.901 of the engine's own tokens a second (bar: at least 0.92)",
        "added to the first token when idle: 2.00 ms, p99 4.50 ms (bar: p99 under 15 ms); the engine's own median is 12.30 ms",
    ]
    known = row("idle", own_first_ms=12.3, own_ms={"p50": 12.3, "p95": 13.0, "p99": 25.5}, added_ms=rows[2]["added_ms"])
    assert verdicts(document(known))[0].endswith("the engine's own median is 12.30 ms, its p95 13.00 and its p99 25.50 ms")
    with pytest.raises(ValueError, match="no open loop to plot"):
        plot(document(rows[0]), tmp_path / "none.png")


def test_a_mix_of_one_length_needs_no_luck():
    assert Mix("a", 5, 6).draw(random.Random(0), 11) == (5, 6) and serve_load.LEAST_TOKENS == 4
