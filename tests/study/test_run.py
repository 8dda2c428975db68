"""`python -m study` on a tiny model: every row equals separate measurements, and an interrupted run can be resumed."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lowbit.eval import divergence, perplexity
from lowbit.methods import SmoothQuant
from lowbit.models.calibrate import Calibration
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.quantize import Gptq, Rtn
from study import run as study_run
from study.__main__ import app
from study.cases import Case
from study.results import figure_of, load
from study.run import SEEN, Settings, halves, run
from tests.tiny import eager_llama, save_tiny, tiny_tokenizer

SMALL = Settings(window=32, windows=3, samples=4, length=24)
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def lively(tmp_path_factory):
    """A model whose logits differ from token to token."""
    path = tmp_path_factory.mktemp("models") / "lively"
    eager_llama(torch.float16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "topics.txt").write_text("\n\n".join(f"the {i}th quick brown fox" for i in range(40)))
    (folder / "opticks.txt").write_text("\n\n".join(f"light of colour {i} is bent" for i in range(40)))
    question = {"question": "Which?", "choices": ["this", "that one"], "answer": 0}
    (folder / "questions.jsonl").write_text("\n".join([json.dumps(question)] * 3))
    return folder


def test_halves_do_not_overlap():
    first, second = halves("aa\n\nbb\n\ncc\n\ndd")
    assert (first, second) == ("aa\n\nbb\n\ncc", "dd")
    with pytest.raises(ValueError, match="empty lines"):
        halves("one paragraph only")


@pytest.mark.parametrize("recorded_bytes", [study_run.RECORDED_BYTES, 0], ids=["recorded", "two models"])
def test_a_row_is_what_the_parts_measure(recorded_bytes, model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(study_run, "RECORDED_BYTES", recorded_bytes)
    run(model, data, tmp_path / "r.json", SMALL, only="w4a16_g16 gptq topics seed 0")
    rows = {row["key"]: row for row in load(tmp_path / "r.json")["rows"]}
    assert list(rows) == ["16 bits", "w4a16_g16 gptq topics seed 0"]
    first, second = halves((data / "topics.txt").read_text())
    (tmp_path / "first.txt").write_text(first)
    calibration = Calibration(4, 24, 0, tmp_path / "first.txt")
    quantize_checkpoint(model, tmp_path / "q", "w4a16_g16", method=Gptq(), calibration=calibration)
    # Loaded as a user would load it, in float32.
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor(tiny_tokenizer()(second).input_ids[: 3 * 32])
    row = rows["w4a16_g16 gptq topics seed 0"]
    expected = divergence(quantized, reference, ids, window=32)
    assert figure_of(row, "topics", "KL mean")[0] == pytest.approx(expected.mean, rel=1e-3)
    seen = divergence(quantized, reference, calibration.tokens(model).flatten(), window=24)
    assert figure_of(row, SEEN, "nll difference")[0] == pytest.approx(seen.nll_difference, rel=1e-3)
    base = figure_of(rows["16 bits"], "topics", "perplexity")[0]
    worse = math.log(perplexity(quantized, ids, window=32).perplexity / base)
    assert figure_of(row, "topics", "nll difference")[0] == pytest.approx(worse, rel=1e-3)
    assert row["bits_per_weight"] == pytest.approx(5.0) and row["calibration"] == {"text": "topics", "seed": 0}
    assert figure_of(row, "questions", "accuracy") is not None and figure_of(row, "opticks", "KL mean")[0] > 0


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case("w8a8_az", Rtn()), {}), (Case("w4a8_g16", Rtn(), rotate_inputs=True), {"rotate_inputs": ["*"]}),
        (Case("w8a8", SmoothQuant(), "topics"), {}), (Case("fp8", Rtn()), {}),
    ],
)  # fmt: skip
def test_a_row_of_8_bit_activations_is_what_the_quantized_layers_compute(case, options, lively, data, tmp_path, monkeypatch):
    """The next row has inputs in 16 bits again."""
    plain = Case("w4a16_g16", Rtn())
    monkeypatch.setattr(study_run, "cases", lambda *_: [case, plain])
    run(lively, data, tmp_path / "r.json", SMALL)
    rows = {row["key"]: row for row in load(tmp_path / "r.json")["rows"]}
    (tmp_path / "first.txt").write_text(halves((data / "topics.txt").read_text())[0])
    reference = AutoModelForCausalLM.from_pretrained(lively, dtype=torch.float32)
    ids = torch.tensor(tiny_tokenizer()(halves((data / "opticks.txt").read_text())[1]).input_ids[: 3 * 32])
    for number, (each, own) in enumerate(((case, options), (plain, {}))):
        target, calibration = tmp_path / str(number), Calibration(4, 24, 0, tmp_path / "first.txt") if each.text else None
        quantize_checkpoint(lively, target, each.scheme, method=each.method, calibration=calibration, **own)
        quantized = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        expected = divergence(quantized, reference, ids, window=32).mean
        assert figure_of(rows[each.key], "opticks", "KL mean")[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("recorded_bytes", [study_run.RECORDED_BYTES, 0], ids=["recorded", "two models"])
def test_a_rotated_row_has_a_head_of_its_own_and_the_next_one_not(recorded_bytes, model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(study_run, "RECORDED_BYTES", recorded_bytes)
    monkeypatch.setattr(study_run, "cases", lambda *_: [Case("w4a16_pc", Rtn(), rotation=0), Case("w8a16_g16", Rtn())])
    run(model, data, tmp_path / "r.json", SMALL)
    rows = {row["key"]: row for row in load(tmp_path / "r.json")["rows"]}
    assert list(rows) == ["16 bits", "w4a16_pc rtn rotate=True", "w8a16_g16 rtn"]
    assert rows["w4a16_pc rtn rotate=True"]["method"] == "rtn rotate=True"
    ids = torch.tensor(tiny_tokenizer()(halves((data / "topics.txt").read_text())[1]).input_ids[: 3 * 32])
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for key, scheme, rotation in (("w4a16_pc rtn rotate=True", "w4a16_pc", 0), ("w8a16_g16 rtn", "w8a16_g16", None)):
        quantize_checkpoint(model, tmp_path / scheme, scheme, rotation=rotation)
        quantized = AutoModelForCausalLM.from_pretrained(tmp_path / scheme, dtype=torch.float32)
        expected = divergence(quantized, reference, ids, window=32).mean
        assert figure_of(rows[key], "topics", "KL mean")[0] == pytest.approx(expected, rel=1e-2)


def test_goes_on_where_it_was_stopped(model, data, tmp_path, monkeypatch):
    path = tmp_path / "tiny.json"
    whole = study_run._add

    def interrupted(case, *rest):
        if case.scheme.startswith("w8"):
            raise KeyboardInterrupt
        whole(case, *rest)

    monkeypatch.setattr(study_run, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, data, path, SMALL, only="w[48]a16* rtn")
    before = load(path)
    keys = [row["key"] for row in before["rows"]]
    assert keys == ["16 bits", "w4a16_pc rtn", "w4a16_g16 rtn"] and not before["complete"]
    monkeypatch.setattr(study_run, "_add", whole)
    measured = []
    run(model, data, path, SMALL, only="w[48]a16* rtn", say=measured.append)
    after = load(path)
    assert after["rows"][:3] == before["rows"] and len(after["rows"]) == 7
    assert [line.split(": ")[1] for line in measured] == [
        f"{s} rtn" for s in ("w8a16", "w8a16_g16", "w4a16_g16_z", "w4a16_g16_fz")
    ]
    with pytest.raises(ValueError, match=r"measured otherwise \(settings differ\)"):
        run(model, data, path, Settings(window=32, windows=2, samples=4, length=24))


def test_too_little_text(model, data, tmp_path):
    with pytest.raises(ValueError, match="500 windows of 32 take 16,000"):
        run(model, data, tmp_path / "r.json", Settings(window=32, windows=500))


def test_the_command_writes_pages_and_plot(model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("a\n<!-- study:grid -->\nold\n<!-- /study:grid -->\nb\n")
    small = ["--window", "32", "--windows", "2", "--samples", "2", "--length", "16"]
    command = [str(model), "--data", str(data), "--results", "r", "--page", "page.md", "--only", "w4a16* rtn", *small]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.md").read_text()
    assert (
        page.startswith("a\n<!-- study:grid -->\n**tiny**") and page.endswith("<!-- /study:grid -->\nb\n") and "old" not in page
    )
    assert "| int4 | channel | rtn | 4." in page and "| int4 | g16 | rtn | 5.00 |" in page
    assert (tmp_path / "r" / "quality.png").exists() == HAS_MATPLOTLIB == ("no plot" not in result.output)
    assert CliRunner().invoke(app, ["--results", "r", "--page", "page.md"]).exit_code == 0
    assert (tmp_path / "page.md").read_text() == page
    nothing = CliRunner().invoke(app, ["--results", "empty", "--page", "page.md"])
    missing = CliRunner().invoke(app, [str(tmp_path / "none")])
    assert missing.exit_code == 1 and "no such folder; give the folder of a Transformers model" in missing.output
    assert nothing.exit_code == 1 and "holds no result file" in nothing.output
    named = CliRunner().invoke(app, ["--name", "x"])
    assert named.exit_code == 1 and "one model, got 0" in named.output
