"""Batch-invariant sums, asked for where models are loaded."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import lowbit
from lowbit import LowbitConfig, QuantLinear
from lowbit.ops import UnsupportedProblem
from tests.tiny import save_tiny


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "tiny")


def test_a_cpu_refuses_and_names_the_layer(folder):
    words = r"layers\.0\.self_attn\.q_proj: no kernel for w8a16 .* on a CPU, batch-invariant:(?s:.*)torch_int8: sums small"
    with pytest.raises(UnsupportedProblem, match=words):
        lowbit.load(folder, scheme="w8a16", device="cpu", batch_invariant=True)
    with pytest.raises(UnsupportedProblem, match=words):
        lowbit.pipeline(str(folder), quantization_mode="w8a16", device="cpu", batch_invariant=True)
    config = LowbitConfig("w8a16", batch_invariant=True)
    with pytest.raises(UnsupportedProblem, match=words):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16, device_map="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16_g16", "w8a8"])
def test_layers_of_a_model_on_a_gpu(folder, scheme, tmp_path):
    config = LowbitConfig(scheme, batch_invariant=True)
    made = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float16, device_map={"": 0})
    made.save_pretrained(tmp_path / "saved")
    assert "batch_invariant" not in json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    for model in (made, lowbit.load(tmp_path / "saved", batch_invariant=True)):
        layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
        assert layers and all(layer.batch_invariant for layer in layers)
        for layer in layers:
            x = torch.randn(300, layer.in_features, device="cuda", dtype=torch.float16)
            whole = layer(x)
            assert all(torch.equal(layer(x[:m]), whole[:m]) for m in (1, 16, 100))
    assert not any(m.batch_invariant for m in lowbit.load(tmp_path / "saved").modules() if isinstance(m, QuantLinear))
