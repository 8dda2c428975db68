"""Calibrated models whose activations are quantized too. Ranges are those of the layers' real inputs, and SmoothQuant runs
before GPTQ."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lowbit import LowbitConfig, quantize_checkpoint
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.nn import QuantLinear, convert
from lowbit.quantize import Gptq, Learned, Rtn, SmoothQuant, gptq, rtn
from lowbit.quantize.smoothquant import smoothing_scale
from tests.models.test_calibrate import CALIBRATION, IDS, files, load, logits, tiny  # noqa: F401  (a fixture)

GROUPS = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)
METHODS = [
    (Rtn(), "fp8"),
    (SmoothQuant(0.5), "fp8"),
    (Gptq(), "fp8"),
    (SmoothQuant(0.5), "w8a8"),
    (Rtn(), "w8a8_t_az"),
    (Gptq(), "w8a8_t_az"),
    (SmoothQuant(0.5), "w8a8_az"),
    (Gptq(smooth=SmoothQuant(None)), "w8a8"),
    (Gptq(act_order=True, smooth=SmoothQuant(0.5)), "w4a8_g32"),
    (Learned(8, 4), "fp8"),
    (Learned(8, 4), "w8a8_t_az"),
    (Learned(8, 4, smooth=SmoothQuant(0.5)), "w4a8_g32"),
]


@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
def test_every_method_leaves_a_checkpoint_that_loads(method, scheme, tiny, tmp_path):  # noqa: F811
    quantize_checkpoint(tiny, tmp_path / "a", scheme, method=method, calibration=CALIBRATION)
    if isinstance(method, Learned):  # tests/models/test_calibrate.py tests this for the other methods
        quantize_checkpoint(tiny, tmp_path / "b", scheme, method=method, calibration=CALIBRATION)
        assert files(tmp_path / "a") == files(tmp_path / "b"), "the same seed gives the same files"
    with CheckpointReader(tmp_path / "a") as reader:
        reader.check()
        scales = [reader.layer(name).input_transform.activation_scale for name in reader.manifest.layers]
        zeros = [reader.layer(name).input_transform.activation_zero for name in reader.manifest.layers]
    assert len(scales) == 14 and all((scale is not None) == (scheme in ("fp8", "w8a8_t_az")) for scale in scales)
    assert all((zero is not None) == (scheme == "w8a8_t_az") for zero in zeros)
    model = load(tmp_path / "a")
    difference = logits(model) - logits(load(tiny))
    assert difference.norm() < 0.1 * logits(load(tiny)).norm()
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


def ranges(model, tokens, names):
    """Largest |x| of each layer's input, measured with forward hooks."""
    seen = {}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(
            lambda m, args, name=name: seen.update({name: max(seen.get(name, 0.0), float(args[0].abs().max()))})
        )
    for row in tokens:
        logits(model, row[None])
    return seen


def test_static_scales_by_hand(tiny, tmp_path):  # noqa: F811
    """Inputs of q, k and v in layer 0 do not depend on quantized weights; those of later layers do."""
    quantize_checkpoint(tiny, tmp_path / "q", "fp8", calibration=CALIBRATION)
    model, tokens = load(tiny), CALIBRATION.tokens(tiny)
    with CheckpointReader(tmp_path / "q") as reader:
        layers = {name: reader.layer(name) for name in reader.manifest.layers}
    float_model = ranges(load(tiny), tokens, layers)
    for name, q in layers.items():
        model.get_submodule(name).weight.data = q.dequantize() if ".0." in name else model.get_submodule(name).weight.data
        assert torch.equal(q.codes, rtn(load(tiny).get_submodule(name).weight.data, "fp8").codes)
    first_quantized = ranges(model, tokens, layers)
    for name, q in layers.items():
        # All inputs of a decoder layer are measured before any weight of this layer is rounded.
        expected = (float_model if ".0." in name else first_quantized)[name] / 448
        assert q.input_transform.activation_scale.item() == pytest.approx(expected, rel=1e-5), name


def test_smoothing_before_gptq_by_hand(tiny, tmp_path):  # noqa: F811
    """The norms equal those of SmoothQuant alone; the codes are those of GPTQ on the smoothed weights and the smoothed layers'
    inputs.
    """
    method = Gptq(smooth=SmoothQuant(0.5))
    quantize_checkpoint(tiny, tmp_path / "both", "w8a8", method=method, calibration=CALIBRATION)
    quantize_checkpoint(tiny, tmp_path / "smooth", "w8a8", method=SmoothQuant(0.5), calibration=CALIBRATION)
    norm = "model.layers.0.input_layernorm.weight"
    with CheckpointReader(tmp_path / "both") as both, CheckpointReader(tmp_path / "smooth") as smooth:
        assert torch.equal(both.get(norm), smooth.get(norm))
        name = "model.layers.0.self_attn.q_proj"
        codes = both.layer(name).codes
        assert not torch.equal(codes, smooth.layer(name).codes)
        stored = both.get(norm).float()
    inputs, model = [], load(tiny)
    attention = model.get_submodule(name.rpartition(".")[0])
    attention.q_proj.register_forward_pre_hook(lambda m, args: inputs.append(args[0][0]))
    for row in CALIBRATION.tokens(tiny):
        logits(model, row[None])
    x = torch.cat(inputs)
    s = smoothing_scale([m.weight.data for m in (attention.q_proj, attention.k_proj, attention.v_proj)], x.abs().amax(0), 0.5)
    x = x * stored / model.get_submodule(norm.removesuffix(".weight")).weight.data  # as the norm makes it from then on
    expected = gptq(attention.q_proj.weight.data * s, x.T @ x, "w8a8").codes
    assert float((codes != expected).float().mean()) < 0.005


