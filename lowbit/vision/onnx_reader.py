"""Reads ONNX files (opset 17 and newer): a network of convolutions as a torch module, with the scales of its QDQ nodes.

`read_onnx` returns a module that computes the file in floating point; `lowbit.vision.quantize` takes it as any other model. If
the file has QuantizeLinear and DequantizeLinear around its convolutions, `OnnxNetwork.quantized` takes codes and scales from
them and needs no images. Nodes of constants are evaluated by the reference evaluator of the onnx package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.vision.bits import LayerBits, Quantization, QuantWeight, largest_scale
from lowbit.vision.graph import (
    ACTIVATIONS,
    Activation,
    AveragePool,
    Concat,
    Conv,
    Graph,
    Input,
    MaxPool,
    Node,
    Other,
    Ref,
    Resize,
    Sum,
    call_other,
)
from lowbit.vision.lower import lower
from lowbit.vision.network import QuantizedNetwork
from lowbit.vision.onnx_nodes import CONVERTERS, WITHOUT_OPERATION, Given, OnnxError, import_onnx
from lowbit.vision.trace import FLATTENS, REARRANGES, Traced, UnsupportedNetwork, trace

if TYPE_CHECKING:
    import onnx

aten = torch.ops.aten
OLDEST_OPSET = 17
HALF_RANGE = 127.0 / 255.0
"""Codes of a ReLU's output are 0 to 127 here and 0 to 255 in files with uint8: scales are divided by this."""


def read_onnx(path: str | Path) -> OnnxNetwork:
    """Returns the network of an ONNX file as a module in evaluation mode, which takes images [N, C, H, W] and returns the
    file's output, or a dictionary of its outputs by name.

    Weights in files beside it are read too. Raises OnnxError for files of an older opset than 17 or with several inputs, and
    FileNotFoundError.
    """
    onnx = import_onnx()
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        model = onnx.load(path)
    except Exception as error:
        raise OnnxError(f"{path}: not an ONNX file: {' '.join(str(error).split())[:200]}") from error
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < OLDEST_OPSET:
        raise OnnxError(
            f"{path}: opset {opset}, {OLDEST_OPSET} and newer are supported; export it again with a newer opset, or convert it "
            f"with onnx.version_converter.convert_version(model, {OLDEST_OPSET})"
        )
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    if len(inputs) != 1:
        raise OnnxError(
            f"{path}: {len(inputs)} inputs ({', '.join(v.name for v in inputs)}), networks of one image are supported"
        )
    return OnnxNetwork(model, inputs[0].name, opset)


