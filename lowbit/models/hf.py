"""Transformers integration: `from_pretrained(path, quantization_config=LowbitConfig("w6e3m2a16"))` quantizes while it
loads, `save_pretrained` writes the packed weights, and plain `from_pretrained` reads them back.

Importing this module registers the quantization method "lowbit" with Transformers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowbit.checkpoint import CheckpointError, CheckpointReader, LayerEntry, Manifest
from lowbit.checkpoint.card import model_card
from lowbit.checkpoint.schema import FORMAT_VERSION, GUARD, GUARD_KEY, OLD_NAMES, current_names
from lowbit.checkpoint.target import CARD, is_card
from lowbit.formats import ExpertTensor, QuantTensor, Scheme, parse_scheme
from lowbit.methods import Rtn, Search, method_record
from lowbit.models.attention import register_attention
from lowbit.models.complete import require_complete, require_finite, some
from lowbit.models.cpu import plan_on_cpu
from lowbit.models.dequantize import dequantize_model, quantized_layers
from lowbit.models.fuse import prepare_on_gpu
from lowbit.models.names import TensorNames
from lowbit.models.parallel import parallel_refusals
from lowbit.nn.convert import (
    Plan,
    empty_experts,
    empty_like,
    plan_conversion,
    quantized,
    quantized_experts,
    rounding,
    swap,
    swap_experts,
    tie,
)
from lowbit.nn.experts import QuantExperts, expert_refusals, expert_weights
from lowbit.nn.linear import make_batch_invariant
from lowbit.nn.packed import PackedWeight
from lowbit.nn.parameters import PackedParameters

METHOD = "lowbit"
LOADING_OVERHEAD_BYTES = 100_000_000
"""Maximum memory that quantizing needs beyond the weights themselves. While loading, these are all packed weights and one layer
in 16 bits; for a checkpoint on disk, one shard and one layer in 16 bits. The number covers float32 temporaries of
`quantize.rtn`, Python's memory, and the codes of a layer of 20 million weights; larger layers add a byte per weight.
"""

GPU_LOADING_OVERHEAD_BYTES = 256_000_000
"""LOADING_OVERHEAD_BYTES for a GPU's memory, where more weights are quantized at once (`quantize.rtn.TIMES_ON_GPU`)."""

logger = logging.get_logger(__name__)

register_attention()


@register_quantization_config(METHOD)
class LowbitConfig(QuantizationConfigMixin):
    """The quantization of a model, as an argument of loading and as `quantization_config` in a saved config.json.

    scheme: a scheme's name, such as "w4a16_g64" or "wf6af16". modules_to_not_convert: names or patterns to leave in 16 bits; by
    default the LM head (and embeddings, which take `embeddings=True`). search: "max" or "mse", see `lowbit.quantize.rtn`.
    head: a scheme for LM head and embedding; overrides the arguments above for these two. batch_invariant: quantized layers
    give a token the same bits in every batch, on a GPU; not saved. The other arguments are read from config.json. The checksums
    `files` and `sha256` are dropped, because they belong to the files that were read. Raises ValueError for a scheme that does
    not exist.
    """

    def __init__(
        self,
        scheme: str,
        *,
        modules_to_not_convert: list[str] | None = None,
        embeddings: bool = False,
        search: Search = "max",
        batch_invariant: bool = False,
        head: str | None = None,
        layers: dict[str, dict[str, Any]] | None = None,
        tied: dict[str, str] | None = None,
        rotation: int | None = None,
        method: dict[str, Any] | None = None,
        calibration: dict[str, Any] | None = None,
        files: dict[str, dict[str, str]] | None = None,
        sha256: str | None = None,
        format_version: int = FORMAT_VERSION,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"LowbitConfig reads quant_method {METHOD!r}, got {quant_method!r}")
        self.quant_method = METHOD
        self.format_version = FORMAT_VERSION  # the version that `save_pretrained` writes; older ones were converted when read
        if not isinstance(scheme, (str, Scheme)):
            raise ValueError(f"quantization_config: scheme is a scheme's name, such as w4a16_g64, got {scheme!r}")
        self.scheme = parse_scheme(scheme).name
        self.modules_to_not_convert = modules_to_not_convert
        self.embeddings = embeddings
        self.search: Search = search
        self.batch_invariant = batch_invariant
        self.head = None if head is None else parse_scheme(head).name
        self.layers = None if layers is None else {name: current_names(entry) for name, entry in layers.items()}
        self.tied = tied
        self.rotation = rotation
        self.method, self.calibration = method, calibration

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Returns the configuration of a config.json; raises CheckpointError, naming the field, for invalid ones."""
        if "layers" in config_dict:
            Manifest.from_dict(config_dict, "config.json")
        known = set(inspect.signature(cls).parameters)
        unknown = sorted(set(map(str, config_dict)) - known)
        if unknown:
            raise CheckpointError(f"config.json: quantization_config has unknown keys {unknown}; known are {sorted(known)}")
        if "scheme" not in config_dict:
            raise CheckpointError("config.json: quantization_config states no scheme")
        return super().from_dict(dict(config_dict), return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of config.json. Those of a quantized model list its layers, not the arguments of quantizing."""
        out = {k: v for k, v in self.__dict__.items() if v is not None and k != "batch_invariant"}
        if self.layers is not None:
            out.pop("search"), out.pop("embeddings"), out.pop("head", None)
        return out


