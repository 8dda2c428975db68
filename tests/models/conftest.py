"""Tiny random models of real architectures, made on the spot."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(tied=True, bias=False, dtype=torch.float16):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied, attention_bias=bias, max_position_embeddings=256, dtype=dtype,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(scope="session", params=["tied", "untied", "bias"])
def folder(request, tmp_path_factory):
    """A saved 16-bit checkpoint."""
    path = tmp_path_factory.mktemp(request.param) / "fp16"
    tiny_llama(tied=request.param == "tied", bias=request.param == "bias").save_pretrained(path)
    return path
