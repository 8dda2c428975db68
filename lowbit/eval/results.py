"""The result file of an evaluation, saved after every task, so that a crash or Ctrl-C loses no finished measurement."""

from __future__ import annotations

import datetime
import functools
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lowbit._version import __version__
from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.target import check_file, command_of, write_result
from lowbit.eval.figure import Figure
from lowbit.eval.size import Size
from lowbit.picture import DARK, LIGHT, Theme
from lowbit.sources import regular_file

SCHEMA = 1
SUITE = "lowbit eval --suite"
RESULTS, UNFINISHED = "results.json", "results-unfinished.json"
_PACKAGES = ("transformers", "tokenizers", "numpy", "rouge-score")


def machine() -> dict[str, Any]:
    """Returns processor, threads, and the GPUs visible to torch."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Returns the versions of lowbit, Python, torch, CUDA, Triton and `packages`; None for those that are not installed."""
    installed: dict[str, str | None] = {
        "lowbit": __version__, "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    for package in ("triton", *packages):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed


class Results:
    """The document of one run, and its file `path` in `folder`. The file is results.json. If results.json holds an earlier
    complete run, it is results-unfinished.json until this run is complete."""

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self.path = folder / (UNFINISHED if _is_complete(folder / RESULTS) else RESULTS)
        self.document: dict[str, Any] = {
            "result": SUITE, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False,
            "machine": machine(), "versions": versions(_PACKAGES), "request": request, "models": [],
        }  # fmt: skip

    def add_model(self, name: str, label: str, reference: bool, size: Size | None, dtype: str, device: str) -> None:
        """Adds a model; later figures belong to it."""
        self.document["models"].append(
            {
                "model": name, "label": label, "reference": reference, "dtype": dtype, "device": device,
                "size": None if size is None else asdict(size), "figures": [], "details": {}, "skipped": [],
            }
        )  # fmt: skip
        self.write()

    def add(self, task: str, figures: list[Figure], details: Any) -> None:
        """Adds the figures of a task of the current model, and the complete result as details."""
        model = self.document["models"][-1]
        model["figures"] += [{"task": task, **asdict(figure)} for figure in figures]
        model["details"].setdefault(task, {})[type(details).__name__] = asdict(details)
        self.write()

    def skip(self, task: str, why: str) -> None:
        """Records a skipped measurement of the current model with its reason."""
        self.document["models"][-1]["skipped"].append({"task": task, "reason": why})
        self.write()

    def finish(self) -> None:
        """Marks the run as complete, replaces results.json and removes results-unfinished.json."""
        self.document["complete"] = True
        unfinished, self.path = self.path, self.path.with_name(RESULTS)
        self.write()
        if unfinished != self.path:
            unfinished.unlink(missing_ok=True)

    def write(self) -> None:
        """Replaces the file atomically."""
        write_json(self.path, self.document)


def _is_complete(path: Path) -> bool:
    """Returns True if `path` holds the results of a complete run."""
    try:
        return bool(read_json(path, SUITE, SCHEMA).get("complete"))
    except ValueError:
        return False


def as_json(value: Any) -> str:
    """Returns JSON text; infinities and NaN become the strings "inf", "-inf" and "nan"."""
    return json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a result file atomically. Raises ValueError if `path` exists and is not a result of the same
    `document["result"]`."""
    result = document["result"]
    text = as_json({"result": result, **document})  # "result" first: check_file reads the beginning of the file
    write_result(path, result, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def read_json(path: Path, result: str, schema: int | None = None) -> dict[str, Any]:
    """Returns the document of a result file of the command `result`. Raises ValueError if it is not one."""
    try:
        document: Any = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give a result file of `{command_of(result)}`") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("result") != result or document.get("schema") != schema:
        version = "" if schema is None else f" (schema {schema})"
        raise ValueError(f"{path}: not a result file of `{command_of(result)}`{version}")
    return document


def require_keys(path: Path, document: dict[str, Any], keys: Iterable[str], row_keys: Iterable[str] = ()) -> None:
    """Raises ValueError if the document lacks one of `keys`, or one of its rows lacks some of `row_keys`."""
    for key in keys:
        if key not in document:
            raise ValueError(f"{path}: holds no {key!r}")
    for number, row in enumerate(document["rows"]):
        missing = sorted(set(row_keys) - set(row))
        if missing:
            raise ValueError(f"{path}: row {number} lacks {', '.join(missing)}")


def check_plot(path: Path, result: str) -> Path:
    """Returns `path` if the command `result` may write a plot there, and its dark variant in the same folder. Otherwise raises
    ValueError."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path}: a plot must be a .png, .svg or .pdf file")
    for target, _ in _plots(path):
        check_file(target, result)
    return path


def write_plots(path: Path, result: str, draw: Callable[[Theme], Any]) -> None:
    """Writes the matplotlib figure of `draw` to `path` in the light theme, and to STEM-dark.SUFFIX in the dark one.

    Raises ValueError if a file exists that is not a plot of the same command.
    """
    check_plot(path, result)
    options = {"format": path.suffix.removeprefix("."), "metadata": {"Creator": result}}
    for target, theme in _plots(path):
        write_result(target, result, functools.partial(draw(theme).savefig, **options))


def _plots(path: Path) -> tuple[tuple[Path, Theme], tuple[Path, Theme]]:
    return (path, LIGHT), (path.with_stem(f"{path.stem}-dark"), DARK)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
