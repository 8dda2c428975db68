"""Loads a model for pipelines, measurements and demos, with every check of its files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.checkpoint.reader import pickle_refusal, read_json
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import torch_device
from lowbit.models.complete import Shape, incomplete, is_finite, require_complete, require_finite, some
from lowbit.models.cpu import cpu_dtype, plan_on_cpu, quantizing_dtype
from lowbit.models.generation import sampling_settings
from lowbit.models.head import quantize_head
from lowbit.models.hf import METHOD, LowbitConfig, place_empty_modules
from lowbit.models.layer_importer import LayerImporter
from lowbit.models.load_foreign import load_foreign
from lowbit.models.skeleton import build, config_of, damaged, is_encoder_decoder, require_causal, skeleton
from lowbit.models.source import ResolvedSource, resolve
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.linear import make_batch_invariant
from lowbit.nn.parameters import PackedParameters
from lowbit.progress import Progress
from lowbit.sources import local_model


def load(
    source: str | Path | ResolvedSource,
    *,
    scheme: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    progress: bool = False,
    batch_invariant: bool = False,
) -> PreTrainedModel:
    """Returns the Transformers model of a folder, a name on the hub (`sources.local_model`), or a GGUF file.

    It has the class that config.json names and all weights on `device` ("cuda" if torch sees a GPU, else "cpu").

    source: a lowbit checkpoint, a 16-bit model, or one that another tool quantized (docs/checkpoints.md lists them). Another
    tool's layers are imported one by one with the checks of `convert_checkpoint`, without writing files; `save_pretrained` then
    writes a lowbit checkpoint. scheme: quantize 16-bit weights to it while loading. dtype of activations: the checkpoint's own
    on a GPU, that of `models.cpu.cpu_dtype` on a CPU. verify: first compare the files of a lowbit checkpoint with the checksums
    in its config.json. progress: show progress bars of checksums and of another tool's layers. batch_invariant: quantized
    layers give a token the same bits in every batch, on a GPU (`nn.make_batch_invariant`). Raises CheckpointError, with names,
    for missing, unexpected and mismatched tensors, for numbers that are not finite and for layers that cannot be imported.
    Raises ValueError for a checkpoint that is already quantized to another scheme.
    """
    model = _load(source, scheme, device, dtype, verify=verify, progress=progress)
    if batch_invariant:
        make_batch_invariant(model, model.dtype)
    return model


def load_causal(
    source: str | Path | ResolvedSource,
    *,
    scheme: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    progress: bool = False,
    batch_invariant: bool = False,
    head: str | None = None,
    or_encoder_decoder: bool = False,
) -> PreTrainedModel:
    """Loads a causal language model as `load` does. Raises CheckpointError for other architectures before any weights are read.

    head: a scheme for LM head and embedding of a model whose layers are quantized, if these are in 16 bits (`models.head`).
    or_encoder_decoder: also accept models such as BART and T5, whose head is not quantized.
    """
    model = _load(
        source, scheme, device, dtype, verify=verify, progress=progress, causal=True, head=head,
        or_encoder_decoder=or_encoder_decoder,
    )  # fmt: skip
    if head is not None and not is_encoder_decoder(model):
        quantize_head(model, head)  # if not quantized while loading
    if batch_invariant:
        make_batch_invariant(model, model.dtype)
    return model


def _load(
    source: str | Path | ResolvedSource, scheme: str | None, device: str | torch.device | None, dtype: torch.dtype | None, *,
    verify: bool, progress: bool, causal: bool = False, head: str | None = None, or_encoder_decoder: bool = False,
) -> PreTrainedModel:  # fmt: skip
    device, resolved = torch_device(device), resolve(source)
    source, folder = resolved.name, resolved.path
    checkpoint = resolved.open_quantized() if resolved.is_foreign else None
    config = config_of(folder) if checkpoint is None else checkpoint.config
    # Building a model changes its configuration; from_pretrained below gets the original.
    model = build(copy.deepcopy(config), folder / "config.json") if checkpoint is None else checkpoint.model
    if causal:
        require_causal(model, source, or_encoder_decoder=or_encoder_decoder)
    head = None if is_encoder_decoder(model) else head
    quantized_to = resolved.quantized_to if checkpoint is None else checkpoint.tool
    options = _quantization(source, quantized_to, scheme, head)
    if verify:
        verify_checkpoint(folder, progress=progress)
    if folder.is_dir():
        _check_generation(folder)
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
    compute_dtype = dtype or (own if device.type == "cuda" else cpu_dtype(bool(quantized_to or options)))
    if checkpoint is not None:
        model, info = load_foreign(checkpoint, device=device, dtype=compute_dtype, progress=progress)
        _require_all(source, model, info)
        return model
    if folder.is_dir():
        if resolved.tool is None:  # lowbit's quantizer checks its own tensors; other tools have other layouts
            with resolved.reader() as reader:
                require_complete(folder, model, _shapes(reader))
        _check_adapter(folder)
    read = quantizing_dtype(config, compute_dtype) if options else compute_dtype
    try:
        model, info = type(model).from_pretrained(
            folder, config=config, dtype=read, device_map={"": device}, output_loading_info=True, trust_remote_code=False,
            use_safetensors=True, **options,
        )  # fmt: skip
    except ImportError as error:  # the package of a tool that config.json names
        why = f"Transformers cannot load it here ({' '.join(str(error).split())})"
        raise CheckpointError(f"{source}: {why}") from error
    _require_all(source, model, info)
    if getattr(getattr(model, "hf_quantizer", None), "quantization_config", None) is None or _foreign(model):
        require_finite(source, model)  # lowbit's quantizer has checked already
    if read != compute_dtype:
        _cast(model, read, compute_dtype)
    return model


def _require_all(source: str | Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raises CheckpointError if Transformers reports missing, unexpected or mismatched tensors."""
    kinds = {"missing": "missing_keys", "unexpected": "unexpected_keys", "of another shape": "mismatched_keys"}
    wrong = {kind: sorted(str(k[0] if isinstance(k, tuple) else k) for k in info[key]) for kind, key in kinds.items()}
    reasons = [f"{kind}: {some(keys)}" for kind, keys in wrong.items() if keys]
    if reasons:
        raise CheckpointError(f"{source}: its files are not those of a {type(model).__name__}; {'; '.join(reasons)}")


