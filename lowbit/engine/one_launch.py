"""The small decode steps of a chain in one launch (ops/decode_step.py).

    embed, squares, all layers, head {/ rms}

An engine uses it for the steps for which it was measured to be faster (`persistent_step=None`), or wherever it can
(`persistent_step=True`). It needs a chain (chain.py). The reasons why a model's steps are launches are in the engine's report.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from lowbit.engine.cache import Cache
from lowbit.engine.chain import Chain, ChainLayer, Gamma
from lowbit.engine.decoder import Decoder, DecoderLayer
from lowbit.engine.product import Dense, Packed
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
    decode_step_refusals,
    faster_contexts,
    head_refusals,
)
from lowbit.ops.elementwise import EmbeddingTable


class OneLaunch:
    """Steps of a chain in one launch. `contexts`: the numbers of tokens of the steps that it computes, and the longest context
    of each."""

    def __init__(self, launch: DecodeStepLaunch, chain: Chain, contexts: dict[int, int]) -> None:
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
    decoder: Decoder, chain: Chain | tuple[str, ...], table: Tensor | EmbeddingTable, kv: KVScheme, *, measured: bool = False
) -> OneLaunch | tuple[str, ...]:  # fmt: skip
    """Returns the launch of a chain's steps, or the reasons why there is none. `table`: the decoder's embedding. `measured`:
    only for steps for which it was measured to be faster than the launches."""
    if not isinstance(chain, Chain):
        return chain
    shapes = {dataclasses.replace(decoder.attention_shape(spec), window=0) for spec in decoder.layers}
    if len(shapes) > 1:
        return ("its layers have several attention shapes, one launch takes one",)
    (shape,) = shapes
    layers = [_layer(decoder, *each) for each in zip(decoder.layers, chain.links, chain.after, strict=True)]
    ends, device = _ends(decoder, chain, table), layers[0].mlp_gamma.device
    refusals = decode_step_refusals(layers, ends, shape, chain.dtype, kv, device)
    if refusals:
        return refusals
    contexts = faster_contexts(layers, ends, shape, device) if measured else dict.fromkeys(TOKENS, UNLIMITED)
    if not contexts:
        size, gpu = _layer_megabytes(layers), machine_of(device).product
        return (f"it was not measured to be faster for layers of {size:.0f} MB on {gpu} (persistent_step=True uses it)",)
    launch = DecodeStepLaunch(layers, ends, shape, chain.dtype, kv, chain.gated, decoder.eps, contexts)
    return OneLaunch(launch, chain, contexts)


def _layer_megabytes(layers: list[StepLayer]) -> float:
    return sum(w.nbytes for w in layers[0].products) / 1e6


def _layer(decoder: Decoder, spec: DecoderLayer, link: ChainLayer, after: Gamma) -> StepLayer:
    qkv, o, gate_up, down = link.qkv, link.o, link.gate_up, link.down
    return StepLayer(
        (qkv.weight, o.weight, gate_up.weight, down.weight),
        (qkv.bias, o.bias, gate_up.bias, down.bias),
        (link.before_attention.factor, link.before_mlp.factor),
        link.before_mlp.values * link.before_mlp.factor,
        after.values * after.factor,
        decoder.ropes[spec.rope].to(link.before_mlp.values.device),
        spec.q_gamma,
        spec.k_gamma,
        spec.sinks,
        spec.window,
    )


def _ends(decoder: Decoder, chain: Chain, table: Tensor | EmbeddingTable) -> StepEnds:
    first, head = chain.links[0].before_attention, chain.head
    gamma = first.values * first.factor
    if not isinstance(head, Packed | Dense) or head_refusals(head.weight, chain.dtype):
        return StepEnds(table, decoder.embedding_scale, gamma)
    factor = chain.after[-1].factor
    return StepEnds(table, decoder.embedding_scale, gamma, head.weight, head.bias, factor)
