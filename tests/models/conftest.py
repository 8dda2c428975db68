"""Saved 16-bit checkpoints to quantize."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import save_tiny


@pytest.fixture(scope="session", params=["tied", "untied", "bias"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "fp16"
    return save_tiny(path, tied=request.param == "tied", bias=request.param == "bias")


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A model that takes 294 MB in fp16 and 78 MB with 4 bits, its largest layer 38 MB in fp16."""
    path = tmp_path_factory.mktemp("large") / "fp16"
    config = LlamaConfig(
        vocab_size=64, hidden_size=2048, intermediate_size=9216, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, dtype=torch.float16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").half()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    model.save_pretrained(path)
    return path
