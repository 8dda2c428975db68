"""Lines and plot of a result file of `python -m benchmarks vllm`. Needs neither vLLM nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.eval.results import read_json, require_keys, write_plots
from lowbit.formats import parse_scheme
from lowbit.picture import Theme, new_figure, plain

SCHEMA = 2
BENCH = "lowbit bench vllm"
RIVAL_BITS = {"int4": 4, "fp8": 8, "bf16": 16}
Impl = tuple[str, str]
"""Implementation and scheme."""


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file. Raises ValueError that says what is wrong with it."""
    document = read_json(path, BENCH, SCHEMA)
    require_keys(path, document, ("machine", "request", "rows", "date"), ("impl", "scheme", "error"))
    return document


def line(row: Mapping[str, Any]) -> str:
    """Returns a row as text."""
    name = f"{row['impl']}:{row['scheme']}"
    if row["error"]:
        return f"{name}: {row['error']}"
    step = "no step of all" if row["step_ms"] is None else f"{row['step_ms']:.2f} ms a step"
    gpus = row["gpus"]
    each = f", {row['tokens_s'] / gpus:,.0f} for each of {gpus} GPUs" if gpus > 1 else ""
    return (
        f"{name} batch {row['batch']}: {row['tokens_s']:,.0f} tokens/s{each}, {step}, "
        f"first tokens after {row['first_s']:.2f} s, started in {row['load_s']:.0f} s, {', '.join(row['kernels'] or ())}"
    )


def plot(document: dict[str, Any], path: Path) -> None:
    """Plots bars, a column of panels per batch: tokens per second of all requests with their prompts, and of decode steps of
    each request. Raises ValueError if there is nothing to plot or matplotlib is not installed."""
    rows = [row for row in document["rows"] if row["error"] is None]
    if not rows:
        raise ValueError("the results hold no measured row to plot")
    write_plots(path, BENCH, lambda theme: _draw(document, rows, theme))


def _draw(document: dict[str, Any], rows: list[dict[str, Any]], theme: Theme) -> Any:
    impls = sorted({(row["impl"], row["scheme"]) for row in rows}, key=lambda impl: (_bits(impl), impl))
    of_bits = sorted({_bits(impl) for impl in impls})
    places = {impl: place + 0.4 * of_bits.index(_bits(impl)) for place, impl in enumerate(impls)}
    batches = sorted({row["batch"] for row in rows})
    figure = new_figure(max(9.0, 1.6 + 2.1 * len(batches)), 1.3 + 0.44 * len(impls), theme)
    grid = figure.subplots(2, len(batches), squeeze=False, sharey=True)
    for column, batch in enumerate(batches):
        here = {(row["impl"], row["scheme"]): row for row in rows if row["batch"] == batch}
        whole = {impl: row["tokens_s"] for impl, row in here.items()}
        steps = {impl: 1e3 / row["step_ms"] for impl, row in here.items() if row["step_ms"]}
        _bars(grid[0][column], places, whole, f"{batch} request{'s' if batch > 1 else ''}: tokens/s", theme)
        _bars(grid[1][column], places, steps, "each, decoding: tokens/s", theme)
    request = document["request"]
    where = document["machine"]["gpu"] or "a CPU"
    where = where if request["gpus"] == 1 else f"{request['gpus']} x {where}"
    model = f"{Path(request['model']).name}, {request['prompt']} tokens in, {request['output']} out"
    title = f"vLLM with lowbit's linear layers (blue) and its own (grey): {model}, {where}, {document['date']}"
    figure.suptitle(title, color=theme.text, fontsize=10, x=0.01, ha="left")
    return figure


def _bits(impl: Impl) -> int:
    """Returns the bits of a weight."""
    return RIVAL_BITS[impl[1]] if impl[0] == "vllm" else parse_scheme(impl[1]).weight.bits


def _bars(axis: Any, places: dict[Impl, float], values: dict[Impl, float], title: str, theme: Theme) -> None:
    """Plots a bar for each implementation with its value at the end."""
    plain(axis, theme, title)
    axis.grid(visible=False)
    for impl, place in places.items():
        if impl in values:
            own, value = impl[0] == "lowbit", values[impl]
            color = theme.own if own else theme.rival
            axis.barh(place, value, height=0.72, color=color)
            axis.annotate(
                f"{value:,.0f}", (value, place), xytext=(3, 0), textcoords="offset points", fontsize=7.5, va="center",
                color=color, weight="bold" if own else "normal",
            )  # fmt: skip
    axis.set_yticks(list(places.values()), [scheme if own == "lowbit" else f"vLLM's {scheme}" for own, scheme in places])
    axis.set_ylim(max(places.values()) + 0.5, -0.5)
    axis.set_xlim(0, 1.3 * max(values.values(), default=1.0))
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    axis.spines["left"].set(visible=True, color=theme.rival)