@register_quantizer(METHOD)
class LowbitQuantizer(HfQuantizer):
    """Swaps linear layers for quantized ones while Transformers loads a model, one weight at a time."""

    requires_calibration = False
    quantization_config: LowbitConfig
    plan: Plan | None = None

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.failures: list[str] = []
        self.layers: dict[str, str] = {}
        """Modules whose weights are loaded -> the module that owns them, itself unless it is tied to another."""
        self.experts: set[str] = set()
        """Weights of experts that are quantized while they are loaded, by the name of the parameter."""
        self._plain_types: dict[str, torch.dtype] = {}

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        stored = [Path(file) for file in checkpoint_files or () if file.endswith(".safetensors")]
        where = stored[0].parent if stored else getattr(model, "name_or_path", "") or "the model"
        if self.pre_quantized:
            if self.quantization_config.layers is None:
                raise CheckpointError(f"{where}: quantization_config in config.json lists no layers")
            manifest = Manifest.from_dict(self.quantization_config.to_dict(), where=Path(where) / "config.json")
            refuse(where, parallel_refusals(model, manifest))
            types = {}
            if stored:
                with CheckpointReader(where) as reader:
                    types = {name: reader.info(name).dtype for name in reader.names()}
                    shapes = {name: reader.info(name).shape for name in reader.names()}
            _untie(model, manifest.layers)
            place_empty_modules(model, manifest, types, where)
            self._plain_types = {name: p.dtype for name, p in plain_parameters(model)}
            _leave_as_loaded(model, [*manifest.layers, *manifest.tied])
            if stored and _is_as_stated(model):
                require_complete(where, model, shapes)
            return
        refuse(where, parallel_refusals(model, None))
        config = self.quantization_config
        if config.layers is not None:  # `load_foreign` passes layers that another tool has quantized
            _untie(model, config.layers)
            self.experts = {name for name, entry in config.layers.items() if len(entry["shape"]) == 3}
            self.layers = {**{name: name for name in config.layers if name not in self.experts}, **(config.tied or {})}
            _leave_as_loaded(model, (*self.layers, *self.experts))
            return
        self.plan = plan_for(model, config.scheme, config.modules_to_not_convert, config.embeddings, config.head)
        if stored:
            with CheckpointReader(where) as reader:
                shapes, names = {name: reader.info(name).shape for name in reader.names()}, TensorNames(model)
            if _is_as_stated(model):
                require_complete(where, model, shapes, names)
            self.plan = names.followed(self.plan, shapes)
        self.layers = {**{name: name for name in self.plan.shapes}, **self.plan.tied}
        self.experts = set(self.plan.experts)
        _leave_as_loaded(model, (*self.layers, *self.experts))

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Returns the configuration without the guard that stops Transformers if lowbit is not imported. Transformers calls
        this before it opens files."""
        if self.pre_quantized and hasattr(config, GUARD_KEY):
            delattr(config, GUARD_KEY)
        return config

    update_tp_plan = update_attn_implementation
    """Called by Transformers 5.17, which has no `update_attn_implementation`."""

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        module, _, parameter = param_name.rpartition(".")
        loaded = (parameter == "weight" and module in self.layers) or param_name in self.experts
        return not self.pre_quantized and loaded

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            scheme = parse_scheme(self.quantization_config.scheme)
            others = {} if self.plan is None else self.plan.others
            name = param_name if param_name in self.experts else self.layers[param_name.removesuffix(".weight")]
            return others.get(name, scheme).weight.bits / 8
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _QuantizeOnLoad(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        where = getattr(model, "name_or_path", "") or "the model"
        self._refuse_disk(getattr(model, "hf_device_map", None))  # again, since Transformers may have inferred the device map
        refuse(where, tuple(self.failures[:3]))
        left = [name for name in self.layers if not isinstance(model.get_submodule(name), PackedWeight)]
        left += [name for name in self.experts if not is_set(model, name)]
        if left:
            raise CheckpointError(f"{where}: no file has the weight of {some(left)}, which was to be quantized")
        for name, parameter in plain_parameters(model):  # Transformers 5.17 leaves renamed tensors in the type of the file
            if parameter.dtype != self._plain_types.get(name, parameter.dtype):
                parameter.data = parameter.data.to(self._plain_types[name])
        if self.plan is not None:
            self.quantization_config.layers = {name: _entry(self.plan, name) for name in self.plan.layers}
            self.quantization_config.tied = dict(self.plan.tied) or None
            self.quantization_config.method = method_record(Rtn(self.quantization_config.search))
            self.quantization_config.modules_to_not_convert = sorted({row.name for row in self.plan.kept})
            for line in self.plan.lines():
                logger.info(line)
        require_finite(where, model)
        # Files are written with the model's own names: Transformers' mapping back to older names lacks the tensors of quantized
        # layers.
        model._weight_conversions = []  # type: ignore[assignment]
        if self.quantization_config.batch_invariant:
            make_batch_invariant(model, getattr(model, "dtype", torch.bfloat16))
        if any(module.is_split for module in model.modules() if isinstance(module, PackedParameters)):
            logger.warning(
                "tensor parallelism: every rank decodes its part of the quantized weights at each call, which is slow"
            )
            return model
        put_plain_weights_first(model)
        plan_on_cpu(model)
        # Layers are packed here, not at the first call, which torch.compile may trace. If each layer were packed when it is
        # loaded, all would be unpacked at once, because Transformers reads the state dict before this function is called.
        prepare_on_gpu(model)
        return model

    def get_weight_conversions(self) -> list[WeightRenaming]:
        """Returns the renamings of tensors in files from before the first release."""
        if not self.pre_quantized:
            return []
        return [WeightRenaming(rf"\.{old}$", f".{new}") for old, new in OLD_NAMES.items()]

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[None, dict[str, str]]:
        """Updates the layers of the configuration before config.json is written; returns None and {}.

        Layers may have been quantized, dequantized or merged with adapters since loading. The state dict is the model's own.
        """
        if not getattr(model, "_hf_peft_config_loaded", False):  # with PEFT adapters, Transformers saves only these
            config = self.quantization_config
            entries, tied = quantized_layers(model, config.tied)
            config.layers = Manifest(parse_scheme(config.scheme), entries).to_dict()["layers"]
            config.tied = tied or None
            if not entries:
                self.remove_quantization_config(model)
        return None, {}

    def update_device_map(self, device_map: Any) -> Any:
        """Returns `device_map`; raises ValueError for layers on disk in a model that is quantized while loading."""
        self._refuse_disk(device_map)
        return device_map

    def _refuse_disk(self, device_map: Any) -> None:
        if not self.pre_quantized and isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ValueError(
                "device_map: layers on disk have the weights of their files, which are not quantized; write a quantized folder "
                "first (lowbit quantize) and load that with this device_map"
            )

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        return dequantize_model(model, dtype, self.quantization_config.tied)

    @property
    def is_trainable(self) -> bool:
        """True if adapters can be trained: with 16-bit activations, since fused quantizing norms and gates have no gradient."""
        return parse_scheme(self.quantization_config.scheme).activation is None

    @property
    def is_compileable(self) -> bool:
        return True


def _entry(plan: Plan, name: str) -> dict[str, Any]:
    """Returns the entry of a layer in config.json."""
    other = plan.others.get(name)
    return {"shape": list(plan.layers[name])} | ({} if other is None else {"scheme": other.name})


def planned_layers(plan: Plan) -> Manifest:
    """Returns the manifest of the layers that a plan quantizes."""
    config = {"quant_method": METHOD, "format_version": FORMAT_VERSION, "scheme": plan.scheme.name, "tied": dict(plan.tied)}
    return Manifest.from_dict({**config, "layers": {name: _entry(plan, name) for name in plan.layers}}, "the plan")


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the floating-point parameters that belong to no quantized layer."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.is_floating_point() and not isinstance(module, PackedParameters):
                yield name, parameter


def _is_as_stated(model: nn.Module) -> bool:
    """Returns True if the model is of the class that config.json names. For another one, such as a classifier over a language
    model's layers, Transformers initialises and reports missing weights itself."""
    stated: list[str] | None = getattr(model.config, "architectures", None)
    return not stated or type(model).__name__ in stated


