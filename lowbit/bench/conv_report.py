"""`lowbit bench conv` on the terminal: its tables, and the roofline with every layer a point. Needs no GPU to draw a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lowbit.eval.results import check_plot, read_json, write_plot

SCHEMA = 1
CONV = "lowbit bench conv"
STORAGES = {"int4": "u4", "int8": "s8"}


def load(path: Path) -> dict[str, Any]:
    """The document of a result file of `lowbit bench conv`; raises ValueError that says what is wrong with it."""
    document = read_json(path, CONV, SCHEMA)
    for key in ("machine", "rows", "layers", "date"):
        if key not in document:
            raise ValueError(f"{path}: holds no {key!r}")
    return document


def network_table(document: dict[str, Any]) -> Table:
    """One line per network: milliseconds, images per second, share of its limit."""
    table = Table("impl", "storage", "fusion", "batch", "ms", "images/s", "of its limit", title="ResNet-50, 224 x 224")
    for row in document["rows"]:
        ms, limit = row["ms"], row["limit_ms"]
        share = f"{100 * limit / ms:.0f} %" if ms and limit else "-"
        rate = f"{row['images_s']:,.0f}" if row["images_s"] else row["error"] or "-"
        table.add_row(
            row["impl"], row["storage"], row["fusion"], str(row["batch"]), f"{ms:.3f}" if ms else "-", rate, share
        )  # fmt: skip
    return table


def layer_table(document: dict[str, Any], storage: str) -> Table:
    """One line per kernel: microseconds, share of its own roofline, and what sets that."""
    rows = [row for row in document["layers"] if row["storage"] == storage]
    batch = rows[0]["batch"] if rows else "-"
    table = Table("layer", "us", "TOPS", "of its limit", "limited by", title=f"{storage}, batch {batch}, each kernel alone")
    for row in rows:
        limit = row["limit_us"]
        share = f"{100 * limit / row['us']:.0f} %" if limit else "-"
        table.add_row(
            row["layer"], f"{row['us']:.1f}", f"{row['operations'] / row['us'] / 1e6:.0f}", share, row["bound"] or "-"
        )  # fmt: skip
    return table


def plot(document: dict[str, Any], path: Path) -> None:
    """The roofline: operational intensity against attained operations per second, every convolution a point.

    Raises ValueError when there is nothing to draw and when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'lowbit[plot]'") from error
    from lowbit.hardware.device import device_for

    rows = [row for row in document["layers"] if row["operations"]]
    if not rows:
        raise ValueError("the results hold no layer to plot")
    device = device_for(document["machine"]["sm"])
    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    intensities = [row["operations"] / row["bytes"] for row in rows]
    ends = [min(intensities) / 2, max(intensities) * 2]
    ridge = (device.peak_int8 or device.peak_fp16) / device.bandwidth_bytes
    roof = [
        (x, min(x * device.bandwidth_bytes, device.peak_int8 or device.peak_fp16) / 1e12) for x in (ends[0], ridge, ends[1])
    ]
    axis.plot(
        [x for x, _ in roof], [y for _, y in roof], color="black", linewidth=1, label="data sheet: memory, int8 tensor cores"
    )
    for storage, marker in (("u4", "o"), ("s8", "s")):
        own = [
            (row["operations"] / row["bytes"], row["operations"] / row["us"] / 1e6) for row in rows if row["storage"] == storage
        ]
        if own:
            name = "INT4" if storage == "u4" else "INT8"
            axis.scatter([x for x, _ in own], [y for _, y in own], marker=marker, s=18, alpha=0.7, label=f"{name} activations")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("operations per byte moved")
    axis.set_ylabel("TOPS attained")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.suptitle(f"ResNet-50, batch {rows[0]['batch']}, {document['machine']['gpu']}, {document['date']}")
    write_plot(path, CONV, figure)


def bench_conv(
    storages: Annotated[str, typer.Option(help="Activations, separated by commas: int4, int8.")] = "int4,int8",
    batches: Annotated[str | None, typer.Option(help="Images, separated by commas: 1,8,32,128,256,2048.")] = None,
    peers: Annotated[
        str, typer.Option(help="Rivals in fp16, separated by commas: cudnn, compile (torch.compile), or none.")
    ] = "cudnn",
    out_file: Annotated[Path | None, typer.Option("--out", help="Results; bench/results/<gpu>/<date>-conv.json.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the roofline: a .png or .svg file.")] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Print and draw this result file; needs no GPU.")] = None,
) -> None:
    """Time ResNet-50 in INT4 and INT8 on this GPU, its fusions on and off at batch 128, and every layer beside its roofline.

    Needs an H100 or H200. Codes are compared with an integer reference first, bit for bit. The file is complete after every
    row, so Ctrl-C keeps what was measured.

    Example: lowbit bench conv --storages int4 --batches 1,128 --plot roofline.png
    """
    out, err = Console(), Console(stderr=True)
    if plot_file is not None:
        check_plot(plot_file, CONV)
    if report_file is not None:
        document = load(report_file)
    else:
        wanted = storages.split(",")
        unknown = [name for name in wanted if name not in STORAGES]
        if unknown:
            raise ValueError(f"storages are {' and '.join(STORAGES)}, got {', '.join(unknown)}")
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"bench conv measures an NVIDIA GPU and torch {torch.__version__} sees none")
        from lowbit.bench.conv import BATCHES, run
        from lowbit.bench.conv_network import FUSIONS
        from lowbit.bench.conv_rivals import RIVALS
        from lowbit.bench.request import parse_rows

        rivals = [] if peers == "none" else peers.split(",")
        if set(rivals) - set(RIVALS):
            raise ValueError(f"peers are {', '.join(RIVALS)} or none, got {peers}")
        chosen = BATCHES if batches is None else parse_rows(batches)
        path, document = run([STORAGES[n] for n in wanted], chosen, FUSIONS, rivals, out_file, err.print)  # type: ignore[misc]
        err.print(f"wrote {path}")
    out.print(network_table(document))
    for storage in dict.fromkeys(row["storage"] for row in document["layers"]):
        out.print(layer_table(document, storage))
    if plot_file is not None:
        plot(document, plot_file)
        err.print(f"wrote {plot_file}")
