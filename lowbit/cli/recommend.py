"""`lowbit recommend`: the scheme and method for a memory budget or a bound on divergence, with its neighbours and reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from lowbit.cli.terminal import Json, check_json, load_layers, out, write_result

if TYPE_CHECKING:
    from lowbit.recommend import Candidate, Recommendation

RESULT = "lowbit recommend"


def recommend(
    model: Annotated[
        str, typer.Argument(help="Folder of the 16-bit model, or its name on the hub: org/name; only its config.json is read.")
    ],
    budget_gb: Annotated[
        float | None, typer.Option("--budget-gb", help="Memory for all weights, and the context's, in GB of 10^9 bytes.")
    ] = None,
    divergence: Annotated[
        float | None,
        typer.Option(help="Largest divergence (KL) from the 16-bit model, nats a token: 0.01 is about 1 % perplexity."),
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens whose keys and values have to fit in the budget too.")] = 0,
    json_file: Json = None,
) -> None:
    """Which scheme and method to quantize a model with, for a memory budget or a bound on what it may lose.

    Divergences are those that the study measured on small models (docs/internals/study.md); what is carried over to this one
    is said. Bytes are worked out from config.json, embeddings and LM head in 16 bits included; no weight is read.

    Example: lowbit recommend Llama-3-8B --budget-gb 6 --context 8192

    Example: lowbit recommend Llama-3-8B --divergence 0.05
    """
    from lowbit.sources import CONFIG, local_model

    for name, value in (("--budget-gb", budget_gb), ("--divergence", divergence)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} is a number above 0, got {value:g}")
    local_model(model, CONFIG)
    load_layers()
    from lowbit.recommend import recommend as find

    check_json(json_file, RESULT)
    found = find(model, budget_bytes=None if budget_gb is None else 1e9 * budget_gb, divergence=divergence, context=context)
    if str(json_file) != "-":
        _print(found)
    write_result(json_file, RESULT, _stated(found, budget_gb, divergence, context))


def _print(found: Recommendation) -> None:
    from lowbit.recommend import gigabytes

    def line(text: str) -> None:
        out.print(text, soft_wrap=True)

    line(
        f"{found.model}: {found.weights:,} weights, {found.linear_weights:,} of them in linear layers; "
        f"{gigabytes(found.weights_16bit_bytes)} as it is"
    )
    line(f"\n    {found.command}\n")
    for reason in found.why:
        line(f"- {reason}")
    table = Table("", "scheme", "method", "weights", "KL", Column("KL measured on", overflow="fold"))
    for c in found.neighbours:
        mark = ">" if c == found.chosen else ""
        table.add_row(mark, c.scheme.name, c.method, gigabytes(c.bytes), f"{c.kl:.4f}", c.source())
    out.print(table)


def _stated(found: Recommendation, budget_gb: float | None, divergence: float | None, context: int) -> dict[str, Any]:
    return {
        "model": found.model, "weights": found.weights, "linear_weights": found.linear_weights,
        "bytes_16bit": found.weights_16bit_bytes, "budget_gb": budget_gb, "divergence": divergence, "context": context,
        "cache_bytes": found.cache_bytes, "chosen": _row(found.chosen), "command": found.command, "why": list(found.why),
        "neighbours": [_row(c) for c in found.neighbours],
    }  # fmt: skip


def _row(c: Candidate) -> dict[str, Any]:
    return {
        "scheme": c.scheme.name, "method": c.method, "bytes": c.bytes, "kl": c.kl, "measured_on": c.of,
        "measured_as": c.measured.name, "factor": c.factor,
    }  # fmt: skip
