"""`lowbit bench generate`: tokens per second of one text, by schemes, on a CPU or a GPU, in one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lowbit.hardware.machine import torch_device
from lowbit.nn import PackedWeight
from lowbit.pipeline import Pipeline, pipeline

PROMPT = "The three laws of thermodynamics say that"


def measure_generation(
    model: str | Path, schemes: Sequence[str], new_tokens: int, repeats: int, device: str | None = None
) -> dict[str, Any]:
    """A row unquantized, one for each scheme, and one unquantized again, with the machine: `new_tokens` greedily, batch 1."""
    rows = [_measure(str(model), scheme, new_tokens, repeats, device) for scheme in (None, *schemes, None)]
    base = rows[0]["tokens_per_second"]
    for row in rows:
        row["times_unquantized"] = row["tokens_per_second"] / base
    at = torch_device(device)
    where = torch.cuda.get_device_name(at) if at.type == "cuda" else f"a CPU, {torch.get_num_threads()} threads"
    return {"model": Path(model).name, "device": where, "torch": torch.__version__, "new_tokens": new_tokens, "rows": rows}


def _measure(model: str, scheme: str | None, new_tokens: int, repeats: int, device: str | None) -> dict[str, Any]:
    """One row: tokens per second of each run and their median, the type of x, bytes of all weights as they are held then."""
    pipe = pipeline(model, scheme=scheme, device=device)
    _seconds(pipe, 4)
    runs = [new_tokens / _seconds(pipe, new_tokens) for _ in range(repeats)]
    row = {
        "scheme": scheme,
        "dtype": str(pipe.model.dtype).removeprefix("torch."),
        "bytes": _bytes(pipe),
        "runs": runs,
        "tokens_per_second": statistics.median(runs),
    }
    pipe.destroy()
    gc.collect()
    return row


def _seconds(pipe: Pipeline, new_tokens: int) -> float:
    start = time.perf_counter()
    (response,) = pipe(PROMPT, max_new_tokens=new_tokens, do_sample=False, ignore_eos=True)
    assert response.generated_length == new_tokens
    return time.perf_counter() - start


def _bytes(pipe: Pipeline) -> int:
    """Bytes of the model's parameters, quantized ones in the forms in which they are held."""
    modules = [m for m in pipe.model.modules() if isinstance(m, PackedWeight)]
    quantized = {id(p) for m in modules for p in m.parameters(recurse=False)}
    return sum(p.nbytes for p in pipe.model.parameters() if id(p) not in quantized) + sum(m.weight_nbytes for m in modules)
