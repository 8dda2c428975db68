"""Low-rank corrections from the command to the loaded model: quantized, saved, checked, resumed, converted or refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lowbit import convert_checkpoint, quantize_checkpoint
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.models import scale_folding
from lowbit.models.calibrate import Calibration, unfinished_folder
from lowbit.models.quantize_layer import LayerQuantizer
from lowbit.quantize import Awq, Gptq, Hqq, Rtn, SmoothQuant, lorc, rtn
from tests.models.written import files, layers
from tests.tiny import save_tiny

CALIBRATION = Calibration(samples=6, length=24, text=Path(__file__))  # any text will do
IDS = torch.arange(3, 43)[None]
GATE = "model.layers.1.mlp.gate_proj"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("low-rank") / "fp16", tied=False)


@pytest.fixture(scope="module")
def corrected(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("low-rank") / "w3"
    quantize_checkpoint(tiny, path, "w3a16_g32", low_rank=8)
    return path


def logits(path):
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(IDS).logits


def test_by_hand(tiny, corrected):
    weights, said = load_file(tiny / "model.safetensors"), []
    for name, q in layers(corrected).items():
        w = weights[f"{name}.weight"]
        assert torch.equal(q.low_rank.up, lorc(w, rtn(w, "w3a16_g32"), 8).up) and q.low_rank.rank == 8
    quantization = json.loads((corrected / "config.json").read_text())["quantization_config"]
    assert quantization["layers"][GATE] == {"shape": [176, 64], "low_rank": 8}
    stored = load_file(corrected / "model.safetensors")
    assert stored[f"{GATE}.weight_up"].shape == (176, 8) and stored[f"{GATE}.weight_down"].shape == (8, 64)
    assert f"{GATE}.weight" not in stored, "nothing here may be taken for the weight"
    quantize_checkpoint(tiny, corrected.with_name("again"), "w3a16_g32", low_rank=8, say=said.append)
    assert files(corrected) == files(corrected.with_name("again"))
    count = sum(8 * 16 * sum(q.shape) for q in layers(corrected).values()) / sum(
        math.prod(q.shape) for q in layers(corrected).values()
    )
    assert f"rank 8 in 14 linear layers take {count:.3f} bits per weight more" in said[0]


def test_a_loaded_model_saves_what_it_loaded(corrected, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(corrected, dtype=torch.float16)
    model.save_pretrained(tmp_path / "again")
    before, after = load_file(corrected / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert all(a.low_rank.rank == 8 for a in layers(tmp_path / "again").values())
    assert torch.equal(logits(tmp_path / "again"), logits(corrected))


METHODS = [
    (Rtn("mse"), "w3a16_g32"), (Hqq(), "w3a16_g32_fz"), (Gptq(act_order=True), "w3a16_g32"), (Awq(), "w3a16_g32_z"),
    (SmoothQuant(0.5), "w3a16_g32"),
]  # fmt: skip


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "input scales"])
@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_every_method_gains(method, scheme, fold, tiny, tmp_path, monkeypatch):
    if not fold:
        monkeypatch.setattr(scale_folding, "_PAIRS", ())
    errors = []
    for rank in (0, 16):
        quantize_checkpoint(tiny, tmp_path / "q", scheme, method=method, calibration=CALIBRATION, low_rank=rank, overwrite=True)
        errors.append((logits(tmp_path / "q") - logits(tiny)).norm())
    assert errors[1] < 0.8 * errors[0]
    scaled = [q for q in layers(tmp_path / "q").values() if q.input_transform.pre_quant_scale is not None]
    assert bool(scaled) == (not fold and isinstance(method, Awq)) and all(q.low_rank.rank == 16 for q in scaled)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    if isinstance(method, (Rtn, Hqq, Gptq)):  # the others change norms too
        for name, q in layers(tmp_path / "q").items():
            model.get_submodule(name).weight.data = q.dequantize()
        with torch.inference_mode():
            torch.testing.assert_close(logits(tmp_path / "q"), model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_killed_run_goes_on_to_the_same_files(tiny, tmp_path, monkeypatch):
    def run(target, rank=4):
        quantize_checkpoint(tiny, tmp_path / target, "w4a16_g32", method=Gptq(), calibration=CALIBRATION, low_rank=rank)

    run("whole")
    original, seen = LayerQuantizer.quantize, []

    def dies_in_layer_1(self, i, *rest):
        seen.append(i)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        return original(self, i, *rest)

    monkeypatch.setattr(LayerQuantizer, "quantize", dies_in_layer_1)
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    with pytest.raises(CheckpointError, match="finished layers of another run"):
        run("killed", rank=5)
    run("killed")
    assert seen == [0, 1, 1] and files(tmp_path / "killed") == files(tmp_path / "whole")
    assert not unfinished_folder(tmp_path / "killed").exists()


@pytest.mark.parametrize("target", ["gptq", "awq", "compressed-tensors"])
def test_other_tools_files_have_no_correction(target, tiny, tmp_path):
    quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g32", low_rank=8)
    with pytest.raises(CheckpointError, match="and 13 more: .* files have no low-rank correction.*--to dequantized"):
        convert_checkpoint(tmp_path / "q", tmp_path / "r", target)
    assert not (tmp_path / "r").exists()
    convert_checkpoint(tmp_path / "q", tmp_path / "r", "dequantized")
    plain = load_file(tmp_path / "r" / "model.safetensors")
    assert all(torch.equal(plain[f"{n}.weight"], q.dequantize(torch.float16)) for n, q in layers(tmp_path / "q").items())


def edited(folder, tmp_path, tensors=lambda t: None, entry=lambda e: None):
    shutil.copytree(folder, tmp_path / "c")
    values = load_file(tmp_path / "c" / "model.safetensors")
    tensors(values)
    save_file(values, tmp_path / "c" / "model.safetensors")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    entry(config["quantization_config"]["layers"][GATE])
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("tensors", "entry", "message"),
    [
        (lambda t: t.pop(f"{GATE}.weight_up"), None, f"lists the layer '{GATE}', but no file has {GATE}.weight_up"),
        (None, lambda e: e.pop("low_rank"), rf'{GATE}.weight_up: config.json does not say .*\("low_rank": its rank\)'),
        (None, lambda e: e.update(low_rank=7), rf"{GATE}.weight_up: .*\(176, 7\), the file has torch.float16 \(176, 8\)"),
        (None, lambda e: e.update(low_rank=65), r"low_rank of \[176, 64\] is 1 to 64, got 65"),
        (None, lambda e: e.update(low_rank=True), r"low_rank of \[176, 64\] is 1 to 64, got True"),
        (None, lambda e: e.update(rank=8), rf"layer '{GATE}' has unknown keys \['rank'\]"),
    ],
)
def test_files_that_do_not_fit_are_refused(tensors, entry, message, corrected, tmp_path):
    folder = edited(corrected, tmp_path, tensors or (lambda t: None), entry or (lambda e: None))
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(folder)


def test_check_looks_into_corrections(corrected, tmp_path):
    folder = edited(corrected, tmp_path, lambda t: t[f"{GATE}.weight_up"].fill_(float("inf")))
    with CheckpointReader(folder) as reader, pytest.raises(CheckpointError, match=f"{GATE}: its low-rank correction"):
        reader.check()


def test_ranks_are_judged_before_anything_is_read(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.k_proj: the rank .* is 1 to 32, got 33"):
        quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g32", low_rank=33)
    with pytest.raises(ValueError, match="got -1"):
        quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g32", low_rank=-1)
    assert not list(tmp_path.iterdir())


def test_embeddings_have_none(tiny, tmp_path):
    quantize_checkpoint(tiny, tmp_path / "q", "w4a16_g32", low_rank=8, embeddings=True)
    ranks = {name: q.low_rank and q.low_rank.rank for name, q in layers(tmp_path / "q").items()}
    assert ranks["model.embed_tokens"] is None and ranks["lm_head"] == 8 and len(ranks) == 16
    logits(tmp_path / "q")
