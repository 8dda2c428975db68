"""`lowbit tune`: times the tiles that make sense for a model's products on this GPU, and keeps the fastest for this machine.

trials.py says what is tried and how it is timed; kernels/choose/tuned.py what is kept and who reads it.
"""

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
from lowbit.tune.trials import TrialGrid, Trials, Watch, kernels, products_of, tried

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
MARGIN = 0.03
"""What another tile must gain to be kept instead of the modelled one; less is noise between runs."""

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that the decode engine and vLLM multiply as one, side by side."""

Products = dict[str, list[tuple[int, int]]]
"""The weights (N, K) under each scheme."""


@dataclass(frozen=True)
class Tuned:
    """A product that was measured, and what its kept tile takes beside the modelled one."""

    scheme: str
    n: int
    k: int
    kept: TunedRow

    @property
    def gain(self) -> float:
        """The share of the time that is saved."""
        return 1 - self.kept.us / self.kept.modelled_us


def products_of_model(source: str | Path, scheme: str | None) -> Products:
    """The products of the causal model in a folder, which is quantized by this library, or is to have `scheme`.

    Layers that are computed as one count as one, and by themselves too. Of a model in 16 bits config.json only is read. Raises
    ValueError for a folder whose scheme nobody says.
    """
    resolved = resolve(source, CONFIG)
    folder, tool = resolved.path, resolved.tool
    layers: dict[str, tuple[str, tuple[int, int]]] = {}
    if tool == "lowbit" and scheme is None:
        with resolve(source).reader() as reader:
            assert reader.manifest is not None
            manifest = reader.manifest
        model = causal_skeleton(folder)
        owners = set(manifest.tied.values())  # an embedding that is the head too is multiplied by
        for name, entry in manifest.layers.items():
            if name in owners or not isinstance(model.get_submodule(name), nn.Embedding):
                layers[name] = entry.scheme.name, entry.shape
    elif tool == "lowbit":
        raise ValueError(f"{folder}: is quantized by lowbit and states its schemes; leave out --scheme")
    elif scheme is None:
        what = "is not quantized" if tool is None else f"is quantized by {tool}"
        where = "`lowbit schemes` explains them" if tool is None else "`lowbit inspect` prints it"
        raise ValueError(f"{folder}: {what}; name the scheme that it will be run with: --scheme ({where})")
    else:
        plan = plan_for(causal_skeleton(folder), scheme, None, False)
        layers = {name: (plan.others.get(name, plan.scheme).name, shape) for name, shape in plan.linears.items()}
    products: dict[str, dict[tuple[int, int], None]] = {}
    for name, shape in [*_joined(layers), *layers.values()]:
        products.setdefault(name, {})[shape] = None
    return {name: list(shapes) for name, shapes in products.items()}


def _joined(layers: dict[str, tuple[str, tuple[int, int]]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Layers side by side that are one product: they have the same scheme and the same x."""
    for first, *others in JOINED:
        for name in layers:
            parent, _, last = name.rpartition(".")
            parts = [layers.get(f"{parent}.{other}") for other in (first, *others)]
            if last == first and all(part is not None and part[0] == layers[name][0] for part in parts):
                yield layers[name][0], (sum(part[1][0] for part in parts if part is not None), layers[name][1][1])


