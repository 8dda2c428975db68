"""The forms in which a weight is multiplied, one at a time: rows as on disk, fragments, 8-bit operands, torch's on a CPU.

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
    """A matrix of `shape` (N, K) as files hold it: dense codes uint8 [N, ceil(K * bits / 8)] (formats/words.py), scales and
    zeros in the scheme's shape."""

    NAMES = ("codes", "scale", "zero")

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
        return QuantTensor(self.unpack_codes(), self.scale, self.zero, self.scheme)

    def row_axes(self) -> dict[str, tuple[int, int]]:
        rows = self.scheme.granularity.block(self.shape)[0]
        return {name: (0, 1 if name == "codes" else rows) for name in self.tensors()}

    @classmethod
    def concat_refusals(cls, weights: Sequence[RowWeight]) -> tuple[str, ...]:
        """As of every form; one scale of the whole tensor cannot be concatenated here."""
        reasons = super().concat_refusals(weights)
        shared = len(weights) > 1 and isinstance(weights[0].scheme.granularity, PerTensor)
        return (*reasons, *["one scale for the whole tensor, which has no rows"] * shared)

    def unpack_codes(self) -> Tensor:
        """The codes uint8 [N, K]."""
        return unpack_words(self.codes, self.scheme.weight.bits, self.shape[1])


GemmWeight = RowWeight | FragmentWeight | OperandWeight | CpuWeight
"""A weight in one of its forms."""
