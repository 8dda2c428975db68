"""Language models of known shapes with random weights: the time of a step does not depend on their values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedConfig, PreTrainedModel

from lowbit.formats import parse_scheme
from lowbit.models.head import quantize_head
from lowbit.nn import QuantLinear
from lowbit.nn.convert import swap
from lowbit.nn.embedding import QuantEmbedding
from lowbit.quantize import rtn

POSITIONS = 65536
"""Maximum context length, longer than the models were trained for; the time of a step does not depend on it."""


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=POSITIONS, tie_word_embeddings=False, rms_norm_eps=1e-5, eos_token_id=None,
    )  # fmt: skip


def _opt(hidden: int, intermediate: int, layers: int, heads: int) -> OPTConfig:
    return OPTConfig(
        hidden_size=hidden, ffn_dim=intermediate, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=50272,
        max_position_embeddings=POSITIONS, eos_token_id=None,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Llama-3-8B": lambda: _llama(4096, 14336, 32, 32, 8, 128256, 500000.0),
    "Llama-2-13B": lambda: _llama(5120, 13824, 40, 40, 40, 32000, 10000.0),
    "Llama-2-70B": lambda: _llama(8192, 28672, 80, 64, 8, 32000, 10000.0),
    "OPT-30B": lambda: _opt(7168, 28672, 48, 56),
}
"""Configurations from the models' config.json, except for POSITIONS."""


def meta_model(shape: str, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
    """Returns the model of a shape on the meta device, without weights. `layers` limits its number of layers. Raises ValueError
    for a shape that is not in `SHAPES`.
    """
    if shape not in SHAPES:
        raise ValueError(f"models are {', '.join(SHAPES)}, got {shape!r}")
    config = SHAPES[shape]()
    config.dtype = dtype
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    return model


def random_model(
    shape: str, scheme: str | None, head: str | None, dtype: torch.dtype, device: torch.device, layers: int | None = None
) -> PreTrainedModel:
    """Returns a model of a shape with Gaussian weights. Linear layers are in `scheme`, LM head and embedding in `head`; None
    means `dtype`. `layers` limits the number of layers. Layers share no memory, and only one at a time is in 16 bits while the
    model is built.

    Raises ValueError for a shape that is not in `SHAPES`.
    """
    model = meta_model(shape, dtype, layers)
    for name, module in list(model.named_modules()):
        if name.endswith("rotary_emb"):  # has buffers only, no parameters
            model.set_submodule(name, type(module)(config=model.config).to(device))
    generator = torch.Generator(device).manual_seed(0)
    ends = {model.get_output_embeddings(), model.get_input_embeddings()}
    for name in [name for name, _ in model.named_modules()]:  # names only: a list of modules would keep replaced ones alive
        module = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            made = torch.full(parameter.shape, float(key != "bias"), dtype=dtype, device=device)
            if parameter.dim() == 2:
                scale = 1.0 if isinstance(module, nn.Embedding) else parameter.shape[1] ** -0.5
                made.normal_(0, scale, generator=generator)
            setattr(module, key, nn.Parameter(made, requires_grad=False))
        if isinstance(module, nn.Linear) and scheme is not None and module not in ends:
            packed = swap(model, name, rtn(module.weight, parse_scheme(scheme)))
            packed.prepare(dtype)
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    if head is not None:
        quantize_head(model, head)
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Returns the stored bytes of all weights that a step reads. Embeddings do not count, since a step reads single rows."""
    modules = [m for m in model.modules() if not isinstance(m, (nn.Embedding, QuantEmbedding))]
    packed = [m for m in modules if isinstance(m, QuantLinear)]
    plain = [p for m in modules if not isinstance(m, QuantLinear) for p in m.parameters(recurse=False)]
    plain += [m.bias for m in packed if m.bias is not None]
    return sum(m.weight_nbytes for m in packed) + sum(p.nbytes for p in plain)