def run(products: Products, tokens: Sequence[int], seconds: float, say: Callable[[str], None], watch: Watch) -> list[Tuned]:
    """Measures on the current GPU and keeps what was found, however it ends; returns it all. Processes that start afterwards
    choose by it. What was kept of other products stays. Ends early after `seconds`. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError(f"tune measures an NVIDIA GPU and torch {torch.__version__} sees none")
    here = replace(machine_of("cuda"), tuned="")
    end, file = time.monotonic() + seconds, check_file(tuned_file(here.product), RESULT)
    file.parent.mkdir(parents=True, exist_ok=True)  # before minutes go into what could not be kept
    schemes = with_a_choice(products, here, say)
    asked = [TrialGrid(tuple(products[scheme]), (scheme,), tuple(tokens)) for scheme in schemes]
    total = sum(each.count for each in asked)
    watch(0, total, "listing kernels")
    wanted = [kernel for each in asked for kernel in kernels(each, here)]
    say(f"{total} products of {sum(len(each.shapes) for each in asked)} weights, {len(wanted)} kernels, for {here.product}")
    from lowbit.kernels.parts.compile import compiled

    for done in compiled(wanted, here.arch.sm):
        watch(done, len(wanted), "compiling")
    warm_up()
    rows: list[Tuned] = []
    try:
        for each in asked:
            for shape in each.shapes:
                for row in _measured(each, shape, here):
                    rows.append(row)
                    watch(len(rows), total, f"{row.scheme} {row.n}x{row.k} M {row.kept.m}")
                    if time.monotonic() > end:
                        say(f"stopped after {seconds:g} s: {len(rows)} of {total} products")
                        return rows
        return rows
    finally:
        if rows:
            keep(file, rows, here, say)
            say(f"wrote {file}")


def with_a_choice(schemes: Iterable[str], here: Machine, say: Callable[[str], None]) -> list[str]:
    """The schemes that have tiles to choose from on a machine; says why others have none, and raises ValueError if all have."""
    found: list[str] = []
    reasons: dict[str, str] = {}
    measured: dict[str, str] = {}
    for scheme in schemes:
        parsed = parse_scheme(scheme)
        refused: tuple[str, ...] = (
            weight_refusals(parsed, torch.float16) if parsed.activation is None else scaled_refusals(parsed)
        )
        if not refused and parsed.activation is not None and "wgmma" not in here.arch.features:
            refused = (f"the kernel for 8-bit activations has one tile on {here.product}",)
        if not refused and isinstance(parsed.granularity, PerBlock):
            refused = ("tiles of scales in blocks are not measured",)
        if not refused:
            problem = problem_of(products_of(scheme, here).shape(1, 1, 1))
            refused = (f"its tiles are those of {measured[problem]}, of as many bits",) if problem in measured else ()
            measured.setdefault(problem, scheme)
        found += [] if refused else [scheme]
        reasons |= {scheme: f"{scheme}: nothing to choose, {'; '.join(refused)}"} if refused else {}
    if not found:
        raise ValueError("\n".join(reasons.values()) or "the model has no quantized layers")
    for line in reasons.values():
        say(line)
    return found


@torch.inference_mode()
def _measured(asked: TrialGrid, shape: tuple[int, int], here: Machine) -> Iterator[Tuned]:
    """The products of a weight, by numbers of tokens."""
    (scheme,), (n, k), today = asked.schemes, shape, datetime.date.today().isoformat()
    tokens = asked.tokens_of(n, k)
    if not tokens:
        return
    of = products_of(scheme, here)
    trials = Trials(of, n, k, gaussian(tokens[-1], k, seed=2, dtype=torch.float16))
    for m in tokens:
        found = trials.measure(m, tried(of, m, n, k, tokens))
        if found["us"]:
            yield Tuned(of.scheme.name, n, k, fastest(found["chosen"], found["us"], m, today))
    del trials
    torch.cuda.empty_cache()


def fastest(modelled: str, us: dict[str, float], m: int, date: str) -> TunedRow:
    """What is kept of the times of tiles: the fastest, but the modelled one where no other gains MARGIN."""
    best = min(us, key=lambda tile: us[tile])
    of_model = us.get(modelled, math.inf)
    tile = best if us[best] < (1 - MARGIN) * of_model else modelled
    return TunedRow(m, tile, us[tile], of_model if modelled in us else us[tile], date)


def keep(file: Path, rows: Iterable[Tuned], here: Machine, say: Callable[[str], None] = lambda line: None) -> None:
    """Writes what was measured into the machine's file; of products that are there already the newer figures stay. Waits while
    another process writes the file; `say` gets a line then."""
    with Lock(file, say):
        products: dict[str, dict[int, TunedRow]] = {}
        for problem, found in _there(file).items():
            products[problem] = {row.m: row for row in found}
        for row in rows:
            shape = products_of(row.scheme, here).shape(row.kept.m, row.n, row.k)
            products.setdefault(problem_of(shape), {})[row.kept.m] = row.kept
        document: dict[str, Any] = {
            "result": RESULT, "schema": SCHEMA, "lowbit": __version__, "gpu": here.product, "versions": versions(()),
            "products": {
                problem: [asdict(found[m]) for m in sorted(found)] for problem, found in sorted(products.items())
            },
        }  # fmt: skip
        write_json(file, document)
    tuned.forget()


def _there(file: Path) -> dict[str, tuple[TunedRow, ...]]:
    """What this version has kept in the file before; nothing where the file is damaged or of another version."""
    try:
        return tuned.read_rows(file)
    except (OSError, ValueError):
        return {}
