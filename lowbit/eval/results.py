"""The result file of an evaluation: complete after every task, so that a crash or Ctrl-C loses nothing that was measured."""

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
    """The document of one run and the file `path` that mirrors it: `results.json` in `folder`, or, as long as the run is not
    complete and an earlier one's is there, which was, `results-unfinished.json`."""

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self.path = folder / (UNFINISHED if _is_complete(folder / RESULTS) else RESULTS)
        self.document: dict[str, Any] = {
            "result": SUITE, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False,
            "machine": machine(), "versions": versions(_PACKAGES), "request": request, "models": [],
        }  # fmt: skip

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
        """Marks the run as complete; what it wrote in the meantime goes, and an earlier run's results are replaced."""
        self.document["complete"] = True
        unfinished, self.path = self.path, self.path.with_name(RESULTS)
        self.write()
        if unfinished != self.path:
            unfinished.unlink(missing_ok=True)

    def write(self) -> None:
        """Replaces the file in one step."""
        write_json(self.path, self.document)


def _is_complete(path: Path) -> bool:
    """Whether the results of a run that ended are at `path`."""
    try:
        return bool(read_json(path, SUITE, SCHEMA).get("complete"))
    except ValueError:
        return False


def as_json(value: Any) -> str:
    """JSON, in which infinities and NaN are the strings "inf", "-inf" and "nan", since it has no numbers for them."""
    return json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a result file in one step, over none but an earlier one of the same `document["result"]`; else raises
    ValueError."""
    result = document["result"]
    text = as_json({"result": result, **document})  # at the beginning of the file, where it is looked for
    write_result(path, result, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def read_json(path: Path, result: str, schema: int | None = None) -> dict[str, Any]:
    """The document of a result file of the command `result`; raises ValueError that says what is wrong with it."""
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
    """Raises ValueError that names the file and the first of `keys` that the document lacks, or all that a row of it lacks."""
    for key in keys:
        if key not in document:
            raise ValueError(f"{path}: holds no {key!r}")
    for number, row in enumerate(document["rows"]):
        missing = sorted(set(row_keys) - set(row))
        if missing:
            raise ValueError(f"{path}: row {number} lacks {', '.join(missing)}")


def check_plot(path: Path, result: str) -> Path:
    """`path`, if a plot of the command `result` may be written there, and its copy for dark pages beside it; raises ValueError
    where not."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path}: a plot is a .png, .svg or .pdf file")
    for target, _ in _plots(path):
        check_file(target, result)
    return path


def write_plots(path: Path, result: str, draw: Callable[[Theme], Any]) -> None:
    """Writes the figures of matplotlib that `draw` makes: `path` for light pages and beside it, with "-dark" after its stem,
    for dark ones, over none but earlier ones of the same command; else raises ValueError."""
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
