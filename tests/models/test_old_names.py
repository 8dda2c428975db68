"""Older files call the per-channel factor of x input_scale. They are read by every path; the name is never written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, layer_tensors
from lowbit.checkpoint.schema import manifest_sha256
from lowbit.cli.commands import app
from lowbit.models.convert_checkpoint import convert_checkpoint
from lowbit.models.load import check_checkpoint
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from tests.tiny import save_tiny, with_channels

IDS = torch.tensor([[5, 17, 60, 9, 33, 2, 80, 41]])


@pytest.fixture
def folders(tmp_path):
    """A checkpoint with factors in some layers, once with the present names and once with the old names."""
    quantize_checkpoint(save_tiny(tmp_path / "fp16"), tmp_path / "plain", "w4a16_g32")
    with CheckpointReader(tmp_path / "plain") as reader, CheckpointWriter(tmp_path / "new") as writer:
        layers = {}
        for i, name in enumerate(reader.manifest.layers):
            q = reader.layer(name)
            layers[name] = with_channels(q, i % 2 == 0, torch.float16, seed=i) if i % 3 else q
            for suffix, tensor in layer_tensors(layers[name]).items():
                writer.add(f"{name}.{suffix}", tensor)
        for tensor in reader.names():
            if tensor.rpartition(".")[0] not in layers:
                writer.add(tensor, reader.get(tensor))
        entries = {name: LayerEntry.of(q) for name, q in layers.items()}
        writer.finish(reader.config, replace(reader.manifest, layers=entries), copy_from=tmp_path / "plain")
    with_old_names(tmp_path / "new", tmp_path / "old")
    return tmp_path / "new", tmp_path / "old"


def with_old_names(new, old):
    """Rewrites a checkpoint as the previous release wrote it, checksums included."""
    old.mkdir()
    tensors = load_file(new / "model.safetensors")
    held = {name.replace(".pre_quant_scale", ".input_scale"): t for name, t in tensors.items()}
    assert held.keys() != tensors.keys()
    save_file(held, old / "model.safetensors", {"format": "pt"})
    config = json.loads((new / "config.json").read_text().replace('"pre_quant_scale"', '"input_scale"'))
    digest = hashlib.sha256((old / "model.safetensors").read_bytes()).hexdigest()
    config["quantization_config"]["files"] = {"model.safetensors": {"sha256": digest}}
    config["quantization_config"]["sha256"] = manifest_sha256(config["quantization_config"])
    (old / "config.json").write_text(json.dumps(config))


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) and t.dtype == b[n].dtype for n, t in a.items())


@torch.no_grad()
def test_files_of_the_old_name_are_read_by_every_path(folders, tmp_path):
    new, old = folders
    with CheckpointReader(new) as now, CheckpointReader(old) as then:
        then.check()
        assert then.verify_files() == ("model.safetensors",)
        assert then.manifest.layers == now.manifest.layers and then.names() == now.names()
        for name in now.manifest.layers:
            a, b = now.layer(name), then.layer(name)
            assert (a.input_transform.pre_quant_scale is None) == (b.input_transform.pre_quant_scale is None), name
            assert a.input_transform.pre_quant_scale is None or torch.equal(
                a.input_transform.pre_quant_scale, b.input_transform.pre_quant_scale
            ), name
    assert check_checkpoint(old) == ()
    done = CliRunner().invoke(app, ["inspect", str(old), "--check"])
    assert done.exit_code == 0 and "scale of" in done.output and "SHA-256 as config.json states" in done.output

    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (new, old)]
    assert same_state(*models)
    assert torch.equal(models[0](IDS).logits, models[1](IDS).logits)


def test_what_is_written_has_the_new_name(folders, tmp_path):
    _, old = folders
    AutoModelForCausalLM.from_pretrained(old, dtype=torch.float16).save_pretrained(tmp_path / "saved")
    convert_checkpoint(old, tmp_path / "dense", "dequantized")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["layers"]
    assert any(entry.get("pre_quant_scale") for entry in written.values()) and "input_scale" not in str(written)
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert any(name.endswith(".pre_quant_scale") for name in names)
    assert not any(name.endswith(".input_scale") for name in names)


def test_both_names_at_once_are_refused(folders):
    _, old = folders
    path = old / "config.json"
    config = json.loads(path.read_text())
    entry = next(e for e in config["quantization_config"]["layers"].values() if "input_scale" in e)
    entry["pre_quant_scale"] = True
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: layer .* has unknown keys \['input_scale'\]"):
        CheckpointReader(old)
