"""`python -m benchmarks load`: files of random weights of a shape, loading them, the table, and the memory bound on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import language_model, load, load_report
from benchmarks.cli import app
from benchmarks.language_model import meta_model
from benchmarks.load import LoadConfig, run
from benchmarks.load_report import failed, load_table
from benchmarks.load_report import load as load_results
from benchmarks.synthetic import write_checkpoint
from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.target import check_space
from lowbit.models.load import check_checkpoint, load_causal
from lowbit.nn import QuantLinear

SMALL = dict(hidden=256, intermediate=384, layers=3, heads=4, kv_heads=2, vocab=320, theta=1e4)
HIDDEN = 256


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(language_model.SHAPES, "small", lambda: language_model._llama(**SMALL))
    return "small"


def config(folder, **more):
    given = dict(
        model="small", kinds=load.KINDS, schemes=(None, "w4a16_g128"), head="w8a16", dtype="bfloat16",
        device=torch.device("cpu"), layers=1, repeats=1, folder=folder,
    )  # fmt: skip
    return LoadConfig(**{**given, **more})


@pytest.mark.parametrize("kind", load.KINDS)
def test_files_of_every_kind_are_those_of_the_model(kind, small, tmp_path):
    model, seen = meta_model(small, torch.bfloat16, layers=2), []
    write_checkpoint(tmp_path / "made", model, kind, "w4a16_g128", torch.device("cpu"), lambda *done: seen.append(done))
    total = sum(p.nbytes for p in model.parameters())
    assert seen[-1] == (total, total)
    assert check_checkpoint(tmp_path / "made") == ()
    loaded = load_causal(tmp_path / "made", device="cpu", dtype=torch.bfloat16)
    layers = [m for m in loaded.modules() if isinstance(m, QuantLinear)]
    assert len(layers) == (0 if kind == "16-bit" else 14) and len(loaded.model.layers) == 2
    norm = loaded.model.norm.weight
    assert norm.dtype == torch.bfloat16 and bool((norm == 1).all())


def test_every_row_says_what_was_measured(small, tmp_path):
    watched = []
    path, document = run(config(tmp_path), tmp_path / "load.json", lambda *step: watched.append(step))
    assert document == load_report.load(path) and document["complete"]
    assert [p.name for p in tmp_path.iterdir()] == ["load.json"]  # the model's files were deleted
    rows = document["rows"]
    assert [(row["files"], row["scheme"]) for row in rows] == [
        ("16-bit", None), *((kind, "w4a16_g128") for kind in load.KINDS),
    ]  # fmt: skip
    ends = 2 * 320 * HIDDEN
    weights = 2 * HIDDEN**2 + 2 * HIDDEN * 128 + 3 * HIDDEN * 384
    norms = 2 * (3 * HIDDEN)
    for row in rows:
        assert row["error"] is None and row["slow"] == 0 and row["peak_bytes"] is None and len(row["seconds"]) == 1
        assert row["gb_per_s"] == pytest.approx(row["source_bytes"] / row["seconds"][0] / 1e9)
        assert row["bound_bytes"] == row["model_bytes"] + row["layer_bytes"] + load.LOADING_OVERHEAD_BYTES
    plain, quantized = rows[0], rows[1:]
    assert plain["source_bytes"] == pytest.approx(2 * (weights + ends) + norms, rel=0.01) and plain["layer_bytes"] == 0
    assert plain["model_bytes"] == pytest.approx(2 * (weights + ends), rel=0.01)
    assert {row["head"] for row in quantized} == {"w8a16"} and {row["layer_bytes"] for row in quantized} == {2 * 384 * HIDDEN}
    assert all(row["source_bytes"] < 0.8 * plain["source_bytes"] for row in quantized[1:])
    assert {what for what, _, _ in watched} >= {"writing gptq files", "loading 16-bit files, as they are"}


def test_what_fails_says_why_and_the_rest_goes_on(small, tmp_path, monkeypatch):
    def sometimes(*args, scheme, **options):
        if scheme == "w8a16":
            raise torch.cuda.OutOfMemoryError("too much")
        return load_causal(*args, scheme=scheme, **options)

    monkeypatch.setattr(load, "load_causal", sometimes)
    some = config(tmp_path, kinds=("16-bit",), schemes=("w8a16", None))
    _, document = run(some, tmp_path / "load.json", lambda *step: None)
    refused, plain = document["rows"]
    assert refused["error"] == "OutOfMemoryError: too much" and plain["error"] is None and document["complete"]
    assert load_table(document).row_count == 1
    assert failed(document) == ["16-bit, w8a16: OutOfMemoryError: too much"]


def test_kept_results_fit_a_terminal():
    terminal = Console(width=80, record=True, quiet=False)
    results = Path(__file__).parents[2] / "benchmarks/results/h200/2026-11-23-load.json"
    terminal.print(load_table(load_results(results)))
    text = terminal.export_text()
    assert "w4a16_g128" in text and "4.20" in text and "…" not in text


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_files_are_removed_whatever_ends_the_run(stop, small, tmp_path, monkeypatch):
    def interrupted(*args, **options):
        raise stop

    for what in ("load_causal", "_read"):
        with monkeypatch.context() as patched:
            patched.setattr(load, what, interrupted)
            if (what, stop) == ("load_causal", OSError):  # an error of a load becomes a row
                run(config(tmp_path, kinds=("16-bit",)), tmp_path / "load.json", lambda *step: None)
            else:
                with pytest.raises(stop):
                    run(config(tmp_path, kinds=("16-bit",)), tmp_path / "load.json", lambda *step: None)
        assert {p.name for p in tmp_path.iterdir()} <= {"load.json"}


def test_too_little_room_is_said_before_anything_is_written(small, tmp_path, monkeypatch):
    monkeypatch.setattr("lowbit.checkpoint.target.free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"the checkpoint needs 1,\d\d\d,\d\d\d bytes there, 1,000 are free"):
        run(config(tmp_path), tmp_path / "load.json", lambda *step: None)
    with pytest.raises(CheckpointError, match="a test needs 1,001 bytes there, 1,000 are free"):
        check_space(tmp_path, 1001, "a test")
    assert not list(tmp_path.iterdir())


def test_the_command(small, tmp_path):
    command = ["load", "--model", "small", "--layers", "1", "--schemes", "none,w8a16", "--kinds", "16-bit",
               "--device", "cpu", "--dir", str(tmp_path), "--out", str(tmp_path / "load.json"), "--repeats", "1"]  # fmt: skip
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "16-bit" in done.output and "w8a16" in done.output
    assert len(json.loads((tmp_path / "load.json").read_text())["rows"]) == 2
    shown = CliRunner().invoke(app, ["load", "--report", str(tmp_path / "load.json")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "loading small, 1 layers" in shown.output
    for wrong, said in (
        (["--model", "GPT-5"], "models are"), (["--kinds", "zip"], "--kinds are"), (["--dtype", "int8"], "--dtype is"),
        (["--dir", str(tmp_path / "none")], "--dir is a folder"), (["--device", "tpu"], "not a device; give cpu"),
    ):  # fmt: skip
        refused = CliRunner().invoke(app, ["load", "--device", "cpu", *wrong], env={"COLUMNS": "200"})
        assert refused.exit_code == 1 and said in refused.output


def test_a_damaged_result_file_is_refused(tmp_path):
    (tmp_path / "load.json").write_text(
        json.dumps({"result": load_report.LOAD, "schema": 1, "machine": {}, "rows": [{}], "date": ""})
    )
    with pytest.raises(ValueError, match="row 0 lacks bound_bytes"):
        load_report.load(tmp_path / "load.json")


@pytest.mark.gpu
def test_loading_is_fast_and_within_its_bound_on_a_gpu(tmp_path):
    """Loads two layers of the 8B shape and its LM head (3 GB) fast and within the memory bound."""
    schemes = (None, "w4a16_g128", "w6e3m2a16", "w8a8")
    given = config(tmp_path, model="Llama-3-8B", kinds=("16-bit", "lowbit", "gptq"), schemes=schemes, layers=2, repeats=2,
                  device=torch.device("cuda"))  # fmt: skip
    _, document = run(given, tmp_path / "load.json", lambda *step: None)
    for row in document["rows"]:
        print(row["files"], row["scheme"], f"{row['gb_per_s']} GB/s, peak {row['peak_bytes']:,} of {row['bound_bytes']:,}")
        assert row["error"] is None and row["slow"] == 0
        if row["files"] == "16-bit" and row["scheme"] is not None:
            assert row["peak_bytes"] < row["bound_bytes"]
