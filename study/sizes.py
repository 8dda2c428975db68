"""`python -m study sizes MODEL...`: the same cases, texts and windows on models of several sizes.

Do larger models lose less at the same bits, and do two smaller ones predict the largest? All cases are rounded to nearest.
Groups have 64 channels on every model, the largest size that divides the layers of SmolLM2-135M.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.cli.terminal import say, user_errors
from lowbit.eval.report import number, replace_block
from lowbit.methods import Rtn
from lowbit.sources import model_folder
from study.cases import Case
from study.data import gather
from study.results import figure_of, load
from study.run import Settings, run

Document = dict[str, Any]

RESULTS, PAGE = Path("benchmarks/results/study/sizes"), Path("docs/internals/study.md")
MARK = "study:sizes"
"""Mark of the table in the page."""
TEXTS = ("opticks", "handbook")
CASES = (
    *(Case(scheme, Rtn()) for scheme in ("w8a16", "w6e3m2a16", "w5e2m2a16", "w4a16_g64", "w4a16_pc", "w3a16_g64")),
    *(Case(scheme, Rtn()) for scheme in ("w8a8", "fp8_dynamic", "w4a8_g64")),
    Case("w8a8", Rtn(), rotate_inputs=True),
)

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
@user_errors
def main(
    models: Annotated[
        list[Path] | None, typer.Argument(metavar="[MODEL...]", help="Folders of 16-bit models; none: only the page.")
    ] = None,
    data: Annotated[Path, typer.Option(help="Texts; filled when it does not exist.")] = Path("study-data"),
    results: Annotated[Path, typer.Option(help="Folder of the result files, one per model.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="Page whose table is rewritten.")] = PAGE,
    only: Annotated[str | None, typer.Option(help="Only cases like this: 'w4a16_g64 *', 'w8*'.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of 512 tokens of each text.")] = 2,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
) -> None:
    """Measures the same cases on models of several sizes, and rewrites the table from all result files. A result file is
    complete after every row; the same command resumes an interrupted run.

    Example: python -m study sizes SmolLM2-135M-Instruct Qwen2.5-Coder-0.5B-Instruct Qwen2.5-Coder-1.5B-Instruct
    """
    for model in models or ():
        model_folder(model)
    if models:
        gather(data, say, TEXTS)
    for model in models or ():
        path = results / f"{model.resolve().name}.json"
        run(
            model.resolve(), data, path, Settings(512, windows), only=only, wanted=CASES, texts=TEXTS,
            device=device, say=say, progress=True,
        )  # fmt: skip
        say(f"wrote {path}")
    documents = by_size(results)
    if not documents:
        raise ValueError(f"{results}: holds no result file; name a model to measure")
    replace_block(page, MARK, table(documents))
    say(f"wrote the table of {page}")


def by_size(folder: Path) -> list[Document]:
    """Returns the result files of a folder, the model with the fewest weights in linear layers first."""
    return sorted(map(load, folder.glob("*.json")), key=lambda document: document["weights"]["linear"])


def _row(document: Document, case: Case) -> dict[str, Any] | None:
    """Returns the row of a case; None if it was not measured."""
    wanted = (case.scheme, case.method_name)
    return next((row for row in document["rows"] if (row["scheme"], row["method"]) == wanted), None)


def predicted(smaller: float, larger: float, weights: Sequence[int]) -> float:
    """Returns the divergence of a model with `weights[2]` weights, if it is a power of the number of weights through those of
    models with `weights[0]` and `weights[1]`."""
    exponent = math.log(larger / smaller) / math.log(weights[1] / weights[0])
    return larger * (weights[2] / weights[1]) ** exponent


def table(documents: Sequence[Document]) -> str:
    """Returns the table of the divergence and the change of perplexity by case and model. With three models, the last columns
    compare the largest with the middle one, and with `predicted`."""
    weights = [document["weights"]["linear"] for document in documents]
    compared = len(documents) == 3
    head = ["case", *(document["request"]["model"] for document in documents)]
    head += ["largest / middle", "power law", "largest / power law"] if compared else []
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    ratios, laws = [], []
    for case in CASES:
        rows = [row for document in documents if (row := _row(document, case)) is not None]
        if len(rows) < len(documents):
            continue
        kl = [_mean(row, "KL mean")[0] for row in rows]
        cells = [f"`{case.scheme}` {case.method_name}", *map(_cell, rows)]
        if compared:
            ratios.append(kl[2] / kl[1])
            laws.append(kl[2] / predicted(kl[0], kl[1], weights))
            cells += [f"{ratios[-1]:.2f}", f"{kl[2] / laws[-1]:.4g}", f"{laws[-1]:.2f}"]
        lines.append(_line(cells))
    if compared and ratios:
        means = [f"{statistics.geometric_mean(values):.2f}" for values in (ratios, laws)]
        lines.append(_line(["geometric mean", "", "", "", means[0], "", means[1]]))
    return "\n".join([*map(_setting, documents), "", *lines])


def _setting(document: Document) -> str:
    """Returns a line with the model's size and its perplexity in 16 bits."""
    base = next(row for row in document["rows"] if row["scheme"] is None)
    texts = [f"{text} {number(*figure)}" for text in TEXTS if (figure := figure_of(base, text, "perplexity")) is not None]
    s, machine = document["request"]["settings"], document["machine"]
    where = ", ".join(machine["gpus"]) or f"{machine['threads']} thread{'s' * (machine['threads'] > 1)} of a CPU"
    return (
        f"- {document['request']['model']}: {document['weights']['linear'] / 1e6:,.0f} million weights in linear layers, "
        f"perplexity in 16 bits {', '.join(texts)}; {s['windows']} windows of {s['window']} tokens of each text, {s['dtype']}, "
        f"{document['date']}, {where}"
    )


def _cell(row: dict[str, Any]) -> str:
    """Returns the divergence and the change of perplexity of a row."""
    worse = 100 * math.expm1(_mean(row, "nll difference")[0])
    return f"{number(*_mean(row, 'KL mean'))}, {worse:+.2f} %"


def _mean(row: dict[str, Any], metric: str) -> tuple[float, float]:
    """Returns the mean of a figure over the texts, and its standard error; NaN if a text has a single window."""
    found = [figure for text in TEXTS if (figure := figure_of(row, text, metric)) is not None]
    errors = [math.nan if error is None else error for _, error in found]
    return statistics.fmean(value for value, _ in found), math.hypot(*errors) / len(found)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    app()
