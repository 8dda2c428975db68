"""The run of `lowbit bench choice`: how far is the chosen tile from the best of all that make sense, each of them timed?

The regret of a product is the time of its chosen tile over that of the fastest one tried. Tried are the cheapest by the model
of costs, the cheapest of each kind, neighbours that the choice does not consider, and what products of more tokens choose,
since tokens can be filled up.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.bench.choice_report import CHOICE, SCHEMA
from lowbit.bench.grid import HALVES, MODELS, SCHEMES, TOKENS, half_of, weights
from lowbit.bench.protocol import (
    ROW_TOLERANCE,
    TOLERANCE,
    Graph,
    Memory,
    WrongResult,
    copies_needed,
    failures,
    gaussian,
    l2_bytes,
    quantized,
    reason,
    times_in_turn,
    warm_up,
)
from lowbit.bench.quantized_x import Codes, quantized_x
from lowbit.bench.request import parse_rows
from lowbit.bench.results import default_path, machine
from lowbit.eval.results import versions, write_json
from lowbit.formats import Scheme, parse_scheme
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.candidate import Candidate
from lowbit.kernels.choose.kept import written
from lowbit.kernels.choose.mixed_gemm import KINDS as MIXED
from lowbit.kernels.choose.mixed_gemm import GemmShape, MmaTile, RingTile, WgmmaTile, candidates, ring_candidate
from lowbit.kernels.choose.scaled_gemm import KINDS as SCALED
from lowbit.kernels.choose.scaled_gemm import ScaledTile, candidates_scaled
from lowbit.ops.byte_gemm import plan_for_scaled
from lowbit.ops.fragment_gemm import plan_for
from lowbit.ops.table import scaled_shape
from lowbit.pack import FragmentWeight, OperandWeight, weight_form
from lowbit.quantize import rtn

if TYPE_CHECKING:
    from lowbit.kernels.parts.launch import Wanted

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
SAVE_SECONDS = 20.0

PROTOCOL = (
    f"Each tile in a CUDA graph of about {GRAPH_US:g} us of calls over copies of the weight that together exceed 3 times the "
    f"L2 (no more of them than {LONGEST_GRAPH_US:g} us take), replayed once and then timed with events {SCREENED} times, of "
    f"which the shortest counts; the chosen tile and the fastest, up to {FINALISTS} within {SLOWER:g} of the fastest, are "
    f"replayed {REPLAYS} times more in turn, of which the median counts, and times of the others are brought to the same "
    "level. Weights are Gaussian, quantized by round-to-nearest, x is Gaussian. The first and the last y of a graph are "
    "filled with NaN before it is timed and compared with torch.matmul of the dequantized weight in fp16: relative error at "
    f"most {TOLERANCE:g} of all and {ROW_TOLERANCE:g} of a row. cublas_us is torch.matmul over a fp16 weight of the same "
    f"shape, in the same run, the median of {REPLAYS} replays. Where x has 8 bits it is quantized before anything is timed."
)

AnyTile = RingTile | WgmmaTile | MmaTile | ScaledTile
TILES = {**MIXED, **SCALED}
Watch = Callable[[int, int, str], None]
"""Called with products done, products in all and what is measured now."""


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
        form = weight_form(
            self.scheme, None if w.scale is None else w.scale.dtype, None if w.channel_scale is None else w.channel_scale.dtype
        )
        return plan_for(tile, self.shape(m, n, k), form, torch.float16, False, self.machine)

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


def chosen_now(row: dict[str, Any], machine: Machine) -> str:
    """The tile that is chosen today for a row of a result file, as it would be written there."""
    return written(products_of(row["scheme"], machine).able(row["m"], row["n"], row["k"])[0].tile, TILES)


def as_chosen_now(rows: Sequence[dict[str, Any]], machine: Machine) -> list[dict[str, Any]]:
    """The rows whose tile of today was timed, with that tile as the chosen one."""
    now = [{**row, "chosen": chosen_now(row, machine)} for row in rows]
    return [row for row in now if row["chosen"] in row["us"]]


@dataclass(frozen=True)
class Asked:
    """What a run measures: weights in their order, schemes, numbers of tokens; it ends early after `seconds`."""

    shapes: tuple[tuple[int, int], ...]
    schemes: tuple[str, ...] = SCHEMES
    tokens: tuple[int, ...] = TOKENS
    seconds: float = math.inf

    def tokens_of(self, n: int, k: int) -> list[int]:
        """The numbers of tokens measured with a weight."""
        return [m for m in self.tokens if 2.0 * m * n * k <= MOST_OPERATIONS]

    @property
    def count(self) -> int:
        """Products in all."""
        return len(self.schemes) * sum(len(self.tokens_of(*shape)) for shape in self.shapes)


def make_asked(
    models: str | None = None, schemes: str | None = None, tokens: str | None = None, half: str | None = None,
    seconds: float | None = None,
) -> Asked:  # fmt: skip
    """What a run measures, from comma-separated texts; what is None is all of the grid. Raises ValueError that says what was
    given and what is supported."""
    if half not in (None, *HALVES):
        raise ValueError(f"--half is {' or '.join(HALVES)}, got {half!r}")
    shapes = weights(MODELS if models is None else models.split(","), half=half)  # type: ignore[arg-type]
    names = SCHEMES if schemes is None else tuple(parse_scheme(name).name for name in schemes.split(","))
    rows = TOKENS if tokens is None else tuple(sorted(set(parse_rows(tokens))))
    return Asked(tuple(shapes), names, rows, math.inf if seconds is None else seconds)


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
        return [t for t in found if t.strips * t.rounds <= 8 and not ring_candidate(t, shape, machine).reasons]
    if isinstance(tile, WgmmaTile):
        tiles = -(-shape.m // tile.tokens) * -(-shape.n // tile.rows)
        splits = min(machine.sm_count // tiles, shape.steps(128), MOST_SPLITS)
        return [dataclasses.replace(tile, splits=splits)] if splits > 1 else []
    return []


def kernels(asked: Asked, machine: Machine) -> list[Wanted]:
    """The distinct kernels of a run; needs Triton but no GPU."""
    from lowbit.kernels.parts.launch import recording

    wanted: list[Wanted] = []
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


def run(asked: Asked, out: Path | None, say: Callable[[str], None], watch: Watch) -> tuple[Path, dict[str, Any]]:
    """Measures and writes the result file, by default bench/results/<gpu>/<date>-choice.json; returns its path and document.

    The file is written every so often, and at the end however the run ends. Raises ValueError without an NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"bench choice measures an NVIDIA GPU and torch {torch.__version__} sees none")
    if torch.cuda.get_device_capability()[0] != 9:
        raise ValueError(
            "bench choice measures an H100 or H200 (sm_90); `lowbit tune` times the tiles of a model on other GPUs"
        )
    end = time.monotonic() + asked.seconds
    here, described, today = dataclasses.replace(machine_of("cuda"), tuned=""), machine(), datetime.date.today()
    if out is None:
        gemm = default_path(described["gpu"], today)
        out = gemm.with_name(gemm.name.replace("-gemm", "-choice"))
    document: dict[str, Any] = {
        "result": CHOICE, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "machine": described,
        "versions": versions(()), "protocol": PROTOCOL,
        "tiles": {name: [each.name for each in dataclasses.fields(kind)] for name, kind in TILES.items()}, "rows": [],
    }  # fmt: skip
    write_json(out, document)
    watch(0, asked.count, "listing kernels")
    wanted = kernels(asked, here)
    say(f"{asked.count} products of {len(asked.shapes)} weights, {len(wanted)} distinct kernels")
    from lowbit.kernels.parts.compile import compiled

    for done in compiled(wanted, here.arch.sm):
        watch(done, len(wanted), "compiling")
    warm_up()
    saved = time.monotonic()
    try:
        for row in rows(asked, here):
            document["rows"].append(row)
            watch(len(document["rows"]), asked.count, f"{row['scheme']} {row['n']}x{row['k']} M {row['m']}")
            now = time.monotonic()
            if now > end:
                say(f"stopped after {asked.seconds:g} s: {len(document['rows'])} of {asked.count} products")
                return out, document
            if now - saved > SAVE_SECONDS:
                write_json(out, document)
                saved = time.monotonic()
        document["complete"] = True
        return out, document
    finally:
        write_json(out, document)


