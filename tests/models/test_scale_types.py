"""Layers with bf16 scales are written to files and loaded. Scales are bf16 if they leave fp16's normal range, or if the weights
are bf16."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lowbit.checkpoint import CheckpointReader
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.nn import QuantLinear
from lowbit.quantize import rtn
from tests.tiny import tiny_llama, tiny_tokenizer

TINY = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("w4a16_g32", torch.float32), ("w4a16_g32_fz", torch.bfloat16), ("w8a16_g32_z", torch.bfloat16)],
    ids=str,
)
def test_one_layer_of_tiny_weights(tmp_path, scheme, dtype):
    model = tiny_llama(dtype=dtype)
    with torch.no_grad():
        model.get_submodule(TINY).weight.mul_(2.0**-20)
    model.save_pretrained(tmp_path / "plain")
    tiny_tokenizer().save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "small", scheme)
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    scales = {name: t.dtype for name, t in tensors.items() if name.endswith("weight_scale")}
    assert {name.removesuffix(".weight_scale") for name, dtype in scales.items() if dtype == torch.bfloat16} == {TINY}
    assert len(scales) == 14 and set(scales.values()) == {torch.bfloat16, torch.float16}
    with CheckpointReader(tmp_path / "small") as reader:
        reader.check()
        found = reader.layer(TINY)
    weight = model.get_submodule(TINY).weight
    expected = rtn(weight, scheme).dequantize()
    assert torch.equal(found.dequantize(), expected)
    ordinary = rtn(weight.float() * 2.0**20, scheme).dequantize() * 2.0**-20
    assert (expected - weight).norm() <= 1.05 * (ordinary - weight).norm()
    layer = AutoModelForCausalLM.from_pretrained(tmp_path / "small").get_submodule(TINY)
    assert isinstance(layer, QuantLinear) and layer.weight_scale.dtype == torch.bfloat16
    assert torch.equal(layer.quant_tensor().dequantize(), expected)


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w3a16_g32_z", "w6e3m2a16_g32", "w8a16_g32"])
def test_bf16_weights_of_up_to_7_bits(tmp_path, scheme):
    """Scales of such weights are bf16 in the file and after loading, whatever the type of the loaded model."""
    model = tiny_llama(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    tiny_tokenizer().save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "small", scheme)
    expected = rtn(model.get_submodule(TINY).weight, scheme)
    for dtype in (torch.bfloat16, torch.float16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=dtype)
        layers = {name: module for name, module in loaded.named_modules() if isinstance(module, QuantLinear)}
        wanted = torch.float16 if scheme.startswith("w8") else torch.bfloat16
        assert {layer.weight_scale.dtype for layer in layers.values()} == {wanted} and len(layers) == 14
        assert torch.equal(layers[TINY].quant_tensor().dequantize(), expected.dequantize())
