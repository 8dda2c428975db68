"""The study's picture: how far each case is from 16 bits against its bits per weight, and what calibration elsewhere costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowbit.eval.results import write_plot
from lowbit.study.page import DEFAULTS, FIRST, change, grid_scheme, mean_kl, row_of, texts_of
from lowbit.study.results import STUDY

_MARKERS = {"rtn": "o", "gptq": "s", "awq": "^", "hqq": "D"}


def plot(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws a row of two panels per file with several texts; the suffix of the path says the format, .png or .svg for example.

    Left: mean KL over the texts (logarithmic) against bits per weight, a marker per method, the cases of methods with several
    calibrations on the default text only. Right: the change of perplexity on each text with fine int4, rounded to nearest and
    by GPTQ on each calibration text. Raises ValueError when there is nothing to draw and when matplotlib is not installed.
    """
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'lowbit[plot]'") from error
    drawn = [document for document in documents if len(texts_of(document)) > 1 and _points(document)]
    if not drawn:
        raise ValueError("the results hold no quantized model to plot")
    drawing = Figure(figsize=(14, 5.5 * len(drawn)), layout="constrained")
    axes = drawing.subplots(len(drawn), 2, squeeze=False)
    for document, (left, right) in zip(drawn, axes, strict=True):
        _quality(left, document, matplotlib.colormaps["tab10"])
        _calibration(right, document)
    write_plot(path, STUDY, drawing)


def _points(document: dict[str, Any]) -> list[tuple[dict[str, Any], float, float | None]]:
    """Rows with their mean KL and its standard error."""
    found = []
    for row in document["rows"]:
        kl = mean_kl(document, row) if row["method"] else None
        if kl is not None and row["calibration"] in (None, FIRST) and row["method"] not in DEFAULTS[1:]:
            found.append((row, *kl))
    return found


def _quality(axis: Any, document: dict[str, Any], colors: Any) -> None:
    axis.set_title(f"{document['request']['model']}: mean KL from 16 bits over {len(texts_of(document))} texts", fontsize=10)
    axis.set_xlabel("bits per weight, scales and zeros included")
    axis.set_ylabel("nats per token")
    axis.set_yscale("log")
    axis.grid(alpha=0.3, which="both")
    kinds = list(_MARKERS)
    seen: set[str] = set()
    for row, kl, error in _points(document):
        kind = row["method"].split(" ")[0]
        label = kind if kind not in seen else None
        seen.add(kind)
        axis.errorbar(
            row["bits_per_weight"], kl, yerr=error, marker=_MARKERS.get(kind, "x"), color=colors(kinds.index(kind) % 10),
            linestyle="none", label=label, alpha=0.8,
        )  # fmt: skip
        name = row["scheme"].replace("a16", "").removesuffix("_pc")
        axis.annotate(name, (row["bits_per_weight"], kl), xytext=(4, 3), textcoords="offset points", fontsize=6)
    axis.margins(x=0.1)
    axis.legend(fontsize=8)


def _calibration(axis: Any, document: dict[str, Any]) -> None:
    texts, scheme = texts_of(document), grid_scheme(document, "int4", True)
    cases = [("rtn", row_of(document, scheme, "rtn"))]
    cases += [(f"gptq on {text}", row_of(document, scheme, "gptq", text)) for text in texts]
    shown = [(name, row) for name, row in cases if row is not None]
    axis.set_title(f"{scheme}: perplexity above 16 bits, by text measured on", fontsize=10)
    axis.set_ylabel("percent")
    axis.grid(alpha=0.3, axis="y")
    width = 0.8 / max(len(shown), 1)
    for number, (name, row) in enumerate(shown):
        values = [change(row, text) or (0.0, None) for text in texts]
        places = [i - 0.4 + width * (number + 0.5) for i in range(len(texts))]
        errors = [error or 0.0 for _, error in values]
        axis.bar(places, [value for value, _ in values], width, yerr=errors, label=name, error_kw={"linewidth": 0.8})
    axis.set_xticks(range(len(texts)), texts)
    if shown:
        axis.legend(fontsize=8)
