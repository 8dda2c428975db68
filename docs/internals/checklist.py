"""Writes checklist.md from checklist.toml: `python docs/internals/checklist.py`, from any folder. Needs Python 3.11."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).parent
PAGE = HERE / "checklist.md"
STATES = {"shown": "shown", "part": "in part", "no": "not here", "background": "background"}

BEGINNING = """# What the sources ask for, and where it is

One row for every capability, claim and figure of five articles on low-bit kernels: the mixed-type GEMM of TensorRT-LLM, the
conversions of FasterTransformer, the INT4 convolutions of MegEngine, and the FP6 of ZeroQuant(4+2) (arXiv:2312.08583), FP6-LLM
(arXiv:2401.14112) and DeepSpeed. *Shown* rows link to what shows them: a test, a result file, a page that judges the claim; the
others say what is missing and why. The page is made of `checklist.toml` by `checklist.py`; a test follows every link.
"""


def read() -> dict[str, Any]:
    """The parts of checklist.toml, each with a title and rows by name."""
    return tomllib.loads((HERE / "checklist.toml").read_text(encoding="utf-8"))


def rows(part: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The rows of a part, by their names."""
    return {name: row for name, row in part.items() if name != "title"}


def proofs(row: dict[str, str]) -> list[tuple[str, str, str]]:
    """(file, test, anchor) of what shows a row; the last two are empty where a file as a whole does."""
    found = []
    for link in row.get("by", "").split():
        file, _, test = link.partition("::")
        file, _, anchor = file.partition("#")
        found.append((file, test, anchor))
    return found


def link(file: str, test: str, anchor: str) -> str:
    """One proof as a link of the page."""
    target = Path(os.path.relpath(file, "docs/internals")).as_posix()
    name = f"{Path(file).stem}::{test}" if test else Path(file).name if not anchor else f"{Path(file).name}, {anchor}"
    return f"[{name}]({target}{'#' + anchor if anchor else ''})"


def page() -> str:
    """The text of checklist.md."""
    parts = read()
    every = [row for part in parts.values() for row in rows(part).values()]
    count = Counter(row.get("state", "shown") for row in every)
    lines = [
        BEGINNING,
        f"{len(every)} rows: " + ", ".join(f"{count[state]} {name}" for state, name in STATES.items()) + ".",
        "",
    ]
    for part in parts.values():
        lines += [f"## {part['title']}", "", "| | what | | shown by, or why not |", "|---|---|---|---|"]
        for name, row in rows(part).items():
            shown = [", ".join(link(*proof) for proof in proofs(row)), row.get("note", "")]
            lines.append(
                f"| {name} | {row['what']} | {STATES[row.get('state', 'shown')]} | {'. '.join(s for s in shown if s)} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
