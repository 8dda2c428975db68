"""Builds a stored model without its weights, for recording the kernels that it would launch on a GPU (ops/simulated_gpu.py).

Modules, schemes and dtypes are those of `load.load_causal`. They follow from config.json and the headers of the files, except
for another tool's quantized layers: the first layer of each name, shape and scheme is read, since only its tensors state the
dtype of its scales and the transform of its input.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from lowbit.checkpoint import CheckpointError, LayerEntry, Manifest
from lowbit.formats import ExpertTensor, QuantTensor, ZeroPoint, parse_scheme
from lowbit.models.conversion_targets import manifest_of
from lowbit.models.fuse import prepare_on_gpu
from lowbit.models.head import plain_head
from lowbit.models.hf import place_empty_modules, plain_parameters, plan_for, planned_layers, put_plain_weights_first
from lowbit.models.layer_importer import LayerImporter
from lowbit.models.names import TensorNames
from lowbit.models.skeleton import build, config_of, require_causal
from lowbit.models.source import QuantizedCheckpoint, ResolvedSource, resolve
from lowbit.nn.convert import tie
from lowbit.nn.parameters import INPUT_PARAMETERS
from lowbit.quantize.rtn import scale_dtype

Types = dict[str, torch.dtype]
"""Dtypes of the tensors of quantized layers, by name."""


def weightless_model(source: str | Path | ResolvedSource, scheme: str | None, head: str | None) -> PreTrainedModel:
    """Returns the causal model of a folder, hub name or GGUF file as a GPU would hold it, packed for its kernels.

    Call it inside `simulated_gpu`. scheme, head: as for `load.load_causal`. Raises CheckpointError for files that cannot be
    loaded, as far as their headers show, and ValueError for a checkpoint that is quantized to another scheme.
    """
    resolved = resolve(source)
    checkpoint = resolved.open_quantized() if resolved.is_foreign else None
    manifest: Manifest | None
    quantized_to = resolved.quantized_to if checkpoint is None else checkpoint.tool
    if scheme is not None and quantized_to not in (None, parse_scheme(scheme).name):
        raise ValueError(f"{resolved.name} is quantized already, to {quantized_to}; leave out the scheme {scheme!r}")
    if checkpoint is not None:
        config, model = checkpoint.config, checkpoint.model
        manifest, types = _foreign_layers(checkpoint)
    else:
        config = config_of(resolved.path)
        model = build(config, resolved.path / "config.json")
        manifest, types = _stored_layers(resolved, model, scheme, head)
    require_causal(model, resolved.name)
    if resolved.path.is_dir() and (resolved.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(resolved.path)
    return _packed(model, manifest, types, head, resolved.path)


def weightless_of_config(config: PreTrainedConfig, scheme: str | None, head: str | None) -> PreTrainedModel:
    """Returns the causal model of a configuration as `weightless_model` would if its 16-bit weights were in a folder."""
    where = Path(f"the configuration of {config.model_type}")
    model = build(config, where)
    manifest = None if scheme is None else planned_layers(plan_for(model, scheme, None, False, head))
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
    return _packed(model, manifest, {} if manifest is None else _rounded_types(manifest, dtype), head, where)


def _packed(model: PreTrainedModel, manifest: Manifest | None, types: Types, head: str | None, where: Path) -> PreTrainedModel:
    """Replaces the layers of a manifest and the head of a model without weights, and packs it for a GPU's kernels."""
    dtype = model.config.dtype if isinstance(model.config.dtype, torch.dtype) else torch.float16
    for _, parameter in plain_parameters(model):
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    if manifest is not None:
        _place(model, manifest, types, where)
    if head is not None:
        owners, followers = plain_head(model)
        shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in owners}  # type: ignore[union-attr, operator]
        entries = {name: LayerEntry((shape[0], shape[1]), parse_scheme(head)) for name, shape in shapes.items()}
        _place(model, Manifest(parse_scheme(head), entries, tied=followers), {}, where)
    put_plain_weights_first(model)
    prepare_on_gpu(model)
    return model.eval()


