"""Quantizes LM head and embedding of a quantized language model to 8 bits: the last 16-bit weights that a decode step reads.

With 4-bit layers, the head of an 8B model is a fifth of all bytes per token; in 8 bits an eighth.
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

    Rounds to nearest, by default with a scale per row. Returns [] if no layer is quantized or both are already. The head is
    packed for the kernels and the embedding has the layout on disk: tied weights are stored in both.
    """
    if not any(isinstance(module, QuantLinear) for module in model.modules()):
        return []
    names = {module: name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    modules = [module for module in (embedding, head) if type(module) in (nn.Embedding, nn.Linear)]
    tied = len(modules) == 2 and modules[0].weight is modules[1].weight
    for module in modules[: 1 if tied else 2]:
        swap(model, names[module], quantized(names[module], module.weight, parse_scheme(scheme)))
    if tied:
        tie(model, names[head], names[embedding])
    put_plain_weights_first(model)
    return [names[module] for module in modules]
