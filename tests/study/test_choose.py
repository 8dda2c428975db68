"""`lowbit recommend` and docs/choose.md agree with the result files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from study.curves import TABLE, curves
from study.page import frontier, merged, write_pages
from study.plot import plot_choice
from study.results import STUDY, load
from study.sizes import RESULTS, by_size
from tests.study.test_page import document, row

ROOT = Path(__file__).parent.parent.parent
SHORT = by_size(ROOT / RESULTS)
DOCUMENTS = [load(path) for path in sorted((ROOT / "benchmarks" / "results" / "study").glob("*.json"))]


def test_the_table_is_the_studys():
    assert json.loads((ROOT / TABLE).read_text()) == json.loads(json.dumps(curves(DOCUMENTS, SHORT)))


def test_the_page_is_the_studys(tmp_path):
    page = ROOT / "docs" / "choose.md"
    shutil.copy(page, tmp_path / "choose.md")
    assert write_pages(DOCUMENTS, [tmp_path / "choose.md"]) == [f"{tmp_path / 'choose.md'}: choice"]
    assert (tmp_path / "choose.md").read_text() == page.read_text()


def both(kl):
    return {"topics": (0.0, kl), "opticks": (0.0, kl)}


def test_the_table_has_a_row_for_each_case_calibrated_by_default():
    rows = [
        row("w4a16_g64", "rtn", both(0.5), bits=4.25), row("w4a16_g64", "gptq", both(0.2), "topics", bits=4.25),
        row("w4a16_g64", "gptq", both(0.1), "opticks", bits=4.25), row("w8a16", "rtn", both(0.01), bits=8.0),
    ]  # fmt: skip
    first = document(*rows[:2]) | {"weights": {"linear": 100, "other": 10}}
    for found in (first, document(*rows)):
        found["request"]["settings"] = {"windows": 2, "window": 8}
    without = document(rows[0])  # a model of unknown size
    without["request"]["model"] = "n"
    (model,) = curves([first, document(*rows) | {"request": first["request"]}, without])["models"]
    assert (model["model"], model["linear"], model["other"], model["group"], model["tokens"]) == ("m", 100, 10, 64, 16)
    found = [(r["scheme"], r["method"], r["kl"]) for r in model["rows"]]
    assert found == [("w4a16_g64", "rtn", 0.5), ("w4a16_g64", "gptq", 0.2), ("w8a16", "rtn", 0.01)]


def test_short_files_add_cases_and_no_models():
    whole, short, other = (document(row("w8a16", "rtn", both(kl), bits=8.0)) for kl in (0.1, 0.2, 0.3))
    short["rows"] += [row("w8a8", "rtn", both(0.4), bits=8.0), row("w4a16_pc", "rtn", both(0.9), bits=4.0)]
    for made, name in ((whole, "m"), (short, "m"), (other, "n")):
        made["request"] |= {"model": name, "settings": {"windows": 2, "window": 8}}
        made["weights"] = {"linear": 100, "other": 10}
    (model,) = curves([whole], [short, other])["models"]
    assert [(r["scheme"], r["kl"]) for r in model["rows"]] == [("w8a16", 0.1), ("w8a8", 0.2)], "on the scale of w8a16"


def test_documents_of_one_model_and_other_texts_stay_apart():
    one, other = document(row("w8a16", "rtn", both(0.1))), document(row("w4a16_pc", "rtn", both(0.2)))
    assert [len(d["rows"]) for d in merged([one, other])] == [3]
    other["request"] = {**other["request"], "tasks": [{**t, "sha256": "1" * 64} for t in other["request"]["tasks"]]}
    assert [len(d["rows"]) for d in merged([one, other])] == [2, 2]


def test_the_frontier_is_what_nothing_beats():
    rows = [("a", 4.0, 0.5), ("b", 5.0, 0.6), ("c", 6.0, 0.1), ("d", 6.0, 0.2), ("e", 8.0, 0.05)]
    found = frontier(document(*(row(name, "rtn", both(kl), bits=bits) for name, bits, kl in rows)))
    assert [r["scheme"] for r, _ in found] == ["a", "c", "e"]


def test_the_plot_draws_light_and_dark(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    plot_choice(json.loads((ROOT / TABLE).read_text()), tmp_path / "choice.png")
    files = [tmp_path / "choice.png", tmp_path / "choice-dark.png"]
    assert all(file.stat().st_size > 10_000 and STUDY.encode() in file.read_bytes() for file in files)
