"""Bits per layer, weight codes and scales: the quantization of a graph, which lowering needs in addition to the graph."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

from torch import Tensor

from lowbit.formats import PerChannel, Scheme, ZeroPoint, decode, int_format, parse_scheme
from lowbit.formats.conv import code_range
from lowbit.quantize import rtn
from lowbit.vision.graph import AveragePool, Concat, Conv, Graph, Input, MaxPool, Node, Resize, Sum, reads_codes
from lowbit.vision.observe import Range, Search


@dataclass(frozen=True)
class LayerBits:
    """Bits of a layer's weights and of its output. Only the output of a ReLU can have 4 bits."""

    weight: int
    output: int


@dataclass(frozen=True, eq=False)
class QuantWeight:
    """int8 codes [O, C, R, S] and float32 scales [O]: weight = codes * scale."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Quantization:
    """Bits of each convolution and sum, scale of each value, codes of each weight, all by name."""

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
    """Returns the bits of each convolution and sum of `graph` under a scheme. Sums ignore the weight bits.

    Weights keep 8 bits in the layers that read the images or produce the result. Layers named in `keep_int8`, and values that
    only floating-point operations read, keep 8 bits too. Raises ValueError for a name that is not a convolution of the graph.
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
        weight = 8 if node.x in images or name in graph.outputs else wanted.weight
        for_codes = any(reads_codes(graph.nodes.get(reader)) for reader in readers[name])
        bits[name] = LayerBits(weight, wanted.output if node.relu and for_codes else 8)
    return bits


def storage_of(graph: Graph, bits: Mapping[str, LayerBits], name: str) -> str:
    """Returns the storage of the codes of the value `name`: "u4" or "s8"."""
    node = graph.nodes[name]
    if isinstance(node, (MaxPool, Resize)):
        return storage_of(graph, bits, node.x)
    if isinstance(node, Concat):
        # A byte has two 4-bit codes, so all parts but the last have an even number of channels.
        even = all(graph.shapes[part][0] % 2 == 0 for part in node.parts[:-1])
        return "u4" if even and all(storage_of(graph, bits, part) == "u4" for part in node.parts) else "s8"
    return "u4" if isinstance(node, (Conv, Sum)) and node.relu and bits[name].output == 4 else "s8"


def calibrate(graph: Graph, ranges: Mapping[str, Range], bits: Mapping[str, LayerBits], search: Search = "mse") -> Quantization:
    """Computes scales of values from their observed ranges, and weight codes by least squared error per output channel."""
    scales: dict[str, float] = {}
    weights: dict[str, QuantWeight] = {}
    shared = shared_scales(graph, bits)
    for name, node in graph.nodes.items():
        if name in ranges and name not in shared:
            # Images and pooled features are not clipped, because their largest values may matter most.
            _, highest = code_range(storage_of(graph, bits, name))
            how: Search = "max" if isinstance(node, (Input, AveragePool)) else search
            scales[name] = min(ranges[name].scale(highest, how), largest_scale(node, highest))
        if isinstance(node, Conv):
            weights[name] = quantize_weight(node.weight, bits[name].weight)
            if node.second is not None:
                weights[node.second.name] = quantize_weight(node.second.weight, bits[name].weight)
    return Quantization(dict(bits), with_shared(scales, shared), weights)


def shared_scales(graph: Graph, bits: Mapping[str, LayerBits]) -> dict[str, str]:
    """Returns, by name of a value, the other value that has its scale.

    Max pools and changes of size return codes of their input. The parts of a concatenation have its scale, so that they are
    rounded once, unless they have other readers, another storage, or a ReLU with an upper bound, which their own scale sets.
    """
    readers = graph.readers()
    shared = {name: node.x for name, node in graph.nodes.items() if isinstance(node, (MaxPool, Resize))}
    for name, node in graph.nodes.items():
        for part in node.parts if isinstance(node, Concat) else ():
            source = part
            alone = len(readers[source]) == 1
            while alone and source in shared:
                source = shared[source]
                alone = len(readers[source]) == 1
            made = graph.nodes[source]
            bounded = isinstance(made, (Conv, Sum)) and made.relu_max < math.inf
            if alone and not bounded and storage_of(graph, bits, source) == storage_of(graph, bits, name):
                shared[source] = name
    return shared


def with_shared(scales: Mapping[str, float], shared: Mapping[str, str]) -> dict[str, float]:
    """Returns the scales with those that values share with others."""
    found = dict(scales)
    for name in shared:
        owner = name
        while owner in shared:
            owner = shared[owner]
        if owner in scales:
            found[name] = scales[owner]
    return found


def largest_scale(node: Node, highest: int) -> float:
    """Returns the scale at which the highest code equals the upper bound of the node's ReLU; infinity if it has none."""
    return node.relu_max / highest if isinstance(node, (Conv, Sum)) else math.inf


def mixed(graph: Graph, one: Quantization, other: Quantization, from_other: Container[str]) -> Quantization:
    """Returns `one` with the bits, codes and scales of `other` for the layers named in `from_other`."""
    bits, scales, weights = dict(one.bits), dict(one.scales), dict(one.weights)
    bits.update({name: other.bits[name] for name in one.bits if name in from_other})
    for name, node in graph.nodes.items():
        if isinstance(node, Concat) and storage_of(graph, bits, name) != storage_of(graph, one.bits, name):
            scales[name] = other.scales[name]
        if isinstance(node, (Conv, Sum)) and name in from_other:
            scales[name] = other.scales[name]
            for conv in (node, node.second) if isinstance(node, Conv) else ():
                if conv is not None:
                    weights[conv.name] = other.weights[conv.name]
    return Quantization(bits, with_shared(scales, shared_scales(graph, bits)), weights)


def quantize_weight(weight: Tensor, bits: int) -> QuantWeight:
    """Quantizes `weight` [O, C, R, S] to int8 codes of `bits` bits, with scales by least squared error per output channel."""
    q = rtn(weight.flatten(1), Scheme(int_format(bits)), search="mse")
    codes = decode(q.codes, q.scheme.weight).char().reshape(weight.shape)
    return QuantWeight(codes, q.scale.reshape(-1))
