"""`python -m benchmarks load`: time and peak memory of loading a model from the page cache."""

from __future__ import annotations

import datetime
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import results
from benchmarks.language_model import meta_model
from benchmarks.load_report import LOAD, SCHEMA
from benchmarks.synthetic import write_checkpoint
from lowbit.checkpoint.target import check_file
from lowbit.eval.results import machine, versions, write_json
from lowbit.models.hf import GPU_LOADING_OVERHEAD_BYTES, LOADING_OVERHEAD_BYTES, give_back_freed_memory
from lowbit.models.load import load_causal
from lowbit.nn import PackedWeight, QuantLinear
from lowbit.tune.timing import failures, reason

KINDS = ("16-bit", "lowbit", "gptq", "awq", "compressed-tensors")
"""Kinds of measured files. 16-bit files are loaded in every scheme, the others in their own scheme."""

STORED = "w4a16_g128"
"""The scheme of the already quantized files."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

PROTOCOL = (
    "Files of Gaussian weights in the shape of the model, read once before so that they lie in the page cache; "
    "page_cache_bytes_per_s is a second reading by one thread, to_device_bytes_per_s a copy of 256 MB from pageable memory. "
    "seconds: of each repetition, from the path of the folder to a model whose quantized layers are all in the form that their "
    "kernels read, the device idle; the fastest counts. gb_per_s: bytes of the files by that time. model_bytes: all tensors of "
    "the loaded model. peak_bytes: the most that torch had allocated on the GPU above what there was before. bound_bytes: "
    "model_bytes, the largest layer in 16 bits (layer_bytes) and a constant (models/hf.py). peak_host_bytes: the most "
    "anonymous memory of the process above what there was before, looked at every 2 ms, without the page cache. "
    "slow: layers that no kernel takes."
)

ProgressCallback = Callable[[str, int, int], None]
"""Called with (description, done, total). The numbers count bytes while files are written, and repetitions while a load is
timed."""


@dataclass(frozen=True)
class LoadConfig:
    """Configuration of a run."""

    model: str
    kinds: tuple[str, ...]
    schemes: tuple[str | None, ...]
    head: str | None
    dtype: str
    device: torch.device
    layers: int | None = None
    repeats: int = 2
    folder: Path | None = None


def run(config: LoadConfig, path: Path | None, progress: ProgressCallback) -> tuple[Path, dict[str, Any]]:
    """Measures everything and writes the result file after each row. Returns its path and document. The checkpoint files of
    only one kind exist at a time; they are deleted after their rows. Raises CheckpointError if the disk has too little space
    for them."""
    on_gpu = config.device.type == "cuda"
    about = (results.machine() if on_gpu else machine()) | {"device": _name_of(config.device)}
    named = results.default_path(about["device"], datetime.date.today())
    path = path or named.with_name(f"{datetime.date.today().isoformat()}-load.json")
    check_file(path, LOAD)
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "result": LOAD, "schema": SCHEMA, "date": datetime.date.today().isoformat(), "complete": False, "machine": about,
        "versions": versions(("transformers", "safetensors")), "protocol": PROTOCOL, "rows": rows,
        "to_device_bytes_per_s": _copy_speed(config.device) if on_gpu else None,
    }  # fmt: skip
    model = meta_model(config.model, DTYPES[config.dtype], config.layers)
    for kind in config.kinds:
        with tempfile.TemporaryDirectory(prefix="lowbit-bench-load-", dir=config.folder) as made:
            folder = Path(made, "model")

            def writing(written: int, total: int, kind: str = kind) -> None:
                progress(f"writing {kind} files", written, total)

            write_checkpoint(folder, model, kind, STORED, config.device, writing)
            _read(folder)
            document["page_cache_bytes_per_s"] = _read(folder)
            for row in _rows_of(folder, kind, model.config.num_hidden_layers, config, progress):
                rows.append(row)
                write_json(path, document)
    document["complete"] = True
    write_json(path, document)
    return path, document


def _rows_of(folder: Path, kind: str, layers: int, config: LoadConfig, progress: ProgressCallback) -> Iterator[dict[str, Any]]:
    """Yields a row for each scheme into which files of one kind are loaded; a failed row has its reason."""
    source = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    nothing = dict.fromkeys(
        ("gb_per_s", "model_bytes", "layer_bytes", "bound_bytes", "peak_bytes", "peak_host_bytes", "slow", "error")
    )
    for scheme in config.schemes if kind == "16-bit" else (STORED,):
        row: dict[str, Any] = {
            "model": config.model, "layers": layers, "files": kind, "scheme": scheme, "head": config.head if scheme else None,
            "dtype": config.dtype, "device": str(config.device), "source_bytes": source, "seconds": [], **nothing,
        }  # fmt: skip
        try:
            for repeat in range(config.repeats):
                progress(f"loading {kind} files, {scheme or 'as they are'}", repeat, config.repeats)
                row |= _measured(folder, scheme if kind == "16-bit" else None, row["head"], config, row["seconds"])
            row["gb_per_s"] = source / min(row["seconds"]) / 1e9
        except failures() as error:
            row["error"] = reason(error)
        yield row


def _measured(folder: Path, scheme: str | None, head: str | None, config: LoadConfig, seconds: list[float]) -> dict[str, Any]:
    """Loads once and appends the time to `seconds`. Returns the bytes of the model and the peaks."""
    device = config.device
    on_gpu = device.type == "cuda"
    _free(on_gpu)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with _HostPeak() as host:
        start = time.perf_counter()
        model = load_causal(folder, scheme=scheme, head=head, device=device, dtype=DTYPES[config.dtype])
        layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
        slow = [layer for layer in layers if layer.prepare(model.dtype)]
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    held, layer = tensor_bytes(model), _largest_layer_bytes(model)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    del model, layers
    _free(on_gpu)
    constant = GPU_LOADING_OVERHEAD_BYTES if on_gpu else LOADING_OVERHEAD_BYTES
    return {
        "model_bytes": held, "layer_bytes": layer, "bound_bytes": held + layer + constant, "peak_bytes": peak,
        "peak_host_bytes": host.peak, "slow": len(slow),
    }  # fmt: skip


def tensor_bytes(model: nn.Module) -> int:
    """Returns the bytes of all tensors of a model in their current forms; shared memory counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    packed = [module for module in model.modules() if isinstance(module, PackedWeight)]
    return sum(storages.values()) + sum(module.cpu_weight.nbytes for module in packed if module.cpu_weight is not None)


