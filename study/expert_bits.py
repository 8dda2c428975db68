"""`python -m study.expert_bits MODEL`: is an expert that is hit more worth more bits?

Rounds each layer's experts of a 16-bit model to nearest in three ways with the same total number of bits: one format for all
experts; formats chosen by the number of tokens that reach each expert; formats chosen for the smallest measured error. The
total is that of the middle format for all. For each way, prints the divergence from the 16-bit model on held-out tokens, and
how far an expert's error depends on the number of its tokens. Writes the same figures as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from lowbit.checkpoint import CheckpointReader
from lowbit.cli.terminal import say, user_errors
from lowbit.formats import Scheme, parse_scheme
from lowbit.models.calibrate import Calibration
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.expert_calibration import LayerExperts, dense_parameter
from lowbit.models.expert_names import ExpertModule, expert_modules
from lowbit.quantize.expert_bits import by_hits, expert_costs
from lowbit.quantize.mixed import SchemeCost, choose
from lowbit.quantize.rtn import rtn

Choice = dict[str, list[Scheme]]
"""Expert layer -> scheme of each expert."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
@user_errors
def main(
    model: Annotated[Path, typer.Argument(help="Folder of a 16-bit model with experts.")],
    schemes: Annotated[str, typer.Option(help="Formats, fewest bits first.")] = "w3a16_g64,w4a16_g64,w5a16_g64",
    text: Annotated[Path | None, typer.Option(help="Text to route; by default the topics of Python's help.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Pieces: half are routed, half measured.")] = 32,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = 512,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Compares one format for all experts with formats by hits and by error, at equal bits."""
    tokens = Calibration(samples, length, text=text).tokens(model)
    results = compare(model, tokens[::2], tokens[1::2], [parse_scheme(name) for name in schemes.split(",")], device)
    for name, divergence in results["divergence"].items():
        say(f"{name}: {divergence:.4f} nats per token from the 16-bit model")
    say(f"correlation of an expert's tokens with its error: {results['correlation']:.2f}")
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n")


def compare(model: Path, routed: Tensor, others: Tensor, schemes: list[Scheme], device: str) -> dict[str, Any]:
    """Returns the divergence of each choice of formats on the tokens `others` [S, T], and the layers' tokens and errors.

    routed [S, T]: the tokens that are routed to measure the errors. schemes: by growing bits; the middle one sets the budget.
    """
    decoder = LayerwiseDecoder(CheckpointReader(model), device, torch.float32)
    middle = len(schemes) // 2
    choices: dict[str, Choice] = {"one format": {}, "by hits": {}, "by error": {}}
    layers: dict[str, dict[str, list[Any]]] = {}
    hidden = decoder.embed(routed)
    for i in range(len(decoder)):
        decoder.load(i)
        own = expert_modules(decoder.layers[i])
        experts = LayerExperts.of(decoder.layers[i], [name for m in own.values() for name in (m.first, m.down)])
        for name, inputs in (decoder.observe_experts(i, hidden, list(own)) if own else {}).items():
            costs = expert_costs(experts.matrices(name), inputs, schemes)
            full = f"{decoder.layer_name(i)}.{name}"
            for kind, chosen in _choices(costs, inputs.tokens, middle).items():
                choices[kind][full] = chosen
            layers[full] = {"tokens": inputs.tokens, "error": [[cost.error for cost in each] for each in costs]}
        hidden = list(decoder.run(i, hidden))
        decoder.free(i)
    pairs = torch.tensor(
        [[t, e[middle]] for own in layers.values() for t, e in zip(own["tokens"], own["error"], strict=True)],
        dtype=torch.float64,
    )  # fmt: skip
    return {
        "schemes": [scheme.name for scheme in schemes],
        "divergence": {kind: divergence(model, choice, others, device) for kind, choice in choices.items()},
        "correlation": float(torch.corrcoef(pairs.T)[0, 1]),
        "layers": layers,
    }


def _choices(costs: list[list[SchemeCost]], tokens: list[int], middle: int) -> dict[str, list[Scheme]]:
    """Returns the schemes of one layer's experts by each rule."""
    units = {str(e): own for e, own in enumerate(costs)}
    budget = sum(own[middle].bits for own in costs)
    hits = by_hits(units, {str(e): count for e, count in enumerate(tokens)}, budget)
    least = choose(units, budget)
    return {
        "one format": [own[middle].scheme for own in costs],
        "by hits": [hits[name].scheme for name in units],
        "by error": [least[name].scheme for name in units],
    }


@torch.no_grad()
def divergence(folder: Path, choice: Choice, tokens: Tensor, device: str) -> float:
    """Returns the mean divergence in nats of a model, its experts rounded to nearest, from its 16 bits on `tokens` [S, T]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).to(device).eval()
    expected = [model(row[None].to(device)).logits.log_softmax(-1).cpu() for row in tokens]
    for name, module in expert_modules(model).items():
        for parameter in (module.first, module.down):
            _round(model.get_parameter(parameter).data, module, choice[name])
    total = 0.0
    for row, own in zip(tokens, expected, strict=True):
        actual = model(row[None].to(device)).logits.log_softmax(-1).cpu()
        total += float((own.exp() * (own - actual)).sum(-1).mean())
    return total / len(tokens)


def _round(parameter: Tensor, module: ExpertModule, schemes: list[Scheme]) -> None:
    """Rounds the matrices of all experts in place."""
    for weight, scheme in zip(parameter, schemes, strict=True):
        q = rtn(weight.T if module.transposed else weight, scheme)
        dense_parameter([q], module.transposed, weight[None])


if __name__ == "__main__":
    app()
