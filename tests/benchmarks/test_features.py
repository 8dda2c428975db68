"""`python -m benchmarks features`: tables of kept files, adapters that the engine reads, requests at intervals, refusals."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import features
from benchmarks.cli import app
from benchmarks.features_report import failed, load, tables
from lowbit.engine import Engine
from lowbit.engine.decode_runner import DecodeRunner
from lowbit.engine.verify_runner import VerifyRunner
from tests.engine.test_gpu import model_of
from tests.tiny import eager_llama

KEPT = Path("benchmarks/results/h200")


def printed(document):
    terminal = Console(width=100, record=True, quiet=False)
    terminal.print(*tables(document))
    return terminal.export_text()


def test_tables():
    steps, requests = (load(KEPT / f"2026-11-28-features-{part}.json") for part in ("steps", "requests"))
    for document, texts in ((steps, ("1573", "2583", "1.642", "1.097")), (requests, ("5,354", "16.6", "24 of 51", "1.82"))):
        assert all(text in printed(document) for text in texts), printed(document)
        assert not failed(document)
    steps["rows"].append({"part": "mixed", "what": None, "error": "OutOfMemoryError: CUDA out of memory"})
    assert failed(steps) == ["mixed: OutOfMemoryError: CUDA out of memory"] and printed(steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--parts", "speed"], "got 'speed'"), (["--model", "GPT-5"], "got 'GPT-5'"), (["--report", "none.json"], "no such file")],
)
def test_what_is_asked_wrongly_is_refused(arguments, message):
    result = CliRunner().invoke(app, ["features", *arguments])
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())


def test_an_engine_reads_the_adapters(tmp_path):
    model = eager_llama()
    folder = features.write_adapter(tmp_path / "a", model, seed=1)
    engine = Engine(model, max_concurrent=2, max_length=64, lora={"a": folder})
    assert engine.adapters is not None and engine.adapters.index("a") == 0


def test_requests_come_at_intervals(monkeypatch):
    """All tokens are counted, once; a request that comes later starts later."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(features, "USERS", 2)
    monkeypatch.setattr(features, "PROMPT", 9)
    monkeypatch.setattr(features, "OUTPUT", 5)
    engine = Engine(eager_llama(), max_concurrent=4, max_length=64)
    speed, gaps = features._served(engine, 6, None, seed=0)
    assert speed > 0 and len(gaps) == 6 * 4 and min(gaps) >= 0
    slow, _ = features._served(engine, 3, 0.4, seed=0)
    assert slow < 3 * 5 / 0.8, "the third one comes after 0.8 s"


