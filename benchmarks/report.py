"""Tables of a gemm result file: for a terminal, as Markdown, and for README.md.

Each row of this library is compared with cuBLAS in fp16 and the fastest correct peer of the same scheme in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.table import narrow_table
from lowbit.eval.report import replace_block

MARK = "bench:gemm"
OWN = "lowbit"


@dataclass(frozen=True)
class Line:
    """One scheme, shape and M: this library's time (us; None if it failed), its limit and its rivals."""

    scheme: str
    n: int
    k: int
    m: int
    us: float | None
    error: str | None
    limit_us: float
    cublas_us: float | None
    peer: str | None
    peer_us: float | None
    rel_err: float | None

    @property
    def share(self) -> float | None:
        """limit / time: 1 is the fastest possible."""
        return None if self.us is None else self.limit_us / self.us

    @property
    def times_cublas(self) -> float | None:
        """Speedup over cuBLAS in fp16."""
        return None if self.us is None or self.cublas_us is None else self.cublas_us / self.us

    @property
    def times_peer(self) -> float | None:
        """Speedup over the fastest peer."""
        return None if self.us is None or self.peer_us is None else self.peer_us / self.us


def limit_of(row: dict[str, Any]) -> float:
    """Returns the larger of the two limits of a row, in microseconds."""
    return float(max(row["limit_us"], row["compute_us"]))


def lines(document: dict[str, Any], rows: Sequence[int] | None = None) -> list[Line]:
    """Returns the lines of a result file in its order; only those with M in `rows` if given."""
    best: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for row in document["rows"]:
        key = (row["scheme"], row["n"], row["k"], row["m"])
        if row["impl"] not in (OWN, "cublas") and row["us"] is not None and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    found = []
    for row in document["rows"]:
        if row["impl"] != OWN or (rows is not None and row["m"] not in rows):
            continue
        peer = best.get((row["scheme"], row["n"], row["k"], row["m"]), {})
        found.append(
            Line(
                row["scheme"], row["n"], row["k"], row["m"], row["us"], row["error"], limit_of(row), row["cublas_fp16_us"],
                peer.get("impl"), peer.get("us"), row["rel_err"],
            )
        )  # fmt: skip
    return found


def table(document: dict[str, Any]) -> Table:
    """Returns the lines of a result file as a table for a terminal."""
    columns = ("M", "us", "limit us", "of limit", "x cuBLAS", "best peer", "peer us", "x peer", "rel err")
    made = narrow_table(("scheme", "N x K"), columns)
    for line in lines(document):
        made.add_row(
            line.scheme, f"{line.n} x {line.k}", str(line.m), _us(line.us), _us(line.limit_us), _percent(line.share),
            _times(line.times_cublas), line.peer or "-", _us(line.peer_us), _times(line.times_peer),
            "-" if line.rel_err is None else f"{line.rel_err:.1e}",
        )  # fmt: skip
    return made


def failed(document: dict[str, Any]) -> list[str]:
    """Returns a line for each reason why rows have no time: number of rows, implementation, scheme and reason."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in document["rows"]:
        if row["error"] is not None:
            key = (row["impl"], row["scheme"], row["error"])
            counts[key] = counts.get(key, 0) + 1
    return [f"{impl} {scheme}: {count} not measured: {error}" for (impl, scheme, error), count in counts.items()]


def markdown(
    document: dict[str, Any], rows: Sequence[int] | None = None, formats: Sequence[str] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> str:  # fmt: skip
    """Returns the machine and one table per shape as Markdown, limited to the given rows, schemes and shapes."""
    found = [line for line in lines(document, rows) if formats is None or line.scheme in formats]
    found = [line for line in found if shapes is None or (line.n, line.k) in shapes]
    if not found:
        raise ValueError(
            f"the results hold no row of lowbit{'' if rows is None else ' with M in ' + ', '.join(map(str, rows))}"
        )
    parts = [_where(document)]
    beside = any(line.peer is not None for line in found)
    for n, k in dict.fromkeys((line.n, line.k) for line in found):
        parts += [f"**N = {n}, K = {k}**", _shape_table([line for line in found if (line.n, line.k) == (n, k)], beside)]
    return "\n\n".join(parts) + "\n"


def _where(document: dict[str, Any]) -> str:
    versions, ceilings = document["versions"], document["ceilings"]
    known = ("lowbit", "python", "torch", "cuda")
    with_what = ", ".join(f"{name} {version}" for name, version in versions.items() if version and name not in known)
    bandwidth, rate = f"{ceilings['read_bytes_per_s'] / 1e12:.2f} TB/s", f"{ceilings['fp16_flops'] / 1e12:.0f} TFLOP/s"
    return (
        f"{document['machine']['gpu']}, {document['date']}, torch {versions.get('torch')}, {with_what}. Microseconds per call "
        f"in one CUDA graph; weights are read from memory, not from the L2. The limit is the larger of two times, the bytes at "
        f"{bandwidth} and the operations at {rate}, both rates measured in the same run."
        + ("" if document.get("complete") else " The run was interrupted: rows are missing.")
    )


def _shape_table(found: list[Line], beside: bool) -> str:
    head = ("format", "M", "lowbit", "limit", "of limit", "cuBLAS fp16", "x cuBLAS", "best peer", "x peer")[
        : 9 if beside else 7
    ]
    out = [f"| {' | '.join(head)} |", "|---|" + "---:|" * 6 + ("---|---:|" if beside else "")]
    for line in found:
        cells = (
            line.scheme, str(line.m), _us(line.us), _us(line.limit_us), _percent(line.share), _us(line.cublas_us),
            _times(line.times_cublas), "-" if line.peer is None else f"{line.peer} {_us(line.peer_us)}",
            _times(line.times_peer),
        )  # fmt: skip
        out.append(f"| {' | '.join(cells[: len(head)])} |")
    return "\n".join(out)


def rewrite_readme(path: Path, text: str) -> None:
    """Replaces the text between the two marks of README.md. Raises ValueError unless each mark occurs once, in order."""
    replace_block(path, MARK, text)


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