def _guarded(save: Callable[..., None]) -> Callable[..., None]:
    """Returns `PreTrainedConfig.save_pretrained` extended for lowbit: it writes the guard to config.json, and a model card
    unless another README.md exists. Transformers has no hook for either, drops the guard's key from configurations that it
    saves, and uploads a folder right after saving the weights."""

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedConfig, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        save(self, save_directory, *args, **kwargs)
        quantization = getattr(self, "quantization_config", None)
        if not isinstance(quantization, LowbitConfig) or quantization.layers is None:
            return
        folder = Path(save_directory)
        path, card = folder / "config.json", folder / CARD
        stated = json.loads(path.read_text(encoding="utf-8")) | {GUARD_KEY: GUARD}
        path.write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if not card.exists() or is_card(card):
            manifest = Manifest.from_dict(quantization.to_dict(), path)
            text = model_card(manifest, self.name_or_path or None)
            card.write_text(text, encoding="utf-8")

    return save_pretrained


PreTrainedConfig.save_pretrained = _guarded(PreTrainedConfig.save_pretrained)  # type: ignore[method-assign]


class Quantized:
    """A quantized weight with the interface of a tensor that Transformers moves to a device while loading."""

    def __init__(self, q: QuantTensor | ExpertTensor, dtype: torch.dtype | None = None) -> None:
        self.q, self.dtype = q, dtype

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Quantized:
        """Returns the same weight on `device`, for a model of `dtype`."""
        return Quantized(self.q if device is None else self.q.to(device), self.dtype if dtype is None else dtype)


