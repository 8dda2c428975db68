"""The nodes of ONNX files as operations of torch, and what of their attributes is supported.

Each converter returns an aten operation and its arguments, or raises OnnxError with the name of the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit.extras import install
from lowbit.vision.graph import Other, Ref

aten = torch.ops.aten


class OnnxError(ValueError):
    """The file is no network that can be read; the message names the node, says what is supported and what to do."""


def import_onnx() -> Any:
    """Returns the module onnx. Raises OnnxError if it is not installed."""
    try:
        import onnx
        import onnx.numpy_helper
        import onnx.reference
    except ImportError as error:
        raise OnnxError(f"ONNX files need the onnx package: {install('onnx')}") from error
    return onnx


@dataclass(eq=False)
class Given:
    """A node of the file: its name, operator, and inputs as references to values or as constants (None: omitted)."""

    name: str
    kind: str
    inputs: list[Any]
    attributes: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def input(self, i: int) -> Any:
        """Returns an input, None if it is omitted."""
        return self.inputs[i] if i < len(self.inputs) else None

    def numbers(self, i: int, attribute: str) -> list[int] | None:
        """Returns constant integers from an attribute, or from an input in newer opsets."""
        value = self.input(i)
        return [int(v) for v in value.reshape(-1).tolist()] if isinstance(value, Tensor) else self.attributes.get(attribute)

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """Returns the shape per image of an input."""
        return self.shapes[self.inputs[i].name]

    def refuse(self, why: str) -> OnnxError:
        """Returns the error for this node."""
        return OnnxError(f"node {self.name!r} ({self.kind}): {why}")


class Context(Protocol):
    """What converters know of the file besides their node: the operations so far by name, and the scales of quantized weights
    by node."""

    nodes: dict[str, Any]
    weights: dict[str, tuple[Tensor, int]]

    @property
    def batch(self) -> int:
        """The batch size that the file states for its images, -1 if it leaves it open."""
        ...

    def padded(self, given: Given, sides: list[int]) -> Ref:
        """Appends zeros (top, left, bottom, right) around the first input and returns the result."""
        ...


Converted = tuple[Callable[..., Any], tuple[Any, ...]]


def _conv(given: Given, context: Context) -> Converted:
    x, weight, bias = given.input(0), given.input(1), given.input(2)
    if not isinstance(weight, Tensor) or weight.dim() != 4 or not (bias is None or isinstance(bias, Tensor)):
        raise given.refuse("weights are constants [O, C, R, S]")
    size, a = list(weight.shape[2:]), given.attributes
    stride, dilation = a.get("strides", [1, 1]), a.get("dilations", [1, 1])
    window = [(k - 1) * d + 1 for k, d in zip(size, dilation, strict=True)]
    sides = _sides(given, window, stride)
    if sides[:2] != sides[2:]:
        x, sides = context.padded(given, sides), [0, 0, 0, 0]
    bias = None if bias is None else bias.float()
    return aten.conv2d.default, (x, weight.float(), bias, stride, sides[:2], dilation, a.get("group", 1))


def _sides(given: Given, window: list[int], stride: list[int]) -> list[int]:
    """Returns the rows and columns of padding: top, left, bottom, right."""
    auto = given.attributes.get("auto_pad", "NOTSET")
    if auto in ("NOTSET", "VALID"):
        return given.attributes.get("pads", [0, 0, 0, 0]) if auto == "NOTSET" else [0, 0, 0, 0]
    sides = [0, 0, 0, 0]
    for i, size in enumerate(given.shape()[1:]):
        around = max((-(-size // stride[i]) - 1) * stride[i] + window[i] - size, 0)
        small, large = around // 2, around - around // 2
        sides[i], sides[i + 2] = (small, large) if auto == "SAME_UPPER" else (large, small)
    return sides


def _linear(given: Given, context: Context) -> Converted:
    x, weight, bias = given.input(0), given.input(1), given.input(2)
    a = given.attributes
    if not isinstance(x, Ref) or not isinstance(weight, Tensor) or weight.dim() != 2 or len(given.shape()) != 1:
        raise given.refuse("one vector per image times constant weights is supported")
    if given.kind == "Gemm" and (a.get("alpha", 1.0), a.get("beta", 1.0), a.get("transA", 0)) != (1.0, 1.0, 0):
        raise given.refuse("alpha and beta are 1 and transA is 0")
    if not a.get("transB", 0):
        weight = weight.T
        if given.name in context.weights and context.weights[given.name][0].numel() > 1:
            raise given.refuse("quantized weights are [O, C] with transB = 1, or have one scale")
    if bias is not None and bias.numel() != len(weight):
        raise given.refuse(f"its bias has {len(weight)} numbers, got {bias.numel()}")
    return aten.linear.default, (x, weight.float().contiguous(), None if bias is None else bias.float().reshape(-1))


def _batch_norm(given: Given, context: Context) -> Converted:
    if given.attributes.get("training_mode", 0):
        raise given.refuse("networks are exported in evaluation mode")
    scale, offset, mean, variance = given.inputs[1:5]
    eps = given.attributes.get("epsilon", 1e-5)
    return aten.batch_norm.default, (given.inputs[0], scale, offset, mean, variance, False, 0.1, eps, False)


def _unary(target: Any) -> Callable[[Given, Context], Converted]:
    return lambda given, context: (target, (given.inputs[0],))


def _clip(given: Given, context: Context) -> Converted:
    low, high = given.input(1), given.input(2)
    if isinstance(low, Ref) or isinstance(high, Ref):
        raise given.refuse("its bounds are constants")
    return aten.clamp.default, (given.inputs[0], *(None if bound is None else float(bound) for bound in (low, high)))


def _hard_sigmoid(given: Given, context: Context) -> Converted:
    alpha, beta = given.attributes.get("alpha", 0.2), given.attributes.get("beta", 0.5)
    if abs(alpha - 1 / 6) > 1e-4 or beta != 0.5:
        raise given.refuse(f"alpha is 1 / 6 and beta 0.5, got {alpha} and {beta}")
    return aten.hardsigmoid.default, (given.inputs[0],)


def _gelu(given: Given, context: Context) -> Converted:
    if given.attributes.get("approximate", "none") != "none":
        raise given.refuse("approximate is none")
    return aten.gelu.default, (given.inputs[0],)


_GATED = {aten.sigmoid.default: aten.silu.default, aten.hardsigmoid.default: aten.hardswish.default}


def _product(given: Given, context: Context) -> Converted:
    """x * sigmoid(x) is SiLU, x * hardsigmoid(x) hard-swish."""
    a, b = given.inputs
    for x, gate in ((a, b), (b, a)):
        source = context.nodes[gate.name] if isinstance(gate, Ref) else None
        if isinstance(source, Other) and source.target in _GATED and source.args[0] == x:
            return _GATED[source.target], (x,)
    return aten.mul.Tensor, (a, b) if isinstance(a, Ref) else (b, a)


def _sum(given: Given, context: Context) -> Converted:
    a, b = given.inputs
    return aten.add.Tensor, (a, b) if isinstance(a, Ref) else (b, a)


def _max_pool(given: Given, context: Context) -> Converted:
    a, kernel = given.attributes, given.attributes["kernel_shape"]
    stride = a.get("strides", [1] * len(kernel))
    sides = _sides(given, kernel, stride)
    if sides[:2] != sides[2:] or a.get("storage_order", 0):
        raise given.refuse(f"padding is the same on both sides, got {sides}")
    return aten.max_pool2d.default, (
        given.inputs[0],
        kernel,
        stride,
        sides[:2],
        a.get("dilations", [1, 1]),
        bool(a.get("ceil_mode", 0)),
    )


def _average_pool(given: Given, context: Context) -> Converted:
    a, kernel = given.attributes, given.attributes["kernel_shape"]
    stride = a.get("strides", [1] * len(kernel))
    sides = _sides(given, kernel, stride)
    if sides[:2] != sides[2:] or a.get("ceil_mode", 0) or a.get("dilations", [1, 1]) != [1, 1]:
        raise given.refuse("padding is the same on both sides, without ceil_mode and dilations")
    if kernel == list(given.shape()[1:]) and sides == [0, 0, 0, 0]:
        return _global_average(given, context)
    return aten.avg_pool2d.default, (given.inputs[0], kernel, stride, sides[:2], False, bool(a.get("count_include_pad", 0)))


def _global_average(given: Given, context: Context) -> Converted:
    return aten.mean.dim, (given.inputs[0], [2, 3], True)


def _mean(given: Given, context: Context) -> Converted:
    axes, rank = given.numbers(1, "axes"), len(given.shape()) + 1
    if rank != 4 or sorted(axis % rank for axis in axes or ()) != [2, 3]:
        raise given.refuse(f"means are over height and width, got axes {axes}")
    return aten.mean.dim, (given.inputs[0], [2, 3], bool(given.attributes.get("keepdims", 1)))


def _concat(given: Given, context: Context) -> Converted:
    rank = len(given.shape()) + 1 if isinstance(given.inputs[0], Ref) else 0
    axis = given.attributes["axis"]
    if not all(isinstance(value, Ref) for value in given.inputs) or axis % rank == 0:
        raise given.refuse("values of images are concatenated, along another axis than the batch")
    return aten.cat.default, (list(given.inputs), axis % rank)


def _resize(given: Given, context: Context) -> Converted:
    a, shape = given.attributes, given.shape()
    scales, sizes = given.input(2), given.input(3)
    where, mode = a.get("coordinate_transformation_mode", "half_pixel"), a.get("mode", "nearest")
    out = [int(v) for v in sizes.tolist()][-2:] if isinstance(sizes, Tensor) else []
    factors = [float(v) for v in scales.tolist()] if isinstance(scales, Tensor) and scales.numel() else []
    if len(shape) != 3 or a.get("antialias", 0) or a.get("axes") or not (out or factors):
        raise given.refuse("images [N, C, H, W] are resized in height and width by constants, without antialias and axes")
    if not out:
        out = [math.floor(size * factor) for size, factor in zip(shape[1:], factors[2:], strict=True)]
        if factors[:2] != [1.0, 1.0] or [s * f for s, f in zip(shape[1:], factors[2:], strict=True)] != out:
            raise given.refuse(f"scales lead to whole numbers of pixels, got {factors} for {list(shape)}")
    if mode == "nearest":
        rounding = a.get("nearest_mode", "round_prefer_floor")
        whole = all(o % s == 0 for o, s in zip(out, shape[1:], strict=True))
        if (where, rounding) == ("asymmetric", "floor") or (where in ("half_pixel", "pytorch_half_pixel") and whole):
            return aten.upsample_nearest2d.vec, (given.inputs[0], out, None)
        raise given.refuse(
            f"nearest pixels are asymmetric with floor, or half_pixel by whole factors; got {where} with {rounding}"
        )
    if mode != "linear" or where not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        raise given.refuse(f"linear with half_pixel or align_corners is supported, got {mode} with {where}")
    if where == "pytorch_half_pixel" and min(out) == 1:
        raise given.refuse("pytorch_half_pixel has another place for a single pixel; use half_pixel")
    return aten.upsample_bilinear2d.vec, (given.inputs[0], out, where == "align_corners", None)


def _flatten(given: Given, context: Context) -> Converted:
    if given.attributes.get("axis", 1) != 1:
        raise given.refuse("axis is 1: one vector per image")
    return aten.flatten.using_ints, (given.inputs[0], 1)


def _reshape(given: Given, context: Context) -> Converted:
    wanted = given.numbers(1, "shape")
    if wanted is None:
        raise given.refuse("its shape is computed from values")
    shape = given.shape()
    rest = [shape[i] if size == 0 and i < len(shape) else size for i, size in enumerate(wanted[1:])]
    known = math.prod(size for size in rest if size != -1)
    if -1 in rest and known > 0:
        rest[rest.index(-1)] = math.prod(shape) // known
    batch = {0, -1, context.batch}
    if not wanted or wanted[0] not in batch or math.prod(rest) != math.prod(shape):
        raise given.refuse(f"the batch stays the first dimension, got {wanted} for [N, {', '.join(map(str, shape))}]")
    return aten.reshape.default, (given.inputs[0], [-1, *rest])


def _squeezed(given: Given, context: Context) -> Converted:
    axes, shape = given.numbers(1, "axes"), list(given.shape())
    if axes is None:
        raise given.refuse("its axes are stated")
    rank = len(shape) + 1 + (len(axes) if given.kind == "Unsqueeze" else 0)
    places = sorted(axis % rank for axis in axes)
    if 0 in places:
        raise given.refuse("the batch stays the first dimension")
    if given.kind == "Squeeze":
        shape = [size for i, size in enumerate(shape) if i + 1 not in places]
    else:
        for place in places:
            shape.insert(place - 1, 1)
    return aten.reshape.default, (given.inputs[0], [-1, *shape])


def _transpose(given: Given, context: Context) -> Converted:
    order = given.attributes.get("perm")
    if not order or order[0] != 0:
        raise given.refuse(f"the batch stays the first dimension, got {order}")
    return aten.permute.default, (given.inputs[0], order)


def _pad(given: Given, context: Context) -> Converted:
    sides, value, axes = given.numbers(1, "pads"), given.input(2), given.input(3)
    mode = given.attributes.get("mode", "constant")
    if mode != "constant" or isinstance(value, Ref) or (value is not None and float(value) != 0) or axes is not None:
        raise given.refuse("zeros are added around images, with pads for all axes")
    if sides is None or len(sides) != 8 or any(sides[i] for i in (0, 1, 4, 5)):
        raise given.refuse(f"constant numbers of rows and columns are added to [N, C, H, W], got {sides}")
    return aten.pad.default, (given.inputs[0], [sides[3], sides[7], sides[2], sides[6]])


def _softmax(given: Given, context: Context) -> Converted:
    return aten.softmax.int, (given.inputs[0], given.attributes.get("axis", -1))


def _leaky(given: Given, context: Context) -> Converted:
    return aten.leaky_relu.default, (given.inputs[0], given.attributes.get("alpha", 0.01))


CONVERTERS: dict[str, Callable[[Given, Context], Converted]] = {
    "Add": _sum, "AveragePool": _average_pool, "BatchNormalization": _batch_norm, "Clip": _clip, "Concat": _concat,
    "Conv": _conv,
    "Flatten": _flatten, "Gelu": _gelu, "Gemm": _linear, "GlobalAveragePool": _global_average, "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary(aten.hardswish.default), "LeakyRelu": _leaky, "MatMul": _linear, "MaxPool": _max_pool, "Mul": _product,
    "Pad": _pad, "ReduceMean": _mean, "Relu": _unary(aten.relu.default), "Reshape": _reshape, "Resize": _resize,
    "Sigmoid": _unary(aten.sigmoid.default), "Softmax": _softmax, "Squeeze": _squeezed, "Tanh": _unary(aten.tanh.default),
    "Transpose": _transpose, "Unsqueeze": _squeezed,
}  # fmt: skip
"""How nodes become operations of torch, by operator."""

WITHOUT_OPERATION = ("Constant", "DequantizeLinear", "Dropout", "Identity", "QuantizeLinear", "Shape")
"""Operators that become no operation."""
