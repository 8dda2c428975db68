"""SGLang's QuantizationConfig: which layers of a checkpoint are quantized, and how they are loaded and multiplied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import Tensor, nn

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.schema import METHOD
from lowbit.vllm.loading import LayerLoader, ShardSpec, loaded, register_parameters, torch_defaults, whole_outputs
from lowbit.vllm.matrices import Matrix
from lowbit.vllm.product import Product
from lowbit.vllm.sources import OwnCheckpoint, VocabLayer, WeightSource, source_of
from lowbit.vllm.warm_up import compile_kernels, token_counts

MOST_TOKENS = 8192
"""SGLang's default of --chunked-prefill-size, the largest number of tokens in a step."""

_ADDED = ("packed_modules_mapping", "hf_config")
"""Fields that SGLang adds to `quantization_config`."""

_READ_BY_OTHERS = ("kv_b_proj",)
"""Layers whose weights SGLang reads directly, without calling a method (multi-head latent attention)."""


class LowbitSGLang(QuantizationConfig):  # type: ignore[misc]
    """The quantized layers of a lowbit checkpoint."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self.source = source

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_scaled_act_names(self) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LowbitSGLang:
        """Returns the object for a `quantization_config`. Raises CheckpointError for an invalid configuration, and for one that
        states no quantized layers."""
        stated = {key: value for key, value in config.items() if key not in _ADDED}
        source = source_of(stated)
        if not isinstance(source, OwnCheckpoint):
            raise CheckpointError(
                "config.json: states no quantized layers; SGLang needs a quantized checkpoint: lowbit quantize MODEL FOLDER"
            )
        return cls(source)

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Renames the layers to SGLang's names."""
        self.source = self.source.renamed(
            lambda names: {old: new for new, old in hf_to_sglang_mapper.apply_dict({name: name for name in names}).items()}
        )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the method of a layer, or None if SGLang computes it in 16 bits. Raises ValueError, naming the layer, if it
        is quantized and not supported."""
        if isinstance(layer, LinearBase):
            matrices = self.source.matrices(prefix, self.packed_modules_mapping, torch.get_default_dtype())
            if all(matrix.is_plain for matrix in matrices):
                return UnquantizedLinearMethod()
            if prefix.rpartition(".")[2] in _READ_BY_OTHERS:
                raise ValueError(f"{prefix}: SGLang reads the weights of this layer itself; leave it in 16 bits")
            if isinstance(layer, QKVParallelLinear) and len(matrices) == 1:
                raise ValueError(f"{prefix}: one matrix for q, k and v is not supported in SGLang; use vLLM")
            return LowbitSGLangLinear(prefix, matrices)
        if isinstance(layer, VocabParallelEmbedding):
            shape = (layer.org_vocab_size, layer.embedding_dim)
            if self.source.vocab_matrix(
                VocabLayer(prefix, shape, isinstance(layer, ParallelLMHead), False), torch.get_default_dtype()
            ):
                raise ValueError(f"{prefix}: a quantized LM head or embedding is not supported in SGLang; use vLLM")
        is_experts = any(cls.__name__ == "FusedMoE" for cls in type(layer).__mro__)
        if is_experts and self.source.experts(prefix) is not None:
            raise ValueError(f"{prefix}: quantized experts are not supported in SGLang; leave them in 16 bits, or use vLLM")
        return None


class LowbitSGLangLinear(LinearMethodBase):  # type: ignore[misc]
    """The linear layer `name` with its `matrices`, each for one or several of its outputs."""

    def __init__(self, name: str, matrices: Sequence[Matrix]) -> None:
        self.name, self.matrices = name, matrices

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int,
        params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        """Registers the parameters to load, without allocating weights."""
        group = getattr(layer, "tp_group", None)
        rank, size = get_group_rank_size(group)
        if get_group_rank_size(getattr(layer, "kv_tp_group", group)) != (rank, size):
            raise ValueError(f"{self.name}: k and v split differently from q are not supported in SGLang; use vLLM")
        parts = tuple(output_partition_sizes)
        spec = ShardSpec(parts, whole_outputs(layer, parts), rank, size, input_size // input_size_per_partition)
        register_parameters(layer, LayerLoader(self.matrices, spec, input_size, params_dtype, torch.empty(0).device, Product))
        self.dtype, self.k = params_dtype, input_size_per_partition

    @torch_defaults()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weights for the device's kernels, and compiles these kernels."""
        product: Product = loaded(layer)
        product.prepare(self.name, self.dtype)
        adds_bias = not layer.skip_bias_add and (self.k == layer.input_size or get_group_rank_size(layer.tp_group)[0] == 0)
        bias = getattr(layer, "bias", None) if adds_bias else None
        compile_kernels(product, self.k, self.dtype, token_counts((), MOST_TOKENS), bias)
        layer.add_module("product", product)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x [.., K of this rank] times this rank's rows, plus the bias."""
        y: Tensor = layer.product(x, bias)
        return y
