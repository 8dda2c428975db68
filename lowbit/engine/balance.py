"""Scales the channels of keys to similar magnitudes, so that keys can be stored in few bits.

Some models have large biases on keys. In the first layer of Qwen2.5-Coder-0.5B a few exceed 100, while most are below 7. A row
of keys has one scale, so these few channels determine the rounding error of all. But q . k stays the same if a channel of k is
divided by a factor and the same channel of q is multiplied by it. Two channels that RoPE rotates together need the same factor.
Factors are powers of two, so that multiplying by them rounds nothing. They are multiplied into the rows of the weights of q and
k, so steps and prompts take no more time.

    factor = 2^round(log2(sqrt(m / median of m)))      m: magnitude of a pair of channels, bias and weights together

Source of the idea of moving magnitude between the factors of a product: SmoothQuant, arXiv:2211.10438; its exponent is 1/2 too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.engine.decoder import Decoder, DecoderLayer
from lowbit.formats import LowRank
from lowbit.formats.granularity import scale_shape
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.nn import QuantLinear


def balance_keys(decoder: Decoder) -> int:
    """Scales the rows of the weights of q and k in place, in each layer where k has a bias. The model computes the same result.
    Returns the number of layers that were scaled now; layers that were scaled before are skipped.

    A layer is also skipped if its q and k are normalised after the products, if q, k and v are one module, or if several rows
    share a scale.
    """
    changed = 0
    for layer in decoder.layers:
        if len(layer.qkv) != 3 or layer.k_gamma is not None or layer.qk_norms:
            continue
        q, k, _ = layer.qkv
        if not (_scalable(q) and _scalable(k)) or k.bias is None or factors_of(k) is not None:
            continue
        factors = key_factors(layer, decoder.attention)
        group = decoder.attention.group
        _scale_rows(k, (1 / factors).flatten())
        _scale_rows(q, factors.repeat_interleave(group, 0).flatten())
        changed += 1
    return changed


def factors_of(module: nn.Module) -> Tensor | None:
    """Returns the factors by which the rows of a module of q or k were multiplied, float32 [N]; None if they were not."""
    return getattr(module, "row_factors", None)


def _scalable(module: nn.Module) -> bool:
    if isinstance(module, QuantLinear):
        return scale_shape(module.scheme.granularity, module.shape)[0] == module.shape[0]
    return isinstance(module, nn.Linear)


@torch.no_grad()
def key_factors(layer: DecoderLayer, shape: AttentionShape) -> Tensor:
    """Returns the factor float32 [kv_heads, head_dim] of each channel of k: a power of two, equal for channels that RoPE
    rotates together."""
    k: Any = layer.qkv[1]
    weight = k.weight.detach().float() if isinstance(k, nn.Linear) else k.dequantized_weight(torch.float32)
    of_weights = (weight * layer.input_gamma.detach().float().to(weight.device)).square().sum(1)  # E[k^2] for x of RMS 1
    magnitude = (k.bias.detach().float().square() + of_weights).sqrt().view(shape.kv_heads, shape.head_dim)
    half = shape.rotary_dim // 2
    pairs = torch.maximum(magnitude[:, :half], magnitude[:, half : 2 * half])
    magnitude = torch.cat([pairs, pairs, magnitude[:, 2 * half :]], 1).clamp(min=1e-30)
    return torch.exp2((magnitude / magnitude.median(1, keepdim=True).values).log2().mul(0.5).round())


@torch.no_grad()
def _scale_rows(module: Any, factors: Tensor) -> None:
    """Multiplies the rows of a layer's weight and its bias by `factors`, and records them as `row_factors`."""
    of_rows = factors[:, None]
    if isinstance(module, QuantLinear):
        q = module.quant_tensor()
        zero = q.zero if q.zero is None or q.zero.dtype == torch.uint8 else q.zero * of_rows.to(q.zero.dtype)
        own = q.low_rank
        low_rank = own if own is None else LowRank(own.up * of_rows.to(own.up.dtype), own.down)
        module.set_weight(replace(q, scale=q.scale * of_rows.to(q.scale.dtype), zero=zero, low_rank=low_rank))
    else:
        module.weight.mul_(of_rows.to(module.weight.dtype))
    if module.bias is not None:
        module.bias.mul_(factors.to(module.bias.dtype))
    module.row_factors = factors
