from __future__ import annotations

import itertools
import sys

import pytest

from lowbit.eval.results import write_plots
from lowbit.picture import DARK, LIGHT, label_points, new_figure, plain


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[plot\]'"):
        new_figure(1, 1, LIGHT)


def contrast(one: str, other: str) -> float:
    """The contrast of two colors by WCAG 2, 1 to 21. Text needs 4.5, lines and marks 3."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_everything_can_be_seen(theme):
    for color, least in ((theme.text, 7), (theme.own, 4.5), (theme.second, 4.5), (theme.rival, 3)):
        assert contrast(color, theme.paper) >= least


def test_labels_do_not_cover_each_other(tmp_path):
    pytest.importorskip("matplotlib")
    figure = new_figure(4, 3, LIGHT)
    axis = figure.subplots()
    plain(axis, LIGHT)
    points = [(1.0, 1.0 + i / 1000, f"name {i}") for i in range(6)]
    axis.set_xlim(0, 2), axis.set_ylim(0, 2)
    figure.canvas.draw()
    label_points(axis, points, LIGHT)
    figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in axis.texts), key=lambda box: box.y0)
    assert len(boxes) == 6 and all(low.y1 <= high.y0 + 1.5 for low, high in itertools.pairwise(boxes))
    write_plots(tmp_path / "a.png", "lowbit test", lambda theme: figure)
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a-dark.png"}
