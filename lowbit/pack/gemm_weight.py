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
from lowbit.pack.weight import FragmentWeight


@dataclass(frozen=True, eq=False)
class RowWeight:
    """A matrix of `shape` (N, K) as files hold it: dense codes uint8 [N, ceil(K * bits / 8)] (formats/words.py), scales and
    zeros in the scheme's shape."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]

    @classmethod
    def pack(cls, q: QuantTensor) -> RowWeight:
        """`q`, on its device; raises ValueError for what is no part of the product (`QuantTensor.require_product`)."""
        q.require_product()
        return cls(pack_words(q.codes, q.scheme.weight.bits), q.scale, q.zero, q.scheme, q.shape)

    def unpack(self) -> QuantTensor:
        """The matrix that `pack` packed."""
        codes = unpack_words(self.codes, self.scheme.weight.bits, self.shape[1])
        return QuantTensor(codes, self.scale, self.zero, self.scheme)

    @property
    def _tensors(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("codes", "scale", "zero")}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self._tensors.values())

    def clone(self) -> RowWeight:
        """An equal weight in memory of its own."""
        return replace(self, **{name: t.clone() for name, t in self._tensors.items()})


GemmWeight = RowWeight | FragmentWeight | OperandWeight | CpuWeight
"""A weight in one of its forms."""