class OnnxNetwork(Traced):
    """A network of an ONNX file in floating point. Its weights are constants; it cannot be trained.

    `image_shape`: (C, H, W) as the file states it, with 0 for sizes that it leaves open.
    """

    def __init__(self, model: onnx.ModelProto, images: str, opset: int) -> None:
        super().__init__()
        self.model, self.images, self.opset = model, images, opset
        self.image_shape = next(_sizes(value)[1:] for value in model.graph.input if value.name == images)
        self._graphs: dict[tuple[int, ...], _Contents] = {}
        self.eval()

    def forward(self, images: Tensor) -> Any:
        """Returns the result for images [N, C, H, W]."""
        return self.read(tuple(images.shape[1:])).graph.to(images.device).run(images)

    def read(self, shape: tuple[int, ...]) -> _Contents:
        """Returns the graph for images [C, H, W] and what its QDQ nodes say. Raises OnnxError for nodes that are not supported
        and for another shape than the file states."""
        stated = self.image_shape
        if len(shape) != 3 or any(want not in (0, got) for want, got in zip(stated, shape, strict=False)):
            raise OnnxError(f"the file takes images [N, {', '.join(str(s or 'any') for s in stated)}], got [N, {shape}]")
        if shape not in self._graphs:
            self._graphs[shape] = _Reader(self, shape).read()
        return self._graphs[shape]

    def traced(self, images: Tensor) -> Graph:
        """Returns the graph for images [N, C, H, W], every operation as `Other`."""
        try:
            return self.read(tuple(images.shape[1:])).graph.to(images.device)
        except OnnxError as error:
            raise UnsupportedNetwork(str(error)) from error

    def quantized(self, size: tuple[int, int] | None = None) -> QuantizedNetwork:
        """Returns the integer network with the codes and scales of the file's QDQ nodes, for images of `size` (height, width),
        by default that of the file.

        uint8 values with zero point 0 have half as many codes here. Where a file rounds a value before its ReLU and after it,
        only the second rounding stays. Activations, means, pools and concatenations without QDQ nodes get the scale that clips
        nothing. Raises OnnxError if a value that convolutions read has no scale, and for zero points
        other than the middle of the range.
        """
        shape = (self.image_shape[0], *(size or self.image_shape[1:]))
        if min(shape) < 1:
            raise OnnxError(f"the file leaves the size of images open, {list(shape)}: give the height and width")
        read = self.read(shape)
        graph = trace(self, torch.zeros(2, *shape))
        quantization = _quantization(graph, read)
        try:
            program = lower(graph, quantization)
        except ValueError as error:
            raise OnnxError(
                f"{error}; quantize the file with images instead: lowbit import-onnx FILE --images FOLDER"
            ) from error
        four = any(bits.weight == 4 for bits in quantization.bits.values())
        narrow = any(bits.output == 4 for bits in quantization.bits.values())
        return QuantizedNetwork(program, f"w{4 if four else 8}a{4 if narrow else 8}")


@dataclass(eq=False)
class _Contents:
    """A graph, the storage and scale of each value that QDQ nodes state, by node, and of each weight: scale, float32 [O] or
    [1], and bits."""

    graph: Graph
    values: dict[str, tuple[str, float]]
    weights: dict[str, tuple[Tensor, int]]


def _quantization(graph: Graph, read: _Contents) -> Quantization:
    """Returns the quantization that the QDQ nodes of a file state for its fused graph."""
    flat = {}  # files round what they have flattened, here its source is rounded
    for name, value in read.values.items():
        node = read.graph.nodes[name]
        if isinstance(node, Other) and node.target in FLATTENS and node.inputs[0] not in read.values:
            flat[node.inputs[0]] = value
    stated = {graph.fused.get(name, name): value for name, value in (flat | read.values).items()}  # the last of fused values
    bits: dict[str, LayerBits] = {}
    scales: dict[str, float] = {}
    weights: dict[str, QuantWeight] = {}
    for name, node in graph.nodes.items():
        storage, scale = stated.get(name, ("s8", math.inf))
        if isinstance(node, (Conv, Sum)):
            bits[name] = LayerBits(8, 4 if storage == "u4" and node.relu else 8)
            if storage == "u4" and not node.relu:
                raise OnnxError(f"{name}: 4-bit codes without sign are for outputs of a ReLU")
            scale = min(scale, largest_scale(node, 15 if storage == "u4" else 127))
        if isinstance(node, (MaxPool, Resize)) or scale == math.inf:
            scale = _following_scale(node, scales)
        if scale < math.inf:
            scales[name] = scale
        for conv in (node, node.second) if isinstance(node, Conv) else ():
            if conv is None:
                continue
            if conv.name not in read.weights:
                raise OnnxError(f"{conv.name}: its weights have no DequantizeLinear, so the file is not quantized there")
            step, width = read.weights[conv.name]
            codes = (conv.weight / step.reshape(-1, 1, 1, 1)).round().clamp(-128, 127).to(torch.int8)
            weights[conv.name] = QuantWeight(codes, step.expand(len(codes)).clone())
            if width == 8 or conv is node:  # a layer has 4 bits if both of its products have
                bits[name] = replace(bits[name], weight=width)
    return Quantization(bits, scales, weights)


