"""The forms in which a weight waits for its products, one at a time: rows as on disk, fragments, TensorRT-LLM's lines, 8-bit
operands, a CPU's own.

Each is a class with `pack` (of a `QuantTensor`), `unpack` (its inverse) and `nbytes`; ops/table.py says which kernel reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lowbit.formats import QuantTensor, Scheme, pack_words, unpack_words
from lowbit.pack.cpu import CpuWeight
from lowbit.pack.scaled import OperandWeight
from lowbit.pack.weight import FragmentWeight, InterleavedWeight


@dataclass(frozen=True, eq=False)
class RowWeight:
    """A matrix of `shape` (N, K) as files hold it: dense codes uint8 [N, ceil(K * bits / 8)] (formats/words.py), scales and
    zeros in the scheme's shape, and what belongs to x (`QuantTensor`)."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]
    order: Tensor | None = None
    pre_quant_scale: Tensor | None = None

    @classmethod
    def pack(cls, q: QuantTensor) -> RowWeight:
        """`q`, on its device; ValueError for a low-rank correction and a rotation of x, which `nn.QuantLinear` has."""
        if q.low_rank is not None or q.hadamard:
            what = "a rotation of x" if q.hadamard else "a low-rank correction"
            raise ValueError(f"{q.scheme} {q.shape}: {what} is no part of a product; pack the weight without")
        codes = pack_words(q.codes, q.scheme.weight.bits)
        return cls(codes, q.scale, q.zero, q.scheme, q.shape, q.order, q.pre_quant_scale)

    def unpack(self) -> QuantTensor:
        """The matrix that `pack` packed."""
        codes = unpack_words(self.codes, self.scheme.weight.bits, self.shape[1])
        return QuantTensor(codes, self.scale, self.zero, self.scheme, self.order, self.pre_quant_scale)

    @property
    def _tensors(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("codes", "scale", "zero", "order", "pre_quant_scale")}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self._tensors.values())

    def clone(self) -> RowWeight:
        """An equal weight in memory of its own."""
        return replace(self, **{name: t.clone() for name, t in self._tensors.items()})


GemmWeight = RowWeight | FragmentWeight | InterleavedWeight | OperandWeight | CpuWeight
"""A weight in one of its forms."""
