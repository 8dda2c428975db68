"""Reads TensorRT-LLM checkpoints of Llama, Mistral, Qwen2 and Qwen3 models; writes those of Llama models in W4A16_AWQ.

    config.json            {"architecture": "LlamaForCausalLM", "quantization": {"quant_algo": "W4A16_AWQ", ...}, ...}
    rank0.safetensors      transformer.layers.0.attention.qkv   q, k and v, one below the other      mlp.fc     gate_proj
                                            ....attention.dense   o_proj                             mlp.gate   up_proj
                                                                                                     mlp.proj   down_proj

`models/tensorrt_llm_layers.py` describes the tensors of a layer. q, k and v become separate layers, as in Transformers.
Source: TensorRT-LLM, docs/source/architecture/checkpoint.md; files that ModelOpt 0.41 exports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.checkpoint.experts import ExpertEntry, ExpertTensors
from lowbit.checkpoint.foreign import ForeignEntry, ForeignLayer
from lowbit.formats import IntFormat, PerGroup, QuantTensor, ZeroPoint
from lowbit.models.skeleton import damaged
from lowbit.models.tensorrt_llm_layers import AWQ, schema
from lowbit.pack.tensorrt_llm import to_signed_row_major

WEIGHTS = "rank0.safetensors"
GROUPS = (64, 128)
"""Group sizes that TensorRT-LLM's kernels support."""

_LINEAR = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
_FUSED = {name: fused for fused, names in _LINEAR.items() for name in names}
_GLOBAL = {
    "model.embed_tokens.weight": "transformer.vocab_embedding.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "lm_head.weight": "lm_head.weight",
}
_NORMS = {"input_layernorm.weight": "input_layernorm.weight", "post_attention_layernorm.weight": "post_layernorm.weight"}
_IN_LAYER = re.compile(r"(model|transformer)\.layers\.(\d{1,5})\.(.+)")
_HEAD_NORMS = {
    "self_attn.q_norm.weight": "attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "attention.k_layernorm.weight",
}
_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}


def is_tensorrt_llm(config: Mapping[str, Any]) -> bool:
    """Returns True for the config.json of a TensorRT-LLM checkpoint."""
    return isinstance(config.get("architecture"), str) and isinstance(config.get("quantization"), dict)


