"""A layer may have tensors that are not read. They are an error if they could change the meaning of the weights, otherwise a
note."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.checkpoint import CheckpointError, CheckpointReader, ForeignReader
from lowbit.models.convert_checkpoint import convert_checkpoint
from tests.checkpoint.foreign import DATA, sha

Q = "model.layers.0.self_attn.q_proj"


def changed(tmp_path, name, tensors=None, weights=None):
    """Returns a copy of a folder. `tensors` returns tensors to add, given those of the folder. `weights` changes the entries
    for weights in the config."""
    folder = tmp_path / "c"
    shutil.copytree(DATA / name, folder)
    file = next(p for p in (folder / "model.safetensors", folder / "rank0.safetensors") if p.exists())
    if tensors is not None:
        held = load_file(file)
        save_file(held | tensors(held), file, {"format": "pt"})
    if weights is not None:
        config = json.loads((folder / "config.json").read_text())
        for group in config["quantization_config"]["config_groups"].values():
            weights(group["weights"])
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def expected(name):
    return json.loads((DATA / name / "expected.json").read_text())


@pytest.mark.parametrize("name", ["compressed-tensors-w3-asym", "compressed-tensors-w8a8-asym"])
def test_zero_points_count_where_symmetric_is_not_stated(tmp_path, name):
    folder = changed(tmp_path, name, weights=lambda w: w.pop("symmetric"))
    with ForeignReader(folder) as reader:
        assert {n: sha(reader.dequantize(n, torch.float32)) for n in reader.entries} == expected(name)
        assert all("_z" in entry.scheme.name and entry.notes == () for entry in reader.entries.values())


@pytest.mark.parametrize("name", ["compressed-tensors-w3-asym", "compressed-tensors-w8a8-asym"])
def test_zero_points_of_symmetric_weights_are_an_error(tmp_path, name):
    folder = changed(tmp_path, name, weights=lambda w: w.update(symmetric=True))
    with pytest.raises(
        CheckpointError, match=r"\.weight_zero_point: config\.json states symmetric: true, but zero points from -\d"
    ):
        convert_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stated", [True, False])
def test_zero_points_that_are_zero_are_noted(tmp_path, stated):
    """In packed words of 4 bits, zero is stored as 8. If `symmetric` is not stated, such zero points are kept, without a
    note.
    """

    def zeros(held):
        groups = {n.removesuffix("scale"): t.shape for n, t in held.items() if n.endswith("weight_scale")}
        return {f"{n}zero_point": torch.full((rows // 8, k), 0x88888888 - (1 << 32)).int() for n, (rows, k) in groups.items()}

    folder = changed(tmp_path, "compressed-tensors-w4", zeros, None if stated else lambda w: w.pop("symmetric"))
    report = convert_checkpoint(folder, tmp_path / "out")
    assert set(report.layers.values()) == {"w4a16_g32" if stated else "w4a16_g32_z"}
    assert any("zero points of symmetric weights are ignored; all must be zero" in note for note in report.notes) == stated
    with CheckpointReader(tmp_path / "out") as reader:
        assert {n: sha(reader.layer(n).dequantize()) for n in report.layers} == expected("compressed-tensors-w4")


CHANGE_WEIGHTS = {
    "compressed-tensors-w4": ("weight_global_scale", "weight_g_idx", "weight_codebook", "lora_A.weight"),
    "compressed-tensors-fp8": ("weight_zero_points", "weight_scale_2"),
    "compressed-tensors-mxfp4": ("weight_zero_point", "weight"),
    "gptq-auto-round-w4": ("SCB", "scales_2", "qweight_high"),
    "awq-auto-round": ("g_idx", "pre_quant_scale"),
    "bitsandbytes-nf4-nested": ("SCB", "weight.quant_state.bitsandbytes__fp4"),
    "fp8-transformers": ("weight_scale", "absmax"),
}


@pytest.mark.parametrize(("name", "suffix"), [(name, suffix) for name, all_ in CHANGE_WEIGHTS.items() for suffix in all_])
def test_what_may_change_weights_is_an_error(tmp_path, name, suffix):
    folder = changed(tmp_path, name, lambda held: {f"{Q}.{suffix}": torch.ones(1)})
    with pytest.raises(CheckpointError, match=rf"{Q}\.{suffix}: ") as error:
        ForeignReader(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", [name for name in CHANGE_WEIGHTS if not name.startswith("bits")])
def test_what_changes_no_weight_is_noted(tmp_path, name):
    beside = ("output_scale", "k_scale")
    folder = changed(tmp_path, name, lambda held: {f"{Q}.{suffix}": torch.ones(1) for suffix in beside})
    report = convert_checkpoint(folder, tmp_path / "out")
    *notes, rounding = convert_checkpoint(folder, tmp_path / "plain", "dequantized").notes
    assert set(report.notes) >= set(notes) != set() and rounding.startswith("weights are rounded to")
    for suffix in beside:
        assert [note.partition(": ")[0] for note in report.notes if f"{suffix} is ignored" in note] == [Q]
    with CheckpointReader(tmp_path / "out") as reader:
        assert not [n for n in reader.names() if n.endswith(beside)]


def test_scales_of_activations_that_nobody_quantizes(tmp_path):
    folder = changed(tmp_path, "compressed-tensors-w4", lambda held: {f"{Q}.input_scale": torch.ones(1)})
    assert any(note.startswith(f"{Q}: input_scale is ignored") for note in convert_checkpoint(folder, tmp_path / "out").notes)


def test_in_our_own_files(tmp_path):
    convert_checkpoint(DATA / "awq-auto-round", tmp_path / "own")
    file = tmp_path / "own" / "model.safetensors"
    held = load_file(file)
    save_file(held | {f"{Q}.weight_scale_2": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=rf"{Q}\.weight_scale_2: unknown tensor of a quantized layer"):
        CheckpointReader(tmp_path / "own")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [("transformer.layers.0.attention.qkv.zero", "has no counterpart"),
     ("transformer.layers.7.mlp.fc.weights_scaling_factor", r"transformer\.layers\.7\.mlp\.fc\.weight is missing")],
)  # fmt: skip
def test_in_tensorrt_llms_files(tmp_path, tensor, message):
    folder = changed(tmp_path, "tensorrt-llm-modelopt", lambda held: {tensor: torch.ones(1).half()})
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(folder, tmp_path / "out")


def test_own_activations_in_compressed_tensors_files_are_noted(tmp_path):
    """compressed-tensors files cannot state lowbit's rounding rule, so the tool will quantize by its own rule."""
    convert_checkpoint(DATA / "compressed-tensors-w8a8-asym", tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    text = json.dumps(config).replace("w8a8_z_ct", "w8a8_z")
    (tmp_path / "own" / "config.json").write_text(text)
    report = convert_checkpoint(tmp_path / "own", tmp_path / "out", "compressed-tensors")
    assert len(report.notes) == 1 and "by compressed-tensors' rule from here on" in report.notes[0]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"strategy": "group", "group_size": 32}, "by scales of strategy group of 32; schemes with such weights support token"),
        ({"strategy": "tensor"}, "by scales of strategy tensor; schemes with such weights support token"),
        ({"dynamic": "local", "strategy": "tensor_group", "group_size": 16}, "dynamic 'local', which no scheme supports"),
        ({"num_bits": 16}, "the files state int activations of 16 bits, dynamic True, which no scheme supports"),
        ({"type": "float", "symmetric": False}, "with zero points, which no scheme of such weights supports"),
    ],
)
def test_activations_that_no_scheme_says_are_named(tmp_path, change, note):
    """Activations that no scheme describes stay in 16 bits, and a note names them."""
    folder = changed(tmp_path, "compressed-tensors-w8a8-asym")
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"].update(change)
    group["output_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    (folder / "config.json").write_text(json.dumps(config))
    report = convert_checkpoint(folder, tmp_path / "out")
    assert set(report.layers.values()) == {"w8a16_z"}
    assert any(line.endswith(f"{note}: activations stay in 16 bits") for line in report.notes), report.notes
    assert any("the files state quantized outputs, which stay in 16 bits" in line for line in report.notes)
