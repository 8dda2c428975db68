"""Hardware counters of products: bytes read and written, utilization of memory and tensor cores.

Nsight Compute (`ncu`) runs this module as a program and writes a table of all its kernels. Before each case the program
launches a marker kernel, by which the table is split. Clocks are not locked, and ncu empties the caches before each kernel.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.mechanisms.fused import CUBLAS_TOKENS, SCHEME, halves, two_kernels
from benchmarks.mechanisms.products import K, N, Product
from benchmarks.mechanisms.trial import Row, blank
from lowbit.tune.timing import gaussian

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
MEMORY = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = ("sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active", "sm__inst_executed_pipe_tensor")
"""Names of the tensor-core utilization metric in different ncu versions; the first known one is used."""
TENSOR_SUFFIX = ".avg.pct_of_peak_sustained_elapsed"
MARK = "spin_kernel"
LIMIT_S = 90
FUSED_TOKENS = (1, 16, 128)

CASES = (
    *(("fp16", "cuBLAS", m) for m in CUBLAS_TOKENS),
    *((SCHEME, way, m) for m in FUSED_TOKENS for way in ("one kernel", "two kernels")),
)
"""(case, variant, m) of each product."""


def call_of(way: str, m: int) -> Callable[[], object]:
    """Returns the function that runs the product."""
    if way == "one kernel":
        return Product(SCHEME, m, None)
    x = gaussian(m, K, 2, torch.float16)
    return (lambda: x @ halves().T) if way == "cuBLAS" else (lambda: two_kernels()(x))


def rows() -> Iterator[Row]:
    """Yields a row for each case; us is the sum of its kernel times under the profiler. On failure there is one row with the
    error."""
    try:
        found = grouped(_profiled())
        if len(found) != len(CASES):
            raise RuntimeError(f"the profiler saw {len(found)} cases of {len(CASES)}")
    except (OSError, RuntimeError, ValueError, KeyError, subprocess.SubprocessError) as error:
        yield {**blank("counters", "all", "-"), "error": f"{type(error).__name__}: {error}"[:400]}
        return
    for (case, way, m), kernels in zip(CASES, found, strict=True):
        yield {**blank("counters", case, way, m=m, n=N, k=K), **summed(kernels)}


def summed(kernels: Sequence[dict[str, float]]) -> Row:
    """Sums the kernels of a case: bytes are added, utilizations are averaged by time."""
    ns = sum(kernel[TIME] for kernel in kernels)
    figures = {
        "kernels": len(kernels),
        "read_mb": sum(kernel[READ] for kernel in kernels) / 1e6,
        "written_mb": sum(kernel[WRITTEN] for kernel in kernels) / 1e6,
        "memory_percent": sum(kernel[MEMORY] * kernel[TIME] for kernel in kernels) / ns,
    }
    if all("tensor" in kernel for kernel in kernels):
        figures["tensor_percent"] = sum(kernel["tensor"] * kernel[TIME] for kernel in kernels) / ns
    return {"us": ns / 1e3, "figures": figures}


def grouped(table: str) -> list[list[dict[str, float]]]:
    """Returns the metrics of the kernels after each marker in the profiler's table, which has one line per kernel."""
    lines = [line for line in table.splitlines() if line.startswith('"')]
    found: list[list[dict[str, float]]] = []
    for line in csv.DictReader(lines):
        if not line.get("ID"):  # the line with the units
            continue
        if MARK in line["Kernel Name"]:
            found.append([])
        elif found:
            found[-1].append({_short(name): _number(text) for name, text in line.items() if _is_metric(name)})
    return found


def _is_metric(metric: str) -> bool:
    """True for columns with metrics; the table has others with facts about the GPU."""
    return metric in (READ, WRITTEN, TIME, MEMORY) or metric.startswith(TENSOR)


def _short(metric: str) -> str:
    return "tensor" if metric.startswith(TENSOR) else metric


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _profiled() -> str:
    """Returns the profiler's table for `main`. Raises RuntimeError if there is no profiler or it may not read counters."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("ncu is not installed")
    metrics = [READ, WRITTEN, TIME, MEMORY, *(name + TENSOR_SUFFIX for name in _known(ncu)[:1])]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "table.csv")
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
        command += ["--print-units", "base", "--metrics", ",".join(metrics), "--log-file", str(log)]
        code, said = _ended([*command, sys.executable, "-m", __name__])
        table = log.read_text() if log.exists() else ""
    if code or '"ID"' not in table:
        told = " | ".join(line for line in [*table.splitlines(), *said.splitlines()] if "==" in line or "rror" in line)
        raise RuntimeError(f"ncu: {told or 'no table'}")
    return table


def _ended(command: list[str]) -> tuple[int, str]:
    """Returns exit status and stderr of a program. An interruption kills the program and its children."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        said = process.communicate(timeout=LIMIT_S)[1]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, said


def _known(ncu: str) -> list[str]:
    """Returns the names of TENSOR that this profiler supports on the current GPU."""
    major, _ = torch.cuda.get_device_capability()
    chip = {8: "ga100", 9: "gh100"}.get(major)
    command = [ncu, "--query-metrics", *(["--chip", chip] if chip else [])]
    names = set(re.findall(r"^(\w+)", subprocess.run(command, capture_output=True, text=True, timeout=60).stdout, re.MULTILINE))
    return [name for name in TENSOR if name in names]


def main() -> None:
    """The profiled program. After a warm-up of all cases, it runs each case once, after a marker."""
    calls = [call_of(way, m) for _, way, m in CASES]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        torch.cuda._sleep(1000)
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
