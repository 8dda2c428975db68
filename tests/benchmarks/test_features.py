"""`python -m benchmarks features`: tables of kept files, adapters that the engine reads, requests at intervals, refusals."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import features
from benchmarks.cli import app
from benchmarks.features_report import failed, load, tables
from lowbit.engine import Engine
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
