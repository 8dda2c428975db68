"""Starts of a server are timed from its process to the first token."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.start import StartConfig, phases, run
from benchmarks.start_report import failed, load, start_table
from tests.tiny import save_tiny

pytest.importorskip("fastapi", reason="needs the serve extra: pip install '.[serve]'")


def test_starts_on_a_cpu(tmp_path):
    """A cold and a warm start of a tiny model; a start with compiled kernels is refused, since a CPU has none."""
    save_tiny(tmp_path / "tiny")
    said: list[str] = []
    config = StartConfig(tmp_path / "tiny", cores=(1,), device=torch.device("cpu"), limit=120)
    path, document = run(config, tmp_path / "start.json", said.append)
    assert document["complete"] and said == ["cold start on 1 cores", "warm start on 1 cores", "kernels start on 1 cores"]
    cold, warm, kernels = load(path)["rows"]
    for row in (cold, warm):
        assert row["error"] is None and 0 < row["ready_s"] < row["first_token_s"] < 120 and row["bytes"] > 0
        assert {"imports", "load", "engine", "server"} <= set(row["phases"])
        assert abs(sum(row["phases"].values()) - row["ready_s"]) < 0.3 * row["ready_s"] + 1
    assert kernels["error"] == "a CPU has no kernels to compile ahead" and failed(document) == [
        f"kernels, 1 cores: {kernels['error']}"
    ]
    terminal = Console(width=100, record=True, file=io.StringIO())
    terminal.print(start_table(document))
    assert "first token" in terminal.export_text()


def test_a_server_that_ends_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    _, document = run(
        StartConfig(tmp_path / "empty", ways=("warm",), cores=(1,), device=torch.device("cpu"), limit=60),
        tmp_path / "x.json",
        print,
    )
    (row,) = document["rows"]
    assert "the server ended with 1" in row["error"] or "the server ended with 2" in row["error"]
    result = CliRunner().invoke(app, ["start", "--report", str(tmp_path / "x.json")])
    assert result.exit_code == 0 and "warm, 1 cores: RuntimeError" in " ".join(result.stderr.split()), result.stderr


def test_phases_of_a_start():
    lines = ["loading x", "started in 11.1 s: imports 6.4, load 1.7, engine 2.0, server 0.9", "serving x at http://a/v1, b"]
    assert phases(lines) == {"imports": 6.4, "load": 1.7, "engine": 2.0, "server": 0.9} and phases([]) == {}


def test_the_file_is_checked(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"result": "lowbit bench start", "schema": 1}))
    with pytest.raises(ValueError, match="x.json"):
        load(tmp_path / "x.json")