def _following_scale(node: Node, scales: dict[str, float]) -> float:
    """Returns the scale of a value for which the file states none, from those of its inputs, so that nothing is clipped;
    infinity if they do not say it."""
    inputs = [scales.get(name, math.inf) for name in node.inputs]
    if isinstance(node, (MaxPool, Resize, AveragePool, Concat)):
        return max(inputs)
    if isinstance(node, Activation) and inputs[0] < math.inf:
        largest = ACTIVATIONS[node.function](torch.arange(-128, 128, dtype=torch.float64) * inputs[0]).abs().max()
        return float(largest) / 127
    return math.inf


@dataclass
class _Reader:
    """Reads the nodes of a file in order, for images of one shape.

    values: constants as tensors and values of images as `Ref`, by their names in the file; `nodes`, `shapes` and `example`
    (the value for two images of zeros) are by the names of operations. stated: storage and scale of each value with a
    QuantizeLinear; steps: scale and bits of each dequantized constant, and `weights` those of each operation.
    """

    network: OnnxNetwork
    image_shape: tuple[int, ...]
    values: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stated: dict[str, tuple[str, float]] = field(default_factory=dict)
    steps: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    weights: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    example: dict[str, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """The batch size that the file states for the images, -1 if it leaves it open."""
        return next(_sizes(v)[0] or -1 for v in self.network.model.graph.input if v.name == self.network.images)

    def read(self) -> _Contents:
        """Returns the graph of the file."""
        onnx = import_onnx()
        graph = self.network.model.graph
        for tensor in graph.initializer:
            self.values[tensor.name] = _tensor(onnx.numpy_helper.to_array(tensor))
        images = Input("images")
        self._add(images, torch.zeros(2, *self.image_shape))
        self.values[self.network.images] = Ref("images")
        for node in graph.node:
            self._node(node)
        results = {}
        for value in graph.output:
            found = self.values.get(value.name)
            if not isinstance(found, Ref) or found.name not in self.shapes:
                raise OnnxError(f"output {value.name!r} is no tensor with the batch first")
            results[value.name] = found.name
        form = 0 if len(results) == 1 else {name: i for i, name in enumerate(results)}
        whole = Graph(self.nodes, tuple(results.values()), self.shapes, form)  # type: ignore[arg-type]
        return _Contents(whole, self.stated, self.weights)

    def _node(self, node: Any) -> None:
        """Appends the operation of a node, or evaluates it."""
        kind, inputs = node.op_type, [self.values.get(name) if name else None for name in node.input]
        name = self._unique(node.name or (node.output[0] if node.output else kind))
        attributes = {a.name: _attribute(a) for a in node.attribute}
        given = Given(name, kind, inputs, attributes, self.shapes)
        if node.domain not in ("", "ai.onnx"):
            raise given.refuse(f"its domain is {node.domain}; operators of ONNX itself are supported")
        if kind == "Shape" and isinstance(given.input(0), Ref):
            # The batch is written as 0, which Reshape takes from its input.
            self.values[node.output[0]] = torch.tensor([0, *given.shape()], dtype=torch.int64)
        elif kind in ("QuantizeLinear", "DequantizeLinear"):
            self.values[node.output[0]] = self._qdq(given, node)
        elif all(not isinstance(value, Ref) for value in inputs):
            self._evaluate(given, node)
        elif kind in ("Identity", "Dropout"):
            self.values[node.output[0]] = inputs[0]
        elif kind not in CONVERTERS:
            raise given.refuse(f"it has no form here; supported are {', '.join(sorted({*CONVERTERS, *WITHOUT_OPERATION}))}")
        else:
            self._convert(given, node)

    def _convert(self, given: Given, node: Any) -> None:
        """Appends the operations of a node whose result depends on the images."""
        weight = next((name for name in node.input[1:2] if name in self.steps), None)
        if weight is not None and given.kind in ("Conv", "Gemm", "MatMul"):
            self.weights[given.name] = self.steps[weight]
        joined = self._biased(given, node)
        if joined is not None:
            self.values[node.output[0]] = joined
            return
        target, args = CONVERTERS[given.kind](given, self)
        args = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in args)
        reason = "" if target in REARRANGES else f"{given.kind} has no integer form here"
        operation = Other(given.name, target, args, {}, reason)
        read = {name: self.example[name] for name in operation.inputs}
        try:
            with torch.no_grad():
                result = call_other(operation, read, next(iter(read.values())))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise given.refuse(f"torch cannot compute it: {' '.join(str(error).split())[:200]}") from error
        self._add(operation, result)
        self.values[node.output[0]] = Ref(given.name)

    def _biased(self, given: Given, node: Any) -> Ref | None:
        """Adds a constant per output to the linear layer before it, which is how files write MatMul with a bias."""
        refs = [value for value in given.inputs if isinstance(value, Ref)]
        others = [value for value in given.inputs if isinstance(value, Tensor)]
        if given.kind != "Add" or len(refs) != 1 or len(others) != 1 or others[0].dim() != 1:
            return None
        source = self.nodes[refs[0].name]
        readers = sum(list(each.input).count(name) for each in self.network.model.graph.node for name in self._names(refs[0]))
        plain = isinstance(source, Other) and source.target is aten.linear.default and source.args[2] is None
        if not plain or readers != 1 or len(others[0]) != len(source.args[1]):
            return None
        self.nodes[source.name] = replace(source, args=(*source.args[:2], others[0]))
        return refs[0]

    def _names(self, ref: Ref) -> list[str]:
        """Returns the names that an operation's value has in the file."""
        return [name for name, value in self.values.items() if isinstance(value, Ref) and value.name == ref.name]

    def _qdq(self, given: Given, node: Any) -> Any:
        """Records the scale of a value or weight and returns the value; constants are dequantized."""
        value, scale, zero = given.input(0), given.input(1), given.input(2)
        if not isinstance(scale, Tensor) or isinstance(zero, Ref):
            raise given.refuse("its scale is computed; constant scales are supported")
        dtype = None if zero is None else str(self._array(node.input[2]).dtype)
        if not isinstance(value, Ref):
            self._evaluate(given, node)
            if given.kind == "DequantizeLinear":
                self.steps[node.output[0]] = _weight_step(given, scale, zero, str(self._array(node.input[0]).dtype))
            elif node.input[0] in self.steps:
                self.steps[node.output[0]] = self.steps[node.input[0]]
            return self.values[node.output[0]]
        if given.kind == "QuantizeLinear":
            stated = _value_storage(given, scale, zero, dtype)
            if self.stated.get(value.name, stated) != stated:
                raise given.refuse(
                    f"{value.name} has two scales, {self.stated[value.name][1]:.6g} and {stated[1]:.6g}; one for all its "
                    "readers is supported"
                )
            self.stated[value.name] = stated
        return value

    def _evaluate(self, given: Given, node: Any) -> None:
        """Evaluates a node of constants by the reference evaluator of the onnx package."""
        onnx = import_onnx()
        if node.op_type == "Constant" and not any(a.name == "value" for a in node.attribute):
            self.values[node.output[0]] = torch.tensor(next(iter(given.attributes.values())))
            return
        names = [name for name in node.input if name]
        inputs = [self._array(name) for name in names]
        shapeless = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in names]
        outputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output]
        graph = onnx.helper.make_graph([node], "constants", shapeless, outputs)
        # The evaluator has QDQ nodes from opset 19 on, which compute what older ones did.
        opset = max(self.network.opset, 21) if given.kind in ("QuantizeLinear", "DequantizeLinear") else self.network.opset
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
        try:
            results = onnx.reference.ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
        except Exception as error:
            raise given.refuse(f"its constants cannot be evaluated: {' '.join(str(error).split())[:200]}") from error
        for name, result in zip(node.output, results, strict=True):
            self.values[name] = _tensor(result)

    def _array(self, name: str) -> Any:
        """Returns a constant as an array of the type that the file gives it; torch has no 4-bit integers."""
        onnx = import_onnx()
        for tensor in self.network.model.graph.initializer:
            if tensor.name == name:
                return onnx.numpy_helper.to_array(tensor)
        return self.values[name].numpy()

    def _add(self, operation: Any, example: Any) -> None:
        self.nodes[operation.name] = operation
        self.example[operation.name] = example
        if isinstance(example, Tensor) and example.dim() > 0 and example.shape[0] == 2:
            self.shapes[operation.name] = tuple(example.shape[1:])

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.nodes:
            count += 1
            candidate = f"{name}:{count}"
        return candidate

    def padded(self, given: Given, sides: list[int]) -> Ref:
        """Appends zeros (top, left, bottom, right) around the first input and returns the result."""
        top, left, bottom, right = sides
        name = self._unique(f"{given.name}:pad")
        pad = Other(name, aten.pad.default, (given.inputs[0], [left, right, top, bottom]), {}, "pad has no integer form here")
        self._add(pad, call_other(pad, {given.inputs[0].name: self.example[given.inputs[0].name]}, torch.zeros(0)))
        return Ref(name)


