"""Tables of a result file of `python -m benchmarks activations`. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowbit.eval.results import read_json

SCHEMA = 1
ACTIVATIONS = "lowbit bench activations"
SHARES_FROM = 4096
"""Fewest rows for which the share of the copy speed is shown; with fewer, the launch dominates."""

_KEYS = {
    "rows": frozenset({"operation", "m", "k", "us", "nbytes"}),
    "products": frozenset({"scheme", "m", "k", "product_us", "quantize_us", "both_us"}),
}


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file. Raises ValueError that says what is wrong with it."""
    document = read_json(path, ACTIVATIONS, SCHEMA)
    for key in ("machine", "versions", "date", "dtype", "copy_bytes_per_s", *_KEYS):
        if key not in document:
            raise ValueError(f"{path}: holds no {key!r}")
    for table, keys in _KEYS.items():
        for number, row in enumerate(document[table]):
            if keys - set(row):
                raise ValueError(f"{path}: {table}, row {number} lacks {', '.join(sorted(keys - set(row)))}")
    return document


def markdown(document: dict[str, Any]) -> str:
    """Returns the machine, the table of operations and the table of products as Markdown."""
    machine, versions = document["machine"], document["versions"]
    where = (
        f"{machine['gpu']}, {document['date']}, torch {versions.get('torch')}, triton {versions.get('triton')}; "
        f"x {document['dtype']}. Microseconds per call in one CUDA graph; from {SHARES_FROM} rows on, the share of the fastest "
        f"copy's speed, {document['copy_bytes_per_s'] / 1e12:.2f} TB/s read and written."
        + ("" if document.get("complete") else " The run was interrupted: rows are missing.")
    )
    parts = [where, _operations(document), _products(document["products"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _operations(document: dict[str, Any]) -> str:
    rows, speed = document["rows"], document["copy_bytes_per_s"]
    heights = sorted({row["m"] for row in rows})
    lines = [f"| | K | {' | '.join(f'M {m}' for m in heights)} |", "|---|---:|" + "---:|" * len(heights)]
    cells = {(row["k"], row["operation"], row["m"]): row for row in rows}
    for k, operation in dict.fromkeys((row["k"], row["operation"]) for row in rows):
        found = [_cell(cells.get((k, operation, m)), speed) for m in heights]
        lines.append(f"| {operation} | {k} | {' | '.join(found)} |")
    return "\n".join(lines) if rows else ""


def _cell(row: dict[str, Any] | None, speed: float) -> str:
    if row is None:
        return "-"
    share = f" ({1e8 * row['nbytes'] / speed / row['us']:.0f} %)" if row["m"] >= SHARES_FROM else ""
    return f"{row['us']:.1f}{share}"


def _products(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    lines = ["| product, N = K | K | M | codes given | x to codes | both |", "|---|" + "---:|" * 5]
    for row in rows:
        us = " | ".join(f"{row[key]:.1f}" for key in ("product_us", "quantize_us", "both_us"))
        lines.append(f"| `{row['scheme']}` | {row['k']} | {row['m']} | {us} |")
    return "\n".join(lines)
