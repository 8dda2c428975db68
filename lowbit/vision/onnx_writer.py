"""Writes an integer network as an ONNX file with QDQ nodes, for TensorRT, onnxruntime and other tools.

Codes become QuantizeLinear and DequantizeLinear pairs around operators in floating point, as tools expect them: int8 and uint4
activations, int8 and int4 weights with a scale per output, biases in float32. A tool that computes this in floating point, as
the reference evaluator of the onnx package does, has the network's codes but for sums that lie between two codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit._version import __version__
from lowbit.formats.conv import ACTIVATIONS, U4_STEPS
from lowbit.vision.graph import Form, Other, Ref
from lowbit.vision.network import QuantizedNetwork
from lowbit.vision.onnx_nodes import OnnxError, import_onnx
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
)

OPSET = 21
"""The first opset with 4-bit integers."""
IR_VERSION = 10
OPERATORS = {
    "silu": "",
    "hardswish": "HardSwish",
    "sigmoid": "Sigmoid",
    "hardsigmoid": "HardSigmoid",
    "gelu": "Gelu",
    "tanh": "Tanh",
}
"""The ONNX operator of each activation function; SiLU is a product with a sigmoid."""


def write_onnx(network: QuantizedNetwork, path: str | Path) -> None:
    """Writes `network` to an ONNX file (opset 21). Its input is the model's, normalized float32 [N, C, H, W].

    Raises OnnxError for floating-point operations that have no ONNX form here, before anything is written, and OSError if the
    file cannot be written.
    """
    onnx = import_onnx()
    model = _Writer(network.program).model()
    onnx.checker.check_model(model)
    path = Path(path)
    scratch = path.with_name(f".{path.name}.part")
    try:
        scratch.write_bytes(model.SerializeToString())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@dataclass
class _Writer:
    program: Program
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    """The name of each value in floating point."""

    def model(self) -> Any:
        """Returns the network as a ModelProto."""
        onnx, program = import_onnx(), self.program
        self.values[program.images] = "images"
        for operation in program.operations:
            self._operation(operation)
        outputs = []
        for name, value in zip(_labels(program.form), program.results, strict=True):
            self._node("Identity", [self.values[value]], name)
            outputs.append(_described(name, program.values[value].shape))
        graph = onnx.helper.make_graph(
            self.nodes, "lowbit", [_described("images", program.values[program.images].shape)], outputs, self.constants
        )
        return onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="lowbit",
            producer_version=__version__,
        )  # fmt: skip

    def _operation(self, op: Operation) -> None:
        match op:
            case Quantize(y, x):
                self._codes(y, self._shaped(self.values[x], self.program.values[x].shape, self.program.values[y].shape, y))
            case Convolve():
                self._convolution(op)
            case SumCodes(y, x, layer, other):
                t = self.values[x] if other is None else self._node("Add", [self.values[x], self.values[other]], f"{y}.sum")
                self._codes(y, self._node("Relu", [t], f"{y}.relu") if layer.relu else t)
            case MapCodes(y, x):
                self._codes(y, self._activation(op))
            case GateCodes(y, x, gate):
                self._codes(y, self._node("Mul", [self.values[x], self.values[gate]], f"{y}.product"))
            case ResizeCodes(y):
                self._codes(y, self._resize(op))
            case ConcatCodes(y, parts):
                self._codes(y, self._node("Concat", [self.values[part] for part in parts], f"{y}.whole", axis=1))
            case PoolMax(y, x, kernel, stride, padding):
                sides = [*padding, *padding]
                pooled = self._node("MaxPool", [self.values[x]], f"{y}.pooled", kernel_shape=kernel, strides=stride, pads=sides)
                self._codes(y, pooled)
            case PoolAverage(y, x):
                mean = self._node("GlobalAveragePool", [self.values[x]], f"{y}.mean")
                shape = (self.program.values[x].shape[0], 1, 1)
                self.values[y] = self._shaped(mean, shape, self.program.values[y].shape, y)
            case Dequantize(y, x):
                known = self.program.values
                self.values[y] = self._shaped(self.values[x], known[x].shape, known[y].shape, y)
            case Compute(y, node):
                self._compute(y, node)
            case _:
                raise OnnxError(
                    f"{op.y}: {type(op).__name__} is an operation of a device; write the network before it is fused"
                )

    def _convolution(self, op: Convolve) -> None:
        layer, y = op.layer, op.y
        known = self.program.values[y]
        steps = U4_STEPS if layer.y == "u4" else 1.0
        scale = known.scale if layer.y in ACTIVATIONS else 1.0
        bias = layer.b.double() - ((U4_STEPS - 1) / 2 if layer.y == "u4" else 0.0)
        step = layer.s.double() * scale / steps / self.program.values[op.x].scale
        inputs = [
            self.values[op.x],
            self._weight(f"{y}.weight", layer.weight, step),
            self._constant(f"{y}.bias", bias * scale / steps),
        ]
        t = self._node("Conv", inputs, f"{y}.product", **_windows(layer), group=layer.groups)
        if op.residual is not None:
            t = self._node("Add", [t, self.values[op.residual]], f"{y}.sum")
        if op.second is not None and layer.second is not None:
            step = layer.second.s.double() * scale / steps / self.program.values[op.second].scale
            inputs = [self.values[op.second], self._weight(f"{y}.weight2", layer.second.weight, step)]
            t = self._node("Add", [t, self._node("Conv", inputs, f"{y}.product2", **_windows(layer.second))], f"{y}.sum")
        if layer.relu:
            t = self._node("Relu", [t], f"{y}.relu")
        if layer.y in ACTIVATIONS:
            self._codes(y, t)
        else:
            outputs = (layer.weight.shape[0], *(layer.output_size(*self.program.values[op.x].shape[1:])))
            self.values[y] = self._shaped(t, outputs, known.shape, y)

    def _activation(self, op: MapCodes) -> str:
        x = self.values[op.x]
        if op.function == "silu":
            return self._node("Mul", [x, self._node("Sigmoid", [x], f"{op.y}.sigmoid")], f"{op.y}.product")
        if op.function not in OPERATORS:
            raise OnnxError(f"{op.y}: its activation function is not known; quantize the model again with this release")
        more = {"alpha": 1 / 6, "beta": 0.5} if op.function == "hardsigmoid" else {}
        return self._node(OPERATORS[op.function], [x], f"{op.y}.function", **more)

    def _resize(self, op: ResizeCodes) -> str:
        layer, known = op.layer, self.program.values
        nearest = layer.mode == "nearest"
        more: dict[str, Any] = {"mode": "nearest" if nearest else "linear"}
        where = "asymmetric" if nearest else "align_corners" if layer.aligned else "half_pixel"
        if nearest:
            more["nearest_mode"] = "floor"
        # Sizes would state the batch, which is open; scales are exact enough for all sizes below 2^20.
        given = known[op.x].shape[1:]
        scales = self._constant(
            f"{op.y}.scales", torch.tensor([1.0, 1.0, *(b / a for a, b in zip(given, layer.size, strict=True))])
        )
        return self._node(
            "Resize", [self.values[op.x], "", scales], f"{op.y}.resized", coordinate_transformation_mode=where, **more
        )

    def _compute(self, y: str, node: Other) -> None:
        name = str(node.target).removeprefix("aten.")
        if name == "sym_size.int":
            self.values[y] = ""  # the batch, which Reshape takes from its input
            return
        read = [self.values[ref] for ref in node.inputs if self.values[ref]]
        shape = self.program.values[y].shape if y in self.program.values else ()
        if name in ("reshape.default", "view.default", "flatten.using_ints"):
            self.values[y] = self._reshaped(read[0], shape, y)
        elif name == "permute.default":
            self.values[y] = self._node("Transpose", read, y, perm=list(node.args[1]))
        elif name == "cat.default":
            self.values[y] = self._node("Concat", read, y, axis=(*node.args, 0)[1])
        elif name == "mean.dim" and (*node.args, False)[2]:
            axes = self._constant(f"{y}.axes", torch.tensor(list(node.args[1])))
            self.values[y] = self._node("ReduceMean", [*read, axes], y, keepdims=1)
        elif name == "softmax.int":
            self.values[y] = self._node("Softmax", read, y, axis=node.args[1])
        elif name in _FLOATING and len(read) == len(node.args) and all(isinstance(arg, Ref) for arg in node.args):
            self.values[y] = self._node(_FLOATING[name], read, y)
        else:
            raise OnnxError(
                f"{node.name}: {name} with these arguments has no ONNX form here; written are integer operations, reshapes, "
                f"permutations, concatenations, softmax, means and {', '.join(sorted(set(_FLOATING.values())))}"
            )

    def _codes(self, y: str, t: str) -> None:
        """Quantizes the floating-point value t to the codes of y, and dequantizes them for their readers."""
        known = self.program.values[y]
        scale = self._constant(f"{y}.scale", torch.tensor(known.scale))
        zero = self._zero(f"{y}.zero", "UINT4" if known.storage == "u4" else "INT8", ())
        codes = self._node("QuantizeLinear", [t, scale, zero], f"{y}.codes")
        self.values[y] = self._node("DequantizeLinear", [codes, scale, zero], f"{y}.values")

    def _weight(self, name: str, codes: Tensor, step: Tensor) -> str:
        onnx = import_onnx()
        four = bool((codes >= -8).all() and (codes <= 7).all())
        kind = "INT4" if four else "INT8"
        stored = onnx.helper.make_tensor(
            self._unique(f"{name}.codes"), getattr(onnx.TensorProto, kind), list(codes.shape), codes.cpu().flatten().tolist()
        )
        self.constants.append(stored)
        scale = self._constant(f"{name}.scale", step)
        zero = self._zero(f"{name}.zero", kind, (len(codes),))
        return self._node("DequantizeLinear", [stored.name, scale, zero], name, axis=0)

    def _zero(self, name: str, kind: str, shape: tuple[int, ...]) -> str:
        onnx = import_onnx()
        count = shape[0] if shape else 1
        tensor = onnx.helper.make_tensor(self._unique(name), getattr(onnx.TensorProto, kind), shape, [0] * count)
        self.constants.append(tensor)
        return str(tensor.name)

    def _constant(self, name: str, value: Tensor) -> str:
        """Adds a constant, int64 or float32, and returns its name."""
        onnx = import_onnx()
        value = value.detach().cpu()
        array = value.numpy() if value.dtype == torch.int64 else value.float().numpy()
        tensor = onnx.numpy_helper.from_array(array, self._unique(name))
        self.constants.append(tensor)
        return str(tensor.name)

    def _shaped(self, value: str, given: tuple[int, ...], wanted: tuple[int, ...], y: str) -> str:
        return value if given == wanted else self._reshaped(value, wanted, f"{y}.shaped")

    def _reshaped(self, value: str, shape: tuple[int, ...], name: str) -> str:
        return self._node("Reshape", [value, self._constant(f"{name}.shape", torch.tensor([0, *shape]))], name)

    def _node(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Adds a node and returns the name of its output."""
        name = self._unique(name)
        self.nodes.append(import_onnx().helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def _unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.names:
            count += 1
            candidate = f"{name}:{count}"
        self.names.add(candidate)
        return candidate


_FLOATING = {
    "add.Tensor": "Add",
    "mul.Tensor": "Mul",
    "sub.Tensor": "Sub",
    "relu.default": "Relu",
    "sigmoid.default": "Sigmoid",
}
"""Floating-point operations of values alone, and their ONNX operators."""


def _windows(layer: Any) -> dict[str, Any]:
    size = layer.weight.shape[2:]
    return {"kernel_shape": list(size), "strides": list(layer.stride), "pads": [*layer.padding, *layer.padding]}


def _described(name: str, shape: tuple[int, ...]) -> Any:
    onnx = import_onnx()
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", *shape])


def _labels(form: Form, before: str = "") -> list[str]:
    """Returns a name for each result, in their order: keys and places joined by dots."""
    found: dict[int, str] = {}

    def walk(part: Form, path: str) -> None:
        if isinstance(part, int):
            found[part] = path or "result"
            return
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
            walk(inner, f"{path}.{key}" if path else str(key))

    walk(form, before)
    return [found[i] for i in sorted(found)]
