"""`lowbit bench MODEL`: time to the first token and milliseconds per token, in 16 bits and in each scheme, in one run."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowbit.eval.text import sample_text
from lowbit.nn import PackedExperts, PackedWeight
from lowbit.pipeline import Pipeline, pipeline


@dataclass(frozen=True)
class Workload:
    """The requests of one run, the same for every scheme: `batch` prompts of about `prompt_tokens` tokens, from each of which
    `new_tokens` are generated. `repeats`: number of runs. `kv`: format of keys and values, as in `parse_kv`."""

    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 64
    repeats: int = 3
    kv: str = "16"


def measure(
    model: str | Path, schemes: Sequence[str], load: Workload, device: torch.device, say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the machine and one row per scheme, between two rows of the unquantized model.

    Each row has medians over `load.repeats` runs: `first_token_ms` (prefill and first token of the whole batch), `token_ms`
    (one decode step) and `tokens_per_second` (whole batch, decode only). `bytes` counts all weights as they are in memory. The
    second unquantized row shows how much the machine's speed drifted. Prompts differ from run to run, so that no KV page of an
    earlier run is reused.

    Raises ValueError if `schemes` are given for a model that is already quantized.
    """
    rows = []
    for scheme in (None, *schemes, *((None,) if schemes else ())):
        say(f"measuring {scheme or 'the model as it is'}")
        rows.append(_row(str(model), scheme, load, device))
    for row in rows:
        row["times_unquantized"] = rows[0]["token_ms"] / row["token_ms"]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU, {torch.get_num_threads()} threads"
    return {
        "model": Path(model).name, "device": where, "torch": torch.__version__, "batch": load.batch,
        "prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens, "kv": load.kv, "rows": rows,
    }  # fmt: skip


def _row(model: str, scheme: str | None, load: Workload, device: torch.device) -> dict[str, Any]:
    """Returns one row. A run times 1 new token, then 1 + `new_tokens`; the difference is the time of the decode steps."""
    pipe = pipeline(model, scheme=scheme, device=device, kv=load.kv)
    if pipe.is_encoder_decoder:
        raise ValueError(f"{model}: is an encoder-decoder model; lowbit bench times causal language models only")
    prompts = _prompts(pipe, load)
    _seconds(pipe, next(prompts), 4)  # compiles and captures; not timed
    first, steps = [], []
    for _ in range(load.repeats):
        first.append(_seconds(pipe, next(prompts), 1))
        whole = _seconds(pipe, next(prompts), 1 + load.new_tokens)
        steps.append((whole - first[-1]) / load.new_tokens)
    token_s = statistics.median(steps)
    row = {
        "scheme": scheme,
        "dtype": str(pipe.model.dtype).removeprefix("torch."),
        "bytes": _bytes(pipe),
        "first_token_ms": 1e3 * statistics.median(first),
        "token_ms": 1e3 * token_s,
        "token_ms_runs": [1e3 * step for step in steps],
        "tokens_per_second": load.batch / token_s,
    }
    pipe.destroy()
    gc.collect()
    return row


def _prompts(pipe: Pipeline, load: Workload) -> Iterator[list[str]]:
    """Yields batches of prompts: windows of Newton's Opticks at seeded random offsets, the same for every scheme."""
    ids = pipe.tokenizer(sample_text()).input_ids
    rng = random.Random(0)
    while True:
        starts = [rng.randrange(max(1, len(ids) - load.prompt_tokens)) for _ in range(load.batch)]
        yield [pipe.tokenizer.decode(ids[at : at + load.prompt_tokens], skip_special_tokens=True) for at in starts]


def _seconds(pipe: Pipeline, prompts: list[str], new_tokens: int) -> float:
    """Returns the seconds of one call. Raises RuntimeError if a response is shorter than requested."""
    start = time.perf_counter()
    responses = pipe(prompts, max_new_tokens=new_tokens, do_sample=False, ignore_eos=True)
    seconds = time.perf_counter() - start
    if any(response.generated_length != new_tokens for response in responses):
        raise RuntimeError(f"requested {new_tokens} tokens each, got {[r.generated_length for r in responses]}")
    return seconds


def _bytes(pipe: Pipeline) -> int:
    """Returns the bytes of all parameters; quantized weights count in their packed form."""
    modules = [m for m in pipe.model.modules() if isinstance(m, (PackedWeight, PackedExperts))]
    quantized = {id(p) for m in modules for p in m.parameters(recurse=False)}
    return sum(p.nbytes for p in pipe.model.parameters() if id(p) not in quantized) + sum(m.weight_nbytes for m in modules)
