"""Tables of a result file of `python -m benchmarks start`. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.table import narrow_table
from lowbit.eval.results import read_json, require_keys

SCHEMA = 1
START = "lowbit bench start"

ROW_KEYS = frozenset(
    ("model", "scheme", "device", "way", "cores", "bytes", "ready_s", "first_token_s", "phases", "read_s", "error")
)


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file of `python -m benchmarks start`. Raises ValueError that says what is wrong."""
    document = read_json(path, START, SCHEMA)
    require_keys(path, document, ("machine", "rows", "date"), ROW_KEYS)
    return document


def start_table(document: dict[str, Any]) -> Table:
    """Returns a table with a line for each start: seconds until it serves, until the first token, and by phase."""
    rows = [row for row in document["rows"] if row["error"] is None]
    named = list(dict.fromkeys(phase for row in rows for phase in row["phases"]))
    of = f" {document['rows'][0]['model']}" if document["rows"] else ""
    title = f"seconds from the start of `lowbit serve`{of} on {document['machine']['gpu']}"
    table = narrow_table(("start",), ("cores", "ready", "first token", *named, "reading"), title)
    for row in rows:
        by_phase = (f"{row['phases'].get(phase, 0.0):.1f}" for phase in named)
        table.add_row(
            row["way"],
            str(row["cores"]),
            f"{row['ready_s']:.1f}",
            f"{row['first_token_s']:.1f}",
            *by_phase,
            f"{row['read_s']:.1f}",
        )
    return table


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each start that did not succeed."""
    return [f"{row['way']}, {row['cores']} cores: {row['error']}" for row in document["rows"] if row["error"] is not None]