def _cast(model: PreTrainedModel, read: torch.dtype, dtype: torch.dtype) -> None:
    """Casts parameters that are not quantized from the dtype in which they were read to `dtype`.

    Scales and buffers keep their dtype. Among the buffers are rotary frequencies, which give wrong positions in 16 bits.
    """
    for module in model.modules():
        packed = isinstance(module, PackedParameters)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype == read and (not packed or name == "bias"):
                parameter.data = parameter.data.to(dtype)
        if isinstance(module, QuantEmbedding):
            module.dtype = dtype
    model.config.dtype = dtype
    if model.device.type == "cpu":
        plan_on_cpu(model, again=True)  # the layouts that a layer can have depend on the dtype of x


def verify_checkpoint(source: str | Path, *, progress: bool = False) -> None:
    """Reads the files of a lowbit checkpoint; raises CheckpointError for a SHA-256 that differs from config.json or is not
    stated, ValueError for anything but a folder."""
    source = local_model(source)
    if not source.is_dir():
        raise ValueError(f"{source}: checksums are verified in folders; give the path of the checkpoint on disk")
    with CheckpointReader(source) as reader:
        if not verified_files(reader, progress=progress):
            raise CheckpointError(
                f"{source}: config.json states no checksums of its files; lowbit quantize and lowbit convert write them"
            )


def verified_files(reader: CheckpointReader, *, progress: bool = False) -> tuple[str, ...]:
    """Returns the files whose checksums match config.json (`CheckpointReader.verify_files`)."""
    total = sum(file.stat().st_size for file in {reader.info(name).file for name in reader.names()})
    shown = progress and reader.manifest is not None and bool(reader.manifest.files)
    with Progress(total=total, desc="checksums", unit="B", unit_scale=True, shown=shown) as bar:
        return reader.verify_files(bar.update)


def check_checkpoint(source: str | Path | ResolvedSource) -> tuple[str, ...]:
    """Reads a whole checkpoint and returns its errors: tensors that do not match the model of config.json, and numbers that are
    not finite.

    For lowbit checkpoints, codes, zeros and scales are checked too; for other tools' checkpoints, everything that their reader
    checks. Raises CheckpointError for unreadable files, and for the first error of another tool's checkpoint.
    """
    source = resolve(source)
    if source.is_foreign:
        refused = LayerImporter(source.open_quantized()).check()
        return (refused,) if refused else ()
    with source.reader() as reader:
        if reader.manifest is None and source.tool is not None:
            LayerImporter(source.open_quantized(), "dequantized").check()
            return ()
        reasons = incomplete(placed_skeleton(reader), _shapes(reader))
        if reader.manifest is not None:
            reader.check()
        wrong = [name for name in reader.names() if not is_finite(reader.get(name))]
    return (*reasons, *([f"some numbers of {some(wrong)} are not finite"] if wrong else []))


def placed_skeleton(reader: CheckpointReader) -> PreTrainedModel:
    """Returns the model of a plain or lowbit checkpoint on the meta device, with its quantized modules."""
    model = skeleton(reader.folder)
    if reader.manifest is not None:
        types = {name: reader.info(name).dtype for name in reader.names()}
        place_empty_modules(model, reader.manifest, types, reader.folder)
    return model


def _quantization(source: str, quantized_to: str | None, scheme: str | None, head: str | None) -> dict[str, Any]:
    """Returns the arguments of from_pretrained that quantize to `scheme` while loading, and LM head and embedding to `head`."""
    if scheme is None:
        return {}
    parsed = parse_scheme(scheme)
    if quantized_to is None:
        return {"quantization_config": LowbitConfig(parsed.name, head=head)}
    if quantized_to != parsed.name:
        raise ValueError(f"{source} is quantized already, to {quantized_to}; leave out the scheme {scheme!r}")
    return {}


def _check_adapter(folder: Path) -> None:
    """Raises CheckpointError for a PEFT adapter beside the model that Transformers would unpickle."""
    names = "adapter_config.json", "adapter_model.bin"
    if all((folder / name).exists() for name in names) and not (folder / "adapter_model.safetensors").exists():
        raise CheckpointError(f"{folder}: holds {pickle_refusal(names[1])}")


def _check_generation(folder: Path) -> None:
    """Raises CheckpointError for a damaged generation_config.json, and for sampling settings that no request can have."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    stated = read_json(path)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = stated.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise CheckpointError(f"{path}: {key} is a token's number, or a list of them, got {value!r}")
    try:
        sampling_settings(stated)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    with damaged(path, "Transformers cannot read it", stated):
        GenerationConfig.from_pretrained(folder)


def _shapes(reader: CheckpointReader) -> dict[str, Shape | None]:
    return {name: reader.info(name).shape for name in reader.names()}


def _foreign(model: PreTrainedModel) -> bool:
    return getattr(model.hf_quantizer.quantization_config, "quant_method", None) != METHOD
