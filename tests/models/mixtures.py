"""Tiny random mixtures of experts of real architectures."""

from __future__ import annotations

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES = dict(
    vocab_size=160, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, tie_word_embeddings=False,
)  # fmt: skip
_FEW = dict(intermediate_size=48, moe_intermediate_size=32)
_DEEPSEEK = dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
MIXTURES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, dict(intermediate_size=32, num_local_experts=4)),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, _FEW | dict(num_experts=4, shared_expert_intermediate_size=32)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _FEW | dict(num_experts=4, head_dim=16)),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, dict(intermediate_size=32, num_experts=4)),
    "gpt_oss": (
        GptOssForCausalLM, GptOssConfig, dict(intermediate_size=32, num_local_experts=4, head_dim=16, sliding_window=8),
    ),
    "deepseek_v2": (
        DeepseekV2ForCausalLM, DeepseekV2Config,
        _FEW | _DEEPSEEK | dict(kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16),
    ),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig, _FEW | _DEEPSEEK | dict(head_dim=16)),
}  # fmt: skip
"""Constructor of each architecture with experts, by name: class, configuration and options."""


def tiny_mixture(name, dtype=torch.float32, **options):
    """A model whose weights and biases are random, with 4 experts of which 2 see each token."""
    cls, config, own = MIXTURES[name]
    torch.manual_seed(0)
    model = cls(config(**{**_SIZES, **own, "num_experts_per_tok": 2, "dtype": dtype, **options}))
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif "bias" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()
