from __future__ import annotations

import importlib.util

import pytest

from benchmarks.plot import plot

has_matplotlib = importlib.util.find_spec("matplotlib") is not None


@pytest.mark.skipif(not has_matplotlib, reason="needs matplotlib, the extra lowbit[plot]")
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_file_is_drawn(document, tmp_path, suffix):
    target = tmp_path / "new" / f"plot{suffix}"
    written = plot(document, target)
    assert written and all(file.stat().st_size > 5000 and file.with_stem(f"{file.stem}-dark").exists() for file in written)


@pytest.mark.skipif(not has_matplotlib, reason="needs matplotlib, the extra lowbit[plot]")
def test_nothing_to_draw(document, tmp_path):
    document["rows"] = [row for row in document["rows"] if row["us"] is None]
    with pytest.raises(ValueError, match="no measured row"):
        plot(document, tmp_path / "plot.png")
