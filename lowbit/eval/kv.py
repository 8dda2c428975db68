"""Keys and values in few bits under Transformers' own forward, to measure how much quality they cost.

The model's attention function is replaced by one that quantizes and dequantizes k (after RoPE) and v, row by row, before the
model's own attention. The engine computes with the same values, since it reads the keys and values of every token as they are
stored in its pages. Weights, products and masks of the model do not change. This works on any device, and for families without
a decode program. The engine differs in two other ways: it quantizes the LM head, and adds in another order.
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
    """Inside the block, attention of `model` reads keys and values as they would be stored in pages of `scheme`.

    Calls may use a cache. Transformers' cache holds 16 bits, and each call quantizes its rows to the same codes again. A
    `scheme` of 16 bits changes nothing. As in an engine, rows of q and k are scaled if k has a bias (`engine.balance`). They
    stay scaled after the block, but the model computes the same. Raises ValueError for an encoder-decoder, which no engine
    computes, and for a model whose attention is not called through Transformers' `AttentionInterface`.
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
    """Returns the rows x [.., head_dim] after quantizing them to `fmt` and dequantizing them, in the dtype of x."""
    return dequantize_rows(*quantize_rows(x, fmt), fmt, x.dtype)


def _attention(before: str, scheme: KVScheme) -> Callable[..., Any]:
    """Returns an attention function that calls the attention function `before` with quantized keys and values."""

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        # The function for "eager" is in the file of the model's class.
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(before, eager)
        return inner(module, query, stored(key, scheme.k), stored(value, scheme.v), *rest, **options)

    return attention
