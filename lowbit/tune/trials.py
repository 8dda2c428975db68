"""The candidate tiles of a product and their times on this GPU.

Candidates are the cheapest tiles of the cost model, the cheapest of each kind, variants that the cost model does not list, and
the tiles chosen for larger M, since rows of x can be padded.
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
"""Value that a static scale maps to the largest code; Gaussian samples rarely exceed it."""

CHEAPEST = 12
"""Number of the cost model's cheapest tiles among the candidates."""
KIND_COST = 1.8
"""Largest modelled cost of a candidate, relative to the cheapest tile."""
NEIGHBOURS, MOST_SPLITS = 2, 12
"""Number of cheapest tiles whose variants are candidates, and the largest number of K splits of these variants."""
LARGER = 2
"""For a given M, the tiles chosen for this many next larger values of M are also candidates."""
MOST_OPERATIONS = 4e12
"""Largest 2 M N K that is measured: beyond it, every tile fills the GPU many times over."""

GRAPH_US, LONGEST_GRAPH_US, MOST_LAUNCHES = 500.0, 2500.0, 96
"""Target and longest duration of a graph, and its largest number of launches."""
SCREENED, SLOWER, FINALISTS, REPLAYS = 2, 1.06, 3, 7
"""Each tile is timed `SCREENED` times. The chosen tile and up to `FINALISTS` tiles within `SLOWER` times the fastest are timed
`REPLAYS` times more, alternately; their medians decide."""
AnyTile = RingTile | WgmmaTile | MmaTile | ScaledTile
TILES = {**MIXED, **SCALED}
ProgressCallback = Callable[[int, int, str], None]
"""Called with the number of measured products, the total, and a description."""


def parse_rows(text: str) -> tuple[int, ...]:
    """Returns the numbers of rows M in a text such as 1,16,64. Raises ValueError for other texts."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or any(not part.isdigit() or not int(part) for part in parts):
        raise ValueError(f"numbers of tokens {text!r}: must be positive and comma-separated, such as 1,16,64")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class Codes:
    """x [M, K] as int8 or fp8 codes with float32 scales and int32 zeros (None for symmetric codes), each [M, 1] or [1]."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None


def quantized_x(x: Tensor, scheme: Scheme) -> Codes:
    """Returns x quantized as the scheme states."""
    fmt = scheme.activation
    assert fmt is not None
    static = zero = None
    if isinstance(scheme.granularity, PerTensor):
        static = torch.full((1,), STATIC_LARGEST / fmt.max, device=x.device)
        zero = torch.zeros(1, dtype=torch.int32, device=x.device) if scheme.activation_zero else None
    return Codes(*quantize_activations_reference(x, fmt, scale=static, symmetric=not scheme.activation_zero, zero=zero))


def kind_of(tile: AnyTile) -> tuple[Any, ...]:
    """Returns the kind of a tile; the cost model is trusted only within a kind."""
    if isinstance(tile, RingTile):
        return "ring", tile.tokens, tile.warps_n, tile.warps_k, tile.splits > 1
    if isinstance(tile, WgmmaTile):
        return "wgmma", tile.tokens, tile.warpgroups, tile.splits == 0
    if isinstance(tile, MmaTile):
        return "mma", tile.tokens, tile.rows
    return "scaled", tile.tokens_are_rows, tile.warpgroups, tile.columns, tile.pair


class TunedProduct:
    """Products of 16-bit x with weights of a scheme on a machine."""

    def __init__(self, scheme: Scheme, machine: Machine) -> None:
        self.scheme, self.machine = scheme, machine
        self.feasible = functools.lru_cache(maxsize=64)(self._feasible)
        """The feasible tiles of x [m, k] by w [n, k], the chosen one first."""

    def shape(self, m: int, n: int, k: int) -> Any:
        """Returns the shape in the cost model's type."""
        return GemmShape(m, n, k, self.scheme.weight.bits)

    def _feasible(self, m: int, n: int, k: int) -> list[Candidate[Any]]:
        return [row for row in candidates(self.shape(m, n, k), self.machine) if not row.reasons]

    def pack(self, q: Any) -> Any:
        """Returns the packed weight."""
        return FragmentWeight.pack(q)

    def convert_x(self, x: Tensor) -> Any:
        """Returns x in the form that the kernels read."""
        return x

    def plan(self, tile: Any, m: int, n: int, k: int, w: Any) -> Any:
        """Returns the plan of a product with a tile."""
        return plan_for(tile, self.shape(m, n, k), w.form, torch.float16, False, self.machine)

    def multiply(self, plan: Any, x: Any, w: Any, workspace: tuple[Tensor, Tensor]) -> Tensor:
        """Returns y [M, N]; `workspace` holds partial sums and counters."""
        y: Tensor = plan(x, w.codes, w.scale, w.channel_scale, None, *workspace)
        return y


