"""The result file of an evaluation: complete after every task, so that a crash or Ctrl-C loses nothing that was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lowbit._version import __version__
from lowbit.eval.figure import Figure
from lowbit.eval.size import Size

SCHEMA = 1
_PACKAGES = ("transformers", "tokenizers", "numpy", "rouge-score")


def machine() -> dict[str, Any]:
    """Processor, threads, and the GPUs that torch sees."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of this library, what it runs on, and of `packages`; None for what is not installed."""
    found: dict[str, str | None] = {
        "lowbit": __version__, "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    for package in ("triton", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


class Results:
    """The document of one run and the file `results.json` in `folder` that mirrors it."""

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self.path = folder / "results.json"
        self.document: dict[str, Any] = {
            "schema": SCHEMA, "evaluation": "suite", "date": datetime.date.today().isoformat(), "complete": False,
            "machine": machine(), "versions": versions(_PACKAGES), "request": request, "models": [],
        }  # fmt: skip
        self.write()

    def add_model(self, name: str, label: str, reference: bool, size: Size | None, dtype: str, device: str) -> None:
        """Begins a model; figures that follow are its."""
        self.document["models"].append(
            {
                "model": name, "label": label, "reference": reference, "dtype": dtype, "device": device,
                "size": None if size is None else asdict(size), "figures": [], "details": {}, "skipped": [],
            }
        )  # fmt: skip
        self.write()

    def add(self, task: str, figures: list[Figure], details: Any) -> None:
        """The figures of a task of the current model, and the whole result they are taken from."""
        model = self.document["models"][-1]
        model["figures"] += [{"task": task, **asdict(figure)} for figure in figures]
        model["details"].setdefault(task, {})[type(details).__name__] = asdict(details)
        self.write()

    def skip(self, task: str, why: str) -> None:
        """A measurement that cannot be made of the current model."""
        self.document["models"][-1]["skipped"].append({"task": task, "reason": why})
        self.write()

    def finish(self) -> None:
        """Marks the run as complete."""
        self.document["complete"] = True
        self.write()

    def write(self) -> None:
        """Replaces the file in one step."""
        text = as_json(self.document)
        write_whole(self.path, lambda scratch: scratch.write_text(text))


def as_json(value: Any) -> str:
    """JSON, in which infinities and NaN are the strings "inf", "-inf" and "nan", since it has no numbers for them."""
    return json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path`, then puts it in its place: never half a file, and no left-overs on Ctrl-C."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.stem}.part{path.suffix}")  # the suffix tells matplotlib what to write
    try:
        write(scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
