"""Every file of examples/ runs, on tiny models and a CPU, and prints what its docstring promises."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.checkpoint.foreign import DATA
from tests.tiny import save_tiny, tiny_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
RUN = {"quantize", "load", "generate", "evaluate", "lora", "convert_gptq", "cnn", "serve"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a 16-bit model `m` and its 4-bit version `q`."""
    import lowbit

    path = tmp_path_factory.mktemp("models")
    save_tiny(path / "m")
    lowbit.quantize_checkpoint(path / "m", path / "q", "w4a16_g32")
    return path


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capfd):
    """Runs an example in a folder of its own; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capfd.readouterr().out

    return run


def test_each_example_is_tested_and_short():
    files = sorted(EXAMPLES.glob("*.py"))
    assert {file.stem for file in files} == RUN
    for file in files:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
        assert len(lines) <= 45, f"{file.name} has {len(lines)} lines"


def test_quantize(run, folder, tmp_path):
    assert "w4a16_g32" in run("quantize", folder / "m", "out", "--scheme", "w4a16_g32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["scheme"] == "w4a16_g32"


@pytest.mark.parametrize(("name", "options"), [("q", ()), ("m", ("--scheme", "w8a16"))])
def test_load(run, folder, name, options):
    assert re.search(r"^14 quantized layers, [\d,]+ bytes on cpu\n'.*'$", run("load", folder / name, *options), re.MULTILINE)


def test_generate(run, folder):
    printed = run("generate", folder / "q", "ab", "cd", "--max-new-tokens", 4)
    first, second, streamed = printed.splitlines()
    assert first.startswith("ab") and "[4 tokens, length]" in first and second.startswith("cd")
    assert first.startswith(streamed)


def test_evaluate(run, folder):
    printed = run("evaluate", folder / "q", folder / "m", "--tokens", 256, "--window", 64)
    sixteen, four = map(float, re.findall(r"perplexity (\d+\.\d+)", printed))
    assert sixteen > 1 and four > 1
    assert 0 < float(re.search(r"divergence (\d+\.\d+) nats", printed)[1]) < 1


def test_lora(run, folder, tmp_path):
    pytest.importorskip("peft", reason="LoRA needs peft")
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", run("lora", folder / "q", "adapter", "--steps", 8))]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_convert_gptq(run, tmp_path):
    shutil.copytree(DATA / "gptq-auto-round-w4", tmp_path / "gptq")
    tiny_tokenizer().save_pretrained(tmp_path / "gptq")
    assert "the same logits, bit by bit" in run("convert_gptq", "gptq", "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_cnn(run, tmp_path):
    assert re.search(r"^\d+ of 32 answers are those of float32$", run("cnn", "net", "--scheme", "w8a8"), re.MULTILINE)
    assert (tmp_path / "net" / "config.json").is_file()


def test_serve(run, folder):
    for module in ("fastapi", "httpx", "openai", "uvicorn"):
        pytest.importorskip(module, reason=f"serving needs {module}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run("serve", folder / "q", "--question", "ab", "--port", port).strip()
