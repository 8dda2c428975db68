"""What each scheme would cost each layer of a model in quality: once through the decoder and once back, a layer at a time."""

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
"""Of the calibration text, enough: docs/quantize.md has the figures."""

SCRATCH_FILES = ("[0-9]*.safetensors", PARTIAL)
"""Names of the files of hidden states that `measure_sensitivity` leaves in its folder."""


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
    """For each unit of `linears` (full names), layers that read one input and that serving engines therefore fuse, what each of
    `schemes` costs: see `quantize.mixed`. Of the texts `tokens` [S, T] so many are used, evenly spread, as make about `TOKENS`.

    The inputs of every layer go to files in the folder `scratch` and are read on the way back. Memory: the embedding, the LM
    head with the logits of one text, or one decoder layer and as much again for the Fisher information of its weights, and
    the activations of these texts twice.
    """
    count = max(1, min(len(tokens), TOKENS // tokens.shape[1]))
    texts = tokens[torch.linspace(0, len(tokens) - 1, count).round().long()]
    hidden = decoder.embed(texts)
    groups: list[list[tuple[str, ...]]] = []
    bar = Progress(total=2 * len(decoder), desc="sensitivity", unit="layers", shown=progress)
    for i in range(len(decoder)):
        _keep(scratch / f"{i}.safetensors", torch.cat(hidden))
        decoder.load(i)
        prefix = f"{decoder.layer_name(i)}."
        own = [name.removeprefix(prefix) for name in linears if name.startswith(prefix)]
        groups.append([group.linears for group in decoder.inputs(i, hidden[0], own)] if own else [])
        hidden = list(decoder.run(i, hidden))
        decoder.free(i)
        bar.update()
    slopes = decoder.head_gradients(hidden)
    found: dict[tuple[str, ...], list[SchemeCost]] = {}
    for i in reversed(range(len(decoder))):
        layer = decoder.load(i)
        weights = {name: layer.get_parameter(f"{name}.weight").data for group in groups[i] for name in group}
        fisher = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        hidden = list(load_file(scratch / f"{i}.safetensors", device=str(decoder.device))["hidden"].split(1))
        watch = {name: _adder(information, texts.numel()) for name, information in fisher.items()}
        slopes = [decoder.backward(i, x, slope, watch) for x, slope in zip(hidden, slopes, strict=True)]
        for group in reversed(groups[i]):
            of_unit = [weights[name] for name in group], [fisher[name] for name in group]
            found[tuple(f"{decoder.layer_name(i)}.{name}" for name in group)] = sensitivity(*of_unit, schemes, low_rank)
        decoder.free(i)
        bar.update()
    bar.close()
    return dict(reversed(found.items()))


def _adder(information: Tensor, tokens: int) -> Callable[[Tensor, Tensor], None]:
    """Adds the share of what a layer read, x [.., K], and of the gradients g [.., N] at what it put out, of `tokens` in all."""

    def add(x: Tensor, g: Tensor) -> None:
        information.addmm_(g.reshape(-1, g.shape[-1]).square().T, x.reshape(-1, x.shape[-1]).square(), alpha=1 / tokens)

    return add


def _keep(path: Path, hidden: Tensor) -> None:
    try:
        save_file({"hidden": hidden.cpu()}, str(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: the inputs of a layer cannot be written ({error}); free some space") from error
