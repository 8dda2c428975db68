from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import choice, choice_report, grid
from benchmarks.choice_report import beside_cublas, falls, load, regrets, summary
from benchmarks.cli import app
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.tuned import written
from lowbit.tune import trials

H200 = typical_machine(90)


def row(n, k, m, us, chosen="a", scheme="w4a16_g128", half="untuned", cublas_us=10.0):
    return {
        "scheme": scheme, "n": n, "k": k, "m": m, "half": half, "cublas_us": cublas_us, "chosen": chosen, "us": us,
        "failed": {},
    }  # fmt: skip


# ---- the grid


def test_twelve_models_and_the_parts_of_their_weights():
    assert len(grid.MODELS) == 12 and len(grid.SCHEMES) == 4
    assert {min(grid.TOKENS), max(grid.TOKENS)} == {1, 8192}
    shapes = list(grid.MODELS["Llama-3-8B"].weights(1))
    assert shapes == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    assert list(grid.MODELS["Llama-3-8B"].weights(2)) == [
        (3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168), (64128, 4096),
    ]  # fmt: skip
    assert (576, 2048) in grid.MODELS["DeepSeek-V2-Lite"].weights(1)


def test_each_weight_is_of_one_half_and_no_run_moves_it():
    shapes = grid.weights()
    assert len(shapes) == len(set(shapes)) == len(grid.weights(half="tuned")) + len(grid.weights(half="untuned"))
    assert all(k % 128 == 0 for _, k in shapes)
    assert grid.KNOWN & set(grid.weights(half="untuned")) == set()
    # This split must not change: the untuned half would then contain weights used for tuning, and its figures would be invalid.
    assert [grid.half_of(shape) for shape in ((5120, 13824), (2048, 4096), (57344, 8192), (4096, 4096))] == [
        "untuned", "tuned", "untuned", "tuned",
    ]  # fmt: skip
    assert 0.4 < len(grid.weights(half="untuned")) / len(shapes) < 0.6


def test_the_beginning_of_a_run_has_both_halves():
    first = [grid.half_of(shape) for shape in grid.weights()[:40]]
    assert first.count("tuned") == 20


def test_a_model_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="got 'Llama-9'"):
        grid.weights(["Llama-9"])


def test_products_too_large_to_have_a_choice_are_left_out():
    grid = choice.make_trial_grid("Llama-3-8B", "w4a16_g128", "1,4096,8192")
    assert grid.tokens_of(4096, 4096) == [1, 4096, 8192] and grid.tokens_of(128256, 4096) == [1]
    assert grid.count == sum(len(grid.tokens_of(*shape)) for shape in grid.shapes)


# ---- what the file says


def test_regret_is_over_the_fastest_tile_tried():
    rows = [row(1, 1, 1, {"a": 11.0, "b": 10.0}), row(1, 1, 2, {"a": 10.0, "b": 20.0}), row(1, 1, 4, {"b": 1.0})]
    assert [regret for regret, _ in regrets(rows)] == [1.1, 1.0]  # in the third row, the chosen tile did not run
    assert [regret for regret, _ in regrets(rows, lambda row: "b")] == [2.0, 1.0, 1.0]
    found = summary(rows)
    assert found is not None and (found.count, found.worst, found.good) == (2, 1.1, 0.5)
    assert found.mean == pytest.approx(1.05)
    assert summary([]) is None


def test_time_that_falls_as_tokens_are_added():
    rows = [row(8, 8, m, {"a": us}) for m, us in ((1, 10.0), (16, 9.8), (32, 9.0), (64, 12.0))]
    rows.append(row(8, 8, 16, {"a": 100.0}, scheme="w8a16"))  # a different weight
    assert [(first["m"], more["m"]) for _, first, more in falls(rows)] == [(1, 32), (16, 32)]
    assert falls(rows)[0][0] == pytest.approx(10 / 9)


def test_only_large_products_are_held_to_cublas():
    rows = [row(2048, 2048, 128, {"a": 8.0}), row(2048, 2048, 64, {"a": 80.0}), row(1536, 4096, 256, {"a": 80.0})]
    assert [ratio for ratio, _ in beside_cublas(rows)] == [1.25]


@pytest.fixture
def result_file(tmp_path):
    path = tmp_path / "choice.json"
    rows = [row(2048, 4096, m, {"a": us, "b": 10.0}) for m, us in ((1, 10.5), (128, 10.0))]
    rows[0]["failed"] = {"c": "WrongResult: relative error 1"}
    document = {
        "result": choice_report.CHOICE, "schema": choice_report.SCHEMA, "date": "2026-11-23", "complete": True,
        "machine": {"gpu": "NVIDIA H200"}, "versions": {}, "protocol": "", "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


def test_a_result_file_is_printed_without_a_gpu(result_file):
    result = CliRunner().invoke(app, ["choice", "--report", str(result_file)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "1.050" in result.output and "w4a16_g128 2048 x 4096 M 1" in result.output
    assert "WrongResult: relative error 1" in result.output


RESULT = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*-choice*.json"))


@pytest.mark.parametrize("path", RESULT, ids=lambda path: path.name)
def test_kept_result_files_are_printed(path):
    """All kept result files can be printed, including one without cuBLAS times."""
    done = CliRunner().invoke(app, ["choice", "--report", str(path)])
    assert done.exit_code == 0 and "slower than with more tokens" in done.output and "…" not in done.output


def test_a_result_file_that_lacks_something_is_refused(result_file):
    document = json.loads(result_file.read_text())
    del document["rows"][1]["half"]
    result_file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="row 1 lacks half"):
        load(result_file)


def test_what_is_asked_for_is_checked():
    with pytest.raises(ValueError, match="--half is tuned or untuned, got 'other'"):
        choice.make_trial_grid(half="other")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_it_says_so():
    result = CliRunner().invoke(app, ["choice"])
    assert result.exit_code == 1 and "measures an NVIDIA GPU" in result.output


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w8e4m3a8e4m3", "w8a8"])
def test_a_small_run_on_a_gpu(scheme, tmp_path):
    """Every candidate tile gives a correct product, and each row has the chosen tile and its time."""
    grid = trials.TrialGrid(((2048, 4096),), (scheme,), (1, 16, 256))
    path, document = choice.run(grid, tmp_path / "choice.json", print, lambda done, total, what: None)
    assert load(path)["complete"] and [found["m"] for found in document["rows"]] == [1, 16, 256]
    here = machine_of("cuda")
    for found in document["rows"]:
        assert not found["failed"]
        assert found["chosen"] == written(
            trials.products_of(scheme, here).feasible(found["m"], 2048, 4096)[0].tile, trials.TILES
        )
        assert 0 < min(found["us"].values()) <= found["us"][found["chosen"]] < 1000 and found["cublas_us"] > 0