class TunedScaledProduct(TunedProduct):
    """Products of 8-bit x, quantized per token or statically."""

    def shape(self, m: int, n: int, k: int) -> Any:
        return scaled_shape(self.scheme, m, n, k)

    def _feasible(self, m: int, n: int, k: int) -> list[Candidate[Any]]:
        return [row for row in candidates_scaled(self.shape(m, n, k), self.machine) if not row.reasons]

    def pack(self, q: Any) -> Any:
        return OperandWeight.pack(q)

    def convert_x(self, x: Tensor) -> Any:
        return quantized_x(x, self.scheme)

    def plan(self, tile: Any, m: int, n: int, k: int, w: Any) -> Any:
        return plan_for_scaled(
            tile, self.shape(m, n, k), self.scheme, torch.float16, "token", False, False, self.machine
        )  # fmt: skip

    def multiply(self, plan: Any, x: Any, w: Any, workspace: tuple[Tensor, Tensor]) -> Tensor:
        y: Tensor = plan(x.codes, x.scale, None, w.codes, w.scale, w.channel_scale, w.sums, None, *workspace)
        return y


def products_of(scheme: str, machine: Machine) -> TunedProduct:
    """Returns the product of a scheme. Raises ValueError if the machine has a single tile for it."""
    parsed = parse_scheme(scheme)
    if parsed.activation is None:
        return TunedProduct(parsed, machine)
    if "wgmma" not in machine.arch.features:
        raise ValueError(f"{parsed}: the kernel for 8-bit activations has one tile on {machine.product} (sm_{machine.arch.sm})")
    return TunedScaledProduct(parsed, machine)


@dataclass(frozen=True)
class TrialGrid:
    """The measurements of a run: weights [N, K] in order, schemes, values of M. `seconds` is a limit for benchmarks; `tune.run`
    has its own."""

    shapes: tuple[tuple[int, int], ...]
    schemes: tuple[str, ...]
    tokens: tuple[int, ...]
    seconds: float = math.inf

    def tokens_of(self, n: int, k: int) -> list[int]:
        """Returns the numbers of tokens that are measured with a weight."""
        return [m for m in self.tokens if 2.0 * m * n * k <= MOST_OPERATIONS]

    @property
    def count(self) -> int:
        """Returns the total number of products."""
        return len(self.schemes) * sum(len(self.tokens_of(*shape)) for shape in self.shapes)


def candidate_tiles(product: TunedProduct, m: int, n: int, k: int, tokens: Sequence[int]) -> list[AnyTile]:
    """Returns the tiles to time for a product, the chosen one first."""
    rows = product.feasible(m, n, k)
    limit = KIND_COST * min(row.cost_us for row in rows)
    kinds: dict[tuple[Any, ...], AnyTile] = {}
    for row in rows:
        if row.cost_us <= limit:
            kinds.setdefault(kind_of(row.tile), row.tile)
    cheapest = [row.tile for row in rows[:CHEAPEST] if row.cost_us <= limit]
    others = [tile for row in rows[:NEIGHBOURS] for tile in neighbours(row.tile, product.shape(m, n, k), product.machine)]
    larger = [product.feasible(more, n, k)[0].tile for more in tokens if more > m][:LARGER]
    return list(dict.fromkeys([rows[0].tile, *cheapest, *kinds.values(), *others, *larger]))


