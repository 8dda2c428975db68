"""The tables of docs/mechanisms.md are figures of the kept result files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lowbit.bench.mechanisms.report import load

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results" / "h200"


def tables(text):
    """Rows of cells of every table, by the heading above it."""
    found, heading = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|") and "---" not in line:
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def figures_of(rows):
    """Every time and figure of the rows."""
    for row in rows:
        yield from (value for value in (row["us"], *row["figures"].values()) if value is not None)


def unknown(cells, values):
    """Numbers of table cells that are none of the values, rounded as they are."""
    found = []
    for cell in cells:
        if re.fullmatch(r"\d+(\.\d+)?", cell):
            digits = len(cell.partition(".")[2])
            if not any(abs(float(cell) - value) <= 0.5001 * 10**-digits for value in values):
                found.append(cell)
    return found


def test_tables_are_the_figures_of_the_run():
    rows = load(RESULTS / "2026-11-23-mechanisms.json")["rows"]
    values = sorted(figures_of(rows))
    sizes = {row["m"] for row in rows} | {1, 2, 3, 4, 5, 6, 8, 56, 112}
    for heading, table in tables((ROOT / "docs" / "mechanisms.md").read_text()).items():
        if heading not in ("What came out", "FP6 beside INT4"):
            cells = [cell for line in table for cell in line if not (cell.isdecimal() and int(cell) in sizes)]
            assert unknown(cells, values) == [], heading


def test_fp6_beside_int4_is_computed():
    timed = json.loads((RESULTS / "2026-11-23-gemm.json").read_text())["rows"]
    us = {(row["scheme"], row["k"], row["m"]): row["us"] for row in timed if row["impl"] == "lowbit"}
    table = tables((ROOT / "docs" / "mechanisms.md").read_text())["FP6 beside INT4"]
    tokens = [int(cell.removeprefix("M ")) for cell in table[0][1:]]
    for line in table[1:]:
        scheme, k = "w4a16_g128" if "groups" in line[0] else "w4a16_pc", int(re.search(r"x (\d+)", line[0])[1])
        wanted = [f"{us['w6e3m2a16', k, m] / us[scheme, k, m]:.2f}" for m in tokens]
        assert line[1:] == wanted, line[0]


def test_the_check_finds_a_wrong_figure():
    assert unknown(["12.3", "x", "9", "0.51"], [12.34, 0.5, 9.4]) == ["0.51"]
