"""Layer sensitivity: the error of the result on calibration images if only one layer has 4 bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.vision.bits import LayerBits, assign_bits, calibrate, mixed
from lowbit.vision.compensate import compensated_codes
from lowbit.vision.graph import Conv, Graph
from lowbit.vision.lower import lower
from lowbit.vision.observe import Range, Search
from lowbit.vision.program import Program
from lowbit.vision.simulate import simulate


@dataclass(frozen=True)
class Assignment:
    """Layers kept in int8, the remaining divergence of the result, and the relative squared error of the result with each layer
    alone in the scheme's bits, in the order in which layers are kept."""

    keep_int8: tuple[str, ...]
    divergence: float
    sensitivity: dict[str, float]


def divergence(expected: Tensor | Sequence[Tensor], got: Tensor | Sequence[Tensor]) -> float:
    """Returns the mean KL divergence in nats of the softmax of the result [N, K] from the expected one. Of several results, and
    of results that are maps, the mean over results of the squared error divided by the squares of the expected values."""
    if isinstance(expected, Tensor) or isinstance(got, Tensor):
        expected, got = (expected,), (got,)  # type: ignore[assignment]
    return float(loss([t.double() for t in expected], [t.double() for t in got]))


def loss(expected: Sequence[Tensor], got: Sequence[Tensor]) -> Tensor:
    """Returns `divergence` as a tensor with a gradient."""
    if len(expected) == 1 and expected[0].dim() == 2:
        p, q = expected[0].log_softmax(1), got[0].log_softmax(1)
        return (p.exp() * (p - q)).sum(1).mean()
    return relative_error(expected, got)


def relative_error(expected: Sequence[Tensor], got: Sequence[Tensor]) -> Tensor:
    """Returns the mean over results of the squared error divided by the squares of the expected values."""
    errors = [(q - p).square().sum() / p.square().sum().clamp(min=1e-20) for p, q in zip(expected, got, strict=True)]
    return torch.stack(errors).mean()


def choose_int8(
    graph: Graph,
    ranges: Mapping[str, Range],
    scheme: str | Scheme,
    batches: Sequence[Tensor],
    most: float,
    search: Search = "mse",
    say: Callable[[str], None] = lambda line: None,
    rounding: Sequence[Tensor] = (),
) -> Assignment:
    """Keeps layers in int8 until the divergence of the result is at most `most`, first those that gain most per byte.

    The sensitivity of a layer is the relative squared error of the result if only this layer has the bits of `scheme` and all
    others have 8: of few images it says more than the divergence, and errors of layers add up. Its gain per byte is by how much
    it exceeds the error in int8, for each byte of weights and of the output of one image that 8 bits cost. Bisection finds the
    number of layers. Even with all layers in int8 the divergence can exceed the bound; check
    `divergence` of the result. rounding: images for which 4-bit weights are rounded by GPTQ, for networks with compensation.
    """
    with torch.no_grad():
        expected = joined([graph.results(images) for images in batches])

    low = calibrate(graph, ranges, assign_bits(graph, scheme), search)
    int8 = calibrate(graph, ranges, assign_bits(graph, "w8a8"), search)
    if rounding:
        low = compensated_codes(graph, low, int8, rounding)

    def simulated(in_int8: Container[str]) -> float:
        quantization = mixed(graph, low, int8, in_int8)
        with torch.no_grad():
            return float(relative_error(expected, joined([simulate(graph, quantization, images) for images in batches])))

    names = [name for name in low.bits if low.bits[name] != int8.bits[name]]
    least = simulated(names)
    sensitivity = {name: simulated({*names} - {name}) for name in names}
    cost = {name: bytes_in_int8(graph, name, low.bits[name]) for name in names}
    order = sorted(names, key=lambda name: (-max(sensitivity[name] - least, 0.0) / cost[name], cost[name], -sensitivity[name]))
    for name in order:
        say(f"{name}: {sensitivity[name]:.5f}")

    @functools.cache
    def with_int8(count: int) -> float:
        return divergence(expected, run_batches(lower(graph, mixed(graph, low, int8, order[:count])), batches))

    few, enough = 0, len(order)  # bisection: the answer is in [few, enough]
    while few < enough:
        middle = (few + enough) // 2
        few, enough = (few, middle) if with_int8(middle) <= most else (middle + 1, enough)
    return Assignment(tuple(order[:few]), with_int8(few), {name: sensitivity[name] for name in order})


def bytes_in_int8(graph: Graph, name: str, bits: LayerBits) -> float:
    """Returns how many bytes more a layer takes in 8 bits than in `bits`: its weights, and its output for one image."""
    node = graph.nodes[name]
    convs = (node, node.second) if isinstance(node, Conv) else ()
    weights = sum(conv.weight.numel() for conv in convs if conv is not None)
    return (weights * (8 - bits.weight) + math.prod(graph.shapes[name]) * (8 - bits.output)) / 8


def joined(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Returns the results of several batches as those of one."""
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def run_batches(program: Program, batches: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the results of a program for several batches."""
    with torch.no_grad():
        return joined([program.outcomes(images) for images in batches])
