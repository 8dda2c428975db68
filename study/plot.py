"""Plots of the study: divergence from 16 bits against bits per weight, and the effect of the calibration text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowbit.eval.results import write_plots
from lowbit.picture import Theme, label_points, new_figure, plain
from study.page import DEFAULTS, FIRST, change, frontier, grid_scheme, mean_kl, merged, row_of, texts_of
from study.results import STUDY


def plot(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws a row of two panels per file with several texts, for light and for dark pages. The suffix of `path` is the format.

    Left: mean KL over the texts (logarithmic) against bits per weight; Pareto-optimal cases are labelled and connected by a
    line. Right: the change of perplexity on each text with fine int4, rounded to nearest and by GPTQ on each calibration text.
    Raises ValueError if there is nothing to draw or matplotlib is not installed.
    """
    drawn = [document for document in merged(documents) if len(texts_of(document)) > 1 and _points(document)]
    if not drawn:
        raise ValueError("the results hold no quantized model to plot")
    write_plots(path, STUDY, lambda theme: _draw(drawn, theme))


def _draw(documents: Sequence[dict[str, Any]], theme: Theme) -> Any:
    figure = new_figure(11, 4.2 * len(documents), theme)
    axes = figure.subplots(len(documents), 2, squeeze=False, width_ratios=(3, 2))
    for document, (left, right) in zip(documents, axes, strict=True):
        _quality(left, document, theme)
        _calibration(right, document, theme)
    figure.canvas.draw()  # lays out the axes, which label positions need
    for document, (left, _) in zip(documents, axes, strict=True):
        label_points(left, [(bits, kl, name) for bits, kl, name in _best(document)], theme)
    return figure


def _points(document: dict[str, Any]) -> list[tuple[dict[str, Any], float, float | None]]:
    """Returns rows with their mean KL and its standard error."""
    found = []
    for row in document["rows"]:
        kl = mean_kl(document, row) if row["method"] else None
        if kl is not None and row["calibration"] in (None, FIRST) and row["method"] not in DEFAULTS[1:]:
            found.append((row, *kl))
    return found


def _best(document: dict[str, Any]) -> list[tuple[float, float, str]]:
    """Returns bits per weight, mean KL and name of the Pareto-optimal cases."""
    return [(row["bits_per_weight"], kl, case_name(row)) for row, (kl, _) in frontier(document)]


def _quality(axis: Any, document: dict[str, Any], theme: Theme) -> None:
    plain(axis, theme, f"{document['request']['model']}: distance from 16 bits, mean over {len(texts_of(document))} texts")
    axis.set_xlabel("bits per weight, scales and zeros included")
    axis.set_ylabel("KL, nats per token")
    axis.set_yscale("log")
    points = _points(document)
    for row, kl, error in points:
        axis.errorbar(
            row["bits_per_weight"], kl, yerr=error, marker="o" if row["method"].startswith("rtn") else "s", markersize=4,
            color=theme.rival, linestyle="none", linewidth=0.8,
        )  # fmt: skip
    best = _best(document)
    axis.plot(
        [x for x, _, _ in best], [y for _, y, _ in best], color=theme.own, linewidth=1.6, marker="o", markersize=5, zorder=3
    )
    lowest, highest = min(kl for _, kl, _ in points), max(kl for _, kl, _ in points)
    axis.set_ylim(lowest / 2, highest * 2)
    axis.set_xlim(left=axis.get_xlim()[0] - 0.9)  # room for the first names


