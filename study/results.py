"""The result file of one model: a row per case, rewritten after every row, and resumed if it exists."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lowbit.eval.figure import Figure
from lowbit.eval.results import as_json, machine, read_json, versions, write_json

SCHEMA = 1
STUDY = "lowbit study"
UNQUANTIZED = "16 bits"
"""Key of the row of the unquantized model."""
_ROW = {"key", "scheme", "method", "calibration", "bits_per_weight", "seconds", "figures"}


class Results:
    """The document and its file. An existing file is resumed if its `request`, which determines the figures, is the same.
    Raises ValueError if it is not."""

    def __init__(self, path: Path, request: dict[str, Any]) -> None:
        self.path = path
        if path.exists():
            self.document = load(path)
            if self.document["request"] != json.loads(as_json(request)):
                changed = [k for k in request if self.document["request"].get(k) != json.loads(as_json(request))[k]]
                raise ValueError(
                    f"{path}: holds rows measured otherwise ({', '.join(changed) or 'fewer settings'} differ); repeat the "
                    "command it was made with, or name another folder"
                )
            return
        self.document = {
            "result": STUDY, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False,
            "machine": machine(), "versions": versions(("transformers", "tokenizers", "rouge-score")), "request": request,
            "rows": [],
        }  # fmt: skip

    def __contains__(self, key: str) -> bool:
        return any(row["key"] == key for row in self.document["rows"])

    def add(self, row: dict[str, Any], figures: Sequence[tuple[str, Figure]]) -> None:
        """Adds a row with its (task, figure) pairs, stored as {task: {metric: [value, standard error, count]}}, and writes
        the file."""
        cells: dict[str, dict[str, list[float | None]]] = {}
        for task, figure in figures:
            cells.setdefault(task, {})[figure.metric] = [figure.value, figure.standard_error, figure.count]
        self.document["rows"].append({**row, "figures": cells, "torch": torch.__version__})
        self.write()

    def write(self, complete: bool = False) -> None:
        """Replaces the file atomically."""
        self.document["complete"] = complete
        write_json(self.path, self.document)


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file. Raises ValueError that says what is wrong with it."""
    document = read_json(path, STUDY, SCHEMA)
    for number, row in enumerate(document["rows"]):
        if missing := sorted(_ROW - set(row)):
            raise ValueError(f"{path}: row {number} lacks {', '.join(missing)}")
    return document


def figure_of(row: dict[str, Any], task: str, metric: str) -> tuple[float, float | None] | None:
    """Returns value and standard error of a figure of a row; None if it was not measured."""
    cell = row["figures"].get(task, {}).get(metric)
    if cell is None:
        return None
    return float(cell[0]), None if cell[1] is None else float(cell[1])