class TensorrtLlmReader:
    """Reads the layers and plain tensors of a checkpoint under Transformers' names.

    The constructor checks names, dtypes and shapes of all tensors; it raises CheckpointError for unsupported models, algorithms
    and layouts.
    """

    def __init__(self, folder: Path) -> None:
        self.reader = CheckpointReader(folder, weights=WEIGHTS)
        self.config, self._where = self.reader.config, folder / "config.json"
        self._tensor_names = frozenset(self.reader.names())
        mapping = self.config.get("mapping") or {}
        if not isinstance(mapping, dict):
            raise CheckpointError(f"{self._where}: mapping is a JSON object, got {mapping!r}")
        if mapping.get("world_size", 1) != 1:
            raise CheckpointError(
                f"{self._where}: the model is split over {mapping['world_size']} ranks; read are files of one"
            )
        self.schema = schema(self.config, self._where, self._weight_type())
        self.notes: list[str] = []
        self.model_config = self._read_config()
        heads, shared = self.model_config.num_attention_heads, self.model_config.num_key_value_heads
        size: int = self.model_config.head_dim
        self._rows = {"self_attn.q_proj": (0, heads * size)}
        self._rows["self_attn.k_proj"] = (heads * size, (heads + shared) * size)
        self._rows["self_attn.v_proj"] = ((heads + shared) * size, (heads + 2 * shared) * size)
        self.entries: dict[str, ForeignEntry] = {}
        self.experts: dict[str, ExpertEntry] = {}
        self.plain: list[str] = []
        self._fused: dict[str, str] = {}
        self._names: dict[str, str] = {}
        for name in self.reader.names():
            self._add_tensor(name)
        for name in self.reader.names():
            base, _, suffix = name.rpartition(".")
            if suffix in self.schema.suffixes and name not in self._names.values() and base not in self._fused.values():
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {name}: belongs to a layer without weights, {base}.weight is missing"
                )

    def expert_layer(self, name: str, device: torch.device | str = "cpu") -> ExpertTensors:
        """Raises CheckpointError: models with experts are not read."""
        raise CheckpointError(f"{self._where}: {name!r} is not among its layers")

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor:
        """Returns one layer on `device`, computed on the host, without a pre_quant_scale of ones."""
        fused = self._fused[name]
        tensors = {s: self.reader.get(f"{fused}.{s}") for s in self.schema.suffixes if f"{fused}.{s}" in self._tensor_names}
        q = self.schema.read(ForeignLayer(fused, tensors, self.reader.folder / WEIGHTS))
        begin, end = self._rows_of(name, q.shape[0])
        zero = None if q.zero is None else q.zero[begin:end].contiguous()
        codes, scale = q.codes[begin:end].contiguous(), q.scale[begin:end].contiguous()
        return QuantTensor(codes, scale, zero, q.scheme, q.input_transform).to(device)

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns one layer's weights [N, K]."""
        return self.layer(name).dequantize(dtype)

    def get(self, name: str) -> Tensor:
        """Returns a plain tensor."""
        tensor = self.reader.get(self._names[name])
        if not name.endswith("_proj.bias"):
            return tensor
        begin, end = self._rows_of(name.removesuffix(".bias"), tensor.shape[0])
        return tensor[begin:end].contiguous()

    def _weight_type(self) -> torch.dtype:
        """Returns the dtype of the decoder's weights in the files."""
        weights = (name for name in self._tensor_names if any(name.endswith(f".{linear}.weight") for linear in _LINEAR))
        name = min(weights, default=None)
        if name is None:
            raise CheckpointError(f"{self.reader.folder / WEIGHTS}: holds no layer such as transformer.layers.0.mlp.fc.weight")
        return self.reader.info(name).dtype

    def _read_config(self) -> PreTrainedConfig:
        config = self.config
        if config["architecture"] not in _CONFIGS:
            raise CheckpointError(
                f"{self._where}: architecture {config['architecture']!r}; read are checkpoints of {', '.join(_CONFIGS)}"
            )
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        wrong = [name for name in names if type(config.get(name)) is not int or config[name] < 1]
        if wrong:
            raise CheckpointError(f"{self._where}: {wrong[0]} is a positive number, got {config.get(wrong[0])!r}")
        heads = config["num_attention_heads"]
        if "rotary_base" not in config:
            self.notes.append("config.json states no rotary_base; 10000 is taken")
        kind = _CONFIGS[config["architecture"]]
        with damaged(self._where, f"Transformers cannot make a {kind.__name__} of it", config):
            scaling = dict(config.get("rotary_scaling") or {})
            scaled = scaling.get("rope_type") or scaling.get("type") or "default"  # older configs have the shorter name
            return kind(
                **{name: config[name] for name in names},
                num_key_value_heads=config.get("num_key_value_heads", heads),
                head_dim=config.get("head_size") or config["hidden_size"] // heads,
                max_position_embeddings=config.get("max_position_embeddings") or 2048,
                rms_norm_eps=config.get("norm_epsilon", 1e-5),
                hidden_act=config.get("hidden_act", "silu"),
                rope_parameters={**scaling, "rope_type": scaled, "rope_theta": config.get("rotary_base", 10000.0)},
                tie_word_embeddings=False,
                dtype=config.get("dtype"),
                **({"attention_bias": self._has_bias("attention.qkv")} if kind is LlamaConfig else {}),
                **({"sliding_window": None} if kind is MistralConfig else {}),
            )

    def _has_bias(self, linear: str) -> bool:
        return any(name.endswith(f".{linear}.bias") for name in self._tensor_names)

    def _rows_of(self, name: str, n: int) -> tuple[int, int]:
        """Returns the range of the n rows of a fused layer that belongs to a layer of Transformers."""
        return self._rows.get(name.split(".", 3)[-1], (0, n))

    def _add_tensor(self, tensor: str) -> None:
        """Maps a tensor to Transformers' names."""
        base, _, suffix = tensor.rpartition(".")
        match = _IN_LAYER.fullmatch(base)
        if match is not None and match[3] in _LINEAR and suffix in self.schema.suffixes:
            if suffix == "weight":
                self._add_layer(base, [f"model.layers.{match[2]}.{part}" for part in _LINEAR[match[3]]])
            return
        names = {old: new for new, old in _GLOBAL.items()}
        match = _IN_LAYER.fullmatch(tensor)
        if match is not None:
            norms = _NORMS | _HEAD_NORMS
            names |= {f"transformer.layers.{match[2]}.{old}": f"model.layers.{match[2]}.{new}" for new, old in norms.items()}
        parts = _bias_parts(tensor) or ((names[tensor],) if tensor in names else ())
        if not parts:
            raise CheckpointError(
                f"{self.reader.folder / WEIGHTS}: {tensor}: has no counterpart in Transformers' "
                f"{self.config['architecture']} that is known here"
            )
        if len(parts) > 1 and self.reader.info(tensor).shape != (self._rows["self_attn.v_proj"][1],):
            raise CheckpointError(
                f"{self.reader.folder / WEIGHTS}: {tensor}: {list(self.reader.info(tensor).shape)}, by config.json q, k and v "
                f"have {self._rows['self_attn.v_proj'][1]} rows together"
            )
        for name in parts:
            self._names[name] = tensor
            self.plain.append(name)

    def _add_layer(self, base: str, parts: list[str]) -> None:
        """Checks dtypes and shapes of a quantized layer and adds the layers that are fused in it."""
        tensors: dict[str, Any] = {}
        for suffix in self.schema.suffixes:
            full = f"{base}.{suffix}"
            if full in self._tensor_names:
                tensors[suffix] = self.reader.get(full) if suffix in self.schema.small else self.reader.info(full)
        layer = ForeignLayer(base, tensors, self.reader.folder / WEIGHTS)
        entry = self.schema.entry(layer)
        n, k = entry.shape
        together = self._rows["self_attn.v_proj"][1]
        if len(parts) > 1 and n != together:
            raise layer.error("weight", f"q, k and v have {together} rows together, found {n}")
        for name in parts:
            begin, end = self._rows_of(name, n)
            self._fused[name] = base
            self.entries[name] = ForeignEntry((end - begin, k), entry.scheme)


