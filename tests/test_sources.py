"""Models by the names that users give: folders, files, and hub names, resolved by huggingface_hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

import huggingface_hub.constants as constants
import pytest
from typer.testing import CliRunner

import lowbit
from lowbit.cli.commands import app
from lowbit.cli.terminal import err, out
from lowbit.sources import CONFIG, CheckpointError, is_on_hub, local_model
from tests.hub import served
from tests.tiny import save_tiny

ROOT = Path(__file__).parent.parent
NAME = "org/tiny"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with many unneeded repository files; its second revision is quantized."""
    folder = tmp_path_factory.mktemp("hub")
    save_tiny(folder / "v1")
    lowbit.quantize_checkpoint(folder / "v1", folder / "v2", "w8a16")
    for name in ("pytorch_model.bin", "README.md", "modeling_tiny.py", "consolidated.safetensors", "onnx/model.onnx"):
        (folder / "v1" / name).parent.mkdir(exist_ok=True)
        (folder / "v1" / name).write_bytes(b"not needed")
    (folder / "v1" / "original").mkdir()
    (folder / "v1" / "original" / "model.safetensors").write_bytes(b"not needed")
    (folder / "gguf").mkdir()
    (folder / "gguf" / "model-Q4_0.gguf").write_bytes(b"GGUF")
    return {NAME: {"main": folder / "v1", "v2": folder / "v2"}, "org/files": {"main": folder / "gguf"}, "gated/x": {}}


@pytest.fixture
def hub(models, tmp_path, monkeypatch):
    """Makes this process use the local hub, with an empty cache."""
    with served(models) as running:
        for name, value in {
            "ENDPOINT": running.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": running.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.chdir(tmp_path)
        yield running


def run(*arguments):
    out.width = err.width = 200
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_only_what_is_needed_is_downloaded_and_only_once(hub, models):
    folder = local_model(NAME)
    assert {path.name for path in folder.iterdir()} == {
        path.name
        for path in models[NAME]["main"].iterdir()
        if path.suffix in (".json", ".safetensors", ".jinja") or path.name == "README.md"
    } - {"consolidated.safetensors"}
    hub.asked.clear()
    assert local_model(NAME) == folder and not [line for line in hub.asked if line.startswith("GET /org")]


def test_a_revision(hub, models):
    folder = local_model(f"{NAME}@v2")
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    assert local_model(f"{NAME}@{hub.sha(NAME, 'v2')}") == folder


def test_a_broken_download_goes_on(hub, models, monkeypatch):
    # 10 MB by default; a small chunk size means that the received part of a file is kept
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1)
    size = (models[NAME]["main"] / "model.safetensors").stat().st_size
    hub.break_after = size // 2
    folder = local_model(NAME)  # the client requests the remaining bytes by itself
    assert any(re.fullmatch(rf"model.safetensors bytes={size // 2}-.*", line) for line in hub.ranges), hub.ranges
    assert (folder / "model.safetensors").read_bytes() == (models[NAME]["main"] / "model.safetensors").read_bytes()


def test_the_cache_without_a_network(hub, monkeypatch):
    folder = local_model(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert local_model(NAME) == folder
    with pytest.raises(CheckpointError, match="org/other: .*not in the hub's cache, and the hub cannot be reached"):
        local_model("org/other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "no such folder here and no such model on the hub"),
        (f"{NAME}@v9", "org/tiny has no revision 'v9' on the hub; leave out @v9"),
        ("gated/x", "is gated; accept its terms"),
        ("org/files", "hf download org/files FILE.gguf"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(name, message, hub):
    with pytest.raises(CheckpointError, match=message) as error:
        local_model(name)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"{name}: ")


def test_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    assert is_on_hub("a/b") and is_on_hub("meta-llama/Llama-3.1-8B-Instruct") and is_on_hub("a/b@refs/pr/1")
    assert not any(is_on_hub(name) for name in ("org/new", "a", "a/b/c", "./a", "../a", "/a/b", "a/b.gguf", "a/"))


def test_every_command_and_python_take_the_name(hub, tmp_path, monkeypatch):
    """Every command and Python function loads the named model, and results contain the name."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    assert run("quantize", NAME, "q", "--scheme", "w8a16").exit_code == 0
    assert (tmp_path / "q" / "config.json").is_file()
    assert run("convert", f"{NAME}@v2", "c", "--to", "dequantized").exit_code == 0
    said = run("generate", NAME, "ab", "--max-new-tokens", 3)
    assert said.exit_code == 0 and said.stdout.startswith("ab")
    assert run("generate", f"{NAME}@v2", "ab", "--max-new-tokens", 3).exit_code == 0
    said = run("recommend", NAME, "--divergence", 1)
    assert said.exit_code == 0 and "lowbit quantize org/tiny tiny-" in said.stdout
    assert run("inspect", f"{NAME}@v2", "--check").exit_code == 0
    assert run("explain", f"{NAME}@v2").exit_code == 0
    assert run("explain", NAME, "--scheme", "w8a16").exit_code == 0
    said = run("eval", NAME, "--text", "text.txt", "--window", 8, "--windows", 1, "--json", "-")
    assert said.exit_code == 0 and json.loads(said.stdout)["rows"][0]["model"] == NAME
    assert run("bench", NAME, "--schemes", "w8a16", "--max-new-tokens", 2, "--repeats", 1).exit_code == 0
    assert type(lowbit.load(f"{NAME}@v2")).__name__ == "LlamaForCausalLM"
    assert lowbit.pipeline(NAME)("ab", max_new_tokens=2)[0].generated_length <= 2
    assert lowbit.quantize_checkpoint(NAME, tmp_path / "p", "w4a16_g32").shapes


def test_recommend_reads_the_configuration_alone(hub):
    assert run("recommend", NAME, "--divergence", 1).exit_code == 0
    assert {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /org")} == {"config.json"}
    assert CONFIG == ("config.json",)


def test_line_7_of_the_page_on_vllm(hub, tmp_path):
    """Runs line 7 of docs/vllm.md with another model name."""
    line = (ROOT / "docs" / "vllm.md").read_text().splitlines()[6]
    command = line.replace("meta-llama/Llama-3.1-8B-Instruct", NAME).split()
    assert command[:3] == ["lowbit", "quantize", NAME] and run(*command[1:]).exit_code == 0
    assert json.loads((tmp_path / "llama-w4" / "config.json").read_text())["quantization_config"]["scheme"] == "w4a16_g128"
