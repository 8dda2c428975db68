"""What vLLM calls for each layer that this library computes: create, load, process, apply."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import base_loader

from lowbit.formats import QuantTensor
from lowbit.nn import QuantEmbedding
from lowbit.vllm.loading import Cut, Loading, expect, loaded, usual_defaults, whole_outputs
from lowbit.vllm.matrices import Matrix
from lowbit.vllm.product import Piece, Product
from lowbit.vllm.warm_up import compile_kernels, hash_early, together, token_counts


@functools.cache
def compile_together() -> None:
    """Has vLLM's loader compile the kernels of all layers of a model at once, in this process; a loader, or a vLLM, that
    processes them in its own way has those of each compiled by themselves."""
    if torch.cuda.is_available():
        hash_early()
    process = getattr(base_loader, "process_weights_after_loading", None)
    if process is None:
        return

    @functools.wraps(process)
    def process_weights_after_loading(*given: Any, **options: Any) -> None:
        with together():
            process(*given, **options)

    base_loader.process_weights_after_loading = process_weights_after_loading


def is_tied() -> bool:
    """Whether the model that vLLM is building has one weight for embedding and LM head."""
    return bool(getattr(_text_config(), "tie_word_embeddings", False))


def model_type() -> str:
    """Transformers' name for the language model that vLLM is building."""
    return str(getattr(_text_config(), "model_type", ""))


def _text_config() -> Any:
    return get_current_vllm_config().model_config.hf_config.get_text_config()


def _is_dummy() -> bool:
    return bool(get_current_vllm_config().load_config.load_format == "dummy")


def _refuse_offload(name: str) -> None:
    """vLLM chooses what to move to CPU memory before it loads weights, when a packed layer has none: all would stay."""
    offload = get_current_vllm_config().offload_config
    asked = offload.uva.cpu_offload_params  # parts of names; none: all layers
    is_asked = offload.uva.cpu_offload_gb > 0 and (not asked or any(f".{part}." in f".{name}." for part in asked))
    if is_asked or offload.prefetch.offload_group_size > 0:
        raise ValueError(
            f"{name}: weights of quantized layers are not moved to CPU memory (--cpu-offload-gb, --offload-group-size); leave "
            "the option out, and quantize to fewer bits or use more ranks (--tensor-parallel-size) if they do not fit"
        )


class LowbitLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """The linear layer `name`, made of `matrices`, one for each of its outputs or one for several."""

    def __init__(self, name: str, matrices: Sequence[Matrix]) -> None:
        self.name, self.matrices = name, matrices

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int,
        params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        """Notes what is to be loaded: no memory is taken before it comes."""
        _refuse_offload(self.name)
        cut = Cut(
            tuple(output_partition_sizes), whole_outputs(layer, output_partition_sizes), layer.tp_rank, layer.tp_size,
            input_size // input_size_per_partition,
        )  # fmt: skip
        device = torch.empty(0).device
        expect(layer, Loading(self.matrices, cut, input_size, params_dtype, device, Product), _is_dummy())
        self.dtype, self.k, self.counts = params_dtype, input_size_per_partition, _token_counts()

    @usual_defaults()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Brings the weights into the form of their device's kernels."""
        product: Product = loaded(layer)
        product.prepare(self.name, self.dtype, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
        adds_bias = not layer.skip_bias_add and (self.k == layer.input_size or layer.tp_rank == 0)  # of partial sums one does
        compile_kernels(product, self.k, self.dtype, self.counts, getattr(layer, "bias", None) if adds_bias else None)
        layer.add_module("product", product)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [.., K of this rank] times this rank's rows, plus the bias."""
        y: Tensor = layer.product(x, bias)
        return y


def _token_counts(*, head: bool = False) -> tuple[int, ...]:
    """Numbers of tokens for which the vLLM that is building a model will run its layers, or the LM head: one a request."""
    config = get_current_vllm_config()
    most = config.scheduler_config.max_num_seqs if head else config.scheduler_config.max_num_batched_tokens
    return token_counts(config.compilation_config.cudagraph_capture_sizes or (), most)


class LowbitEmbeddingMethod(QuantizeMethodBase):  # type: ignore[misc]
    """An embedding, an LM head, or one matrix for both; `multiplies`: whether it is multiplied by."""

    def __init__(self, matrix: Matrix, multiplies: bool) -> None:
        self.matrix, self.multiplies = matrix, multiplies

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int,
        params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        """Notes what is to be loaded: this rank's tokens, filled up to as many as each rank has."""
        _refuse_offload(self.matrix.name)
        held = layer.shard_indices
        if held.num_added_elements:
            raise ValueError(
                f"{self.matrix.name}: vocabularies to which LoRA adds tokens are not supported with quantized rows"
            )
        rows, (part,) = (held.org_vocab_start_index, held.org_vocab_end_index), output_partition_sizes
        cut = Cut((part,), (layer.org_vocab_size,), rows=rows, fill=part)
        device = torch.empty(0).device
        expect(layer, Loading([self.matrix], cut, input_size, params_dtype, device, lambda pieces: pieces[0]), _is_dummy())
        self.dtype, self.k, self.counts = params_dtype, input_size, _token_counts(head=True)

    def tie_weights(self, layer: nn.Module, embed_tokens: Any) -> nn.Module:
        """The embedding itself in place of the LM head."""
        tied: nn.Module = embed_tokens
        return tied

    @usual_defaults()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Makes the rows that are looked up and the form of the kernels; both where one matrix is for both."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        piece: Piece = loaded(layer)
        looked_up = not isinstance(layer, ParallelLMHead)
        empty = torch.empty(0, dtype=self.dtype, device=next(layer.parameters()).device)
        layer.weight = nn.Parameter(empty, requires_grad=False)  # LoRA asks it for the device
        if looked_up:
            assert isinstance(piece.weight, QuantTensor)
            layer.add_module("rows", QuantEmbedding.from_quant_tensor(piece.weight, self.dtype))
        if self.multiplies:
            product = Product([piece])
            for linear in product.linears if looked_up else []:
                linear.share_weight(layer.rows)
            product.prepare(self.matrix.name, self.dtype, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
            compile_kernels(product, self.k, self.dtype, self.counts)
            layer.add_module("product", product)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of this rank's tokens."""
        y: Tensor = layer.product(x, bias)
        return y

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """Rows [.., K] of this rank's tokens."""
        rows: Tensor = layer.rows(ids)
        return rows
