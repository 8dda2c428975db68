"""LoRA adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   float [r, K]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   float [N, r]

A layer then computes y = base(x) + scaling * B (A x), with scaling = alpha / r, or alpha / sqrt(r) with use_rslora. Sources:
LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732; PEFT 0.21 (tuners/lora/config.py, utils/save_and_load.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.reader import read_header, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Stands before the path of a module in PEFT's names."""

MOST_RANK = 256

_REFUSED = {
    "use_dora": "DoRA scales the columns of the sum, which a quantized weight does not have",
    "modules_to_save": "whole modules are replaced",
    "lora_bias": "its second matrices have a bias",
    "trainable_token_indices": "rows of the embedding are replaced",
    "target_parameters": "parameters are adapted that are no weights of linear layers, as those of experts",
    "layer_replication": "layers are repeated",
    "alora_invocation_tokens": "it takes effect in the middle of a text",
    "use_qalora": "QA-LoRA averages groups of inputs",
}
"""Fields of adapter_config.json that change what is computed, and how."""

_IGNORED = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
}  # fmt: skip
"""Fields that are read below, or that matter only while an adapter is trained."""

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of values of init_lora_weights that change the weights under the adapter."""


@dataclass(frozen=True, eq=False)
class LayerAdapter:
    """The adapter of a linear layer: y += b (a x). a [r, K] and b [N, r], which includes the scaling, are float32."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of a model: a `LayerAdapter` for each adapted linear layer, by the layer's path. rank: the largest rank."""

    folder: Path
    layers: dict[str, LayerAdapter]

    @property
    def rank(self) -> int:
        return max(len(layer.a) for layer in self.layers.values())


def read_adapter(folder: str | Path) -> Adapter:
    """Returns the adapter in a folder that PEFT wrote. Raises CheckpointError, naming file and field or tensor, for files that
    are missing or damaged, and for an adapter other than LoRA and rsLoRA of linear layers.
    """
    folder = Path(folder)
    config = _config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        pickle = (
            f"; {folder / 'adapter_model.bin'} is a pickle, which is not read"
            if (folder / "adapter_model.bin").exists()
            else ""
        )
        raise CheckpointError(f"{path}: missing; save the adapter with safetensors, as PEFT does{pickle}")
    pairs = _pairs(path)
    _check_targets(folder, config["target_modules"], pairs)
    try:
        with safe_open(str(path), framework="pt") as file:
            layers = {name: _layer(path, name, config, *map(file.get_tensor, both)) for name, both in pairs.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return Adapter(folder, layers)


def _config(folder: Path) -> dict[str, Any]:
    """Returns adapter_config.json, checked."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; an adapter is a folder with {CONFIG} and {WEIGHTS}, as PEFT writes it")
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type is {kind!r}, supported is 'LORA'")
    reasons = [f"{name} ({why})" for name, why in _REFUSED.items() if config.get(name)]
    if config.get("bias", "none") != "none":
        reasons.append(f"bias={config['bias']!r} (biases of the model are replaced)")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        reasons.append(f"init_lora_weights={start!r} (it changes the weights under the adapter; convert it with PEFT first)")
    reasons += [f"{name}={config[name]!r}"[:80] for name in sorted(config.keys() - _IGNORED - _REFUSED.keys()) if config[name]]
    if reasons:
        raise CheckpointError(f"{path}: supported are LoRA and rsLoRA of linear layers, this adapter has {'; '.join(reasons)}")
    for name, value in (("r", config.get("r")), *_patterns(path, config, "rank_pattern")):
        if type(value) is not int or not 1 <= value <= MOST_RANK:
            raise CheckpointError(f"{path}: {name} is {value!r}, supported are ranks from 1 to {MOST_RANK}")
    for name, value in (("lora_alpha", config.get("lora_alpha")), *_patterns(path, config, "alpha_pattern")):
        if type(value) not in (int, float) or not abs(value) < 1e6:
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a number below 1e6")
    if not isinstance(config.get("target_modules"), (str, list)):
        raise CheckpointError(f"{path}: target_modules is {config.get('target_modules')!r}, expected names or 'all-linear'")
    return config


def _patterns(path: Path, config: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of a field that maps patterns of paths to values."""
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{path}: {name} is a {type(given).__name__}, expected an object of names and values")
    yield from ((f"{name}[{key!r}]", value) for key, value in given.items())


def _pairs(path: Path) -> dict[str, tuple[str, str]]:
    """Returns the names of both tensors of each layer, by the layer's path."""
    tensors, pairs = read_header(path), dict[str, dict[str, str]]()
    for name in tensors:
        match = re.fullmatch(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight", name)
        if match is None:
            kind = "an embedding's" if "lora_embedding" in name else "not one"
            raise CheckpointError(
                f"{path}: {name}: expected {PREFIX}<linear layer>.lora_A.weight or lora_B.weight, this is {kind}"
            )
        pairs.setdefault(match[1], {})[match[2]] = name
    if not pairs:
        raise CheckpointError(f"{path}: it has no tensors")
    for name, both in pairs.items():
        if len(both) < 2:
            raise CheckpointError(f"{path}: {name} has lora_{next(iter(both))}.weight alone, lora_A and lora_B belong together")
        a, b = tensors[both["A"]].shape, tensors[both["B"]].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not 1 <= a[0] <= MOST_RANK:
            raise CheckpointError(f"{path}: {name}: lora_A is [r, K] and lora_B [N, r], r up to {MOST_RANK}; got {a} and {b}")
    return {name: (both["A"], both["B"]) for name, both in pairs.items()}


def _check_targets(folder: Path, targets: str | list[Any], pairs: dict[str, tuple[str, str]]) -> None:
    """Raises CheckpointError for a listed target that no tensor belongs to."""
    for target in targets if isinstance(targets, list) else ():
        if not any(name == target or name.endswith(f".{target}") for name in pairs):
            raise CheckpointError(f"{folder}: target_modules has {target!r}, {WEIGHTS} has no tensor of it")


def _layer(path: Path, name: str, config: dict[str, Any], a: Tensor, b: Tensor) -> LayerAdapter:
    """Returns the adapter of a layer."""
    stated = _of_layer(config, "rank_pattern", name, config["r"])
    if len(a) != stated:
        raise CheckpointError(f"{path}: {name} has rank {len(a)}, {CONFIG} says {stated}")
    for tensor in (a, b):
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{path}: {name}: its matrices are {tensor.dtype} or have NaN or infinities; expected numbers"
            )
    alpha = _of_layer(config, "alpha_pattern", name, config["lora_alpha"])
    scaling = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
    return LayerAdapter(a.float(), b.float() * scaling)


def _of_layer(config: dict[str, Any], field: str, name: str, default: Any) -> Any:
    """Returns the value of the first pattern that is the end of a layer's path, or matches it as a regular expression."""
    for pattern, value in (config.get(field) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as error:
            raise CheckpointError(f"{CONFIG}: {field} has {pattern!r}, which is no regular expression ({error})") from error
    return default
