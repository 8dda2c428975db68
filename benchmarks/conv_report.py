"""Tables and plot of a result file of `python -m benchmarks conv`. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from lowbit.eval.results import read_json, write_plots
from lowbit.picture import Theme, new_figure, plain

SCHEMA = 1
CONV = "lowbit bench conv"
STORAGES = {"int4": "u4", "int8": "s8"}


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file of `python -m benchmarks conv`. Raises ValueError that says what is wrong with
    it."""
    document = read_json(path, CONV, SCHEMA)
    for key in ("machine", "rows", "layers", "date"):
        if key not in document:
            raise ValueError(f"{path}: holds no {key!r}")
    return document


def network_table(document: dict[str, Any]) -> Table:
    """Returns a table with one line per network: milliseconds, images per second, share of its limit, wrong codes."""
    names = ("model", "impl", "storage", "fusion", "batch", "ms", "images/s", "of its limit", "wrong codes")
    table = Table(*names, title="224 x 224")
    for row in document["rows"]:
        ms, limit = row["ms"], row["limit_ms"]
        share = f"{100 * limit / ms:.0f} %" if ms and limit else "-"
        rate = f"{row['images_s']:,.0f}" if row["images_s"] else row["error"] or "-"
        table.add_row(
            row["model"], row["impl"], row["storage"], row["fusion"], str(row["batch"]), f"{ms:.3f}" if ms else "-", rate,
            share, str(row.get("wrong_codes", "-")),
        )  # fmt: skip
    return table


def layer_table(document: dict[str, Any], storage: str) -> Table:
    """Returns a table with one line per kernel: microseconds, share of its roofline, and what limits it."""
    rows = [row for row in document["layers"] if row["storage"] == storage]
    batch = rows[0]["batch"] if rows else "-"
    model = rows[0].get("model", "resnet50") if rows else "-"
    table = Table(
        "layer", "us", "TOPS", "of its limit", "limited by", title=f"{model} {storage}, batch {batch}, each kernel alone"
    )
    for row in rows:
        limit = row["limit_us"]
        share = f"{100 * limit / row['us']:.0f} %" if limit else "-"
        table.add_row(
            row["layer"], f"{row['us']:.1f}", f"{row['operations'] / row['us'] / 1e6:.0f}", share, row["bound"] or "-"
        )  # fmt: skip
    return table


def plot(document: dict[str, Any], path: Path) -> None:
    """Plots the time of ResNet-50 by kind of layer, with the roofline time of the data sheet on each bar. One panel per
    storage, for light and dark pages.

    Raises ValueError if there is nothing to plot or matplotlib is not installed.
    """
    if not any(row["limit_us"] for row in _resnet_layers(document)):
        raise ValueError("the results hold no layer of ResNet-50 to plot")
    write_plots(path, CONV, lambda theme: _bars(document, theme))


def _resnet_layers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of layers of ResNet-50; files until 2026-11-28 have no others and name no model."""
    return [row for row in document["layers"] if row.get("model", "resnet50") == "resnet50"]


def _bars(document: dict[str, Any], theme: Theme) -> Any:
    layers = _resnet_layers(document)
    storages = list(dict.fromkeys(row["storage"] for row in layers))
    kinds = {storage: _kinds([row for row in layers if row["storage"] == storage]) for storage in storages}
    most = max(len(found) for found in kinds.values())
    figure = new_figure(5 * len(storages), 0.24 * most + 1.1, theme)
    axes = figure.subplots(1, len(storages), squeeze=False, sharex=True)[0]
    for axis, storage in zip(axes, storages, strict=True):
        names, us, limits = zip(*((name, *times) for name, times in kinds[storage].items()), strict=True)
        plain(axis, theme, f"{'INT4' if storage == 'u4' else 'INT8'} activations: {sum(us):,.0f} us")
        axis.grid(visible=False)
        places = range(len(names))
        axis.barh(places, us, height=0.62, color=theme.own)
        axis.barh(places, limits, height=0.62, color=theme.second)
        for place, took, limit in zip(places, us, limits, strict=True):
            share = f"  {100 * limit / took:.0f} %" if limit else ""
            axis.annotate(f" {took:.0f} us{share}", (took, place), fontsize=7, color=theme.text, va="center")
        axis.set_yticks(places, names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.xaxis.set_visible(False)
        axis.spines["bottom"].set_visible(False)
        axis.margins(x=0.18)
    where = f"ResNet-50, batch {layers[0]['batch']}, {document['machine']['gpu']}, {document['date']}"
    what = "microseconds of each kind of kernel; orange: what its bytes and operations need at least"
    figure.suptitle(f"{where}: {what}", color=theme.text, fontsize=9.5, x=0.01, ha="left")
    return figure


def _kinds(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Returns microseconds and roofline microseconds by kind of layer, in the order of the network."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        stage, _, rest = row["layer"].partition(".")
        block, _, conv = rest.partition(".")
        alike = f"{stage} {conv}" if block.isdecimal() and block != "0" and " to " not in row["layer"] else row["layer"]
        kinds.setdefault(alike.replace("layer", "stage ").replace(".conv", " conv"), []).append(row)
    return {
        name + (f", {len(own)} times" if len(own) > 1 else ""): (
            sum(row["us"] for row in own), sum(row["limit_us"] or 0.0 for row in own),
        )
        for name, own in kinds.items()
    }  # fmt: skip