class _QuantizeOnLoad(ConversionOps):
    """Replaces a layer by a quantized module when its weight, in 16 bits or quantized, is loaded."""

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
        if full_layer_name in self.quantizer.experts:
            del value
            return self._set_experts(input_dict, full_layer_name, weight, model, missing_keys)
        module = full_layer_name.removesuffix(".weight")
        name = self.quantizer.layers[module]
        placeholder = model.get_submodule(name)
        try:
            q, dtype = self._quantized(name, weight), weight.dtype
        except ValueError as error:  # raised after loading, because here Transformers would turn it into its own report
            self.quantizer.failures.append(str(error))
            return {}
        input_dict.clear()  # Transformers has a reference too; without it only the codes stay in memory
        del value, weight
        if isinstance(placeholder, PackedWeight):  # the second copy of tied weights that the files have twice
            if not torch.equal(placeholder.quant_tensor().codes, q.codes) or not torch.equal(placeholder.weight_scale, q.scale):
                self.quantizer.failures.append(
                    f"{full_layer_name} and {name}.weight differ, config.json says that they are tied; set "
                    "tie_word_embeddings to false"
                )
            return {}
        new = swap(model, name, q)
        del q
        _mark_loaded(new)
        if isinstance(placeholder, nn.Embedding):
            new.dtype = dtype  # type: ignore[assignment]
        followers = {n: owner for n, owner in self.quantizer.layers.items() if owner == name and n != name}
        for follower in followers:
            tie(model, follower, name)
            _mark_loaded(model.get_submodule(follower))
        _retie(model, followers)
        give_back_freed_memory()
        if missing_keys is not None:
            missing_keys -= {full_layer_name, *(f"{n}.weight" for n in (name, *followers))}
        return {}

    def _set_experts(
        self, input_dict: dict[str, Any], name: str, weight: Tensor | Quantized, model: nn.Module, missing: set[str] | None
    ) -> dict[str, Tensor]:
        """Replaces weights of experts, [E, ..] as the model has them, by quantized ones."""
        try:
            q = self._quantized_experts(name, weight, model.get_submodule(name.rpartition(".")[0]))
        except ValueError as error:
            self.quantizer.failures.append(str(error))
            return {}
        input_dict.clear()
        del weight
        _mark_loaded(swap_experts(model, name, q))
        _mark_loaded(model.get_submodule(name.rpartition(".")[0]), parameters=False)
        give_back_freed_memory()
        if missing is not None:
            missing -= {name}
        return {}

    def _quantized_experts(self, name: str, weight: Tensor | Quantized, experts: nn.Module) -> ExpertTensor:
        if isinstance(weight, Quantized):
            assert isinstance(weight.q, ExpertTensor)
            return weight.q
        plan = self.quantizer.plan
        weights = experts.weights if isinstance(experts, QuantExperts) else expert_weights(experts)
        assert plan is not None and weights is not None
        matrices, search = weights.matrices(weight), self.quantizer.quantization_config.search
        return quantized_experts(name, len(matrices), matrices.__getitem__, plan.scheme_of(name), rounding(search))

    def _quantized(self, name: str, weight: Tensor | Quantized) -> QuantTensor:
        if isinstance(weight, Quantized):
            assert isinstance(weight.q, QuantTensor)
            return weight.q
        plan = self.quantizer.plan
        assert plan is not None
        return quantized(name, weight, plan.others.get(name, plan.scheme), self.quantizer.quantization_config.search)


