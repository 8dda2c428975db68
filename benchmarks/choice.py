"""`python -m benchmarks choice`: time of the chosen tile relative to the best tile that lowbit/tune/trials.py tries.

The gap of a product is the time of its chosen tile divided by the time of the fastest one. The candidates are the tiles with
the lowest modelled cost, the best of each kind, and neighbours that the choice does not consider. Tiles chosen for more tokens
are candidates too, since tokens can be padded.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.choice_report import CHOICE, SCHEMA
from benchmarks.grid import HALVES, MODELS, SCHEMES, TOKENS, half_of, weights
from benchmarks.results import default_path, machine
from lowbit.eval.results import versions, write_json
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.tuned import written
from lowbit.tune.timing import (
    ROW_TOLERANCE,
    TOLERANCE,
    Graph,
    Memory,
    copies_needed,
    gaussian,
    l2_bytes,
    warm_up,
)
from lowbit.tune.trials import (
    FINALISTS,
    GRAPH_US,
    LONGEST_GRAPH_US,
    REPLAYS,
    SCREENED,
    SLOWER,
    TILES,
    ProgressCallback,
    TrialGrid,
    Trials,
    candidate_tiles,
    kernels,
    launches,
    parse_rows,
    products_of,
)

if TYPE_CHECKING:
    pass

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


def chosen_now(row: dict[str, Any], machine: Machine) -> str:
    """Returns the name of the tile that the current code chooses for a row's product, in the notation of the result file."""
    return written(products_of(row["scheme"], machine).feasible(row["m"], row["n"], row["k"])[0].tile, TILES)


def as_chosen_now(rows: Sequence[dict[str, Any]], machine: Machine) -> list[dict[str, Any]]:
    """Returns the rows in which the currently chosen tile was timed. Their `chosen` is replaced by this tile."""
    now = [{**row, "chosen": chosen_now(row, machine)} for row in rows]
    return [row for row in now if row["chosen"] in row["us"]]


def make_trial_grid(
    models: str | None = None, schemes: str | None = None, tokens: str | None = None, half: str | None = None,
    seconds: float | None = None,
) -> TrialGrid:  # fmt: skip
    """Parses comma-separated options into the products to measure; None stands for the whole grid. Raises ValueError with
    the value and what is supported."""
    if half not in (None, *HALVES):
        raise ValueError(f"--half is {' or '.join(HALVES)}, got {half!r}")
    shapes = weights(MODELS if models is None else models.split(","), half=half)  # type: ignore[arg-type]
    names = SCHEMES if schemes is None else tuple(parse_scheme(name).name for name in schemes.split(","))
    rows = TOKENS if tokens is None else tuple(sorted(set(parse_rows(tokens))))
    return TrialGrid(tuple(shapes), names, rows, math.inf if seconds is None else seconds)


def run(
    grid: TrialGrid, out: Path | None, say: Callable[[str], None], progress: ProgressCallback
) -> tuple[Path, dict[str, Any]]:
    """Measures and writes the result file (default benchmarks/results/<gpu>/<date>-choice.json); returns its path and document.

    The file is written at intervals and at the end, also after an interruption. Raises ValueError without an NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"bench choice measures an NVIDIA GPU and torch {torch.__version__} sees none")
    if torch.cuda.get_device_capability()[0] != 9:
        raise ValueError(
            "bench choice measures an H100 or H200 (sm_90); `lowbit tune` times the tiles of a model on other GPUs"
        )
    end = time.monotonic() + grid.seconds
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
    progress(0, grid.count, "listing kernels")
    wanted = kernels(grid, here)
    say(f"{grid.count} products of {len(grid.shapes)} weights, {len(wanted)} distinct kernels")
    from lowbit.kernels.parts.compile import compiled

    for done in compiled(wanted, here.arch.sm):
        progress(done, len(wanted), "compiling")
    warm_up()
    saved = time.monotonic()
    try:
        for row in rows(grid, here):
            document["rows"].append(row)
            progress(len(document["rows"]), grid.count, f"{row['scheme']} {row['n']}x{row['k']} M {row['m']}")
            now = time.monotonic()
            if now > end:
                say(f"stopped after {grid.seconds:g} s: {len(document['rows'])} of {grid.count} products")
                return out, document
            if now - saved > SAVE_SECONDS:
                write_json(out, document)
                saved = time.monotonic()
        document["complete"] = True
        return out, document
    finally:
        write_json(out, document)


@torch.inference_mode()
def rows(grid: TrialGrid, here: Machine) -> Iterator[dict[str, Any]]:
    """Yields a row for each product, weight by weight."""
    for n, k in grid.shapes:
        tokens = grid.tokens_of(n, k)
        if not tokens:
            continue
        x = gaussian(tokens[-1], k, seed=2, dtype=torch.float16)
        cublas = _cublas(x, n, tokens)
        for scheme in grid.schemes:
            of = products_of(scheme, here)
            trials = Trials(of, n, k, x)
            for m in tokens:
                yield {
                    "scheme": of.scheme.name, "n": n, "k": k, "m": m, "half": half_of((n, k)), "cublas_us": cublas[m],
                    **trials.measure(m, candidate_tiles(of, m, n, k, tokens)),
                }  # fmt: skip
            del trials
            torch.cuda.empty_cache()


def _cublas(x: Tensor, n: int, tokens: Sequence[int]) -> dict[int, float]:
    """Returns the microseconds of torch.matmul with a fp16 weight [n, K], by number of tokens."""
    memory = Memory()
    first = gaussian(n, x.shape[1], seed=1, dtype=torch.float16)
    copies = [first, *(first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1))]
    found = {}
    for m in tokens:
        us = 1e6 * max(first.nbytes / 4e12, 2.0 * m * first.numel() / 6e14)
        calls = [partial(torch.matmul, x[:m], copies[i % len(copies)].T) for i in range(launches(us, len(copies)))]
        found[m] = statistics.median(Graph(calls, memory).times_us(REPLAYS, warm=1))
    return found
