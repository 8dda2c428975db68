"""`python -m benchmarks.tuning.step`: times tiles inside a whole decode step on an NVIDIA GPU.

A tile that is fast alone may be slow in a step, since programmatic launch lets blocks of adjacent kernels share SMs. For each
tile of each product and of attention, this captures the step of a few layers again. It keeps tiles that make the step faster,
and prints rows for the tables MEASURED in kernels/choose/. Weights are random, in the shape of a known model, and pages are
random. The logits with every tile are compared with those of the chosen tiles.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.e2e import DTYPES, PROMPT, engine_for, one_layer, place, timeline, times_us
from benchmarks.language_model import SHAPES, random_model
from lowbit.engine import Engine
from lowbit.engine.chain import Chain
from lowbit.engine.decode_runner import DecodeRunner, DecodeStep
from lowbit.engine.graphs import Graphs
from lowbit.engine.product import Dense, Packed, Product
from lowbit.engine.program import DecodeProgram
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose import attention, fused_gemm, gemm
from lowbit.kernels.choose.tiles import DENSE_BITS, RING_TOKENS, GemmShape, RingTile, Role
from lowbit.kernels.parts.compile import compiled
from lowbit.kernels.parts.launch import recording
from lowbit.pack import DenseWeight
from lowbit.tune.timing import failures, reason, warm_up

TOLERANCE = 0.02
"""Allowed relative error (norm) of logits: tiles add in different orders, and random weights amplify rounding."""

GAIN = 0.004
"""Relative gain of the step for which another tile is kept; less is noise between captures."""

OPERATORS = ("fragment_gemm", "gated_gemm", "fused_gemm", "attention")
"""Modules of lowbit.ops that choose a tile when they create a plan."""

Tiles = dict[str, Any]
"""Tiles by the names of the step's parts; other parts use their chosen tile."""


@dataclass(frozen=True)
class TiledPart:
    """A kernel of a layer, or the LM head: its name, its role in the chain, its shape, and the tiles to try, the chosen one
    first.
    """

    name: str
    role: Role | None
    shape: GemmShape | None
    tiles: tuple[Any, ...]


