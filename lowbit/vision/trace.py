"""Traces a torch module to a `Graph` with torch.export, then folds batch norms and fuses operations into convolutions.

The passes, in order: recognize convolutions and pools; fold batch norms into the convolution before them; fuse ReLUs; fuse an
addition into one of the two convolutions that it adds, provided that convolution has no other reader; fuse the ReLU after the
sum. Remaining additions and ReLUs between codes become sums of codes; other activations between codes become tables, products
with one factor per channel gates, and resized and concatenated images of codes stay codes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from lowbit.formats.conv import ResizeSpec, output_size
from lowbit.vision.graph import (
    ACTIVATIONS,
    Activation,
    AveragePool,
    Concat,
    Conv,
    Form,
    Gate,
    Graph,
    Input,
    MaxPool,
    Node,
    Other,
    Pair,
    Ref,
    Resize,
    Sum,
    makes_codes,
    reads_codes,
    rename_inputs,
)

aten = torch.ops.aten
_ALIASES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default, aten.dropout.default)
FLATTENS = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.squeeze.dims)
_CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding)
_PADS = (aten.pad.default, aten.constant_pad_nd.default)
_RESIZES = {
    aten.upsample_nearest2d.vec: "nearest", aten._upsample_nearest_exact2d.vec: "nearest",
    aten.upsample_bilinear2d.vec: "bilinear",
}  # fmt: skip
_BATCH_NORMS = (aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default)
REARRANGES = (*FLATTENS, aten.cat.default, aten.permute.default, aten.transpose.int, aten.sym_size.int, operator.getitem)


FUSIONS = ("relu", "add", "shortcut")
"""Fusions into a convolution: "relu", the following ReLU; "add", the sum with another value; "shortcut", a 1 x 1 convolution
that is added, as a second product that is never stored."""


class UnsupportedNetwork(ValueError):
    """The model cannot be traced to one graph; the message says why and what to do."""


class Traced(nn.Module):
    """A module that states its graph itself, so that torch.export need not trace it."""

    def traced(self, images: Tensor) -> Graph:
        """Returns the graph for images like `images` [N, C, H, W], every operation as `Other`. Raises UnsupportedNetwork."""
        raise NotImplementedError


def trace(model: nn.Module, images: Tensor, fusions: Collection[str] = FUSIONS) -> Graph:
    """Returns the graph of `model` in evaluation mode, for images like `images` [N, C, H, W], with these fusions.

    The model is not changed. Raises UnsupportedNetwork if torch.export cannot trace it or it returns something else than
    tensors with the batch first, alone or in tuples, lists and mappings.
    """
    return fuse(unfused(model, images), fusions)


def unfused(model: nn.Module, images: Tensor) -> Graph:
    """Returns the graph with batch norms and average windows folded into convolutions, without other fusions."""
    graph = model.traced(images) if isinstance(model, Traced) else _exported(model, images)
    for step in (_recognize, _absorb_pads, _fold_batch_norms, _absorb_means):
        graph = step(graph)
    return graph


def fuse(graph: Graph, fusions: Collection[str] = FUSIONS) -> Graph:
    """Applies some of `FUSIONS` to the graph of `unfused`. Raises ValueError for another name."""
    unknown = sorted(set(fusions) - set(FUSIONS))
    if unknown:
        raise ValueError(f"fusions are {', '.join(FUSIONS)}, got {unknown[0]!r}")
    steps: dict[str, Callable[[Graph], Graph]] = {
        "relu": _fuse_relus, "add": lambda g: _fuse_adds(g, "shortcut" in fusions), "sums": _sums
    }  # fmt: skip
    for name in ("relu", "add", "relu", "sums", "relu"):
        if name in fusions or name == "sums":
            graph = steps[name](graph)
    return _without_dead(graph)


def _exported(model: nn.Module, images: Tensor) -> Graph:
    """Returns the graph of torch.export, with every operation as `Other`."""
    if images.dim() != 4:
        raise UnsupportedNetwork(f"images are [N, C, H, W], got {tuple(images.shape)}")
    example = images[:1].expand(2, *images.shape[1:]).clone()  # torch.export would specialise a batch of 1
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        program = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False).run_decompositions({})
    except (RuntimeError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UnsupportedNetwork(f"torch.export cannot trace {type(model).__name__}: {first[0]}") from error
    finally:
        for module, training in modes.items():
            module.training = training
    signature = program.graph_signature
    held = {**program.state_dict, **program.constants}
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    traced: dict[fx.Node, Any] = {}
    names: set[str] = set()
    nodes: dict[str, Node] = {}
    result: dict[str, tuple[int, ...]] = {}
    outputs: list[Any] = []
    for node in program.graph.nodes:
        if node.op == "output":
            outputs = [traced[value] if isinstance(value, fx.Node) else value for value in node.args[0]]
        elif node.op == "placeholder" and node.name in lifted:
            traced[node] = held[lifted[node.name]].detach()
        elif (same := _alias(node)) is not None:
            traced[node] = traced[same]
        else:
            name = _unique(_module_name(node), names)
            nodes[name] = Input(name) if node.op == "placeholder" else _other(name, node, traced)
            traced[node] = Ref(name)
            value = node.meta.get("val")
            shape = getattr(value[0] if node.target in _BATCH_NORMS and isinstance(value, tuple) else value, "shape", ())
            if _has_batch(shape):
                result[name] = tuple(int(size) for size in shape[1:])
    for i, value in enumerate(outputs):
        if not isinstance(value, Ref) or value.name not in result:
            raise UnsupportedNetwork(
                f"result {i} of {type(model).__name__} is no tensor with the batch first: wrap the model in a module that "
                "returns such tensors (logits, features, boxes), alone or in tuples and dictionaries"
            )
    form = _form(pytree.tree_unflatten(range(len(outputs)), program.call_spec.out_spec))
    return Graph(nodes, tuple(value.name for value in outputs), result, form)


def _form(results: Any) -> Form:
    """Returns the form of numbered results in nested containers; a container with one tensor stands for the tensor."""
    if isinstance(results, int):
        return results
    if isinstance(results, Mapping):
        form: Form = {str(key): _form(part) for key, part in results.items() if part is not None}
    else:
        form = tuple(_form(part) for part in results)
    return 0 if pytree.tree_leaves(form) == [0] else form


def _has_batch(shape: Any) -> bool:
    """True if a traced shape is a batch dimension followed by fixed sizes."""
    sizes = tuple(shape)
    return len(sizes) > 0 and isinstance(sizes[0], torch.SymInt) and all(isinstance(size, int) for size in sizes[1:])


def _alias(node: fx.Node) -> fx.Node | None:
    """Returns the node that has the same value as this one, or None."""
    first: Any = node.args[0] if node.args else None
    if node.target in _ALIASES:
        return first
    if node.target is aten.adaptive_avg_pool2d.default and first is not None and _shape(node) == _shape(first):
        return first  # each window is one pixel, as in a VGG at its native size
    is_item = node.target is operator.getitem and isinstance(first, fx.Node) and node.args[1] == 0
    return first if is_item and first.target in _BATCH_NORMS else None


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _other(name: str, node: fx.Node, traced: dict[fx.Node, Any]) -> Other:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: traced[n])
    args = tuple(list(a) if isinstance(a, (list, tuple)) else a for a in args)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    if target is aten._native_batch_norm_legit_no_training.default:  # returns three tensors; batch_norm returns the first
        x, weight, bias, mean, variance, momentum, eps = args
        target, args = aten.batch_norm.default, (x, weight, bias, mean, variance, False, momentum, eps, False)
    if target in (aten.view.default, aten._unsafe_view.default):  # values here need not be contiguous as in the traced model
        target = aten.reshape.default
    reason = "" if target in REARRANGES else f"{getattr(target, '__name__', target)} has no integer form here"
    return Other(name, target, args, dict(kwargs), reason)


def _module_name(node: fx.Node) -> str:
    """Returns the module path of a node that computes the module itself; otherwise torch's name of the node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    own = stack and node.target in (aten.conv2d.default, aten.conv2d.padding, aten.linear.default, aten.max_pool2d.default)
    return stack[-1][0] if own and stack[-1][0] else node.name


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}:{count}"
    taken.add(candidate)
    return candidate


