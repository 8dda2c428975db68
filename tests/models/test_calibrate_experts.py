"""Decoder layers with experts, quantized by every method. The model stays closer to the 16-bit one than after rounding to
nearest."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

import lowbit
from lowbit.checkpoint import CheckpointReader
from lowbit.formats import parse_scheme
from lowbit.methods import Awq, Gptq, Learned, Rtn, SmoothQuant
from lowbit.models.calibrate import Calibration, FinishedLayers, calibrate_layers, recipe_of
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.expert_calibration import LayerExperts, dense_parameter
from lowbit.models.expert_names import expert_modules
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn.experts import QuantExperts
from lowbit.quantize import expert_layer
from tests.models.mixtures import MIXTURES, tiny_mixture
from tests.tiny import tiny_tokenizer

TOKENS = torch.randint(3, 160, (24, 32), generator=torch.Generator().manual_seed(5))
OTHERS = torch.randint(3, 160, (8, 32), generator=torch.Generator().manual_seed(6))
SCHEME = parse_scheme("w4a16_g16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models whose norms make some channels much larger than others."""
    made = {}

    def folder(name):
        if name not in made:
            model = tiny_mixture(name)
            g = torch.Generator().manual_seed(1)
            for key, p in model.named_parameters():
                if "norm" in key and p.dim() == 1:
                    p.data.copy_(torch.exp(0.8 * torch.randn(p.shape, generator=g)))
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return folder


def experts_of(decoder):
    return [name for module in expert_modules(decoder.model).values() for name in (module.first, module.down)]


def calibrated(folder, method, target, schemes=SCHEME, **options):
    """Returns the quantized experts after a run over all decoder layers, by the names of their parameters, and the notes of the
    run."""
    decoder = LayerwiseDecoder(CheckpointReader(folder), "cpu", torch.float32)
    names = dict.fromkeys(experts_of(decoder), schemes)
    recipe = recipe_of(decoder.reader, names, method, 0, TOKENS, decoder, options.get("expert_rotations"))
    finished = FinishedLayers(target / "out", recipe)
    notes = calibrate_layers(decoder, names, method, TOKENS, finished, **options)
    results = {}
    for i in range(len(decoder)):
        prefix = f"{decoder.layer_name(i)}."
        own = {n.removeprefix(prefix): s for n, s in names.items() if n.startswith(prefix)}
        results |= {prefix + name: matrices for name, matrices in finished.read(i, own).experts.items()}
    return results, notes


