"""The tiles tried for a product, and how long each takes on this GPU.

Tried are the cheapest tiles by the cost model, the cheapest of each kind, neighbours that the choice does not consider, and the
tiles chosen for larger M, since rows of x can be padded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.formats import PerTensor, Scheme, parse_scheme
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.candidate import Candidate
from lowbit.kernels.choose.gemm import candidates
from lowbit.kernels.choose.scaled_gemm import KINDS as SCALED
from lowbit.kernels.choose.scaled_gemm import ScaledTile, candidates_scaled
from lowbit.kernels.choose.small_m import ring_candidate
from lowbit.kernels.choose.tiles import KINDS as MIXED
from lowbit.kernels.choose.tiles import GemmShape, MmaTile, RingTile, WgmmaTile
from lowbit.kernels.choose.tuned import written
from lowbit.kernels.reference.activations import quantize_activations_reference
from lowbit.ops.byte_gemm import plan_for_scaled
from lowbit.ops.fragment_gemm import plan_for
from lowbit.ops.table import scaled_shape
from lowbit.pack import FragmentWeight, OperandWeight
from lowbit.quantize import rtn
from lowbit.tune.timing import (
    ROW_TOLERANCE,
    TOLERANCE,
    Graph,
    Memory,
    WrongResult,
    copies_needed,
    failures,
    l2_bytes,
    quantized,
    reason,
    times_in_turn,
)

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import RecordedKernel

STATIC_LARGEST = 6.0
"""What a static scale maps to the largest code; Gaussian numbers are hardly ever larger."""

CHEAPEST = 12
"""Tiles that are tried because the model thinks them cheapest."""
KIND_COST = 1.8
"""Of each kind, the cheapest tile is tried if the model has it within this of the cheapest of all."""
NEIGHBOURS, MOST_SPLITS = 2, 12
"""Of so many of the cheapest, tiles that the choice does not consider; K is cut into no more parts there."""
LARGER = 2
"""And what the next larger numbers of tokens of the grid choose."""
MOST_OPERATIONS = 4e12
"""2 M N K of the largest products measured: beyond, every tile fills the GPU many times over."""

GRAPH_US, LONGEST_GRAPH_US, MOST_LAUNCHES = 500.0, 2500.0, 96
"""A graph holds about so much work, no more than that where its weights would be more, and at most so many launches."""
SCREENED, SLOWER, FINALISTS, REPLAYS = 2, 1.06, 3, 7
"""Each tile is timed `SCREENED` times; the chosen and the fastest ones, at most `FINALISTS` and at most `SLOWER` times the
fastest, `REPLAYS` times more, in turn, and of them the median of these counts."""
AnyTile = RingTile | WgmmaTile | MmaTile | ScaledTile
TILES = {**MIXED, **SCALED}
Watch = Callable[[int, int, str], None]
"""Called with products done, products in all and what is measured now."""


def parse_rows(text: str) -> tuple[int, ...]:
    """Numbers of rows M of a text such as 1,16,64; raises ValueError that shows the form."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or any(not part.isdigit() or not int(part) for part in parts):
        raise ValueError(f"--m {text!r}: numbers of rows of x are positive and separated by commas, for example 1,16,64")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class Codes:
    """x [M, K] as int8 or fp8 codes with float32 scales and int32 zeros, or None without, [M, 1] or [1]."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None


def quantized_x(x: Tensor, scheme: Scheme) -> Codes:
    """x as the scheme has it."""
    fmt = scheme.activation
    assert fmt is not None
    static = zero = None
    if isinstance(scheme.granularity, PerTensor):
        static = torch.full((1,), STATIC_LARGEST / fmt.max, device=x.device)
        zero = torch.zeros(1, dtype=torch.int32, device=x.device) if scheme.activation_zero else None
    return Codes(*quantize_activations_reference(x, fmt, scale=static, symmetric=not scheme.activation_zero, zero=zero))


def kind_of(tile: AnyTile) -> tuple[Any, ...]:
    """What tiles have in common that the model should put in the right order among themselves."""
    if isinstance(tile, RingTile):
        return "ring", tile.tokens, tile.warps_n, tile.warps_k, tile.splits > 1
    if isinstance(tile, WgmmaTile):
        return "wgmma", tile.tokens, tile.warpgroups, tile.splits == 0
    if isinstance(tile, MmaTile):
        return "mma", tile.tokens, tile.rows
    return "scaled", tile.tokens_are_rows, tile.warpgroups, tile.columns, tile.pair


class Products:
    """Products with weights of a scheme on a machine, x of 16 bits."""

    def __init__(self, scheme: Scheme, machine: Machine) -> None:
        self.scheme, self.machine = scheme, machine
        self.able = functools.lru_cache(maxsize=64)(self._able)
        """The tiles that can multiply x [m, k] by w [n, k], the chosen one first."""

    def shape(self, m: int, n: int, k: int) -> Any:
        """What the choice sees of a product."""
        return GemmShape(m, n, k, self.scheme.weight.bits)

    def _able(self, m: int, n: int, k: int) -> list[Candidate[Any]]:
        return [row for row in candidates(self.shape(m, n, k), self.machine) if not row.reasons]

    def pack(self, q: Any) -> Any:
        """The kernels' form of a weight."""
        return FragmentWeight.pack(q)

    def given(self, x: Tensor) -> Any:
        """x as the kernels take it."""
        return x

    def plan(self, tile: Any, m: int, n: int, k: int, w: Any) -> Any:
        """The plan of a product by a tile."""
        return plan_for(tile, self.shape(m, n, k), w.form, torch.float16, False, self.machine)

    def multiply(self, plan: Any, x: Any, w: Any, room: tuple[Tensor, Tensor]) -> Tensor:
        """y [M, N]; `room` is the workspace."""
        y: Tensor = plan(x, w.codes, w.scale, w.channel_scale, None, *room)
        return y


