"""The transform of a layer's input x before the product with the codes, and its inverse on the weights.

First x is rotated in blocks of channels (`hadamard`). Then channels are multiplied by AWQ's `pre_quant_scale` and permuted by
GPTQ's act-order (`order`). Under a scheme with 8-bit activations x is then quantized: by one `activation_scale` (and
`activation_zero`) for all of x if they are given, else by a scale per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.hadamard import check_block, rotate_blocks
from lowbit.formats.scheme import Scheme

_WORDS = {
    "hadamard": "rotation of the input", "pre_quant_scale": "scale of the input's channels",
    "order": "channel order (act-order)", "activation_scale": "activation scale",
    "activation_zero": "activation zero",
}  # fmt: skip


@dataclass(frozen=True)
class InputParts:
    """The set of parts that an `InputTransform` has. It is enough to allocate a module before its tensors are loaded.
    `hadamard`: block size of the rotation, 0 for none."""

    order: bool = False
    pre_quant_scale: bool = False
    activation_scale: bool = False
    activation_zero: bool = False
    hadamard: int = 0

    def __bool__(self) -> bool:
        """Returns True if the transform has any part, that is if it does more than quantize token by token."""
        return any(getattr(self, field.name) for field in fields(self))

    @property
    def has_channels(self) -> bool:
        """True if channels of x are multiplied or permuted."""
        return self.order or self.pre_quant_scale

    @property
    def changes_channels(self) -> bool:
        """True if x is more than quantized: rotated, or its channels multiplied or permuted."""
        return self.has_channels or self.hadamard > 0

    def words(self, *supported: str) -> tuple[str, ...]:
        """Returns the parts that are not `supported`, in words for an error message, in the order of computation."""
        return tuple(word for name, word in _WORDS.items() if getattr(self, name) and name not in supported)

    def check(self, scheme: Scheme, k: int) -> None:
        """Raises ValueError unless the parts are valid for a scheme and K input channels."""
        if self.activation_scale and scheme.activation is None:
            raise ValueError(f"an activation scale goes with a scheme that quantizes activations, not {scheme}")
        if self.activation_zero != (self.activation_scale and scheme.activation_zero):
            raise ValueError(
                f"an activation zero goes with an activation scale and a scheme whose activations have zero points (_az), "
                f"not {scheme}"
            )
        if self.hadamard:
            check_block(self.hadamard, k)


NO_PARTS = InputParts()


@dataclass(frozen=True, eq=False)
class InputTransform:
    """The input transform of one layer; the module docstring has the order of its parts.

    order: int32 [K], a permutation: column i of the codes multiplies channel order[i] of x. pre_quant_scale: float [K].
    activation_scale: float32 [1]. activation_zero: int32 [1]. hadamard: channels of a block of the rotation, 0 for none.
    """

    order: Tensor | None = None
    pre_quant_scale: Tensor | None = None
    activation_scale: Tensor | None = None
    activation_zero: Tensor | None = None
    hadamard: int = 0

    @property
    def parts(self) -> InputParts:
        """The parts that are present."""
        return InputParts(**dict.fromkeys(self.tensors(), True), hadamard=self.hadamard)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that are not None, by field name."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "hadamard"}
        return {name: t for name, t in named.items() if t is not None}

    def as_tensors(self) -> dict[str, Tensor]:
        """Returns all parts as tensors, by field name; `of_tensors` is the inverse."""
        return {"hadamard": torch.tensor([self.hadamard]), **self.tensors()}

    @classmethod
    def of_tensors(cls, parts: Mapping[str, Tensor]) -> InputTransform:
        """Returns the transform whose `as_tensors` are `parts`."""
        tensors: dict[str, Any] = {name: t for name, t in parts.items() if name != "hadamard"}
        return cls(**tensors, hadamard=int(parts["hadamard"]))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors().values())

    def map(self, change: Callable[[Tensor], Tensor]) -> InputTransform:
        """Returns the transform with `change` applied to every tensor."""
        changed: dict[str, Any] = {name: change(t) for name, t in self.tensors().items()}
        return replace(self, **changed)

    def select(self, channels: slice | Tensor) -> InputTransform:
        """Returns the transform restricted to `channels` of x, without an order."""
        factors = None if self.pre_quant_scale is None else self.pre_quant_scale[channels]
        return replace(self, order=None, pre_quant_scale=factors)

    def check(self, scheme: Scheme, k: int) -> None:
        """Raises ValueError unless the transform is valid for a scheme and K input channels."""
        for name, values in (("order", self.order), ("pre_quant_scale", self.pre_quant_scale)):
            if values is not None and tuple(values.shape) != (k,):
                raise ValueError(f"{scheme} with K {k}: {name} is [{k}], got {tuple(values.shape)}")
        if self.order is not None and self.order.dtype != torch.int32:
            raise ValueError(f"{scheme}: order is int32, got {self.order.dtype}")
        if self.pre_quant_scale is not None and not self.pre_quant_scale.is_floating_point():
            raise ValueError(f"{scheme}: pre_quant_scale is floating-point, got {self.pre_quant_scale.dtype}")
        of_all = (
            ("activation_scale", self.activation_scale, torch.float32),
            ("activation_zero", self.activation_zero, torch.int32),
        )
        for name, value, dtype in of_all:
            if value is not None and (tuple(value.shape) != (1,) or value.dtype != dtype):
                expected = f"{str(dtype).removeprefix('torch.')} [1]"
                raise ValueError(f"{scheme}: an {name.replace('_', ' ')} is {expected}, got {value.dtype} {tuple(value.shape)}")
        self.parts.check(scheme, k)

    def check_values(self) -> None:
        """Raises ValueError if `order` is not a permutation, since kernels index memory by it, or if scales are infinite or
        NaN.

        Synchronizes with the device.
        """
        if self.order is not None and not is_permutation(self.order):
            raise ValueError(f"order is a permutation of 0 to {self.order.numel() - 1}, this one is not")
        if self.pre_quant_scale is not None and not bool(torch.isfinite(self.pre_quant_scale).all()):
            raise ValueError("factors of x must be finite, some are not")

    def fold_channels(self, weight: Tensor) -> Tensor:
        """Returns the weights [N, K] for x before `pre_quant_scale` and `order`, given `weight` for x after both. Both give the
        same product. May overwrite `weight`."""
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        if self.pre_quant_scale is not None:
            weight *= self.pre_quant_scale.to(weight.dtype)
        return weight

    def fold_rotation(self, weight: Tensor) -> Tensor:
        """Returns the weights [N, K] for x before its rotation, given `weight` for the rotated x. The products are the same."""
        return rotate_blocks(weight, self.hadamard) if self.hadamard else weight

    def differences(self, other: InputTransform) -> tuple[str, ...]:
        """Returns the differences of two transforms as reasons, empty if there are none."""
        own, others = self.tensors(), other.tensors()
        named = [field.name for field in fields(self) if field.name != "hadamard"]
        reasons = [f"{name} differs" for name in named if not _same(own.get(name), others.get(name))]
        return (*reasons, *(("rotations of the input differ",) if self.hadamard != other.hadamard else ()))


IDENTITY = InputTransform()
"""The transform without parts: x is unchanged, or quantized token by token."""


def is_permutation(order: Tensor) -> bool:
    """Returns True if `order`, integers [K], holds each of 0 to K - 1 once."""
    return torch.equal(order.sort().values, torch.arange(order.numel(), dtype=order.dtype, device=order.device))


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
