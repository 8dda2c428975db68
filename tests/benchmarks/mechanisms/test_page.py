"""Every number in the tables of docs/internals/mechanisms.md is in the kept result files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.mechanisms.report import load

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
OF_LINES = {
    "int4 in groups of 128": "w4a16_g128", "int4, scales of channels": "w4a16_pc", "int8, scales of channels": "w8a16"
}  # fmt: skip
"""The page's names of the cases that time TensorRT-LLM's interleaved lines."""


def rows_of_runs():
    """The rows of all kept result files."""
    files = sorted(RESULTS.glob("*-mechanisms*.json"))
    return [row for file in files for row in load(file)["rows"]]


def tables(text):
    """Returns {heading: tables below it}. A table is a list of rows of cells, of which the first is the header."""
    found, heading, open_table = {}, "", False
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|") and "---" not in line:
            if not open_table:
                found.setdefault(heading, []).append([])
            found[heading][-1].append([cell.strip() for cell in line.strip("|").split("|")])
        open_table = line.startswith("|")
    return found


def rows_of(line, head, rows):
    """Returns the measured rows to which a table line may refer: those with the dtype, format and M that the line names."""
    named, m = line[0].split(), line[head.index("M")] if "M" in head else None
    if line[0] in OF_LINES:
        rows = [row for row in rows if row["part"] == "lines" and row["case"] == OF_LINES[line[0]]]
    elif re.fullmatch(r"\d+ x \d+", line[0]) and "every 128 k" in head:
        rows = [row for row in rows if row["part"] == "sums" and f"{row['n']} x {row['k']}" == line[0]]
    for kind in ("fp16", "bf16"):
        rows = [row for row in rows if row["dtype"] == kind] if kind in named else rows
    for code in ("int8", "int4", "fp6"):
        if named[:1] == [code] and line[0] not in OF_LINES:
            rows = [row for row in rows if row["case"].startswith(code)]
    return [row for row in rows if row["m"] == int(m)] if m else rows


def figures_of(rows):
    """All times and other figures of the rows."""
    for row in rows:
        yield from (value for value in (row["us"], *row["figures"].values()) if value is not None)


def unknown(cells, values):
    """Returns the numbers in table cells that equal none of the values, rounded to the digits of the cell."""
    found = []
    for cell in cells:
        if re.fullmatch(r"\d+(\.\d+)?", cell):
            digits = len(cell.partition(".")[2])
            if not any(abs(float(cell) - value) <= 0.5001 * 10**-digits for value in values):
                found.append(cell)
    return found


def test_tables_are_the_figures_of_the_runs():
    rows = rows_of_runs()
    sizes = {row["m"] for row in rows} | {1, 2, 3, 4, 5, 6, 8, 56, 112}
    for heading, found in tables((ROOT / "docs" / "internals" / "mechanisms.md").read_text()).items():
        if heading not in ("What came out", "FP6 beside INT4"):
            for head, *lines in found:
                for line in lines:
                    cells = [cell for cell in line if not (cell.isdecimal() and int(cell) in sizes)]
                    assert unknown(cells, [*figures_of(rows_of(line, head, rows))]) == [], (heading, line)


def test_fp6_beside_int4_is_computed():
    timed = json.loads((RESULTS / "2026-11-23-gemm.json").read_text())["rows"]
    us = {(row["scheme"], row["k"], row["m"]): row["us"] for row in timed if row["impl"] == "lowbit"}
    (table,) = tables((ROOT / "docs" / "internals" / "mechanisms.md").read_text())["FP6 beside INT4"]
    tokens = [int(cell.removeprefix("M ")) for cell in table[0][1:]]
    for line in table[1:]:
        scheme, k = "w4a16_g128" if "groups" in line[0] else "w4a16_pc", int(re.search(r"x (\d+)", line[0])[1])
        wanted = [f"{us['w6e3m2a16', k, m] / us[scheme, k, m]:.2f}" for m in tokens]
        assert line[1:] == wanted, line[0]


def test_the_check_finds_a_wrong_figure():
    assert unknown(["12.3", "x", "9", "0.51"], [12.34, 0.5, 9.4]) == ["0.51"]
    rows = rows_of_runs()
    head, line = ["", "M", "own"], ["int8 fp16, ring kernel", "1", "25.9"]  # a figure of another M
    assert unknown(line[2:], [*figures_of(rows_of(line, head, rows))]) == ["25.9"]
    assert unknown(line[2:], [*figures_of(rows)]) == []
