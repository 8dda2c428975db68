"""`lowbit bench mechanisms` on the terminal: a table for each part. Needs no GPU to print a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lowbit.eval.results import read_json, require_keys

SCHEMA = 1
MECHANISMS = "lowbit bench mechanisms"

PARTS = {
    "conversions": "conversions in a loop over registers: a tile of 16 x 64 weights, clocks of a quarter of an SM",
    "products": "the same conversions in products",
    "scales": "scales of groups on sums after the product or on weights before it",
    "tiles": "tiles: order, stages, split-K, sliced-K; int4 in groups of 128",
    "fused": "one kernel, or weights written out as halves and then cuBLAS",
    "cublas": "fp16 weights by cuBLAS, shares of what was measured in the same run",
    "counters": "the same by the GPU's counters, cold caches",
    "convolution": "channels of convolutions",
}
"""What each part of the rows measures, in the order of a run."""

ROW_KEYS = frozenset(("part", "case", "way", "dtype", "m", "n", "k", "us", "figures", "rel_err", "error"))


def load(path: Path) -> dict[str, Any]:
    """The document of a result file of `lowbit bench mechanisms`; raises ValueError that says what is wrong with it."""
    document = read_json(path, MECHANISMS, SCHEMA)
    require_keys(path, document, ("machine", "rows", "date"), ROW_KEYS)
    for number, row in enumerate(document["rows"]):
        if row["part"] not in PARTS:
            raise ValueError(f"{path}: row {number} is of part {row['part']!r}; parts are {', '.join(PARTS)}")
    return document


def tables(document: dict[str, Any], parts: Sequence[str] = tuple(PARTS)) -> list[Table]:
    """A table for each of the parts that has rows."""
    found = {part: [row for row in document["rows"] if row["part"] == part] for part in parts}
    return [_table(PARTS[part], rows) for part, rows in found.items() if rows]


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    timed, sized = any(row["us"] for row in rows), any(row["n"] for row in rows)
    tokens = any(row["m"] is not None for row in rows)
    table = Table("case", "way", "type", title=title)
    for column in [
        *["N x K"] * sized,
        *["M"] * tokens,
        *["us", "x first"] * timed,
        *(name.replace("_", " ") for name in names),
    ]:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["case"], row["way"], row["dtype"]]
        cells += [f"{row['n']} x {row['k'] or '-'}"] * sized + [str(row["m"] if row["m"] is not None else "-")] * tokens
        if row["error"] is not None:
            table.add_row(*cells, row["error"])
            continue
        if timed:
            ratio = against_first(row, rows)
            cells += ["-" if row["us"] is None else f"{row['us']:.2f}", "-" if ratio is None else f"{ratio:.2f}"]
        table.add_row(*cells, *(_number(row["figures"].get(name)) for name in names))
    return table


def against_first(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """The row's time by that of the first row of the same case, type and M; None where either has none."""
    alike = [r for r in rows if all(r[key] == row[key] for key in ("case", "dtype", "m", "n", "k"))]
    first = alike[0]["us"]
    return row["us"] / first if row["us"] and first else None


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 0 if value == int(value) or abs(value) >= 1000 else 2 if abs(value) < 100 else 1
    return f"{value:,.{digits}f}"
