"""The plot of an evaluation: every metric against bits per weight and, beside it, against the bytes of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowbit.eval.results import SUITE, write_plot

_LEFT_OUT = ("KL median", "KL 99 %")  # in the table; the plot shows the mean


def plot(document: dict[str, Any], path: Path) -> None:
    """Draws a row of two panels for each task and metric; the suffix of the path says the format, .png or .svg for example.

    Points are models, bars one standard error, the line across the reference's figure. Models whose size is not known are
    left out. Raises ValueError when there is nothing to draw and when matplotlib is not installed.
    """
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'lowbit[plot]'") from error
    models = [m for m in document["models"] if m["size"] and m["size"]["bits_per_weight"] is not None]
    shown = [(f["task"], f["metric"], f["better"]) for m in models for f in m["figures"] if f["metric"] not in _LEFT_OUT]
    panels = sorted(dict.fromkeys(shown), key=lambda panel: [task for task, _, _ in shown].index(panel[0]))
    if not panels:
        raise ValueError("the results hold no figure of a model whose bits per weight are known; nothing to plot")
    colors = matplotlib.colormaps["tab10"]
    drawing = Figure(figsize=(11, 3.2 * len(panels)), layout="constrained")
    axes = drawing.subplots(len(panels), 2, squeeze=False, sharey="row")
    for (task, metric, better), pair in zip(panels, axes, strict=True):
        for axis, label in zip(pair, ("bits per weight of the linear layers", "checkpoint, millions of bytes"), strict=True):
            axis.set_title(f"{task}: {metric} ({better} is better)", fontsize=9)
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
        for number, model in enumerate(models):
            figure = next((f for f in model["figures"] if (f["task"], f["metric"]) == (task, metric)), None)
            if figure is None:
                continue
            value, deviation = float(figure["value"]), figure["standard_error"]
            for axis, x in zip(pair, (model["size"]["bits_per_weight"], model["size"]["bytes"] / 1e6), strict=True):
                style = {"color": colors(number % 10), "marker": "s" if model["reference"] else "o", "capsize": 3}
                axis.errorbar(x, value, yerr=None if deviation is None else float(deviation), label=model["label"], **style)
                if model["reference"]:
                    axis.axhline(value, color="grey", linewidth=0.8, zorder=0)
        if better == "higher":  # shares: from 0, and up to 1 where nothing was right
            pair[0].set_ylim(0, None if any(f["value"] for m in models for f in m["figures"] if f["metric"] == metric) else 1)
        pair[1].legend(fontsize=7)
    write_plot(path, SUITE, drawing)