def _rewritten(graph: Graph, rewrite: Callable[[Node, dict[str, Node]], tuple[Node, str | None]]) -> Graph:
    """Applies `rewrite(node, nodes so far)` in order. It returns the new node, and the name of an earlier node that the new
    one replaces."""
    nodes: dict[str, Node] = {}
    names: dict[str, str] = {}
    for node in graph.nodes.values():
        new, taken = rewrite(rename_inputs(node, names), nodes)
        if taken is not None:
            del nodes[taken]
            names[node.name] = new.name
        nodes[new.name] = new
    shapes = {name: shape for name, shape in graph.shapes.items() if name in nodes}
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    fused = {name: names.get(node, node) for name, node in graph.fused.items()} | names
    return replace(graph, nodes=nodes, outputs=outputs, shapes=shapes, fused=fused)


def _recognize(graph: Graph) -> Graph:
    def rewrite(node: Node, nodes: dict[str, Node]) -> tuple[Node, str | None]:
        if isinstance(node, Other):
            for kind in (_convolution, _linear, _max_pool, _average_pool):
                found = kind(node, nodes, graph.shapes)
                if found is not None:
                    return found, None
        return node, None

    return _without_dead(_rewritten(graph, rewrite))


def _convolution(node: Other, nodes: dict[str, Node], shapes: dict[str, tuple[int, ...]]) -> Node | None:
    if node.target not in _CONVOLUTIONS:
        return None
    defaults: tuple[Any, ...] = (None, None, None, (1, 1), (0, 0), (1, 1), 1)
    x, weight, bias, stride, padding, dilation, groups = (*node.args, *defaults[len(node.args) :])
    kernel = weight.shape[2:] if isinstance(weight, Tensor) else ()
    refused = [
        (not isinstance(x, Ref) or not isinstance(weight, Tensor), "its weight is computed"),
        (tuple(dilation) not in ((1, 1), (1,)), f"its dilation is {tuple(dilation)}, 1 is supported"),
        (padding == "same" and any(k % 2 == 0 for k in kernel), f"padding 'same' of a kernel {tuple(kernel)} is not symmetric"),
    ]
    reasons = [reason for wrong, reason in refused if wrong]
    if reasons:
        return replace(node, reason=f"convolution: {', '.join(reasons)}")
    if isinstance(padding, str):
        padding = [k // 2 for k in kernel] if padding == "same" else [0, 0]
    bias = torch.zeros(weight.shape[0], device=weight.device) if bias is None else bias
    return Conv(node.name, x.name, weight.float(), bias.float(), _pair(stride), _pair(padding), groups=groups)


def _linear(node: Other, nodes: dict[str, Node], shapes: dict[str, tuple[int, ...]]) -> Node | None:
    """Converts a linear layer to a convolution whose kernel is the whole image; removes a flatten before it."""
    if node.target is not aten.linear.default:
        return None
    x, weight, bias = (*node.args, None)[:3]
    if not isinstance(x, Ref) or not isinstance(weight, Tensor) or len(shapes.get(x.name, ())) != 1:
        return replace(node, reason="linear layer of something else than one vector per image")
    source, name = nodes[x.name], x.name
    if isinstance(source, Other) and source.target in FLATTENS and len(shapes.get(source.inputs[0], ())) == 3:
        name = source.inputs[0]
    image = shapes[name] if len(shapes[name]) == 3 else (*shapes[name], 1, 1)
    bias = torch.zeros(weight.shape[0], device=weight.device) if bias is None else bias
    return Conv(node.name, name, weight.float().reshape(-1, *image), bias.float())


def _max_pool(node: Other, nodes: dict[str, Node], shapes: dict[str, tuple[int, ...]]) -> Node | None:
    if node.target is not aten.max_pool2d.default:
        return None
    defaults: tuple[Any, ...] = (None, None, [], (0, 0), (1, 1), False)
    x, kernel, stride, padding, dilation, ceil = (*node.args, *defaults[len(node.args) :])
    whole = shapes.get(x.name, ())[1:], _pair(kernel), _pair(stride or kernel), _pair(padding)
    if _pair(dilation) != (1, 1) or (ceil and output_size(*whole) != shapes[node.name][1:]):  # type: ignore[arg-type]
        return replace(node, reason="max pool with dilation, or with ceil_mode and a window that is cut off")
    return MaxPool(node.name, x.name, _pair(kernel), _pair(stride or kernel), _pair(padding))


def _average_pool(node: Other, nodes: dict[str, Node], shapes: dict[str, tuple[int, ...]]) -> Node | None:
    shape = shapes.get(node.inputs[0], ()) if node.inputs else ()
    if len(shape) != 3:
        return None
    pooled = node.target is aten.adaptive_avg_pool2d.default and _pair(node.args[1]) == (1, 1)
    if node.target is aten.mean.dim and not node.kwargs:
        pooled = sorted(d % 4 for d in node.args[1]) == [2, 3]
    if node.target is aten.avg_pool2d.default:
        pooled = _pair(node.args[1]) == shape[1:] and len(node.args) <= 3
    return AveragePool(node.name, node.inputs[0]) if pooled else None


def _pair(value: Any) -> tuple[int, int]:
    """Converts a single size, or two sizes, to (vertical, horizontal)."""
    if isinstance(value, Iterable):
        sizes = [int(v) for v in value]
        return (sizes[0], sizes[-1])
    return (int(value), int(value))


def _absorb_pads(graph: Graph) -> Graph:
    """Moves zeros around an image into the padding of the convolution that reads it.

    Convolutions pad both sides alike. Where one side has more ("SAME" of TensorFlow with stride 2), the window gets rows or
    columns of zero weights on the other side.
    """

    def rewrite(node: Node, nodes: dict[str, Node]) -> tuple[Node, str | None]:
        borders = _zero_borders(nodes[node.x], graph.shapes) if isinstance(node, Conv) else None
        if not isinstance(node, Conv) or borders is None:
            return node, None
        (up, down), (left, right) = ((a + p, b + p) for (a, b), p in zip(borders, node.padding, strict=True))
        zeros = (max(right - left, 0), max(left - right, 0), max(down - up, 0), max(up - down, 0))
        weight = functional.pad(node.weight, zeros)
        return replace(node, x=nodes[node.x].inputs[0], weight=weight, padding=(max(up, down), max(left, right))), None

    return _without_dead(_rewritten(graph, rewrite))


def _zero_borders(node: Node, shapes: dict[str, tuple[int, ...]]) -> tuple[Pair, Pair] | None:
    """Returns ((top, bottom), (left, right)), the zeros that a pad operation adds to an image; None for other nodes."""
    if not isinstance(node, Other) or node.target not in _PADS or len(shapes.get(node.name, ())) != 3:
        return None
    sizes, *how = node.args[1:]
    mode = how[0] if node.target is aten.pad.default and how else "constant"
    value = how[-1] if how and not isinstance(how[-1], str) else 0.0
    value = node.kwargs.get("value", value)
    if mode != "constant" or value not in (None, 0, 0.0) or len(sizes) not in (2, 4) or min(sizes) < 0:
        return None
    left, right, up, down = (*sizes, 0, 0)[:4]
    return (up, down), (left, right)


def _fold_batch_norms(graph: Graph) -> Graph:
    readers = graph.readers()

    def rewrite(node: Node, nodes: dict[str, Node]) -> tuple[Node, str | None]:
        if not isinstance(node, Other) or node.target is not aten.batch_norm.default:
            return node, None
        source = nodes[node.inputs[0]]
        if len(readers[source.name]) == 1 and isinstance(source, Conv) and source.is_plain:
            weight, bias = _normalized(source.weight, source.bias, node)
            return replace(source, weight=weight, bias=bias), source.name
        if len(readers[source.name]) == 1 and isinstance(source, Other) and source.target in _CONVOLUTIONS:
            x, kernel, shift, *rest = (*source.args, None)[: max(3, len(source.args))]
            if isinstance(kernel, Tensor):  # for example one with groups
                shift = torch.zeros(len(kernel), device=kernel.device) if shift is None else shift
                return replace(source, args=(x, *_normalized(kernel, shift, node), *rest)), source.name
        return replace(node, reason="batch norm that does not follow a convolution of its own"), None

    return _rewritten(graph, rewrite)


def _normalized(weight: Tensor, bias: Tensor, batch_norm: Other) -> tuple[Tensor, Tensor]:
    """Returns weight and bias of a convolution with its batch norm folded in."""
    _, scale, offset, mean, variance, _, _, eps, _ = batch_norm.args
    gain = (variance.double() + eps).rsqrt() * (1.0 if scale is None else scale.double())
    shift = (bias.double() - mean.double()) * gain + (0.0 if offset is None else offset.double())
    return (weight.double() * gain[:, None, None, None]).float(), shift.float()


def _absorb_means(graph: Graph) -> Graph:
    """Converts a 1x1 convolution of an average pool without overlap (ResNet-D shortcut) to one convolution over the windows."""

    def rewrite(node: Node, nodes: dict[str, Node]) -> tuple[Node, str | None]:
        pointwise = isinstance(node, Conv) and node.weight.shape[2:] == (1, 1) and node.groups == 1
        if not isinstance(node, Conv) or not pointwise or node.stride != (1, 1) or node.padding != (0, 0):
            return node, None
        pool = nodes[node.x]
        window = _window_of_means(pool, graph.shapes)
        if window is None:
            return node, None
        weight = (node.weight / (window[0] * window[1])).expand(-1, -1, *window).contiguous()
        return replace(node, x=pool.inputs[0], weight=weight, stride=window), None

    return _without_dead(_rewritten(graph, rewrite))


def _window_of_means(node: Node, shapes: dict[str, tuple[int, ...]]) -> Pair | None:
    """Returns the window of an average pool that tiles the image exactly, or None."""
    if not isinstance(node, Other) or node.target is not aten.avg_pool2d.default:
        return None
    defaults: tuple[Any, ...] = (None, None, [], (0, 0), False, True, None)
    x, kernel, stride, padding, _, _, divisor = (*node.args, *defaults[len(node.args) :])
    height, width = shapes[x.name][1:]
    window = _pair(kernel)
    plain = _pair(stride or kernel) == window and _pair(padding) == (0, 0) and divisor is None
    return window if plain and height % window[0] == 0 and width % window[1] == 0 else None


def _fuse_relus(graph: Graph) -> Graph:
    readers = graph.readers()

    def rewrite(node: Node, nodes: dict[str, Node]) -> tuple[Node, str | None]:
        most = _relu_max(node)
        if most is not None:
            conv = nodes[node.inputs[0]]
            if isinstance(conv, (Conv, Sum)) and not conv.relu and len(readers[conv.name]) == 1:
                return replace(conv, relu=True, relu_max=most), conv.name
        return node, None

    return _rewritten(graph, rewrite)


def _sums(graph: Graph) -> Graph:
    """Converts additions and ReLUs of codes to `Sum`, other activations to `Activation`, products with a factor per channel to
    `Gate`, concatenations of channels to `Concat` and changes of size to `Resize`, if their result is read as codes. A `Resize`
    that is a result is one, too: so only the smaller image is computed."""
    readers = graph.readers()
    wanted: set[str] = set()  # values that are read as codes
    for name, node in reversed(graph.nodes.items()):
        read = [graph.nodes.get(reader) for reader in readers[name]]
        on_codes = (reads_codes(r) or (r is not None and r.name in wanted and _terms(r, graph.shapes)) for r in read)
        if any(on_codes) or (None in read and _resize(node, graph.shapes)):
            wanted.add(name)

    def rewrite(node: Node, nodes: dict[str, Node]) -> tuple[Node, str | None]:
        terms = _terms(node, graph.shapes)
        if terms is None or node.name not in wanted:
            return node, None
        function = _function(node)
        if function is not None:
            # A table is for signed codes; the output of a ReLU may have codes without sign.
            unsigned = _has_relu(nodes[terms[0]], nodes)
            return (node, None) if unsigned else (Activation(node.name, terms[0], function), None)
        if not all(makes_codes(nodes[name]) for name in terms):
            return node, None
        if (spec := _resize(node, graph.shapes)) is not None:
            return Resize(node.name, terms[0], spec), None
        if isinstance(node, Other) and node.target is aten.cat.default:
            return Concat(node.name, terms), None
        if isinstance(node, Other) and node.target is aten.mul.Tensor:
            unsigned = _has_relu(nodes[terms[1]], nodes)
            return (node, None) if unsigned else (Gate(node.name, *terms), None)
        most = _relu_max(node)
        return Sum(node.name, terms[0], (*terms, None)[1], most is not None, math.inf if most is None else most), None

    return _rewritten(graph, rewrite)


def _terms(node: Node, shapes: dict[str, tuple[int, ...]]) -> tuple[str, ...] | None:
    """Returns the inputs of an activation, of an addition of equal shapes, of a change of size, of a concatenation of channels,
    or of a product with one factor per channel, the factor last; None for other nodes."""
    if _resize(node, shapes) is not None:
        return node.inputs
    if isinstance(node, Other) and node.target is aten.cat.default:
        images = all(len(shapes.get(name, ())) == 3 for name in (node.name, *node.inputs))
        return node.inputs if images and (*node.args, 0)[1] in (1, -3) else None
    if isinstance(node, Other) and node.target is aten.mul.Tensor and not node.kwargs and len(node.inputs) == 2:
        x, gate = sorted(node.inputs, key=lambda name: -math.prod(shapes.get(name, ())))
        of_x, of_gate = shapes.get(x, ()), shapes.get(gate, ())
        return (x, gate) if len(of_x) == 3 and of_gate == (of_x[0], 1, 1) else None
    if _function(node) is not None:
        return node.inputs if len(shapes.get(node.name, ())) == 3 else None
    adds = isinstance(node, Other) and node.target is aten.add.Tensor and not node.kwargs and len(node.inputs) == 2
    if not adds and _relu_max(node) is None:
        return None
    found = {shapes.get(name, ()) for name in (node.name, *node.inputs)}
    return node.inputs if len(found) == 1 and len(found.pop()) == 3 else None


def _resize(node: Node, shapes: dict[str, tuple[int, ...]]) -> ResizeSpec | None:
    """Returns how a node changes the size of an image, if that has an integer form; None for other nodes."""
    if not isinstance(node, Other) or node.target not in _RESIZES or len(shapes.get(node.name, ())) != 3:
        return None
    mode, given, out = _RESIZES[node.target], shapes.get(node.inputs[0], ())[1:], shapes[node.name][1:]
    aligned = mode == "bilinear" and bool(node.args[2])
    factors = node.args[-1] or [b / a for a, b in zip(given, out, strict=True)]
    if not aligned and any(a * f != b for a, f, b in zip(given, factors, out, strict=True)):
        return None  # torch takes positions from the factor, which the sizes do not show
    spec = ResizeSpec(mode, _pair(out), aligned)
    return None if spec.refusals(_pair(given)) else spec


def _function(node: Node) -> str | None:
    """Returns the name of the activation function that a node computes, without parameters; None for other nodes."""
    if not isinstance(node, Other) or node.kwargs or len(node.args) != 1:
        return None
    return next((name for name in ACTIVATIONS if node.target is getattr(aten, name).default), None)


def _has_relu(node: Node, nodes: dict[str, Node]) -> bool:
    """True if a node's codes can be stored without sign."""
    if isinstance(node, Concat):
        return all(_has_relu(nodes[name], nodes) for name in node.parts)
    return (
        _has_relu(nodes[node.x], nodes) if isinstance(node, (MaxPool, Resize)) else isinstance(node, (Conv, Sum)) and node.relu
    )


def _relu_max(node: Node) -> float | None:
    """Returns the upper bound of a ReLU: infinity, or 6 for ReLU6; None for other nodes."""
    if isinstance(node, Sum) and node.other is None and node.relu:
        return node.relu_max
    if not isinstance(node, Other) or node.kwargs:
        return None
    if node.target is aten.relu.default:
        return math.inf
    if node.target is aten.relu6.default:
        return 6.0
    defaults: dict[Any, tuple[Any, Any]] = {aten.hardtanh.default: (-1.0, 1.0), aten.clamp.default: (None, None)}
    if node.target not in defaults:
        return None
    low, high = (*node.args[1:], *defaults[node.target][len(node.args) - 1 :])
    return float(math.inf if high is None else high) if low == 0 and (high is None or high > 0) else None


def _fuse_adds(graph: Graph, fold_shortcuts: bool) -> Graph:
    readers = graph.readers()

    def rewrite(node: Node, nodes: dict[str, Node]) -> tuple[Node, str | None]:
        if not isinstance(node, Other) or node.target is not aten.add.Tensor or node.kwargs or len(node.inputs) != 2:
            return node, None
        left, right = node.inputs
        if graph.shapes.get(left) != graph.shapes.get(right) or len(graph.shapes.get(left, ())) != 3:
            return node, None
        convs = [conv for name in (left, right) if (conv := _plain_conv(name, nodes, readers)) is not None]
        if not convs:
            return node, None
        # The shortcut is the convolution whose windows do not overlap and whose input has other readers. If both qualify, it is
        # the first one.
        convs.sort(key=lambda c: (_without_overlap(c) and len(readers[c.x]) > 1, _without_overlap(c)))
        main, *others = convs
        if others and fold_shortcuts and _without_overlap(others[0]):
            del nodes[others[0].name]
            second = replace(others[0], bias=torch.zeros_like(others[0].bias))
            return replace(main, second=second, bias=main.bias + others[0].bias), main.name
        return replace(main, residual=right if main.name == left else left), main.name

    return _rewritten(graph, rewrite)


def _without_overlap(conv: Conv) -> bool:
    """True if no input pixel contributes to two outputs: a 1x1 window, or one as large as the stride."""
    window = tuple(conv.weight.shape[2:])
    return conv.padding == (0, 0) and (window == (1, 1) or window == conv.stride)


def _plain_conv(name: str, nodes: dict[str, Node], readers: dict[str, list[str]]) -> Conv | None:
    """Returns the convolution `name` if it has one reader and nothing is fused after its bias."""
    conv = nodes[name]
    fits = isinstance(conv, Conv) and conv.is_plain and conv.groups == 1
    return conv if fits and len(readers[name]) == 1 else None  # type: ignore[return-value]


def _without_dead(graph: Graph) -> Graph:
    """Removes nodes whose values are not needed; the input stays."""
    needed = set(graph.outputs)
    for node in reversed(graph.nodes.values()):
        if node.name in needed:
            needed.update(node.inputs)
    nodes = {name: node for name, node in graph.nodes.items() if name in needed or isinstance(node, Input)}
    return replace(graph, nodes=nodes, shapes={name: shape for name, shape in graph.shapes.items() if name in nodes})
