"""Which layers need 8 bits: how far the result moves when one layer alone has 4, measured on calibration images."""

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
    """The layers kept in int8, the divergence of the result they leave, and each layer's own, largest first."""

    keep_int8: tuple[str, ...]
    divergence: float
    sensitivity: dict[str, float]


def divergence(wanted: Tensor, got: Tensor) -> float:
    """Mean Kullback-Leibler divergence of the softmax of results [N, K] from the wanted one, in nats."""
    p, q = wanted.flatten(1).double().log_softmax(1), got.flatten(1).double().log_softmax(1)
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
    """Keeps as few layers in int8 as bring the divergence of the result to `most` nats or less, most sensitive first.

    A layer's sensitivity is the divergence of a program in which it alone has the bits of `scheme` and all others 8. The number
    of layers is found by bisection; with all of them in int8 the bound may still be missed, as `divergence` then says.
    """
    with torch.no_grad():
        wanted = torch.cat([graph.run(images) for images in batches])

    low = calibrate(graph, ranges, assign_bits(graph, scheme), search)
    int8 = calibrate(graph, ranges, assign_bits(graph, "w8a8"), search)

    def measure(in_int8: Container[str]) -> float:
        return divergence(wanted, run_batches(lower(graph, mixed(graph, low, int8, in_int8)), batches))

    names = [name for name in low.bits if low.bits[name] != int8.bits[name]]
    sensitivity = {name: measure({*names} - {name}) for name in names}
    order = sorted(names, key=lambda name: -sensitivity[name])
    for name in order:
        say(f"{name}: {sensitivity[name]:.5f}")

    @functools.cache
    def with_int8(count: int) -> float:
        return measure(order[:count])

    least, enough = 0, len(order)  # the answer lies between the two
    while least < enough:
        middle = (least + enough) // 2
        least, enough = (least, middle) if with_int8(middle) <= most else (middle + 1, enough)
    return Assignment(tuple(order[:least]), with_int8(least), {name: sensitivity[name] for name in order})


def run_batches(program: Program, batches: Sequence[Tensor]) -> Tensor:
    """The results of a program for several batches, one after the other."""
    with torch.no_grad():
        return torch.cat([program.run(images) for images in batches])
