"""The experts of a layer as one weight for 8-bit activations: pack/scaled.py with a leading dimension for the expert.

codes           [E, ..]     the codes of each expert as in `OperandWeight`, contiguous
scale           [E, ..]     scales of groups or blocks, likewise
channel_scale   float32 [E, N]
sums            float32 [E, N]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowbit.formats import QuantTensor, Scheme
from lowbit.pack.expert import check_alike
from lowbit.pack.form import PackedMatrix
from lowbit.pack.scaled import OperandWeight


@dataclass(frozen=True, eq=False)
class ExpertOperandWeight(PackedMatrix):
    """The tensors described in the module, for experts of `shape` (N, K) each under `scheme`."""

    NAMES = OperandWeight.NAMES

    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    sums: Tensor
    scheme: Scheme
    shape: tuple[int, int]

    @classmethod
    def pack(cls, experts: Sequence[QuantTensor]) -> ExpertOperandWeight:
        """Returns the kernels' form of matrices [N, K], on the device of the first; packs them one at a time.

        Raises ValueError if there are no experts, if they differ in scheme, shape or type of scales, or if
        `OperandWeight.pack` does.
        """
        check_alike(experts)
        first = OperandWeight.pack(experts[0])
        tensors = {name: t.new_empty((len(experts), *t.shape)) for name, t in first.tensors().items()}
        for e in range(len(experts)):
            for name, t in (first if e == 0 else OperandWeight.pack(experts[e])).tensors().items():
                tensors[name][e].copy_(t)
        scale, channel = tensors.get("scale"), tensors.get("channel_scale")
        return cls(tensors["codes"], scale, channel, tensors["sums"], first.scheme, first.shape)

    @property
    def experts(self) -> int:
        """E, the number of experts."""
        return self.codes.shape[0]

    def expert(self, e: int) -> OperandWeight:
        """Returns expert `e` as views of this weight's memory."""
        scale, channel = (None if t is None else t[e] for t in (self.scale, self.channel_scale))
        return OperandWeight(self.codes[e], scale, channel, self.sums[e], self.scheme, self.shape)

    def unpack(self) -> list[QuantTensor]:
        """Returns the matrices that `pack` packed, with the scales that `OperandWeight.unpack` returns."""
        return [self.expert(e).unpack() for e in range(self.experts)]

    def row_axes(self) -> dict[str, tuple[int, int]]:
        return {name: (axis + 1, rows) for name, (axis, rows) in self.expert(0).row_axes().items()}

    def _kind(self) -> dict[str, Any]:
        return {**super()._kind(), "number of experts": self.experts}
