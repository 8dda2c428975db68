"""The style of the library's plots: a light and a dark palette, plain axes, labels that do not overlap.

`eval.results.write_plots` writes each plot in both themes. Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.extras import install


@dataclass(frozen=True)
class Theme:
    """Colors for one background: text, grid lines, the rival's series (`rival`) and lowbit's (`own`, `second`)."""

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
    """Returns an empty figure of this size in inches. Raises ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ValueError(f"plots need matplotlib: {install('plot')}") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor=theme.paper, dpi=150)


def plain(axis: Any, theme: Theme, title: str = "") -> None:
    """Removes box, ticks and dark grid lines from a panel."""
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
    """Writes each text to the left of its point (x and y in data units); texts that would overlap move down.

    Call it after the axes' limits are set and the figure was drawn once.
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
