"""`python -m study`: collects the data, measures missing cases, and rewrites the pages from all result files.

`python -m study upcycle` makes a mixture of experts of a dense model, `python -m study experts` measures its quantization,
`python -m study kv` keys and values in few bits, `python -m study sizes` models of several sizes, `python -m study learned`
learned rounding beside another tool, `python -m study quantizing-speed` how long quantizing takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.terminal import say, user_errors
from lowbit.eval.results import check_plot
from lowbit.sources import model_folder
from study import experts, kv, learned, quantizing_speed, sizes, upcycle
from study.curves import TABLE, curves, write_curves
from study.data import gather
from study.page import write_pages
from study.plot import plot, plot_choice
from study.results import STUDY, load
from study.run import Settings, run

PAGES = ("internals/study.md", "internals/quantization.md", "choose.md")
PLOT, CHOICE = "quality.png", "choice.png"


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
@user_errors
def study(
    models: Annotated[
        list[Path] | None, typer.Argument(metavar="[MODEL...]", help="Folders of 16-bit models; none: only the pages.")
    ] = None,
    data: Annotated[Path, typer.Option(help="Texts and tasks; filled when it does not exist.")] = Path("study-data"),
    results: Annotated[Path, typer.Option(help="Folder of the result files, one per model.")] = Path(
        "benchmarks/results/study"
    ),
    name: Annotated[str | None, typer.Option(help="Name of the result file, for one model; the folder's when absent.")] = None,
    page: Annotated[
        list[Path] | None, typer.Option(help="Page to rewrite; repeatable. By default the three pages of the study.")
    ] = None,
    table: Annotated[Path, typer.Option(help="What `lowbit recommend` reads.")] = TABLE,
    only: Annotated[str | None, typer.Option(help="Only cases like this: 'w4a16_g64 *', '* rtn'.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each text.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Pieces to calibrate on.")] = 32,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = 512,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many questions, documents and problems.")] = None,
    dtype: Annotated[str, typer.Option(help="What the models compute in: float32, bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
    run_generated_code: Annotated[
        bool, typer.Option("--run-generated-code", help="Run the programs the models write, isolated by the kernel.")
    ] = False,
) -> None:
    """Methods x granularities x number formats on real models: measure them, and write the tables and the plot.

    Each case is quantized, compared with the 16-bit model on half of every text (calibration sees the other half), and
    deleted. The result file is complete after every row; the same command resumes an interrupted run. Then the marked blocks
    of the pages are rewritten from all files in the results folder, and quality.png is drawn there (needs lowbit\\[plot]).

    Example: python -m study SmolLM2-135M-Instruct --device cuda --limit 128

    Example: python -m study    (no model: only rewrites the pages from the result files)
    """  # fmt: skip
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype is float32 or bfloat16, got {dtype!r}")
    if name is not None and len(models or []) != 1:
        raise ValueError(f"--name names the result file of one model, got {len(models or [])}")
    for drawing in (PLOT, CHOICE):
        check_plot(results / drawing, STUDY)
    settings = Settings(window, windows, samples, length, limit, dtype, run_generated_code)
    for model in models or []:
        model_folder(model)
        if not data.exists():
            gather(data, say)
        path = results / f"{name or model.resolve().name}.json"
        run(model.resolve(), data, path, settings, only=only, device=device, say=say, progress=True)
        say(f"wrote {path}")
    found = sorted(results.glob("*.json"))
    if not found:
        raise ValueError(f"{results}: holds no result file; name a model to measure")
    documents = [load(path) for path in found]
    write_curves(documents, sizes.by_size(results / sizes.RESULTS.name), table)
    say(f"wrote {table}")
    for line in write_pages(documents, page or [Path("docs") / name for name in PAGES]):
        say(f"wrote {line}")
    try:
        plot(documents, results / PLOT)
        plot_choice(curves(documents), results / CHOICE)
        say(f"wrote {results / PLOT} and {results / CHOICE}")
    except ValueError as error:
        say(f"no plot: {error}")


COMMANDS = {
    "upcycle": upcycle.app, "experts": experts.app, "kv": kv.app, "sizes": sizes.app, "learned": learned.app,
    "quantizing-speed": quantizing_speed.app,
}  # fmt: skip
"""First argument -> its command. A model's folder of such a name is given as a path: ./experts."""


def main(arguments: Sequence[str]) -> None:
    """Runs the command that the first argument names, or the study."""
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        COMMANDS[name](args=list(arguments[1:]), prog_name=f"python -m study {name}")
    app(args=list(arguments), prog_name="python -m study")


if __name__ == "__main__":
    main(sys.argv[1:])
