"""A quantized folder without `import lowbit`: Transformers refuses it in one line, and its model card says how to load it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import metadata_load
from transformers import AutoModelForCausalLM

from lowbit import LowbitConfig
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.checkpoint.schema import GUARD, GUARD_KEY
from lowbit.methods import Gptq
from lowbit.models.calibrate import Calibration
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.load import load
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from tests.forks import forked
from tests.tiny import save_tiny, tiny_llama

PLAIN = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
for cls in (AutoModelForCausalLM, LlamaForCausalLM):
    try:
        cls.from_pretrained(sys.argv[1])
    except ValueError as error:
        print(error)
    else:
        print("loaded")
assert AutoConfig.from_pretrained(sys.argv[1]).hidden_size == 64
assert not any(name.partition(".")[0] == "lowbit" for name in sys.modules)
"""

CARD_OF_THE_SOURCE = """---
license: other
license_name: "tiny: a licence"
license_link: https://example.org/licence
language: en
---
# Tiny
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("plain") / "tiny-model")


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    """One folder for each way of writing quantized weights."""
    folder = tmp_path_factory.mktemp("written")
    quantize_checkpoint(source, folder / "quantized", "w4a16_g32")
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=LowbitConfig("w4a16_g32"))
    model.save_pretrained(folder / "saved")
    convert_checkpoint(folder / "quantized", folder / "gptq", "gptq")
    convert_checkpoint(folder / "gptq", folder / "converted")
    AutoModelForCausalLM.from_pretrained(folder / "converted").save_pretrained(folder / "again")
    return folder


OWN = ("quantized", "saved", "converted", "again")


@pytest.mark.parametrize("name", OWN)
def test_transformers_alone_refuses_it_in_one_line(written, name):
    lines = forked(PLAIN, written / name, imported=("transformers.models.llama.modeling_llama",)).splitlines()
    assert len(lines) == 2 and all(line.endswith(GUARD) for line in lines), lines
    assert "import lowbit" in GUARD and not any(suffix in GUARD for suffix in (".safetensors", ".bin"))


@pytest.mark.parametrize("name", OWN)
def test_it_loads_with_lowbit(written, name):
    expected = load(written / "quantized").state_dict()
    for model in (load(written / name), AutoModelForCausalLM.from_pretrained(written / name)):
        assert not hasattr(model.config, GUARD_KEY)
        state = model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in state if key.endswith(".weight_packed"))


def test_files_without_the_guard_load(written, tmp_path):
    """Files of version 1, which lack the guard, the entry `method` and the model card, can be loaded."""
    old = tmp_path / "old"
    old.mkdir()
    for file in (written / "saved").iterdir():
        if file.name != "README.md":
            (old / file.name).write_bytes(file.read_bytes())
    config = json.loads((old / "config.json").read_text())
    del config[GUARD_KEY], config["quantization_config"]["method"]
    config["quantization_config"]["format_version"] = 1
    (old / "config.json").write_text(json.dumps(config))
    state, expected = load(old).state_dict(), load(written / "saved").state_dict()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_other_tools_files_have_no_guard(written):
    assert GUARD_KEY not in json.loads((written / "gptq" / "config.json").read_text())
    assert not (written / "gptq" / "README.md").exists()


def test_config_records_method_and_calibration(source, tmp_path):
    text = tmp_path / "my|text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    calibration = Calibration(samples=4, length=16, seed=7, text=text)
    quantize_checkpoint(source, tmp_path / "q", "w4a16_g32", method=Gptq(act_order=True), calibration=calibration)
    with CheckpointReader(tmp_path / "q") as reader:
        manifest = reader.manifest
    options = {"act_order": True, "static_groups": False, "search": "loss", "damping": 0.05}
    assert manifest.method == {"name": "gptq", **options}
    assert manifest.calibration == {"text": "my|text.txt", "samples": 4, "length": 16, "seed": 7}

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    model.save_pretrained(tmp_path / "again")
    with CheckpointReader(tmp_path / "again") as reader:
        assert (reader.manifest.method, reader.manifest.calibration) == (manifest.method, manifest.calibration)
    for name in ("q", "again"):
        card = (tmp_path / name / "README.md").read_text()
        assert "| method | gptq (act_order True, static_groups False, search loss, damping 0.05) |" in card
        assert "| calibration | my\\|text.txt (samples 4, length 16, seed 7) |" in card


def test_methods_that_need_no_text(written):
    for name, method in {
        "quantized": {"name": "rtn", "search": "max"}, "saved": {"name": "rtn", "search": "max"},
        "converted": {"name": "converted", "from": "gptq"}, "again": {"name": "converted", "from": "gptq"},
    }.items():  # fmt: skip
        with CheckpointReader(written / name) as reader:
            assert reader.manifest.method == method and reader.manifest.calibration is None


@pytest.mark.parametrize("key", ["method", "calibration"])
@pytest.mark.parametrize("value", ["gptq", {"name": 3, "text": None}, []])
def test_a_damaged_record_is_refused(written, tmp_path, key, value):
    config = json.loads((written / "saved" / "config.json").read_text())
    config["quantization_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((written / "saved" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=f"config.json: {key} is a JSON object with a string"):
        load(tmp_path)


@pytest.fixture
def snapshot(tmp_path):
    """A model in a hub's cache, where files are links (here the model card)."""
    repository = tmp_path / "models--example--tiny-llama"
    folder, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    tiny_llama().save_pretrained(folder)
    (blobs / "feed").write_text(CARD_OF_THE_SOURCE)
    (folder / "README.md").symlink_to(Path("../../blobs/feed"))
    return folder


