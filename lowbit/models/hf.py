"""Transformers integration: `from_pretrained(path, quantization_config=LowbitConfig("w6e3m2a16"))` quantizes while it
loads, `save_pretrained` writes the packed weights, and plain `from_pretrained` reads them back.

Importing this module registers the quantization method "lowbit" with Transformers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowbit.checkpoint import CheckpointReader, LayerEntry, Manifest, expected_tensors
from lowbit.formats import parse_scheme
from lowbit.models.fuse import prepare_on_gpu
from lowbit.nn.convert import Plan, empty_like, plan_conversion, quantized, swap, tie
from lowbit.quantize.rtn import Search

METHOD = "lowbit"
LOADING_OVERHEAD_BYTES = 100_000_000
"""Quantizing while loading, or on disk, needs at most this much memory beyond the packed weights (on disk: one shard of
them) and one layer in 16 bits: float32 temporaries of `quantize.rtn`, what Python holds, and the codes of a layer of 20 million
weights; a larger layer adds a byte for each weight more."""
logger = logging.get_logger(__name__)


@register_quantization_config(METHOD)
class LowbitConfig(QuantizationConfigMixin):
    """How to quantize a model, and what a saved one holds (`quantization_config` in its config.json).

    scheme: a scheme's name, such as "w4a16_g64" or "wf6af16". modules_to_not_convert: names or patterns to leave in 16
    bits; by default the LM head (and embeddings, which take `embeddings=True`). search: "max" or "mse", see
    `lowbit.quantize.rtn`. The other arguments are what a checkpoint states about itself; the checksums `files` and
    `sha256` are forgotten, since `save_pretrained` writes others. Raises ValueError for a scheme that does not exist.
    """

    def __init__(
        self,
        scheme: str,
        *,
        modules_to_not_convert: list[str] | None = None,
        embeddings: bool = False,
        search: Search = "max",
        layers: dict[str, dict[str, Any]] | None = None,
        tied: dict[str, str] | None = None,
        files: dict[str, dict[str, str]] | None = None,
        sha256: str | None = None,
        format_version: int = 1,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"LowbitConfig reads quant_method {METHOD!r}, got {quant_method!r}")
        self.quant_method = METHOD
        self.format_version = format_version
        self.scheme = parse_scheme(scheme).name
        self.modules_to_not_convert = modules_to_not_convert
        self.embeddings = embeddings
        self.search: Search = search
        self.layers = layers
        self.tied = tied

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: the arguments of quantizing are gone once there are layers."""
        out = {k: v for k, v in self.__dict__.items() if v is not None}
        if self.layers is not None:
            out.pop("search"), out.pop("embeddings")
        return out


