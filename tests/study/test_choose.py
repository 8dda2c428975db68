"""The table of docs/choose.md has the study's figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from study.page import mean_kl
from study.results import load

ROOT = Path(__file__).parent.parent.parent
MODELS = ("smollm2-135m-instruct", "Qwen2.5-Coder-0.5B-Instruct")


@pytest.mark.parametrize("column", [0, 1])
def test_figures_are_the_studys(column):
    document = load(ROOT / "bench" / "results" / "study" / f"{MODELS[column]}.json")
    lines = [line for line in (ROOT / "docs" / "choose.md").read_text().splitlines() if line.startswith("| ") and "`" in line]
    measured = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    assert len(measured) == 10
    checked = 0
    for bits, schemes, method, *kl in measured:
        if not kl[column]:
            continue
        names = [name.strip("` ") for name in schemes.split(",")]
        scheme = names[min(column, len(names) - 1)]
        row = next(r for r in document["rows"] if (r["scheme"], r["method"], r["calibration"]) == (scheme, method, None))
        assert f"{mean_kl(document, row)[0]:.3f}" == kl[column], scheme
        each = [float(b) for b in bits.split(",")]
        assert abs(row["bits_per_weight"] - each[min(column, len(each) - 1)]) <= 0.006, scheme
        checked += 1
    assert checked == (9, 6)[column]
