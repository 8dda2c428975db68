"""An image network as a graph of named values: convolutions, pools and other torch operations.

A value has the name of the node that computes it. Shapes are per image, without the batch. `Graph.run` computes in floating
point. Calibration observes it, fine-tuning trains it, and tests compare the integer program with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.formats.conv import ResizeSpec

Pair = tuple[int, int]
Hook = Callable[[str, Tensor], Tensor]
Form = Union[int, tuple["Form", ...], dict[str, "Form"]]  # noqa: UP007 (strings have no | before Python 3.14)
"""The structure in which a network returns its results: the number of a result, a tuple, or a dictionary."""


@dataclass(frozen=True)
class Ref:
    """An argument that refers to the value of another node."""

    name: str


class OneInput:
    """A node or operation with one input, `x`."""

    x: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input values."""
        return (self.x,)


@dataclass(frozen=True, eq=False)
class Input:
    """The images, float [N, C, H, W], normalized as the model expects."""

    name: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values this node reads."""
        return ()


@dataclass(frozen=True, eq=False)
class Conv:
    """y = conv(x, weight) + bias (+ residual, or + conv of a second input), then ReLU if `relu`. Linear layers are such
    convolutions.

    weight [O, C / groups, R, S] and bias [O] are float32; `stride` and `padding` are (vertical, horizontal). `second` is a
    convolution of another value that is added, for example a strided shortcut; its bias is part of `bias`. `relu_max` is the
    upper bound of the ReLU, 6 for ReLU6.
    """

    name: str
    x: str
    weight: Tensor
    bias: Tensor
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    relu: bool = False
    residual: str | None = None
    second: Conv | None = None
    relu_max: float = math.inf
    groups: int = 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values this node reads."""
        others = (self.residual, self.second.x if self.second is not None else None)
        return (self.x, *(name for name in others if name is not None))

    @property
    def is_plain(self) -> bool:
        """True if there is no ReLU, residual or second convolution yet."""
        return not self.relu and self.residual is None and self.second is None


@dataclass(frozen=True, eq=False)
class Sum:
    """y = x (+ other), then ReLU with upper bound `relu_max` if `relu`: an addition or a ReLU that is not fused into a
    convolution."""

    name: str
    x: str
    other: str | None
    relu: bool = False
    relu_max: float = math.inf

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values this node reads."""
        return (self.x,) if self.other is None else (self.x, self.other)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "hardswish": F.hardswish, "sigmoid": torch.sigmoid, "hardsigmoid": F.hardsigmoid, "gelu": F.gelu,
    "tanh": torch.tanh,
}  # fmt: skip
"""Activation functions that become tables of codes."""


@dataclass(frozen=True, eq=False)
class Activation(OneInput):
    """y = f(x) for each element, with one of `ACTIVATIONS`."""

    name: str
    x: str
    function: str


@dataclass(frozen=True, eq=False)
class Gate:
    """y = x * gate, with one factor [N, C, 1, 1] for each channel of an image."""

    name: str
    x: str
    gate: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values this node reads."""
        return self.x, self.gate


@dataclass(frozen=True, eq=False)
class MaxPool(OneInput):
    """The largest value of each window."""

    name: str
    x: str
    kernel: Pair
    stride: Pair
    padding: Pair


@dataclass(frozen=True, eq=False)
class AveragePool(OneInput):
    """The mean of each channel over the whole image, [N, C, 1, 1]."""

    name: str
    x: str


@dataclass(frozen=True, eq=False)
class Resize(OneInput):
    """The image at another size, as `spec` describes."""

    name: str
    x: str
    spec: ResizeSpec


