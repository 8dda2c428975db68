"""The LM head of a quantized language model, and its embedding, in 8 bits: the last 16-bit weights that a step reads.

With layers of 4 bits, the head of an 8B model is a fifth of all bytes of a token; in 8 bits an eighth.
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
    """Quantizes LM head and embedding of a model whose linear layers are quantized, in place, rounding to nearest with a scale
    for each row; returns the names of what it replaced, none where no layer is quantized or both are already.

    The head runs in the form of the kernels, the embedding is read as on disk: where both are one weight, there are two forms.
    """
    if not any(isinstance(module, QuantLinear) for module in model.modules()):
        return []
    names = {module: name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    ends = [module for module in (embedding, head) if type(module) in (nn.Embedding, nn.Linear)]
    tied = len(ends) == 2 and ends[0].weight is ends[1].weight
    for module in ends[: 1 if tied else 2]:
        swap(model, names[module], quantized(names[module], module.weight, parse_scheme(scheme)))
    if tied:
        tie(model, names[head], names[embedding])
    put_plain_weights_first(model)
    return [names[module] for module in ends]
