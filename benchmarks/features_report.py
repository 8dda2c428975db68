"""The tables of a result file of `python -m benchmarks features`. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.table import narrow_table
from lowbit.eval.results import read_json, require_keys

SCHEMA = 1
FEATURES = "lowbit bench features"


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file. Raises ValueError that says what is wrong with it."""
    document = read_json(path, FEATURES, SCHEMA)
    require_keys(path, document, ("machine", "rows", "date"))
    return document


def tables(document: dict[str, Any]) -> list[Table]:
    """Returns the tables of steps with a feature beside plain ones, of the kernels of a layer with adapters, of prompts beside
    decoding, of the kinds of their steps, and of guesses."""
    rows = [row for row in document["rows"] if row["error"] is None]
    gpu = document["machine"]["gpu"]
    columns = ("rows", "plain us", "us", "ratio", "by launches", "ratio")
    steps = narrow_table(("feature",), columns, f"steps of {document['model']} on {gpu}")
    mixed = narrow_table(("prompts and steps",), ("tokens/s", "ms between tokens", "99 %", "ratio"), "requests that come")
    layers = narrow_table(("kernels of a layer with adapters",), ("rows", "us"), "what each adds")
    kinds = narrow_table(
        ("steps of requests",), ("number", "prompt tokens", "ms", "idle ms"), "as many as it takes, and at load"
    )
    guesses = narrow_table(
        ("task",), ("tokens", "tokens/s", "with guesses", "ratio", "right"), f"guesses of {document['small']}"
    )
    for row in rows:
        if "plain_us" in row:
            plain = [f"{row['plain_us']:.0f}", f"{row['us']:.0f}", f"{row['ratio']:.3f}"]
            launches = [f"{row['launches_us']:.0f}", f"{row['launches_ratio']:.3f}"] if "launches_us" in row else []
            steps.add_row(row["what"], str(row["rows"]), *plain, *launches)
            for name, us in row.get("layer", ()):
                layers.add_row(name, str(row["rows"]), f"{us:.1f}")
        elif "p99_ms" in row:
            median, most = row["median_ms"], row["p99_ms"]
            mixed.add_row(row["what"], f"{row['tokens_per_s']:,.0f}", f"{median:.1f}", f"{most:.1f}", f"{most / median:.2f}")
            for load in ("", "loaded_"):
                for kind, (count, tokens, ms) in row.get(f"{load}steps", {}).items():
                    cells = f"{count:,}", f"{tokens:.0f}", f"{ms:.2f}", f"{row[f'{load}idle_ms']:.0f}"
                    kinds.add_row(f"{row['what']}{', loaded' if load else ''}: {kind}", *cells)
        else:
            guesses.add_row(
                row["what"], str(row["tokens"]), f"{row['plain_tokens_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}",
                f"{row['ratio']:.2f}", f"{row['accepted']} of {row['drafted']}",
            )  # fmt: skip
    return [table for table in (steps, layers, mixed, kinds, guesses) if table.row_count]


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each part that failed."""
    return [f"{row['part']}: {row['error']}" for row in document["rows"] if row["error"] is not None]
