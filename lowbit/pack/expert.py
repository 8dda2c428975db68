"""The experts of a layer as one weight: the tensors of pack/weight.py with a leading dimension, each expert contiguous.

    codes           int32 [E, N/16, K/64, 32 * bits]
    scale           fp16 or bf16 [E, N/16, G, 8, 2 or 4]
    channel_scale   float32 or bf16 [E, N]

Expert e begins at row block e * (number of row blocks of an expert); otherwise kernels read it like a dense weight. All experts
have the same scheme, shape and way of storing scales (`common_scaling`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowbit.formats import QuantTensor, Scheme
from lowbit.pack.form import PackedMatrix
from lowbit.pack.fragment import ROW_BLOCK
from lowbit.pack.gated import gated_refusals, pack_gated, with_scales_of_rows
from lowbit.pack.weight import FragmentWeight, WeightForm, common_scaling, weight_form


@dataclass(frozen=True, eq=False)
class ExpertWeight(PackedMatrix):
    """The tensors described in the module docstring, for experts of `shape` (N, K) each; `subnormal` as in `FragmentWeight`."""

    NAMES = ("codes", "scale", "channel_scale")

    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]
    subnormal: bool = False

    @classmethod
    def pack(cls, experts: Sequence[QuantTensor]) -> ExpertWeight:
        """Returns the kernels' form of matrices [N, K], on the device of the first.

        Each matrix is indexed three times, and only one is used at a time, so a lazy sequence may create them on access.

        Raises ValueError if there are no experts, if they differ in scheme, shape or type of scales, or if
        `FragmentWeight.pack` does.
        """
        check_alike(experts)
        scaling = common_scaling(experts)
        return cls._stacked(len(experts), lambda e: FragmentWeight.pack(experts[e], scaling=scaling))

    @classmethod
    def pack_gated(cls, gates: Sequence[QuantTensor], ups: Sequence[QuantTensor]) -> ExpertWeight:
        """Packs gate and up [I, K] of each expert as one matrix (2 I, K) of alternating 8 gate rows and 8 up rows
        (pack/gated.py).

        Raises ValueError as `pack` does, for different numbers of gates and ups, and with `gated_refusals`.
        """
        if len(gates) != len(ups):
            raise ValueError(f"every expert has a gate and an up, got {len(gates)} and {len(ups)}")
        check_alike(itertools.chain(gates, ups))
        reasons = [reason for pair in zip(gates, ups, strict=True) for reason in gated_refusals(*pair)]
        if reasons:
            raise ValueError(f"gate and up cannot be packed as one matrix: {'; '.join(dict.fromkeys(reasons))}")
        scaling = common_scaling(map(with_scales_of_rows, itertools.chain(gates, ups)))
        return cls._stacked(len(gates), lambda e: pack_gated(gates[e], ups[e], scaling))

    @classmethod
    def _stacked(cls, count: int, packed: Callable[[int], FragmentWeight]) -> ExpertWeight:
        """Stacks `count` packed experts, one at a time, so that no second copy of all experts exists."""
        first = packed(0)
        tensors = {name: t.new_empty((count, *t.shape)) for name, t in first.tensors().items()}
        for e in range(count):
            for name, t in (first if e == 0 else packed(e)).tensors().items():
                tensors[name][e].copy_(t)
        scale, channel = tensors.get("scale"), tensors.get("channel_scale")
        return cls(tensors["codes"], scale, channel, first.scheme, first.shape, first.subnormal)

    @property
    def experts(self) -> int:
        """E, the number of experts."""
        return self.codes.shape[0]

    def expert(self, e: int) -> FragmentWeight:
        """Returns expert `e` as views of this weight's memory."""
        codes, scale, channel = (None if t is None else t[e] for t in (self.codes, self.scale, self.channel_scale))
        assert codes is not None
        return FragmentWeight(codes, scale, channel, self.scheme, self.shape, self.subnormal)

    def unpack(self) -> list[QuantTensor]:
        """Returns the matrices that `pack` packed, with the scales that `FragmentWeight.unpack` returns."""
        return [self.expert(e).unpack() for e in range(self.experts)]

    @property
    def form(self) -> WeightForm:
        """The constants for which a kernel that reads this weight is compiled."""
        scale_dtype = None if self.scale is None else self.scale.dtype
        return weight_form(self.scheme, scale_dtype, self.channel_scale is not None, self.subnormal)

    def row_axes(self) -> dict[str, tuple[int, int]]:
        return {name: (1, 1 if name == "channel_scale" else ROW_BLOCK) for name in self.tensors()}

    def _kind(self) -> dict[str, Any]:
        return {**super()._kind(), "subnormal": self.subnormal, "number of experts": self.experts}


def check_alike(experts: Iterable[QuantTensor]) -> None:
    """Raises ValueError if there are no experts, or if they differ in scheme, shape or type of scales."""
    kinds = {f"{q.scheme} {list(q.shape)} with {str(q.scale.dtype).removeprefix('torch.')} scales": None for q in experts}
    if not kinds:
        raise ValueError("a weight of experts has at least one expert, got none")
    if len(kinds) > 1:
        raise ValueError(f"experts of one weight have one scheme, shape and type of scales, got {' and '.join(kinds)}")