def _largest_layer_bytes(model: nn.Module) -> int:
    """Returns the bytes that the largest quantized layer has in 16 bits; 0 if there is none."""
    return max((2 * m.shape[0] * m.shape[1] for m in model.modules() if isinstance(m, PackedWeight)), default=0)


def _read(folder: Path) -> float:
    """Reads all tensor files once; returns the bytes per second."""
    count, start = 0, time.perf_counter()
    buffer = bytearray(1 << 24)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                count += read
    return count / (time.perf_counter() - start)


def _copy_speed(device: torch.device) -> float:
    """Returns the bytes per second of a copy from pageable memory, the fastest of three."""
    source = torch.ones(256 << 20, dtype=torch.uint8)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        source.to(device)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return source.nbytes / min(seconds)


def _free(on_gpu: bool) -> None:
    gc.collect()
    give_back_freed_memory()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class _HostPeak:
    """The peak of anonymous memory that this process adds inside a `with` block. `peak` is None if the system does not report
    it (/proc/self/status).
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> _HostPeak:
        self._base = _anonymous_bytes()
        if self._base is not None:
            self.peak = 0
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _poll(self) -> None:
        assert self._base is not None
        while not self._done.wait(0.002):
            self.peak = max(self.peak or 0, (_anonymous_bytes() or 0) - self._base)


def _anonymous_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else None
