"""vLLM's QuantizationConfig: which layers of a model are quantized, and how. Three kinds of checkpoints are supported.

lowbit               config.json lists every quantized matrix (`Manifest`) and names this method
16 bits              --hf-overrides '{"quantization_config": {"quant_method": "lowbit", "scheme": "w4a16_g128"}}'
another tool's       --quantization lowbit (GPTQ, AWQ, compressed-tensors, fp8: `checkpoint.detect.SCHEMAS`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import vllm
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from lowbit.vllm import version_refusals

METHOD = "lowbit"

_READ_BY_OTHERS = ("kv_b_proj",)
"""Layers whose weights vLLM reads directly, without calling a method (multi-head latent attention)."""

_DRAFT = "draft_model."
"""vLLM's prefix of the names of a draft model."""


class LowbitQuantization(QuantizationConfig):
    """The quantized layers of a model; `from_config` builds it from `quantization_config` in config.json."""

    def __init__(self, source: Any = None) -> None:
        super().__init__()
        if source is None:  # vLLM passes no source if config.json has no `quantization_config`
            scheme = '{"quantization_config": {"quant_method": "lowbit", "scheme": "w4a16_g128"}}'
            raise ValueError(
                "--quantization lowbit: config.json states no quantization_config; quantize the model first (lowbit quantize), "
                f"or state a scheme: --hf-overrides '{scheme}'"
            )
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

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Returns a mapper that keeps all names, so that act-order (`g_idx`) is loaded."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Returns "lowbit" for other tools' checkpoints if the user names the method."""
        return METHOD if user_quant == METHOD and hf_quant_cfg.get("quant_method") != METHOD else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LowbitQuantization:
        """Returns the object for a `quantization_config`. Raises ValueError for an unsupported version of vLLM, and
        CheckpointError, naming the field, for an invalid configuration."""
        reasons = version_refusals(vllm.__version__)
        if reasons:
            raise ValueError("; ".join(reasons))
        from lowbit.vllm.sources import source_of

        return cls(source_of(config))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames the layers to vLLM's names."""
        self.source = self.source.renamed(
            lambda names: {old: new for new, old in hf_to_vllm_mapper.apply_dict({name: name for name in names}).items()}
        )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns the method of a layer, or None if vLLM computes it in 16 bits. Raises ValueError, naming the layer, if it is
        quantized and not supported."""
        from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        from lowbit.vllm.loader_patches import is_experts, patch_loader
        from lowbit.vllm.methods import LowbitEmbeddingMethod, LowbitLinearMethod, is_tied, model_type, use_kernels
        from lowbit.vllm.sources import VocabLayer, order_refusals

        patch_loader()
        use_kernels()  # before weights are loaded, since kernels pack them
        prefix = prefix.removeprefix(_DRAFT)
        if isinstance(layer, LinearBase):
            matrices = self.source.matrices(prefix, self.packed_modules_mapping, torch.get_default_dtype())
            if all(matrix.is_plain for matrix in matrices):
                return UnquantizedLinearMethod()
            if prefix.rpartition(".")[2] in _READ_BY_OTHERS:
                raise ValueError(
                    f"{prefix}: vLLM reads the weights of this layer itself (multi-head latent attention), which must not be "
                    f"packed; leave it in 16 bits (modules_to_not_convert: *.{_READ_BY_OTHERS[0]})"
                )
            reasons = order_refusals(model_type(), prefix, matrices) if isinstance(layer, QKVParallelLinear) else ()
            if reasons:
                raise ValueError(f"{prefix}: {'; '.join(reasons)}")
            return LowbitLinearMethod(prefix, matrices)
        if isinstance(layer, VocabParallelEmbedding):
            shape = (layer.org_vocab_size, layer.embedding_dim)
            vocab = VocabLayer(prefix, shape, isinstance(layer, ParallelLMHead), is_tied())
            matrix = self.source.vocab_matrix(vocab, torch.get_default_dtype())
            return None if matrix is None else LowbitEmbeddingMethod(matrix, vocab.is_head or vocab.tied)
        if is_experts(layer):
            experts = self.source.experts(prefix)
            if experts is not None:
                from lowbit.vllm.expert_method import LowbitExpertsMethod

                return LowbitExpertsMethod(layer, experts)
        return None
