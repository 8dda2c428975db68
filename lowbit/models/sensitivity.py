"""The error of each scheme for each unit of layers: a forward and a backward pass through the decoder, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.target import PARTIAL
from lowbit.formats import Scheme
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.progress import Progress
from lowbit.quantize.mixed import SchemeCost, sensitivity

TOKENS = 4096
"""Tokens of calibration text that suffice (docs/internals/quantization.md)."""

SCRATCH_FILES = ("[0-9]*.safetensors", PARTIAL)
"""Patterns of the files of hidden states that `measure_sensitivity` writes."""


def measure_sensitivity(
    decoder: LayerwiseDecoder,
    linears: list[str],
    schemes: list[Scheme],
    tokens: Tensor,
    scratch: Path,
    *,
    low_rank: int = 0,
    progress: bool = False,
) -> dict[tuple[str, ...], list[SchemeCost]]:
    """Returns the cost of each of `schemes` for each unit of `linears` (full names), see `quantize.mixed`.

    A unit consists of the layers that read one input, which serving engines fuse. Evenly spaced texts of `tokens` [S, T] are
    used, about `TOKENS` tokens. The inputs of every layer are written to the folder `scratch` for the backward pass. Peak
    memory: the activations of these texts twice, and the largest of three: the embedding, the LM head with the logits of one
    text, and one decoder layer with the Fisher information of its weights, which is as large.
    """
    count = max(1, min(len(tokens), TOKENS // tokens.shape[1]))
    texts = tokens[torch.linspace(0, len(tokens) - 1, count).round().long()]
    hidden = decoder.embed(texts)
    groups: list[list[tuple[str, ...]]] = []
    bar = Progress(total=2 * len(decoder), desc="sensitivity", unit="layers", shown=progress)
    for i in range(len(decoder)):
        _write_hidden(scratch / f"{i}.safetensors", torch.cat(hidden))
        decoder.load(i)
        prefix = f"{decoder.layer_name(i)}."
        own = [name.removeprefix(prefix) for name in linears if name.startswith(prefix)]
        groups.append([group.linears for group in decoder.inputs(i, hidden[0], own)] if own else [])
        hidden = list(decoder.run(i, hidden))
        decoder.free(i)
        bar.update()
    gradients = decoder.head_gradients(hidden)
    costs: dict[tuple[str, ...], list[SchemeCost]] = {}
    for i in reversed(range(len(decoder))):
        layer = decoder.load(i)
        weights = {name: layer.get_parameter(f"{name}.weight").data for group in groups[i] for name in group}
        fisher = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        hidden = list(load_file(scratch / f"{i}.safetensors", device=str(decoder.device))["hidden"].split(1))
        hooks = {name: _adder(information, texts.numel()) for name, information in fisher.items()}
        gradients = [decoder.backward(i, x, g, hooks) for x, g in zip(hidden, gradients, strict=True)]
        for group in reversed(groups[i]):
            unit = tuple(f"{decoder.layer_name(i)}.{name}" for name in group)
            own_weights, own_fisher = [weights[name] for name in group], [fisher[name] for name in group]
            costs[unit] = sensitivity(own_weights, own_fisher, schemes, low_rank)
        decoder.free(i)
        bar.update()
    bar.close()
    return dict(reversed(costs.items()))


def _adder(information: Tensor, tokens: int) -> Callable[[Tensor, Tensor], None]:
    """Returns a function that adds to `information` [N, K] the mean over `tokens` of (g x)^2 for x [.., K] and g [.., N]."""

    def add(x: Tensor, g: Tensor) -> None:
        information.addmm_(g.reshape(-1, g.shape[-1]).square().T, x.reshape(-1, x.shape[-1]).square(), alpha=1 / tokens)

    return add


def _write_hidden(path: Path, hidden: Tensor) -> None:
    try:
        save_file({"hidden": hidden.cpu()}, str(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: the inputs of a layer cannot be written ({error}); free some space") from error