def parts_of(program: DecodeProgram, rows: int, reach: int, machine: Machine, count: int) -> list[TiledPart]:
    """Returns the parts of a step of `rows` rows, largest weights first, each with the `count` best tiles by modelled cost."""
    layer = program.layers[0]
    chained = isinstance(program.chain, Chain) and rows <= program.chain.most
    roles: dict[str, Role] = {
        "gate_up": "gated", "down": "residual", "qkv": "norm", "o": "residual", "head": "norm",
    }  # fmt: skip
    products: dict[str, Product | None] = {
        "gate_up": layer.gate_up, "down": layer.down, "qkv": layer.qkv, "o": layer.o, "head": program.head,
    }  # fmt: skip
    found = [
        _product_part(name, roles[name] if chained else None, product.weight, rows, machine, count)
        for name, product in products.items()
        if isinstance(product, Packed) or (chained and isinstance(product, Dense) and rows <= RING_TOKENS)
    ]
    able = [row.tile for row in attention.candidates_decode(rows, layer.shape, reach, machine) if not row.reasons]
    by_warps = [tile for warps in (1, 2, 4) for tile in [t for t in able if t.warps == warps][: count // 3]]
    staged = [replace(tile, stages=2) for tile in dict.fromkeys([*able[:2], *by_warps])]
    return [*found, TiledPart("attention", None, None, tuple(dict.fromkeys([*able[:count], *by_warps, *staged])))]


def _product_part(
    name: str, role: Role | None, weight: Any, rows: int, machine: Machine, count: int
) -> TiledPart:  # fmt: skip
    n, k = weight.shape
    shape = GemmShape(rows, n, k, DENSE_BITS if isinstance(weight, DenseWeight) else weight.scheme.weight.bits)
    if role is None:
        return TiledPart(name, None, shape, tuple(r.tile for r in gemm.candidates(shape, machine) if not r.reasons)[:count])
    able = [row.tile for row in fused_gemm.chain_candidates(role, shape, machine) if not row.reasons][:count]
    rings = [tile for tile in able[: count // 2] if isinstance(tile, RingTile)]
    others = [replace(tile, blocks_per_sm=0 if tile.blocks_per_sm else 1) for tile in rings]
    return TiledPart(name, role, shape, tuple(dict.fromkeys([*able, *others])))


@contextlib.contextmanager
def given(tiles: Tiles, parts: Sequence[TiledPart]) -> Iterator[None]:
    """Context manager in which operators use the given tiles instead of their chosen ones."""
    chosen = {(part.role, part.shape): tiles[part.name] for part in parts if part.name in tiles}
    modules: list[Any] = [importlib.import_module(f"lowbit.ops.{name}") for name in OPERATORS]
    plain, gated, chain, attend = modules
    choose, choose_chain, choose_decode = plain.choose, chain.choose_chain, attend.choose_decode

    def clear() -> None:
        for plans in (plain._plan, gated._plan, chain._norm_plan, chain._residual_plan, attend._decode_plan):
            plans.cache_clear()

    plain.choose = gated.choose = lambda shape, *more: chosen.get((None, shape)) or choose(shape, *more)
    chain.choose_chain = lambda role, shape, *more: chosen.get((role, shape)) or choose_chain(role, shape, *more)
    attend.choose_decode = lambda *arguments: tiles.get("attention") or choose_decode(*arguments)
    clear()
    try:
        yield
    finally:
        plain.choose = gated.choose = choose
        chain.choose_chain, attend.choose_decode = choose_chain, choose_decode
        clear()


class StepTrial:
    """A batch at a context. Its step is captured again for every set of tiles."""

    def __init__(self, engine: Engine, rows: int, context: int) -> None:
        self.engine, self.rows, self.context = engine, rows, context
        self.reach = next(reach for reach in engine.decode_runner.reaches if reach > context)
        place(engine, rows, context, 256)

    def run(self) -> Tensor:
        """Returns the logits of an eager step; does not advance the slots."""
        rows = torch.arange(self.rows, dtype=torch.int32, device=self.engine.device)
        return self.engine.program.step(rows, self.engine.slots, self.reach)

    @torch.inference_mode()
    def measure(self, tiles: Tiles, parts: Sequence[TiledPart], expected: Tensor | None = None) -> tuple[float, Tensor]:
        """Returns the microseconds of a step and its logits. Raises ValueError if these differ from `expected`."""
        engine = self.engine
        with given(tiles, parts):
            # Earlier timed steps have fed back their sampled tokens.
            engine.slots.positions[: self.rows] = self.context
            engine.slots.tokens[: self.rows] = torch.arange(self.rows, dtype=torch.int32, device=engine.device)
            logits = self.run().float()
            if expected is not None:
                error = float((logits - expected).norm() / expected.norm())
                if not error <= TOLERANCE:
                    raise ValueError(f"logits differ by {error:.3g}")
            us = statistics.median(times_us(self.capture()))
        return us, logits

    @torch.inference_mode()
    def layer(self, tiles: Tiles, parts: Sequence[TiledPart]) -> str:
        """Returns a line with the microseconds that each kernel of a layer adds to the step."""
        with given(tiles, parts):
            graph = self.capture().graph
        assert graph is not None
        return ", ".join(f"{name} {added:.1f}" for name, added in one_layer(timeline(graph.replay)))

    def capture(self) -> DecodeStep:
        """Captures the step again and returns it."""
        steps = DecodeRunner(self.engine.program, self.engine.slots, self.rows, graphs=Graphs(self.engine.device))
        return steps.launch(range(self.rows), False, self.context + 1)

    @torch.inference_mode()
    def compile(self, parts: Sequence[TiledPart], sm: int) -> None:
        """Compiles the kernels of all tiles in several processes."""
        with recording() as wanted:
            for part in parts:
                for tile in part.tiles:
                    with given({part.name: tile}, parts):
                        self.run()
        for _ in compiled(wanted, sm):
            pass


def search(trial: StepTrial, parts: Sequence[TiledPart]) -> Iterator[str]:
    """Tries every tile of every part, one after the other, and keeps faster ones. Yields a line with each time, then the rows
    for MEASURED.
    """
    machine = machine_of(trial.engine.device)
    trial.compile(parts, machine.arch.sm)
    trial.measure({}, parts)  # warm-up: the first measurement is too slow
    start, expected = trial.measure({}, parts)
    kept: Tiles = {}
    best = start
    yield f"chosen tiles: {start:.1f} us"
    for part in parts:
        for tile in part.tiles[1:]:
            try:
                us, _ = trial.measure({**kept, part.name: tile}, parts, expected)
            except failures() as error:
                yield f"  {part.name}: {tile}: {reason(error)}"
                continue
            yield f"  {part.name}: {us:.1f} us, {tile}"
            if us < (1 - GAIN) * best:
                best, kept[part.name] = us, tile
    again, _ = trial.measure({}, parts)
    yield f"kept: {best:.1f} us instead of {start:.1f}, {again:.1f} at the end"
    for said, tiles in (("chosen", {}), ("kept", kept)):
        yield f"  a layer as {said}: {trial.layer(tiles, parts)}"
    for name, tile in kept.items():
        part = next(part for part in parts if part.name == name)
        yield f"  {name} {part.shape or ''}: {tile!r}"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning.step", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=SHAPES, default="Llama-3-8B")
    parser.add_argument("--layers", type=int, default=4, help="a few, whose weights exceed the L2")
    parser.add_argument("--schemes", nargs="+", default=["w4a16_g128"], help="none: 16 bits, the head too")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=PROMPT)
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--tiles", type=int, default=9, help="how many of the model's best are tried for each part")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"this times an NVIDIA GPU and torch {torch.__version__} sees none")
    warm_up()
    machine = machine_of("cuda")
    for scheme in arguments.schemes:
        packed, head = (None, None) if scheme == "none" else (scheme, "w8a16")
        model = random_model(arguments.model, packed, head, DTYPES[arguments.dtype], torch.device("cuda"), arguments.layers)
        engine = engine_for(model, [(rows, arguments.context + 256) for rows in arguments.rows])
        assert isinstance(engine.program, DecodeProgram)
        for rows in arguments.rows:
            trial = StepTrial(engine, rows, arguments.context)
            print(f"{scheme}, {rows} rows of {arguments.context} tokens, {arguments.layers} layers", flush=True)
            for line in search(trial, parts_of(engine.program, rows, trial.reach, machine, arguments.tiles)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
