"""`python -m benchmarks start`: seconds from `lowbit serve MODEL` to the first token, by phase."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import results
from benchmarks.language_model import meta_model
from benchmarks.start_report import SCHEMA, START
from benchmarks.synthetic import write_checkpoint
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import machine, versions, write_json
from lowbit.tune.timing import reason

WAYS = ("cold", "warm", "kernels")
"""The cache of kernels is empty; it is that of the cold start; it is empty, but there is a file of `lowbit compile`, and no C
compiler."""
CHUNK = 1 << 26
READY = re.compile(r"^serving .* at (http://\S+)/v1,")
STARTED = re.compile(r"^started in [\d.]+ s: (.*)$")

PROTOCOL = (
    "Each row is one process of `lowbit serve FOLDER --port 0` on `cores` cores, with a cache folder of its own: empty (cold), "
    "as the cold start on as many cores left it (warm), or empty with a file of `lowbit compile FOLDER` and a PATH without a C "
    "compiler (kernels). ready_s and first_token_s: from the start of the process to the line that it serves, and to the first "
    "event of a streamed completion that is asked for then. phases: the seconds that the process prints. The files have "
    "Gaussian weights in the shape of the model and were read just before, so that they lie in the page cache; read_s: that "
    "reading, by one thread. compile_s: of `lowbit compile` on all cores."
)


@dataclass(frozen=True)
class StartConfig:
    """`folder`: a checkpoint to serve; None: `shape` with random weights in `scheme`, which is deleted at the end. `limit`:
    seconds of a start after which it is ended."""

    folder: Path | None
    shape: str = "Llama-3-8B"
    scheme: str = "w4a16_g128"
    layers: int | None = None
    ways: tuple[str, ...] = WAYS
    cores: tuple[int, ...] = (16, 2)
    device: torch.device = torch.device("cuda")
    limit: float = 600.0


def run(config: StartConfig, path: Path | None, progress: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Measures all starts and writes the result file after each. Returns its path and document."""
    if "warm" in config.ways and "cold" not in config.ways and config.device.type == "cuda":
        raise ValueError("a warm start finds the kernels of a cold one: --ways cold,warm")
    on_gpu = config.device.type == "cuda"
    about = results.machine() if on_gpu else machine() | {"gpu": "cpu"}
    today = datetime.date.today()
    path = path or results.default_path(about["gpu"], today).with_name(f"{today.isoformat()}-start.json")
    check_file(path, START)
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "result": START, "schema": SCHEMA, "date": today.isoformat(), "complete": False, "machine": about,
        "versions": versions(("transformers",)), "protocol": PROTOCOL, "rows": rows,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="lowbit-bench-start-") as scratch:
        folder = config.folder or _made(config, Path(scratch, "model"), progress)
        compiled: tuple[Path | None, dict[str, Any]] = (None, {})
        if "kernels" in config.ways and on_gpu:
            compiled = _compiled(folder, Path(scratch), config.limit, progress)
        for cores in config.cores:
            cache = Path(scratch, f"cache-{cores}")
            for way in sorted(config.ways, key=WAYS.index):
                row: dict[str, Any] = {
                    "model": config.shape if config.folder is None else folder.name, "layers": config.layers,
                    "scheme": config.scheme if config.folder is None else None, "device": str(config.device), "way": way,
                    "cores": cores, "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
                    "ready_s": None, "first_token_s": None, "phases": {}, "read_s": _read(folder), "error": None,
                }  # fmt: skip
                progress(f"{way} start on {cores} cores")
                if way == "kernels":
                    row |= compiled[1]
                    cache = Path(scratch, f"empty-{cores}")
                if way != "kernels" or compiled[0] is not None:
                    if way == "cold":
                        shutil.rmtree(cache, ignore_errors=True)
                    try:
                        row |= _start(folder, cores, cache, compiled[0] if way == "kernels" else None, config)
                    except (RuntimeError, OSError, ValueError, LookupError, httpx.HTTPError) as error:
                        row["error"] = reason(error)
                elif row["error"] is None:
                    row["error"] = "a CPU has no kernels to compile ahead"
                rows.append(row)
                write_json(path, document)
    document["complete"] = True
    write_json(path, document)
    return path, document


