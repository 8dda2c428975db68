"""Loading a model for use: the one way for pipelines, measurements and demos, with every check of its files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.checkpoint.detect import quantization_of
from lowbit.checkpoint.reader import pickle_refusal, read_json
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import torch_device
from lowbit.models.complete import Shape, incomplete, is_finite, require_complete, require_finite, some
from lowbit.models.cpu import cpu_dtype, plan_on_cpu, quantizing_dtype
from lowbit.models.generation import sampling_settings
from lowbit.models.head import quantize_head
from lowbit.models.hf import METHOD, LowbitConfig, place_empty_modules
from lowbit.models.load_foreign import load_foreign
from lowbit.models.skeleton import build, config_of, damaged, is_encoder_decoder, require_causal, skeleton
from lowbit.models.source import Contents, is_foreign, open_checkpoint
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.linear import make_batch_invariant
from lowbit.nn.packed import PackedWeight
from lowbit.progress import Progress
from lowbit.sources import local_model


def load(
    source: str | Path,
    *,
    scheme: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    progress: bool = False,
    batch_invariant: bool = False,
) -> PreTrainedModel:
    """The Transformers model in a folder, of that name on the hub (`sources.local_model`), or in a GGUF file, of the class that
    config.json names, with all its weights on `device` ("cuda" when torch sees a GPU, else "cpu").

    source: a lowbit checkpoint, a 16-bit model, or one that another tool quantized (docs/checkpoints.md lists them). The layers
    of the last are taken over one by one as `convert_checkpoint` does, with its checks, and nothing is written;
    `save_pretrained` makes a lowbit checkpoint. scheme: quantize 16-bit weights to it while loading. dtype of activations: the
    checkpoint's own on a GPU, that of `models.cpu.cpu_dtype` on a CPU. verify: compare the files of a lowbit checkpoint with
    the checksums in its config.json first, which reads them once more. progress: show how far checksums
    and another tool's layers are. batch_invariant: quantized layers give a token the same bits in every batch, on a GPU
    (`nn.make_batch_invariant`).
    Raises CheckpointError for parameters that the files lack, have too many of, or of another shape, for numbers that are not
    finite and for layers that cannot be taken over; it names them. Raises ValueError for a checkpoint that is quantized
    already, to something else than `scheme`.
    """
    model = _load(source, scheme, device, dtype, verify=verify, progress=progress)
    if batch_invariant:
        make_batch_invariant(model, model.dtype)
    return model


def load_causal(
    source: str | Path,
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
    """`load` of a causal language model; raises CheckpointError for architectures that do not predict the next token, before
    any weights are read. head: a scheme for the LM head and the embedding of a model whose layers are quantized, where these
    come in 16 bits (`models.head`). or_encoder_decoder: take models such as BART and T5 too, whose head stays as it is."""
    model = _load(
        source, scheme, device, dtype, verify=verify, progress=progress, causal=True, head=head,
        or_encoder_decoder=or_encoder_decoder,
    )  # fmt: skip
    if head is not None and not is_encoder_decoder(model):
        quantize_head(model, head)  # what was not quantized on the way
    if batch_invariant:
        make_batch_invariant(model, model.dtype)
    return model


def _load(
    source: str | Path, scheme: str | None, device: str | torch.device | None, dtype: torch.dtype | None, *, verify: bool,
    progress: bool, causal: bool = False, head: str | None = None, or_encoder_decoder: bool = False,
) -> PreTrainedModel:  # fmt: skip
    device, folder = torch_device(device), local_model(source)
    opened = open_checkpoint(folder) if is_foreign(folder) else None
    config = config_of(folder) if opened is None else opened.config
    # Building a model changes its configuration, and the one that Transformers gets below is as config_of made it.
    model = build(copy.deepcopy(config), folder / "config.json") if opened is None else opened.model
    if causal:
        require_causal(model, source, or_encoder_decoder=or_encoder_decoder)
    head = None if is_encoder_decoder(model) else head
    held = opened.tool if opened is not None else _held(config)
    options = _quantization(source, held, scheme, head)
    if verify:
        verify_checkpoint(folder, progress=progress)
    if folder.is_dir():
        _check_generation(folder)
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
    wanted = dtype or (own if device.type == "cuda" else cpu_dtype(bool(held or options)))
    if opened is not None:
        model, info = load_foreign(folder, opened, device=device, dtype=wanted, progress=progress)
        _require_all(source, model, info)
        return model
    if folder.is_dir():
        _check_headers(folder, model)
        _check_adapter(folder)
    read = quantizing_dtype(config, wanted) if options else wanted
    try:
        model, info = type(model).from_pretrained(
            folder, config=config, dtype=read, device_map={"": device}, output_loading_info=True, trust_remote_code=False,
            use_safetensors=True, **options,
        )  # fmt: skip
    except ImportError as error:  # of another tool, whose method config.json names
        why = f"Transformers cannot load it here ({' '.join(str(error).split())})"
        raise CheckpointError(f"{source}: {why}") from error
    _require_all(source, model, info)
    if getattr(getattr(model, "hf_quantizer", None), "quantization_config", None) is None or _foreign(model):
        require_finite(source, model)  # lowbit's quantizer has looked already
    if read != wanted:
        _cast(model, read, wanted)
    return model


def _require_all(source: str | Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raises CheckpointError where Transformers says that the files were not those of the model."""
    kinds = {"missing": "missing_keys", "unexpected": "unexpected_keys", "of another shape": "mismatched_keys"}
    wrong = {kind: sorted(str(k[0] if isinstance(k, tuple) else k) for k in info[key]) for kind, key in kinds.items()}
    reasons = [f"{kind}: {some(keys)}" for kind, keys in wrong.items() if keys]
    if reasons:
        raise CheckpointError(f"{source}: its files are not those of a {type(model).__name__}; {'; '.join(reasons)}")