def neighbours(tile: AnyTile, shape: Any, machine: Machine) -> list[AnyTile]:
    """Returns variants of a tile that the cost model does not list: ring buffers of half and twice the length, and the number
    of K splits that fills the GPU once."""
    if isinstance(tile, RingTile):
        variants = [dataclasses.replace(tile, rounds=rounds) for rounds in {tile.rounds // 2, 2 * tile.rounds} if rounds]
        return [t for t in variants if t.row_blocks * t.rounds <= 8 and not ring_candidate(t, shape, machine).reasons]
    if isinstance(tile, WgmmaTile):
        tiles = -(-shape.m // tile.tokens) * -(-shape.n // tile.rows)
        splits = min(machine.sm_count // tiles, shape.steps(128), MOST_SPLITS)
        return [dataclasses.replace(tile, splits=splits)] if splits > 1 else []
    return []


def kernels(grid: TrialGrid, machine: Machine) -> list[RecordedKernel]:
    """Returns the distinct kernels of a run; needs Triton but no GPU."""
    from lowbit.kernels.parts.launch import recording

    distinct: list[RecordedKernel] = []
    for scheme in grid.schemes:
        product = products_of(scheme, machine)
        small = product.pack(rtn(torch.ones(16, 128), product.scheme))
        workspace = torch.empty(1), torch.empty(1, dtype=torch.int32)
        plans: dict[Any, tuple[Any, int, int]] = {}
        for n, k in grid.shapes:
            for m in grid.tokens_of(n, k):
                for tile in candidate_tiles(product, m, n, k, grid.tokens_of(n, k)):
                    plan = product.plan(tile, m, n, k, small)
                    plans.setdefault((type(plan), plan.config), (plan, m, k))
        with recording() as launched:
            for plan, m, k in plans.values():
                product.multiply(plan, _blank_x(product, m, k), small, workspace)
        distinct += [kernel for kernel in launched if kernel not in distinct]
    return distinct


def _blank_x(product: TunedProduct, m: int, k: int) -> Any:
    """Returns an uninitialized x; recorded launches do not read it."""
    if product.scheme.activation is None:
        return torch.empty(m, k, dtype=torch.float16)
    dtype = product.convert_x(torch.ones(1, 16)).codes.dtype
    return Codes(torch.empty(m, k, dtype=torch.int8).view(dtype), torch.empty(m, 1))


def launches(us: float, copies: int) -> int:
    """Returns the number of calls in a graph for a product of about `us` microseconds and `copies` of the weight."""
    fit = max(2, int(LONGEST_GRAPH_US / us))
    return min(MOST_LAUNCHES, fit, max(copies, math.ceil(GRAPH_US / us)))


@dataclass
class Trial:
    """The captured calls of a tile and its shortest time in microseconds."""

    graph: Graph
    us: float


class Trials:
    """Measures the tiles for one weight [n, k] of one scheme, with rotating copies that exceed the L2."""

    def __init__(self, product: TunedProduct, n: int, k: int, x: Tensor) -> None:
        self.product, self.n, self.k, self.x = product, n, k, x
        q = quantized(product.scheme, (n, k))
        first = product.pack(q)
        converted = product.convert_x(x)
        wide = x if converted is x else (converted.codes.float() * converted.scale).to(torch.float16)
        self.reference = wide @ q.dequantize(torch.float16).T
        del q, wide
        self.weights = [first, *(first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1))]
        self.memory = Memory()

    def measure(self, m: int, tiles: Sequence[AnyTile]) -> dict[str, Any]:
        """Returns "chosen", the first of `tiles`; "us", the time of each; and "failed", the reason of each failure."""
        failed: dict[str, str] = {}
        plans: dict[AnyTile, Any] = {}
        for tile in tiles:
            try:
                plans[tile] = self.product.plan(tile, m, self.n, self.k, self.weights[0])
            except failures() as error:
                failed[written(tile, TILES)] = reason(error)
        sums, counters = (max([1, *(plan.workspace[i] for plan in plans.values())]) for i in (0, 1))
        device = self.x.device
        workspace = torch.empty(sums, device=device), torch.zeros(counters, dtype=torch.int32, device=device)
        count = launches(self.product.feasible(m, self.n, self.k)[0].cost_us, len(self.weights))
        x = self.product.convert_x(self.x[:m])
        times: dict[AnyTile, float] = {}
        trials: dict[AnyTile, Trial] = {}
        for tile, plan in plans.items():
            try:
                trials[tile] = self._trial(plan, m, x, workspace, count)
            except failures() as error:
                failed[written(tile, TILES)] = reason(error)
                continue
            times[tile] = trials[tile].us
            limit = SLOWER * min(times.values())
            trials = {each: trial for each, trial in trials.items() if each == tiles[0] or trial.us <= limit}
        last = finalists({tile: trial.us for tile, trial in trials.items()}, tiles[0])
        again = times_in_turn([trials[tile].graph for tile in last], REPLAYS, warm=1)
        medians = {tile: statistics.median(times_us) for tile, times_us in zip(last, again, strict=True)}
        level = statistics.fmean(us / times[tile] for tile, us in medians.items()) if medians else 1.0
        times = {tile: medians.get(tile, level * us) for tile, us in times.items()}
        return {
            "chosen": written(tiles[0], TILES), "us": {written(tile, TILES): round(us, 3) for tile, us in times.items()},
            "failed": failed,
        }  # fmt: skip

    def _trial(self, plan: Any, m: int, x: Any, workspace: tuple[Tensor, Tensor], count: int) -> Trial:
        """Captures and times a tile. Raises WrongResult if the first or last output is wrong."""
        weights = [self.weights[i % len(self.weights)] for i in range(count)]
        graph = Graph([partial(self.product.multiply, plan, x, w, workspace) for w in weights], self.memory)
        first_and_last = graph.outputs[0], graph.outputs[-1]
        for y in first_and_last:
            y.fill_(math.nan)
        us = min(graph.times_us(SCREENED, warm=1))
        for y in first_and_last:
            check(y, self.reference[:m])
        return Trial(graph, us)


def finalists(times: dict[AnyTile, float], chosen: AnyTile) -> list[AnyTile]:
    """Returns the tiles to time again: the fastest ones, and the chosen one if it ran."""
    fast = [tile for tile in sorted(times, key=lambda tile: times[tile]) if times[tile] <= SLOWER * min(times.values())]
    return list(dict.fromkeys([*fast[:FINALISTS], *([chosen] if chosen in times else [])]))


def check(y: Tensor, reference: Tensor) -> None:
    """Raises WrongResult if the relative error of y [M, N] exceeds TOLERANCE, or that of a row ROW_TOLERANCE."""
    errors = torch.linalg.vector_norm(y - reference, dim=-1, dtype=torch.float32)
    norms = torch.linalg.vector_norm(reference, dim=-1, dtype=torch.float32)
    worst, whole = float((errors / norms).max()), float(errors.norm() / norms.norm())
    if not (worst <= ROW_TOLERANCE and whole <= TOLERANCE):  # written so that NaN fails
        raise WrongResult(f"relative error {whole:.3g}, of the worst row {worst:.3g}")
