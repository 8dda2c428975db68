"""docs/internals/checklist.md matches docs/internals/checklist.toml, and everything it names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.test_docs import anchors

pytest.importorskip("tomllib", reason="the page is made with Python 3.11 and newer")

ROOT = Path(__file__).parent.parent
specification = importlib.util.spec_from_file_location("checklist", ROOT / "docs" / "internals" / "checklist.py")
checklist = importlib.util.module_from_spec(specification)
specification.loader.exec_module(checklist)
ROWS = {name: row for part in checklist.read().values() for name, row in checklist.rows(part).items()}


def faults(row: dict[str, str]) -> list[str]:
    """The errors in a row."""
    state = row.get("state", "shown")
    found = [] if set(row) <= {"what", "by", "state", "note"} and state in checklist.STATES else ["unknown keys or state"]
    if not row.get("what") or "|" in row["what"] + row.get("note", ""):
        found.append("says nothing, or breaks the table")
    if state == "shown" and not row.get("by"):
        found.append("nothing shows it")
    if state in ("part", "no") and not row.get("note", "").endswith("."):
        found.append("no sentence says what is missing")
    for file, test, anchor in checklist.proofs(row):
        path = ROOT / file
        if not path.is_file():
            found.append(f"{file} does not exist")
        elif test and not re.search(rf"^def {test}\b", path.read_text(), re.MULTILINE):
            found.append(f"{file} has no {test}")
        elif anchor and anchor not in anchors(path.read_text()):
            found.append(f"{file} has no #{anchor}")
    return found


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_names_exists(name):
    assert faults(ROWS[name]) == []


def test_the_page_is_what_the_file_says():
    """If this fails, run `python docs/internals/checklist.py`."""
    assert checklist.PAGE.read_text() == checklist.page()


def test_rows_are_complete_and_in_order():
    last = {"A": 50, "B": 20, "C": 28, "F": 64}
    assert list(ROWS) == [f"{part}{number}" for part, count in last.items() for number in range(1, count + 1)]


def test_the_check_finds_what_it_looks_for():
    assert faults({"what": "x", "by": "docs/none.md"}) == ["docs/none.md does not exist"]
    assert faults({"what": "x", "by": "tests/test_checklist.py::test_none"}) == ["tests/test_checklist.py has no test_none"]
    assert faults({"what": "x", "by": "docs/log/cnn.md#none"}) == ["docs/log/cnn.md has no #none"]
    assert faults({"what": "x"}) == ["nothing shows it"] and faults({"what": "x", "state": "no"}) != []
    assert faults({"what": "a | b", "state": "background"}) != [] and faults({"what": "x", "state": "odd"}) != []
