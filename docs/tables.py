"""Writes the generated tables of README.md and docs/speed.md: `python docs/tables.py`, from any folder. Needs no GPU.

The support matrix comes from ops/table.py, the times from the newest files of `python -m benchmarks gemm` on each GPU. Files of
one day, such as one for each model, are one run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lowbit.eval.report import replace_block
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.ops.table import Kernel, Problem, choose

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCHEMES = (
    "w4a16_g128", "w4a16_g128_z", "w4a16_g64_fz", "w2a16_g32", "w3a16_g128", "w8a16", "w6e3m2a16", "w5e2m2a16", "w4e2m1a16_g16",
    "w8e4m3a16", "w8a8", "w8a8_az", "w4a8_g128", "fp8", "fp8_dynamic", "fp8_block", "w6e3m2a8e4m3",
)  # fmt: skip
"""Schemes that the table names; those with equal columns share a row."""
GPUS = {"sm_80, 86 (A100, A10)": (80, 86), "sm_89 (L40S)": (89,), "sm_90 (H100, H200)": (90,), "sm_100, 120 (B200)": (100, 120)}
TOKENS = (1, 64, 4096)


def kernels(scheme: str, sm: int | None) -> list[Kernel]:
    """The kernels that multiply an 8192 x 8192 weight on a GPU (None: on a CPU) by 1, 64 and 4096 tokens in bf16."""
    machine = None if sm is None else typical_machine(sm)
    problems = (
        Problem(parse_scheme(scheme), m, 8192, 8192, torch.bfloat16, machine, decode_bytes=0 if sm else 2) for m in TOKENS
    )
    return [choose.__wrapped__(problem) for problem in problems]


def on_gpu(scheme: str, sms: tuple[int, ...]) -> str:
    """ "packed" where kernels read packed weights at every number of tokens, else "slow"."""
    return "slow" if any(kernel.is_slow for sm in sms for kernel in kernels(scheme, sm)) else "packed"


def on_cpu(scheme: str) -> str:
    """What a CPU with AVX2, AVX-512 and VNNI does with a weight at one token, by the form that its kernel reads."""
    with patch("lowbit.kernels.cpu.torch_int8.sums_are_exact", lambda: True):
        form = kernels(scheme, None)[0].form
    return {"int4": "packed", "int8": "packed", "decoded": "dequantized once"}.get(form, "slow")


def cells(scheme: str) -> list[str]:
    """The columns of a scheme: each GPU generation, CPU, decode engine, vLLM."""
    gpus = [on_gpu(scheme, sms) for sms in GPUS.values()]
    fused = "fused" if parse_scheme(scheme).activation is None else "yes"
    return [*gpus, on_cpu(scheme), fused if "packed" in gpus else "slow", "yes" if "packed" in gpus else "no"]


def matrix() -> str:
    """The table in Markdown."""
    head = ("scheme", *GPUS, "CPU", "decode engine", "vLLM plug-in")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for scheme in SCHEMES:
        rows.setdefault(tuple(cells(scheme)), []).append(f"`{scheme}`")
    lines += [f"| {', '.join(names)} | {' | '.join(columns)} |" for columns, names in rows.items()]
    return "\n".join(lines) + "\n"


def newest_runs(results: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The newest complete `gemm` run of each GPU: its date and document, by the GPU's name, the GPU of the newest run first."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.results import load_all

    runs = {}
    for folder in sorted(results.iterdir()):
        files = [path for path in folder.glob("*-gemm*.json") if path.stem[10:].split("-")[1] == "gemm"]
        days = sorted({path.name[:10] for path in files}, reverse=True)
        for day in days:
            document = load_all(sorted(path for path in files if path.name.startswith(day)))
            if document["complete"]:
                runs[document["machine"]["gpu"]] = (day, document)
                break
    return dict(sorted(runs.items(), key=lambda run: run[1][0], reverse=True))


def speeds(results: Path = RESULTS) -> str:
    """For each GPU, where a rival is ahead, then a table per weight: formats down, tokens across, times as fast as cuBLAS in
    fp16 and, after a stroke, as the fastest rival that was measured."""
    runs = newest_runs(results)
    parts = [part for gpu, (day, document) in runs.items() for part in _of_one_gpu(gpu, day, document, named=len(runs) > 1)]
    return "\n\n".join(parts) + "\n"


def _of_one_gpu(gpu: str, day: str, document: dict[str, Any], named: bool) -> list[str]:
    own: dict[tuple[Any, ...], dict[str, Any]] = {}
    rivals: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in document["rows"]:
        key = row["n"], row["k"], row["scheme"], row["m"]
        if row["us"] is None or row["impl"] == "cublas":
            continue
        held = own if row["impl"] == "lowbit" else rivals
        if key not in held or row["us"] < held[key]["us"]:
            held[key] = row
    parts = [f"{gpu}, {day}:"] if named else []
    ahead = [key for key, row in rivals.items() if key in own and row["us"] < own[key]["us"]]
    if rivals:
        cases = []
        for key in ahead:
            (n, k, scheme, m), rival = key, rivals[key]
            cases.append(f"`{scheme}` {n} x {k} M {m} ({rival['impl']}, {own[key]['us'] / rival['us']:.2f})")
        count = f"A rival is ahead in {len(ahead)} of {len(rivals.keys() & own.keys())} products"
        parts.append(f"{count}{': ' if ahead else ''}{', '.join(cases)}.")
    tokens = sorted({m for *_, m in own})
    for n, k in dict.fromkeys((n, k) for n, k, *_ in own):
        lines = [f"| N = {n}, K = {k} | {' | '.join(f'M {m}' for m in tokens)} |", "|---" + "|---:" * len(tokens) + "|"]
        for scheme in dict.fromkeys(scheme for _, _, scheme, _ in own):
            columns = (_times(own.get((n, k, scheme, m)), rivals.get((n, k, scheme, m))) for m in tokens)
            lines.append(f"| `{scheme}` | {' | '.join(columns)} |")
        parts.append("\n".join(lines))
    return parts


def _times(own: dict[str, Any] | None, rival: dict[str, Any] | None) -> str:
    if own is None:
        return ""
    beside = "" if rival is None else f" / {rival['us'] / own['us']:.2f}"
    return f"{own['cublas_fp16_us'] / own['us']:.2f}{beside}"


BLOCKS = {("README.md", "support"): matrix, ("docs/speed.md", "speed:gemm"): speeds}

if __name__ == "__main__":
    for (page, mark), make in BLOCKS.items():
        replace_block(ROOT / page, mark, make())
