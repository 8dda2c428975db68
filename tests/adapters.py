"""Random LoRA adapters in PEFT's files, and models with an adapter merged into their weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def linears(model: nn.Module, targets=ALL) -> dict[str, nn.Module]:
    """Returns the layers to which an adapter of `targets` applies, by their paths."""
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in targets}


def write_adapter(folder: Path, model: nn.Module, targets=ALL, rank=4, seed=0, size=1.0, dtype=torch.float32, **config) -> Path:
    """Writes an adapter of random matrices. `size` scales its outputs. `config` replaces values of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in linears(model, targets).items():
        of_layer = config.get("rank_pattern", {}).get(path, rank)
        a = torch.randn(of_layer, module.in_features, generator=generator) * module.in_features**-0.5
        b = torch.randn(module.out_features, of_layer, generator=generator) * size * of_layer**-0.5
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    known = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    return folder


def merged(model: nn.Module, folder: Path, dtype=None) -> nn.Module:
    """Returns a copy of a model of plain layers, whose weights are W + alpha / r * B A, the formula of PEFT's merge."""
    plain = copy.deepcopy(model)
    plain = plain if dtype is None else plain.to(dtype)
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            alpha = config.get("alpha_pattern", {}).get(path, config["lora_alpha"])
            scaling = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
            weight = plain.get_submodule(path).weight
            delta = scaling * b.double() @ a.double()
            weight.data = (weight.data.double() + delta.to(weight.device)).to(weight.dtype)
    return plain
