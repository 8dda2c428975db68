"""Plots of a result file: for each shape, a panel per format with the speedup over cuBLAS in fp16 against tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import OWN
from benchmarks.results import GEMM
from lowbit.eval.results import write_plots
from lowbit.formats import PerChannel, PerGroup, parse_scheme
from lowbit.picture import Theme, new_figure, plain

_COLUMNS = 3
_STYLES = ("-", ":", "--")


def plot(document: dict[str, Any], path: Path) -> list[Path]:
    """Draws the rows that have times, one picture per shape, for light and for dark pages. Returns the files for light pages.

    If there are several shapes, the file name gets the shape: speed-8192x8192.png. The suffix is .png or .svg. This library is
    blue, cuBLAS and peers are grey, the dashed line is the memory limit. Raises ValueError if there is nothing to draw or
    matplotlib is not installed.
    """
    rows = [row for row in document["rows"] if row["us"] is not None and row["impl"] != "cublas" and row["cublas_fp16_us"]]
    own = {(row["n"], row["k"], row["scheme"]) for row in rows if row["impl"] == OWN}
    rows = [row for row in rows if (row["n"], row["k"], row["scheme"]) in own]
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    if not shapes:
        raise ValueError("the results hold no measured row to plot")
    written = []
    for n, k in shapes:
        here = [row for row in rows if (row["n"], row["k"]) == (n, k)]
        target = path if len(shapes) == 1 else path.with_stem(f"{path.stem}-{n}x{k}")
        title = f"y = x w^T with w {n:,} x {k:,}, {document['machine']['gpu']}, {document['date']}"
        write_plots(target, GEMM, lambda theme, here=here, title=title: _draw(here, title, theme))  # type: ignore[misc]
        written.append(target)
    return written


def _draw(rows: list[dict[str, Any]], title: str, theme: Theme) -> Any:
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    lines = -(-len(schemes) // _COLUMNS)
    figure = new_figure(3.2 * min(len(schemes), _COLUMNS), 2.5 * lines + 0.5, theme)
    axes = figure.subplots(lines, min(len(schemes), _COLUMNS), squeeze=False, sharex=True, sharey=True)
    tokens = sorted({row["m"] for row in rows})
    peers_of = {scheme: _peers([row for row in rows if row["scheme"] == scheme]) for scheme in schemes}
    # Each peer is labelled once, in the panel with the fewest lines.
    calm = {peer: min((s for s in schemes if peer in peers_of[s]), key=lambda s: len(peers_of[s])) for peer in _peers(rows)}
    for place, scheme in enumerate(schemes):
        axis = axes[place // _COLUMNS][place % _COLUMNS]
        plain(axis, theme, _in_words(scheme))
        here = [row for row in rows if row["scheme"] == scheme]
        _panel(axis, here, place == 0, [peer for peer in _peers(here) if calm[peer] == scheme], theme)
        axis.set_xscale("log", base=2)
        axis.set_xticks(tokens, [f"{m:,}" if m not in (32, 128) else "" for m in tokens])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}x")
        if place // _COLUMNS == lines - 1:
            axis.set_xlabel("tokens")
    axes[0][0].set_ylim(0, None)  # panels share the axis
    for axis in axes.flat[len(schemes) :]:
        axis.set_visible(False)
    figure.suptitle(f"Times as fast as cuBLAS in fp16: {title}", color=theme.text, fontsize=10, x=0.01, ha="left")
    return figure


def _peers(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["impl"] for row in rows if row["impl"] != OWN))


def _panel(axis: Any, rows: list[dict[str, Any]], first: bool, named: list[str], theme: Theme) -> None:
    """Plots one format: the memory limit, the peers (those in `named` with labels), and this library with its value at one
    token.
    """

    def curve(impl: str) -> tuple[list[int], list[float]]:
        own = sorted((row for row in rows if row["impl"] == impl), key=lambda row: int(row["m"]))
        return [row["m"] for row in own], [row["cublas_fp16_us"] / row["us"] for row in own]

    axis.axhline(1, color=theme.rival, linewidth=1)
    # The limit is drawn only where reading memory takes longer than the operations. The measured rate of operations is no upper
    # bound, since products that draw less power exceed it.
    bound = sorted(
        {(r["m"], r["cublas_fp16_us"] / r["limit_us"]) for r in rows if r["impl"] == OWN and r["limit_us"] > r["compute_us"]}
    )
    axis.plot([m for m, _ in bound], [y for _, y in bound], color=theme.text, linewidth=0.9, linestyle=(0, (4, 3)))
    text = {"fontsize": 7.5, "textcoords": "offset points", "va": "center"}
    for peer, style in zip(_peers(rows), _STYLES * len(rows), strict=False):
        ms, speeds = curve(peer)
        axis.plot(ms, speeds, color=theme.rival, linewidth=1.4, linestyle=style)
        if peer in named:
            at, above = (len(ms) // 2, 8) if speeds[-1] < 0.5 else (0, -10)
            axis.annotate(peer.capitalize(), (ms[at], speeds[at]), xytext=(4, above), color=theme.rival, **text)
    ms, speeds = curve(OWN)
    axis.plot(ms, speeds, color=theme.own, linewidth=2.2, marker="o", markersize=3)
    near = bool(bound) and bound[0][1] - speeds[0] < 0.6
    axis.annotate(
        f"{speeds[0]:.1f}x", (ms[0], speeds[0]), xytext=(4, -9 if near else 7), color=theme.own, weight="bold", **text
    )
    if first:
        axis.annotate("lowbit", (ms[-1], speeds[-1]), xytext=(0, 9), color=theme.own, weight="bold", ha="right", **text)
        axis.annotate("cuBLAS fp16", (ms[-1], 1), xytext=(0, -9), color=theme.rival, ha="right", **text)
        if bound:
            axis.annotate("limit: bytes of w", bound[-1], xytext=(6, 0), color=theme.text, **text)


def _in_words(name: str) -> str:
    """`w4a16_g128` as "int4, groups of 128"."""
    scheme = parse_scheme(name)
    fmt = scheme.weight.name.replace("_", " ")
    x = "" if scheme.activation is None else f" x {scheme.activation.name.replace('_', ' ')}"
    grain = scheme.granularity
    if isinstance(grain, PerGroup):
        return f"{fmt}{x}, groups of {grain.size}"
    return f"{fmt}{x}, per channel" if isinstance(grain, PerChannel) else f"{fmt}{x}, {name}"
