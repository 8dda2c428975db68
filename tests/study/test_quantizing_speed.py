"""`python -m study quantizing-speed` on a tiny shape: the rows, the extrapolation, resuming."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from benchmarks.language_model import SHAPES
from lowbit.checkpoint.target import check_file
from lowbit.models.calibrate import Calibration
from study import quantizing_speed as study
from study.__main__ import COMMANDS
from study.quantizing_speed import RESULT, ROW_KEYS, Settings, layer_seconds, measure, table, whole_seconds, write_model
from study.results import load
from tests.study.auto_round_stand_in import install

SMALL = Settings("tiny", 3, "w4a16_g32", iterations=3, batch=2, samples=4, length=24)


@pytest.fixture(autouse=True)
def shape(monkeypatch):
    def config():
        return LlamaConfig(
            vocab_size=160, hidden_size=64, intermediate_size=192, num_hidden_layers=9, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip

    monkeypatch.setitem(SHAPES, "tiny", config)


def test_models_of_a_shape(tmp_path):
    folder = write_model(tmp_path / "m", "tiny", 2, "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 2 and model.model.layers[1].mlp.down_proj.weight.float().std() > 0.05
    tokens = Calibration(128, 512).tokens(folder)
    assert tokens.shape == (128, 512) and tokens.unique().numel() > 50 and tokens.max() < 160


def test_rows(tmp_path, monkeypatch):
    calls = install(monkeypatch).calls
    output, work = tmp_path / "speed.json", tmp_path / "work"
    work.mkdir()
    document = measure(output, SMALL, ("learned", "gptq"), work=work)
    before = document["rows"][:]
    document = measure(output, SMALL, ("learned", "gptq", "auto-round"), work=work)
    assert document["rows"][:2] == before and document["layers"] == 9 and document["complete"] and not list(work.iterdir())
    assert [row["key"] for row in document["rows"]] == ["learned", "gptq", "auto-round"]
    assert all(set(row["seconds"]) == {"1", "3"} and min(row["seconds"].values()) > 0 for row in document["rows"])
    assert [(call["model"].config.num_hidden_layers, call["iters"], call["nsamples"]) for call in calls] == [
        (1, study.WARM_UP_ITERATIONS, 2), (1, 3, 4), (3, 3, 4),
    ]  # fmt: skip
    check_file(output, RESULT)
    assert len(load(output, RESULT, ROW_KEYS)["rows"]) == 3
    with pytest.raises(ValueError, match=r"measured otherwise \(settings differ\)"):
        measure(output, Settings(), ("learned",))


def test_the_extrapolation_adds_the_missing_layers():
    row = {"method": "learned", "seconds": {"1": 30.0, "3": 70.0}, "peak_bytes": 3 << 30}
    assert layer_seconds(row) == 20 and whole_seconds(row, 32) == 70 + 29 * 20
    settings = {"shape": "s", "scheme": "w", "samples": 1, "length": 2, "iterations": 3, "batch": 4, "layers": 3}
    document = {"request": {"settings": settings}, "layers": 32, "machine": {"gpus": []}, "rows": [row]}
    assert table(document).splitlines()[-1] == "| learned | 30.0 | 70.0 | 20.0 | 10.8 | 3.0 |"


def test_the_command(tmp_path):
    small = ["--shape", "tiny", "--layers", "2", "--scheme", "w4a16_g32", "--samples", "4", "--length", "24", "--batch", "2"]
    command = [*small, "--methods", "gptq", "--output", str(tmp_path / "s.json")]
    result = CliRunner().invoke(COMMANDS["quantizing-speed"], command)
    assert result.exit_code == 0, result.output
    assert "| gptq |" in result.stdout and "Minutes of 9 layers are extrapolated from 2." in result.stdout
    for message, options in {
        "--shape 'x': must be one of": ["--shape", "x"], "x is none of learned, gptq": ["--methods", "x"],
        "compared are integers in groups": ["--scheme", "w8a8"],
    }.items():  # fmt: skip
        refused = CliRunner().invoke(study.app, [*command, *options])
        assert refused.exit_code == 1 and message in " ".join(refused.output.split()), refused.output