def _made(config: StartConfig, folder: Path, progress: Callable[[str], None]) -> Path:
    """Writes the checkpoint of a shape, with a tokenizer, and returns its folder."""
    from benchmarks.serve_host import random_tokenizer

    progress(f"writing {config.shape} in {config.scheme}")
    model = meta_model(config.shape, torch.float16, config.layers)
    write_checkpoint(folder, model, "lowbit", config.scheme, config.device)
    random_tokenizer(model.config.vocab_size).save_pretrained(folder)
    if config.device.type == "cuda":
        torch.cuda.empty_cache()
    return folder


def _compiled(
    folder: Path, scratch: Path, limit: float, progress: Callable[[str], None]
) -> tuple[Path | None, dict[str, Any]]:  # fmt: skip
    """Returns the kernels file of the model for this machine's GPU, and what its rows say of its making."""
    progress("compiling kernels ahead")
    file, begun = scratch / "kernels.lowbit", time.perf_counter()
    command = [sys.executable, "-m", "lowbit", "compile", str(folder), "-o", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return None, {"error": f"lowbit compile did not end within {limit:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        return None, {"error": f"lowbit compile: {last[0]}"}
    return file, {"compile_s": time.perf_counter() - begun, "kernels_bytes": file.stat().st_size}


def _read(folder: Path) -> float:
    """Returns the seconds that reading all weights takes."""
    begun, buffer = time.perf_counter(), bytearray(CHUNK)
    for file in folder.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - begun


def _start(folder: Path, cores: int, cache: Path, kernels: Path | None, config: StartConfig) -> dict[str, Any]:
    """Starts a server, asks for a completion, stops it. Returns the columns of the row."""
    command = [sys.executable, "-m", "lowbit", "serve", str(folder), "--port", "0", "--device", str(config.device)]
    variables = [f"TRITON_CACHE_DIR={cache}", "PYTHONUNBUFFERED=1", "NO_COLOR=1"]
    if kernels is not None:
        command += ["--kernels", str(kernels)]
        variables = ["-u", "CC", *variables, "PATH=/nonexistent"]
    command = ["env", *variables, *command]
    begun = time.monotonic()
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    if len(allowed) < cores:
        raise RuntimeError(f"this machine has {len(allowed)} cores")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )  # fmt: skip
    try:
        said: list[str] = []
        for line in _lines(process, begun + config.limit):
            said.append(line)
            if match := READY.match(line):
                ready = time.monotonic() - begun
                first = _first_token(match[1], begun + config.limit) - begun
                return {"ready_s": ready, "first_token_s": first, "phases": phases(said)}
        raise RuntimeError(f"the server ended with {process.wait()}: {' '.join(said[-3:])[-300:]}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lines(process: subprocess.Popen[bytes], end: float) -> Iterator[str]:
    """Yields the lines of a process as they come. Raises TimeoutError at `end`."""
    assert process.stdout is not None
    output, part = process.stdout.fileno(), b""
    os.set_blocking(output, False)
    while True:
        ended = process.poll() is not None
        with contextlib.suppress(BlockingIOError):
            while read := os.read(output, 1 << 16):
                part += read
        *lines, part = part.replace(b"\r", b"\n").split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if ended:
            return
        if time.monotonic() > end:
            raise TimeoutError("the server did not start within its limit")
        time.sleep(0.01)


def phases(lines: list[str]) -> dict[str, float]:
    """Returns the seconds by phase that a server has printed."""
    found = [match[1] for line in lines if (match := STARTED.match(line))]
    pairs = (part.rsplit(" ", 1) for part in found[-1].split(", ")) if found else ()
    return {phase: float(seconds) for phase, seconds in pairs}


def _first_token(url: str, end: float) -> float:
    """Returns the time at which the first event of a streamed completion arrived."""
    with httpx.Client(timeout=max(end - time.monotonic(), 1.0)) as client:
        name = client.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": "a b c", "max_tokens": 2, "stream": True, "temperature": 0}
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(str(event["error"]))
                    return time.monotonic()
    raise RuntimeError(f"{url}: no event came, status {response.status_code}")
