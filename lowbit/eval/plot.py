"""The plot of an evaluation: every metric against bits per weight and against the bytes of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowbit.eval.results import SUITE, write_plots
from lowbit.picture import Theme, label_points, new_figure, plain

_LEFT_OUT = ("KL median", "KL 99 %")  # only the table has these; the plot shows the mean


def plot(document: dict[str, Any], path: Path) -> None:
    """Writes a plot with a row of two panels per task and metric, in a light and a dark theme. The suffix of `path` determines
    the file format.

    Points are models, bars are one standard error, and the grey line is the reference. Models of unknown size are omitted.
    Raises ValueError if there is nothing to plot or matplotlib is not installed.
    """
    models = [m for m in document["models"] if m["size"] and m["size"]["bits_per_weight"] is not None]
    shown = [(f["task"], f["metric"], f["better"]) for m in models for f in m["figures"] if f["metric"] not in _LEFT_OUT]
    panels = sorted(dict.fromkeys(shown), key=lambda panel: [task for task, _, _ in shown].index(panel[0]))
    if not panels:
        raise ValueError("nothing to plot: the results contain no model with known bits per weight")
    write_plots(path, SUITE, lambda theme: _draw(models, panels, theme))


def _draw(models: list[dict[str, Any]], panels: list[tuple[str, str, str]], theme: Theme) -> Any:
    figure = new_figure(10, 2.7 * len(panels), theme)
    axes = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
    points = {}
    for panel, pair in zip(panels, axes, strict=True):
        for axis, label in zip(pair, ("bits per weight of the linear layers", "checkpoint, millions of bytes"), strict=True):
            plain(axis, theme, f"{panel[0]}: {panel[1]} ({panel[2]} is better)")
            axis.set_xlabel(label)
        for axis, size in zip(pair, ("bits_per_weight", "bytes"), strict=True):
            points[axis] = _panel(axis, models, panel, size, theme)
    figure.canvas.draw()  # computes the positions of the axes for the labels
    for axis, own in points.items():
        label_points(axis, own, theme)
    return figure


def _panel(
    axis: Any, models: list[dict[str, Any]], panel: tuple[str, str, str], size: str, theme: Theme
) -> list[tuple[float, float, str]]:
    """Draws one metric against one size; returns the points with their labels."""
    points = []
    for model in models:
        figure = next((f for f in model["figures"] if (f["task"], f["metric"]) == panel[:2]), None)
        if figure is None:
            continue
        value, deviation = float(figure["value"]), figure["standard_error"]
        x = model["size"][size] / (1e6 if size == "bytes" else 1)
        color, mark = (theme.rival, "s") if model["reference"] else (theme.own, "o")
        error = None if deviation is None else float(deviation)
        axis.errorbar(x, value, yerr=error, color=color, marker=mark, markersize=4, capsize=3)
        if model["reference"]:
            axis.axhline(value, color=theme.rival, linewidth=0.8, zorder=0)
        points.append((x, value, model["label"]))
    if panel[2] == "higher":  # such metrics are shares; the axis begins at 0, and ends at 1 if all values are 0
        axis.set_ylim(0, None if any(value for _, value, _ in points) else 1)
    axis.margins(x=0.35, y=0.2)
    return points