@torch.no_grad()
def divergence(folder, experts):
    """The mean divergence of a model with these experts from the unquantized one, on other tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model(OTHERS).logits.log_softmax(-1)
    modules = {name: m for m in expert_modules(model).values() for name in (m.first, m.down)}
    for name, matrices in experts.items():
        dense_parameter(matrices, modules[name].transposed, model.get_parameter(name).data)
    return float((expected.exp() * (expected - model(OTHERS).logits.log_softmax(-1))).sum(-1).mean())


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_model_stays_closer(name, folders, tmp_path):
    rounded = divergence(folders(name), calibrated(folders(name), Rtn(), tmp_path / "rtn")[0])
    for method, bound in ((Gptq(), 0.7), (Awq(), 0.9), (Learned(iterations=40, batch=4), 0.9)):
        kind = type(method).__name__
        experts, notes = calibrated(folders(name), method, tmp_path / kind)
        assert divergence(folders(name), experts) < bound * rounded, kind
        assert sum("relative error of the experts' outputs" in line for line in notes) == 2


@pytest.mark.parametrize("name", MIXTURES)
def test_every_architecture(name, folders, tmp_path):
    """8 bits change little in every architecture, whatever its order of rows, biases and rotations."""
    folder = folders(name)
    decoder = LayerwiseDecoder(CheckpointReader(folder), "cpu", torch.float32)
    rotations = dict.fromkeys(experts_of(decoder), 16)
    experts, notes = calibrated(folder, Gptq(), tmp_path, parse_scheme("w8a16_g16"), expert_rotations=rotations)
    assert set(experts) == set(rotations)
    errors = [float(line.rpartition(" ")[2]) for line in notes if "relative error" in line]
    assert len(errors) == len(experts) // 2 and max(errors) < 1e-4
    assert all(q.input_transform.hadamard == 16 for matrices in experts.values() for q in matrices)
    # rounding sends some tokens to other experts; experts in a wrong order would give 1
    assert divergence(folder, experts) < 1e-2


def test_the_decoder_computes_what_the_model_does(folders):
    """The layer-wise decoder computes what the model does. Experts that are separate tensors in the files are stacked while
    reading."""
    for name in ("mixtral", "deepseek_v2", "gpt_oss"):
        decoder = LayerwiseDecoder(CheckpointReader(folders(name)), "cpu", torch.float32)
        model = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32).eval()
        hidden = decoder.embed(OTHERS)
        for i in range(len(decoder)):
            decoder.load(i)
            hidden = list(decoder.run(i, hidden))
            decoder.free(i)
        with torch.no_grad():
            expected = model(OTHERS, output_hidden_states=True).hidden_states[-1]
            assert torch.allclose(model.model.norm(torch.cat(hidden)), expected, atol=1e-4)


def test_a_run_goes_on(folders, tmp_path):
    """A resumed run reads finished layers with their experts, and passes the same inputs to the next layer."""
    folder, method = folders("qwen3_moe"), Awq()
    experts, _ = calibrated(folder, method, tmp_path / "whole")
    calibrated(folder, method, tmp_path / "part")
    for path in (tmp_path / "part").glob(".out.unfinished/layer-00001.*.safetensors"):
        path.unlink()
    again, _ = calibrated(folder, method, tmp_path / "part")
    for name, matrices in experts.items():
        for a, b in zip(matrices, again[name], strict=True):
            assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)
            assert not a.input_transform.differences(b.input_transform)
    assert any(q.input_transform.pre_quant_scale is not None for m in experts.values() for q in m)


def test_linear_layers_and_experts_together(folders, tmp_path):
    """Linear layers and experts are quantized together. The inputs of the experts come from the quantized attention."""
    decoder = LayerwiseDecoder(CheckpointReader(folders("qwen2_moe")), "cpu", torch.float32)
    linears = [n for n, m in decoder.model.named_modules() if isinstance(m, torch.nn.Linear) and "_proj" in n]
    for method in (Gptq(), Awq(), SmoothQuant(), Learned(iterations=3, batch=2)):
        schemes = dict.fromkeys([*linears, *experts_of(decoder)], parse_scheme("w8a8"))
        fresh = LayerwiseDecoder(CheckpointReader(folders("qwen2_moe")), "cpu", torch.float32)
        recipe = recipe_of(fresh.reader, schemes, method, 0, TOKENS, fresh)
        finished = FinishedLayers(tmp_path / type(method).__name__ / "out", recipe)
        calibrate_layers(fresh, schemes, method, TOKENS[:6], finished)
        own = {n.removeprefix("model.layers.0."): s for n, s in schemes.items() if n.startswith("model.layers.0.")}
        result = finished.read(0, own)
        assert len(result.quantized) == len(linears) // 2 and set(result.experts) == {
            "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
        }  # fmt: skip


def test_starved_experts_are_named(folders, tmp_path, monkeypatch):
    """The report names experts that see too few tokens, with their counts, which are those of the router."""
    decoder = LayerwiseDecoder(CheckpointReader(folders("mixtral")), "cpu", torch.float32)
    hidden = decoder.embed(TOKENS)
    decoder.load(0)
    tokens = decoder.observe_experts(0, hidden, ["mlp.experts"])["mlp.experts"].tokens
    assert sum(tokens) == 2 * TOKENS.numel() and len(set(tokens)) > 1
    least = sorted(tokens)[1]
    few = functools.partial(expert_layer.calibrate_experts, least=least)
    monkeypatch.setattr("lowbit.models.quantize_layer.calibrate_experts", few)
    _, notes = calibrated(folders("mixtral"), Gptq(), tmp_path)
    line = next(line for line in notes if line.startswith("model.layers.0.mlp.experts: 1 of 4 experts rounded to nearest"))
    assert line.endswith(f"expert (tokens) {tokens.index(min(tokens))} ({min(tokens)})")


def test_h_is_proportional_to_up_or_not():
    for name, expected in (("mixtral", True), ("gpt_oss", False)):
        layer = tiny_mixture(name).model.layers[0]
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        assert (LayerExperts.of(layer, parameters).matrices("mlp.experts").up_rows is not None) == expected
    assert not LayerExperts.of(layer, parameters[:1]).modules


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_checkpoints(name, folders, tmp_path):
    """Whole checkpoints by every method load with quantized experts; by GPTQ and AWQ they are closer to 16 bits."""
    tiny_tokenizer().save_pretrained(folders(name))
    calibration = Calibration(samples=24, length=32)
    expected = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32)(OTHERS).logits.log_softmax(-1)
    divergences = {}
    for method in (Rtn(), Gptq(), Awq(), Learned(iterations=5, batch=2)):
        kind, lines = type(method).__name__, []
        target = tmp_path / kind
        quantize_checkpoint(folders(name), target, "w4a16_g16", method=method, calibration=calibration, say=lines.append)
        assert any("relative error of the experts' outputs" in line for line in lines) == (kind != "Rtn")
        assert not list(tmp_path.glob(".*unfinished"))
        model = lowbit.load(target, device="cpu", dtype=torch.float32)
        experts = [module for module in model.modules() if isinstance(module, QuantExperts)]
        scaled = experts[0].packed()["gate_up_proj"].input_transform.parts.pre_quant_scale
        assert len(experts) == 2 and scaled == (kind == "Awq")
        divergences[kind] = float((expected.exp() * (expected - model(OTHERS).logits.log_softmax(-1))).sum(-1).mean())
    assert divergences["Gptq"] < 0.95 * divergences["Rtn"]
    assert divergences["Awq"] < divergences["Rtn"]  # learning takes more tokens than these (models.learn.ENOUGH_TOKENS)


@torch.no_grad()
def test_checkpoints_with_rotated_inputs(folders, tmp_path):
    """Rotated inputs of experts can be calibrated. The files state the blocks of the rotation, and 8 bits change little."""
    tiny_tokenizer().save_pretrained(folders("qwen3_moe"))
    calibration = Calibration(samples=8, length=32)
    quantize_checkpoint(
        folders("qwen3_moe"), tmp_path / "c", "w8a16_g16", method="gptq", calibration=calibration,
        rotate_inputs=["*.experts.down_proj", "*.o_proj"],
    )  # fmt: skip
    with CheckpointReader(tmp_path / "c") as reader:
        layers = reader.manifest.layers
        assert layers["model.layers.0.mlp.experts.down_proj"].input_parts.hadamard == 16
        assert layers["model.layers.0.mlp.experts.gate_up_proj"].input_parts.hadamard == 0
    one = AutoModelForCausalLM.from_pretrained(folders("qwen3_moe"), dtype=torch.float32)(OTHERS).logits.log_softmax(-1)
    two = lowbit.load(tmp_path / "c", device="cpu", dtype=torch.float32)(OTHERS).logits.log_softmax(-1)
    assert float((one.exp() * (one - two)).sum(-1).mean()) < 1e-2
