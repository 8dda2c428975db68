"""The decode step of up to 64 tokens in five launches per layer: norm, gate and residual are epilogues of GEMMs
(ops/fused_gemm.py).

    embed, squares | qkv {/ rms}  attention  o {h += y; h * gamma; squares} | gate-up {/ rms; gate}  down {as o} | ..

With several ranks o and down are products alone, and their sums, residual and gamma a launch more: seven in a layer
(Ranks.added).

x is not normalised between two products. The sums of squares of the rows are passed to the next product, which divides by the
rms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.engine.decoder import Decoder, ProductName
from lowbit.engine.lora import LoraStep
from lowbit.engine.product import Dense, Packed, Product
from lowbit.hardware.machine import features_of
from lowbit.kernels.choose.fused_gemm import CHAIN_TOKENS
from lowbit.kernels.choose.tiles import RING_TOKENS, SMALL_TOKENS
from lowbit.ops.elementwise import EmbeddingTable, add_norm, embed_norm_squares
from lowbit.ops.fused_gemm import Gated, chain_refusals, factor_of, norm_gemm, residual_gemm
from lowbit.ops.lora import LoraSums
from lowbit.ops.ranks import Ranks
from lowbit.pack.fragment import ROW_BLOCK


@dataclass(frozen=True)
class Gamma:
    """The weight of a norm: gamma [H] with its offset, and the power of two that keeps h * gamma in the range of x's dtype."""

    values: Tensor
    factor: float

    @classmethod
    def of(cls, gamma: Tensor, offset: float, dtype: torch.dtype) -> Gamma:
        values = gamma.float() + offset
        return cls(values, factor_of(values, dtype))


class LayerLora(NamedTuple):
    """The adapters of a step's rows, and the number of a layer."""

    step: LoraStep
    layer: int


@dataclass(frozen=True)
class ChainLayer:
    """The products of a layer, and the weights of the norms before attention and before the MLP."""

    qkv: Packed | Dense
    o: Packed | Dense
    gate_up: Packed | Dense
    down: Packed | Dense
    before_attention: Gamma
    before_mlp: Gamma