class ScaledProducts(Products):
    """The same for x of 8 bits, quantized per token."""

    def shape(self, m: int, n: int, k: int) -> Any:
        return scaled_shape(self.scheme, m, n, k)

    def _able(self, m: int, n: int, k: int) -> list[Candidate[Any]]:
        return [row for row in candidates_scaled(self.shape(m, n, k), self.machine) if not row.reasons]

    def pack(self, q: Any) -> Any:
        return OperandWeight.pack(q)

    def given(self, x: Tensor) -> Any:
        return quantized_x(x, self.scheme)

    def plan(self, tile: Any, m: int, n: int, k: int, w: Any) -> Any:
        return plan_for_scaled(
            tile, self.shape(m, n, k), self.scheme, torch.float16, "token", False, False, self.machine
        )  # fmt: skip

    def multiply(self, plan: Any, x: Any, w: Any, room: tuple[Tensor, Tensor]) -> Tensor:
        y: Tensor = plan(x.codes, x.scale, None, w.codes, w.scale, w.channel_scale, w.sums, None, *room)
        return y


def products_of(scheme: str, machine: Machine) -> Products:
    """The products of a scheme; raises ValueError for one of which a machine has no choice."""
    parsed = parse_scheme(scheme)
    if parsed.activation is None:
        return Products(parsed, machine)
    if "wgmma" not in machine.arch.features:
        raise ValueError(f"{parsed}: the kernel for 8-bit activations has one tile on {machine.product} (sm_{machine.arch.sm})")
    return ScaledProducts(parsed, machine)


@dataclass(frozen=True)
class TrialGrid:
    """What a run measures: weights [N, K] in order, schemes, values of M. A run stops early after `seconds`."""

    shapes: tuple[tuple[int, int], ...]
    schemes: tuple[str, ...]
    tokens: tuple[int, ...]
    seconds: float = math.inf

    def tokens_of(self, n: int, k: int) -> list[int]:
        """The numbers of tokens measured with a weight."""
        return [m for m in self.tokens if 2.0 * m * n * k <= MOST_OPERATIONS]

    @property
    def count(self) -> int:
        """Products in all."""
        return len(self.schemes) * sum(len(self.tokens_of(*shape)) for shape in self.shapes)


