"""`lowbit bench e2e` on the terminal, and its pictures. Needs no GPU to draw a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from lowbit.eval.results import read_json, write_plots
from lowbit.picture import Theme, new_figure, plain

SCHEMA = 1
E2E = "lowbit bench e2e"

KINDS = {
    "products": ("gemm", "cutlass", "cublas", "nvjet", "splitK"),
    "attention": ("attention", "append"),
    "norms and gates": ("norm", "gate", "embed"),
    "drawing": ("survey", "weigh", "settle", "argmax"),
}
"""Kernels of a step by what is in their names; the rest is "other"."""


def load(path: Path) -> dict[str, Any]:
    """The document of a result file of `lowbit bench e2e`; raises ValueError that says what is wrong with it."""
    document = read_json(path, E2E, SCHEMA)
    for key in ("machine", "rows", "date"):
        if key not in document:
            raise ValueError(f"{path}: holds no {key!r}")
    return document


def step_table(document: dict[str, Any]) -> Table:
    """One line per model, scheme, batch and context: milliseconds a token, share of the limit, against 16 bits."""
    title = f"one step of a decode, {document['machine']['gpu']}"
    columns = (
        "model",
        "weights",
        "impl",
        "batch",
        "context",
        "ms a token",
        "of its limit",
        "x 16 bits",
        "tokens/s",
        "kernels/layer",
    )
    table = Table(*columns, "step from Python, ms", "prompt tokens/s", title=title)
    for row in document["rows"]:
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    ms, limit, wide = row["ms_per_token"], row["limit_ms"], row["bf16_ms_per_token"]
    named = [row["model"], row["scheme"] or "16 bits", row["impl"], *(str(row[key] or "-") for key in ("batch", "context"))]
    if ms is None:
        return [*named, row["error"] or "-"]
    wall, rate, kernels = row.get("step_wall_ms"), row["prefill_tok_s"], row["kernels_per_layer"]
    return [
        *named, f"{ms:.3f}", f"{100 * limit / ms:.0f} %" if limit else "-", f"{wide / ms:.2f}" if wide else "-",
        f"{row['tokens_per_gpu_s']:,.0f}", f"{kernels:.1f}" if kernels else "-", f"{wall:.3f}" if wall else "-",
        f"{rate:,.0f}" if rate else "-",
    ]  # fmt: skip


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds of a step by kind of kernel."""
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, (_, us) in row.get("kernels", {}).items():
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        found[kind] += us
    return found


def plot(document: dict[str, Any], path: Path) -> None:
    """Tokens a second of one user against those of all together, a line for each scheme, a panel for each model and context;
    below it where the time of a step goes. Raises ValueError when there is nothing to draw, and without matplotlib."""
    rows = [row for row in document["rows"] if row["ms_per_token"] is not None]
    if not rows:
        raise ValueError("the results hold no measured row to plot")
    write_plots(path, E2E, lambda theme: _draw(document, rows, theme))


def _draw(document: dict[str, Any], rows: list[dict[str, Any]], theme: Theme) -> Any:
    panels = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
    figure = new_figure(3.6 * len(panels), 5.6, theme)
    above, below = figure.subplots(2, len(panels), squeeze=False)
    for axis, bars, panel in zip(above, below, panels, strict=True):
        here = [row for row in rows if (row["model"], row["context"]) == panel]
        _users(axis, here, f"{panel[0]}, context {panel[1]:,}", theme)
        _where(bars, [row for row in here if row.get("kernels")], theme)
    where = f"{document['machine']['gpu']}, {document['date']}"
    figure.suptitle(f"tokens/s of a user against all users'; where a step's time goes. {where}", color=theme.text, fontsize=9.5)
    return figure


def _users(axis: Any, rows: list[dict[str, Any]], title: str, theme: Theme) -> None:
    plain(axis, theme, title)
    lines = list(dict.fromkeys((row["scheme"], row["impl"]) for row in rows))
    styles = ("-", "--", ":", "-.")
    for number, (scheme, impl) in enumerate(lines):
        here = sorted((r for r in rows if (r["scheme"], r["impl"]) == (scheme, impl)), key=lambda row: row["batch"])
        color = theme.rival if scheme is None or impl != "lowbit" else theme.own
        label = (scheme or "16 bits") + ("" if impl == "lowbit" else f", {impl}")
        axis.plot(
            [r["tokens_per_gpu_s"] for r in here], [1e3 / r["ms_per_token"] for r in here], styles[number % 4],
            color=color, marker="o", markersize=3, linewidth=1.2, label=label,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xlabel("tokens/s of all users")
    axis.set_ylabel("tokens/s of a user")
    axis.legend(fontsize=7, frameon=False, labelcolor=theme.text)


def _where(axis: Any, rows: list[dict[str, Any]], theme: Theme) -> None:
    """Bars of kinds of kernels, stacked, a bar for each scheme and batch."""
    plain(axis, theme)
    axis.grid(visible=False)
    colors = (theme.own, theme.second, theme.rival, theme.text, theme.grid)
    names = [f"{row['scheme'] or '16 bits'}, {row['batch']}" for row in rows]
    start = [0.0] * len(rows)
    for kind, color in zip((*KINDS, "other"), colors, strict=True):
        us = [shares(row)[kind] for row in rows]
        axis.barh(range(len(rows)), us, left=start, height=0.7, color=color, label=kind)
        start = [a + b for a, b in zip(start, us, strict=True)]
    axis.set_yticks(range(len(rows)), names, fontsize=6)
    axis.invert_yaxis()
    axis.set_xlabel("us of kernels in a step (scheme, batch)")
    if rows:
        axis.legend(fontsize=6, frameon=False, labelcolor=theme.text)
