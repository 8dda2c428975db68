"""`lowbit bench`: generation speed of a model on this machine, by scheme."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from lowbit.cli.terminal import (
    KV,
    Device,
    Json,
    check_device,
    check_json,
    check_kv,
    check_schemes,
    load_layers,
    out,
    say,
    write_result,
)


def bench(
    model: Annotated[str, typer.Argument(help="Folder of a model, or its name on the hub: org/name.")],
    schemes: Annotated[
        str,
        typer.Option(help="Comma-separated schemes to quantize a 16-bit model to while loading; none times the model alone."),
    ] = "w4a16_g64,w8a16",
    batch: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 128,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Tokens timed after the first one, sampled greedily.")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per scheme; the table shows medians.")] = 3,
    kv: KV = "16",
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Time a model on this machine: milliseconds to the first token and per further token, in 16 bits and in each scheme.

    The last row repeats the unquantized model: its difference from the first row is the drift of the machine's speed. Run
    nothing else meanwhile; on a CPU set the number of threads (OMP_NUM_THREADS). For a quantized model, give --schemes none.

    Example: lowbit bench SmolLM2-135M-Instruct --schemes w4a16_g64,w8a16,w6e3m2a16

    Example: lowbit bench Llama-3-8B-GPTQ --schemes none --batch 16 --prompt-tokens 1024
    """
    from lowbit.sources import local_model

    check_schemes(schemes)
    check_kv(kv)
    check_device(device)
    folder = local_model(model)
    load_layers()
    from lowbit.bench import Workload, measure
    from lowbit.formats import parse_scheme
    from lowbit.hardware.machine import torch_device

    check_json(json_file, "lowbit bench")
    names = [] if schemes == "none" else [parse_scheme(part).name for part in schemes.split(",") if part.strip()]
    about = measure(folder, names, Workload(batch, prompt_tokens, max_new_tokens, repeats, kv), torch_device(device), say)
    title = f"{about['model']} on {about['device']}: {batch} x {prompt_tokens} tokens, then {max_new_tokens} each"
    table = Table(
        "scheme", "x", "MB", "first token ms", "ms per token", "min to max", "tokens/s", "speed vs 16 bits", title=title
    )
    for row in about["rows"]:
        spread = f"{min(row['token_ms_runs']):.2f} to {max(row['token_ms_runs']):.2f}"
        table.add_row(
            row["scheme"] or "unquantized", row["dtype"], f"{row['bytes'] / 1e6:.0f}", f"{row['first_token_ms']:.1f}",
            f"{row['token_ms']:.2f}", spread, f"{row['tokens_per_second']:.1f}", f"{row['times_unquantized']:.2f}",
        )  # fmt: skip
    if str(json_file) != "-":
        out.print(table)
    write_result(json_file, "lowbit bench", about)