def _calibration(axis: Any, document: dict[str, Any], theme: Theme) -> None:
    texts, scheme = texts_of(document), grid_scheme(document, "int4", True)
    cases = [("no data (rtn)", row_of(document, scheme, "rtn"))]
    cases += [(f"gptq on {text}", row_of(document, scheme, "gptq", text)) for text in texts]
    shown = [(name, row) for name, row in cases if row is not None]
    plain(axis, theme, f"{scheme}: perplexity above 16 bits, %")
    axis.grid(visible=False)
    values = [[(change(row, text) or (0.0, None))[0] for text in texts] for _, row in shown]
    if values:
        axis.imshow(values, cmap="Oranges" if theme.name == "light" else "copper", aspect="auto", alpha=0.85)
        least = [min(column) for column in zip(*values, strict=True)]
        for line, of_case in enumerate(values):
            for column, value in enumerate(of_case):
                weight = "bold" if value == least[column] else "normal"
                axis.text(column, line, f"{value:.1f}", ha="center", va="center", fontsize=9, weight=weight, color=theme.text)
    axis.set_xticks(range(len(texts)), texts)
    axis.set_yticks(range(len(shown)), [name for name, _ in shown])
    axis.set_xlabel("measured on")
    axis.spines["bottom"].set_visible(False)


def case_name(row: dict[str, Any]) -> str:
    """Returns a short name of a case: w4_g64 gptq."""
    return f"{row['scheme'].replace('a16', '').removesuffix('_pc')} {row['method'].split(' ')[0]}"


MARKERS = {"rtn": "o", "hqq": "D", "gptq": "s", "awq": "^", "learned": "*"}


def plot_choice(table: dict[str, Any], path: Path) -> None:
    """Draws divergence against bytes, a panel for each model of the table (`study.curves`), for light and for dark pages. The
    marker shows a case's method; cases on the frontier are connected and labelled. Raises ValueError if matplotlib is missing.
    """
    write_plots(path, STUDY, lambda theme: _draw_choice(table["models"], theme))


def _draw_choice(models: Sequence[dict[str, Any]], theme: Theme) -> Any:
    figure = new_figure(11, 4.6, theme)
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    fronts = [_choice(axis, model, theme) for axis, model in zip(axes, models, strict=True)]
    figure.canvas.draw()  # lays out the axes, which label positions need
    for axis, front in zip(axes, fronts, strict=True):
        label_points(axis, front, theme)
    return figure


def _choice(axis: Any, model: dict[str, Any], theme: Theme) -> list[tuple[float, float, str]]:
    """Plots one model. Returns megabytes, divergence and names of the cases on the frontier."""
    whole = f"{2e-6 * (model['linear'] + model['other']):,.0f} MB in 16 bits"
    plain(axis, theme, f"{model['model']} ({whole}), mean over {len(model['texts'])} texts")
    axis.set_xlabel("MB of all weights, embedding and LM head in 16 bits")
    axis.set_ylabel("KL, nats per token")
    axis.set_yscale("log")
    front: list[tuple[float, float, str]] = []
    colors = {"rtn": theme.rival, "hqq": theme.rival, "gptq": theme.second, "awq": theme.second, "learned": theme.own}
    points = [((r["bits"] * model["linear"] / 8 + 2 * model["other"]) / 1e6, r["kl"], r) for r in model["rows"]]
    for method, marker in MARKERS.items():
        own = [(x, kl, r["error"]) for x, kl, r in points if r["method"].split(" ")[0] == method]
        if own:
            axis.errorbar(
                [x for x, _, _ in own], [kl for _, kl, _ in own], yerr=[error or 0 for _, _, error in own], label=method,
                marker=marker, markersize=9 if marker == "*" else 5, color=colors[method], linestyle="none", linewidth=0.8,
            )  # fmt: skip
    for x, kl, row in sorted(points, key=lambda point: point[:2]):
        if not front or kl < front[-1][1]:
            front.append((x, kl, case_name(row)))
    axis.plot([x for x, _, _ in front], [kl for _, kl, _ in front], color=theme.own, linewidth=1.2, zorder=0)
    axis.set_xlim(left=axis.get_xlim()[0] - 0.35 * (axis.get_xlim()[1] - axis.get_xlim()[0]))  # room for the first names
    axis.legend(frameon=False, fontsize=8, labelcolor=theme.text)
    return front
