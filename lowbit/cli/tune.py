"""`lowbit tune`: measures the fastest tile for each product of a model on this GPU and stores it."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.table import Table

from lowbit.cli.terminal import Model, check_scheme, load_layers, out, say


def tune(
    model: Model,
    scheme: Annotated[
        str | None, typer.Option(help="Scheme, such as w4a16_g128, for a model that lowbit has not quantized.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Numbers of tokens, comma-separated. Default: 18 numbers from 1 to 4096.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Stop after this time, compilation included.")] = None,
) -> None:
    """Time the tiles for a model's matrix products on this GPU and store the fastest for processes that start later.

    Without tuning, a cost model fitted to an H200 chooses the tile; other GPUs and untested shapes may gain from a measurement.
    A tile that is at least 3 percent faster is stored in a file in the user's cache. Deleting the file undoes the tuning;
    `lowbit explain` shows which tiles are measured. Not tuned: decode-step products with a fused norm, gate or residual (up to
    64 tokens in lowbit's engine). Takes minutes; Ctrl-C keeps the results so far.

    Example: lowbit tune Llama-3-8B-w4a16_g128

    Example: lowbit tune Llama-3-8B --scheme w8a8 --tokens 1,16,64,256
    """
    from lowbit.sources import CONFIG, local_model

    check_scheme(scheme)
    local_model(model, CONFIG)
    load_layers()
    from lowbit.formats import parse_scheme
    from lowbit.progress import Progress
    from lowbit.tune.run import TOKENS, Tuned, products_of_model, run
    from lowbit.tune.trials import parse_rows

    named = None if scheme is None else parse_scheme(scheme).name
    rows = TOKENS if tokens is None else tuple(sorted(set(parse_rows(tokens))))
    products = products_of_model(model, named, say)
    with Progress(desc="starting", unit="tiles") as bar:
        tuned = run(products, rows, math.inf if seconds is None else seconds, say, bar.at)
    table = Table("scheme", "N x K", "products", "new tile", "mean gain", "largest gain at M")
    by_weight: dict[tuple[str, int, int], list[Tuned]] = {}
    for row in tuned:
        by_weight.setdefault((row.scheme, row.n, row.k), []).append(row)
    for (name, n, k), each in by_weight.items():
        better = [row for row in each if row.gain > 0]
        mean = sum(row.gain for row in better) / len(better) if better else 0.0
        most = max(better, key=lambda row: row.gain, default=None)
        last = "-" if most is None else f"{most.kept.m} ({most.gain:.0%})"
        table.add_row(name, f"{n} x {k}", str(len(each)), str(len(better)), f"{mean:.0%}" if better else "-", last)
    out.print(table)
