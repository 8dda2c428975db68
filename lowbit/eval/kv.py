"""Keys and values in few bits under Transformers' own forward, to measure what they cost in quality.

The model's attention function is replaced by one that quantizes and dequantizes k (after RoPE) and v, row by row, before the
model's own attention. These are the values that the pages of an engine hold, and the engine's prompts and steps read every
token as stored. Nothing else of the model changes: the same weights, products and masks, on any device, for families without a
decode program too. An engine would also quantize the LM head and sum in another order.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lowbit.engine.balance import balance_keys
from lowbit.engine.recognise import recognise
from lowbit.formats.kv import KVFormat, KVScheme, dequantize_rows, quantize_rows


@contextlib.contextmanager
def stored_kv(model: PreTrainedModel, scheme: KVScheme) -> Iterator[None]:
    """While the block runs, attention of `model` reads keys and values as pages of `scheme` hold them.

    Calls may use a cache: Transformers' holds 16 bits, and each call quantizes its rows to the same codes again. With 16 bits
    nothing changes. As in an engine, rows of q and k that have biases are scaled, and stay so (`engine.balance`): the model
    computes the same. Raises ValueError for an encoder-decoder, which no engine computes, and for a model whose attention is
    not called through Transformers' `AttentionInterface`.
    """
    if not scheme.quantized:
        yield
        return
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__}: encoder-decoders have keys and values in 16 bits alone; measure it with those"
        )
    decoder = recognise(model)
    if not isinstance(decoder, tuple):
        balance_keys(decoder)
    before = config._attn_implementation
    name = f"lowbit-{scheme}-{before}"
    AttentionInterface.register(name, _attention(before, scheme))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.set_attn_implementation(name)
    if config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__}: its attention does not go through Transformers' AttentionInterface, so its keys and "
            "values cannot be quantized here; measure it with 16 bits"
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def stored(x: Tensor, fmt: KVFormat) -> Tensor:
    """Returns the rows x [.., head_dim] as pages of `fmt` hold them, in the dtype of x."""
    return dequantize_rows(*quantize_rows(x, fmt), fmt, x.dtype)


def _attention(before: str, scheme: KVScheme) -> Callable[..., Any]:
    """Returns the attention function `before` over stored keys and values."""

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        # "eager" is a function of each model's file.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(before, eager)
        return inner(module, query, stored(key, scheme.k), stored(value, scheme.v), *rest, **options)

    return attention
