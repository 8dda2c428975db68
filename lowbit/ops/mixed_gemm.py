"""The torch operator `lowbit::mixed_gemm`: schema, checks, fake and CPU/CUDA implementations.

It is registered with `torch.library.define` and `impl` rather than `custom_op`, which costs three times as much per
call, and it is opaque to torch.compile: the choice of kernel stays inside.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit.formats import Scheme, ZeroPoint, packed_bytes, parse_scheme, scale_shape
from lowbit.ops.channels import channels_of_codes, check_channels
from lowbit.ops.dispatch import Problem, choose_backend

torch.library.define(
    "lowbit::mixed_gemm",
    "(Tensor x, Tensor packed, Tensor scale, Tensor? zero, Tensor? bias, str scheme, Tensor? order=None,"
    " Tensor? input_scale=None) -> Tensor",
)

_scheme = functools.lru_cache(maxsize=None)(parse_scheme)


def mixed_gemm(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str,
    order: Tensor | None = None, input_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [.., N] = x [.., K] . dequant(w)[N, K]^T + bias [N], in x's dtype (fp16, bf16 or fp32).

    packed uint8 [N, ceil(K * bits / 8)] holds dense codes (formats/words.py), scale and zero have the scheme's
    `scale_shape`; `scheme` is a scheme's name. `order` int32 [K], a permutation, and `input_scale` float [K] are those of
    `QuantTensor`: column i of the codes meets x[.., order[i]] * input_scale[order[i]], rounded once to x's dtype. Raises
    ValueError for tensors that do not fit together and UnsupportedProblem, with every kernel's reason, where no kernel takes
    the problem.
    """
    if order is None and input_scale is None:
        return torch.ops.lowbit.mixed_gemm(x, packed, scale, zero, bias, scheme)
    return torch.ops.lowbit.mixed_gemm(x, packed, scale, zero, bias, scheme, order, input_scale)


def _check(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: Scheme,
    order: Tensor | None, input_scale: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError unless the tensors are of one product under `scheme`."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or x.dim() < 1:
        raise ValueError(f"mixed_gemm: x is fp16, bf16 or fp32 [.., K], got {x.dtype} {tuple(x.shape)}")
    k = x.shape[-1]
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != packed_bytes(k, scheme.weight.bits):
        raise ValueError(
            f"mixed_gemm: {scheme} with K {k} takes packed uint8 [N, {packed_bytes(k, scheme.weight.bits)}], "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    n = packed.shape[0]
    expected = scale_shape(scheme.granularity, (n, k))
    if tuple(scale.shape) != expected or not scale.is_floating_point():
        raise ValueError(f"mixed_gemm: {scheme} takes floating scales {expected}, got {scale.dtype} {tuple(scale.shape)}")
    if (zero is None) != (scheme.zero is ZeroPoint.NONE):
        raise ValueError(f"mixed_gemm: {scheme} {'needs zeros' if zero is None else 'has no zeros, but some were given'}")
    if zero is not None and tuple(zero.shape) != expected:
        raise ValueError(f"mixed_gemm: {scheme} takes zeros {expected}, got {tuple(zero.shape)}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"mixed_gemm: bias is [{n}], got {tuple(bias.shape)}")
    if order is not None or input_scale is not None:
        check_channels("mixed_gemm", k, order, input_scale)
    devices = {t.device for t in (x, packed, scale, zero, bias, order, input_scale) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"mixed_gemm: all tensors must be on one device, got {sorted(map(str, devices))}")


@torch.library.impl("lowbit::mixed_gemm", ("CPU", "CUDA"))
def _mixed_gemm(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str,
    order: Tensor | None = None, input_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    parsed = _scheme(scheme)
    _check(x, packed, scale, zero, bias, parsed, order, input_scale)
    k = x.shape[-1]
    problem = Problem(parsed, x.numel() // max(k, 1), packed.shape[0], k, x.dtype, x.device.type)
    run = choose_backend(problem).run
    if order is not None or input_scale is not None:
        x = channels_of_codes(x, order, input_scale)
    return run(x, packed, scale, zero, bias, parsed)


@torch.library.register_fake("lowbit::mixed_gemm")
def _fake(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str,
    order: Tensor | None = None, input_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _check(x, packed, scale, zero, bias, _scheme(scheme), order, input_scale)
    return x.new_empty((*x.shape[:-1], packed.shape[0]))
