"""Layers whose scales are bf16, because fp16 has no normal number for them, on their way through files."""

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


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w4a16_g32_fz", "w8a16_g32_z"])
def test_one_layer_of_tiny_weights(tmp_path, scheme):
    model = tiny_llama(dtype=torch.bfloat16)
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