def _bias_parts(tensor: str) -> tuple[str, ...]:
    """Returns Transformers' names of a bias tensor of the files; () for other tensors."""
    match = _IN_LAYER.fullmatch(tensor.removesuffix(".bias"))
    if not tensor.endswith(".bias") or match is None or match[3] not in _LINEAR:
        return ()
    return tuple(f"model.layers.{match[2]}.{part}.bias" for part in _LINEAR[match[3]])


def refusals(name: str, q: QuantTensor) -> tuple[str, ...]:
    """Returns why a checkpoint of TensorRT-LLM cannot hold a layer of this name; empty if it can."""
    match, scheme, reasons = _IN_LAYER.fullmatch(name), q.scheme, []
    if match is None or match[3] not in _FUSED:
        return ("TensorRT-LLM's checkpoints of Llama have quantized layers in the decoder only, under known names",)
    if not isinstance(scheme.weight, IntFormat) or scheme.weight.bits != 4 or not isinstance(scheme.granularity, PerGroup):
        return (
            f"TensorRT-LLM's checkpoints hold 4-bit integers in groups in plain order, not {scheme}; those of 8 bits and of "
            "whole channels lie in the order of one generation of GPUs: let TensorRT-LLM make them of the 16-bit model",
        )
    if scheme.zero is not ZeroPoint.NONE:
        reasons.append("TensorRT-LLM stores (8 - zero) * scale in 16 bits, which would round zero points")
    if scheme.granularity.size not in GROUPS:
        reasons.append(f"TensorRT-LLM takes groups of {' and '.join(map(str, GROUPS))}, these are of {scheme.granularity.size}")
    elif q.shape[1] % scheme.granularity.size:
        reasons.append(f"groups there are full, {scheme.granularity.size} does not divide K {q.shape[1]}")
    if q.shape[0] % 2:
        reasons.append(f"bytes there hold two rows, N {q.shape[0]} is odd")
    reasons += [f"TensorRT-LLM's checkpoints have no {what}" for what in q.input_transform.parts.words("pre_quant_scale")]
    if q.low_rank is not None:
        reasons.append("TensorRT-LLM's checkpoints have no low-rank correction")
    return tuple(reasons)


