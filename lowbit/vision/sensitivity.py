"""Layer sensitivity: the divergence of the result on calibration images if only one layer has 4 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.vision.bits import assign_bits, calibrate, mixed
from lowbit.vision.graph import Graph
from lowbit.vision.lower import lower
from lowbit.vision.observe import Range, Search
from lowbit.vision.program import Program


@dataclass(frozen=True)
class Assignment:
    """Layers kept in int8, the remaining divergence of the result, and the sensitivity of each layer, largest first."""

    keep_int8: tuple[str, ...]
    divergence: float
    sensitivity: dict[str, float]


def divergence(expected: Tensor, got: Tensor) -> float:
    """Mean KL divergence in nats of the softmax of the results [N, K] from the expected ones."""
    p, q = expected.flatten(1).double().log_softmax(1), got.flatten(1).double().log_softmax(1)
    return float((p.exp() * (p - q)).sum(1).mean())


def choose_int8(
    graph: Graph,
    ranges: Mapping[str, Range],
    scheme: str | Scheme,
    batches: Sequence[Tensor],
    most: float,
    search: Search = "mse",
    say: Callable[[str], None] = lambda line: None,
) -> Assignment:
    """Keeps the fewest layers in int8 for which the divergence of the result is at most `most` nats, most sensitive first.

    The sensitivity of a layer is the divergence of a program in which only this layer has the bits of `scheme` and all others
    have 8. Bisection finds the number of layers. Even with all layers in int8 the divergence can exceed the bound; check
    `divergence` of the result.
    """
    with torch.no_grad():
        expected = torch.cat([graph.run(images) for images in batches])

    low = calibrate(graph, ranges, assign_bits(graph, scheme), search)
    int8 = calibrate(graph, ranges, assign_bits(graph, "w8a8"), search)

    def measure(in_int8: Container[str]) -> float:
        return divergence(expected, run_batches(lower(graph, mixed(graph, low, int8, in_int8)), batches))

    names = [name for name in low.bits if low.bits[name] != int8.bits[name]]
    sensitivity = {name: measure({*names} - {name}) for name in names}
    order = sorted(names, key=lambda name: -sensitivity[name])
    for name in order:
        say(f"{name}: {sensitivity[name]:.5f}")

    @functools.cache
    def with_int8(count: int) -> float:
        return measure(order[:count])

    least, enough = 0, len(order)  # bisection: the answer is in [least, enough]
    while least < enough:
        middle = (least + enough) // 2
        least, enough = (least, middle) if with_int8(middle) <= most else (middle + 1, enough)
    return Assignment(tuple(order[:least]), with_int8(least), {name: sensitivity[name] for name in order})


def run_batches(program: Program, batches: Sequence[Tensor]) -> Tensor:
    """Returns the results of a program for several batches."""
    with torch.no_grad():
        return torch.cat([program.run(images) for images in batches])
