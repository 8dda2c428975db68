"""Tables of a result file of `python -m benchmarks mechanisms`, one for each part. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.table import narrow_table
from lowbit.eval.results import read_json, require_keys

SCHEMA = 1
MECHANISMS = "lowbit bench mechanisms"

PARTS = {
    "conversions": "conversions in a loop over registers: a tile of 16 x 64 weights, clocks of a quarter of an SM",
    "products": "the same conversions in products",
    "scales": "scales of groups on sums after the product or on weights before it",
    "tiles": "tiles: order, stages, split-K, sliced-K; int4 in groups of 128",
    "lines": "weights in TensorRT-LLM's interleaved lines or in fragment order, same tile of the mma.sync kernel",
    "fused": "one kernel, or weights written out as halves and then cuBLAS",
    "sums": "fp8 sums that leave the tensor core every 128 k or stay; errors of float32 results",
    "cublas": "fp16 weights by cuBLAS, shares of what was measured in the same run",
    "counters": "the same by the GPU's counters, cold caches",
    "convolution": "channels of convolutions",
}
"""Description of each part, in the order of a run."""

REMOVED_PARTS = ("lines",)
"""Parts of kept result files that can be printed but not measured: their kernel was removed."""

ROW_KEYS = frozenset(("part", "case", "way", "dtype", "m", "n", "k", "us", "figures", "rel_err", "error"))


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file of `python -m benchmarks mechanisms`. Raises ValueError that says what is wrong
    with it."""
    document = read_json(path, MECHANISMS, SCHEMA)
    require_keys(path, document, ("machine", "rows", "date"), ROW_KEYS)
    for number, row in enumerate(document["rows"]):
        if row["part"] not in PARTS:
            raise ValueError(f"{path}: row {number} is of part {row['part']!r}; parts are {', '.join(PARTS)}")
    return document


def tables(document: dict[str, Any], parts: Sequence[str] = tuple(PARTS)) -> list[Table]:
    """Returns a table for each group of rows of a part with the same figures."""
    found = []
    for part in parts:
        kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in document["rows"]:
            if row["part"] == part and row["error"] is None:
                kinds.setdefault((*row["figures"], *["us"] * (row["us"] is not None)), []).append(row)
        found += [_table(PARTS[part], rows) for rows in kinds.values()]
    return found


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each row that was not measured."""
    rows = [row for row in document["rows"] if row["error"] is not None]
    return [f"{row['part']}, {row['case']}, {row['way']}, {row['dtype']}: {row['error']}" for row in rows]


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Returns a table; columns with one value in all rows move to the title."""
    of = {"type": [row["dtype"] for row in rows], "N x K": [_size(row) for row in rows], "M": [_tokens(row) for row in rows]}
    same = [f"{name} {values[0]}" for name, values in of.items() if len({*values}) == 1 and values[0] != "-"]
    told = {name: values for name, values in of.items() if len({*values}) > 1}
    timed = rows[0]["us"] is not None
    names = [*told, *["us", "x first"] * timed, *(name.replace("_", "\n") for name in rows[0]["figures"])]
    table = narrow_table(("case", "way"), names, ", ".join([title, *same]))
    for i, row in enumerate(rows):
        ratio = against_first(row, rows)
        times = [f"{row['us']:.2f}", "-" if ratio is None else f"{ratio:.2f}"] if timed else []
        figures = [_number(value) for value in row["figures"].values()]
        table.add_row(row["case"], row["way"], *(values[i] for values in told.values()), *times, *figures)
    return table


def _size(row: dict[str, Any]) -> str:
    return f"{row['n']} x {row['k']}" if row["n"] and row["k"] else "-"


def _tokens(row: dict[str, Any]) -> str:
    return "-" if row["m"] is None else str(row["m"])


def against_first(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Returns the time of the row relative to the first row of the same case, type and M; None if one has no time."""
    alike = [r for r in rows if all(r[key] == row[key] for key in ("case", "dtype", "m", "n", "k"))]
    first = alike[0]["us"]
    return row["us"] / first if row["us"] and first else None


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 0 if value == int(value) or abs(value) >= 1000 else 2 if abs(value) < 100 else 1
    return f"{value:,.{digits}f}"
