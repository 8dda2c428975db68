"""`python -m benchmarks tensor-parallel`: parts of models of known shapes, the table, refusals, and one run on two GPUs."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import language_model
from benchmarks.cli import app
from benchmarks.language_model import random_model, random_part, weight_bytes
from benchmarks.tensor_parallel_report import RANKS, SCHEMA, failed, load, table
from lowbit.eval.results import write_json


def row(**more):
    return {
        "model": "Llama-2-70B", "scheme": "w6e3m2a16", "gpus": 2, "batch": 1, "context": 1024, "ms_per_token": 9.0,
        "limit_ms": 6.0, "tokens_per_gpu_s": 55.6, "sums": "peer memory", "products": "chain", "error": None,
    } | more  # fmt: skip


def test_the_table_compares_with_one_gpu(tmp_path):
    alone = row(gpus=1, ms_per_token=14.0, limit_ms=11.0, tokens_per_gpu_s=71.4, sums=None)
    broken = row(gpus=4, batch=None, ms_per_token=None, error="RankFailed: rank 1: ended")
    rows = [row(), row(sums="NCCL", ms_per_token=10.0), alone, {**row(), "ms_per_token": None, "step_wall_ms": 1.0}, broken]
    document = {"result": RANKS, "schema": SCHEMA, "date": "2026-11-28", "complete": True, "machine": {"gpu": "a GPU"}}
    write_json(tmp_path / "ranks.json", document | {"rows": rows})
    terminal = Console(width=100, record=True, quiet=False)
    terminal.print(table(load(tmp_path / "ranks.json")))
    text = terminal.export_text()
    for said in ("2, peer memory", "0.64", "67 %", "2, NCCL", "0.71", "14.000", "1.00"):
        assert said in text, text
    assert failed(load(tmp_path / "ranks.json")) == ["Llama-2-70B, w6e3m2a16, 4 GPUs: RankFailed: rank 1: ended"]


def test_parts_of_a_random_model(monkeypatch):
    """Two parts together have the bytes of the whole model. The norms are counted twice, since each part has all of them."""
    monkeypatch.setitem(language_model.SHAPES, "tiny", lambda: language_model._llama(64, 192, 2, 4, 2, 160, 1e4))
    given = {"shape": "tiny", "scheme": "w4a16_g16", "head": "w8a16", "dtype": torch.float16}
    part = random_part(0, torch.device("cpu"), ranks=2, **given)
    whole = random_model(*given.values(), torch.device("cpu"))
    norms = 5 * 64 * 2
    assert weight_bytes(whole) == 2 * weight_bytes(part) - norms
    assert part.model.layers[0].mlp.down_proj.in_features == 96 and part.lm_head.out_features == 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "GPT-5"], "got 'GPT-5'"),
        (["--dtype", "float32"], "--dtype is float16 or bfloat16, got 'float32'"),
        (["--scheme", "int4"], "int4"),
        (["--report", "none.json"], "none.json: no such file"),
    ],
)
def test_what_is_asked_wrongly_is_refused(arguments, message):
    result = CliRunner().invoke(app, ["tensor-parallel", *arguments])
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_on_two_gpus(tmp_path):
    file = tmp_path / "ranks.json"
    arguments = ["--gpus", "1,2", "--batches", "1,4", "--context", "256", "--layers", "2", "--out", str(file)]
    result = CliRunner().invoke(app, ["tensor-parallel", *arguments])
    assert result.exit_code == 0, result.stderr
    rows = [row for row in load(file)["rows"] if row.get("ms_per_token")]
    assert [(row["gpus"], row["batch"], row["sums"]) for row in rows] == [
        (1, 1, None), (1, 4, None), (2, 1, "peer memory"), (2, 1, "NCCL"), (2, 4, "peer memory"), (2, 4, "NCCL"),
    ]  # fmt: skip
    assert not failed(load(file)) and load(file)["complete"]
