"""Quantizes LM head and embedding of a quantized language model to 8 bits: the last 16-bit weights that a decode step reads.

With 4-bit layers, the 16-bit head of an 8B model is a fifth of all bytes that a decode step reads; an 8-bit head is an eighth.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from lowbit.formats import parse_scheme
from lowbit.models.hf import put_plain_weights_first
from lowbit.nn import QuantLinear
from lowbit.nn.convert import quantized, swap, tie

SCHEME = "w8a16"


def quantize_head(model: PreTrainedModel, scheme: str = SCHEME) -> list[str]:
    """Quantizes LM head and embedding of a model whose linear layers are quantized, in place; returns the replaced names.

    Rounds to nearest, by default with a scale per row. Returns [] if no layer is quantized, or if head and embedding are
    quantized already. The head is packed for the kernels, and the embedding has the layout on disk, so tied weights are in
    memory twice.
    """
    owners, followers = plain_head(model)
    for name in owners:
        swap(model, name, quantized(name, model.get_submodule(name).weight, parse_scheme(scheme)))  # type: ignore[arg-type]
    for name, owner in followers.items():
        tie(model, name, owner)
    if owners:
        put_plain_weights_first(model)
    return [*owners, *followers]


def plain_head(model: PreTrainedModel) -> tuple[list[str], dict[str, str]]:
    """Returns which of embedding and LM head have 16-bit weights in a model with quantized layers.

    The list has the modules that own their weights. The dict maps a module that shares weights to their owner. Both are empty
    if no layer is quantized."""
    if not any(isinstance(module, QuantLinear) for module in model.modules()):
        return [], {}
    names = {module: name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    modules = [module for module in (embedding, head) if type(module) in (nn.Embedding, nn.Linear)]
    if len(modules) == 2 and modules[0].weight is modules[1].weight:
        return [names[embedding]], {names[head]: names[embedding]}
    return [names[module] for module in modules], {}
