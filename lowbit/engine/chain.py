"""The step of up to 64 tokens in five launches a layer: norm, gate and residual at the ends of products (ops/fused_gemm.py).

    embed, squares | qkv {/ rms}  attention  o {h += y; h * gamma; squares} | gate-up {/ rms; gate}  down {as o} | ..

x is not normalised between two products: the sum of a row's squares goes with it, and the next product divides by its rms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.engine.family import Decoder
from lowbit.engine.product import Dense, Packed, Product
from lowbit.hardware.machine import features_of
from lowbit.kernels.choose.fused_gemm import CHAIN_TOKENS
from lowbit.kernels.choose.gemm import RING_TOKENS, SMALL_TOKENS
from lowbit.ops.elementwise import EmbeddingTable, add_norm, embed_norm_squares
from lowbit.ops.fused_gemm import Gated, chain_refusals, factor_of, norm_gemm, residual_gemm
from lowbit.pack.fragment import STRIP


@dataclass(frozen=True)
class Gamma:
    """What follows a norm: gamma [H] with its offset, and the power of two that keeps h * gamma in the range of x's type."""

    values: Tensor
    factor: float

    @classmethod
    def of(cls, gamma: Tensor, offset: float, dtype: torch.dtype) -> Gamma:
        values = gamma.float() + offset
        return cls(values, factor_of(values, dtype))


@dataclass(frozen=True)
class ChainLayer:
    """The products of a layer, and the norms before attention and before the MLP."""

    qkv: Packed | Dense
    o: Packed | Dense
    gate_up: Packed | Dense
    down: Packed | Dense
    before_attention: Gamma
    before_mlp: Gamma


class Chain:
    """A decoder's step of up to `most` tokens."""

    def __init__(self, decoder: Decoder, links: Sequence[ChainLayer], head: Product, dtype: torch.dtype) -> None:
        self.decoder, self.links, self.head, self.dtype = decoder, links, head, dtype
        self.most = most_tokens(links)
        assert decoder.activation != "relu"
        self.gated: Gated = decoder.activation
        final = Gamma.of(decoder.final_gamma, decoder.norm_offset, dtype)
        # The norm that follows each layer's MLP: that before the next one's attention, or the last.
        self.after = [*(link.before_attention for link in links[1:]), final]

    def step(
        self, tokens: Tensor, rows: Tensor, table: Tensor | EmbeddingTable, attend: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Logits [B, V] after the tokens of `rows`, before a soft cap; attend(i, qkv) is the attention of layer i."""
        d, first = self.decoder, self.links[0].before_attention
        h, x, squares = embed_norm_squares(
            tokens, rows, table, first.values, self.dtype, scale=d.embedding_scale, factor=first.factor
        )
        for i, link in enumerate(self.links):
            attended = attend(i, self._normed(x, link.qkv, squares, link.before_attention))
            x, squares = self._added(attended, link.o, h, link.before_mlp)
            y = self._normed(x, link.gate_up, squares, link.before_mlp, self.gated)
            x, squares = self._added(y, link.down, h, self.after[i])
        if isinstance(self.head, Packed | Dense) and not _refusals(self.head, len(h), self.dtype):
            return self._normed(x, self.head, squares, self.after[-1])
        return self.head(add_norm(h, None, d.final_gamma, d.eps, offset=d.norm_offset))

    def _normed(self, x: Tensor, w: Packed | Dense, squares: Tensor, gamma: Gamma, gated: Gated = "none") -> Tensor:
        d = self.decoder
        return norm_gemm(x, w.weight, squares, w.bias, width=d.hidden, eps=d.eps, gated=gated, factor=gamma.factor)

    def _added(self, x: Tensor, w: Packed | Dense, h: Tensor, gamma: Gamma) -> tuple[Tensor, Tensor]:
        return residual_gemm(x, w.weight, h, gamma.values, w.bias, factor=gamma.factor)


def most_tokens(links: Sequence[ChainLayer]) -> int:
    """Rows of a step that a chain computes on its device: those of a tile of the wgmma kernel, or of the ring kernel where
    there are weights of 16 bits (faster than eight launches by cuBLAS at all of them: 720 and 797 us at one, 824 and 892 at 16,
    four layers of Llama-3-8B's shape with its head, H200, 2026-11-23). Without wgmma those of one mma.sync: with 16 the ring
    kernel takes so many registers that nothing of the next kernel's start overlaps, and eight launches are faster (2765 us
    against 2902, Llama-3-8B's shape in w4a16_g128, H200, 2026-11-22)."""
    products = [product for link in links for product in (link.qkv, link.o, link.gate_up, link.down)]
    device = links[0].before_mlp.values.device
    if device.type != "cuda" or "wgmma" not in features_of(device):
        return SMALL_TOKENS
    return RING_TOKENS if any(isinstance(product, Dense) for product in products) else CHAIN_TOKENS


def _refusals(product: Packed | Dense, m: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Why a product is no part of a step of m tokens."""
    if isinstance(product, Dense) and product.weight.values.device.type != "cuda":
        return ("weights of 16 bits are torch's to multiply on a CPU",)
    return chain_refusals(product.weight, m, dtype)


def _pairs(gate_up: Packed | Dense) -> bool:
    """Whether a product can multiply gate by up at its end."""
    return gate_up.weight.shape[0] % STRIP == 0 if isinstance(gate_up, Dense) else gate_up.alternates


def chain_of(
    decoder: Decoder, products: Sequence[Sequence[Product]], head: Product, dtype: torch.dtype
) -> Chain | tuple[str, ...]:
    """The chain of a decoder whose layers have the products (qkv, o, gate-up, down); else the reasons why there is none."""
    links, reasons = [], list[str]()
    if decoder.final_bias is not None:
        reasons.append("its norms are LayerNorms, whose means no product subtracts at its end")
    if not decoder.gated or decoder.activation == "relu":
        what = f"{decoder.activation} {'of a gate' if decoder.gated else 'without a gate'}"
        reasons.append(f"its MLP is {what}, known are gates of silu and gelu_tanh")
    if reasons:
        return tuple(reasons)
    for parts, layer in zip(decoder.layers, products, strict=True):
        if parts.after_attention_gamma is not None:
            reasons.append("norms after attention and MLP stand between the products")
        packed = [product for product in layer if isinstance(product, Packed | Dense)]
        for product in packed:
            reasons += _refusals(product, 1, dtype)
        if len(packed) < len(layer) or not _pairs(packed[2]):
            reasons.append(
                "its products, gate and up in one, are not all weights in the order of the tensor cores or of 16 bits"
            )
        else:
            before, mlp = (Gamma.of(gamma, decoder.norm_offset, dtype) for gamma in (parts.input_gamma, parts.mlp_gamma))
            links.append(ChainLayer(packed[0], packed[1], packed[2], packed[3], before, mlp))
    return tuple(dict.fromkeys(reasons)) or Chain(decoder, links, head, dtype)
