"""Transformers' attention without repeated keys and values: `attn_implementation="lowbit"`.

With grouped-query attention, Transformers' "sdpa" repeats keys and values in a compiled decode step over a static cache. The
reasons: torch's fused attention does not support groups together with a mask, and Transformers folds a group into the query
only in eager calls (5.23; version 5.17 repeats in eager calls too). A decode step has one token per sequence, so here the heads
of a group use the token dimension: q [B, kv_heads, group, head_dim] attends to the unrepeated keys of the cache. All other
calls use "sdpa".
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "lowbit"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Returns the attention of query [B, heads, T, head_dim] over key and value [B, kv_heads, S, head_dim], and None.

    The output is [B, T, heads, head_dim]. With T = 1 and a mask shared by all heads, keys and values are not repeated. Raises
    ValueError for a soft cap.
    """
    if options.get("softcap") is not None:
        raise ValueError(f"attn_implementation={NAME!r} has no softcap, got {options['softcap']}: use 'eager'")
    batch, heads, tokens, head_dim = query.shape
    shared = attention_mask is not None and attention_mask.shape[1] == 1 and heads != key.shape[1]
    plain = options.get("position_bias") is None and options.get("cache") is None
    if tokens != 1 or not shared or not plain:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return out
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], head_dim)
    y = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return y.reshape(batch, 1, heads, value.shape[-1]), None


def register_attention() -> None:
    """Registers the attention implementation with Transformers."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
