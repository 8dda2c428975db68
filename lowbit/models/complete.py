"""Checks that the files of a model have all its parameters and nothing else, with the right shapes and finite values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lowbit.checkpoint import CheckpointError
from lowbit.models.names import TensorNames

Shape = tuple[int, ...]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def incomplete(
    model: PreTrainedModel, tensors: Mapping[str, Shape | None], names: TensorNames | None = None
) -> tuple[str, ...]:
    """Returns why files with `tensors` do not match `model`, whose quantized layers are in place; empty if they match.

    tensors: name -> shape, None for one that is not known yet. Tensors may be missing or unexpected if Transformers' class
    allows it. One of several tied weights is enough. If a parameter is made of several tensors, their number of elements in all
    must be that of the parameter.
    """
    names = TensorNames(model) if names is None else names
    loaded: dict[str, str] = {}
    converted: dict[tuple[str, ...], list[str]] = {}
    unexpected, reasons = [], []
    for tensor, shape in tensors.items():
        target = names.target(tensor)
        if target is None:
            unexpected.append(tensor)
        elif target.operations:
            converted.setdefault(target.parameters, []).append(tensor)
        else:
            (name,) = target.parameters
            if name in loaded:
                reasons.append(f"{loaded[name]} and {tensor} are both {name}")
            loaded[name] = tensor
            expected = tuple(names.own[name].shape)
            if shape is not None and tuple(shape) != expected:
                reasons.append(f"{tensor} is {list(shape)}, by config.json it is {list(expected)}")
    for parameters, sources in converted.items():
        reasons += _size_mismatch(parameters, sources, tensors, names)
    missing = _missing(model, names, {*loaded, *(name for parameters in converted for name in parameters)})
    unexpected = _not_ignored(unexpected, _ignored_tensors(model))
    unlisted = [t for t in unexpected if t.endswith(".weight_packed")]
    if unlisted:
        layers = {t.rpartition(".")[0] for t in unlisted}
        reasons.append(f"{some(unlisted)}: a quantized tensor of a layer that config.json does not list")
        unexpected = [t for t in unexpected if t.rpartition(".")[0] not in layers]
        missing = [t for t in missing if t.rpartition(".")[0] not in layers]
    if missing:
        reasons.append(f"no file has {some(missing)}, which {type(model).__name__} needs")
    if unexpected:
        reasons.append(f"{type(model).__name__} has no place for {some(unexpected)}")
    return tuple(_few(reasons))


def require_complete(
    where: Path | str, model: PreTrainedModel, tensors: Mapping[str, Shape | None], names: TensorNames | None = None
) -> None:
    """Raises CheckpointError with all reasons of `incomplete`."""
    reasons = incomplete(model, tensors, names)
    if reasons:
        raise CheckpointError(f"{where}: {'; '.join(reasons)}")


def require_finite_tensor(where: Path | str, name: str, tensor: Tensor) -> Tensor:
    """Returns `tensor`; raises CheckpointError if some of its numbers are not finite."""
    if not is_finite(tensor):
        wrong = int((~tensor.isfinite()).sum())
        raise CheckpointError(f"{where}: {name}: {wrong:,} of {tensor.numel():,} numbers are not finite; the file is damaged")
    return tensor


def is_finite(tensor: Tensor) -> bool:
    """Returns True if all numbers are finite; one pass without a copy, except for 8-bit floats."""
    return bool(_bounds(tensor).isfinite().all())


def require_finite(where: Path | str, model: nn.Module) -> None:
    """Raises CheckpointError for parameters or persistent buffers of a loaded model that are not finite; one pass on their
    device."""
    tensors = {
        name: t.to_local() if isinstance(t, DTensor) else t
        for name, t in _persistent(model).items()
        if t.is_floating_point() and t.device.type != "meta"
    }
    split = any(isinstance(p, DTensor) for p in model.parameters())
    groups: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.device, []).append(name)
    wrong = []
    for group in groups.values():  # one synchronization per device
        finite = torch.stack([_bounds(tensors[name]) for name in group]).isfinite().all(dim=1).to(torch.int32)
        if split:  # over several GPUs: all raise, or none
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        wrong += [name for name, good in zip(group, finite.tolist(), strict=True) if not good]
    if wrong:
        raise CheckpointError(f"{where}: some numbers of {some(wrong)} are not finite; the file is damaged or training failed")


def some(names: Iterable[str], first: int = 3) -> str:
    """Returns the first names and the number of the others, for a message."""
    names = list(names)
    return ", ".join(names[:first]) + (f" and {len(names) - first} more" if len(names) > first else "")


def _bounds(tensor: Tensor) -> Tensor:
    """Returns the smallest and the largest number, float64 [2]; NaN if there is one."""
    values = tensor.detach()
    if not values.is_floating_point() or values.numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device=values.device)
    return torch.stack(torch.aminmax(values if values.dtype in _FLOATS else values.float())).double()


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers; unlike `state_dict`, does not unpack packed weights."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def _size_mismatch(
    parameters: tuple[str, ...], sources: list[str], tensors: Mapping[str, Shape | None], names: TensorNames
) -> list[str]:
    shapes = [tensors[source] for source in sources]
    stored = sum(math.prod(shape) for shape in shapes if shape is not None)
    expected = sum(names.own[name].numel() for name in parameters)
    if None in shapes or stored == expected:
        return []
    return [f"{some(parameters)}: made of {some(sources)}, which hold {stored:,} numbers, by config.json it is {expected:,}"]


def _missing(model: PreTrainedModel, names: TensorNames, loaded: set[str]) -> list[str]:
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    groups: dict[str, set[str]] = {}
    for follower, owner in ties.items():
        groups.setdefault(owner, {owner}).add(follower)
    tied = {name: group for group in groups.values() for name in group}
    missing = [name for name in names.own if name not in loaded and not tied.get(name, set()) & loaded]
    head = model.get_output_embeddings()
    of_head = {f"{name}.weight" for name, module in model.named_modules() if module is head}
    may_lack = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    left = set(_not_ignored(missing, may_lack))
    return [name for name in missing if name in left or name in of_head]


def _ignored_tensors(model: PreTrainedModel) -> set[str]:
    """Returns patterns of tensors that Transformers ignores: those that its classes name, and buffers of older releases that
    are computed now."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _not_ignored(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    patterns = list(patterns)
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _few(reasons: list[str]) -> list[str]:
    return reasons if len(reasons) <= 4 else [*reasons[:4], f"and {len(reasons) - 4} more such reasons"]
