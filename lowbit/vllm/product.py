"""y = x . w^T + bias of a layer of vLLM, whose w is made of one or several matrices: q, k and v, gate and up."""

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
class Piece:
    """What a rank holds of one matrix: rows and columns of it, quantized or in 16 bits; `index` int64 [K'] says which channel
    of x each column meets where they are in another order (`formats.split.columns_of`)."""

    weight: QuantTensor | Tensor
    index: Tensor | None = None

    def joins(self, other: Piece) -> bool:
        """Whether the rows of both can be those of one product."""
        if self.index is not None or other.index is not None:
            return False
        if isinstance(self.weight, Tensor) or isinstance(other.weight, Tensor):
            return isinstance(self.weight, Tensor) and isinstance(other.weight, Tensor)
        return not stack_refusals(self.weight, other.weight)


class Factor(nn.Module):
    """One product of x: by a quantized matrix, or by `weight` [N, K] in 16 bits."""

    index: Tensor | None

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        weights = [piece.weight for piece in pieces]
        self.register_buffer("index", pieces[0].index, persistent=False)
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
    """x [.., K] times all pieces, whose rows follow each other; neighbours that fit together are one product."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        groups: list[list[Piece]] = []
        for piece in pieces:
            if groups and all(held.joins(piece) for held in groups[-1]):
                groups[-1].append(piece)
            else:
                groups.append([piece])
        factors = [Factor(group) for group in groups]
        self.factors, self.rows = nn.ModuleList(factors), [factor.out_features for factor in factors]

    @property
    def linears(self) -> list[QuantLinear]:
        """The quantized products."""
        return [factor.linear for factor in self.factors if factor.linear is not None]  # type: ignore[misc]

    def prepare(self, name: str, dtype: torch.dtype, *, batch_invariant: bool = False) -> None:
        """Brings the weights into the form of their device's kernels for x of `dtype`. Raises ValueError, naming the layer,
        where a GPU has none for them: it would decode all of them at every call. A CPU decodes them once then."""
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
                    f"{name}: no kernel for {linear.scheme} {linear.shape} on this GPU, which is what this rank holds of it: "
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
