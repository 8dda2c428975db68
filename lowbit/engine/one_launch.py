"""The small decode steps of a chain with all layers in one launch (ops/decode_step.py), for an engine made with
`persistent_step=True`.

    embed, squares | all layers | head {/ rms}

It needs a chain (chain.py) whose layers are alike: one form of weights, one attention shape. The reasons why a model has none
are in the engine's report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lowbit.engine.cache import Cache
from lowbit.engine.chain import Chain, ChainLayer, Gamma
from lowbit.engine.decoder import Decoder, DecoderLayer
from lowbit.engine.product import Packed
from lowbit.engine.slots import Slots
from lowbit.formats.kv import KVScheme
from lowbit.ops.decode_step import DecodeStepLaunch, StepLayer, decode_step_refusals

AllLayers = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Adds all layers to h in place, given h, x and squares; returns x and squares for the head."""


class OneLaunch:
    """All layers of a chain in one launch, for the numbers of tokens in `tokens`."""

    def __init__(self, launch: DecodeStepLaunch) -> None:
        self.launch, self.tokens = launch, launch.tokens

    @property
    def status(self) -> Tensor:
        """int32 [1] on the device; not 0 after a step that failed (`failure`)."""
        return self.launch.status

    @staticmethod
    def failure(status: int) -> str:
        """Returns a message for a status that is not 0."""
        return DecodeStepLaunch.failure(status)

    def layers(self, cache: Cache, slots: Slots, rows: Tensor) -> AllLayers:
        """Returns the layers of a step of the slots `rows`. Its first call with a cache allocates memory, so it precedes a
        capture."""
        if not self.launch.is_bound(cache.layers):
            self.launch.bind(cache.layers)
        return lambda h, x, squares: self.launch(h, x, squares, slots.tables, slots.positions, rows)


def one_launch_of(decoder: Decoder, chain: Chain | tuple[str, ...], kv: KVScheme) -> OneLaunch | tuple[str, ...]:
    """Returns the launch of a chain's layers, or the reasons why there is none."""
    if not isinstance(chain, Chain):
        return chain
    shapes = {decoder.attention_shape(spec) for spec in decoder.layers}
    reasons = []
    if len(shapes) > 1:
        reasons.append("its layers have windows of several sizes, one launch takes one attention shape")
    if any(spec.sinks is not None for spec in decoder.layers):
        reasons.append("its attention has sinks")
    packed = [_packed(link) for link in chain.links]
    if not all(len(products) == 4 for products in packed):
        reasons.append("some of its weights have 16 bits, one launch takes quantized ones")
    if reasons:
        return tuple(reasons)
    layers = [
        _layer(decoder, *each) for each in zip(decoder.layers, chain.links, packed, chain.after, strict=True)
    ]  # fmt: skip
    (shape,) = shapes
    device = layers[0].mlp_gamma.device
    return decode_step_refusals(layers, shape, chain.dtype, kv, device) or OneLaunch(
        DecodeStepLaunch(layers, shape, chain.dtype, kv, chain.gated, decoder.eps)
    )


def _packed(link: ChainLayer) -> Sequence[Packed]:
    return [product for product in (link.qkv, link.o, link.gate_up, link.down) if isinstance(product, Packed)]


def _layer(decoder: Decoder, spec: DecoderLayer, link: ChainLayer, products: Sequence[Packed], after: Gamma) -> StepLayer:
    qkv, o, gate_up, down = products
    return StepLayer(
        (qkv.weight, o.weight, gate_up.weight, down.weight),
        (qkv.bias, o.bias, gate_up.bias, down.bias),
        (link.before_attention.factor, link.before_mlp.factor),
        link.before_mlp.values * link.before_mlp.factor,
        after.values * after.factor,
        decoder.ropes[spec.rope].to(link.before_mlp.values.device),
        spec.q_gamma,
        spec.k_gamma,
    )