def _place(model: PreTrainedModel, manifest: Manifest, types: Types, where: Path) -> None:
    """Replaces the layers of a manifest by quantized modules without weights."""
    place_empty_modules(model, Manifest(manifest.scheme, manifest.layers), types, where)
    for name, owner in manifest.tied.items():
        tie(model, name, owner)


def _stored_layers(
    source: ResolvedSource, model: PreTrainedModel, scheme: str | None, head: str | None
) -> tuple[Manifest | None, Types]:
    """Returns the quantized layers of a lowbit checkpoint, or those to which 16-bit weights are quantized while loading."""
    with source.reader() as reader:
        if reader.manifest is not None:
            return reader.manifest, {name: reader.info(name).dtype for name in reader.names()}
        if source.tool is not None:
            raise CheckpointError(f"{source.path}: is quantized by {source.tool}, whose weights have no kernels of lowbit")
        if scheme is None:
            return None, {}
        shapes = {name: reader.info(name).shape for name in reader.names()}
        stored = next((reader.info(name).dtype for name, shape in shapes.items() if len(shape) > 1), torch.float16)
    manifest = planned_layers(TensorNames(model).followed(plan_for(model, scheme, None, False, head), shapes))
    return manifest, _rounded_types(manifest, stored)


def _rounded_types(manifest: Manifest, stored: torch.dtype) -> Types:
    """Returns the dtypes of scales and floating-point zeros of layers that are quantized from weights of dtype `stored`, if
    these are of ordinary magnitude."""
    types: Types = {}
    for name, entry in manifest.layers.items():
        of_scales = scale_dtype(entry.scheme, stored=stored)
        types[f"{name}.weight_scale"] = of_scales
        if entry.scheme.zero is ZeroPoint.FLOAT:
            types[f"{name}.weight_zero"] = of_scales
    return types


def _foreign_layers(checkpoint: QuantizedCheckpoint) -> tuple[Manifest, Types]:
    """Returns the quantized layers of another tool's checkpoint, under the names of the model's modules."""
    importer, reader = LayerImporter(checkpoint), checkpoint.reader
    importer.require_complete()
    linears = {name: entry for name, entry in reader.entries.items() if name not in importer.in_experts}
    judged = [*map(importer.judge, linears), *map(importer.judge_experts, reader.experts)]
    if not all(judged):
        raise CheckpointError(f"{checkpoint.path}: {importer.refusals()}")
    read: dict[object, dict[str, QuantTensor | ExpertTensor]] = {}
    entries: dict[str, LayerEntry] = {}
    types: Types = {}

    def add(parameter: str, q: QuantTensor | ExpertTensor) -> None:
        entries[parameter] = LayerEntry.of(q)
        tensors = {"weight_scale": q.scale, "weight_zero": q.zero}
        tensors |= {INPUT_PARAMETERS[part]: t for part, t in q.input_transform.tensors().items()}
        types.update({f"{parameter}.{name}": t.dtype for name, t in tensors.items() if t is not None})

    for name, entry in linears.items():
        linear = (_kind(name), entry)
        if linear not in read:
            read[linear] = {"": importer.layer(name)}
        add(importer.module(name) or name, read[linear][""])
    for name, experts in reader.experts.items():
        module = importer.expert_module(name)
        assert module is not None
        key = (_kind(name), experts.gate_up.shape, experts.down.shape, experts.gate_up.scheme, experts.down.scheme)
        if key not in read:
            tensors = importer.expert_tensors(name)
            read[key] = {part: q for part, q in tensors.items() if isinstance(q, ExpertTensor)}
        for part, q in zip((module.first, module.down), read[key].values(), strict=True):
            add(part, q)
    return manifest_of(entries, importer.unquantized_linears(), importer.tied(entries)), types


def _kind(name: str) -> str:
    """Returns a layer's name without the numbers of decoder layers and experts."""
    return re.sub(r"\b\d+\b", "*", name)