def give_back_freed_memory() -> None:
    """Returns freed heap pages to the operating system with glibc; takes some milliseconds.

    Once blocks of up to 32 MB have been freed, glibc allocates blocks of such sizes on the heap. Small allocations between them
    then keep freed pages from being returned: 30 to 100 of 180 MB after two decoder layers of 57 million weights (the model of
    tests/models/test_hf.py).
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


_READ_BY_THE_MODEL = {"longt5": ("wo",), "switch_transformers": ("wo",)}
"""Model type -> layers whose `weight` the model's code reads, although its class does not keep them in float32."""

_GATES = ("shared_expert_gate",)
"""Layers with one output that gate an expert; engines keep them in 16 bits, like routers."""


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def plan_for(model: nn.Module, scheme: str, skip: Iterable[str] | None, embeddings: bool, head: str | None = None) -> Plan:
    """Returns `plan_conversion` for a Transformers model, with its output embedding, ties and layers kept in float32.

    The class of a model names layers that stay in float32 (T5's `wo`, which overflows fp16 and whose `weight` is read by its
    code); gates of experts also stay. head: a scheme for LM head and embedding of a model with layers to quantize; overrides
    `skip` and `embeddings`.
    """
    if skip is None and not embeddings:
        output = model.get_output_embeddings()  # type: ignore[operator]
        skip = [name for name, module in model.named_modules() if module is output] or ["lm_head"]
    mapping: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    ties = {
        target.removesuffix(".weight"): source.removesuffix(".weight")
        for target, source in mapping.items()
        if target.endswith(".weight") and source.endswith(".weight")
    }
    kept = [*(getattr(model, "_keep_in_fp32_modules", None) or ()), *_READ_BY_THE_MODEL.get(_model_type(model), ()), *_GATES]
    skip = (*(skip or ()), *(pattern for name in kept for pattern in (name, f"*.{name}")))
    plan = plan_conversion(model, scheme, skip=skip, embeddings=embeddings, tied=ties)
    return plan if head is None else _with_head(plan, model, ties, parse_scheme(head))