def fused_layer(parts: list[QuantTensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors of a TensorRT-LLM layer by suffix, concatenated from `parts` along N.

    Without a pre_quant_scale, prequant_scaling_factor is a tensor of ones in `dtype`, the model's dtype.
    """
    codes, factor = torch.cat([q.codes for q in parts]), parts[0].input_transform.pre_quant_scale
    factor = torch.ones(codes.shape[1], dtype=dtype) if factor is None else factor
    return {
        "weight": to_signed_row_major(codes, 4).t().contiguous(),
        "weights_scaling_factor": torch.cat([q.scale for q in parts]).contiguous(),
        "prequant_scaling_factor": factor.contiguous(),
    }


def fused_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns TensorRT-LLM's name of the fused layer of a linear layer, and the names of all linear layers in it, in order."""
    match = _IN_LAYER.fullmatch(name)
    assert match is not None
    fused = _FUSED[match[3]]
    return f"transformer.layers.{match[2]}.{fused}", tuple(f"model.layers.{match[2]}.{part}" for part in _LINEAR[fused])


def plain_name(name: str) -> str | None:
    """Returns TensorRT-LLM's name of a plain tensor; None if it has none."""
    match = _IN_LAYER.fullmatch(name)
    if match is not None and match[3] in _NORMS:
        return f"transformer.layers.{match[2]}.{_NORMS[match[3]]}"
    return _GLOBAL.get(name)


def config_refusals(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns why a model of this configuration cannot be written; empty if it can."""
    reasons = []
    if config.get("model_type") != "llama":
        reasons.append(f"models of the type {config.get('model_type')!r} are not written for TensorRT-LLM, llama ones are")
    if config.get("attention_bias") or config.get("mlp_bias"):
        reasons.append("Llama models with biases are not written for TensorRT-LLM")
    return tuple(reasons)


def config_of(config: Mapping[str, Any], group: int, version: str) -> dict[str, Any]:
    """Returns TensorRT-LLM's config.json of a Llama model with Transformers' `config`, quantized in groups."""
    model = LlamaConfig(**config)
    rope = dict(model.rope_parameters or {})
    base = rope.pop("rope_theta", 10000.0)
    scaled = rope.get("rope_type", "default") != "default"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16").removeprefix("torch.")
    return {
        "producer": {"name": "lowbit", "version": version},
        "architecture": "LlamaForCausalLM",
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_size": model.head_dim or model.hidden_size // model.num_attention_heads,
        "hidden_act": model.hidden_act,
        "norm_epsilon": model.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": base,
        "rotary_scaling": rope if scaled else None,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {
            "quant_algo": AWQ,
            "kv_cache_quant_algo": None,
            "group_size": group,
            "has_zero_point": False,
            "pre_quant_scale": True,
            "exclude_modules": ["lm_head"],
        },
    }