def test_the_card_names_source_and_licence(snapshot, tmp_path):
    quantize_checkpoint(snapshot, tmp_path / "q", "w4a16_g32")
    AutoModelForCausalLM.from_pretrained(tmp_path / "q").save_pretrained(tmp_path / "again")
    for name in ("q", "again"):
        data = metadata_load(tmp_path / name / "README.md")
        assert data["base_model"] == "example/tiny-llama" and data["base_model_relation"] == "quantized"
        assert data["license"] == "other" and data["license_name"] == "tiny: a licence"
        assert data["license_link"] == "https://example.org/licence"
        assert data["library_name"] == "lowbit" and "language" not in data
        text = (tmp_path / name / "README.md").read_text()
        assert "| divergence from the source | not measured" in text
        assert "This checkpoint needs lowbit" in text and "import lowbit" in text
        assert "| source model | example/tiny-llama |" in text and "| scheme | w4a16_g32 (14 layers) |" in text


@pytest.mark.parametrize("card", ["---\nlicense: [\n---\n", "---\n- a\n---\n", "---\nlicense: {a: b}\n---\n", "", "\x00"])
def test_a_damaged_card_of_the_source_is_passed_over(card, tmp_path):
    folder = save_tiny(tmp_path / "tiny-model")
    (folder / "README.md").write_text(card)
    quantize_checkpoint(folder, tmp_path / "q", "w4a16_g32")
    data = metadata_load(tmp_path / "q" / "README.md")
    assert "license" not in data and "base_model" not in data
    assert "| source model | tiny-model |" in (tmp_path / "q" / "README.md").read_text()


def test_a_card_that_is_a_link_to_elsewhere_is_refused(tmp_path):
    folder = save_tiny(tmp_path / "tiny-model")
    (tmp_path / "elsewhere.md").write_text(CARD_OF_THE_SOURCE)
    (folder / "README.md").symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(CheckpointError, match=r"README\.md: a link to"):
        quantize_checkpoint(folder, tmp_path / "q", "w4a16_g32")


def test_the_card_does_not_block_overwriting(source, tmp_path):
    for _ in range(2):
        quantize_checkpoint(source, tmp_path / "q", "w4a16_g32", overwrite=True)
    (tmp_path / "q" / "README.md").write_text("# Notes of somebody\n")
    with pytest.raises(CheckpointError, match=r"no part of a checkpoint: README\.md"):
        quantize_checkpoint(source, tmp_path / "q", "w4a16_g32", overwrite=True)


def test_saving_keeps_a_readme_of_somebody_else(source, tmp_path):
    (tmp_path / "README.md").write_text("# Notes of somebody\n")
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=LowbitConfig("w4a16_g32"))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Notes of somebody\n"
    assert json.loads((tmp_path / "config.json").read_text())[GUARD_KEY] == GUARD