class Chain:
    """The decode step of up to `most` tokens."""

    def __init__(
        self, decoder: Decoder, links: Sequence[ChainLayer], head: Product, dtype: torch.dtype, ranks: Ranks | None = None
    ) -> None:  # fmt: skip
        self.decoder, self.links, self.head, self.dtype, self.ranks = decoder, links, head, dtype, ranks
        self.most = most_tokens(links)
        assert decoder.activation != "relu"
        self.gated: Gated = decoder.activation
        final = Gamma.of(decoder.final_gamma, decoder.norm_offset, dtype)
        # The norm after each layer's MLP: the next layer's first one, or the final norm.
        self.after = [*(link.before_attention for link in links[1:]), final]

    def step(
        self, tokens: Tensor, rows: Tensor | None, table: Tensor | EmbeddingTable, attend: Callable[[int, Tensor], Tensor],
        lora: LoraStep | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns logits [B, V] after the tokens of `rows` (None: all tokens), without a soft cap. attend(i, qkv) computes the
        attention of layer i. lora: adapters of the rows.
        """
        d, first = self.decoder, self.links[0].before_attention
        h, x, squares = embed_norm_squares(
            tokens, rows, table, first.values, self.dtype, scale=d.embedding_scale, factor=first.factor
        )
        for i, link in enumerate(self.links):
            own = None if lora is None else LayerLora(lora, i)
            attended = attend(i, self._normed(x, link.qkv, squares, link.before_attention, "none", own, "qkv"))
            x, squares = self._added(attended, link.o, h, link.before_mlp, 0, own, "o")
            y = self._normed(x, link.gate_up, squares, link.before_mlp, self.gated, own, "gate_up")
            x, squares = self._added(y, link.down, h, self.after[i], 1, own, "down")
        return self.logits(h, x, squares)

    def logits(self, h: Tensor, x: Tensor, squares: Tensor) -> Tensor:
        """Returns logits [B, V] of h after all layers, without a soft cap; x and squares are those that the last product
        returned with h."""
        d = self.decoder
        if isinstance(self.head, Packed | Dense) and not _refusals(self.head, len(h), self.dtype):
            return self._gathered(self._normed(x, self.head, squares, self.after[-1]))
        return self._gathered(self.head(add_norm(h, None, d.final_gamma, d.eps, offset=d.norm_offset)))

    def _normed(
        self, x: Tensor, w: Packed | Dense, squares: Tensor, gamma: Gamma, gated: Gated = "none",
        lora: LayerLora | None = None, name: ProductName = "qkv",
    ) -> Tensor:  # fmt: skip
        norm = {"width": self.decoder.hidden, "eps": self.decoder.eps, "factor": gamma.factor}
        sums, bias = _adapters(lora, name, x, w.bias, squares=squares, **norm)
        return norm_gemm(x, w.weight, squares, bias, gated=gated, lora=sums, **norm)  # type: ignore[arg-type]

    def _gathered(self, logits: Tensor) -> Tensor:
        return logits if self.ranks is None else self.ranks.gathered(logits, self.decoder.vocab)

    def _added(
        self, x: Tensor, w: Packed | Dense, h: Tensor, gamma: Gamma, phase: int, lora: LayerLora | None, name: ProductName
    ) -> tuple[Tensor, Tensor]:
        """h += the product, of all ranks, which go without adapters; phases as in `Ranks.total`."""
        if self.ranks is not None:
            return self.ranks.added(w(x), h, gamma.values, gamma.factor, phase)
        sums, bias = _adapters(lora, name, x, w.bias)
        return residual_gemm(x, w.weight, h, gamma.values, bias, factor=gamma.factor, lora=sums)


def _adapters(
    lora: LayerLora | None, name: ProductName, x: Tensor, bias: Tensor | None, **norm: Any
) -> tuple[LoraSums | None, Tensor | None]:  # fmt: skip
    """Returns what the epilogue of a product adds: sums of adapters and the bias, or both as one bias of tokens."""
    if lora is None:
        return None, bias
    sums = lora.step.sums(lora.layer, name, x, **norm)
    return sums, bias if sums is not None else lora.step.bias(lora.layer, name, x, bias, **norm)


def most_tokens(links: Sequence[ChainLayer]) -> int:
    """Returns the maximum number of tokens of a chain on its device.

    With wgmma it is the tokens of a tile of the large-M kernel, or of the small-M kernel for 16-bit weights. The latter are
    faster than eight launches with cuBLAS: 720 against 797 us at one token, 824 against 892 us at 16 (four layers of
    Llama-3-8B's shape with its LM head, H200, 2026-11-23). Without wgmma it is the 8 tokens of one mma.sync. With 16 tokens the
    small-M kernel needs so many registers that it does not overlap with the next kernel, and eight launches are faster (2765
    against 2902 us, Llama-3-8B's shape in w4a16_g128, H200, 2026-11-22).
    """
    products = [product for link in links for product in (link.qkv, link.o, link.gate_up, link.down)]
    device = links[0].before_mlp.values.device
    if device.type != "cuda" or "wgmma" not in features_of(device):
        return SMALL_TOKENS
    return RING_TOKENS if any(isinstance(product, Dense) for product in products) else CHAIN_TOKENS


def _refusals(product: Packed | Dense, m: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns the reasons why a product cannot be in a chain of m tokens; empty if it can."""
    if isinstance(product, Dense) and product.weight.values.device.type != "cuda":
        return ("weights of 16 bits are torch's to multiply on a CPU",)
    return chain_refusals(product.weight, m, dtype)


def _pairs(gate_up: Packed | Dense) -> bool:
    """True if the product's epilogue can multiply gate by up."""
    return gate_up.weight.shape[0] % ROW_BLOCK == 0 if isinstance(gate_up, Dense) else gate_up.alternates


def chain_of(
    decoder: Decoder, products: Sequence[Sequence[Product]], head: Product, dtype: torch.dtype, ranks: Ranks | None = None
) -> Chain | tuple[str, ...]:
    """Returns the chain of a decoder whose layers have the products (qkv, o, gate-up, down), or the reasons why there is
    none.
    """
    links, reasons = [], list[str]()
    if decoder.final_bias is not None:
        reasons.append("its norms are LayerNorms, whose means no product subtracts at its end")
    if not decoder.gated or decoder.activation == "relu":
        what = f"{decoder.activation} {'of a gate' if decoder.gated else 'without a gate'}"
        reasons.append(f"its MLP is {what}, known are gates of silu and gelu_tanh")
    if reasons:
        return tuple(reasons)
    for spec, layer in zip(decoder.layers, products, strict=True):
        if spec.after_attention_gamma is not None:
            reasons.append("norms after attention and MLP stand between the products")
        packed = [product for product in layer if isinstance(product, Packed | Dense)]
        for product in packed:
            reasons += _refusals(product, 1, dtype)
        if len(packed) < len(layer) or not _pairs(packed[2]):
            reasons.append(
                "its products, gate and up in one, are not all weights in the order of the tensor cores or of 16 bits"
            )
        else:
            before, mlp = (Gamma.of(gamma, decoder.norm_offset, dtype) for gamma in (spec.input_gamma, spec.mlp_gamma))
            links.append(ChainLayer(packed[0], packed[1], packed[2], packed[3], before, mlp))
    return tuple(dict.fromkeys(reasons)) or Chain(decoder, links, head, dtype, ranks)
