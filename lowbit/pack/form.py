"""The common base of all forms of a weight: named tensors that can be counted, copied, concatenated and split by rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lowbit.formats import PerChannel, PerTensor, Scheme

if TYPE_CHECKING:
    from typing_extensions import Self


class PackedMatrix(ABC):
    """A quantized matrix of `shape` (N, K) in one form; a subclass is a frozen dataclass whose tensors `NAMES` lists."""

    NAMES: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:

        @property
        def scheme(self) -> Scheme: ...

        @property
        def shape(self) -> tuple[int, int]: ...

    @abstractmethod
    def row_axes(self) -> dict[str, tuple[int, int]]:
        """Returns for each tensor its dimension along N, and the number of rows per index of that dimension."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that are not None, by name."""
        held = {name: getattr(self, name) for name in self.NAMES}
        return {name: t for name, t in held.items() if t is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(t.nbytes for t in self.tensors().values())

    def clone(self) -> Self:
        """Returns an equal weight in new memory."""
        return self._rebuilt({name: t.clone() for name, t in self.tensors().items()}, self.shape[0])

    def _rebuilt(self, tensors: dict[str, Tensor], n: int) -> Self:
        """Returns the same form with other tensors, of `n` rows."""
        return replace(self, **tensors, shape=(n, self.shape[1]))  # type: ignore[type-var, misc]

    def _with_scales_of_channels(self) -> Self:
        if not isinstance(self.scheme.granularity, PerTensor):
            return self
        return replace(self, scheme=replace(self.scheme, granularity=PerChannel()))  # type: ignore[type-var, misc]

    @property
    def row_multiple(self) -> int:
        """Weights can be concatenated and split at multiples of this number of rows."""
        return math.lcm(*(rows for _, rows in self.row_axes().values()))

    def _kind(self) -> dict[str, Any]:
        """The properties that concatenated weights must share."""
        types = {f"type of {name}": t.dtype for name, t in self.tensors().items()}
        return {"scheme": self.scheme.name, "K": self.shape[1], **types}

    @classmethod
    def concat_refusals(cls, weights: Sequence[Self]) -> tuple[str, ...]:
        """Returns the reasons why weights cannot be concatenated along N; empty if they can."""
        kinds = [w._kind() for w in weights]
        names = dict.fromkeys(name for kind in kinds for name in kind)
        reasons = [
            f"weights have one {name}, got {' and '.join(str(kind.get(name)) for kind in kinds)}"
            for name in names
            if len({kind.get(name) for kind in kinds}) > 1
        ]
        for w in weights[:-1]:
            if w.shape[0] % w.row_multiple:
                reasons.append(f"N of all but the last is a multiple of {w.row_multiple}, got {w.shape[0]}")
        return tuple(dict.fromkeys(reasons))

    @classmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        """Returns one weight [sum of N, K] with the rows of all weights, in new memory; a single weight is returned unchanged.

        A scale per tensor becomes one scale per channel. Raises ValueError with `concat_refusals`.
        """
        if reasons := cls.concat_refusals(weights):
            raise ValueError(f"{cls.__name__}.concat: {'; '.join(reasons)}")
        first = weights[0]
        if len(weights) == 1:
            return first
        held = [w.tensors() for w in weights]
        joined = {name: torch.cat([t[name] for t in held], dim=axis) for name, (axis, _) in first.row_axes().items()}
        return first._rebuilt(joined, sum(w.shape[0] for w in weights))._with_scales_of_channels()

    def split(self, rows: Sequence[int]) -> list[Self]:
        """Returns weights with these numbers of rows, which must add up to N. It is the inverse of `concat`, except for scales
        per tensor.

        Tensors whose first dimension is N are views of this weight's memory, others are copied. Raises ValueError for other
        numbers.
        """
        if sum(rows) != self.shape[0] or any(n % self.row_multiple for n in rows[:-1]):
            raise ValueError(
                f"{type(self).__name__}.split: rows add up to {self.shape[0]}, all but the last in multiples of "
                f"{self.row_multiple}, got {list(rows)}"
            )
        held, axes, parts, start = self.tensors(), self.row_axes(), [], 0
        for i, n in enumerate(rows):
            cut = {}
            for name, (axis, covered) in axes.items():
                first = start // covered
                length = held[name].shape[axis] - first if i == len(rows) - 1 else n // covered
                part = held[name].narrow(axis, first, length)
                cut[name] = part if axis == 0 else part.contiguous()
            parts.append(self._rebuilt(cut, n))
            start += n
        return parts
