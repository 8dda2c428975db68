"""The small decode steps of a chain in one launch (ops/decode_step.py).

    embed, squares, all layers, head {/ rms}

An engine uses it for the steps for which it was measured to be faster (`persistent_step=None`), or wherever it can
(`persistent_step=True`). It needs a chain (chain.py), or layers of quantized experts (`ExpertSteps`). The reasons why a model's
steps are launches are in the engine's report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.engine.cache import Cache
from lowbit.engine.chain import Chain, ChainLayer, Gamma
from lowbit.engine.decode_runner import reach_of
from lowbit.engine.decoder import Decoder, DecoderLayer
from lowbit.engine.experts import ExpertMLP, PackedProducts
from lowbit.engine.product import Dense, Packed, Product
from lowbit.engine.slots import Slots
from lowbit.formats.kv import KVScheme
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.attention import PAGE
from lowbit.kernels.choose.decode_step import TOKENS
from lowbit.ops.decode_step import (
    UNLIMITED,
    DecodeStepLaunch,
    StepEnds,
    StepLayer,
    StepRouter,
    decode_step_refusals,
    faster_contexts,
    head_refusals,
)
from lowbit.ops.elementwise import EmbeddingTable, add_norm
from lowbit.ops.fused_gemm import chain_refusals
from lowbit.pack import ExpertWeight

if TYPE_CHECKING:
    from lowbit.engine.program import Layer
    from lowbit.kernels.parts.epilogue import Gate


@dataclass(frozen=True)
class ExpertLayer:
    """A layer whose MLP are experts, as one launch computes it."""

    qkv: Packed | Dense
    o: Packed | Dense
    gate_up: ExpertWeight
    down: ExpertWeight
    router: StepRouter
    before_attention: Gamma
    before_mlp: Gamma


class ExpertSteps:
    """The steps of a decoder whose MLPs are experts, which one launch computes as it computes those of a chain."""

    def __init__(self, decoder: Decoder, links: Sequence[ExpertLayer], head: Product, dtype: torch.dtype) -> None:
        self.decoder, self.links, self.head, self.dtype = decoder, links, head, dtype
        assert decoder.activation != "relu"
        self.gated: Gate = decoder.activation
        final = Gamma.of(decoder.final_gamma, decoder.norm_offset, dtype)
        self.after = [*(link.before_attention for link in links[1:]), final]

    def logits(self, h: Tensor, x: Tensor, squares: Tensor) -> Tensor:
        """Returns logits [B, V] of h after all layers, without a soft cap."""
        d = self.decoder
        return self.head(add_norm(h, None, d.final_gamma, d.eps, offset=d.norm_offset))


def expert_steps_of(
    decoder: Decoder, layers: Sequence[Layer], head: Product, dtype: torch.dtype
) -> ExpertSteps | tuple[str, ...]:
    """Returns the steps of a decoder whose MLPs are experts, or the reasons why no launch computes them."""
    reasons = []
    if decoder.final_bias is not None or any(layer.spec.input_bias is not None for layer in layers):
        reasons.append("its norms are LayerNorms, whose means no product subtracts at its end")
    for layer in layers:
        reasons += _expert_refusals(decoder, layer, dtype)
    if reasons:
        return tuple(dict.fromkeys(reasons))
    return ExpertSteps(decoder, [_expert_layer(decoder, layer, dtype) for layer in layers], head, dtype)


def _expert_refusals(decoder: Decoder, layer: Layer, dtype: torch.dtype) -> Iterator[str]:
    spec, experts = layer.spec, layer.experts
    if spec.qk_norms:
        yield "norms of whole q and k stand before attention"
    if spec.after_attention_gamma is not None or spec.after_mlp_gamma is not None:
        yield "norms after attention and MLP stand between the products"
    for product in () if spec.qk_norms else (layer.qkv, layer.o):
        if not isinstance(product, Packed | Dense):
            yield "its products are not all weights in the order of the tensor cores or of 16 bits"
        else:
            yield from chain_refusals(product.weight, 1, dtype)
    if experts is None:
        yield "some of its MLPs are experts and some are not"
    else:
        yield from _mlp_refusals(decoder, experts)


def _mlp_refusals(decoder: Decoder, experts: ExpertMLP) -> Iterator[str]:
    products, router = experts.products, experts.router
    if experts.shared is not None:
        yield "it has a shared expert"
    if not isinstance(products, PackedProducts) or router is None:
        yield "its experts are not quantized, or not on a GPU"
        return
    if not isinstance(products.gate_up, ExpertWeight) or not isinstance(products.down, ExpertWeight):
        yield "its experts take activations in 8 bits"
    if any(part.input_transform.parts.changes_channels for part in (products.first, products.second)):
        yield "its experts transform their inputs"
    if products.function != decoder.activation:
        yield f"the gate of its experts is {products.function}"
    if products.gate_up_bias is not None or products.down_bias is not None or router.bias is not None:
        yield "its experts or their router have biases"
    rule = router.rule
    if rule.score != "softmax" or rule.groups > 1 or rule.scale != 1 or rule.epsilon:
        yield f"its router is {rule}, known are a softmax over all or the chosen experts"


def _expert_layer(decoder: Decoder, layer: Layer, dtype: torch.dtype) -> ExpertLayer:
    qkv, o, experts, spec = layer.qkv, layer.o, layer.experts, layer.spec
    assert isinstance(qkv, Packed | Dense) and isinstance(o, Packed | Dense) and experts is not None
    products, router = experts.products, experts.router
    assert isinstance(products, PackedProducts) and router is not None
    assert isinstance(products.gate_up, ExpertWeight) and isinstance(products.down, ExpertWeight)
    rule = router.rule
    of_step = StepRouter(router.weight, rule.top_k, rule.normalize or rule.softmax_over_selected)
    before, mlp = (Gamma.of(gamma, decoder.norm_offset, dtype) for gamma in (spec.input_gamma, spec.mlp_gamma))
    return ExpertLayer(qkv, o, products.gate_up, products.down, of_step, before, mlp)


class OneLaunch:
    """Steps of a chain in one launch. `contexts`: the numbers of tokens of the steps that it computes, and the longest context
    length of each for which a step is captured (decode_runner.py). The launch itself takes any context: it splits attention by
    the positions that it reads, so its time depends on these alone."""

    def __init__(self, launch: DecodeStepLaunch, chain: Chain | ExpertSteps, contexts: dict[int, int]) -> None:
        self.launch, self.chain = launch, chain
        self.contexts = {m: context for m, context in contexts.items() if m in launch.tokens}

    @property
    def status(self) -> Tensor:
        """int32 [1] on the device; not 0 after a step that failed (`failure`)."""
        return self.launch.status

    @staticmethod
    def failure(status: int) -> str:
        """Returns a message for a status that is not 0."""
        return DecodeStepLaunch.failure(status)

    def computes(self, count: int, slots: Slots, longest: int) -> bool:
        """Returns whether a step of `count` tokens with contexts of up to `longest` tokens (0: a full page table) is one
        launch."""
        return (longest or slots.tables.shape[1] * PAGE) <= self.contexts.get(count, 0)

    def step(self, cache: Cache, slots: Slots, rows: Tensor) -> Tensor:
        """Returns logits [B, V] of the slots `rows`, without a soft cap. The first call with a cache allocates memory, so it
        precedes a capture."""
        if not self.launch.is_bound(cache.layers):
            self.launch.bind(cache.layers)
        h, x, squares, logits = self.launch(slots.tokens, slots.tables, slots.positions, rows)
        return self.chain.logits(h, x, squares) if logits is None else logits

    def __str__(self) -> str:
        ends = "" if self.launch.ends.head is not None else ", then the LM head"
        limits = [
            f"{m}{'' if context == UNLIMITED else f' (contexts up to {context:,})'}" for m, context in self.contexts.items()
        ]
        return f"steps of {', '.join(limits)} tokens: one launch{ends}"


def one_launch_of(
    decoder: Decoder, chain: Chain | ExpertSteps | tuple[str, ...], table: Tensor | EmbeddingTable, kv: KVScheme, *,
    measured: bool = False,
) -> OneLaunch | tuple[str, ...]:  # fmt: skip
    """Returns the launch of the steps of a chain or of experts, or the reasons why there is none. `table`: the decoder's
    embedding. `measured`: only for steps for which it was measured to be faster than the launches."""
    if isinstance(chain, tuple):
        return chain
    shapes = {dataclasses.replace(decoder.attention_shape(spec), window=0) for spec in decoder.layers}
    if len(shapes) > 1:
        return ("its layers have several attention shapes, one launch takes one",)
    (shape,) = shapes
    links: Sequence[ChainLayer | ExpertLayer] = chain.links
    layers = [_layer(decoder, *each) for each in zip(decoder.layers, links, chain.after, strict=True)]
    ends, device = _ends(decoder, chain, table), layers[0].mlp_gamma.device
    refusals = decode_step_refusals(layers, ends, shape, chain.dtype, kv, device)
    if refusals:
        return refusals
    contexts = dict.fromkeys(TOKENS, UNLIMITED)
    if measured:  # one captured step computes a measured context and all others up to its length
        contexts = {m: reach_of(context) for m, context in faster_contexts(layers, ends, shape, device).items()}
    if not contexts:
        size, gpu = _layer_megabytes(layers), machine_of(device).product
        return (f"it was not measured to be faster for layers of {size:.0f} MB on {gpu} (persistent_step=True uses it)",)
    launch = DecodeStepLaunch(layers, ends, shape, chain.dtype, kv, chain.gated, decoder.eps, contexts)
    return OneLaunch(launch, chain, contexts)


def _layer_megabytes(layers: list[StepLayer]) -> float:
    """Megabytes of weights that a step of one token reads in the first layer."""
    layer = layers[0]
    share = 1.0 if layer.router is None else layer.router.top_k / len(layer.router.weight)
    return sum(w.nbytes * (share if isinstance(w, ExpertWeight) else 1.0) for w in layer.products) / 1e6


def _layer(decoder: Decoder, spec: DecoderLayer, link: ChainLayer | ExpertLayer, after: Gamma) -> StepLayer:
    gate_up, down, router = link.gate_up, link.down, None
    if isinstance(link, ExpertLayer):
        router = link.router
    mlp = [part if isinstance(part, ExpertWeight) else part.weight for part in (gate_up, down)]
    biases = [None if isinstance(part, ExpertWeight) else part.bias for part in (gate_up, down)]
    return StepLayer(
        (link.qkv.weight, link.o.weight, mlp[0], mlp[1]),
        (link.qkv.bias, link.o.bias, biases[0], biases[1]),
        (link.before_attention.factor, link.before_mlp.factor),
        link.before_mlp.values * link.before_mlp.factor,
        after.values * after.factor,
        decoder.ropes[spec.rope].to(link.before_mlp.values.device),
        spec.q_gamma,
        spec.k_gamma,
        spec.sinks,
        spec.window,
        router,
    )


def _ends(decoder: Decoder, chain: Chain | ExpertSteps, table: Tensor | EmbeddingTable) -> StepEnds:
    first, head = chain.links[0].before_attention, chain.head
    gamma = first.values * first.factor
    if not isinstance(head, Packed | Dense) or head_refusals(head.weight, chain.dtype):
        return StepEnds(table, decoder.embedding_scale, gamma)
    factor = chain.after[-1].factor
    return StepEnds(table, decoder.embedding_scale, gamma, head.weight, head.bias, factor)
