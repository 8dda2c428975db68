"""Tables of a result file of `python -m benchmarks load`. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.table import narrow_table
from lowbit.eval.results import read_json, require_keys

SCHEMA = 1
LOAD = "lowbit bench load"

ROW_KEYS = frozenset(
    {
        *(
            "model",
            "layers",
            "files",
            "scheme",
            "head",
            "dtype",
            "device",
            "source_bytes",
            "seconds",
            "gb_per_s",
            "model_bytes",
        ),
        *("layer_bytes", "bound_bytes", "peak_bytes", "peak_host_bytes", "slow", "error"),
    }
)


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file of `python -m benchmarks load`. Raises ValueError that says what is wrong with
    it.
    """
    document = read_json(path, LOAD, SCHEMA)
    require_keys(path, document, ("machine", "rows", "date"), ROW_KEYS)
    return document


def load_table(document: dict[str, Any]) -> Table:
    """Returns a table with a line for each kind of files and scheme: seconds, GB of files per second, the model's bytes, peak
    GPU memory and its bound, peak host memory.
    """
    first = document["rows"][0] if document["rows"] else None
    of = "" if first is None else f" {first['model']}, {first['layers']} layers,"
    heads = ", ".join(dict.fromkeys(row["head"] for row in document["rows"] if row["head"]))
    table = narrow_table(
        ("files", "scheme"), ("GB", "s", "GB/s", "model GB", "peak", "bound", "host"),
        f"loading{of} on {document['machine']['device']}{f', head {heads}' if heads else ''}",
    )  # fmt: skip
    for row in document["rows"]:
        if row["error"] is None:
            sizes = [_gb(row[key]) for key in ("model_bytes", "peak_bytes", "bound_bytes", "peak_host_bytes")]
            files = row["files"], row["scheme"] or "-", _gb(row["source_bytes"])
            table.add_row(*files, f"{min(row['seconds']):.2f}", f"{row['gb_per_s']:.2f}", *sizes)
    return table


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each kind of files that did not load."""
    rows = [row for row in document["rows"] if row["error"] is not None]
    return [f"{row['files']}, {row['scheme'] or 'as they are'}: {row['error']}" for row in rows]


def _gb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f}"
