"""Checks a program read from a file: inputs, shapes, storages and constants of every operation.

Shapes of codes are derived from windows without computing. Torch operations run twice: on meta tensors for the output shape,
and on zeros of that size to check that they accept their arguments.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.conv import ACTIVATIONS, STORAGES, ConvLayer, SecondProduct, output_size
from lowbit.vision.graph import ACTIVATIONS as FUNCTIONS
from lowbit.vision.graph import Other, call_other, constants_on, mapped
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

MOST_ELEMENTS = 1 << 26
"""Largest number of elements of a value per image: 64 channels of 1024 x 1024 pixels. ResNet-50 has 803,000."""

_BATCH = 2


def check(program: Program) -> None:
    """Raises ValueError, naming the operation or value, unless `program` can run on images of its stated shape."""
    for name, value in program.values.items():
        _check_value(name, value)
    images = program.values.get(program.images)
    if images is None or images.storage != "f32" or len(images.shape) != 3:
        raise ValueError(f"the images {program.images!r} are no value f32 [C, H, W]")
    if program.pixels is not None:
        means, numbers = program.pixels.mean, (*program.pixels.mean, *program.pixels.deviation)
        _demand(all(map(math.isfinite, numbers)), f"pixels are normalized with finite numbers, got {numbers}")
        _demand(len(means) in (1, images.shape[0]), f"{len(means)} means for images of {images.shape[0]} channels")
    made: dict[str, Any] = {program.images: _stand_in(images)}
    for operation in program.operations:
        y = operation.y
        _demand(isinstance(y, str) and y not in made, f"{y!r} is made twice, or no name")
        try:
            missing = [name for name in operation.inputs if name not in made]
            _demand(not missing, f"it reads {missing[:1]}, which nothing before it makes")
            made[y] = _result(operation, program, made)
        except _NOT_COMPUTABLE as error:
            raise ValueError(f"{y}: {' '.join(str(error).split()) or type(error).__name__}"[:500]) from error
    unmade = set(program.values) - set(made)
    _demand(not unmade, f"nothing makes the value {min(unmade, default='')}")
    _demand(len(program.results) > 0, "it has no result")
    for name in program.results:
        result = program.values.get(name)
        _demand(result is not None and result.storage in ("f32", "f16"), f"nothing makes the result {name!r}")


_NOT_COMPUTABLE = (ValueError, RuntimeError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError)
"""Errors that torch and this module raise for arguments that an operation does not accept."""


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _check_value(name: str, value: Value) -> None:
    _demand(value.storage in STORAGES, f"the value {name} is stored as one of {', '.join(STORAGES)}, not {value.storage!r}")
    sizes = all(type(size) is int and 0 < size <= MOST_ELEMENTS for size in value.shape)
    _demand(
        sizes and math.prod(value.shape) <= MOST_ELEMENTS,
        f"the value {name} has a shape of at most {MOST_ELEMENTS:,} elements, not {list(value.shape)[:8]}",
    )
    _positive(f"the scale of the value {name}", value.scale)
    if value.storage in ACTIVATIONS:
        _demand(len(value.shape) == 3, f"the codes {name} are [C, H, W], not {list(value.shape)}")


def _positive(what: str, *numbers: Any) -> None:
    """Raises ValueError unless the numbers are positive and finite in float32."""
    for number in numbers:
        fits = type(number) in (int, float) and 0 < number < math.inf and math.isfinite(torch.tensor(float(number)).item())
        _demand(fits, f"{what} is a positive number, not {number!r}")


def _pairs(what: str, *pairs: tuple[Any, ...]) -> None:
    for pair in pairs:
        whole = len(pair) == 2 and all(type(n) is int and 0 <= n <= MOST_ELEMENTS for n in pair)
        _demand(whole, f"{what} are two whole numbers, not {list(pair)}")


def _stand_in(value: Value) -> Tensor:
    """Returns a meta tensor with the shape of a batch of the value."""
    return torch.empty((_BATCH, *value.shape), dtype=torch.float32, device="meta")


def _result(operation: Operation, program: Program, made: dict[str, Any]) -> Any:
    """Returns a meta tensor for the output of an operation. Raises ValueError if it differs from the stated value, or one of
    `_NOT_COMPUTABLE` if the operation does not accept its inputs."""
    values = program.values
    if isinstance(operation, Compute):
        return _computed(operation, values, made)
    _demand(operation.y in values, "the program does not say what it makes")
    y, inputs = values[operation.y], [values[name] for name in operation.inputs if name in values]
    _demand(len(inputs) == len(operation.inputs), "it reads what is no tensor")
    x = inputs[0]
    match operation:
        case Quantize():
            _stored(x, "f32", "what it reads")
            _stored(y, "s8", "what it makes")
            _positive("its factor", operation.factor)
            inverse = abs(operation.factor * y.scale - 1) < 1e-5
            _demand(inverse, f"its factor {operation.factor} is not 1 / {y.scale}, the scale of its codes")
            _same_elements(x, y)
        case Convolve():
            _check_convolution(operation, y, inputs)
        case SumCodes():
            _check_sum(operation, y, inputs)
        case MapCodes():
            _check_map(operation, y, x)
        case GateCodes():
            _check_gate(operation, y, inputs)
        case ResizeCodes():
            _check_resize(operation, y, x)
        case ConcatCodes():
            _check_concat(operation, y, inputs)
        case PoolMax():
            _check_pool(operation, y, x)
        case PoolAverage() | Dequantize():
            _demand(x.storage in ACTIVATIONS and operation.scale == x.scale, "it reads codes, and has their scale")
            _stored(y, "f32", "what it makes")
            if isinstance(operation, Dequantize):
                _same_elements(x, y)
            else:
                _demand(math.prod(y.shape) == x.shape[0], f"it makes a mean of {x.shape[0]} channels, not {list(y.shape)}")
        case _:
            raise ValueError(f"{type(operation).__name__} is no operation of a saved network")
    return _stand_in(y)


def _check_map(operation: MapCodes, y: Value, x: Value) -> None:
    _stored(x, "s8", "what it reads")
    _stored(y, "s8", "what it makes")
    table = operation.table
    _demand(operation.function in ("", *FUNCTIONS), f"functions are {', '.join(FUNCTIONS)}, not {operation.function!r}")
    _demand(
        table.dtype == torch.int8 and table.shape == (256,), f"its table is int8 [256], not {table.dtype} {list(table.shape)}"
    )
    _shaped(y, x.shape)


def _check_gate(operation: GateCodes, y: Value, inputs: list[Value]) -> None:
    x, gate = inputs
    _stored(x, operation.layer.x, "what it multiplies")
    _stored(gate, "s8", "its gate")
    _stored(y, "s8", "what it makes")
    _demand(gate.shape == (x.shape[0], 1, 1), f"its gate is [{x.shape[0]}, 1, 1], not {list(gate.shape)}")
    _shaped(y, x.shape)
    _positive("s", operation.layer.s)


def _check_resize(operation: ResizeCodes, y: Value, x: Value) -> None:
    layer = operation.layer
    _pairs("height and width", layer.size)
    _demand(type(layer.aligned) is bool and isinstance(layer.mode, str), "a change of size has a mode, and is aligned or not")
    same = x.storage in ACTIVATIONS and (y.storage, y.scale) == (x.storage, x.scale)
    _demand(same, "what it makes is stored as what it reads, with its scale")
    reasons = layer.refusals((x.shape[1], x.shape[2]))
    _demand(not reasons, "; ".join(reasons))
    _shaped(y, (x.shape[0], *layer.size))


def _check_concat(operation: ConcatCodes, y: Value, inputs: list[Value]) -> None:
    _demand(len(inputs) == len(operation.layers) > 0, f"{len(operation.layers)} layers are for {len(inputs)} parts")
    for x, layer in zip(inputs, operation.layers, strict=True):
        _stored(x, layer.x, "a part")
        _stored(y, layer.y, "what it makes")
        _demand(layer.other is None, "a part is one value")
        _demand(x.shape[1:] == y.shape[1:], f"a part has {list(x.shape[1:])} pixels, what it makes has {list(y.shape[1:])}")
        _positive("s", layer.s)
        _demand(type(layer.b) in (int, float) and math.isfinite(layer.b), f"b is a finite number, not {layer.b!r}")
    _demand(sum(x.shape[0] for x in inputs) == y.shape[0], f"its parts have not {y.shape[0]} channels together")
    halves = y.storage == "u4" and any(x.storage != "u4" or x.shape[0] % 2 for x in inputs[:-1])
    _demand(not halves and (y.storage != "u4" or inputs[-1].storage == "u4"), "4-bit codes have 4-bit parts of even numbers")


def _check_pool(operation: PoolMax, y: Value, x: Value) -> None:
    kernel, stride, padding = operation.kernel, operation.stride, operation.padding
    _pairs("kernel, stride and padding", kernel, stride, padding)
    _demand(min(kernel + stride) > 0, "kernel and stride are 1 or more")
    _demand(2 * padding[0] <= kernel[0] and 2 * padding[1] <= kernel[1], "its padding is at most half its kernel")
    same = x.storage in ACTIVATIONS and (y.storage, y.scale) == (x.storage, x.scale)
    _demand(same, "what it makes is stored as what it reads, with its scale")
    _shaped(y, (x.shape[0], *output_size((x.shape[1], x.shape[2]), kernel, stride, padding)))


def _stored(value: Value, storage: str, what: str) -> None:
    _demand(value.storage == storage, f"{what} is {storage}, not {value.storage}")


def _same_elements(x: Value, y: Value) -> None:
    _demand(math.prod(x.shape) == math.prod(y.shape), f"it makes {list(y.shape)} of {list(x.shape)}")


def _shaped(y: Value, shape: tuple[int, ...]) -> None:
    """Checks the shape of y. Floating-point values of one pixel may omit height and width."""
    flat = y.storage not in ACTIVATIONS and shape[1:] == (1, 1) and y.shape == shape[:1]
    _demand(flat or y.shape == shape, f"it makes {list(shape)}, the program states {list(y.shape)}")


def _check_convolution(operation: Convolve, y: Value, inputs: list[Value]) -> None:
    layer = operation.layer
    _demand(isinstance(layer.name, str) and type(layer.relu) is bool, "a layer has a name, and a ReLU or none")
    _demand((layer.residual is None) == (operation.residual is None), "a residual has a name and a storage, or neither")
    _demand((layer.second is None) == (operation.second is None), "a second product has an input, or there is neither")
    _stored(y, layer.y, "what it makes")
    _multiplied(layer, inputs[0], y)
    _demand(bool(layer.b.isfinite().all()), "b has numbers that are not finite")
    if layer.residual is not None:
        _stored(inputs[1], layer.residual, "its residual")
        _demand(inputs[1].shape == y.shape, f"it adds {list(inputs[1].shape)} to {list(y.shape)}")
        _positive("g", layer.g)
    if layer.second is not None:
        _multiplied(layer.second, inputs[1], y)


def _multiplied(product: ConvLayer | SecondProduct, x: Value, y: Value) -> None:
    """Raises ValueError unless the product maps x to y."""
    _stored(x, product.x, "what it multiplies")
    _pairs("strides and paddings", product.stride, product.padding)
    outputs, channels, height, width = product.weight.shape
    channels *= product.groups if isinstance(product, ConvLayer) else 1
    _demand(len(x.shape) == 3 and x.shape[0] == channels, f"weights {list(product.weight.shape)} meet {list(x.shape)}")
    _demand(bool((product.s.isfinite() & (product.s >= 0)).all()), "s has numbers that are negative or not finite")
    size = output_size((x.shape[1], x.shape[2]), (height, width), product.stride, product.padding)
    _shaped(y, (outputs, *size))


def _check_sum(operation: SumCodes, y: Value, inputs: list[Value]) -> None:
    layer = operation.layer
    _demand((layer.other is None) == (operation.other is None), "a second term has a name and a storage, or neither")
    _demand(type(layer.relu) is bool, "a sum has a ReLU or none")
    for value, storage in zip((y, *inputs), (layer.y, layer.x, layer.other), strict=False):
        _demand(value.storage == storage, f"codes of its are {storage}, the program states {value.storage}")
        _demand(value.shape == y.shape, f"it makes {list(y.shape)} of {list(value.shape)}")
    _positive("s", layer.s)
    _demand(type(layer.b) in (int, float) and math.isfinite(layer.b), f"b is a finite number, not {layer.b!r}")
    if layer.other is not None:
        _positive("g", layer.g)


def _computed(operation: Compute, values: dict[str, Value], made: dict[str, Any]) -> Any:
    """Returns the output of a torch operation on meta tensors."""
    node = operation.node
    _check_arguments(node)
    codes = [name for name in node.inputs if name in values and values[name].storage in ACTIVATIONS]
    _demand(not codes, f"it computes on the codes {codes[:1]}")
    result = _called(constants_on(node, "meta"), {name: made[name] for name in node.inputs})
    if operation.y not in values:
        return result
    if not isinstance(result, Tensor):
        raise ValueError(f"it makes a {type(result).__name__}, the program states a tensor")
    stated = values[operation.y].shape
    _demand(tuple(result.shape) == (_BATCH, *stated), f"it makes {list(result.shape)[1:]}, the program states {list(stated)}")
    _stored(values[operation.y], "f32", "what it makes")
    # On meta tensors torch does not check every argument, so the operation runs on zeros too.
    read = {name: made[name] for name in node.inputs}
    _called(node, {k: torch.zeros_like(v, device="cpu") if isinstance(v, Tensor) else v for k, v in read.items()})
    return result


def _called(node: Other, read: dict[str, Any]) -> Any:
    return call_other(node, read, next((v for v in read.values() if isinstance(v, Tensor)), torch.zeros(0)))


def _check_arguments(node: Other) -> None:
    _demand(isinstance(node.reason, str), "its reason is text")
    for value in _leaves((node.args, node.kwargs)):
        if isinstance(value, Tensor):
            _demand(bool(value.isfinite().all()), "one of its tensors has numbers that are not finite")
        elif type(value) in (int, float):
            _demand(not math.isnan(value), "one of its arguments is not a number")
            _demand(type(value) is float or abs(value) <= MOST_ELEMENTS, "one of its arguments is too large")
    if node.target is torch.ops.aten.batch_norm.default and isinstance(node.args[4], Tensor):
        _demand(bool((node.args[4] >= 0).all()), "a variance is negative")
    _demand(node.target is not operator.getitem or len(node.args) == 2, "an item is of a value and a number")


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    mapped(value, found.append)
    return found
