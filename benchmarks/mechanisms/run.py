"""Runs `python -m benchmarks mechanisms`: compiles all kernels in several processes, then measures row by row."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.ceilings import measured_ceilings
from benchmarks.limits import Ceilings
from benchmarks.mechanisms import fused, layouts, loops, products, sums
from benchmarks.mechanisms.counters import rows as counted
from benchmarks.mechanisms.report import MECHANISMS, SCHEMA
from benchmarks.mechanisms.trial import Row, Trial
from benchmarks.protocol import PROTOCOL as PRODUCTS
from benchmarks.results import default_path, machine
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import versions, write_json
from lowbit.hardware.machine import machine_of
from lowbit.kernels.parts.compile import compile_all
from lowbit.kernels.parts.launch import recording
from lowbit.tune.timing import failures, reason, warm_up

PROTOCOL = (
    f"conversions: {loops.TURNS} turns of a loop on every SM, {loops.BLOCK_WARPS} warps each, the clock of the SM read before "
    "and after; the median over threads, less a loop without a conversion, for one tile of 16 x 64 weights and a quarter of "
    "an SM. latency_clocks: one warp on an SM, whose words come from the tile before, loop included. instructions are lines of "
    "the loop's machine code, less those of the loop without a conversion. Registers are compared with the instructions' "
    f"meaning, bit for bit, before. scales: the same of a step of 16 x 128 weights, {loops.STEP_WARPS} warps, nothing taken "
    "off, compared with float64. Where N and K stand, whole products: " + PRODUCTS
)

ProgressCallback = Callable[[str], None]


def trials(parts: Sequence[str], ceilings: Ceilings) -> Iterator[Trial]:
    """Returns everything that this process measures, in order."""
    here = machine_of("cuda")
    if "conversions" in parts:
        yield from loops.conversion_trials(here.sm_count)
    if "products" in parts:
        yield from products.conversion_trials()
    if "scales" in parts:
        yield from loops.step_trials(here.sm_count)
        yield from products.scale_trials()
    if "tiles" in parts:
        yield from products.tile_trials()
    yield from (trial for trial in fused.trials(ceilings) if trial.row["part"] in parts)
    if "sums" in parts:
        yield from sums.trials()
    if "convolution" in parts:
        yield from layouts.trials()


def run(parts: Sequence[str], path: Path | None, progress: ProgressCallback) -> tuple[Path, dict[str, Any]]:
    """Measures `parts` on the current GPU (sm_90) and writes the result file after every row. Returns its path and document."""
    today, about = datetime.date.today(), machine()
    path = path or default_path(about["gpu"], today).with_name(f"{today.isoformat()}-mechanisms.json")
    check_file(path, MECHANISMS)
    warm_up()
    ceilings, stored = measured_ceilings()
    rows: list[Row] = []
    document: dict[str, Any] = {
        "result": MECHANISMS, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "machine": about,
        "versions": versions(()), "ceilings": stored, "protocol": PROTOCOL, "rows": rows,
    }  # fmt: skip

    def add(row: Row) -> None:
        rows.append(row)
        write_json(path, document)

    wanted = list(trials(parts, ceilings))
    _compile(wanted, progress)
    for number, trial in enumerate(wanted):
        progress(f"{number + 1} of {len(wanted)}: {trial.row['part']}, {trial.row['case']}, {trial.row['way']}")
        try:
            add({**trial.row, **trial.measure()})
        except failures() as error:
            add({**trial.row, "error": reason(error)})
        torch.cuda.empty_cache()
    if "counters" in parts:
        progress("the profiler")
        for row in counted():
            add(row)
    document["complete"] = True
    write_json(path, document)
    return path, document


def _compile(wanted: Sequence[Trial], progress: ProgressCallback) -> None:
    """Compiles all kernels. Failures are ignored; they occur again, with a reason in the row."""
    with recording() as kernels:
        for trial in wanted:
            try:
                trial.once()
            except failures():
                continue
    major, minor = torch.cuda.get_device_capability()
    for done in compile_all(kernels, 10 * major + minor):
        progress(f"compiled {done} of {len(kernels)} kernels")
