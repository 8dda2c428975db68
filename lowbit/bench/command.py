"""`lowbit bench gemm`, `tiles` and `report`: matrix products timed on this GPU, and tables of what was timed anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lowbit.bench import report
from lowbit.bench.request import make_request, parse_rows, parse_shape
from lowbit.bench.results import GEMM, load
from lowbit.eval.results import check_plot
from lowbit.hardware.machine import machine_of


def bench_gemm(
    formats: Annotated[str | None, typer.Option(help="Schemes, separated by commas.")] = None,
    shapes: Annotated[str | None, typer.Option(help="Weights as NxK, separated by commas: 8192x8192,8192x28672.")] = None,
    m: Annotated[str | None, typer.Option("--m", help="Rows of x, separated by commas: 1,16,64,256,1024,4096.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of x and y: float16 or bfloat16.")] = "float16",
    peers: Annotated[str | None, typer.Option(help="humming, gemlite, torch or none; those installed when absent.")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; bench/results/<gpu>/<date>-gemm.json.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw them too: a .png or .svg file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer formats, shapes and M, and no tuning of peers.")] = False,
) -> None:
    """Time y = x w^T with quantized weights on this GPU: us, share of the machine's limit, times cuBLAS and the best peer.

    Needs an NVIDIA GPU. Kernels are compiled first, in up to 16 processes. Each row is checked against a float64 product. The
    file is complete after every row, so Ctrl-C keeps what was measured.

    Example: lowbit bench gemm --formats w4a16_g128,w6e3m2a16 --shapes 8192x28672 --m 1,16,256 --peers none
    """
    from lowbit.bench.gemm import choose_peers, run

    if plot_file is not None:
        check_plot(plot_file, GEMM)
    request = make_request(formats, shapes, m, dtype, quick)
    present, absent = choose_peers(peers)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting")

        def watch(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        results = run(request, present, absent, out_file, _say, watch)
    Console().print(report.table(results.document))
    for line in report.failed(results.document):
        _say(line)
    _say(f"wrote {results.path}")
    if plot_file is not None:
        _plot(results.document, plot_file)


def bench_tiles(
    formats: Annotated[str | None, typer.Option(help="Schemes, separated by commas.")] = None,
    shapes: Annotated[str | None, typer.Option(help="Weights as NxK, separated by commas: 8192x8192,8192x28672.")] = None,
    m: Annotated[str | None, typer.Option("--m", help="Rows of x, separated by commas: 1,16,64,256,1024,4096.")] = None,
    dtype: Annotated[str, typer.Option(help="Type of x and y: float16 or bfloat16.")] = "float16",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer formats, shapes and M.")] = False,
) -> None:
    """Check the choice of tile on this GPU: the chosen one beside the best of the next ones and the batch-invariant one.

    Needs an NVIDIA GPU. Rows in which another tile wins by more than 3 % are printed at the end in the form in which
    kernels/choose/mixed_gemm.py keeps them.

    Example: lowbit bench tiles --formats w4a16_g128 --shapes 4096x4096 --m 16,64,256
    """
    from lowbit.bench.protocol import warm_up
    from lowbit.bench.tiles import measure_tiles

    request = make_request(formats, shapes, m, dtype, quick)
    if not torch.cuda.is_available():
        raise ValueError(f"bench tiles measures an NVIDIA GPU and torch {torch.__version__} sees none")
    warm_up()
    machine = machine_of("cuda")
    rows = list(measure_tiles(request, machine, _say))
    table = Table("format", "N x K", "M", "chosen", "us", "best us", "batch-invariant us", "cost")
    for row in rows:
        table.add_row(
            row.scheme, f"{row.shape.n} x {row.shape.k}", str(row.shape.m), str(row.chosen), f"{row.chosen_us:.1f}",
            f"{row.best_us:.1f}", f"{row.invariant_us:.1f}", f"{row.invariant_us / row.chosen_us:.2f}x",
        )  # fmt: skip
    Console().print(table)
    for row in rows:
        if row.worth_a_row:
            print(row.measured(machine.product))


def bench_report(
    file: Annotated[Path, typer.Argument(help="Result file of `lowbit bench gemm`.")],
    m: Annotated[str | None, typer.Option("--m", help="Only these numbers of rows of x: 1,16,256.")] = None,
    formats: Annotated[str | None, typer.Option(help="Only these schemes, separated by commas.")] = None,
    shapes: Annotated[str | None, typer.Option(help="Only weights of these NxK, separated by commas.")] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Rewrite the block between <!-- bench:gemm --> and <!-- /bench:gemm --> of this file.")
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the results: a .png or .svg file.")] = None,
) -> None:
    """Print the Markdown tables of a result file; needs no GPU.

    Example: lowbit bench report bench/results/h200/2026-11-21-gemm.json --readme README.md
    """
    if plot_file is not None:
        check_plot(plot_file, GEMM)
    document = load(file)
    chosen = None if formats is None else formats.split(",")
    sizes = None if shapes is None else [parse_shape(part) for part in shapes.split(",")]
    text = report.markdown(document, None if m is None else parse_rows(m), chosen, sizes)
    if readme is None:
        sys.stdout.write(text)
    else:
        report.rewrite_readme(readme, text)
        _say(f"wrote the table into {readme}")
    if plot_file is not None:
        _plot(document, plot_file)


def _plot(document: dict[str, Any], path: Path) -> None:
    from lowbit.bench.plot import plot

    for written in plot(document, path):
        _say(f"wrote {written}, and beside it a copy for dark pages")


def _say(line: str) -> None:
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