def tried(of: Products, m: int, n: int, k: int, tokens: Sequence[int]) -> list[AnyTile]:
    """The tiles that are timed for a product, the chosen one first."""
    rows = of.able(m, n, k)
    limit = KIND_COST * min(row.cost_us for row in rows)
    kinds: dict[tuple[Any, ...], AnyTile] = {}
    for row in rows:
        if row.cost_us <= limit:
            kinds.setdefault(kind_of(row.tile), row.tile)
    cheapest = [row.tile for row in rows[:CHEAPEST] if row.cost_us <= limit]
    others = [tile for row in rows[:NEIGHBOURS] for tile in neighbours(row.tile, of.shape(m, n, k), of.machine)]
    larger = [of.able(more, n, k)[0].tile for more in tokens if more > m][:LARGER]
    return list(dict.fromkeys([rows[0].tile, *cheapest, *kinds.values(), *others, *larger]))


def neighbours(tile: AnyTile, shape: Any, machine: Machine) -> list[AnyTile]:
    """Tiles that the choice does not consider: rings of half and twice the length, as many splits of K as fill the GPU once."""
    if isinstance(tile, RingTile):
        found = [dataclasses.replace(tile, rounds=rounds) for rounds in {tile.rounds // 2, 2 * tile.rounds} if rounds]
        return [t for t in found if t.row_blocks * t.rounds <= 8 and not ring_candidate(t, shape, machine).reasons]
    if isinstance(tile, WgmmaTile):
        tiles = -(-shape.m // tile.tokens) * -(-shape.n // tile.rows)
        splits = min(machine.sm_count // tiles, shape.steps(128), MOST_SPLITS)
        return [dataclasses.replace(tile, splits=splits)] if splits > 1 else []
    return []


def kernels(asked: TrialGrid, machine: Machine) -> list[RecordedKernel]:
    """The distinct kernels of a run; needs Triton but no GPU."""
    from lowbit.kernels.parts.launch import recording

    wanted: list[RecordedKernel] = []
    for scheme in asked.schemes:
        of = products_of(scheme, machine)
        small = of.pack(rtn(torch.ones(16, 128), of.scheme))
        room = torch.empty(1), torch.empty(1, dtype=torch.int32)
        plans: dict[Any, tuple[Any, int, int]] = {}
        for n, k in asked.shapes:
            for m in asked.tokens_of(n, k):
                for tile in tried(of, m, n, k, asked.tokens_of(n, k)):
                    plan = of.plan(tile, m, n, k, small)
                    plans.setdefault((type(plan), plan.config), (plan, m, k))
        with recording() as found:
            for plan, m, k in plans.values():
                of.multiply(plan, _blank(of, m, k), small, room)
        wanted += [each for each in found if each not in wanted]
    return wanted


def _blank(of: Products, m: int, k: int) -> Any:
    """x that is never read."""
    if of.scheme.activation is None:
        return torch.empty(m, k, dtype=torch.float16)
    dtype = of.given(torch.ones(1, 16)).codes.dtype
    return Codes(torch.empty(m, k, dtype=torch.int8).view(dtype), torch.empty(m, 1))


def launches(us: float, copies: int) -> int:
    """Calls in a graph of a product that takes about so long, with so many copies of the weight."""
    fit = max(2, int(LONGEST_GRAPH_US / us))
    return min(MOST_LAUNCHES, fit, max(copies, math.ceil(GRAPH_US / us)))


@dataclass
class Trial:
    """The captured calls of a tile, and its shortest time in microseconds."""

    graph: Graph
    us: float


class Trials:
    """One weight under one scheme, in as many copies as it takes, and what tiles of its products take."""

    def __init__(self, of: Products, n: int, k: int, x: Tensor) -> None:
        self.of, self.n, self.k, self.x = of, n, k, x
        q = quantized(of.scheme, (n, k))
        first = of.pack(q)
        given = of.given(x)
        wide = x if given is x else (given.codes.float() * given.scale).to(torch.float16)
        self.reference = wide @ q.dequantize(torch.float16).T
        del q, wide
        self.weights = [first, *(first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1))]
        self.memory = Memory()

    def measure(self, m: int, tiles: Sequence[AnyTile]) -> dict[str, Any]:
        """The chosen tile, the first of them; microseconds of each; why others failed."""
        failed: dict[str, str] = {}
        plans: dict[AnyTile, Any] = {}
        for tile in tiles:
            try:
                plans[tile] = self.of.plan(tile, m, self.n, self.k, self.weights[0])
            except failures() as error:
                failed[written(tile, TILES)] = reason(error)
        sums, counters = (max([1, *(plan.workspace[i] for plan in plans.values())]) for i in (0, 1))
        on = self.x.device
        room = torch.empty(sums, device=on), torch.zeros(counters, dtype=torch.int32, device=on)
        count = launches(self.of.able(m, self.n, self.k)[0].cost_us, len(self.weights))
        x = self.of.given(self.x[:m])
        times: dict[AnyTile, float] = {}
        trials: dict[AnyTile, Trial] = {}
        for tile, plan in plans.items():
            try:
                trials[tile] = self._trial(plan, m, x, room, count)
            except failures() as error:
                failed[written(tile, TILES)] = reason(error)
                continue
            times[tile] = trials[tile].us
            limit = SLOWER * min(times.values())
            trials = {each: trial for each, trial in trials.items() if each == tiles[0] or trial.us <= limit}
        last = finalists({tile: trial.us for tile, trial in trials.items()}, tiles[0])
        again = times_in_turn([trials[tile].graph for tile in last], REPLAYS, warm=1)
        medians = {tile: statistics.median(found) for tile, found in zip(last, again, strict=True)}
        level = statistics.fmean(us / times[tile] for tile, us in medians.items()) if medians else 1.0
        times = {tile: medians.get(tile, level * us) for tile, us in times.items()}
        return {
            "chosen": written(tiles[0], TILES), "us": {written(tile, TILES): round(us, 3) for tile, us in times.items()},
            "failed": failed,
        }  # fmt: skip

    def _trial(self, plan: Any, m: int, x: Any, room: tuple[Tensor, Tensor], count: int) -> Trial:
        """The shortest time of a tile; raises WrongResult when what it computes is something else."""
        chosen = [self.weights[i % len(self.weights)] for i in range(count)]
        graph = Graph([partial(self.of.multiply, plan, x, w, room) for w in chosen], self.memory)
        ends = graph.outputs[0], graph.outputs[-1]
        for y in ends:
            y.fill_(math.nan)
        us = min(graph.times_us(SCREENED, warm=1))
        for y in ends:
            check(y, self.reference[:m])
        return Trial(graph, us)


def finalists(times: dict[AnyTile, float], chosen: AnyTile) -> list[AnyTile]:
    """The tiles that are timed again: the fastest ones, and the chosen one if it ran."""
    fast = [tile for tile in sorted(times, key=lambda tile: times[tile]) if times[tile] <= SLOWER * min(times.values())]
    return list(dict.fromkeys([*fast[:FINALISTS], *([chosen] if chosen in times else [])]))


def check(y: Tensor, reference: Tensor) -> None:
    """Raises WrongResult unless y [M, N] is the reference's product, rows and whole, but for rounding."""
    of_rows = torch.linalg.vector_norm(y - reference, dim=-1, dtype=torch.float32)
    norms = torch.linalg.vector_norm(reference, dim=-1, dtype=torch.float32)
    worst, whole = float((of_rows / norms).max()), float(of_rows.norm() / norms.norm())
    if not (worst <= ROW_TOLERANCE and whole <= TOLERANCE):  # NaN is neither
        raise WrongResult(f"relative error {whole:.3g}, of the worst row {worst:.3g}")
