"""Small checkpoints of a model whose next token depends on all earlier tokens, with a head size that vLLM's attention
supports.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.checkpoint import CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.formats import QuantTensor, parse_scheme
from lowbit.quantize import lorc, rtn
from tests.tiny import tiny_tokenizer, with_channels

MIXED = {
    "q_proj": "w4a16_g32", "k_proj": "w4a16_g32", "v_proj": "w6e3m2a16", "o_proj": "w3a16_g64_z", "gate_proj": "w4a16_g64",
    "up_proj": "w5a16_g32_fz", "down_proj": "w4a16_g128",
}  # fmt: skip
"""Schemes by the last part of a layer's name. v differs from q and k, and gate from up. With two ranks, each has 192 of 384
channels, so groups of 128 are split into groups of 64.
"""


SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""One process and one thread: two vLLM processes on two cores would wait for each other at every layer."""


def model(*, tied=False, heads=4, kv_heads=2, seed=0) -> LlamaForCausalLM:
    """A random Llama of two layers with biases."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=160, hidden_size=32 * heads, intermediate_size=384, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=32, tie_word_embeddings=tied, attention_bias=True, max_position_embeddings=256,
        dtype=torch.float32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    for name, parameter in made.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return made


def plain(path: Path, **options) -> Path:
    """Saves the model in 32 bits; returns the folder."""
    model(**options).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def packed(path: Path, schemes: dict[str, str], *, tied=False, order=(), factors=(), low_rank=(), embedding=None) -> Path:
    """Saves a lowbit checkpoint; returns the folder. `schemes` maps the last part of layer names to schemes. Layers in `order`
    have act-order, those in `factors` a pre_quant_scale, those in `low_rank` a low-rank correction. `embedding` is the scheme
    of the embedding and of a tied LM head.
    """
    made, layers, tensors = model(tied=tied), {}, dict[str, torch.Tensor]()
    for name, module in made.named_modules():
        end = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and end in schemes:
            q = rtn(module.weight, schemes[end])
            if end in order or end in factors:
                q = with_channels(q, end in order, torch.float32 if end in factors else None)
            if end in low_rank:
                q = replace(q, low_rank=lorc(module.weight, q.with_input(order=None, pre_quant_scale=None), 4))
            _add(name, q, layers, tensors)
        elif isinstance(module, nn.Embedding) and embedding is not None:
            _add(name, rtn(module.weight, embedding), layers, tensors)
        elif hasattr(module, "weight") and not (tied and end == "lm_head"):
            tensors[f"{name}.weight"] = module.weight.detach()
        if getattr(module, "bias", None) is not None:
            tensors[f"{name}.bias"] = module.bias.detach()
    ties = {"lm_head": "model.embed_tokens"} if tied and embedding else {}
    manifest = Manifest(parse_scheme(next(iter(schemes.values()))), layers, ("lm_head",) * (not ties), ties)
    source = path.with_name(f"{path.name}-tokenizer")
    tiny_tokenizer().save_pretrained(source)
    with CheckpointWriter(path) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(made.config.to_dict(), manifest, source)
    return path


def _add(name: str, q: QuantTensor, layers: dict[str, LayerEntry], tensors: dict[str, torch.Tensor]) -> None:
    layers[name] = LayerEntry.of(q)
    tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in layer_tensors(q).items()})
