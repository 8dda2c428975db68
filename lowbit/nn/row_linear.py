"""A 16-bit linear layer that uses a matrix-vector product for a single token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RowLinear(nn.Linear):
    """`nn.Linear` with the same weight [N, K] and bias, for 16-bit layers of a model on a CPU.

    torch's 16-bit matrix product on a CPU reorders the whole weight at each call. For one token it takes 3.8 ms, and `torch.mv`
    2.2 ms, also with float32 sums (49152 x 576, bf16, 2 cores of a Xeon with AMX, 2026-11-22). On another device the module
    becomes an `nn.Linear` again, the class that engine/family.py, engine/product.py and models/head.py look for.
    """

    @classmethod
    def of(cls, linear: nn.Linear) -> RowLinear:
        """Returns a layer that shares the parameters of `linear`."""
        new = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowLinear:
        """Applies `fn` (of `to`, `cuda`, ..) to the parameters, and becomes `nn.Linear` on another device than a CPU."""
        super()._apply(fn, recurse)
        if self.weight.device.type != "cpu":
            self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype == torch.float32 or x.numel() != self.in_features or x.requires_grad:
            return super().forward(x)
        y = torch.mv(self.weight, x.reshape(-1))
        return (y if self.bias is None else y + self.bias).reshape(*x.shape[:-1], self.out_features)
