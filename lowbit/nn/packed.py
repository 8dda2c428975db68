"""What QuantLinear and QuantEmbedding share: a quantized matrix held as parameters in its form on disk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.formats import QuantTensor, Scheme, ZeroPoint, pack_words, packed_bytes, parse_scheme, scale_shape, unpack_words
from lowbit.quantize.rtn import scale_dtype


class PackedWeight(nn.Module):
    """A matrix [N, K] as `weight_packed` uint8 [N, ceil(K * bits / 8)], `weight_scale` and, with zeros, `weight_zero`.

    Parameters rather than buffers, because tensor parallelism shards parameters only; never one called `weight`, which
    a reader without this library would take for floats.
    """

    weight_zero: nn.Parameter | None

    def __init__(self, shape: tuple[int, int], scheme: str | Scheme, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.scheme = parse_scheme(scheme)
        self.scheme_name = self.scheme.name
        self.shape = shape
        n, k = shape
        grid, dtype = scale_shape(self.scheme.granularity, shape), scale_dtype(self.scheme)
        zero_dtype = torch.uint8 if self.scheme.zero is ZeroPoint.INTEGER else dtype
        self.weight_packed = _parameter(
            torch.empty(n, packed_bytes(k, self.scheme.weight.bits), dtype=torch.uint8, device=device)
        )
        self.weight_scale = _parameter(torch.empty(grid, dtype=dtype, device=device))
        if self.scheme.zero is ZeroPoint.NONE:
            self.register_parameter("weight_zero", None)
        else:
            self.weight_zero = _parameter(torch.empty(grid, dtype=zero_dtype, device=device))

    def set_weight(self, q: QuantTensor) -> None:
        """Takes over the codes, scales and zeros of `q`, which must have this module's shape and scheme."""
        if q.shape != self.shape or q.scheme != self.scheme:
            raise ValueError(f"this module holds {self.scheme} {self.shape}, got {q.scheme} {q.shape}")
        self.weight_packed = _parameter(pack_words(q.codes, q.scheme.weight.bits))
        self.weight_scale = _parameter(q.scale)
        if q.zero is not None:
            self.weight_zero = _parameter(q.zero)

    def share_weight(self, other: PackedWeight) -> None:
        """Ties this module to `other`: both then hold the same parameters."""
        if other.shape != self.shape or other.scheme != self.scheme:
            raise ValueError(f"cannot tie {self.scheme} {self.shape} to {other.scheme} {other.shape}")
        self.weight_packed, self.weight_scale = other.weight_packed, other.weight_scale
        if other.weight_zero is not None:
            self.weight_zero = other.weight_zero

    def quant_tensor(self) -> QuantTensor:
        """The weights as codes, scales and zeros."""
        codes = unpack_words(self.weight_packed.data, self.scheme.weight.bits, self.shape[1])
        zero = None if self.weight_zero is None else self.weight_zero.data
        return QuantTensor(codes, self.weight_scale.data, zero, self.scheme)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the packed weights with scales and zeros."""
        zero = 0 if self.weight_zero is None else self.weight_zero.nbytes
        return self.weight_packed.nbytes + self.weight_scale.nbytes + zero

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Moves devices as any module does, but keeps the scales' type: `.half()` must not round float32 scales."""
        exact = {id(p) for p in (self.weight_scale, self.weight_zero)}

        def apply(t: Tensor) -> Tensor:
            moved = fn(t)
            return t.to(moved.device) if id(t) in exact and moved.dtype != t.dtype else moved

        return super()._apply(apply, recurse)


def _parameter(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t, requires_grad=False)
