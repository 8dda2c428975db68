"""`lowbit tune`: times candidate tiles (trials.py) of a model's products and stores the fastest (kernels/choose/tuned.py)."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit._version import __version__
from lowbit.checkpoint.lock import Lock
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import versions, write_json
from lowbit.folders import tuned_file
from lowbit.formats import PerBlock, parse_scheme
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose import tuned
from lowbit.kernels.choose.tuned import RESULT, SCHEMA, TunedRow, problem_of
from lowbit.models.hf import plan_for
from lowbit.models.skeleton import causal_skeleton
from lowbit.models.source import resolve
from lowbit.ops.table import weight_refusals
from lowbit.pack import scaled_refusals
from lowbit.sources import CONFIG
from lowbit.tune.timing import gaussian, warm_up
from lowbit.tune.trials import ProgressCallback, TrialGrid, Trials, candidate_tiles, kernels, products_of

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
MARGIN = 0.03
"""Smallest gain for which a tile replaces the cost model's tile; smaller gains are noise between runs."""

STACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that the engine and vLLM stack along N into one product."""

WeightShapes = dict[str, list[tuple[int, int]]]
"""Scheme -> shapes (N, K) of the weights."""


@dataclass(frozen=True)
class Tuned:
    """A measured product: its fastest tile, and the times of that tile and of the cost model's."""

    scheme: str
    n: int
    k: int
    kept: TunedRow

    @property
    def gain(self) -> float:
        """Returns the fraction of the time that is saved."""
        return 1 - self.kept.us / self.kept.modelled_us


def products_of_model(source: str | Path, scheme: str | None, say: Callable[[str], None] = lambda line: None) -> WeightShapes:
    """Returns the weight shapes of a causal model that lowbit quantized, or that will be quantized to `scheme`.

    Stacked layers are included both as one weight and separately. Experts are not included; `say` gets a line about them. For a
    16-bit model only config.json is read. Raises ValueError if the scheme is unknown.
    """
    resolved = resolve(source, CONFIG)
    folder, tool = resolved.path, resolved.tool
    layers: dict[str, tuple[str, tuple[int, int]]] = {}
    experts = 0
    if tool == "lowbit" and scheme is None:
        with resolve(source).reader() as reader:
            assert reader.manifest is not None
            manifest = reader.manifest
        model = causal_skeleton(folder)
        owners = set(manifest.tied.values())  # a tied embedding is also the weight of the LM head
        for name, entry in manifest.layers.items():
            if entry.experts:
                experts += 1
            elif name in owners or not isinstance(model.get_submodule(name), nn.Embedding):
                layers[name] = entry.scheme.name, entry.shape
    elif tool == "lowbit":
        raise ValueError(f"{folder}: is quantized by lowbit and states its schemes; leave out --scheme")
    elif scheme is None:
        what = "is not quantized" if tool is None else f"is quantized by {tool}"
        where = "`lowbit schemes` explains them" if tool is None else "`lowbit inspect` prints it"
        raise ValueError(f"{folder}: {what}; name the scheme that it will be run with: --scheme ({where})")
    else:
        plan = plan_for(causal_skeleton(folder), scheme, None, False)
        experts = len(plan.experts)
        layers = {name: (plan.others.get(name, plan.scheme).name, shape) for name, shape in plan.linears.items()}
    if experts:
        say(f"{experts} weights of experts keep the tiles that the cost model chooses: kernels of experts are not tuned")
    products: dict[str, dict[tuple[int, int], None]] = {}
    for name, shape in [*_stacked(layers), *layers.values()]:
        products.setdefault(name, {})[shape] = None
    return {name: list(shapes) for name, shapes in products.items()}


