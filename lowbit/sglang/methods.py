"""What SGLang asks: which layers of a checkpoint are quantized, and how one is loaded and multiplied by."""

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
from lowbit.vllm.loading import Cut, Loading, expect, loaded, usual_defaults, whole_outputs
from lowbit.vllm.matrices import Matrix
from lowbit.vllm.product import Product
from lowbit.vllm.sources import End, OwnCheckpoint, Source, source_of
from lowbit.vllm.warm_up import compile_kernels, token_counts

MOST_TOKENS = 8192
"""Tokens that SGLang computes at once where nobody says another number (--chunked-prefill-size)."""

_ADDED = ("packed_modules_mapping", "hf_config")
"""Fields that SGLang adds to what config.json states."""

_READ_BY_OTHERS = ("kv_b_proj",)
"""Layers whose weights SGLang reads itself, without calling a method (multi-head latent attention)."""


class LowbitSGLang(QuantizationConfig):  # type: ignore[misc]
    """What is quantized in a checkpoint of ours."""

    def __init__(self, source: Source) -> None:
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
        """Raises CheckpointError, naming the field, for a configuration that states no layers."""
        stated = {key: value for key, value in config.items() if key not in _ADDED}
        source = source_of(stated)
        if not isinstance(source, OwnCheckpoint):
            raise CheckpointError("config.json: SGLang serves models that are quantized already: lowbit quantize MODEL FOLDER")
        return cls(source)

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Gives layers the names that SGLang's model has for them."""
        self.source = self.source.renamed(
            lambda names: {old: new for new, old in hf_to_sglang_mapper.apply_dict({name: name for name in names}).items()}
        )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """What a layer is computed with; None for what SGLang computes in 16 bits. Raises ValueError, naming the layer, for one
        that is quantized and cannot be computed."""
        if isinstance(layer, LinearBase):
            matrices = self.source.matrices(prefix, self.packed_modules_mapping, torch.get_default_dtype())
            if all(matrix.is_plain for matrix in matrices):
                return UnquantizedLinearMethod()
            if prefix.rpartition(".")[2] in _READ_BY_OTHERS:
                raise ValueError(f"{prefix}: SGLang reads the weights of this layer itself; leave it in 16 bits")
            if isinstance(layer, QKVParallelLinear) and len(matrices) == 1:
                raise ValueError(
                    f"{prefix}: q, k and v that are one matrix in the files are not supported here; vLLM takes them"
                )
            return LowbitSGLangLinear(prefix, matrices)
        if isinstance(layer, VocabParallelEmbedding):
            shape = (layer.org_vocab_size, layer.embedding_dim)
            if self.source.end(End(prefix, shape, isinstance(layer, ParallelLMHead), False), torch.get_default_dtype()):
                raise ValueError(f"{prefix}: a quantized LM head or embedding is not supported here; vLLM takes it")
        if any(cls.__name__ == "FusedMoE" for cls in type(layer).__mro__) and (reasons := self.source.expert_refusals(prefix)):
            raise ValueError(f"{prefix}: {'; '.join(reasons)}")
        return None


class LowbitSGLangLinear(LinearMethodBase):  # type: ignore[misc]
    """The linear layer `name`, made of `matrices`, one for each of its outputs or one for several."""

    def __init__(self, name: str, matrices: Sequence[Matrix]) -> None:
        self.name, self.matrices = name, matrices

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int,
        params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        """Notes what is to be loaded: no memory is taken before it comes."""
        group = getattr(layer, "tp_group", None)
        rank, size = get_group_rank_size(group)
        if get_group_rank_size(getattr(layer, "kv_tp_group", group)) != (rank, size):
            raise ValueError(f"{self.name}: k and v that are split otherwise than q are not supported here; vLLM takes them")
        parts = tuple(output_partition_sizes)
        cut = Cut(parts, whole_outputs(layer, parts), rank, size, input_size // input_size_per_partition)
        expect(layer, Loading(self.matrices, cut, input_size, params_dtype, torch.empty(0).device, Product))
        self.dtype, self.k = params_dtype, input_size_per_partition

    @usual_defaults()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Brings the weights into the form of their device's kernels, and compiles these."""
        product: Product = loaded(layer)
        product.prepare(self.name, self.dtype)
        adds_bias = not layer.skip_bias_add and (self.k == layer.input_size or get_group_rank_size(layer.tp_group)[0] == 0)
        bias = getattr(layer, "bias", None) if adds_bias else None
        compile_kernels(product, self.k, self.dtype, token_counts((), MOST_TOKENS), bias)
        layer.add_module("product", product)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [.., K of this rank] times this rank's rows, plus the bias."""
        y: Tensor = layer.product(x, bias)
        return y
