"""`lowbit recommend`: prints a scheme and method for a memory budget or a bound on the divergence, with alternatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from lowbit.cli.terminal import KV, Json, check_json, check_kv, load_layers, out, write_result

if TYPE_CHECKING:
    from lowbit.recommend import Recommendation, SchemeOption

RESULT = "lowbit recommend"


def recommend(
    model: Annotated[
        str, typer.Argument(help="Folder of the 16-bit model, or its name on the hub: org/name; only its config.json is read.")
    ],
    budget_gb: Annotated[
        float | None, typer.Option("--budget-gb", help="Memory for all weights and the KV cache of --context, in 10^9 bytes.")
    ] = None,
    divergence: Annotated[
        float | None,
        typer.Option(help="Largest KL divergence from the 16-bit model in nats per token; 0.01 is about 1 % perplexity."),
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens whose KV cache has to fit in the budget too.")] = 0,
    kv: KV = "16",
    json_file: Json = None,
) -> None:
    """Recommend a scheme and a method for a memory budget or a bound on the divergence from the 16-bit model.

    The divergences were measured on small models (docs/internals/study.md); the output says which ones are estimates for this
    model. Bytes are computed from config.json, with embeddings and LM head in 16 bits; no weight is read.

    Example: lowbit recommend Llama-3-8B --budget-gb 6 --context 8192

    Example: lowbit recommend Llama-3-8B --divergence 0.05
    """
    from lowbit.sources import CONFIG, local_model

    for name, value in (("--budget-gb", budget_gb), ("--divergence", divergence)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} {value:g}: must be a finite number above 0")
    check_kv(kv)
    local_model(model, CONFIG)
    load_layers()
    from lowbit.recommend import recommend as recommendation

    check_json(json_file, RESULT)
    budget = None if budget_gb is None else 1e9 * budget_gb
    result = recommendation(model, budget_bytes=budget, divergence=divergence, context=context, kv=kv)
    if str(json_file) != "-":
        _print(result)
    write_result(json_file, RESULT, _as_json(result, budget_gb, divergence, context))


def _print(result: Recommendation) -> None:
    from lowbit.recommend import gigabytes

    def line(text: str) -> None:
        out.print(text, soft_wrap=True)

    line(
        f"{result.model}: {result.weights:,} weights, {result.linear_weights:,} of them in linear layers; "
        f"{gigabytes(result.weights_16bit_bytes)} unquantized"
    )
    line(f"\n    {result.command}\n")
    for reason in result.why:
        line(f"- {reason}")
    table = Table("", "scheme", "method", "weights", "KL", Column("KL measured on", overflow="fold"))
    for c in result.neighbours:
        mark = ">" if c == result.chosen else ""
        table.add_row(mark, c.scheme.name, c.method, gigabytes(c.bytes), f"{c.kl:.4f}", c.source())
    out.print(table)


def _as_json(result: Recommendation, budget_gb: float | None, divergence: float | None, context: int) -> dict[str, Any]:
    return {
        "model": result.model, "weights": result.weights, "linear_weights": result.linear_weights,
        "bytes_16bit": result.weights_16bit_bytes, "budget_gb": budget_gb, "divergence": divergence, "context": context,
        "kv": result.kv, "cache_bytes": result.cache_bytes, "chosen": _row(result.chosen), "command": result.command,
        "why": list(result.why),
        "neighbours": [_row(c) for c in result.neighbours],
    }  # fmt: skip


def _row(c: SchemeOption) -> dict[str, Any]:
    return {
        "scheme": c.scheme.name, "method": c.method, "bytes": c.bytes, "kl": c.kl, "measured_on": c.of,
        "measured_as": c.measured.name, "factor": c.factor,
    }  # fmt: skip
