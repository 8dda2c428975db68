"""A result file: a row per case, rewritten after every row, and resumed if it exists."""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from lowbit.eval.figure import Figure
from lowbit.eval.results import as_json, machine, read_json, require_keys, versions, write_json

SCHEMA = 1
STUDY = "lowbit study"
UNQUANTIZED = "16 bits"
"""Key of the row of the unquantized model."""
ROW = ("key", "scheme", "method", "calibration", "bits_per_weight", "seconds", "figures")
"""What every row of the study has."""
PACKAGES = ("transformers", "tokenizers", "rouge-score")
"""Packages whose versions are kept."""


class Results:
    """The document and its file. An existing file is resumed if its `request`, which determines the figures, is the same.
    Raises ValueError if it is not.

    result: the name of the command's results. row_keys: what every row has."""

    def __init__(
        self, path: Path, request: dict[str, Any], result: str = STUDY, row_keys: Collection[str] = ROW,
        packages: Sequence[str] = PACKAGES,
    ) -> None:  # fmt: skip
        self.path = path
        if path.exists():
            self.document = load(path, result, row_keys)
            if self.document["request"] != json.loads(as_json(request)):
                changed = [k for k in request if self.document["request"].get(k) != json.loads(as_json(request))[k]]
                raise ValueError(
                    f"{path}: holds rows measured otherwise ({', '.join(changed) or 'fewer settings'} differ); repeat the "
                    "command it was made with, or name another file or folder"
                )
            return
        self.document = {
            "result": result, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False,
            "machine": machine(), "versions": versions(packages), "request": request,
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


def load(path: Path, result: str = STUDY, row_keys: Collection[str] = ROW) -> dict[str, Any]:
    """Returns the document of a result file. Raises ValueError that says what is wrong with it."""
    document = read_json(path, result, SCHEMA)
    require_keys(path, document, ("request", "rows"), row_keys)
    return document


def figure_of(row: dict[str, Any], task: str, metric: str) -> tuple[float, float | None] | None:
    """Returns value and standard error of a figure of a row; None if it was not measured."""
    cell = row["figures"].get(task, {}).get(metric)
    if cell is None:
        return None
    return float(cell[0]), None if cell[1] is None else float(cell[1])
