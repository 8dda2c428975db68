"""`lowbit inspect` summarises layers that differ only in their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowbit.cli.commands import app
from lowbit.cli.inspect import _equal_rows, _ranges
from lowbit.cli.terminal import out
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from tests.tiny import save_tiny


def test_ranges():
    assert [_ranges(numbers) for numbers in ([4], [1, 0], [0, 1, 2, 5, 7, 8], [3, 3])] == ["4", "0-1", "0-2,5,7-8", "3"]


def row(name, **fields):
    return {"layer": name, "scheme": "w4a16", "n": 8, "k": 8, "bytes": 40, **fields}


def test_layers_that_differ_only_in_their_number_are_one_row():
    names = [f"model.layers.{i}.{kind}" for i in range(30) for kind in ("q", "k", "v", "o", "gate", "up", "down")]
    found = _equal_rows([row(name) for name in names])
    assert [(name, count) for name, _, count in found[:2]] == [("model.layers.0-29.q", 30), ("model.layers.0-29.k", 30)]
    assert len(found) == 7


def test_what_differs_otherwise_is_apart():
    rows = [row(f"layers.{i}.mlp", scheme="w8a16" if i in (0, 2) else "w4a16") for i in range(5)]
    assert [(name, count) for name, _, count in _equal_rows(rows)] == [("layers.0,2.mlp", 2), ("layers.1,3-4.mlp", 3)]
    experts = [row(f"layers.{i}.experts.{j}.up") for i in range(2) for j in range(4)] + [row("lm_head"), row("conv1.x")]
    assert [name for name, *_ in _equal_rows(experts)] == ["layers.0-1.experts.0-3.up", "lm_head", "conv1.x"]


def test_the_table_and_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(out, "width", 200)
    save_tiny(tmp_path / "m")
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w8a16")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "q"), "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 0 and result.stdout.count("w8a16") == 7
    assert "14 quantized layers" in result.stdout
    assert len(json.loads((tmp_path / "r.json").read_text())["layers"]) == 14


@pytest.mark.model
def test_a_real_model(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(out, "width", 200)
    quantize_checkpoint(Path(smollm2), tmp_path / "q", "w4a16_g64")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "q")])
    assert result.stdout.count("w4a16_g64") == 7 and "model.layers.0-29.mlp.up_proj" in result.stdout
