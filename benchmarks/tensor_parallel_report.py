"""The table of a result file of `python -m benchmarks tensor-parallel`. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.table import narrow_table
from lowbit.eval.results import read_json, require_keys

SCHEMA = 1
RANKS = "lowbit bench tensor-parallel"


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file. Raises ValueError that says what is wrong with it."""
    document = read_json(path, RANKS, SCHEMA)
    require_keys(path, document, ("machine", "rows", "date"))
    return document


def table(document: dict[str, Any]) -> Table:
    """Returns the table of steps. Its columns are milliseconds per token, the ratio to the time of one GPU, the share of the
    limit, and tokens per second and GPU."""
    rows = [row for row in document["rows"] if row.get("ms_per_token")]
    alone = {row["batch"]: row["ms_per_token"] for row in rows if row["gpus"] == 1}
    title = f"a step of a decode on {document['machine']['gpu']}"
    made = narrow_table(("model", "GPUs"), ("users", "ms a token", "of one GPU", "of limit", "tokens/s/GPU"), title)
    for row in rows:
        ms, one = row["ms_per_token"], alone.get(row["batch"])
        gpus = ", ".join(filter(None, (str(row["gpus"]), row["sums"], "" if row["scheme"] else row["products"])))
        made.add_row(
            f"{row['model']}, {row['scheme'] or '16 bits'}", gpus, str(row["batch"]), f"{ms:.3f}",
            f"{ms / one:.2f}" if one else "-", f"{100 * row['limit_ms'] / ms:.0f} %", f"{row['tokens_per_gpu_s']:,.0f}",
        )  # fmt: skip
    return made


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each row without a time."""
    rows = [row for row in document["rows"] if row["error"] is not None]
    return [f"{row['model']}, {row['scheme'] or '16 bits'}, {row['gpus']} GPUs: {row['error']}" for row in rows]
