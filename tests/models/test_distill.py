"""Distillation of scales, norms and biases: gradients are those of plain operations, codes stay, the stated divergence is the
written model's, and a killed run goes on to the same files.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowbit import quantize_checkpoint
from lowbit.checkpoint import CheckpointReader
from lowbit.formats import decode, parse_scheme
from lowbit.formats.granularity import spread
from lowbit.models import calibrate, distill
from lowbit.models.calibrate import FinishedLayers
from lowbit.models.distill import TrainableScales
from lowbit.quantize import Learned, rtn
from tests.models.mixtures import tiny_mixture
from tests.models.test_calibrate import CALIBRATION, files, load
from tests.models.test_learn import lively  # noqa: F401  (a fixture)
from tests.models.written import layers
from tests.quantize.data import weights
from tests.tiny import eager_opt, tiny_tokenizer

METHOD = Learned(iterations=6, batch=3, distill=25)
SCHEMES = ["w2a16_g32", "w3a16_g48", "w3a16_g32_z", "w2a16_g16_fz", "w4a16_b16x24", "w4e2m1a16_g32", "w8a16", "w8a16_t"]


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_are_those_of_plain_operations(name):
    scheme = parse_scheme(name)
    q, slope = rtn(weights(40, 112), scheme), weights(40, 112, seed=2)
    scales = TrainableScales(q)
    assert torch.equal(scales.dense(torch.float32).detach(), q.dequantize())
    (scales.dense(torch.float32) * slope).sum().backward()
    change = torch.zeros_like(q.scale, dtype=torch.float32).requires_grad_()
    zero_change = torch.zeros_like(change).requires_grad_()
    scale = spread(q.scale.float() * (1 + change), scheme.granularity, q.shape)
    values = decode(q.codes, scheme.weight)
    if q.zero is None:
        dense = values * scale
    elif scales.zero_change is None:
        dense = (values - spread(q.zero.float(), scheme.granularity, q.shape)) * scale
    else:
        dense = values * scale + spread(q.zero.float() + q.scale.float() * zero_change, scheme.granularity, q.shape)
    (dense * slope).sum().backward()
    torch.testing.assert_close(scales.scale_change.grad, change.grad, rtol=1e-4, atol=1e-4)
    if scales.zero_change is not None:
        torch.testing.assert_close(scales.zero_change.grad, zero_change.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_trained_is_what_is_stored(name):
    scales = TrainableScales(rtn(weights(40, 112), parse_scheme(name)))
    with torch.no_grad():
        for p in scales.parameters:
            p.uniform_(-0.2, 0.2, generator=torch.Generator().manual_seed(0))
    trained = scales.quantized()
    assert torch.equal(trained.codes, scales.q.codes) and not torch.equal(trained.scale, scales.q.scale)
    assert trained.scale.dtype == scales.q.scale.dtype
    torch.testing.assert_close(trained.dequantize(), scales.dense(torch.float32).detach(), rtol=0, atol=0)


@torch.no_grad()
def divergence(source, folder):
    """The mean divergence of the logits of a checkpoint on the calibration texts."""
    tokens, model, exact = CALIBRATION.tokens(source), load(source), load(source)
    with CheckpointReader(folder) as reader:
        state = {f"{name}.weight": reader.layer(name).dequantize() for name in reader.manifest.layers}
        state |= {n: reader.get(n) for n in reader.names() if n in model.state_dict() and n not in state}
    model.load_state_dict(state, strict=False)
    p, q = (m(tokens).logits.log_softmax(-1) for m in (exact, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("w2a16_g16", {}), ("w3a16_g32_z", {"rotate_inputs": ["*"]}), ("w2a16_g16_fz", {"low_rank": 2}),
        ("w3a16_g32", {"embeddings": True}), ("w3a16_g32", {"skip": ["v_proj", "lm_head"]}),
    ],
)  # fmt: skip
def test_the_written_model_has_the_divergence_that_is_said(scheme, options, lively, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(distill, "product_dtype", lambda device: torch.float32)
    said = []
    quantize_checkpoint(lively, tmp_path / "q", scheme, method=METHOD, calibration=CALIBRATION, say=said.append, **options)
    plain = replace(METHOD, distill=0)
    quantize_checkpoint(lively, tmp_path / "p", scheme, method=plain, calibration=CALIBRATION, **options)
    before, after = (float(v) for v in next(s for s in said if "nats" in s).split(": ")[1].split(" nats")[0].split(" -> "))
    assert after < 0.97 * before
    if "embeddings" not in options:  # a quantized head is not what the layers are distilled against
        assert divergence(lively, tmp_path / "q") == pytest.approx(after, rel=0.01)
        assert divergence(lively, tmp_path / "p") == pytest.approx(before, rel=0.01)
    trained, first = layers(tmp_path / "q"), layers(tmp_path / "p")
    assert all(torch.equal(trained[name].codes, first[name].codes) for name in first)
    assert all(not torch.equal(trained[n].scale, q.scale) for n, q in first.items() if n.startswith("model.layers"))
    with CheckpointReader(tmp_path / "q") as reader, CheckpointReader(lively) as source:
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            name = f"model.layers.1.{name}"
            assert not torch.equal(reader.get(name), source.get(name)) and reader.get(name).dtype == source.get(name).dtype


def test_biases_are_trained(tmp_path):
    eager_opt(torch.float16).save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w2a16_g16", method=METHOD, calibration=CALIBRATION)
    quantize_checkpoint(tmp_path / "m", tmp_path / "p", "w2a16_g16", method=replace(METHOD, distill=0), calibration=CALIBRATION)
    assert divergence(tmp_path / "m", tmp_path / "q") < 0.97 * divergence(tmp_path / "m", tmp_path / "p")
    with CheckpointReader(tmp_path / "q") as reader, CheckpointReader(tmp_path / "m") as source:
        for name in ("final_layer_norm.bias", "self_attn.q_proj.bias", "fc2.bias"):
            name = f"model.decoder.layers.1.{name}"
            assert not torch.equal(reader.get(name), source.get(name)) and reader.get(name).dtype == source.get(name).dtype


def test_inputs_are_rounded_meanwhile(lively, tmp_path, monkeypatch):  # noqa: F811
    said, rounded = [], []
    original = distill.rounded_inputs
    monkeypatch.setattr(distill, "rounded_inputs", lambda layer, *a: rounded.append(a) or original(layer, *a))
    quantize_checkpoint(lively, tmp_path / "q", "w4a8_g32", method=METHOD, calibration=CALIBRATION, say=said.append)
    assert len(rounded) == 2 and any("distilled" in line for line in said)


def test_experts_stay_and_what_is_around_them_is_trained(tmp_path):
    tiny_mixture("mixtral").save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    said = []
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w3a16_g16", method=METHOD, calibration=CALIBRATION, say=said.append)
    before, after = (float(v) for v in next(s for s in said if "nats" in s).split(": ")[1].split(" nats")[0].split(" -> "))
    assert after < before


def test_what_distillation_makes_worse_is_left(lively, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(distill, "RATE", 50.0)
    for name, method in (("a", METHOD), ("b", replace(METHOD, distill=0))):
        quantize_checkpoint(lively, tmp_path / name, "w3a16_g32", method=method, calibration=CALIBRATION)
    a, b = (layers(tmp_path / name) for name in "ab")
    assert all(torch.equal(q.scale, b[name].scale) for name, q in a.items())


@pytest.mark.parametrize("when", ["while it distils", "while it writes what it distilled"])
def test_a_killed_run_goes_on_to_the_same_files(when, lively, tmp_path, monkeypatch):  # noqa: F811
    quantize_checkpoint(lively, tmp_path / "whole", "w3a16_g32", method=METHOD, calibration=CALIBRATION)
    write, killed = FinishedLayers.write, []

    def dying(self, i, result):
        if self.stage == calibrate.DISTILLED and i == 1:
            raise KeyboardInterrupt
        write(self, i, result)

    with monkeypatch.context() as patch:
        if when == "while it distils":
            patch.setattr(calibrate, "distill", lambda *a: killed.append(1) or (_ for _ in ()).throw(KeyboardInterrupt))
        else:
            patch.setattr(FinishedLayers, "write", dying)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(lively, tmp_path / "killed", "w3a16_g32", method=METHOD, calibration=CALIBRATION)
    monkeypatch.setattr(calibrate.LayerQuantizer, "quantize", lambda *a: pytest.fail("a finished layer is quantized again"))
    quantize_checkpoint(lively, tmp_path / "killed", "w3a16_g32", method=METHOD, calibration=CALIBRATION)
    assert files(tmp_path / "whole") == files(tmp_path / "killed")
    assert not list(tmp_path.glob(".*unfinished"))


def test_steps_that_do_not_exist():
    with pytest.raises(ValueError, match="0 or more steps, got -1"):
        Learned(distill=-1)
    with pytest.raises(ValueError, match="distill belongs to method learned, not to rtn"):
        quantize_checkpoint("nowhere", "out", "w4a16", method="rtn", distill=5)


@pytest.mark.gpu
def test_a_gpu_repeats_itself(lively, tmp_path):  # noqa: F811
    for name in ("a", "b"):
        quantize_checkpoint(lively, tmp_path / name, "w3a16_g32", method=METHOD, calibration=CALIBRATION, device="cuda")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    quantize_checkpoint(lively, tmp_path / "plain", "w3a16_g32", method=replace(METHOD, distill=0), calibration=CALIBRATION)
    assert divergence(lively, tmp_path / "a") < divergence(lively, tmp_path / "plain")


def test_the_model_loads(lively, tmp_path):  # noqa: F811
    quantize_checkpoint(lively, tmp_path / "q", "w3a16_g32", method=METHOD, calibration=CALIBRATION)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "q")(torch.arange(3, 9)[None]).logits.isfinite().all()
