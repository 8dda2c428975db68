"""The product y = x . w^T + bias of a layer of vLLM. w stacks one or several matrices, such as q, k and v or gate and up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit.formats import QuantTensor
from lowbit.formats.split import stack_refusals, stacked
from lowbit.nn import QuantLinear
from lowbit.nn.linear import make_batch_invariant
from lowbit.ops.table import UnsupportedProblem, why_slow


@dataclass(frozen=True, eq=False)
class Shard:
    """A rank's rows and columns of one matrix, quantized or in 16 bits. `index` int64 has, for each column, the channel of x
    that it multiplies; None if the columns have the order of x (`formats.split.columns_of`)."""

    weight: QuantTensor | Tensor
    index: Tensor | None = None

    def stacks_with(self, other: Shard) -> bool:
        """Returns True if the rows of both shards can be stacked into one product."""
        if self.index is not None or other.index is not None:
            return False
        if isinstance(self.weight, Tensor) or isinstance(other.weight, Tensor):
            return isinstance(self.weight, Tensor) and isinstance(other.weight, Tensor)
        return not stack_refusals(self.weight, other.weight)


class StackedProduct(nn.Module):
    """One product of x with stacked shards. They are a quantized matrix `linear`, or `weight` [N, K] in 16 bits."""

    index: Tensor | None

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        weights = [shard.weight for shard in shards]
        self.register_buffer("index", shards[0].index, persistent=False)
        self.linear: QuantLinear | None = None
        if isinstance(weights[0], QuantTensor):
            self.linear = QuantLinear.from_quant_tensor(stacked([q for q in weights if isinstance(q, QuantTensor)]))
            self.out_features = self.linear.out_features
        else:
            whole = torch.cat([w for w in weights if isinstance(w, Tensor)])
            self.weight, self.out_features = nn.Parameter(whole, requires_grad=False), len(whole)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.index is not None:
            x = x.index_select(-1, self.index)
        return nn.functional.linear(x, self.weight, bias) if self.linear is None else self.linear.multiply(x, bias)


class Product(nn.Module):
    """Multiplies x [.., K] by all shards; outputs have the order of the shards. Adjacent shards are stacked into one product if
    that is possible."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        groups: list[list[Shard]] = []
        for shard in shards:
            if groups and all(other.stacks_with(shard) for other in groups[-1]):
                groups[-1].append(shard)
            else:
                groups.append([shard])
        factors = [StackedProduct(group) for group in groups]
        self.factors, self.rows = nn.ModuleList(factors), [factor.out_features for factor in factors]

    @property
    def linears(self) -> list[QuantLinear]:
        """Returns the quantized products."""
        return [factor.linear for factor in self.factors if factor.linear is not None]  # type: ignore[misc]

    def prepare(self, name: str, dtype: torch.dtype, *, batch_invariant: bool = False) -> None:
        """Packs the weights for the device's kernels, for x of `dtype`. Raises ValueError, naming the layer, if no kernel
        supports it on a GPU, which would then dequantize all weights at every call. Without a kernel on a CPU, weights are
        dequantized once."""
        if batch_invariant:
            try:
                make_batch_invariant(self, dtype)
            except UnsupportedProblem as error:
                first = str(error).partition("\n")[0].rstrip(":")
                raise ValueError(f"{name}: {first}; serve it without VLLM_BATCH_INVARIANT") from error
        for linear in self.linears:
            linear.decode_bytes = dtype.itemsize
            linear.prepare(dtype)
            on_gpu = linear.weight_scale.device.type == "cuda"
            reasons = why_slow(linear.problem(dtype)) if on_gpu else ()
            if reasons:
                raise ValueError(
                    f"{name}: no kernel for {linear.scheme} {linear.shape}, this rank's shard, on this GPU: "
                    f"{'; '.join(reasons)}; quantize to another scheme or use fewer ranks (--tensor-parallel-size)"
                )

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(self.factors) == 1:
            y: Tensor = self.factors[0](x, bias)
            return y
        parts, begin = [], 0
        for factor, rows in zip(self.factors, self.rows, strict=True):
            end = begin + rows
            parts.append(factor(x, None if bias is None else bias[begin:end]))
            begin = end
        return torch.cat(parts, dim=-1)
