"""Tiny random mixtures of experts, one of each architecture that is tested."""

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
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES = dict(
    vocab_size=160, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_SMALL = {**_SIZES, "intermediate_size": 128, "moe_intermediate_size": 48}

MODELS = {
    "mixtral": (MixtralForCausalLM, lambda: MixtralConfig(**_SIZES, intermediate_size=96, num_local_experts=4)),
    "qwen2_moe": (Qwen2MoeForCausalLM, lambda: Qwen2MoeConfig(**_SMALL, shared_expert_intermediate_size=96, num_experts=8)),
    "qwen3_moe": (Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**_SMALL, num_experts=8, head_dim=16)),
    "olmoe": (OlmoeForCausalLM, lambda: OlmoeConfig(**_SIZES, intermediate_size=64, num_experts=8)),
    "gpt_oss": (
        GptOssForCausalLM,
        lambda: GptOssConfig(
            **_SIZES, intermediate_size=64, num_local_experts=4, head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "deepseek_v2": (
        DeepseekV2ForCausalLM,
        lambda: DeepseekV2Config(
            **{**_SMALL, "num_key_value_heads": 4}, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1,
            kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, topk_method="greedy",
        ),
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        lambda: Glm4MoeConfig(
            **_SMALL, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1, head_dim=16
        ),
    ),
}  # fmt: skip
"""Class and configuration by model_type."""


def tiny_experts(name: str, dtype: torch.dtype = torch.float16) -> PreTrainedModel:
    """A model of `MODELS` whose experts differ: every matrix and bias is drawn from a normal distribution."""
    cls, config = MODELS[name]
    torch.manual_seed(0)
    model = cls(config()).eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif key.endswith("bias") or "sinks" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)