class Clock:
    """Stands for torch.cuda.Event on a CPU: each record is a millisecond after the one before."""

    now = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Clock.now += 1
        self.at = Clock.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_steps_are_timed_by_kind(monkeypatch):
    """Each launched step has a kind, prompt tokens and a time, inside the context alone; tokens are those of all prompts."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    ticks = itertools.count()  # so that requests come between the steps of others, on a machine of any speed
    monkeypatch.setattr(features, "time", mock.MagicMock(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(features, "USERS", 2)
    monkeypatch.setattr(features, "PROMPT", 9)
    monkeypatch.setattr(features, "OUTPUT", 5)
    monkeypatch.setattr(features, "REQUESTS", 4)
    engine = Engine(eager_llama(), max_concurrent=4, max_length=64, step_ms=None)
    with features._timed_steps(engine) as steps:
        features._served(engine, 5, 3.0, seed=0)
    kinds = features._by_kind(steps)
    assert set(kinds) == {"prompts", "mixed", "plain"} and sum(count for count, _, _ in kinds.values()) == len(steps)
    assert sum(count * tokens for count, tokens, _ in kinds.values()) == 5 * 9
    assert all(ms == 1 for _, _, ms in kinds.values()) and kinds["plain"][1] == 0
    assert features._idle_ms(steps) == len(steps) - 1, "a millisecond between steps"
    launched = len(steps)
    features._served(engine, 1, 3.0, seed=0)
    assert len(steps) == launched and "_launch" not in vars(engine), "the engine is as it was"

    monkeypatch.setattr(features, "_model", lambda config: eager_llama())
    monkeypatch.setattr(features, "_warm_up_greedy", lambda *given: None)
    monkeypatch.setattr(features, "_engine", lambda model, **options: Engine(model, max_concurrent=4, max_length=64))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    apart, mixed = features._mixed(mock.MagicMock(), lambda line: None)
    assert "apart" in apart["loaded_steps"] and "mixed" not in apart["loaded_steps"]
    assert "mixed" in mixed["loaded_steps"] and "apart" not in mixed["loaded_steps"] and mixed["idle_ms"] > 0
    assert {"prompts", "plain"} <= set(mixed["steps"])
    rows = [{"error": None, **row} for row in (apart, mixed)]
    text = printed({"rows": rows, "machine": {"gpu": "g"}, "model": "m", "small": None})
    assert "mixed: plain" in text and "apart, loaded: apart" in text


def test_kinds_of_mixed_steps_have_their_rows():
    engine, scheduled = mock.MagicMock(), mock.MagicMock(decoding=["a"], chunks=["b"])
    engine.mixed_runner.shape.return_value = mock.MagicMock(rows=32, prompts=mock.MagicMock(tokens=224))
    assert features._kind(engine, scheduled) == "mixed, 256 rows"
    engine.mixed_runner.takes.return_value = False
    assert features._kind(engine, scheduled) == "apart"


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Makes `lora` and `verify` run with a tiny model on a CPU, where nothing is compiled or captured. The "times" are 80 us
    for a step of one row as the engine takes it, else 100, and 120 with guesses or adapters."""
    running = []

    def launched(runner, *options):
        running.append(runner)
        return launch(runner, *options)

    def times_us(step):
        program = running[-1].program
        if isinstance(running[-1], VerifyRunner) or program.adapters is not None:
            return [120.0]
        return [100.0 if program.one_launch is None else 80.0]

    launch = DecodeRunner.launch
    monkeypatch.setattr(DecodeRunner, "launch", launched)
    for name, replaced in {
        "_model": lambda config: eager_llama(), "meta_model": lambda *options: eager_llama(), "CACHE_BYTES": 1 << 25,
        "Graphs": lambda device: None, "WarmUpRun": mock.MagicMock(), "times_us": times_us,
        "_kernels": lambda engine, parts: [],
        "computes_in_one_launch": lambda engine, rows, context: rows == 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(features, name, replaced)
    init = features.DecodeProgram.__init__

    def with_one_launch(program, *options, **more):
        init(program, *options, **more)
        program.one_launch = ("as if there were one",)

    monkeypatch.setattr(features.DecodeProgram, "__init__", with_one_launch)


@pytest.mark.parametrize("part", [features._lora, features._verified])
def test_ratios_are_of_both_kinds_of_steps(part, on_a_cpu):
    """The plain step is the engine's own, and that of several launches a layer beside it."""
    config = features.FeaturesConfig(("lora",), None, "w4a16_g64", "tiny", "w4a16_g128", "w8a16", 32)
    lines = []
    rows = list(part(config, lines.append))
    assert [row["rows"] for row in rows] == ([1, 4, 16, 64] if part is features._lora else [2, 4, 8])
    for row in rows:
        one = row["rows"] == 1 or part is features._verified
        assert (row["plain_us"], row["us"], row["launches_us"]) == (80 if one else 100, 120, 100)
        assert row["ratio"] == row["us"] / row["plain_us"] and row["launches_ratio"] == 1.2
        assert row.get("layer") == ([] if part is features._lora else None), "a profile is one of a GPU's graph"
    assert "plain step of 1: 80 us, by launches 100 us" in lines
    document = {"rows": [{"error": None, **row} for row in rows], "machine": {"gpu": "g"}, "model": "m", "small": None}
    assert "1.200" in printed(document) and ("1.500" in printed(document))
    document["rows"][0]["layer"] = [("lora_sums", 2.25), ("ring_gemm", 4.5)]
    assert all(text in printed(document) for text in ("lora_sums", "2.2", "ring_gemm", "4.5"))


def test_graphs_that_greedy_requests_need(monkeypatch):
    engine, compiled = mock.MagicMock(), []
    monkeypatch.setattr(features, "_kernels", lambda engine, parts: parts)
    monkeypatch.setattr(features, "_compile", lambda engine, kernels, progress: compiled.append(kernels))
    parts = [("step", 1, False, 64), ("step", 1, True, 64), ("mixed", 128, None, 16), ("prompt", 64, False, 0)]
    engine.runner.warm_up_run.all_parts.return_value = parts
    engine.decode_runner.variants.return_value = [(1, False, 64), (1, True, 64)]
    engine.prefill_runner.graph_shapes, engine.mixed_runner.shapes = ["prompts"], ["both"]
    for mixed in (False, True):
        features._warm_up_greedy(engine, mixed, print)
    assert compiled == [[parts[0], parts[3]], [parts[0], *parts[2:]]]
    assert engine.decode_runner.captured.mock_calls == [mock.call((1, False, 64))] * 2
    assert engine.prefill_runner.captured.call_count == 2
    assert engine.mixed_runner.captured.mock_calls == [mock.call("both")]


@pytest.mark.gpu
def test_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(features.random_model.__globals__["SHAPES"], "tiny", lambda: model_of("Llama", torch.float16).config)
    file = tmp_path / "features.json"
    monkeypatch.setattr(features, "REQUESTS", 8)
    result = CliRunner().invoke(app, ["features", "--parts", "lora,verify,mixed", "--model", "tiny", "--out", str(file)])
    assert result.exit_code == 0 and not failed(load(file)), result.stderr
    parts = [(part, len(list(rows))) for part, rows in itertools.groupby(load(file)["rows"], lambda row: row["part"])]
    assert parts == [("lora", 4), ("verify", 3), ("mixed", 2)]
    assert statistics.fmean(row["ratio"] for row in load(file)["rows"] if "ratio" in row) > 1
    adapted, *_, apart, mixed = load(file)["rows"]
    assert any("lora_sums" in name for name, _ in adapted["layer"])
    assert "plain" in apart["steps"] and any(kind.startswith("mixed, ") for kind in mixed["steps"])
