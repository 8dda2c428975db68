"""`lowbit tune`: the fastest tile of each product of a model, measured on the GPU in hand and kept for this machine."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.table import Table

from lowbit.cli.terminal import Model, check_scheme, load_layers, out, say


def tune(
    model: Model,
    scheme: Annotated[
        str | None, typer.Option(help="Scheme of a model that lowbit has not quantized, such as w4a16_g128.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Rows of x, separated by commas; 18 numbers from 1 to 4096.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="End after so long, compiling included.")] = None,
) -> None:
    """Time the tiles of a model's products on this GPU and keep the fastest, for every process that starts afterwards.

    Which tile multiplies is chosen by a model of costs that was fitted to an H200; on other GPUs, and for shapes that nobody
    looked at, a measurement is worth more. A tile that gains 3 percent and more is taken from then on, by a file in the user's
    cache, which removing undoes; `lowbit explain` says where a tile was measured. Products of decode steps with a norm, gate or
    residual at their ends (up to 64 tokens in lowbit's own engine) are chosen apart. Some minutes; Ctrl-C keeps what there is.

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
    products = products_of_model(model, named)
    with Progress(desc="starting", unit="tiles") as bar:
        found = run(products, rows, math.inf if seconds is None else seconds, say, bar.at)
    table = Table("scheme", "N x K", "products", "other tile", "gained there", "most at M")
    of_weights: dict[tuple[str, int, int], list[Tuned]] = {}
    for row in found:
        of_weights.setdefault((row.scheme, row.n, row.k), []).append(row)
    for (name, n, k), each in of_weights.items():
        better = [row for row in each if row.gain > 0]
        mean = sum(row.gain for row in better) / len(better) if better else 0.0
        most = max(better, key=lambda row: row.gain, default=None)
        last = "-" if most is None else f"{most.kept.m} ({most.gain:.0%})"
        table.add_row(name, f"{n} x {k}", str(len(each)), str(len(better)), f"{mean:.0%}" if better else "-", last)
    out.print(table)
