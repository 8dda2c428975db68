"""`python -m study sizes`: the same cases on several models, predictions from two of them, and the kept results."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from study import sizes
from study.results import figure_of
from study.sizes import CASES, MARK, by_size, predicted, table
from tests.study.test_page import document, row
from tests.tiny import save_tiny

ROOT = Path(__file__).parent.parent.parent


def of_size(linear: int, *rows):
    base = {"key": "16 bits", "scheme": None, "method": None, "calibration": None, "bits_per_weight": 16.0, "seconds": 0.0}
    figures = {text: {"perplexity": [20.0, 0.5, 30]} for text in sizes.TEXTS}
    made = document() | {"rows": [{**base, "figures": figures}, *rows], "weights": {"linear": linear, "other": 1}}
    made["request"] = {**made["request"], "model": f"model of {linear}"}
    made["request"]["settings"] = {"windows": 2, "window": 16, "dtype": "float32"}
    return made


def both(kl):
    return dict.fromkeys(sizes.TEXTS, (0.01, kl))


def test_a_power_of_the_number_of_weights_predicts_itself():
    assert predicted(0.3 * 10**-0.5, 0.3 * 40**-0.5, [10, 40, 90]) == pytest.approx(0.3 * 90**-0.5)


def test_the_largest_model_is_compared_with_the_others():
    documents = [of_size(n, row("w8a16", "rtn", both(kl), bits=8.0)) for n, kl in ((10, 0.08), (20, 0.04), (40, 0.03))]
    text = table(documents)
    (line,) = [line for line in text.splitlines() if line.startswith("| `w8a16`")]
    assert line.endswith("| 0.75 | 0.02 | 1.50 |") and "+1.01 %" in line
    assert text.splitlines()[-1] == "| geometric mean |  |  |  | 0.75 |  | 1.50 |"
    assert "power law" not in table(documents[:2]) and "| `w8a16` rtn |" in table(documents[:2])


def test_the_command_measures_models_and_writes_the_page(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("topics", "opticks", "handbook", "unused"):
        (data / f"{name}.txt").write_text("\n\n".join(f"the {i}th quick {name} is bent" for i in range(900)))
    for name in ("one", "two"):
        save_tiny(tmp_path / name)
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {MARK} -->\n<!-- /{MARK} -->\n")
    where = ["--data", str(data), "--results", str(tmp_path / "r"), "--page", str(page)]
    short = ["--windows", "1", "--only", "w8a16*"]
    result = CliRunner().invoke(sizes.app, [str(tmp_path / "one"), str(tmp_path / "two"), *where, *short])
    assert result.exit_code == 0, result.output
    documents = by_size(tmp_path / "r")
    assert [[row["key"] for row in d["rows"]] for d in documents] == [["16 bits", "w8a16 rtn"]] * 2
    measured = documents[0]["rows"][1]
    assert set(measured["figures"]) == {"opticks", "handbook"} and figure_of(measured, "opticks", "KL mean") is not None
    assert [task["task"] for task in documents[0]["request"]["tasks"]] == ["handbook", "opticks"]
    assert "| `w8a16` rtn |" in page.read_text()
    assert CliRunner().invoke(sizes.app, where).exit_code == 0
    empty = CliRunner().invoke(sizes.app, ["--results", str(tmp_path / "none"), "--page", str(page)])
    assert empty.exit_code == 1 and "holds no result file" in empty.output


def test_kept_results_are_in_the_page():
    documents = by_size(ROOT / sizes.RESULTS)
    page = (ROOT / sizes.PAGE).read_text()
    assert len(documents) == 3
    assert f"<!-- {MARK} -->\n{table(documents)}\n<!-- /{MARK} -->" in page
    keys = {case.key for case in CASES} | {"16 bits"}
    assert all({row["key"] for row in document["rows"]} <= keys for document in documents)
    weights = [document["weights"]["linear"] for document in documents]
    assert weights == sorted(weights) and weights[0] > 10**8 and weights[2] > 10**9
