"""The plot of a result file: per shape, speed-up over cuBLAS in fp16 and share of the limit, against M."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowbit.bench.limits import Ceilings, ideal_speedup
from lowbit.bench.report import OWN, limit_of
from lowbit.bench.results import GEMM
from lowbit.eval.results import write_plot
from lowbit.formats import parse_scheme

_DASHES = ("--", ":", "-.")


def plot(document: dict[str, Any], path: Path) -> None:
    """Draws the rows that have times; the suffix of the path says the format, .png or .svg for example.

    Solid lines are this library's, dashed ones the peers', thin grey ones the ideal of each format: the ratio of the limits,
    16/bits at small M, 1 where operations decide. Raises ValueError when there is nothing to draw and when matplotlib is not
    installed.
    """
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'lowbit[plot]'") from error
    rows = [row for row in document["rows"] if row["us"] is not None and row["impl"] != "cublas"]
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    if not shapes:
        raise ValueError("the results hold no measured row to plot")
    figure = Figure(figsize=(14, 5 * len(shapes)), layout="constrained")
    axes = figure.subplots(len(shapes), 2, squeeze=False)
    colors = matplotlib.colormaps["tab10"]
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    peers = list(dict.fromkeys(row["impl"] for row in rows if row["impl"] != OWN))
    ceilings = Ceilings(document["ceilings"]["read_bytes_per_s"], document["ceilings"]["fp16_flops"])
    for (n, k), (speed, share) in zip(shapes, axes, strict=True):
        here = [row for row in rows if (row["n"], row["k"]) == (n, k)]
        for impl, scheme in dict.fromkeys((row["impl"], row["scheme"]) for row in here):
            own = sorted((row for row in here if (row["impl"], row["scheme"]) == (impl, scheme)), key=lambda row: row["m"])
            style = {
                "color": colors(schemes.index(scheme) % 10), "label": f"{impl} {scheme}", "marker": "o", "markersize": 3,
                "linestyle": "-" if impl == OWN else _DASHES[peers.index(impl) % len(_DASHES)],
            }  # fmt: skip
            against = [row for row in own if row["cublas_fp16_us"] is not None]
            speed.plot([row["m"] for row in against], [row["cublas_fp16_us"] / row["us"] for row in against], **style)
            share.plot([row["m"] for row in own], [100 * limit_of(row) / row["us"] for row in own], **style)
        ms = sorted({row["m"] for row in here})
        for scheme in dict.fromkeys(row["scheme"] for row in here):
            ideal = [ideal_speedup(parse_scheme(scheme), n, k, m, ceilings) for m in ms]
            speed.plot(ms, ideal, color="grey", linewidth=0.8, zorder=0)
        speed.axhline(1, color="black", linewidth=0.8)
        _label(speed, f"N {n}, K {k}: times cuBLAS fp16 (grey: ideal)", ms)
        _label(share, f"N {n}, K {k}: percent of the limit", ms)
        share.set_ylim(0, 105)
        share.legend(fontsize=7, ncols=2)
    figure.suptitle(f"{document['machine']['gpu']}, {document['date']}")
    write_plot(path, GEMM, figure)


def _label(axis: Any, title: str, ms: list[int]) -> None:
    axis.set_title(title)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ms, [str(m) for m in ms])
    axis.set_xlabel("M, rows of x")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
