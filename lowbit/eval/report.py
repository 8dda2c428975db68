"""The report of an evaluation in Markdown: a table per task with standard errors, and the measurements that were skipped."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.table import Table

from lowbit.checkpoint.reader import read_text
from lowbit.checkpoint.target import replace_file, write_result
from lowbit.eval.results import SUITE


def rows(document: dict[str, Any], task: str) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the cells of a task's table. It has a row per model and a column per metric, with standard
    errors."""
    metrics = list(dict.fromkeys(f["metric"] for m in document["models"] for f in m["figures"] if f["task"] == task))
    lines = []
    for model in document["models"]:
        figures = {f["metric"]: f for f in model["figures"] if f["task"] == task}
        if not figures:
            continue
        counts = dict.fromkeys(f"{f['count']:,} {f['unit']}" for f in figures.values())
        cells = [number(figures[m]["value"], figures[m]["standard_error"]) if m in figures else "" for m in metrics]
        lines.append([model["label"], *_size_cells(model), *cells, ", ".join(counts)])
    return ["model", "bits per weight", "MB", *metrics, "measured on"], lines


def _size_cells(model: dict[str, Any]) -> list[str]:
    size = model["size"]
    if size is None:
        return ["?", "?"]
    bits = size["bits_per_weight"]
    return ["?" if bits is None else f"{bits:.3f}", f"{size['bytes'] / 1e6:.1f}"]


def number(value: float | str, error: float | None) -> str:
    """Returns a figure and its standard error as text, such as 21.35 ± 0.42. The error has two significant digits, and both
    have equally many decimals."""
    value = float(value)
    if error is None or not math.isfinite(error) or not error:
        return f"{value:.4g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{places}f} ± {error:.{places}f}"


def tables(document: dict[str, Any]) -> list[Table]:
    """Returns the tables for a narrow terminal. They have a row per metric and a column per model; no number is truncated."""
    out = []
    for task in document["request"]["tasks"]:
        head, lines = rows(document, task["task"])
        if not lines:
            continue
        table = Table(title=f"{task['task']} ({task['kind']})", title_justify="left")
        table.add_column(head[0], overflow="fold")
        for label, *_ in lines:
            table.add_column(label, justify="right", overflow="fold")
        for i, name in enumerate(head[1:], 1):
            table.add_row(name, *(line[i] for line in lines))
        out.append(table)
    return out


def skipped(document: dict[str, Any]) -> list[str]:
    """Returns one line per skipped measurement."""
    return [f"{m['label']}: {s['task']}: {s['reason']}" for m in document["models"] for s in m["skipped"]]


def write_page(document: dict[str, Any], path: Path, plots: list[str]) -> None:
    """Writes the report. `plots`: names of image files in the same folder."""
    text = markdown(document, plots)
    write_result(path, SUITE, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def replace_block(path: Path, name: str, text: str) -> None:
    """Replaces the text between `<!-- NAME -->` and `<!-- /NAME -->` in a Markdown file and keeps its line endings.

    Raises ValueError unless each mark occurs once, in this order.
    """
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    read_page(path)
    old = path.read_bytes().decode("utf-8")  # keeps line endings
    if old.count(opening) != 1 or old.count(closing) != 1 or old.index(opening) > old.index(closing):
        raise ValueError(f"{path}: the table goes between {opening} and {closing}, once each and in this order")
    before, rest = old.split(opening)
    block = "\n".join((opening, text.strip(), closing)).replace("\n", "\r\n" if "\r\n" in old else "\n")
    new = before + block + rest.split(closing)[1]
    replace_file(path.resolve(), lambda scratch: scratch.write_bytes(new.encode("utf-8")))


def read_page(path: Path) -> str:
    """Returns the text of a Markdown file. Raises ValueError if it does not exist or is not UTF-8."""
    return read_text(path, "a table goes into a Markdown file that has its marks")


def markdown(document: dict[str, Any], plots: list[str]) -> str:
    """Returns the report as text."""
    machine, settings = document["machine"], document["request"]["settings"]
    device = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['threads']} threads"
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    lines = [f"<!-- result: {SUITE} -->", "# Evaluation", "", f"{document['date']}, {device}. {versions}.", ""]
    if not document["complete"]:
        lines += ["**Interrupted: not everything was measured.**", ""]
    lines += [f"![Quality against bits per weight and against bytes]({name})\n" for name in plots]
    for task in document["request"]["tasks"]:
        head, cells = rows(document, task["task"])
        lines += [f"## {task['task']}", "", f"{_described(task, settings)}", ""]
        if cells:
            lines += [_line(head), _line(["---", *["---:"] * (len(head) - 1)]), *map(_line, cells), ""]
    for language, held in document["request"].get("sandbox", {}).items():
        lines += [f"Generated {language} was contained by: " + "; ".join(f"{what}: {by}" for what, by in held.items()) + ".\n"]
    missing = skipped(document)
    if missing:
        lines += ["## Not measured", "", *(f"- {line}" for line in missing), ""]
    return "\n".join([*lines, _NOTE])


_NOTE = """± is one standard error: over windows for figures per token, binomial for accuracies, over documents for ROUGE
and over problems for pass@k. Bits per weight are those of the linear layers with scales and zeros; MB are all tensors of the
checkpoint, embeddings included, in millions of bytes.
"""


def _described(task: dict[str, Any], settings: dict[str, Any]) -> str:
    source = "built-in text, Newton's Opticks" if task["path"] is None else f"`{Path(task['path']).name}`"
    what = {
        "text": f"windows of {settings['window']} tokens that start {settings['stride'] or settings['window']} apart. "
        "KL is that of the reference to the model, in nats per token",
        "choice": f"{task['items']} questions; the choice of the largest log-likelihood, summed or per byte",
        "summary": f"{task['items']} documents; greedy summaries, F1",
        "code": f"{task['items']} problems, {settings['samples']} samples each"
        + (f" at temperature {settings['temperature']}" if settings["samples"] > 1 else ", greedy"),
    }[task["kind"]]
    return f"{source}, sha256 {task['sha256'][:16]}; {what}."


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