@register_quantizer(METHOD)
class LowbitQuantizer(HfQuantizer):
    """Swaps linear layers for quantized ones while Transformers loads a model, one weight at a time."""

    requires_calibration = False
    quantization_config: LowbitConfig
    plan: Plan | None = None

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if self.pre_quantized:
            _place_empty_modules(model, self.quantization_config, _checked_types(checkpoint_files))
        else:
            self.plan = plan_for(
                model,
                self.quantization_config.scheme,
                self.quantization_config.modules_to_not_convert,
                self.quantization_config.embeddings,
            )
            self._waiting = {f"{name}.weight": name for name in self.plan.shapes}

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return not self.pre_quantized and param_name in self._waiting

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return parse_scheme(self.quantization_config.scheme).weight.bits / 8
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _QuantizeOnLoad(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        if self.plan is not None:
            self.quantization_config.layers = {n: {"shape": list(shape)} for n, shape in self.plan.shapes.items()}
            self.quantization_config.tied = dict(self.plan.tied) or None
            self.quantization_config.modules_to_not_convert = sorted({row.name for row in self.plan.kept})
            for line in self.plan.lines():
                logger.info(line)
        prepare_on_gpu(model)  # now rather than at the first call, which torch.compile may be tracing
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


class _QuantizeOnLoad(ConversionOps):
    """Takes one 16-bit weight as it comes from the file and puts a quantized module in place of its layer."""

    def __init__(self, quantizer: LowbitQuantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        full_layer_name: str,
        model: nn.Module,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        plan = self.quantizer.plan
        assert plan is not None
        name = full_layer_name.removesuffix(".weight")
        placeholder = model.get_submodule(name)
        new = swap(model, name, quantized(name, weight, plan.scheme, self.quantizer.quantization_config.search))
        _mark_loaded(new)
        if isinstance(placeholder, nn.Embedding):
            new.dtype = weight.dtype  # type: ignore[assignment]
        give_back_freed_memory()
        done = {full_layer_name}
        for follower, owner in plan.tied.items():
            if owner == name:
                tie(model, follower, owner)
                _mark_loaded(model.get_submodule(follower))
                done.add(f"{follower}.weight")
        _retie(model, {follower: owner for follower, owner in plan.tied.items() if owner == name})
        if missing_keys is not None:
            missing_keys -= done
        return {}


def give_back_freed_memory() -> None:
    """Returns freed pages of the C library's heap to the system, where that is glibc; takes some milliseconds.

    Once glibc has freed blocks of up to 32 MB it serves such sizes from the heap, where small allocations between them keep
    their pages: after two decoder layers of 57 million weights, 30 to 100 MB of 180 (tests/models/test_hf.py's model).
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None


def plan_for(model: nn.Module, scheme: str, skip: Iterable[str] | None, embeddings: bool) -> Plan:
    """`plan_conversion` for a Transformers model: knows its output embedding and the ties its config asks for."""
    if skip is None and not embeddings:
        head = model.get_output_embeddings()  # type: ignore[operator]
        skip = [name for name, module in model.named_modules() if module is head] or ["lm_head"]
    mapping: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    ties = {
        target.removesuffix(".weight"): source.removesuffix(".weight")
        for target, source in mapping.items()
        if target.endswith(".weight") and source.endswith(".weight")
    }
    return plan_conversion(model, scheme, skip=() if skip is None else skip, embeddings=embeddings, tied=ties)


def _place_empty_modules(model: nn.Module, config: LowbitConfig, types: dict[str, torch.dtype]) -> None:
    """Puts quantized modules without weights where the checkpoint has quantized ones; `types` are those of its tensors."""
    manifest = Manifest.from_dict(config.to_dict(), where=Path(getattr(model, "name_or_path", "") or "config.json"))
    for name, entry in manifest.layers.items():
        _place_empty_module(model, name, entry, name, types)
    for follower, owner in manifest.tied.items():
        _place_empty_module(model, follower, manifest.layers[owner], owner, types)
    _retie(model, manifest.tied)


def _place_empty_module(model: nn.Module, name: str, entry: LayerEntry, owner: str, types: dict[str, torch.dtype]) -> None:
    layer = _layer(model, name)
    try:
        new = empty_like(
            layer, entry.scheme, device="meta", order=entry.order, input_scale=entry.input_scale, low_rank=entry.low_rank,
            activation_scale=entry.activation_scale, activation_zero=entry.activation_zero,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"quantization_config: {name}: {error}") from error
    # Transformers loads a tensor in the type of the parameter it finds: scales must be as wide as in the file.
    for suffix, parameter in list(new.named_parameters(recurse=False)):
        dtype = types.get(f"{owner}.{suffix}", parameter.dtype)
        if dtype != parameter.dtype:
            setattr(new, suffix, nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False))
    model.set_submodule(name, new)


def _layer(model: nn.Module, name: str) -> nn.Module:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"quantization_config names the layer {name!r}, which {type(model).__name__} does not have") from None
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(
            f"quantization_config names {name!r}, which is a {type(module).__name__}, not a linear layer or embedding"
        )
    return module


def _retie(model: nn.Module, ties: dict[str, str]) -> None:
    """Tells Transformers that these modules now share packed tensors instead of a `weight`."""
    if not ties:
        return
    mapping = dict(model.all_tied_weights_keys)  # type: ignore[arg-type]
    for follower, owner in ties.items():
        mapping.pop(f"{follower}.weight", None)
        for parameter, _ in model.get_submodule(owner).named_parameters(recurse=False):
            mapping[f"{follower}.{parameter}"] = f"{owner}.{parameter}"
    model.all_tied_weights_keys = mapping  # type: ignore[assignment]
    model._tied_weights_keys = mapping  # type: ignore[assignment]


def _mark_loaded(module: nn.Module) -> None:
    """Keeps Transformers from initialising weights that it did not load itself."""
    module._is_hf_initialized = True  # type: ignore[assignment]
    for parameter in module.parameters(recurse=False):
        if parameter.device.type != "meta":
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def _checked_types(checkpoint_files: list[str] | None) -> dict[str, torch.dtype]:
    """Validates a quantized checkpoint on disk against its manifest before anything is loaded from it; returns the types of
    the tensors of its quantized layers."""
    if not checkpoint_files:
        return {}
    with CheckpointReader(Path(checkpoint_files[0]).parent) as reader:
        layers = reader.manifest.layers if reader.manifest else {}
        return {tensor: reader.info(tensor).dtype for name, entry in layers.items() for tensor in expected_tensors(name, entry)}
