"""`python -m benchmarks tiles`: the modelled choice of tile against the next candidates, and the cost of batch invariance."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import capture, relative_error
from benchmarks.request import GemmRequest
from lowbit.formats import Scheme, parse_scheme
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.gemm import candidates, choose
from lowbit.kernels.choose.tiles import GemmShape, Tile
from lowbit.pack import FragmentWeight
from lowbit.tune.timing import WrongResult, copies_needed, gaussian, l2_bytes, quantized

TRIED = 6
"""Number of measured candidates per problem, those with the lowest modelled cost."""

MARGIN = 0.03
"""Smallest gain of another tile that justifies a row of the table; less is noise between runs."""

REPLAYS = 12
TOLERANCE = 1e-2


@dataclass(frozen=True)
class TileRow:
    """Microseconds of the chosen tile, of the fastest tried one, and of the batch-invariant one for a problem."""

    scheme: str
    shape: GemmShape
    chosen: Tile
    chosen_us: float
    best: Tile
    best_us: float
    invariant_us: float

    @property
    def worth_a_row(self) -> bool:
        return self.best_us < (1 - MARGIN) * self.chosen_us

    def measured(self, gpu: str) -> str:
        """Returns the row for `MEASURED` in kernels/choose/measured.py."""
        day = datetime.date.today().isoformat()
        return f'Measured("{gpu}", "{day}", {self.shape!r}, {self.best!r}, {self.best_us:.1f}, {self.chosen_us:.1f}),'


def measure_tiles(request: GemmRequest, machine: Machine, progress: Callable[[str], None]) -> Iterator[TileRow]:
    """Yields a row for each problem of a request on the current GPU, `machine`. Raises ValueError for 8-bit activations."""
    for scheme in map(parse_scheme, request.schemes):
        if scheme.activation is not None:
            raise ValueError(f"bench tiles measures tiles of the kernels for 16-bit activations, not {scheme}")
        for n, k in request.shapes:
            q = quantized(scheme, (n, k), request.torch_dtype)
            weight = FragmentWeight.pack(q)
            weights = [weight] + [weight.clone() for _ in range(copies_needed(weight.nbytes, l2_bytes()) - 1)]
            reference = q.dequantize(torch.float64)
            for m in request.rows:
                progress(f"{scheme} {n}x{k} M {m}")
                x = gaussian(m, k, seed=m, dtype=request.torch_dtype)
                yield _measure(scheme, GemmShape(m, n, k, scheme.weight.bits), machine, x, weights, x.double() @ reference.T)
            del q, weight, weights, reference
            torch.cuda.empty_cache()


def _measure(
    scheme: Scheme, shape: GemmShape, machine: Machine, x: Tensor, weights: list[FragmentWeight], reference: Tensor
) -> TileRow:
    chosen, invariant = choose(shape, machine), choose(shape, machine, True)
    rows = [row.tile for row in candidates(shape, machine) if not row.reasons][:TRIED]
    times = {tile: _time(tile, shape, machine, x, weights, reference) for tile in dict.fromkeys([chosen, *rows, invariant])}
    fastest = min((tile for tile in times if tile in [chosen, *rows]), key=lambda tile: times[tile])
    return TileRow(scheme.name, shape, chosen, times[chosen], fastest, times[fastest], times[invariant])


def _time(tile: Tile, shape: GemmShape, machine: Machine, x: Tensor, weights: list[FragmentWeight], reference: Tensor) -> float:
    """Returns microseconds per call. Raises WrongResult if the product is wrong."""
    from lowbit.ops.fragment_gemm import plan_for
    from lowbit.ops.workspace import workspace

    first = weights[0]
    plan = plan_for(tile, shape, first.form, x.dtype, False, machine)

    def call(w: FragmentWeight) -> Any:
        return plan(x, w.codes, w.scale, w.channel_scale, None, *workspace(x.device, *plan.workspace))

    graph = capture([lambda w=w: call(w) for w in weights])  # type: ignore[misc]
    us = statistics.median(graph.times_us(REPLAYS))
    error = max(relative_error(y, reference) for y in graph.poisoned_outputs()[: len(weights)])
    if not error <= TOLERANCE:
        raise WrongResult(f"{tile} on {shape}: relative error {error:.3g}")
    return us