def test_a_stated_scale_must_be_there_and_fit(tiny, tmp_path):  # noqa: F811
    quantize_checkpoint(tiny, tmp_path / "q", "fp8", calibration=CALIBRATION)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    layers = config["quantization_config"]["layers"]
    assert layers["model.layers.0.mlp.up_proj"]["activation_scale"] is True
    del layers["model.layers.0.mlp.up_proj"]["activation_scale"]
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"up_proj\.activation_scale: config.json does not say"):
        CheckpointReader(tmp_path / "q")
    layers["model.layers.0.mlp.up_proj"]["activation_scale"] = True
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.mlp.up_proj.activation_scale": torch.zeros(1)}, file, {"format": "pt"})
    with CheckpointReader(tmp_path / "q") as reader, pytest.raises(CheckpointError, match="must be a positive number, got 0.0"):
        reader.check()
    layers["model.layers.0.mlp.up_proj"].update(scheme="w8e4m3a16_t")
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="an activation scale goes with a scheme that quantizes activations"):
        CheckpointReader(tmp_path / "q")


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_az", "fp8", "w4a8_g32"])
def test_quantized_while_loading(scheme, tiny, tmp_path):  # noqa: F811
    """Without calibration, each token has its own scale; the model computes the same after it is saved and loaded again."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, quantization_config=LowbitConfig(scheme)).eval()
    plain = load(tiny)
    convert(plain, scheme)
    assert torch.equal(logits(model), logits(plain))
    assert all(m.activation_scale is None for m in model.modules() if isinstance(m, QuantLinear))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_az", "w8a8_t_az", "fp8", "fp8_dynamic", "fp8_block"])
def test_the_same_model_on_a_gpu(scheme, tiny, tmp_path):  # noqa: F811
    """On a GPU, the model uses the kernels, compiles to one graph, and is as near to the CPU's exact float32 products as fp16
    allows.
    """
    quantize_checkpoint(tiny, tmp_path / "q", scheme, calibration=CALIBRATION)
    expected = logits(load(tmp_path / "q"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float16).cuda().eval()
    got = logits(model, IDS.cuda())
    assert all(m.is_prepared for m in model.modules() if isinstance(m, QuantLinear))
    assert (got.float().cpu() - expected).norm() < 0.03 * expected.norm()
    torch.testing.assert_close(got, logits(model, IDS.cuda()), rtol=0, atol=0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        again = compiled(IDS.cuda(), use_cache=False).logits
    torch.testing.assert_close(again, got, rtol=1e-2, atol=1e-2 * float(got.abs().max()))


def test_some_inputs_stay_in_16_bits(tiny, tmp_path):  # noqa: F811
    """Layers in `wide_inputs` keep inputs in 16 bits, and SmoothQuant does not change these inputs."""
    method = SmoothQuant(0.5)
    plan = quantize_checkpoint(
        tiny, tmp_path / "q", "w8a8", method=method, calibration=CALIBRATION, wide_inputs=["down_proj", "*.0.self_attn.o_proj"]
    )
    wide = {name for name in plan.linears if name.endswith("down_proj") or name == "model.layers.0.self_attn.o_proj"}
    assert len(wide) == 3 and set(plan.others) == wide
    with CheckpointReader(tmp_path / "q") as reader, CheckpointReader(tiny) as original:
        for name, entry in reader.manifest.layers.items():
            assert entry.scheme.name == ("w8a16" if name in wide else "w8a8"), name
        assert torch.equal(reader.layer("model.layers.1.mlp.down_proj").codes,
                           rtn(original.get("model.layers.1.mlp.down_proj.weight"), "w8a16").codes)  # fmt: skip
    model = load(tmp_path / "q")
    assert model.model.layers[0].mlp.down_proj.scheme_name == "w8a16"
    assert (logits(model) - logits(load(tiny))).norm() < 0.02 * logits(load(tiny)).norm()


@pytest.mark.parametrize(
    ("scheme", "patterns", "message"),
    [
        ("w8a16", ["down_proj"], "w8a16 has 16-bit activations everywhere"),
        ("w8a8", ["down"], "no linear layer that is quantized fits 'down', such as model.layers.0"),
    ],
)
def test_patterns_that_mean_nothing(scheme, patterns, message, tiny, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(tiny, tmp_path / "q", scheme, wide_inputs=patterns)
    assert not (tmp_path / "q").exists()
