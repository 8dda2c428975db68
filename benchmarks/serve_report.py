"""Tables and plot of a result file of `python -m benchmarks serve`. Needs no server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.table import narrow_table
from lowbit.eval.results import read_json, require_keys, write_plots
from lowbit.picture import Theme, new_figure, plain

SCHEMA = 1
SERVE = "lowbit bench serve"

ROW_KEYS = frozenset(
    {
        *("part", "mix", "streams", "load", "requests", "failed", "errors", "cut", "seconds", "tokens_per_s"),
        *("requests_per_s", "ratio", "own_first_ms", "added_ms", "first_ms", "token_ms", "server_cpu", "client_cpu", "error"),
    }
)

RATIO = 0.92
"""Required share of the engine's own tokens per second over HTTP."""

ADDED_MS = 15.0
"""Allowed 99th percentile of the time that HTTP adds to the first token of a single request."""

PERCENTILES = ("p50", "p95", "p99")


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file of `python -m benchmarks serve`. Raises ValueError that says what is wrong with
    it."""
    document = read_json(path, SERVE, SCHEMA)
    require_keys(path, document, ("machine", "rows", "date", "asked"), ROW_KEYS)
    return document


def tables(document: dict[str, Any]) -> list[Table]:
    """Returns a line for each part: requests, failures, tokens per second, busy cores of server and clients; and the latency
    percentiles."""
    rows = [row for row in document["rows"] if not row["error"]]
    title = f"{of(document)} on {document['machine']['device']}; last, the cores that are busy"
    work = narrow_table(("part",), ("asked", "failed", "tokens/s", "req/s", "server", "clients"), title)
    waits = narrow_table(("",), PERCENTILES * 2, "milliseconds to the first token, and then for each")
    for row in rows:
        cores = [_number(row[key], ".2f") for key in ("server_cpu", "client_cpu")]
        work.add_row(
            _part(row), f"{row['requests']:,}", f"{row['failed']:,}", _number(row["tokens_per_s"], ",.0f"),
            _number(row["requests_per_s"], ".2f"), *cores,
        )  # fmt: skip
        waits.add_row(_part(row), *_three(row["first_ms"]), *_three(row["token_ms"]))
    return [work, waits]


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each part that was not measured."""
    return [f"{_part(row)}: {row['error']}" for row in document["rows"] if row["error"]]


def of(document: dict[str, Any]) -> str:
    """Returns the served model, its scheme, and the format of keys and values unless they have 16 bits."""
    config = document["asked"]
    kv = config.get("kv", "16")  # missing in the oldest results
    return ", ".join(filter(None, (config["folder"] or config["shape"], config["scheme"], "" if kv == "16" else f"KV {kv}")))


def _part(row: dict[str, Any]) -> str:
    load = f" at {row['load']} %" if row["load"] else ""
    streams = f" of {row['streams']}" if row["part"] in ("engine", "streams", "capacity") else ""
    return f"{row['part']}{streams}{load}, {row['mix']}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _three(values: dict[str, float] | None) -> list[str]:
    return ["-" if values is None else _short(values[p]) for p in PERCENTILES]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def verdicts(document: dict[str, Any]) -> list[str]:
    """Returns a line for each measured requirement: the result and the requirement."""
    rows = {row["part"]: row for row in reversed(document["rows"])}
    said = []
    streams = [row for row in document["rows"] if row["part"] == "streams" and row["requests"]]
    if streams:
        row, seconds = streams[0], sum(row["seconds"] for row in streams)
        errors = sum((Counter(row["errors"]) for row in streams), Counter())
        requests = sum(row["requests"] for row in streams)
        reasons = "".join(f"; {count:,} x {why}" for why, count in errors.items())
        said.append(
            f"{row['streams']} streams for {seconds:.0f} s: {errors.total():,} of {requests:,} requests failed "
            f"(bar: none){reasons}"
        )
        if row["ratio"] is not None:
            said.append(f"{row['ratio']:.3f} of the engine's own tokens a second (bar: at least {RATIO})")
    if "idle" in rows and rows["idle"]["added_ms"]:
        added = rows["idle"]["added_ms"]
        own = rows["idle"].get("own_ms")  # missing in the oldest results
        tail = "" if own is None else f", its p95 {own['p95']:.2f} and its p99 {own['p99']:.2f} ms"
        said.append(
            f"added to the first token when idle: {added['p50']:.2f} ms, p99 {added['p99']:.2f} ms (bar: p99 under "
            f"{ADDED_MS:.0f} ms); the engine's own median is {rows['idle']['own_first_ms']:.2f} ms{tail}"
        )
    return said


def plot(document: dict[str, Any], path: Path) -> None:
    """Plots latencies against the offered load as a share of capacity, a column for each mix. Raises ValueError if there is
    nothing to plot or matplotlib is not installed."""
    rows = [row for row in document["rows"] if row["part"] == "open" and row["first_ms"] and row["token_ms"]]
    if not rows:
        raise ValueError("the results hold no open loop to plot")
    write_plots(path, SERVE, lambda theme: _draw(document, rows, theme))


def _draw(document: dict[str, Any], rows: list[dict[str, Any]], theme: Theme) -> Any:
    mixes = list(dict.fromkeys(row["mix"] for row in rows))
    figure = new_figure(max(5.2, 3.8 * len(mixes)), 5.6, theme)
    grid = figure.subplots(2, len(mixes), squeeze=False, sharex="col", sharey="row")
    for number, mix in enumerate(mixes):
        here = sorted((row for row in rows if row["mix"] == mix), key=lambda row: row["load"])
        capacity = 100 * here[0]["requests_per_s"] / here[0]["load"]
        _waiting(grid[0][number], here, "first_ms", f"{mix} tokens: ms to the first token", number == 0, theme)
        _waiting(grid[1][number], here, "token_ms", f"{mix} tokens: ms a token after it", number == 0, theme)
        grid[1][number].set_xlabel(f"% of the {capacity:.3g} requests a second that it can answer")
    title = f"Waiting for {of(document)}: {document['machine']['device']}, {document['date']}"
    figure.suptitle(title, color=theme.text, fontsize=10, x=0.01, ha="left")
    return figure


def _waiting(axis: Any, rows: list[dict[str, Any]], key: str, title: str, named: bool, theme: Theme) -> None:
    """Plots the three percentiles, each labelled at the highest load."""
    plain(axis, theme, title)
    loads = [row["load"] for row in rows]
    for p, color, above in zip(PERCENTILES, (theme.own, theme.second, theme.rival), (-6, 0, 6), strict=True):
        values = [row[key][p] for row in rows]
        axis.plot(loads, values, color=color, linewidth=1.8, marker="o", markersize=3.5, label=p)
        text = {"fontsize": 7.5, "textcoords": "offset points", "va": "center", "color": color}
        axis.annotate(_short(values[-1]), (loads[-1], values[-1]), xytext=(6, above), **text)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_yticks([y for e in range(-4, 7) for y in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if low <= y <= high])
    axis.set_xticks(loads, [f"{load}" for load in loads])
    axis.set_xlim(min(loads) - 5, max(loads) + 9)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    if named:
        axis.legend(fontsize=7, frameon=False, labelcolor=theme.text, loc="upper left")
