"""Lowers a graph and its quantization to an integer `Program`: chooses the storage of each value and folds constants.

Inputs of convolutions and pools, and sums, are stored as codes. Values that only floating-point operations or the caller read
are f32. Values with both kinds of readers are stored as codes and dequantized, so all readers get the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from lowbit.formats.conv import ConvLayer, GateSpec, SecondProduct, SumSpec, requantize
from lowbit.vision.bits import Quantization, storage_of
from lowbit.vision.graph import (
    ACTIVATIONS,
    Activation,
    AveragePool,
    Concat,
    Conv,
    Gate,
    Graph,
    Input,
    MaxPool,
    Node,
    Other,
    Ref,
    Resize,
    Sum,
    reads_codes,
    rename_inputs,
)
from lowbit.vision.program import (
    Compute,
    ConcatCodes,
    Convolve,
    Dequantize,
    GateCodes,
    MapCodes,
    Operation,
    PoolAverage,
    PoolMax,
    Program,
    Quantize,
    ResizeCodes,
    SumCodes,
    Value,
)

FLOAT = ":float"
"""Suffix of the floating-point copy of a value."""


def lower(graph: Graph, quantization: Quantization) -> Program:
    """Returns the integer program of `graph`. Raises ValueError if a value needs a scale and has none."""
    lowering = _Lowering(graph, quantization)
    for node in graph.nodes.values():
        lowering.add(node)
    results = tuple(lowering.floating(name) for name in graph.outputs)
    images = next(name for name, node in graph.nodes.items() if isinstance(node, Input))
    return Program(tuple(lowering.operations), lowering.values, images + FLOAT, results, form=graph.form)


@dataclass
class _Lowering:
    graph: Graph
    quantization: Quantization
    operations: list[Operation] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.readers = self.graph.readers()

    def add(self, node: Node) -> None:
        """Appends the operations that compute `node`."""
        shape = self.graph.shapes.get(node.name, ())
        match node:
            case Input():
                self.values[node.name + FLOAT] = Value("f32", shape)
            case Conv():
                self._convolve(node)
            case Sum():
                self._sum(node)
            case Activation():
                self._map(node)
            case Gate():
                self._gate(node)
            case Resize():
                known = self.values[self.codes(node.x)]
                self.values[node.name] = Value(known.storage, shape, known.scale)
                self.operations.append(ResizeCodes(node.name, node.x, node.spec))
            case Concat():
                self._concat(node)
            case MaxPool() if node.x in self.values:
                known = self.values[node.x]
                self.values[node.name] = Value(known.storage, shape, known.scale)
                self.operations.append(PoolMax(node.name, node.x, node.kernel, node.stride, node.padding))
            case AveragePool() if node.x in self.values:
                known = self.values[node.x]
                self.values[node.name + FLOAT] = Value("f32", shape)
                self.operations.append(PoolAverage(node.name + FLOAT, node.x, known.scale))
            case _:
                self._compute(_as_other(node))

    def codes(self, name: str) -> str:
        """Returns the name of the value's codes, quantizing its floating-point copy if needed."""
        if name not in self.values:
            scale = self._scale(name)
            self.operations.append(Quantize(name, name + FLOAT, _float32(1.0 / scale)))
            self.values[name] = Value("s8", _image_shape(self.graph.shapes[name]), scale)
        return name

    def floating(self, name: str) -> str:
        """Returns the name of the value's floating-point copy, dequantizing its codes if needed."""
        if name + FLOAT not in self.values and name in self.values:
            known = self.values[name]
            self.operations.append(Dequantize(name + FLOAT, name, known.scale))
            self.values[name + FLOAT] = Value("f32", self.graph.shapes[name])
        return name + FLOAT

    def _convolve(self, node: Conv) -> None:
        bits, weights = self.quantization.bits, self.quantization.weights
        x = self.values[self.codes(node.x)]
        second = None if node.second is None else self.values[self.codes(node.second.x)]
        residual = None if node.residual is None else self.values[self.codes(node.residual)]
        # The kernels store sums of two products, and sums with a residual, as codes only. Codes also bound a ReLU6.
        is_sum = node.residual is not None or node.second is not None
        readers = (self.graph.nodes.get(reader) for reader in self.readers[node.name])
        as_codes = is_sum or node.relu_max < math.inf or any(reads_codes(reader) for reader in readers)
        storage: str = storage_of(self.graph, bits, node.name) if as_codes else "f32"
        scale = self._scale(node.name) if as_codes else 1.0
        weight = weights[node.name]
        s, b, g = requantize(
            weight.scale,
            node.bias.to(weight.scale.device),
            x.scale,
            scale,
            storage,
            None if residual is None else residual.scale,
        )
        product = None
        if node.second is not None and second is not None:
            other = weights[node.second.name]
            s2, _, _ = requantize(other.scale, None, second.scale, scale, storage)
            product = SecondProduct(other.codes, s2, second.storage, node.second.stride, node.second.padding)
        layer = ConvLayer(
            weight.codes, s, b, x.storage, storage, node.stride, node.padding, node.relu,
            None if residual is None else residual.storage, g, product, node.name, node.groups,
        )  # fmt: skip
        name = node.name if as_codes else node.name + FLOAT
        shape = self.graph.shapes[node.name]
        self.values[name] = Value(storage, _image_shape(shape) if as_codes else shape, scale)
        self.operations.append(Convolve(name, node.x, layer, node.residual, None if node.second is None else node.second.x))

    def _sum(self, node: Sum) -> None:
        x = self.values[self.codes(node.x)]
        other = None if node.other is None else self.values[self.codes(node.other)]
        storage: str = storage_of(self.graph, self.quantization.bits, node.name)
        scale = self._scale(node.name)
        s, b, g = requantize(torch.ones(1), None, x.scale, scale, storage, None if other is None else other.scale)
        layer = SumSpec(x.storage, storage, float(s), float(b), node.relu, None if other is None else other.storage, g)
        self.values[node.name] = Value(storage, _image_shape(self.graph.shapes[node.name]), scale)
        self.operations.append(SumCodes(node.name, node.x, layer, node.other))

    def _concat(self, node: Concat) -> None:
        storage, scale = storage_of(self.graph, self.quantization.bits, node.name), self._scale(node.name)
        layers = []
        for name in node.parts:
            x = self.values[self.codes(name)]
            s, b, _ = requantize(torch.ones(1), None, x.scale, scale, storage)
            layers.append(SumSpec(x.storage, storage, float(s), float(b), storage == "u4"))
        self.values[node.name] = Value(storage, self.graph.shapes[node.name], scale)
        self.operations.append(ConcatCodes(node.name, node.parts, tuple(layers)))

    def _map(self, node: Activation) -> None:
        x, scale = self.values[self.codes(node.x)], self._scale(node.name)
        values = ACTIVATIONS[node.function](torch.arange(-128, 128, dtype=torch.float64) * x.scale)
        table = (values / scale).round().clamp(-128, 127).to(torch.int8)
        self.values[node.name] = Value("s8", _image_shape(self.graph.shapes[node.name]), scale)
        self.operations.append(MapCodes(node.name, node.x, table, node.function))

    def _gate(self, node: Gate) -> None:
        x, gate, scale = self.values[self.codes(node.x)], self.values[self.codes(node.gate)], self._scale(node.name)
        self.values[node.name] = Value("s8", self.graph.shapes[node.name], scale)
        layer = GateSpec(x.storage, _float32(x.scale * gate.scale / scale))
        self.operations.append(GateCodes(node.name, node.x, node.gate, layer))

    def _compute(self, node: Other) -> None:
        names = {name: self.floating(name) for name in node.inputs}
        shape = self.graph.shapes.get(node.name)
        if shape is not None:
            self.values[node.name + FLOAT] = Value("f32", shape)
        renamed = replace(rename_inputs(node, names), name=node.name + FLOAT)
        self.operations.append(Compute(renamed.name, renamed))  # type: ignore[arg-type]

    def _scale(self, name: str) -> float:
        scale = self.quantization.scales.get(name)
        if scale is None:
            raise ValueError(f"{name} has no scale: calibration did not see it")
        return scale


def _as_other(node: Node) -> Other:
    """Returns a pool of a floating-point value as a torch operation."""
    aten = torch.ops.aten
    match node:
        case MaxPool():
            args = (Ref(node.x), list(node.kernel), list(node.stride), list(node.padding))
            return Other(node.name, aten.max_pool2d.default, args, {}, "max pool of a floating-point value")
        case AveragePool():
            return Other(node.name, aten.mean.dim, (Ref(node.x), [2, 3], True), {}, "average pool of a floating-point value")
    assert isinstance(node, Other)
    return node


def _image_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, 1, 1) if len(shape) == 1 else shape


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
