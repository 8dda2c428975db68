"""The study's picture: how far each case is from 16 bits against its bits per weight, and what calibration elsewhere costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowbit.eval.results import write_plots
from lowbit.picture import Theme, label_points, new_figure, plain
from study.page import DEFAULTS, FIRST, change, grid_scheme, mean_kl, row_of, texts_of
from study.results import STUDY


def plot(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws a row of two panels per file with several texts, for light and for dark pages; the suffix says the format.

    Left: mean KL over the texts (logarithmic) against bits per weight; the best case for its bits has a name and is joined to
    the next one. Right: the change of perplexity on each text with fine int4, rounded to nearest and by GPTQ on each
    calibration text. Raises ValueError when there is nothing to draw and when matplotlib is not installed.
    """
    drawn = [document for document in documents if len(texts_of(document)) > 1 and _points(document)]
    if not drawn:
        raise ValueError("the results hold no quantized model to plot")
    write_plots(path, STUDY, lambda theme: _draw(drawn, theme))


def _draw(documents: Sequence[dict[str, Any]], theme: Theme) -> Any:
    figure = new_figure(11, 4.2 * len(documents), theme)
    axes = figure.subplots(len(documents), 2, squeeze=False, width_ratios=(3, 2))
    for document, (left, right) in zip(documents, axes, strict=True):
        _quality(left, document, theme)
        _calibration(right, document, theme)
    figure.canvas.draw()  # places the axes, which labels have to know
    for document, (left, _) in zip(documents, axes, strict=True):
        label_points(left, [(bits, kl, name) for bits, kl, name in _best(document)], theme)
    return figure


def _points(document: dict[str, Any]) -> list[tuple[dict[str, Any], float, float | None]]:
    """Rows with their mean KL and its standard error."""
    found = []
    for row in document["rows"]:
        kl = mean_kl(document, row) if row["method"] else None
        if kl is not None and row["calibration"] in (None, FIRST) and row["method"] not in DEFAULTS[1:]:
            found.append((row, *kl))
    return found


def _best(document: dict[str, Any]) -> list[tuple[float, float, str]]:
    """Bits per weight, mean KL and name of the cases to which none with as few bits comes as close."""
    best: list[tuple[float, float, str]] = []
    for row, kl, _ in sorted(_points(document), key=lambda point: (point[0]["bits_per_weight"], point[1])):
        if not best or kl < best[-1][1]:
            name = row["scheme"].replace("a16", "").removesuffix("_pc")
            best.append((row["bits_per_weight"], kl, f"{name} {row['method'].split(' ')[0]}"))
    return best


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