@dataclass(frozen=True, eq=False)
class Concat:
    """The channels of several values of the same height and width, one after another."""

    name: str
    parts: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values this node reads."""
        return self.parts


@dataclass(frozen=True, eq=False)
class Other:
    """Any other torch operation, target(*args, **kwargs), in floating point. A `Ref` stands for each input value.

    `reason`: why the operation has no integer form; empty for operations that only rearrange elements.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reason: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input values, once per use."""
        return tuple(ref.name for ref in _refs((self.args, self.kwargs)))


Node = Input | Conv | Sum | Activation | Gate | MaxPool | AveragePool | Resize | Concat | Other


def reads_codes(node: Node | None) -> bool:
    """True if a node computes on codes. None stands for the caller, who reads the result in floating point."""
    return isinstance(node, (Conv, Sum, Activation, Gate, MaxPool, AveragePool, Resize, Concat))


def makes_codes(node: Node) -> bool:
    """True if the value of a node can be stored as codes by the operation that computes it."""
    return isinstance(node, (Conv, Sum, Activation, Gate, MaxPool, Resize, Concat))


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes by name in topological order, the names of the results, the shape of each batched tensor, and the form in which the
    results are returned. `fused`: the node that computes a traced value which was fused into it, by name."""

    nodes: dict[str, Node]
    outputs: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    form: Form = 0
    fused: dict[str, str] = field(default_factory=dict)

    def readers(self) -> dict[str, list[str]]:
        """Returns the names of the nodes that read each value, once per use; "" stands for the caller."""
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for name in node.inputs:
                found[name].append(node.name)
        for name in self.outputs:
            found[name].append("")
        return found

    def run(self, images: Tensor, hook: Hook | None = None) -> Any:
        """Returns what the model returns for `images` [N, C, H, W]: one tensor, or several in tuples and dictionaries."""
        return filled(self.form, self.results(images, hook))

    def results(self, images: Tensor, hook: Hook | None = None) -> tuple[Tensor, ...]:
        """Returns the results for `images` [N, C, H, W], computed in their dtype and on their device.

        `hook(name, value)` is called with every floating-point value and returns its replacement.
        """
        remaining = {name: len(readers) for name, readers in self.readers().items()}
        values: dict[str, Any] = {}
        for node in self.nodes.values():
            value = self.compute(node, values, images)
            if hook is not None and isinstance(value, Tensor) and value.is_floating_point():
                value = hook(node.name, value)
            values[node.name] = value
            for name in node.inputs:
                remaining[name] -= 1
                if not remaining[name]:
                    del values[name]
        return tuple(values[name].reshape(len(images), *self.shapes[name]) for name in self.outputs)

    def compute(self, node: Node, values: dict[str, Any], images: Tensor) -> Any:
        """Returns the value of one node from those of its inputs; `images` are the input of the graph."""
        match node:
            case Input():
                return images
            case Conv():
                return convolve(node, as_images(values[node.x]), lambda name: as_images(values[name]))
            case Sum():
                y = values[node.x] if node.other is None else values[node.x] + values[node.other]
                return y.clamp(0.0, node.relu_max) if node.relu else y
            case Activation():
                return ACTIVATIONS[node.function](values[node.x])
            case Gate():
                return values[node.x] * as_images(values[node.gate])
            case MaxPool():
                return F.max_pool2d(values[node.x], node.kernel, node.stride, node.padding)
            case AveragePool():
                return values[node.x].mean((2, 3), keepdim=True)
            case Resize(_, x, spec):
                aligned = None if spec.mode == "nearest" else spec.aligned
                return F.interpolate(values[x], spec.size, mode=spec.mode, align_corners=aligned)
            case Concat():
                return torch.cat([values[name] for name in node.parts], 1)
        return call_other(node, {name: self.shaped(name, values[name]) for name in node.inputs}, images)

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the value `name` in the shape of the model's tensor."""
        shape = self.shapes.get(name)
        return value if shape is None else value.reshape(value.shape[0], *shape)

    def to(self, device: torch.device | str) -> Graph:
        """Returns the graph with its tensors on `device`."""
        return replace(self, nodes={name: on_device(node, device) for name, node in self.nodes.items()})


def convolve(node: Conv, x: Tensor, other: Callable[[str], Tensor]) -> Tensor:
    """Returns the floating-point output of `node` for x [N, C, H, W]. `other` returns its other inputs by name."""
    y = F.conv2d(x, node.weight.to(x.dtype), node.bias.to(x.dtype), node.stride, node.padding, groups=node.groups)
    if node.residual is not None:
        y = y + other(node.residual)
    if node.second is not None:
        second = node.second
        y = y + F.conv2d(other(second.x), second.weight.to(x.dtype), None, second.stride, second.padding)
    return y.clamp(0.0, node.relu_max) if node.relu else y


def call_other(node: Other, values: dict[str, Any], like: Tensor) -> Any:
    """Returns the output of a torch operation. Floating-point constants are cast to the dtype of `like`."""

    def fill(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.name]
        return value.to(like.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return node.target(*mapped(node.args, fill), **mapped(node.kwargs, fill))


def constants_on(node: Other, device: torch.device | str) -> Other:
    """Returns the operation with its constants on `device`."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return replace(node, args=mapped(node.args, moved), kwargs=mapped(node.kwargs, moved))


def filled(form: Form, results: Sequence[Any]) -> Any:
    """Returns the results in the structure of `form`."""
    if isinstance(form, dict):
        return {key: filled(part, results) for key, part in form.items()}
    return tuple(filled(part, results) for part in form) if isinstance(form, tuple) else results[form]


def as_images(x: Tensor) -> Tensor:
    """Reshapes x [N, C] to [N, C, 1, 1]; images are unchanged."""
    return x.reshape(*x.shape, 1, 1) if x.dim() == 2 else x


def on_device(node: Node, device: torch.device | str) -> Node:
    """Returns the node with its tensors on `device`."""
    if isinstance(node, Other):
        return constants_on(node, device)
    if not isinstance(node, Conv):
        return node
    second = node.second
    if second is not None:
        second = replace(second, weight=second.weight.to(device), bias=second.bias.to(device))
    return replace(node, weight=node.weight.to(device), bias=node.bias.to(device), second=second)


def rename_inputs(node: Node, names: dict[str, str]) -> Node:
    """Returns the node with its inputs renamed."""

    def new(name: str) -> str:
        return names.get(name, name)

    def renamed(value: Any) -> Any:
        return Ref(new(value.name)) if isinstance(value, Ref) else value

    match node:
        case Conv():
            second = None if node.second is None else replace(node.second, x=new(node.second.x))
            return replace(node, x=new(node.x), residual=node.residual and new(node.residual), second=second)
        case Sum():
            return replace(node, x=new(node.x), other=node.other and new(node.other))
        case Gate():
            return replace(node, x=new(node.x), gate=new(node.gate))
        case MaxPool() | AveragePool() | Activation() | Resize():
            return replace(node, x=new(node.x))
        case Concat():
            return replace(node, parts=tuple(map(new, node.parts)))
        case Other():
            return replace(node, args=mapped(node.args, renamed), kwargs=mapped(node.kwargs, renamed))
    return node


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to every leaf of nested arguments."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        yield from _refs(tuple(value.values()))
