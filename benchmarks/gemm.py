"""`python -m benchmarks gemm`: compiles, then measures ceilings, cuBLAS, this library, and each peer in its own process."""

from __future__ import annotations

import datetime
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import quantized_x
from benchmarks.ahead import compile_ahead
from benchmarks.peers import PEERS
from benchmarks.protocol import Contender, blank_row, measured_rows, reference_product
from benchmarks.request import GemmRequest
from benchmarks.results import Results, default_path, machine
from lowbit.eval.results import versions
from lowbit.formats import QuantTensor, parse_scheme
from lowbit.tune.timing import warm_up

Say = Callable[[str], None]
ProgressCallback = Callable[[int, int, str], None]
"""Called with the finished rows, all rows, and a description of the current one."""


def choose_peers(text: str | None) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Returns (peers to measure, (peer, reason) of the omitted ones) for comma-separated names. None selects every peer, "none"
    no peer.

    Raises ValueError for an unknown name.
    """
    if text is not None and text.strip().lower() == "none":
        return (), ()
    names = tuple(PEERS) if text is None else tuple(dict.fromkeys(p.strip().lower() for p in text.split(",") if p.strip()))
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peers {name!r}: known peers are {', '.join(PEERS)}, or none")
    absent = tuple(
        (name, f"{PEERS[name].package} is not installed (pip install {PEERS[name].package})")
        for name in names
        if importlib.util.find_spec(PEERS[name].module) is None
    )
    return tuple(name for name in names if name not in dict(absent)), absent


def run(
    request: GemmRequest,
    peers: Sequence[str],
    left_out: Sequence[tuple[str, str]],
    out: Path | None,
    say: Say,
    progress: ProgressCallback,
) -> Results:
    """Measures the request and writes the results to the file from the first row on.

    The default of `out` is benchmarks/results/<gpu>/<date>-gemm.json. Raises ValueError without an NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            f"bench gemm measures an NVIDIA GPU and torch {torch.__version__} sees none; "
            "run it where torch.cuda.is_available() is true"
        )
    from benchmarks.ceilings import cublas_rows, measured_ceilings  # needs Triton, which comes with CUDA builds of torch

    packages = [PEERS[name].package for name in peers]
    total = len(request.rows) * len(request.shapes) * (1 + len(request.schemes) * (1 + len(peers)))
    gpu = machine()
    results = Results(out or default_path(gpu["gpu"], datetime.date.today()), request, gpu, versions(packages))
    results.write()
    say(f"{gpu['gpu']}, results in {results.path}")
    for name, why in left_out:
        say(f"skipped {name}: {why}")
        results.skip(name, why)
    progress(0, total, "compiling")
    compile_ahead(request, [this_library, *(PEERS[name].build for name in peers if PEERS[name].compiled)])
    progress(0, total, "warming up")
    warm_up()
    progress(0, total, "ceilings")
    ceilings, stored = measured_ceilings()
    results.set_ceilings(ceilings, stored)
    say(f"read bandwidth {ceilings.read_bytes_per_s / 1e12:.2f} TB/s, fp16 {ceilings.fp16_flops / 1e12:.0f} TFLOP/s")

    made_by = {"lowbit": "lowbit", "cublas": "torch", **{name: PEERS[name].package for name in peers}}

    def add(row: dict[str, Any]) -> None:
        version = results.document["versions"].get(made_by[row["impl"]])
        results.add({**row, "commit": gpu["commit"], "version": version})
        progress(len(results.rows), total, f"{row['impl']} {row['scheme']} {row['n']}x{row['k']} M {row['m']}")

    cublas_rows(request.shapes, request.rows, add)
    for row in measured_rows("lowbit", this_library, request):
        add(row)
    torch.cuda.empty_cache()
    for name in peers:
        for row in peer_rows(name, request):
            add(row)
    results.finish()
    return results


def this_library(q: QuantTensor, request: GemmRequest) -> Contender:
    """Returns this library's kernel for a weight as a contender."""
    if q.scheme.activation is not None:
        return quantized_x.this_library(q, request)
    from lowbit.ops import fragment_gemm
    from lowbit.ops.table import describe, problem_on
    from lowbit.pack import FragmentWeight

    weight = FragmentWeight.pack(q)
    n, k = q.shape
    return Contender(
        weight,
        weight.nbytes,
        lambda w: w.clone(),
        lambda m: [(describe(problem_on(q.codes.device, q.scheme, m, (n, k), request.torch_dtype)), fragment_gemm)],
        lambda x: reference_product(x, q),
        request.torch_dtype,
    )


def peer_rows(name: str, request: GemmRequest) -> Iterator[dict[str, Any]]:
    """Yields the rows that the process of a peer writes. If it dies, its remaining rows get its last output as error."""
    due = [
        blank_row(name, parse_scheme(scheme), shape, m, request.dtype)
        for shape in request.shapes
        for scheme in request.schemes
        for m in request.rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        request_file, answers, words = Path(folder, "request.json"), Path(folder, "rows.jsonl"), Path(folder, "output.txt")
        request_file.write_text(json.dumps(request.as_json()))
        answers.touch()
        command = [sys.executable, "-m", "benchmarks.peers", name, "--request", str(request_file), "--out", str(answers)]
        with words.open("w") as sink, answers.open() as lines:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
            try:
                yield from _as_they_come(lines, process, due)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        last = [line.strip() for line in words.read_text(errors="replace").splitlines() if line.strip()][-1:]
        for row in due:
            yield {**row, "error": f"its process ended with {process.returncode}: {''.join(last) or 'no output'}"[:500]}


def _as_they_come(lines: Any, process: subprocess.Popen, due: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields each row once the process has written it, and removes the first entry of `due`, the rows still expected."""
    begun = ""
    while True:
        ended = process.poll() is not None
        for part in iter(lines.readline, ""):
            begun += part
            if begun.endswith("\n"):
                row, begun = json.loads(begun), ""
                del due[0]
                yield row
        if ended:
            return
        time.sleep(0.1)