def _with_head(plan: Plan, model: nn.Module, ties: Mapping[str, str], scheme: Scheme) -> Plan:
    """Returns the plan with embedding and LM head in `scheme`; the same plan if no other layer is quantized."""
    head_modules = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    names = {name: module for name, module in model.named_modules() if module in head_modules}
    if not set(plan.linears) - set(names) and not plan.experts:
        return plan
    linears, embeddings, tied = dict(plan.linears), dict(plan.embeddings), dict(plan.tied)
    for name, module in names.items():
        if name in ties:
            tied[name] = ties[name]
        elif type(module) is nn.Linear:
            linears[name] = (module.out_features, module.in_features)
        elif type(module) is nn.Embedding:
            embeddings[name] = (module.num_embeddings, module.embedding_dim)
    tied = {name: owner for name, owner in tied.items() if owner in linears or owner in embeddings}
    others = plan.others | {name: scheme for name in names if name in linears or name in embeddings}
    kept = [row for row in plan.kept if row.name not in others and row.name not in tied]
    return dataclasses.replace(plan, linears=linears, embeddings=embeddings, tied=tied, others=others, kept=kept)


def place_empty_modules(
    model: nn.Module, manifest: Manifest, types: Mapping[str, torch.dtype], where: Path | str = "config.json"
) -> None:
    """Replaces the layers that a checkpoint has quantized by quantized modules without weights.

    types: dtypes of the checkpoint's tensors. Raises CheckpointError, naming `where`, for layers that the model does not have
    or that cannot have this scheme.
    """
    for name, owner in {**{name: name for name in manifest.layers}, **manifest.tied}.items():
        try:
            _place_empty_module(model, name, manifest.layers[owner], owner, types)
        except ValueError as error:
            raise CheckpointError(f"{where}: quantization_config lists {name}: {error}") from error
    _retie(model, manifest.tied)


def _place_empty_module(model: nn.Module, name: str, entry: LayerEntry, owner: str, types: Mapping[str, torch.dtype]) -> None:
    layer = _layer(model, name, entry)
    if entry.experts:
        experts = empty_experts(model, name, entry.experts, entry.shape, entry.scheme, entry.input_parts)
        _set_types(experts, name, types)
        return
    new = empty_like(layer, entry.scheme, device="meta", input_parts=entry.input_parts, low_rank=entry.low_rank)
    _set_types(new, owner, types)
    model.set_submodule(name, new)


def _set_types(new: nn.Module, owner: str, types: Mapping[str, torch.dtype]) -> None:
    """Gives the parameters of an empty module, except for a bias, the dtypes of their tensors in the files. Otherwise
    Transformers would cast the tensors to the parameters' dtypes."""
    for suffix, parameter in list(new.named_parameters(recurse=False)):
        dtype = types.get(f"{owner}.{suffix}", parameter.dtype)
        if dtype != parameter.dtype and suffix != "bias":
            setattr(new, suffix, nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False))


def _layer(model: nn.Module, name: str, entry: LayerEntry) -> nn.Module:
    if entry.experts:
        return _experts(model, name, entry)
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{type(model).__name__} has no such module") from None
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(f"it is a {type(module).__name__}, not a linear layer or embedding")
    return module


def _experts(model: nn.Module, name: str, entry: LayerEntry) -> nn.Module:
    """Returns the module of experts that has the weights `name`; raises ValueError unless they fit the entry."""
    path, _, part = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"{type(model).__name__} has no such module") from None
    weights = module.weights if isinstance(module, QuantExperts) else expert_weights(module)
    if weights is None or part not in weights.shapes:
        raise ValueError(f"{path} is a {type(module).__name__}, which has no such weights of experts")
    if not isinstance(module, QuantExperts) and (reasons := expert_refusals(module, weights)):
        raise ValueError("; ".join(reasons))
    expected = [weights.experts, *weights.shapes[part]]
    if entry.stated_shape != expected:
        raise ValueError(f"its weights are {entry.stated_shape}, by the model's configuration they are {expected}")
    return module


