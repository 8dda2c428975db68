"""`lowbit bench` on a tiny model: every row is present, with its times and sizes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lowbit.cli.commands import app
from tests.tiny import save_tiny


def test_every_scheme_between_two_unquantized_runs(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    out = tmp_path / "rows.json"
    options = [
        "--schemes",
        "w4a16_g32, w8a16",
        "--prompt-tokens",
        "5",
        "--max-new-tokens",
        "3",
        "--repeats",
        "2",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(app, ["bench", str(folder), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    rows = found["rows"]
    assert [row["scheme"] for row in rows] == [None, "w4a16_g32", "w8a16", None]
    assert all(len(row["token_ms_runs"]) == 2 and row["first_token_ms"] > 0 for row in rows)
    assert rows[0]["times_unquantized"] == pytest.approx(1) and 0 < rows[1]["bytes"] < rows[0]["bytes"]
    assert found["new_tokens"] == 3 and found["batch"] == 1 and "1 x 5 tokens, then 3 each" in result.output


def test_an_unknown_scheme_is_one_line(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    result = CliRunner().invoke(app, ["bench", str(folder), "--schemes", "q4_k"])
    assert result.exit_code == 1
