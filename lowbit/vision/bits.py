"""How many bits each layer gets, and the codes and scales that follow: what lowering needs to know beside the graph."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

from torch import Tensor

from lowbit.formats import PerChannel, Scheme, ZeroPoint, decode, int_format, parse_scheme
from lowbit.formats.conv import code_range
from lowbit.quantize import rtn
from lowbit.vision.graph import AveragePool, Conv, Graph, Input, MaxPool, Node, Sum, reads_codes
from lowbit.vision.observe import Range, Search


@dataclass(frozen=True)
class LayerBits:
    """Bits of a layer's weights and of the value it makes; only a value after ReLU can have 4."""

    weight: int
    output: int


@dataclass(frozen=True, eq=False)
class QuantWeight:
    """int8 codes [O, C, R, S] and float32 scales [O]: weight = codes * scale."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Quantization:
    """By name: bits of each convolution and sum, the scale of each value, the codes of each weight (second products too)."""

    bits: dict[str, LayerBits]
    scales: dict[str, float]
    weights: dict[str, QuantWeight]


def scheme_bits(scheme: str | Scheme) -> LayerBits:
    """The bits of a scheme's name: w8a8, w8a4, w4a8 or w4a4. Raises ValueError for any other scheme."""
    parsed = parse_scheme(scheme)
    sizes = (getattr(parsed.weight, "bits", 0), getattr(parsed.activation, "bits", 16))
    plain = parsed.granularity == PerChannel() and parsed.zero is ZeroPoint.NONE
    if parsed not in (parse_scheme(f"w{w}a{a}") for w, a in ((8, 8), (8, 4), (4, 8), (4, 4))) or not plain:
        raise ValueError(f"convolutions are quantized to w8a8, w8a4, w4a8 or w4a4 (a scale per output channel), not {scheme}")
    return LayerBits(*sizes)


def assign_bits(graph: Graph, scheme: str | Scheme, keep_int8: tuple[str, ...] = ()) -> dict[str, LayerBits]:
    """The bits of each convolution and sum of `graph` under a scheme; those of the weights say nothing of a sum.

    8-bit weights for what reads the images and what makes the result, as everywhere in the literature; 8 bits for weights and
    output of the layers named in `keep_int8`, and for values that only floating-point operations read. Raises ValueError for a
    name that is no convolution of the graph.
    """
    wanted = scheme_bits(scheme)
    made = {name: node for name, node in graph.nodes.items() if isinstance(node, (Conv, Sum))}
    unknown = sorted(set(keep_int8) - set(made))
    if unknown:
        raise ValueError(f"no convolution is called {unknown[0]!r}; they are {', '.join(made)}")
    images = {name for name, node in graph.nodes.items() if isinstance(node, Input)}
    readers, bits = graph.readers(), {}
    for name, node in made.items():
        if name in keep_int8:
            bits[name] = LayerBits(8, 8)
            continue
        weight = 8 if node.x in images or name == graph.output else wanted.weight
        for_codes = any(reads_codes(graph.nodes.get(reader)) for reader in readers[name])
        bits[name] = LayerBits(weight, wanted.output if node.relu and for_codes else 8)
    return bits


def storage_of(graph: Graph, bits: Mapping[str, LayerBits], name: str) -> str:
    """How the codes of the value `name` are stored: "u4" or "s8"."""
    node = graph.nodes[name]
    if isinstance(node, MaxPool):
        return storage_of(graph, bits, node.x)
    return "u4" if isinstance(node, (Conv, Sum)) and node.relu and bits[name].output == 4 else "s8"


def calibrate(graph: Graph, ranges: Mapping[str, Range], bits: Mapping[str, LayerBits], search: Search = "mse") -> Quantization:
    """Scales of values from what calibration saw, codes of weights by least squared error of each output channel."""
    scales: dict[str, float] = {}
    weights: dict[str, QuantWeight] = {}
    for name, node in graph.nodes.items():
        if isinstance(node, MaxPool) and node.x in scales:
            scales[name] = scales[node.x]  # the largest of some codes is one of them
        elif name in ranges:
            # Nothing of images and pooled features is clipped: their largest value may be what matters.
            _, highest = code_range(storage_of(graph, bits, name))
            how: Search = "max" if isinstance(node, (Input, AveragePool)) else search
            scales[name] = min(ranges[name].scale(highest, how), largest_scale(node, highest))
        if isinstance(node, Conv):
            weights[name] = quantize_weight(node.weight, bits[name].weight)
            if node.second is not None:
                weights[node.second.name] = quantize_weight(node.second.weight, bits[name].weight)
    return Quantization(dict(bits), scales, weights)


def largest_scale(node: Node, highest: int) -> float:
    """The scale with which codes end where the ReLU of a node does, infinity where it does not end."""
    return node.most / highest if isinstance(node, (Conv, Sum)) else math.inf


def mixed(graph: Graph, one: Quantization, other: Quantization, from_other: Container[str]) -> Quantization:
    """`one`, but for the layers named in `from_other`, whose bits, codes and scales are those of `other`."""
    bits, scales, weights = dict(one.bits), dict(one.scales), dict(one.weights)
    for name, node in graph.nodes.items():
        if isinstance(node, MaxPool) and node.x in scales:
            scales[name] = scales[node.x]
        elif isinstance(node, (Conv, Sum)) and name in from_other:
            bits[name], scales[name] = other.bits[name], other.scales[name]
            for conv in (node, node.second) if isinstance(node, Conv) else ():
                if conv is not None:
                    weights[conv.name] = other.weights[conv.name]
    return Quantization(bits, scales, weights)


def quantize_weight(weight: Tensor, bits: int) -> QuantWeight:
    """`weight` [O, C, R, S] in int8 codes of `bits` bits, the scale of each output channel by least squared error."""
    q = rtn(weight.flatten(1), Scheme(int_format(bits)), search="mse")
    codes = decode(q.codes, q.scheme.weight).char().reshape(weight.shape)
    return QuantWeight(codes, q.scale.reshape(-1))
