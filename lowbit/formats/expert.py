"""The quantized weights of all experts of a layer: one matrix per expert, all of one scheme and shape, packed as in files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.granularity import scale_shape
from lowbit.formats.input_transform import IDENTITY, InputTransform
from lowbit.formats.scheme import Scheme, ZeroPoint
from lowbit.formats.tensor import QuantTensor
from lowbit.formats.words import pack_words, packed_bytes, unpack_words


@dataclass(frozen=True, eq=False)
class ExpertTensor:
    """The matrices [N, K] of E experts for one of their products, for example all down projections of a layer.

    packed: uint8 [E, N, ceil(K * bits / 8)], dense codes as `pack_words` packs them. scale: float [E, *scale_shape]. zero: None
    or of the scale's shape, uint8 for `ZeroPoint.INTEGER`. shape: (N, K) of one expert. All experts share `input_transform`.
    Codes stay packed: unpacked, the experts of one layer of a large model take hundreds of megabytes. Raises ValueError for
    tensors that do not match the scheme.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]
    input_transform: InputTransform = IDENTITY

    def __post_init__(self) -> None:
        n, k = self.shape
        row = packed_bytes(k, self.scheme.weight.bits)
        if self.packed.dtype != torch.uint8 or self.packed.dim() != 3 or tuple(self.packed.shape[1:]) != (n, row):
            raise ValueError(
                f"packed codes of experts {self.scheme} {self.shape} are uint8 [E, {n}, {row}], "
                f"got {self.packed.dtype} {tuple(self.packed.shape)}"
            )
        grid = (self.experts, *scale_shape(self.scheme.granularity, self.shape))
        if tuple(self.scale.shape) != grid or not self.scale.is_floating_point():
            raise ValueError(
                f"{self.experts} experts {self.scheme} {self.shape} have floating-point scales {grid}, "
                f"got {self.scale.dtype} {tuple(self.scale.shape)}"
            )
        if (self.zero is None) != (self.scheme.zero is ZeroPoint.NONE):
            raise ValueError(f"{self.scheme} {'has no' if self.zero is not None else 'needs'} zeros")
        if self.zero is not None and tuple(self.zero.shape) != grid:
            raise ValueError(f"{self.scheme}: zeros of experts are {grid}, got {tuple(self.zero.shape)}")
        self.input_transform.check(self.scheme, k)

    @classmethod
    def stack(cls, experts: Iterable[QuantTensor], count: int) -> ExpertTensor:
        """Returns the weights of `count` experts. Each expert is packed before the next one is read.

        Raises ValueError for experts of different schemes, shapes, scale types or input transforms, for a low-rank correction,
        and for another number of experts.
        """
        first: QuantTensor | None = None
        seen = 0
        for e, q in enumerate(experts):
            if q.low_rank is not None:
                raise ValueError(f"expert {e} has a low-rank correction, which the weights of experts do not have")
            if first is None:
                first = q
                packed = torch.empty(
                    (count, q.shape[0], packed_bytes(q.shape[1], q.scheme.weight.bits)),
                    dtype=torch.uint8, device=q.codes.device,
                )  # fmt: skip
                scale = q.scale.new_empty((count, *q.scale.shape))
                zero = None if q.zero is None else q.zero.new_empty((count, *q.zero.shape))
            _check_alike(e, q, first)
            if e >= count:
                raise ValueError(f"{count} experts are expected, there are more")
            packed[e] = pack_words(q.codes, q.scheme.weight.bits)
            scale[e] = q.scale
            if zero is not None:
                assert q.zero is not None
                zero[e] = q.zero
            seen += 1
        if first is None or seen != count:
            raise ValueError(f"{count} experts are expected, there are {seen}")
        return cls(packed, scale, zero, first.scheme, first.shape, first.input_transform)

    @property
    def experts(self) -> int:
        """E."""
        return self.packed.shape[0]

    def expert(self, e: int) -> QuantTensor:
        """Returns the matrix of expert `e`; its codes are unpacked, other tensors are views."""
        codes = unpack_words(self.packed[e], self.scheme.weight.bits, self.shape[1])
        zero = None if self.zero is None else self.zero[e]
        return QuantTensor(codes, self.scale[e], zero, self.scheme, self.input_transform)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.packed, self.scale, self.zero, self.input_transform) if t is not None)

    @property
    def bits_per_weight(self) -> float:
        """Bits stored per weight, scales and zeros included."""
        return 8 * self.nbytes / max(self.experts * self.shape[0] * self.shape[1], 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weights [E, N, K] that multiply the untransformed input, as `QuantTensor.dequantize`."""
        out = torch.empty((self.experts, *self.shape), dtype=dtype, device=self.packed.device)
        for e in range(self.experts):
            out[e] = self.expert(e).dequantize(dtype)
        return out

    def with_input(self, **parts: Any) -> ExpertTensor:
        """Returns the same codes with some fields of the `input_transform` replaced."""
        return replace(self, input_transform=replace(self.input_transform, **parts))

    def rotated_by(self, block: int) -> ExpertTensor:
        """Returns the same codes for x that is first rotated in blocks of `block` channels, 0 for none."""
        return self.with_input(hadamard=block)

    def without_input(self) -> ExpertTensor:
        """Returns codes, scale and zero only, without the `input_transform`."""
        return replace(self, input_transform=IDENTITY)

    def to(self, device: torch.device | str) -> ExpertTensor:
        """Returns the same weights on `device`."""
        zero = None if self.zero is None else self.zero.to(device)
        moved = self.input_transform.map(lambda t: t.to(device))
        return replace(self, packed=self.packed.to(device), scale=self.scale.to(device), zero=zero, input_transform=moved)


def _check_alike(e: int, q: QuantTensor, first: QuantTensor) -> None:
    """Raises ValueError if expert `e` cannot be stacked with the first one."""
    own, other = (q.scheme, q.shape, q.scale.dtype), (first.scheme, first.shape, first.scale.dtype)
    if own != other:
        raise ValueError(
            f"experts of a layer have one scheme, shape and type of scales; expert 0 has {other[0]} {other[1]} {other[2]}, "
            f"expert {e} has {own[0]} {own[1]} {own[2]}"
        )
    if differences := q.input_transform.differences(first.input_transform):
        raise ValueError(f"experts of a layer share the transform of their input; in expert {e}: {'; '.join(differences)}")
