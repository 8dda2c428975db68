"""Inputs rotated at run time, from the command to the loaded model: rotation preserves the model, works with every method and
can be stored in lowbit's files only.
"""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lowbit import convert_checkpoint, quantize_checkpoint
from lowbit.checkpoint import CheckpointError, CheckpointReader, LayerEntry
from lowbit.checkpoint.schema import Manifest
from lowbit.formats import NO_PARTS, InputParts, parse_scheme, rotate_blocks
from lowbit.models.calibrate import Calibration
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.quantize_layer import LayerQuantizer
from lowbit.quantize import Awq, Gptq, Hqq, Learned, Mixed, Rtn, SmoothQuant, rtn
from tests.models.written import files, layers
from tests.test_cli import run
from tests.tiny import save_tiny

CALIBRATION = Calibration(samples=8, length=24, text=Path(__file__))  # any text will do
IDS = torch.arange(3, 43)[None]
DOWN, GATE = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.gate_proj"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("rotated-inputs") / "fp16", tied=False)


def logits(path):
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(IDS).logits


def test_by_hand(tiny, tmp_path):
    patterns = ("--rotate-inputs", "down_proj", "--rotate-inputs", GATE)
    out = run("quantize", tiny, tmp_path / "q", "--scheme", "w4a16_g16", *patterns)
    assert out.exit_code == 0, out.output
    stated = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["layers"]
    assert stated[DOWN] == {"shape": [64, 176], "hadamard": 16} and stated[GATE] == {"shape": [176, 64], "hadamard": 64}
    assert sum("hadamard" in entry for entry in stated.values()) == 3
    weights = load_file(tiny / "model.safetensors")
    for name, q in layers(tmp_path / "q").items():
        w = weights[f"{name}.weight"]
        expected = rtn(rotate_blocks(w.float(), q.input_transform.hadamard) if q.input_transform.hadamard else w, "w4a16_g16")
        assert torch.equal(q.codes, expected.codes) and torch.equal(q.scale, expected.scale)
        assert (q.dequantize() - w.float()).norm() < 0.12 * w.float().norm(), "what it means is the weight as it was"
    assert "rotation of the input" in run("inspect", tmp_path / "q").output.replace("\n", "")


METHODS = [
    (Rtn(), "w8a16"), (Rtn(), "w8a8"), (Rtn(), "w8a8_t"), (Hqq(), "w8a16_g16_fz"), (Gptq(act_order=True), "w8a16_g16"),
    (Awq(), "w8a16_g16"), (SmoothQuant(), "w8a8"), (Gptq(smooth=SmoothQuant(None)), "w8a8"), (Learned(iterations=2), "w8a8"),
]  # fmt: skip


@pytest.mark.parametrize("rotation", [None, 0])
@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_every_method_leaves_the_model_what_it_is(method, scheme, rotation, tiny, tmp_path):
    quantize_checkpoint(
        tiny, tmp_path / "q", scheme, method=method, calibration=CALIBRATION, rotate_inputs=["*"], rotation=rotation, low_rank=2
    )
    assert {q.input_transform.hadamard for q in layers(tmp_path / "q").values()} == {16, 64}
    exact = logits(tiny)
    assert (logits(tmp_path / "q") - exact).norm() < 0.03 * exact.norm()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path / "q"))


