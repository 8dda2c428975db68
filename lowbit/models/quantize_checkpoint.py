"""Quantizes a checkpoint on disk to another one, a tensor at a time: no model of 16-bit weights is ever in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from lowbit.checkpoint import CheckpointError, CheckpointReader, CheckpointWriter, LayerEntry, Manifest, layer_tensors
from lowbit.models.hf import plan_for
from lowbit.nn.convert import Kept, Plan, quantized
from lowbit.quantize.rtn import Search


def skeleton(folder: Path) -> nn.Module:
    """The model of a Transformers folder on the meta device: its modules and shapes, no weights."""
    config = AutoConfig.from_pretrained(folder)
    architecture = (config.architectures or [""])[0]
    with torch.device("meta"):
        cls = getattr(transformers, architecture, None)
        model: nn.Module = AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    return model


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    scheme: str,
    *,
    skip: Iterable[str] | None = None,
    embeddings: bool = False,
    search: Search = "max",
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    progress: bool = False,
) -> Plan:
    """Writes the Transformers checkpoint `source` to the folder `target` with weights quantized by round-to-nearest.

    One tensor is read, quantized on `device` and written at a time, so peak memory is one shard of the output (2 GiB at
    most) plus one layer. `target` appears complete or not at all. Returns the report of what was converted and what was
    not. Arguments as for `lowbit.LowbitConfig`; raises CheckpointError for files that cannot be read or written.
    """
    source, target = Path(source), Path(target)
    with CheckpointReader(source) as reader:
        if reader.manifest is not None or "quantization_config" in reader.config:
            method = reader.config.get("quantization_config", {}).get("quant_method", "unknown")
            raise CheckpointError(f"{source}: is quantized already ({method}); quantize the 16-bit checkpoint it came from")
        model = skeleton(source)
        plan = plan_for(model, scheme, skip, embeddings)
        modules = _modules_by_tensor(model, plan, reader.names())
        writer = CheckpointWriter(target, overwrite=overwrite)
        with writer:
            for tensor in tqdm(reader.names(), desc=f"{scheme}", unit="tensor", disable=not progress, leave=False):
                module = modules.get(tensor)
                if module is None:
                    writer.add(tensor, reader.get(tensor))
                elif module not in plan.tied:
                    q = quantized(f"{source}: {tensor}", reader.get(tensor).to(device), plan.scheme, search).to("cpu")
                    for suffix, value in layer_tensors(q).items():
                        writer.add(f"{tensor.removesuffix('weight')}{suffix}", value)
            plan = _without_missing(plan, set(modules.values()))
            writer.finish(reader.config, manifest_of(plan), copy_from=source)
    return plan


def manifest_of(plan: Plan) -> Manifest:
    """What config.json states about the layers of a plan."""
    return Manifest(
        scheme=plan.scheme,
        layers={name: LayerEntry(shape, plan.scheme) for name, shape in plan.shapes.items()},
        modules_to_not_convert=tuple(row.name for row in plan.kept),
        tied=dict(plan.tied),
    )


def _modules_by_tensor(model: nn.Module, plan: Plan, names: Iterable[str]) -> dict[str, str]:
    """Tensor name in the files -> name of the module whose weight it is, for modules of the plan. Files of a base model
    lack the prefix that the model's own names have."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    wanted = {f"{module}.weight": module for module in (*plan.shapes, *plan.tied)}
    found = {}
    for name in names:
        for key in (name, prefix + name):
            if key in wanted:
                found[name] = wanted[key]
    return found


def _without_missing(plan: Plan, found: set[str]) -> Plan:
    """The plan without the modules whose weights the files hold under other names; they stay as they are."""
    missing = {name for name in plan.shapes if name not in found}
    kept = [Kept(name, "", 0, f"the files have no tensor {name}.weight") for name in sorted(missing)]
    return dataclasses.replace(
        plan,
        linears={n: s for n, s in plan.linears.items() if n not in missing},
        embeddings={n: s for n, s in plan.embeddings.items() if n not in missing},
        tied={n: owner for n, owner in plan.tied.items() if owner not in missing},
        kept=plan.kept + kept,
    )
