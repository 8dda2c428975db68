"""How the library's pictures look: a palette for light pages, one for dark ones, plain axes, labels that do not overlap.

A picture is drawn once for each theme (`eval.results.write_plots` writes both). Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.extras import install


@dataclass(frozen=True)
class Theme:
    """Colors of one background: of text, of lines that only orient, of what is compared with, and of what is shown."""

    name: str
    paper: str
    text: str
    grid: str
    rival: str
    own: str
    second: str


LIGHT = Theme("light", "#ffffff", "#1f2328", "#e4e8ec", "#8c959f", "#0969da", "#bc4c00")
DARK = Theme("dark", "#0d1117", "#e6edf3", "#21262d", "#7d8590", "#58a6ff", "#f0883e")


def new_figure(width: float, height: float, theme: Theme) -> Any:
    """An empty figure of this size in inches. Raises ValueError when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ValueError(f"plots need matplotlib: {install('plot')}") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor=theme.paper, dpi=150)


def plain(axis: Any, theme: Theme, title: str = "") -> None:
    """Takes from a panel what says nothing: box, ticks, dark grid."""
    axis.set_facecolor(theme.paper)
    axis.set_title(title, fontsize=9, color=theme.text, loc="left")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(theme.rival)
    axis.tick_params(colors=theme.text, labelsize=8, length=0, which="both")
    axis.grid(axis="y", color=theme.grid, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.xaxis.label.set_color(theme.text)
    axis.yaxis.label.set_color(theme.text)
    axis.xaxis.label.set_fontsize(8)
    axis.yaxis.label.set_fontsize(8)


def label_points(axis: Any, points: Sequence[tuple[float, float, str]], theme: Theme, size: float = 7) -> None:
    """Writes each text left of its point (data units) and a little below; where texts would meet, below each other.

    To be called once the limits of the axes are set and the figure was drawn.
    """
    dpi = axis.figure.dpi / 72
    line, width = 1.25 * size * dpi, 0.62 * size * dpi
    taken: list[tuple[float, float, float]] = []
    for x, y, text in sorted(points, key=lambda point: -point[1]):
        right, height = axis.transData.transform((x, y))
        left, place = right - width * len(text), height - line / 2
        while any(abs(place - other) < line and left < end and right > begin for begin, end, other in taken):
            place -= line / 4
        taken.append((left, right, place))
        axis.annotate(
            text, (x, y), xytext=(-0.8 * size, (place - height) / dpi), textcoords="offset points", fontsize=size,
            color=theme.text, va="center", ha="right",
        )  # fmt: skip