def _stacked(layers: dict[str, tuple[str, tuple[int, int]]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields scheme and shape of stacked layers, which have the same scheme and the same x."""
    for first, *others in STACKED:
        for name in layers:
            parent, _, last = name.rpartition(".")
            parts = [layers.get(f"{parent}.{other}") for other in (first, *others)]
            if last == first and all(part is not None and part[0] == layers[name][0] for part in parts):
                yield layers[name][0], (sum(part[1][0] for part in parts if part is not None), layers[name][1][1])


def run(
    products: WeightShapes, tokens: Sequence[int], seconds: float, say: Callable[[str], None], progress: ProgressCallback
) -> list[Tuned]:
    """Measures on the current GPU, stores the results (also after an exception) and returns them.

    Processes that start later read the file; stored results of other products stay. Stops after `seconds`. Raises ValueError
    without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            f"lowbit tune needs an NVIDIA GPU, and torch {torch.__version__} finds none; run it on the GPU machine"
        )
    machine = replace(machine_of("cuda"), tuned="")
    end, file = time.monotonic() + seconds, check_file(tuned_file(machine.product), RESULT)
    file.parent.mkdir(parents=True, exist_ok=True)  # fails now rather than after minutes of measuring
    schemes = with_a_choice(products, machine, say)
    grids = [TrialGrid(tuple(products[scheme]), (scheme,), tuple(tokens)) for scheme in schemes]
    total = sum(grid.count for grid in grids)
    progress(0, total, "listing kernels")
    to_compile = [kernel for grid in grids for kernel in kernels(grid, machine)]
    weights = sum(len(grid.shapes) for grid in grids)
    say(f"{total} products of {weights} weights, {len(to_compile)} kernels, for {machine.product}")
    from lowbit.kernels.parts.compile import compiled

    for done in compiled(to_compile, machine.arch.sm):
        progress(done, len(to_compile), "compiling")
    warm_up()
    rows: list[Tuned] = []
    try:
        for grid in grids:
            for shape in grid.shapes:
                for row in _measured(grid, shape, machine):
                    rows.append(row)
                    progress(len(rows), total, f"{row.scheme} {row.n}x{row.k} M {row.kept.m}")
                    if time.monotonic() > end:
                        say(f"stopped after {seconds:g} s: {len(rows)} of {total} products")
                        return rows
        return rows
    finally:
        if rows:
            keep(file, rows, machine, say)
            say(f"wrote {file}")


def with_a_choice(schemes: Iterable[str], machine: Machine, say: Callable[[str], None]) -> list[str]:
    """Returns the schemes with several tiles on a machine; `say` is called with the reason for each other scheme.

    Raises ValueError if no scheme has a choice.
    """
    tunable: list[str] = []
    reasons: dict[str, str] = {}
    measured: dict[str, str] = {}
    for scheme in schemes:
        parsed = parse_scheme(scheme)
        refused: tuple[str, ...] = (
            weight_refusals(parsed, torch.float16) if parsed.activation is None else scaled_refusals(parsed)
        )
        if not refused and parsed.activation is not None and "wgmma" not in machine.arch.features:
            refused = (f"the kernel for 8-bit activations has one tile on {machine.product}",)
        if not refused and isinstance(parsed.granularity, PerBlock):
            refused = ("tiles for block scales are not tuned",)
        if not refused:
            problem = problem_of(products_of(scheme, machine).shape(1, 1, 1))
            refused = (f"it shares the tiles of {measured[problem]}, which has as many bits",) if problem in measured else ()
            measured.setdefault(problem, scheme)
        tunable += [] if refused else [scheme]
        reasons |= {scheme: f"{scheme}: nothing to tune, {'; '.join(refused)}"} if refused else {}
    if not tunable:
        raise ValueError("\n".join(reasons.values()) or "the model has no quantized layers")
    for line in reasons.values():
        say(line)
    return tunable


@torch.inference_mode()
def _measured(grid: TrialGrid, shape: tuple[int, int], machine: Machine) -> Iterator[Tuned]:
    """Yields the measured products of a weight, in order of the number of tokens."""
    (scheme,), (n, k), today = grid.schemes, shape, datetime.date.today().isoformat()
    tokens = grid.tokens_of(n, k)
    if not tokens:
        return
    product = products_of(scheme, machine)
    trials = Trials(product, n, k, gaussian(tokens[-1], k, seed=2, dtype=torch.float16))
    for m in tokens:
        result = trials.measure(m, candidate_tiles(product, m, n, k, tokens))
        if result["us"]:
            yield Tuned(product.scheme.name, n, k, fastest(result["chosen"], result["us"], m, today))
    del trials
    torch.cuda.empty_cache()


def fastest(modelled: str, us: dict[str, float], m: int, date: str) -> TunedRow:
    """Returns the fastest tile, or the cost model's `modelled` one unless the fastest gains MARGIN."""
    best = min(us, key=lambda tile: us[tile])
    of_model = us.get(modelled, math.inf)
    tile = best if us[best] < (1 - MARGIN) * of_model else modelled
    return TunedRow(m, tile, us[tile], of_model if modelled in us else us[tile], date)


def keep(file: Path, rows: Iterable[Tuned], machine: Machine, say: Callable[[str], None] = lambda line: None) -> None:
    """Merges results into the machine's file; new results replace stored ones of the same product.

    While another process holds the file's lock, `say` is called with one line and the call blocks.
    """
    with Lock(file, say):
        products = {problem: {row.m: row for row in stored} for problem, stored in _stored(file).items()}
        for row in rows:
            shape = products_of(row.scheme, machine).shape(row.kept.m, row.n, row.k)
            products.setdefault(problem_of(shape), {})[row.kept.m] = row.kept
        document: dict[str, Any] = {
            "result": RESULT, "schema": SCHEMA, "lowbit": __version__, "gpu": machine.product, "versions": versions(()),
            "products": {
                problem: [asdict(by_m[m]) for m in sorted(by_m)] for problem, by_m in sorted(products.items())
            },
        }  # fmt: skip
        write_json(file, document)
    tuned.forget()


def _stored(file: Path) -> dict[str, tuple[TunedRow, ...]]:
    """Returns the results in the file; none if the file is damaged or of another version."""
    try:
        return tuned.read_rows(file)
    except (OSError, ValueError):
        return {}
