"""The computation of a decoder as data, from which a decode program is built. The weights stay in the model's modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.reference.elementwise import Gate
from lowbit.nn.embedding import QuantEmbedding
from lowbit.ops.elementwise import EmbeddingTable

ProductName = Literal["qkv", "o", "gate_up", "down"]
PRODUCTS: tuple[ProductName, ...] = get_args(ProductName)
"""The products of a decoder layer, in order of computation."""


@dataclass(frozen=True, eq=False)
class DenseMLP:
    """down(activation(gate) * up), or down(activation(up)) without a gate; `Decoder` has the activation.

    gate_up: the modules whose outputs are concatenated to gate and up. It is one module if the checkpoint has them fused, the
    up module in an MLP without a gate, and empty after an engine replaced them by an `AlternatingMLP`.
    """

    gate_up: tuple[nn.Module, ...]
    down: nn.Module


@dataclass(frozen=True, eq=False)
class ExpertsMLP:
    """A mixture of experts, computed by `engine.experts.ExpertMLP`. `block` is Transformers' module with router and experts;
    `router` is the module in it that chooses the experts."""

    block: nn.Module
    router: nn.Module


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """A decoder layer: its module, and the modules and weights in it.

    qkv: the modules whose outputs are concatenated to q, k, v; one module if the checkpoint has them fused. Gammas [hidden] are
    the weights of norms, and biases [hidden] belong to LayerNorms: `input_gamma` of the norm before attention, `mlp_gamma`
    before the MLP, `after_attention_gamma` and `after_mlp_gamma` after them, if any. q_gamma and k_gamma [head_dim] are the
    weights of norms of each head of q and k. window: tokens that a token attends to, itself included; 0 for all. rope: index
    into `Decoder.ropes`. qk_norms: norms of q and of k over all heads together, if any. sinks [heads]: attention sinks, if any;
    for each head, a score that takes part in the softmax and has no value.
    """

    module: nn.Module
    qkv: tuple[nn.Module, ...]
    o: nn.Module
    mlp: DenseMLP | ExpertsMLP
    input_gamma: Tensor
    input_bias: Tensor | None
    mlp_gamma: Tensor
    mlp_bias: Tensor | None
    after_attention_gamma: Tensor | None
    after_mlp_gamma: Tensor | None
    q_gamma: Tensor | None
    k_gamma: Tensor | None
    window: int
    rope: int
    qk_norms: tuple[nn.Module, ...] = ()
    sinks: Tensor | None = None

    def modules(self, product: ProductName) -> tuple[nn.Module, ...]:
        """The modules of a product; experts have no gate_up and no down."""
        gate_up, down = (self.mlp.gate_up, (self.mlp.down,)) if isinstance(self.mlp, DenseMLP) else ((), ())
        return {"qkv": self.qkv, "o": (self.o,), "gate_up": gate_up, "down": down}[product]


@dataclass(frozen=True, eq=False)
class Decoder:
    """The computation of a decoder.

    The embedding is multiplied by `embedding_scale` (in the model's dtype), and the row of its position in `position_table`
    [positions, hidden] is added, if there is one. Each layer computes h += attention(norm(h)), h += mlp(norm(h)), with norms of
    both outputs where the layer has them. Final norm and head follow. Norms are `ops.elementwise.add_norm` with `eps` and
    `norm_offset`. `gated`: the MLPs have a gate. `ropes`: float32 [positions, rotary_dim], cosines of half as many angles, then
    their sines. Logits x become final_softcap * tanh(x / final_softcap), unless final_softcap is 0.
    """

    family: str
    hidden: int
    vocab: int
    positions: int
    eps: float
    norm_offset: float
    embedding: nn.Module
    embedding_scale: float
    position_table: Tensor | None
    layers: tuple[DecoderLayer, ...]
    final_gamma: Tensor
    final_bias: Tensor | None
    head: nn.Module
    tied: bool
    activation: Gate
    gated: bool
    attention: AttentionShape
    ropes: tuple[Tensor, ...]
    final_softcap: float

    @property
    def table(self) -> Tensor | EmbeddingTable:
        """Returns the embedding for `ops.elementwise.embed_norm`: in 16 or 32 bits, or in 8 bits as stored. Embeddings of other
        bit widths are dequantized at each call.
        """
        module = self.embedding
        if not isinstance(module, QuantEmbedding):
            assert isinstance(module.weight, Tensor)
            return module.weight.detach()
        if str(module.scheme) == "w8a16":
            return EmbeddingTable(module.weight_packed.data, module.weight_scale.data[:, 0].contiguous())
        ids = torch.arange(self.vocab, device=module.weight_packed.device)
        return torch.cat([module(part) for part in ids.split(4096)])

    def attention_shape(self, layer: DecoderLayer) -> AttentionShape:
        """Returns the attention shape of a layer: the model's, with the layer's window."""
        return replace(self.attention, window=layer.window)
