"""Implements vLLM's interface of linear layers and embeddings: create parameters, load, process after loading, apply."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from lowbit.formats import QuantTensor
from lowbit.models.numerics import check_stacked
from lowbit.nn import QuantEmbedding
from lowbit.vllm.loading import LayerLoader, ShardSpec, loaded, register_parameters, torch_defaults, whole_outputs
from lowbit.vllm.matrices import Matrix
from lowbit.vllm.product import Product, Shard
from lowbit.vllm.warm_up import compile_kernels, named_kernels, token_counts, use_kernels_file


def is_tied() -> bool:
    """Returns True if the model that vLLM is building ties embedding and LM head."""
    return bool(getattr(_text_config(), "tie_word_embeddings", False))


def model_type() -> str:
    """Returns Transformers' model_type of the language model that vLLM is building."""
    return str(getattr(_text_config(), "model_type", ""))


def _text_config() -> Any:
    return get_current_vllm_config().model_config.hf_config.get_text_config()


def is_dummy() -> bool:
    """Returns True if vLLM loads no weights (load format "dummy")."""
    return bool(get_current_vllm_config().load_config.load_format == "dummy")


def use_kernels() -> None:
    """Uses a kernels file: the one that `--additional-config` names (`warm_up.named_kernels`), else one beside the checkpoint,
    else that of an installed package. Raises OSError for a named file that cannot be read."""
    config = get_current_vllm_config()
    use_kernels_file(named_kernels(config.additional_config), config.model_config.model)


def refuse_offload(name: str) -> None:
    """Raises ValueError if vLLM would offload this layer. vLLM chooses the weights to offload before loading, when a packed
    layer has no weights yet."""
    offload = get_current_vllm_config().offload_config
    patterns = offload.uva.cpu_offload_params  # parts of names; empty means all layers
    offloaded = offload.uva.cpu_offload_gb > 0 and (not patterns or any(f".{part}." in f".{name}." for part in patterns))
    if offloaded or offload.prefetch.offload_group_size > 0:
        raise ValueError(
            f"{name}: quantized layers cannot be offloaded to CPU memory (--cpu-offload-gb, --offload-group-size); leave "
            "the option out, and quantize to fewer bits or use more ranks (--tensor-parallel-size) if they do not fit"
        )


class LowbitLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """The linear layer `name` with its `matrices`, each for one or several of its outputs."""

    def __init__(self, name: str, matrices: Sequence[Matrix]) -> None:
        self.name, self.matrices = name, matrices

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int,
        params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        """Registers the parameters to load, without allocating weights."""
        refuse_offload(self.name)
        spec = ShardSpec(
            tuple(output_partition_sizes), whole_outputs(layer, output_partition_sizes), layer.tp_rank, layer.tp_size,
            input_size // input_size_per_partition,
        )  # fmt: skip
        device = torch.empty(0).device
        register_parameters(layer, LayerLoader(self.matrices, spec, input_size, params_dtype, device, Product), is_dummy())
        self.dtype, self.k, self.counts = params_dtype, input_size_per_partition, token_counts_of()

    @torch_defaults()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weights for the device's kernels, and compiles these kernels."""
        product: Product = loaded(layer)
        product.prepare(self.name, self.dtype, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
        # If K is split over ranks, only rank 0 adds the bias.
        adds_bias = not layer.skip_bias_add and (self.k == layer.input_size or layer.tp_rank == 0)
        compile_kernels(product, self.k, self.dtype, self.counts, getattr(layer, "bias", None) if adds_bias else None)
        if layer.tp_size == 1 and not is_dummy():
            folder = Path(get_current_vllm_config().model_config.model)
            device = next(product.buffers(), next(product.parameters())).device
            check_stacked([matrix.name for matrix in self.matrices], product, self.k, self.dtype, device, folder)
        layer.add_module("product", product)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x [.., K of this rank] times this rank's rows, plus the bias."""
        y: Tensor = layer.product(x, bias)
        return y


def token_counts_of(*, head: bool = False) -> tuple[int, ...]:
    """Returns the numbers of tokens for which vLLM will run the layers; with `head`, those for the LM head, which computes one
    token per request."""
    config = get_current_vllm_config()
    most = config.scheduler_config.max_num_seqs if head else config.scheduler_config.max_num_batched_tokens
    return token_counts(config.compilation_config.cudagraph_capture_sizes or (), most)


class LowbitEmbeddingMethod(QuantizeMethodBase):  # type: ignore[misc]
    """An embedding, an LM head, or one matrix for both; `multiplies`: True if it is used as an LM head."""

    def __init__(self, matrix: Matrix, multiplies: bool) -> None:
        self.matrix, self.multiplies = matrix, multiplies

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int,
        params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        """Registers the parameters to load. This rank has a range of the vocabulary's rows, padded so that all ranks have
        equally many."""
        refuse_offload(self.matrix.name)
        held = layer.shard_indices
        if held.num_added_elements:
            raise ValueError(
                f"{self.matrix.name}: LoRA cannot add tokens to a quantized embedding; leave the embedding in 16 bits"
            )
        rows, (part,) = (held.org_vocab_start_index, held.org_vocab_end_index), output_partition_sizes
        spec = ShardSpec((part,), (layer.org_vocab_size,), rows=rows, fill=part)
        device = torch.empty(0).device
        register_parameters(
            layer, LayerLoader([self.matrix], spec, input_size, params_dtype, device, lambda shards: shards[0]), is_dummy()
        )
        self.dtype, self.k, self.counts = params_dtype, input_size, token_counts_of(head=True)

    def tie_weights(self, layer: nn.Module, embed_tokens: Any) -> nn.Module:
        """Returns the embedding in place of the LM head."""
        tied: nn.Module = embed_tokens
        return tied

    @torch_defaults()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Builds the embedding's rows, the LM head's packed weight, or both if they are tied."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        shard: Shard = loaded(layer)
        looked_up = not isinstance(layer, ParallelLMHead)
        empty = torch.empty(0, dtype=self.dtype, device=next(layer.parameters()).device)
        layer.weight = nn.Parameter(empty, requires_grad=False)  # LoRA reads the device from it
        if looked_up:
            assert isinstance(shard.weight, QuantTensor)
            layer.add_module("rows", QuantEmbedding.from_quant_tensor(shard.weight, self.dtype))
        if self.multiplies:
            product = Product([shard])
            for linear in product.linears if looked_up else []:
                linear.share_weight(layer.rows)
            product.prepare(self.matrix.name, self.dtype, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
            compile_kernels(product, self.k, self.dtype, self.counts)
            layer.add_module("product", product)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the logits of this rank's tokens."""
        y: Tensor = layer.product(x, bias)
        return y

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """Returns the rows [.., K] of this rank's tokens."""
        rows: Tensor = layer.rows(ids)
        return rows