def test_calibration_sees_inputs_as_the_layer_multiplies_them(tiny):
    with CheckpointReader(tiny) as reader:
        seen = []
        for hadamard in ({}, {DOWN: 16}):
            decoder = LayerwiseDecoder(reader, "cpu", torch.float32, hadamard)
            hidden = decoder.embed(IDS)
            for i in range(2):
                decoder.load(i)
                if i == 1:
                    decoder.observe(i, hidden, {"mlp.down_proj": seen.append})
                hidden = list(decoder.run(i, hidden))
            seen.append(hidden[0])
    x, y, rotated, same = seen
    torch.testing.assert_close(rotated, rotate_blocks(x, 16), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(same, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("patterns", "count"), [(["*_proj"], 4), (["q_proj"], 5), ([], 4)])
def test_layers_that_rotate_alike_share_an_input(patterns, count, tiny):
    """q, k and v are calibrated, scaled and mixed as one, whether their input is rotated or not."""
    with CheckpointReader(tiny) as reader:
        decoder = LayerwiseDecoder(reader, "cpu", torch.float32)
        linears = [name for name, module in decoder.layers[0].named_modules() if isinstance(module, torch.nn.Linear)]
        rotated = {f"{decoder.layer_name(0)}.{name}": 16 for name in linears if any(fnmatch(name, f"*{p}") for p in patterns)}
        decoder = LayerwiseDecoder(reader, "cpu", torch.float32, rotated)
        hidden = decoder.embed(IDS)
        decoder.load(0)
        found = decoder.inputs(0, hidden[0], linears)
    assert len(found) == count and sum(len(each.linears) for each in found) == 7


def test_smoothing_says_what_it_leaves(tiny, tmp_path):
    said = []
    options = dict(method=Gptq(smooth=SmoothQuant()), calibration=CALIBRATION, say=said.append)
    quantize_checkpoint(tiny, tmp_path / "q", "w8a8", **options, rotate_inputs=["down_proj"])
    assert any("inputs of 2 layers are rotated, not smoothed" in line for line in said)


def test_factors_are_not_folded_through_a_rotation(tiny, tmp_path):
    """SmoothQuant moves the range of down_proj's inputs into up_proj, unless these inputs are rotated. Each layer is treated by
    itself."""
    options = dict(method=SmoothQuant(), calibration=CALIBRATION)
    quantize_checkpoint(tiny, tmp_path / "q", "w8a8", **options, rotate_inputs=[DOWN])
    exact = logits(tiny)
    assert (logits(tmp_path / "q") - exact).norm() < 0.03 * exact.norm()


def test_a_mix_takes_rotated_weights(tiny, tmp_path):
    mixed = Mixed(("w4a16_g16", "w8a16_g16"), 6.5)
    quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g16", mixed=mixed, calibration=CALIBRATION, rotate_inputs=["down_proj"])
    found = layers(tmp_path / "q")
    assert {q.input_transform.hadamard for name, q in found.items() if name.endswith("down_proj")} == {16}
    assert len({q.scheme for q in found.values()}) == 2
    exact = logits(tiny)
    assert (logits(tmp_path / "q") - exact).norm() < 0.2 * exact.norm()


def test_a_killed_run_goes_on_to_the_same_files(tiny, tmp_path, monkeypatch):
    def start(target, *patterns):
        options = dict(method=Gptq(), calibration=CALIBRATION, rotate_inputs=patterns)
        quantize_checkpoint(tiny, tmp_path / target, "w4a16_g16", **options)

    start("whole", "down_proj")
    original, seen = LayerQuantizer.quantize, []

    def dies_in_layer_1(self, i, *rest):
        seen.append(i)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        return original(self, i, *rest)

    monkeypatch.setattr(LayerQuantizer, "quantize", dies_in_layer_1)
    with pytest.raises(KeyboardInterrupt):
        start("killed", "down_proj")
    with pytest.raises(CheckpointError, match="finished layers of another run"):
        start("killed", "o_proj")
    start("killed", "down_proj")
    assert seen == [0, 1, 1] and files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.parametrize("target", ["gptq", "awq", "compressed-tensors"])
def test_other_tools_files_do_not_rotate(target, tiny, tmp_path):
    quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g16", rotate_inputs=["q_proj"])
    with pytest.raises(CheckpointError, match="files .*have no rotation of the input.*--to dequantized"):
        convert_checkpoint(tmp_path / "q", tmp_path / "r", target)
    convert_checkpoint(tmp_path / "q", tmp_path / "r", "dequantized")
    plain = load_file(tmp_path / "r" / "model.safetensors")
    assert all(torch.equal(plain[f"{n}.weight"], q.dequantize(torch.float16)) for n, q in layers(tmp_path / "q").items())


def test_what_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="no linear layer that is quantized fits 'dwon_proj'"):
        quantize_checkpoint(tiny, tmp_path / "q", "w8a16", rotate_inputs=["dwon_proj"])
    entry = LayerEntry((8, 64), parse_scheme("w8a16"), InputParts(hadamard=64))
    stated = Manifest(entry.scheme, {"a": entry}).to_dict()
    assert Manifest.from_dict(stated, "here").layers["a"] == entry
    for value, what in ((32, "blocks of 16, 64, 256"), (256, "got 256 for K 64"), (True, "a number"), ("64", "a number")):
        stated["layers"]["a"]["hadamard"] = value
        with pytest.raises(CheckpointError, match=f"here: layer 'a': .*{what}"):
            Manifest.from_dict(stated, "here")
    assert "hadamard" not in Manifest(entry.scheme, {"a": replace(entry, input_parts=NO_PARTS)}).to_dict()["layers"]["a"]
