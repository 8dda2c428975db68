"""The torch operator `lowbit::mixed_gemm`: 16- or 32-bit activations times weights as they lie on disk, on any device.

It decodes them at every call: the truth that kernels are compared with, and what runs where no kernel does (ops/table.py). It
is registered with `torch.library.define` and `impl` rather than `custom_op`, which costs three times as much per call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit.formats import Scheme, parse_scheme
from lowbit.kernels.cpu.blocked import mixed_gemm_blocked
from lowbit.ops.channels import channels_of_codes, check_channels
from lowbit.ops.operands import check_one_device, check_weight

torch.library.define(
    "lowbit::mixed_gemm",
    "(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? bias, str scheme, Tensor? order=None,"
    " Tensor? pre_quant_scale=None) -> Tensor",
)

_scheme = functools.lru_cache(maxsize=None)(parse_scheme)


def mixed_gemm(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str,
    order: Tensor | None = None, pre_quant_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [.., N] = x [.., K] . dequant(w)[N, K]^T + bias [N], in x's dtype (fp16, bf16 or fp32).

    packed uint8 [N, ceil(K * bits / 8)] holds dense codes (formats/words.py), scale and zero have the scheme's
    `scale_shape`; `scheme` is a scheme's name. `order` int32 [K], a permutation, and `pre_quant_scale` float [K] are those of
    `QuantTensor`: column i of the codes meets x[.., order[i]] * pre_quant_scale[order[i]], rounded once to x's dtype. Raises
    ValueError for tensors that do not fit together.
    """
    if order is None and pre_quant_scale is None:
        return torch.ops.lowbit.mixed_gemm(x, packed, scale, zero, bias, scheme)
    return torch.ops.lowbit.mixed_gemm(x, packed, scale, zero, bias, scheme, order, pre_quant_scale)


def _check(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: Scheme,
    order: Tensor | None, pre_quant_scale: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError unless the tensors are of one product under `scheme`."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or x.dim() < 1:
        raise ValueError(f"mixed_gemm: x is fp16, bf16 or fp32 [.., K], got {x.dtype} {tuple(x.shape)}")
    check_weight("mixed_gemm", x.shape[-1], packed, scale, zero, bias, scheme)
    if order is not None or pre_quant_scale is not None:
        check_channels("mixed_gemm", x.shape[-1], order, pre_quant_scale)
    check_one_device("mixed_gemm", x, packed, scale, zero, bias, order, pre_quant_scale)


@torch.library.impl("lowbit::mixed_gemm", ("CPU", "CUDA"))
def _mixed_gemm(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str,
    order: Tensor | None = None, pre_quant_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    parsed = _scheme(scheme)
    _check(x, packed, scale, zero, bias, parsed, order, pre_quant_scale)
    if parsed.activation is not None:
        raise ValueError(f"mixed_gemm: multiplies 16- or 32-bit activations, {parsed} asks for {parsed.activation.name}")
    if order is not None or pre_quant_scale is not None:
        x = channels_of_codes(x, order, pre_quant_scale)
    return mixed_gemm_blocked(x, packed, scale, zero, bias, parsed)


@torch.library.register_fake("lowbit::mixed_gemm")
def _fake(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str,
    order: Tensor | None = None, pre_quant_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _check(x, packed, scale, zero, bias, _scheme(scheme), order, pre_quant_scale)
    return x.new_empty((*x.shape[:-1], packed.shape[0]))