def is_set(model: nn.Module, name: str) -> bool:
    """Returns True if the weights `name` of experts are quantized and loaded."""
    experts = model.get_submodule(name.rpartition(".")[0])
    return isinstance(experts, QuantExperts) and not experts.packed()[name.rpartition(".")[2]].weight_packed.is_meta


def _untie(model: nn.Module, layers: Container[str]) -> None:
    """Removes the ties of modules that have quantized weights of their own in the files, whatever config.json states."""
    mapping = dict(getattr(model, "all_tied_weights_keys", None) or {})
    kept = {target: source for target, source in mapping.items() if target.removesuffix(".weight") not in layers}
    if len(kept) < len(mapping):
        model.all_tied_weights_keys = kept  # type: ignore[assignment]


def _retie(model: nn.Module, ties: dict[str, str]) -> None:
    """Declares to Transformers that these modules share packed tensors instead of a `weight`."""
    if not ties:
        return
    mapping = dict(model.all_tied_weights_keys)  # type: ignore[arg-type]
    for follower, owner in ties.items():
        mapping.pop(f"{follower}.weight", None)
        for parameter, _ in model.get_submodule(owner).named_parameters(recurse=False):
            mapping[f"{follower}.{parameter}"] = f"{owner}.{parameter}"
    model.all_tied_weights_keys = mapping  # type: ignore[assignment]
    model._tied_weights_keys = mapping  # type: ignore[assignment]


def put_plain_weights_first(model: nn.Module) -> None:
    """Moves a module with plain weights before a quantized embedding in the order of submodules.

    Transformers takes the dtype of the first floating-point parameter as that of the model, also in config.json. The scales of
    a quantized embedding have another dtype. The order of submodules matters only in lists and sequences, which are not
    changed.
    """
    first = next((name for name, p in model.named_parameters() if p.is_floating_point()), "")
    if not isinstance(model.get_submodule(first.rpartition(".")[0]), PackedParameters):
        return
    for name, module in model.named_modules():
        parts = name.split(".")
        parents = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
        plain = not isinstance(module, PackedParameters) and any(
            p.is_floating_point() for p in module.parameters(recurse=False)
        )
        if plain and name and not any(isinstance(parent, (nn.ModuleList, nn.Sequential)) for parent in parents):
            for parent, part in zip(parents, parts, strict=True):
                others = dict(parent._modules)
                parent._modules.clear()
                parent._modules.update({part: others[part], **others})
            return


def _leave_as_loaded(model: nn.Module, layers: Iterable[str]) -> None:
    """Keeps Transformers from initialising the parents of these layers, whose weights all come from files.

    Some parents initialise the `weight` of their layers (T5's attention), which quantized ones lack. Modules with parameters or
    buffers of their own are still initialised. So is a model whose class is not the one of config.json, because the files lack
    some of its weights.
    """
    for name in layers:
        parent = model.get_submodule(name.rpartition(".")[0])
        own = any(True for _ in (*parent.parameters(recurse=False), *parent.buffers(recurse=False)))
        if not own and (parent is not model or _is_as_stated(model)):
            parent._is_hf_initialized = True  # type: ignore[assignment]


def _mark_loaded(module: nn.Module, parameters: bool = True) -> None:
    """Keeps Transformers from initialising a module, and those of its parameters that have their values already."""
    module._is_hf_initialized = True  # type: ignore[assignment]
    for parameter in module.parameters(recurse=False) if parameters else ():
        if parameter.device.type != "meta":
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def refuse(where: Path | str, reasons: tuple[str, ...]) -> None:
    """Raises CheckpointError with the reasons, if there are any."""
    if reasons:
        raise CheckpointError(f"{where}: {'; '.join(reasons)}")
