"""The torch operator `lowbit::mixed_gemm`: 16- or 32-bit activations times weights in the form on disk, on any device.

It dequantizes the weights at every call. Tests compare kernels with it, and it runs where no kernel does (ops/table.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.kernels.cpu.blocked import mixed_gemm_blocked
from lowbit.ops.operands import check_one_device, check_weight, scheme_of
from lowbit.ops.register import register


def mixed_gemm(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str) -> Tensor:
    """Returns y [.., N] = x [.., K] . dequant(w)[N, K]^T + bias [N], in x's dtype (fp16, bf16 or fp32).

    packed uint8 [N, ceil(K * bits / 8)] holds dense codes (formats/words.py), scale and zero have the scheme's `scale_shape`;
    `scheme` is a scheme's name. Raises ValueError for tensors that do not fit together.
    """
    return torch.ops.lowbit.mixed_gemm(x, packed, scale, zero, bias, scheme)


def _check(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str) -> Scheme:
    """Returns the scheme. Raises ValueError unless the tensors are operands of one product under it."""
    parsed = scheme_of(scheme)
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or x.dim() < 1:
        raise ValueError(f"mixed_gemm: x is fp16, bf16 or fp32 [.., K], got {x.dtype} {tuple(x.shape)}")
    check_weight("mixed_gemm", x.shape[-1], packed, scale, zero, bias, parsed)
    check_one_device("mixed_gemm", x, packed, scale, zero, bias)
    return parsed


def _mixed_gemm(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str) -> Tensor:
    parsed = _check(x, packed, scale, zero, bias, scheme)
    if parsed.activation is not None:
        raise ValueError(f"mixed_gemm: multiplies 16- or 32-bit activations, {parsed} has {parsed.activation.name} activations")
    return mixed_gemm_blocked(x, packed, scale, zero, bias, parsed)


def _fake(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str) -> Tensor:
    _check(x, packed, scale, zero, bias, scheme)
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


register(
    "mixed_gemm(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? bias, str scheme) -> Tensor",
    cuda=_mixed_gemm,
    cpu=_mixed_gemm,
    fake=_fake,
)