def _cast(model: PreTrainedModel, read: torch.dtype, wanted: torch.dtype) -> None:
    """Brings what was read in one type into that in which the model computes: parameters that are not quantized. Scales keep
    theirs, and so do buffers: rotary frequencies in 16 bits are wrong positions."""
    for module in model.modules():
        packed = isinstance(module, PackedWeight)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype == read and (not packed or name == "bias"):
                parameter.data = parameter.data.to(wanted)
        if isinstance(module, QuantEmbedding):
            module.dtype = wanted
    model.config.dtype = wanted
    if model.device.type == "cpu":
        plan_on_cpu(model, again=True)  # which form a layer can have depends on the type of x


def verify_checkpoint(source: str | Path, *, progress: bool = False) -> None:
    """Reads the files of one of lowbit's own checkpoints; raises CheckpointError where one has another SHA-256 than config.json
    states, or none is stated, ValueError for what is no folder."""
    source = local_model(source)
    if not source.is_dir():
        raise ValueError(f"{source}: checksums are verified in folders; give the path of the checkpoint on disk")
    with CheckpointReader(source) as reader:
        if not verified_files(reader, progress=progress):
            raise CheckpointError(
                f"{source}: config.json states no checksums of its files; lowbit quantize and lowbit convert write them"
            )


def verified_files(reader: CheckpointReader, *, progress: bool = False) -> tuple[str, ...]:
    """The files whose checksums are those that config.json states, compared as `CheckpointReader.verify_files` does."""
    total = sum(file.stat().st_size for file in {reader.info(name).file for name in reader.names()})
    shown = progress and reader.manifest is not None and bool(reader.manifest.files)
    with Progress(total=total, desc="checksums", unit="B", unit_scale=True, shown=shown) as bar:
        return reader.verify_files(bar.update)


def check_checkpoint(folder: str | Path) -> tuple[str, ...]:
    """What is wrong with the files of a checkpoint, read whole: names, shapes and types as config.json's model has them, and
    every number finite; empty when nothing is. Of lowbit's own, codes, zeros and factors are looked into as well, of another
    tool's what its reader checks. Raises CheckpointError for files that cannot be read at all, and of another tool's for the
    first thing that is wrong."""
    folder = local_model(folder)
    if is_foreign(folder):
        refused = Contents(folder, open_checkpoint(folder)).check()
        return (refused,) if refused else ()
    with CheckpointReader(folder) as reader:
        if reader.manifest is None and quantization_of(folder, reader.config) is not None:
            Contents(folder, open_checkpoint(folder), "dequantized").check()
            return ()
        reasons = incomplete(_placed_skeleton(reader), _shapes(reader))
        if reader.manifest is not None:
            reader.check()
        wrong = [name for name in reader.names() if not is_finite(reader.get(name))]
    return (*reasons, *([f"some numbers of {some(wrong)} are not finite"] if wrong else []))


def _placed_skeleton(reader: CheckpointReader) -> PreTrainedModel:
    """The model of a plain checkpoint or one of lowbit's own on the meta device, with quantized modules where that has some."""
    model = skeleton(reader.folder)
    if reader.manifest is not None:
        types = {name: reader.info(name).dtype for name in reader.names()}
        place_empty_modules(model, reader.manifest, types, reader.folder)
    return model


def _held(config: Any) -> str | None:
    """To what a checkpoint is quantized by its config.json; None if it is not."""
    stored = getattr(config, "quantization_config", None)
    return None if stored is None else str(stored.get("scheme", stored.get("quant_method")))


def _quantization(source: str | Path, held: str | None, scheme: str | None, head: str | None) -> dict[str, Any]:
    """The arguments of from_pretrained that quantize to a scheme while loading, LM head and embedding to that of `head`, of a
    checkpoint that is quantized to `held`."""
    if scheme is None:
        return {}
    wanted = parse_scheme(scheme)
    if held is None:
        return {"quantization_config": LowbitConfig(wanted.name, head=head)}
    if held != wanted.name:
        raise ValueError(f"{source} is quantized already, to {held}; leave out the scheme {scheme!r}")
    return {}


def _check_headers(folder: Path, model: PreTrainedModel) -> None:
    """Compares the headers of a folder's files with the model before anything is loaded; those of lowbit's own checkpoints are
    compared by its quantizer, those of other tools have the layout that Transformers' quantizer for them knows."""
    with CheckpointReader(folder) as reader:
        if quantization_of(folder, reader.config) is None:
            require_complete(folder, model, _shapes(reader))


def _check_adapter(folder: Path) -> None:
    """Raises CheckpointError where Transformers would find an adapter of PEFT beside the model and unpickle it."""
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