@torch.inference_mode()
def rows(asked: Asked, here: Machine) -> Iterator[dict[str, Any]]:
    """A row for each product, weight by weight."""
    for n, k in asked.shapes:
        tokens = asked.tokens_of(n, k)
        if not tokens:
            continue
        x = gaussian(tokens[-1], k, seed=2, dtype=torch.float16)
        cublas = _cublas(x, n, tokens)
        for scheme in asked.schemes:
            of = products_of(scheme, here)
            trials = Trials(of, n, k, x)
            for m in tokens:
                yield {
                    "scheme": of.scheme.name, "n": n, "k": k, "m": m, "half": half_of((n, k)), "cublas_us": cublas[m],
                    **trials.measure(m, tried(of, m, n, k, tokens)),
                }  # fmt: skip
            del trials
            torch.cuda.empty_cache()


def launches(us: float, copies: int) -> int:
    """Calls in a graph of a product that takes about so long, with so many copies of the weight."""
    fit = max(2, int(LONGEST_GRAPH_US / us))
    return min(MOST_LAUNCHES, fit, max(copies, math.ceil(GRAPH_US / us)))


def _cublas(x: Tensor, n: int, tokens: Sequence[int]) -> dict[int, float]:
    """Microseconds of torch.matmul by a fp16 weight [n, K], by number of tokens."""
    memory = Memory()
    first = gaussian(n, x.shape[1], seed=1, dtype=torch.float16)
    copies = [first, *(first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1))]
    found = {}
    for m in tokens:
        us = 1e6 * max(first.nbytes / 4e12, 2.0 * m * first.numel() / 6e14)
        calls = [partial(torch.matmul, x[:m], copies[i % len(copies)].T) for i in range(launches(us, len(copies)))]
        found[m] = statistics.median(Graph(calls, memory).times_us(REPLAYS, warm=1))
    return found


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
