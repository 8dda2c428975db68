"""The result file. It is rewritten completely after every row, so that a crash or Ctrl-C loses nothing, and checked when
read.
"""

from __future__ import annotations

import datetime
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.limits import Ceilings, compute_us, memory_us
from benchmarks.protocol import PROTOCOL
from benchmarks.request import GemmRequest
from lowbit.eval.results import read_json, require_keys, write_json
from lowbit.formats import parse_scheme

SCHEMA = 1
GEMM = "lowbit bench gemm"
ROW_KEYS = frozenset(
    {
        *("impl", "kernel", "scheme", "format", "granularity", "activation", "n", "k", "m", "us", "limit_us", "compute_us"),
        *("cublas_fp16_us", "rel_err", "error"),
    }
)
_QUERIED = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "power.draw", "temperature.gpu")
_LOAD_SIZE, _LOAD_PRODUCTS = 8192, 1000
"""Size and number of the fp16 products that run while nvidia-smi reads the clock: about 1.5 s on an H100 or H200."""
ROOT = Path(__file__).parent.parent


def default_path(gpu: str, today: datetime.date) -> Path:
    """Returns benchmarks/results/<gpu>/<date>-gemm.json below the current directory; "NVIDIA H200" becomes h200."""
    plain = re.sub(r"\b(nvidia|geforce)\b", "", gpu.lower())
    folder = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    return Path("benchmarks", "results", folder, f"{today.isoformat()}-gemm.json")


def commit() -> str | None:
    """Returns the commit of this checkout, with "-dirty" if tracked files differ from it.

    A file `.commit` at the root states the commit of a copy, also beside an older .git. None without both.
    """
    file = ROOT / ".commit"
    if file.is_file():
        return file.read_text().strip()
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> dict[str, Any]:
    """Returns the current GPU (name, driver, SMs, L2), its clocks and power under load, and the commit that is measured.

    What nvidia-smi does not report is None. Clocks in MHz, power in W, temperature in degrees Celsius.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    told = _under_load()
    return {
        "gpu": properties.name, "commit": commit(), "driver": told.get("driver_version"),
        "sm": 10 * properties.major + properties.minor, "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size, "memory_bytes": properties.total_memory, "clocks": "under load",
        "sm_clock_mhz": told.get("clocks.sm"), "memory_clock_mhz": told.get("clocks.mem"),
        "max_sm_clock_mhz": told.get("clocks.max.sm"), "power_limit_w": told.get("power.limit"),
        "power_w": told.get("power.draw"), "temperature_c": told.get("temperature.gpu"),
    }  # fmt: skip


def _under_load() -> dict[str, str]:
    """Returns what nvidia-smi reports while the GPU multiplies matrices."""
    x = torch.randn(_LOAD_SIZE, _LOAD_SIZE, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    for _ in range(_LOAD_PRODUCTS):
        torch.matmul(x, x, out=y)
    told = _nvidia_smi()
    torch.cuda.synchronize()
    return told


def _nvidia_smi() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader,nounits"]
    command += ["-i", str(torch.cuda.current_device())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.strip().split("\n")[0].split(", ")
    return dict(zip(_QUERIED, values, strict=False))


class Results:
    """The document of one run and the file that mirrors it."""

    def __init__(self, path: Path, request: GemmRequest, machine: dict[str, Any], versions: dict[str, str | None]) -> None:
        self.path = path
        self.ceilings: Ceilings | None = None
        self.rows: list[dict[str, Any]] = []
        self._cublas: dict[tuple[int, int, int], float] = {}
        self.document: dict[str, Any] = {
            "result": GEMM, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False,
            "request": request.as_json(), "machine": machine, "versions": versions, "skipped": [], "ceilings": None,
            "protocol": PROTOCOL, "rows": self.rows,
        }  # fmt: skip

    def set_ceilings(self, ceilings: Ceilings, stored: dict[str, Any]) -> None:
        """Sets and stores the ceilings, from which the limits of all later rows are computed."""
        self.ceilings = ceilings
        self.document["ceilings"] = stored
        self.write()

    def skip(self, impl: str, why: str) -> None:
        """Records a requested peer that is not measured, with the reason."""
        self.document["skipped"].append({"impl": impl, "reason": why})
        self.write()

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Adds a row with its limits and cuBLAS's time, writes the file and returns the row."""
        assert self.ceilings is not None, "ceilings come first"
        n, k, m = row["n"], row["k"], row["m"]
        if row["impl"] == "cublas" and row["us"] is not None:
            self._cublas[n, k, m] = row["us"]
        scheme = None if row["scheme"] == "fp16" else parse_scheme(row["scheme"])
        row = {
            **row,
            "limit_us": memory_us(scheme, n, k, m, self.ceilings),
            "compute_us": compute_us(n, k, m, self.ceilings, scheme),
            "cublas_fp16_us": self._cublas.get((n, k, m)),
        }
        self.rows.append(row)
        self.write()
        return row

    def finish(self) -> None:
        """Marks the run as complete."""
        self.document["complete"] = True
        self.write()

    def write(self) -> None:
        """Replaces the file atomically."""
        write_json(self.path, self.document)


def load(path: Path) -> dict[str, Any]:
    """Returns the document of a result file. Raises ValueError that says what is wrong with it."""
    document = read_json(path, GEMM, SCHEMA)
    require_keys(path, document, ("machine", "versions", "rows"), ROW_KEYS)
    for number, row in enumerate(document["rows"]):
        if (row["us"] is None) == (row["error"] is None):
            raise ValueError(f"{path}: row {number} has {'neither' if row['us'] is None else 'both'} a time and an error")
    if document["rows"] and not document.get("ceilings"):
        raise ValueError(f"{path}: rows without ceilings")
    return document


def load_all(paths: Sequence[Path]) -> dict[str, Any]:
    """Returns the document of several result files of one machine, such as one for each model, as if they were one run.

    Its rows are those of all files. Raises ValueError if GPU, commit, versions or protocol differ, or if a product was measured
    in two files.
    """
    documents = [load(path) for path in paths]
    first, rows = documents[0], dict[tuple[Any, ...], dict[str, Any]]()
    for path, document in zip(paths, documents, strict=True):
        for name in ("gpu", "commit"):
            own, other = document["machine"].get(name), first["machine"].get(name)
            if own != other:
                raise ValueError(f"{path}: its {name} is {own}, that of {paths[0]} is {other}; a table has one")
        for name in ("versions", "protocol"):
            if document.get(name) != first.get(name):
                raise ValueError(f"{path}: its {name} are not those of {paths[0]}; measure both in the same way")
        for row in document["rows"]:
            key = tuple(row.get(part) for part in ("impl", "scheme", "n", "k", "m", "dtype"))
            if key in rows:
                raise ValueError(
                    f"{path}: {row['impl']}, {row['scheme']}, {row['n']} x {row['k']}, M {row['m']} is in another file too"
                )
            rows[key] = row
    return {**first, "rows": list(rows.values()), "complete": all(document.get("complete") for document in documents)}
