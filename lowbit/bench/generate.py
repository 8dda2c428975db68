"""`lowbit bench generate`: tokens per second of one text, by schemes, on a CPU or a GPU, in one run."""

from __future__ import annotations

import gc
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from lowbit.formats import parse_scheme
from lowbit.nn import PackedWeight
from lowbit.pipeline import Pipeline, pipeline

PROMPT = "The three laws of thermodynamics say that"


def bench_generate(
    model: Annotated[Path, typer.Argument(help="Folder of a model in 16 bits.", exists=True, file_okay=False)],
    schemes: Annotated[str, typer.Option(help="Schemes to quantize to while loading, with commas.")] = "w4a16_g64,w8a16",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate, greedily.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows there too.")] = None,
) -> None:
    """Time greedy generation of one text (batch 1) by `lowbit.pipeline`: unquantized, with each scheme, unquantized again.

    The second unquantized run shows how far the machine's speed moved. Tokens per second include the prompt of some tokens.
    Keep the machine quiet, and say how many threads torch may use (OMP_NUM_THREADS).

    Example: lowbit bench generate ./model --schemes w4a16_g32,w4a16_g64,w8a16,w6e3m2a16
    """
    names = [parse_scheme(part).name for part in schemes.split(",") if part.strip()]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows = [_measure(str(model), scheme, new_tokens, repeats) for scheme in (None, *names, None)]
    base = rows[0]["tokens_per_second"]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"a CPU, {torch.get_num_threads()} threads"
    table = Table("scheme", "x", "MB", "tokens/s", "least and most", "times unquantized", title=f"{model.name} on {where}")
    for row in rows:
        row["times_unquantized"] = row["tokens_per_second"] / base
        spread = f"{min(row['runs']):.1f} to {max(row['runs']):.1f}"
        columns = (
            row["scheme"] or "none",
            row["dtype"],
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['tokens_per_second']:.1f}",
            spread,
        )
        table.add_row(*columns, f"{row['times_unquantized']:.2f}")
    Console().print(table)
    if json_file is not None:
        about = {"model": model.name, "device": where, "torch": torch.__version__, "new_tokens": new_tokens, "rows": rows}
        json_file.write_text(json.dumps(about, indent=1) + "\n")


def _measure(model: str, scheme: str | None, new_tokens: int, repeats: int) -> dict[str, Any]:
    """One row: tokens per second of each run and their median, the type of x, bytes of all weights as they are held then."""
    pipe = pipeline(model, quantization_mode=scheme)
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
