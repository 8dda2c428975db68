"""Tables of a result file of `python -m benchmarks choice`: gap to the best tile, time by M, cuBLAS. Needs no GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.grid import HALVES
from benchmarks.table import narrow_table
from lowbit.eval.results import read_json, require_keys

SCHEMA = 1
CHOICE = "lowbit bench choice"

MEAN_REGRET, WORST_REGRET = 1.02, 1.08
"""Allowed mean and worst gap on weights that were not used for tuning."""
RISE = 1.03
"""A product may take at most this many times as long as the same weight with more tokens. Smaller ratios are noise."""
BESIDE_CUBLAS_M, BESIDE_CUBLAS_NK = 128, 2048
"""Products with at least this M, and at least this N and K, must not be slower than cuBLAS."""
WORST = 12
"""Number of rows in a list of the worst."""

_KEYS = ("scheme", "n", "k", "m", "half", "cublas_us", "chosen", "us", "failed")

Row = dict[str, Any]
Chooser = Callable[[Row], str]
"""Function that selects a tile of a row."""


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file. Raises ValueError that says what is wrong with it."""
    document = read_json(path, CHOICE, SCHEMA)
    require_keys(path, document, ("machine", "versions", "date", "rows"), _KEYS)
    return document


def chosen(row: Row) -> str:
    """Returns the tile that was chosen when the row was measured."""
    return str(row["chosen"])


def timed(rows: Iterable[Row], chooser: Chooser = chosen) -> Iterator[tuple[Row, float]]:
    """Yields the rows in which the selected tile was timed, each with that tile's microseconds."""
    for row in rows:
        us = row["us"].get(chooser(row))
        if us is not None:
            yield row, us


def regrets(rows: Iterable[Row], chooser: Chooser = chosen) -> list[tuple[float, Row]]:
    """Returns (gap, row), worst first. The gap is the time of the row's selected tile divided by that of its fastest tile."""
    found = [(us / min(row["us"].values()), row) for row, us in timed(rows, chooser)]
    return sorted(found, key=lambda each: -each[0])


def falls(rows: Iterable[Row], chooser: Chooser = chosen) -> list[tuple[float, Row, Row]]:
    """Returns (ratio, row, row with more tokens) for each product that takes more than `RISE` times as long as the same weight
    with more tokens. Each row has one entry, with its largest ratio; worst first."""
    weights: dict[tuple[str, int, int], list[tuple[Row, float]]] = {}
    for row, us in timed(rows, chooser):
        weights.setdefault((row["scheme"], row["n"], row["k"]), []).append((row, us))
    found = []
    for of_weight in weights.values():
        for row, us in of_weight:
            larger = [(us / other_us, other) for other, other_us in of_weight if other["m"] > row["m"]]
            ratio, other = max(larger, key=lambda each: each[0], default=(0.0, row))
            if ratio > RISE:
                found.append((ratio, row, other))
    return sorted(found, key=lambda each: -each[0])


def beside_cublas(rows: Iterable[Row], chooser: Chooser = chosen) -> list[tuple[float, Row]]:
    """Returns (speedup over cuBLAS in fp16, row) of the rows that must not be slower than cuBLAS, slowest first."""
    large = [row for row in rows if row["m"] >= BESIDE_CUBLAS_M and min(row["n"], row["k"]) >= BESIDE_CUBLAS_NK]
    held = [row for row in large if row["cublas_us"]]
    return sorted(((row["cublas_us"] / us, row) for row, us in timed(held, chooser)), key=lambda each: each[0])


@dataclass(frozen=True)
class Summary:
    """Number of rows, mean and worst gap, and the share of rows within `MEAN_REGRET`."""

    count: int
    mean: float
    worst: float
    good: float


def summary(rows: Iterable[Row], chooser: Chooser = chosen) -> Summary | None:
    """Returns the summary of the gaps of rows; None if there are none."""
    found = [regret for regret, _ in regrets(rows, chooser)]
    if not found:
        return None
    good = sum(regret <= MEAN_REGRET for regret in found) / len(found)
    return Summary(len(found), statistics.fmean(found), max(found), good)


def tables(document: dict[str, Any]) -> list[Table]:
    """Returns the gap by half and scheme and by half and tokens, the worst rows, times that fall with more tokens, and
    cuBLAS."""
    rows = document["rows"]
    judged = [row for row in rows if row["half"] == "untuned"] or rows
    return [
        regret_table(rows, "scheme"),
        regret_table(rows, "m"),
        _list("regret, worst", [(f"{r:.3f}", row, f"{_best(row)} instead of {row['chosen']}") for r, row in regrets(judged)]),
        _list(
            f"slower than with more tokens, {len(falls(rows))} of {len(rows)}",
            [(f"{ratio:.3f}", row, f"M {more['m']}: {more['us'][more['chosen']]:.1f} us") for ratio, row, more in falls(rows)],
        ),
        _cublas_table(rows),
    ]


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each tile whose product was wrong or failed."""
    return [f"{_name(row)}: {tile}: {why}" for row in document["rows"] for tile, why in row["failed"].items()]


def _best(row: Row) -> str:
    return min(row["us"], key=lambda tile: row["us"][tile])


def _name(row: Row) -> str:
    return f"{row['scheme']} {row['n']} x {row['k']} M {row['m']}"


def regret_table(rows: list[Row], column: str, title: str = "regret") -> Table:
    """Returns the gap by half and by the values of a column."""
    what = ("products", "mean", "worst", "<= 1.02")
    table = narrow_table((column,), what * len(HALVES), f"{title}: of the {' and the '.join(HALVES)} half")
    for value in [*dict.fromkeys(row[column] for row in sorted(rows, key=lambda row: row[column])), None]:
        cells = []
        for half in HALVES:
            found = summary(row for row in rows if row["half"] == half and value in (None, row[column]))
            cells += (
                ["-"] * 4 if found is None
                else [str(found.count), f"{found.mean:.3f}", f"{found.worst:.3f}", f"{100 * found.good:.0f} %"]
            )  # fmt: skip
        table.add_row("all" if value is None else str(value), *cells)
    return table


def _list(title: str, found: list[tuple[str, Row, str]]) -> Table:
    table = narrow_table(("product",), ("us", "times"), title)
    table.add_column("beside")
    for times, row, beside in found[:WORST]:
        table.add_row(_name(row), f"{row['us'][row['chosen']]:.1f}", times, beside)
    return table


def _cublas_table(rows: list[Row]) -> Table:
    table = narrow_table(("half",), ("products", "mean", "slowest", "below 1.0"), "times as fast as cuBLAS fp16")
    table.add_column("slowest is")
    for half in HALVES:
        found = beside_cublas(row for row in rows if row["half"] == half)
        if found:
            below = sum(ratio < 1 for ratio, _ in found)
            mean = statistics.geometric_mean(ratio for ratio, _ in found)
            table.add_row(half, str(len(found)), f"{mean:.3f}", f"{found[0][0]:.3f}", str(below), _name(found[0][1]))
    return table
