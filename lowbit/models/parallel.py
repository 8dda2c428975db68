"""Checks which layers of a quantized model Transformers' tensor parallelism can split.

A layer split by output channels ("colwise") has rows of its tensors on each GPU, one split by input channels ("rowwise")
columns; one-dimensional tensors are split in both cases. Each rank checks the whole model from the same files before any
communication, so either all ranks raise or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowbit.checkpoint import LayerEntry, Manifest
from lowbit.formats import PerChannel, PerGroup

_BY_OUTPUT = ("colwise", "colwise_rep", "colwise_gather_output")
_BY_INPUT = ("rowwise", "rowwise_rep", "rowwise_split_input")


def parallel_refusals(model: nn.Module, manifest: Manifest | None) -> tuple[str, ...]:
    """Returns why a quantized model cannot be split over several GPUs as its config states; empty if it can.

    manifest: its quantized layers; None for a model that is quantized, or imported from another tool's files, while loading.
    """
    distributed: Any = getattr(model.config, "distributed_config", None)
    ranks = 1 if distributed is None else distributed.tp_size or 1
    others = {name: getattr(distributed, f"{name}_size", None) or 1 for name in ("pp", "ep", "fsdp")}
    if max(ranks, *others.values()) == 1:
        return ()
    if manifest is None:
        return (
            "quantizing while loading works on one GPU, and so does loading other tools' files; here the model is split over "
            "several; write a lowbit checkpoint first (lowbit quantize, lowbit convert), then load that",
        )
    for name, size in others.items():
        if size > 1:
            return (f"{name}_size is {size}; quantized models are split by tensor parallelism (tp_size) only",)
    if manifest.tied:
        follower, owner = next(iter(manifest.tied.items()))
        return (f"{follower} shares the quantized weights of {owner}, which are not split over GPUs; load on one",)
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    override = distributed.tp_plan
    if isinstance(override, dict):
        plan = plan | override if override else {}
    reasons: dict[str, list[str]] = {}
    if experts := [name for name, entry in manifest.layers.items() if entry.experts]:
        reasons["the weights of quantized experts are not split over GPUs; load the model on one"] = experts
    for name, entry in manifest.layers.items():
        for reason in _layer_refusals(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)), entry, ranks):
            reasons.setdefault(reason, []).append(name)
    return tuple(f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {why}" for why, names in reasons.items())


def _layer_refusals(style: str | None, entry: LayerEntry, ranks: int) -> Iterator[str]:
    """Yields why a layer cannot be split over `ranks` in this style."""
    if style is None or style in ("replicate", "replicated_with_grad_allreduce"):
        return
    n, k = entry.shape
    scheme = entry.scheme
    if style not in (*_BY_OUTPUT, *_BY_INPUT):
        yield f"quantized layers are split by {', '.join((*_BY_OUTPUT, *_BY_INPUT))}, not by {style}"
        return
    if entry.input_parts or entry.low_rank:
        yield "an order, factors of the input, its rotation, an activation scale and a low-rank correction are not split"
    if not isinstance(scheme.granularity, (PerChannel, PerGroup)):
        yield f"{scheme} has scales of blocks or of the whole tensor, which are not split over GPUs"
        return
    if style in _BY_OUTPUT:
        if n % ranks:
            yield f"its {n} output channels are no multiple of {ranks} GPUs"
        return
    if scheme.activation is not None:
        yield f"{scheme} quantizes activations by all input channels, of which each GPU has a part"
    if isinstance(scheme.granularity, PerChannel):
        yield f"{scheme} has one scale for all input channels, of which each GPU has a part; groups (_g64) can be split"
    elif k % ranks or k // ranks % scheme.granularity.size:
        yield f"its {k} input channels are no multiple of {ranks} GPUs times groups of {scheme.granularity.size}"
    if k // ranks * scheme.weight.bits % 8:
        yield f"{k // ranks} codes of {scheme.weight.bits} bits, the part of each of {ranks} GPUs, do not end with a byte"