def _tensor(array: Any) -> Any:
    """Returns a constant as a tensor: 4-bit integers as int8, types that torch does not know as they are."""
    onnx = import_onnx()
    import numpy

    if not isinstance(array, numpy.ndarray) and not numpy.isscalar(array):
        return array
    array = numpy.asarray(array)
    if array.dtype.name in ("int4", "uint4", "int2", "uint2"):
        array = array.astype(numpy.int8)
    try:
        return torch.from_numpy(numpy.array(array))
    except TypeError as error:
        raise OnnxError(f"constants of type {array.dtype} are not supported ({onnx.__name__} {onnx.__version__})") from error


def _attribute(attribute: Any) -> Any:
    value = import_onnx().helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    return list(value) if isinstance(value, (list, tuple)) or type(value).__name__.startswith("Repeated") else value


def _sizes(value: Any) -> tuple[int, ...]:
    """Returns the sizes that the file states for a value, 0 for those that it leaves open."""
    return tuple(int(size.dim_value) for size in value.type.tensor_type.shape.dim)


def _value_storage(given: Given, scale: Tensor, zero: Tensor | None, dtype: str | None) -> tuple[str, float]:
    """Returns storage and scale of a value from its QuantizeLinear; `dtype` is that of its zero point."""
    if scale.numel() != 1:
        raise given.refuse(f"a value has one scale, got {scale.numel()}")
    if dtype is None:
        kind = given.attributes.get("output_dtype", 0) or import_onnx().TensorProto.UINT8
        dtype = import_onnx().TensorProto.DataType.Name(kind).lower()
    middle, step = (0 if zero is None else int(zero)), float(scale)
    if (dtype, middle) in (("int8", 0), ("uint8", 128)):
        return "s8", step
    if (dtype, middle) == ("uint8", 0):
        return "s8", step / HALF_RANGE
    if (dtype, middle) == ("uint4", 0):
        return "u4", step
    raise given.refuse(
        f"{dtype} with zero point {middle}: supported are int8 with 0, uint8 with 0 or 128 and uint4 with 0; quantize with "
        "symmetric activations (ActivationSymmetric in onnxruntime)"
    )


def _weight_step(given: Given, scale: Tensor, zero: Tensor | None, dtype: str) -> tuple[Tensor, int]:
    """Returns scale, float32 [O] or [1], and bits of a constant of type `dtype` from its DequantizeLinear."""
    if zero is not None and bool((zero != 0).any()):
        raise given.refuse("weights have no zero point here; quantize with symmetric weights")
    if dtype not in ("int8", "int4", "int32"):
        raise given.refuse(f"weights are int8 or int4, got {dtype}")
    axis = given.attributes.get("axis", 1)
    if scale.numel() > 1 and (axis != 0 or scale.dim() > 1):
        raise given.refuse(f"scales of weights are per output, along axis 0, got {list(scale.shape)} along axis {axis}")
    return scale.float().reshape(-1), 4 if dtype == "int4" else 8
