"""The generated tables against values by hand, for a small document."""

from __future__ import annotations

import json
import math

import pytest

from study.page import calibration, change, defaults, grid, mean_kl, six, tasks, write_pages
from study.results import Results, load

NO_ERROR = None


def cells(nll, kl, error=0.01):
    return {"nll difference": [nll, error, 100], "KL mean": [kl, error, 100], "same top-1": [0.75, error, 100]}


def row(scheme, method, texts, text=None, seed=0, bits=4.5, **others):
    where = None if text is None else {"text": text, "seed": seed}
    figures = {name: cells(*values) for name, values in texts.items()} | others
    key = f"{scheme} {method} {text} {seed}"
    return {
        "key": key,
        "scheme": scheme,
        "method": method,
        "calibration": where,
        "bits_per_weight": bits,
        "seconds": 1.0,
        "figures": figures,
    }


def document(*rows):
    base = {
        "topics": {"perplexity": [10.0, 1.0, 100]},
        "opticks": {"perplexity": [20.0, 1.0, 100]},
        "q": {"accuracy": [0.5, 0.1, 25]},
    }
    listed = [{"task": t, "kind": "text", "sha256": "0" * 64} for t in ("opticks", "topics")]
    first = {"key": "16 bits", "scheme": None, "method": None, "calibration": None, "bits_per_weight": 16.0, "seconds": 0.0}
    return {
        "result": "lowbit study", "schema": 1, "complete": True, "date": "2026-01-01", "versions": {"torch": "2"},
        "machine": {"gpus": [], "processor": "x", "threads": 1}, "rows": [first | {"figures": base}, *rows],
        "request": {"model": "m", "group": 64, "settings": {}, "tasks": listed},
    }  # fmt: skip


def test_change_and_mean():
    one = row("w4a16_g64", "rtn", {"topics": (math.log(1.25), 0.2), "opticks": (math.log(1.5), 0.4)})
    value, error = change(one, "topics")
    assert (value, error) == (pytest.approx(25), pytest.approx(1.25))
    kl, spread = mean_kl(document(one), one)
    assert (kl, spread) == (pytest.approx(0.3), pytest.approx(0.01 / math.sqrt(2)))
    assert change(one, "unknown") is None and mean_kl(document(one), row("w8a16", "rtn", {"topics": (0, 0)})) is None


def test_grid_and_six():
    both = {"topics": (math.log(1.25), 0.2), "opticks": (math.log(1.5), 0.4)}
    six_bits = [row("w6e3m2a16", "rtn", both), row("w6a16", "rtn", {"topics": (0.0, 0.1), "opticks": (0.0, 0.2)})]
    made = document(row("w4a16_pc", "rtn", both), row("w4a16_g64", "gptq", both, "topics"), *six_bits)
    lines = grid(made).splitlines()
    assert lines[2] == "| format | scale per | method | bits | topics | opticks | KL | same top-1 % |"
    assert lines[4] == "| int4 | channel | rtn | 4.50 | +25.0 ± 1.2 | +50.0 ± 1.5 | 0.3000 ± 0.0071 | 75.0 |"
    assert lines[5].startswith("| int4 | g64 | gptq |")
    assert six(made).splitlines()[4:] == [
        "| channel | topics | 0.200 ± 0.010 | 0.100 ± 0.010 | 0.50 | +25.0 ± 1.2 | 0.0 ± 1.0 |",
        "| channel | opticks | 0.400 ± 0.010 | 0.200 ± 0.010 | 0.50 | +50.0 ± 1.5 | 0.0 ± 1.0 |",
    ]


def test_what_is_won_at_home():
    home = {"topics": (0.1, 0.1), "opticks": (0.4, 0.1)}
    away = {"topics": (0.3, 0.1), "opticks": (0.2, 0.1)}
    rows = [row("w4a16_g64", "gptq", home, "topics"), row("w4a16_g64", "gptq", away, "opticks")]
    rows.append(row("w4a16_g64", "gptq", {"topics": (0.12, 0.1), "opticks": (0.4, 0.1)}, "topics", seed=1))
    text = calibration(document(*rows))
    assert "than, on average, on the others: topics 0.200, opticks 0.200." in text
    assert "at home and elsewhere" not in text
    rows.append(row("w4a16_g64", "rtn", {"topics": (0.4, 0.1), "opticks": (0.5, 0.1)}))
    assert "elsewhere: topics 25 % and 80 to 80 %, opticks 40 % and 75 to 75 %." in calibration(document(*rows))
    assert "2 draws of the pieces of `topics`: 0.000 to 0.014." in text
    assert "| gptq, topics | **+10.5 ± 1.1** |" in text


def test_tasks_and_defaults():
    made = document(
        row("w8a16", "rtn", {"topics": (0, 0)}, q={"accuracy": [0.4, 0.1, 25]}), row("w4a16_g64", "gptq", {}, "topics"),
        row("w4a16_g64", "gptq damping=0.01", {}, "topics"),
    )  # fmt: skip
    assert tasks(made).splitlines()[2:] == [
        "| case | bits | q accuracy |", "| --- | ---: | ---: |", "| 16 bits | 16.00 | 0.50 ± 0.10 |",
        "| w8a16 rtn | 4.50 | 0.40 ± 0.10 |",
    ]  # fmt: skip
    assert "| w4a16_g64 | gptq damping=0.01 |" in defaults(made)


def test_marks(tmp_path):
    page = tmp_path / "p.md"
    page.write_text("no mark")
    with pytest.raises(ValueError, match="has none of the marks"):
        write_pages([document()], [page])
    page.write_text("<!-- study:grid --> and no end")
    with pytest.raises(ValueError, match="once each and in this order"):
        write_pages([document()], [page])


def test_files_that_are_none(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load(path)
    path.write_text(json.dumps({"schema": 1}))
    with pytest.raises(ValueError, match="not a result file of `python -m study`"):
        load(path)
    path.write_text(json.dumps({**document(), "rows": [{"key": "a"}]}))
    with pytest.raises(ValueError, match="row 0 lacks bits_per_weight"):
        load(path)
    path.write_text(json.dumps(document()))
    with pytest.raises(ValueError, match="measured otherwise"):
        Results(path, {"model": "another"})
