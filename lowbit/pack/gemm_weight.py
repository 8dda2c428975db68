"""The forms of a weight: rows as on disk, fragments, 8-bit operands, or a form of torch's CPU products. A layer holds one of
them.

Each is a `PackedMatrix` with `pack` (of a `QuantTensor`) and `unpack` (its inverse); ops/table.py says which kernel reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lowbit.formats import PerTensor, QuantTensor, Scheme, pack_words, unpack_words
from lowbit.pack.cpu import CpuWeight
from lowbit.pack.form import PackedMatrix
from lowbit.pack.scaled import OperandWeight
from lowbit.pack.weight import FragmentWeight


@dataclass(frozen=True, eq=False)
class RowWeight(PackedMatrix):
    """A matrix of `shape` (N, K) in the form of files: dense codes uint8 [N, ceil(K * bits / 8)] (formats/words.py), scales and
    zeros in the scheme's shape."""

    NAMES = ("codes", "scale", "zero")

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]

    @classmethod
    def pack(cls, q: QuantTensor) -> RowWeight:
        """Returns the form of `q`, on its device; raises ValueError if `q` has an input transform or a low-rank correction
        (`QuantTensor.require_product`)."""
        q.require_product()
        return cls(pack_words(q.codes, q.scheme.weight.bits), q.scale, q.zero, q.scheme, q.shape)

    def unpack(self) -> QuantTensor:
        """Returns the matrix that `pack` packed."""
        return QuantTensor(self.unpack_codes(), self.scale, self.zero, self.scheme)

    def row_axes(self) -> dict[str, tuple[int, int]]:
        rows = self.scheme.granularity.block(self.shape)[0]
        return {name: (0, 1 if name == "codes" else rows) for name in self.tensors()}

    @classmethod
    def concat_refusals(cls, weights: Sequence[RowWeight]) -> tuple[str, ...]:
        """As in the base class; a scale per tensor also prevents concatenation in this form."""
        reasons = super().concat_refusals(weights)
        shared = len(weights) > 1 and isinstance(weights[0].scheme.granularity, PerTensor)
        return (*reasons, *["one scale for the whole tensor, which has no rows"] * shared)

    def unpack_codes(self) -> Tensor:
        """Returns the codes uint8 [N, K]."""
        return unpack_words(self.codes, self.scheme.weight.bits, self.shape[1])


GemmWeight = RowWeight | FragmentWeight | OperandWeight | CpuWeight
"""A weight in any form."""
