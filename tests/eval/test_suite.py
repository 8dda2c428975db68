"""`lowbit eval` as a whole: tiny models, every kind of task, the files it writes, and errors."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lowbit.checkpoint import CheckpointReader
from lowbit.checkpoint.target import replace_file
from lowbit.cli.commands import app
from lowbit.eval import report, suite
from lowbit.eval.plot import plot
from lowbit.eval.results import as_json
from lowbit.eval.sandbox import ISOLATIONS
from tests.tiny import save_tiny, tiny_tokenizer

HAS_ROUGE = importlib.util.find_spec("rouge_score") is not None
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
QUESTION = {"question": "Which?", "choices": ["this", "that one"], "answer": 0}
PROBLEM = {"task_id": "t/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    assert f() == 1\n"}


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "250"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folders of a 16-bit model and of two quantized copies."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "fp16")
    for scheme in ("w4a16_g32", "w8a16"):
        assert run("quantize", folder / "fp16", folder / scheme, "--scheme", scheme).exit_code == 0
    return folder / "fp16", folder / "w4a16_g32", folder / "w8a16"


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 10)
    (folder / "questions.jsonl").write_text("\n".join([json.dumps(QUESTION)] * 4))
    (folder / "programs.jsonl").write_text(json.dumps(PROBLEM))
    if HAS_ROUGE:
        (folder / "news.jsonl").write_text(json.dumps({"document": "Dogs bark. " * 40, "summary": "Dogs bark."}))
    return folder


SMALL = ("--window", "64", "--windows", "4")


def test_end_to_end(models, data, tmp_path):
    fp16, *quantized = models
    out = tmp_path / "out"
    options = ("--reference", fp16, "--suite", data, "--out", out, "--limit", "3", "--run-generated-code", *SMALL)
    result = run("eval", *quantized, *options)
    assert result.exit_code == 0, result.stderr
    document = json.loads((out / "results.json").read_text())
    assert document["complete"] and document["versions"]["torch"] and document["machine"]["threads"]
    held = document["request"]["sandbox"]["python"]
    assert held["time, memory, file size"] == "resource limits"
    assert held["isolation"].split()[0] in ISOLATIONS and held["isolation"] in (out / "report.md").read_text()
    assert [t["items"] for t in document["request"]["tasks"]] == [None, 3, *[1] * HAS_ROUGE, 1]
    labels = [m["label"] for m in document["models"]]
    assert labels == ["fp16", "w4a16_g32", "w8a16"] and [m["reference"] for m in document["models"]] == [True, False, False]
    figures = [{f["metric"]: f for f in m["figures"]} for m in document["models"]]
    for model, values in zip(document["models"], figures, strict=True):
        assert values["perplexity"]["count"] == 4 * 63 and values["perplexity"]["standard_error"] > 0
        assert values["accuracy"]["count"] == 3 and values["pass@1"]["value"] == 0
        assert ("ROUGE-1" in values) == HAS_ROUGE and not model["skipped"]
        assert model["details"]["programs"]["PassAtK"]["problems"][0]["samples"] == 1
    assert "KL mean" not in figures[0]
    assert figures[1]["KL mean"]["value"] > figures[2]["KL mean"]["value"] > 0
    assert figures[2]["same top-1"]["value"] > 0.9
    page = (out / "report.md").read_text()
    assert "| w4a16_g32 | 4.5" in page and "## fox" in page and "Interrupted" not in page
    assert "KL mean" in result.stdout and "pass@1" in result.stdout
    assert sorted(os.listdir(out)) == sorted(
        ["report.md", "results.json", *["quality.png", "quality-dark.png"] * HAS_MATPLOTLIB]
    )
    assert ("![" in page) == HAS_MATPLOTLIB == ("no plot" not in result.stderr)


@pytest.mark.parametrize("more", [(), ("--suite", "text")], ids=["perplexity", "suite"])
def test_what_is_measured_is_what_the_files_hold(models, tmp_path, monkeypatch, more):
    """`lowbit eval` uses no engine: on a GPU the engine would round the LM head to 8 bits, and its cache would take memory from
    later models.
    """
    asked = []

    def pipeline(name, **options):
        asked.append((name, options.get("engine")))
        return original(name, **options)

    original = suite.pipeline
    monkeypatch.setattr(suite, "pipeline", pipeline)
    done = run("eval", models[1], "--reference", models[0], *more, *(("--out", tmp_path / "o") if more else ()), *SMALL)
    assert done.exit_code == 0, done.stderr
    assert asked == [(str(model), False) for model in models[:2]]


def test_sizes_are_those_of_the_files(models, tmp_path):
    fp16, q4, _ = models
    run("eval", q4, "--reference", fp16, "--suite", "text", "--out", tmp_path, "--windows", "1", "--window", "16")
    sizes = [m["size"] for m in json.loads((tmp_path / "results.json").read_text())["models"]]
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176)
    assert [s["linear_weights"] for s in sizes] == [linear, linear]
    assert sizes[0]["bits_per_weight"] == 16 and sizes[1]["scheme"] == "w4a16_g32"
    with CheckpointReader(q4) as reader:
        layers = [reader.layer(name) for name in reader.manifest.layers]
        assert sizes[1]["bits_per_weight"] == pytest.approx(8 * sum(q.nbytes for q in layers) / linear)
        assert sizes[1]["bytes"] == sum(reader.get(name).nbytes for name in reader.names())
    assert sizes[0]["bytes"] > sizes[1]["bytes"]


def test_the_model_card_gets_the_divergence(models, tmp_path):
    fp16, q4, _ = models
    q4 = shutil.copytree(q4, tmp_path / "q4")
    for _ in range(2):
        done = run(
            "eval", q4, "--reference", fp16, "--suite", "text", "--out", tmp_path / "o", "--windows", "1", "--window", "16"
        )
        assert done.exit_code == 0, done.stderr
    card = (q4 / "README.md").read_text()
    found = re.findall(r"\| divergence from the source \| (.*) nats per token on opticks \(15 tokens\), from fp16 \|", card)
    assert len(found) == 1 and float(found[0]) > 0
    assert "This checkpoint needs lowbit" in card


def test_what_stays_in_16_bits_counts(models, tmp_path):
    """Layers left in 16 bits count with their 16-bit size."""
    assert run("quantize", models[0], tmp_path / "q", "--scheme", "w4a16_g32", "--skip", "*.mlp.*").exit_code == 0
    run("eval", tmp_path / "q", "--suite", "text", "--out", tmp_path / "o", "--windows", "1", "--window", "16")
    size = json.loads((tmp_path / "o" / "results.json").read_text())["models"][0]["size"]
    attention, mlp = 2 * 64 * 64 + 2 * 32 * 64, 3 * 64 * 176
    assert size["bits_per_weight"] == pytest.approx((4.5 * attention + 16 * mlp) / (attention + mlp))


def test_programs_run_only_when_asked(models, data, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "solve", None)
    monkeypatch.setattr(suite, "enforcement", None)
    for task in ("news.jsonl", "questions.jsonl"):
        (data / task).unlink(missing_ok=True)
    result = run("eval", models[1], "--suite", data, "--out", tmp_path / "o", "--json", "-", *SMALL)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "o" / "results.json").read_text())
    assert document["models"][0]["skipped"][0]["reason"] == "generated code is run only with --run-generated-code"
    assert "only with --run-generated-code" in (tmp_path / "o" / "report.md").read_text()


def test_interrupted_keeps_what_was_measured(models, data, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "choose", interrupted)
    result = run("eval", models[1], "--suite", data, "--out", tmp_path / "o", *SMALL)
    assert result.exit_code == 130 and "the results so far are in" in result.stderr
    assert os.listdir(tmp_path / "o") == ["results.json"]
    document = json.loads((tmp_path / "o" / "results.json").read_text())
    assert not document["complete"] and [f["metric"] for f in document["models"][0]["figures"]] == ["perplexity"]
    assert "Interrupted" in report.markdown(document, [])


def test_an_earlier_finished_run_stays_until_the_next_has_finished(models, data, tmp_path, monkeypatch):
    assert run("eval", models[1], "--suite", "text", "--out", tmp_path / "o", *SMALL).exit_code == 0
    before = (tmp_path / "o" / "results.json").read_bytes()

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(suite, "choose", interrupted)
        result = run("eval", models[1], "--suite", data, "--out", tmp_path / "o", *SMALL)
    assert result.exit_code == 130 and "results-unfinished.json" in result.stderr
    assert (tmp_path / "o" / "results.json").read_bytes() == before
    kept = json.loads((tmp_path / "o" / "results-unfinished.json").read_text())
    assert not kept["complete"] and [f["metric"] for f in kept["models"][0]["figures"]] == ["perplexity"]
    assert run("eval", models[1], "--suite", data, "--out", tmp_path / "o", *SMALL).exit_code == 0
    assert (tmp_path / "o" / "results.json").read_bytes() != before
    assert not (tmp_path / "o" / "results-unfinished.json").exists()


def test_a_file_is_whole_or_as_it_was(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")

    def half(path):
        path.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(target, half)
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_a_block_of_a_page_is_replaced(tmp_path):
    page = tmp_path / "p.md"
    page.write_text("a\n<!-- x:y -->\nold\n<!-- /x:y -->\nb\n")
    for _ in range(2):
        report.replace_block(page, "x:y", "\nnew\n")
        assert page.read_text() == "a\n<!-- x:y -->\nnew\n<!-- /x:y -->\nb\n"
    page.write_bytes(b"a\r\n<!-- x:y -->\r\nold\r\n<!-- /x:y -->\r\nb\nc\r\n")
    report.replace_block(page, "x:y", "new\nlines")
    assert page.read_bytes() == b"a\r\n<!-- x:y -->\r\nnew\r\nlines\r\n<!-- /x:y -->\r\nb\nc\r\n"
    page.write_text("<!-- /x:y --><!-- x:y -->")
    with pytest.raises(ValueError, match="once each and in this order"):
        report.replace_block(page, "x:y", "new")


def test_another_tokenizer_has_no_divergence(models, tmp_path):
    other = save_tiny(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["th"])
    tokenizer.save_pretrained(other)
    result = run("eval", models[1], "--reference", other, "--suite", "text", "--out", tmp_path / "o", *SMALL)
    assert result.exit_code == 0 and "another tokenizer" in result.stderr
    assert json.loads((tmp_path / "o" / "results.json").read_text())["models"][1]["skipped"]


def test_several_models_without_a_suite(models, tmp_path):
    fp16, *quantized = models
    result = run("eval", *quantized, "--reference", fp16, "--json", tmp_path / "r.json", *SMALL)
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [r["model"] for r in rows] == [str(m) for m in models] and all(r["standard_error"] > 0 for r in rows)


@pytest.mark.parametrize(
    ("file", "content", "options", "message"),
    [
        (None, "", ["--suite", "{data}/none"], "no such folder; --suite takes"),
        ("a.csv", "x", [], "a suite may only contain .txt, .jsonl and .jsonl.gz files"),
        ("a.jsonl", '{"x": 1, "y": 2}', [], "unknown fields x, y; supported are choice:"),
        ("a.jsonl", "{", [], "line 1: one JSON object a line"),
        ("fox.jsonl", json.dumps(QUESTION), [], "two files have the same name"),
        ("b.txt", b"\xff", [], "not UTF-8 text"),
        (None, "", ["--k", "1,10"], "pass@10 needs as many samples per problem, --samples is 1"),
        (None, "", ["--k", "one"], "must be whole numbers of at least 1"),
        (None, "", ["--k", "0"], "must be whole numbers of at least 1"),
        (None, "", ["--text", "{data}/none.txt"], "none.txt"),
    ],
)
def test_mistakes_in_suites(file, content, options, message, models, data, tmp_path):
    if file is not None:
        (data / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    options = [o.format(data=data) for o in options]
    suite_options = [] if "--suite" in options else ["--suite", data]
    result = run("eval", models[1], *suite_options, *options, "--out", tmp_path / "o")
    assert result.exit_code == 1 and message in result.stderr.replace("\n", " ")
    assert result.stderr.count("error: ") == 1 and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nothing"], "no such folder; give the folder of a Transformers model"),
        (["{model}", "--limit", "3"], "need --suite, such as --suite text"),
        (["{model}", "--run-generated-code"], "need --suite, such as --suite text"),
        (["{model}", "--unsafe"], "need --suite, such as --suite text"),
        (["{model}", "--suite", "text", "--unsafe"], "--unsafe needs --run-generated-code; give both"),
        (["{model}", "--reference", "{tmp}/nothing"], "nothing: no such folder"),
    ],
)
def test_mistakes_in_calls(arguments, message, models, tmp_path):
    result = run("eval", *[a.format(tmp=tmp_path, model=models[1]) for a in arguments])
    assert result.exit_code == 1 and message in result.stderr.replace("\n", " ")


def test_rouge_score_is_asked_for_before_any_work(models, data, tmp_path, monkeypatch):
    (data / "news.jsonl").write_text(json.dumps({"document": "d", "summary": "s"}))
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    result = run("eval", models[1], "--suite", data, "--out", tmp_path / "o")
    assert result.exit_code == 1 and "pip install '.[eval]'" in result.stderr and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(21.3456, 0.4219, "21.35 ± 0.42"), (0.00123456, 0.0000987, "0.001235 ± 0.000099"), (0.75, 0.0, "0.75"),
     (1234.5, 56.7, "1234 ± 57"), (3.14159, None, "3.142"), ("inf", None, "inf")],
)  # fmt: skip
def test_figures_are_shown_to_the_digits_that_mean_something(value, error, text):
    assert report.number(value, error) == text


def test_a_narrow_terminal_cuts_no_figure_short():
    figures = [
        {"task": "t", "metric": metric, "value": "21.3456", "standard_error": 0.4219, "count": 8184, "unit": "tokens"}
        for metric in ("perplexity", "KL mean", "KL median", "KL 99 %", "same top-1", "nll difference")
    ]
    size = {"bits_per_weight": 4.25, "bytes": 1.5e6}
    models = [{"label": f"int4-number-{i}", "size": size, "figures": figures} for i in range(6)]
    document = {"request": {"tasks": [{"task": "t", "kind": "text"}]}, "models": models}
    for count, whole in ((3, "21.35 ± 0.42"), (6, "21.35")):
        console = Console(width=80, record=True, file=io.StringIO())
        (table,) = report.tables({**document, "models": models[:count]})
        console.print(table)
        text = console.export_text()
        assert "…" not in text and text.count(whole) == 6 * count and text.count("4.250") == count


def test_json_has_no_infinities():
    assert json.loads(as_json({"a": [float("inf"), (float("nan"), 1.5)]})) == {"a": ["inf", ["nan", 1.5]]}


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib, the extra lowbit[plot]")
def test_nothing_to_plot(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot({"models": [{"size": None, "figures": []}]}, tmp_path / "a.png")


@pytest.mark.parametrize("suite", [False, True])
def test_the_gate(tmp_path, models, suite):
    """A loss above the bound exits with 1 after the results are written, one below with 0."""
    fp16, q4, _ = models
    options = ["--windows", "1", "--window", "16", "--json", tmp_path / "r.json"]
    options += ["--suite", "text", "--out", tmp_path / "o"] if suite else []
    for bound, code in (("100", 0), ("0", 1)):
        (tmp_path / "r.json").unlink(missing_ok=True)
        # the weights are random, and in this text rounding happens to make the tokens more likely
        compared = (q4, fp16) if suite else (fp16, q4)
        arguments = ["eval", compared[0], "--reference", compared[1], "--gate", bound, *options]
        result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "400"})
        assert result.exit_code == code and (tmp_path / "r.json").is_file(), result.output
        assert ("above --gate 0.0" in result.stderr) == (code == 1)


def test_a_gate_needs_a_reference(models):
    result = CliRunner().invoke(app, ["eval", str(models[1]), "--gate", "0.1"], env={"COLUMNS": "400"})
    assert result.exit_code == 1 and "name it with --reference" in result.stderr
