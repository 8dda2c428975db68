"""The torch operator `lowbit::scaled_gemm`: 8-bit activations times low-bit weights, on any device.

It reads weights in the form on disk and is exact except for one rounding. The tensor-core kernels (ops/byte_gemm.py), which
read weights in another form, are tested against it, and it runs where they do not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.formats import IntFormat, NumberFormat, Scheme
from lowbit.kernels.cpu.scaled_blocked import X_BLOCK, scaled_gemm_blocked
from lowbit.kernels.reference.gemm import FUNCTIONS
from lowbit.ops.operands import check_one_device, check_weight, scheme_of
from lowbit.ops.register import register

OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def scaled_gemm(
    x: Tensor, x_scale: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: str,
    dtype: torch.dtype = torch.bfloat16, x_zero: Tensor | None = None, function: str = "none",
    y_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns y [.., N] = function(((x [.., K] - x_zero) * x_scale) . dequant(w)[N, K]^T + bias [N]) in `dtype`.

    x is of the scheme's activation format: int8 (a8), float8_e4m3fn (a8e4m3) or float8_e5m2 (a8e5m2). x_scale float32 is [1]
    (one per tensor), [.., 1] (one per token) or [.., ceil(K / 128)] (one per token and 128 columns). x_zero int32 [.., 1] or
    [1] is the zero point of an asymmetrically quantized x; it requires int8 and excludes blocks.

    packed uint8 [N, ceil(K * bits / 8)], scale and zero are the weight in the form of nn.PackedWeight and `mixed_gemm`, where
    int8 codes are offset by 128. `scheme` is a scheme's name, such as w8a8, w8e4m3a8e4m3_t, w4a8_g128 or w6e3m2a8e4m3. The
    caller applies the input transform to x before quantizing it.

    `dtype` is fp16, bf16, fp32 or int8. `function` is none, relu, gelu (0.5 y (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3)))) or
    silu (y / (1 + exp(-y))). int8 requires `y_scale` float32 [1], one for all of y. A code is y in float32 times the float32
    value of 1 / y_scale, rounded to nearest, ties to even, and clamped to -128..127, as in `quantize_activations` with a given
    scale. For integer formats everything is exact except for the rounding to `dtype`; int8 outputs are first rounded to
    float32. Float formats also have the error of a float32 product. Raises ValueError for tensors that do not fit together.
    """
    return torch.ops.lowbit.scaled_gemm(x, x_scale, packed, scale, zero, bias, scheme, dtype, x_zero, function, y_scale)


def activation_dtype(fmt: NumberFormat | None) -> torch.dtype:
    """Returns the dtype of x for an activation format; raises ValueError for formats that have none."""
    dtypes = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    if fmt is None or fmt.name not in dtypes:
        raise ValueError(f"quantized activations are int8, e4m3 or e5m2, got {'16 bits' if fmt is None else fmt.name}")
    return dtypes[fmt.name]


def check_activations(operator: str, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, scheme: Scheme) -> None:
    """Raises ValueError with the operator's name unless x, its scales and its zeros match the scheme."""
    wanted = activation_dtype(scheme.activation)
    if x.dtype != wanted or x.dim() < 1:
        raise ValueError(f"{operator}: {scheme} takes x {wanted} [.., K], got {x.dtype} {tuple(x.shape)}")
    k = x.shape[-1]
    per_token = (*x.shape[:-1], 1)
    shapes = [(), (1,), per_token, (*x.shape[:-1], -(-k // X_BLOCK))]
    if tuple(x_scale.shape) not in shapes or x_scale.dtype != torch.float32:
        raise ValueError(
            f"{operator}: x of shape {tuple(x.shape)} takes x_scale float32 [1], {per_token} or {shapes[-1]}, "
            f"got {x_scale.dtype} {tuple(x_scale.shape)}"
        )
    if x_zero is not None:
        if not isinstance(scheme.activation, IntFormat):
            raise ValueError(f"{operator}: x_zero goes with int8 activations, not with {scheme}")
        if tuple(x_zero.shape) not in ((), (1,), per_token) or x_zero.dtype != torch.int32:
            raise ValueError(f"{operator}: x_zero is int32 [1] or {per_token}, got {x_zero.dtype} {tuple(x_zero.shape)}")
        if tuple(x_scale.shape) not in shapes[:3]:
            raise ValueError(f"{operator}: x_zero goes with one scale per tensor or token, not with scales of blocks")


def check_output(operator: str, dtype: torch.dtype, function: str, y_scale: Tensor | None) -> None:
    """Raises ValueError with the operator's name unless y's dtype, function and scale are supported together."""
    if function not in FUNCTIONS:
        raise ValueError(f"{operator}: the function after the product is {', '.join(FUNCTIONS)}, got {function!r}")
    if y_scale is None:
        if dtype not in OUTPUT_DTYPES:
            raise ValueError(f"{operator}: y is fp16, bf16 or fp32, or int8 with a y_scale, got {dtype}")
    elif dtype != torch.int8 or tuple(y_scale.shape) not in ((), (1,)) or y_scale.dtype != torch.float32:
        raise ValueError(
            f"{operator}: y_scale is float32 [1] and makes y int8, got {y_scale.dtype} {tuple(y_scale.shape)} and {dtype}"
        )


class ScaledGemmArguments(NamedTuple):
    """The arguments of `lowbit::scaled_gemm`."""

    x: Tensor
    x_scale: Tensor
    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None
    scheme: str
    dtype: torch.dtype
    x_zero: Tensor | None = None
    function: str = "none"
    y_scale: Tensor | None = None


def _check(a: ScaledGemmArguments) -> Scheme:
    """Returns the scheme. Raises ValueError unless the tensors are operands of one product under it."""
    scheme = scheme_of(a.scheme)
    check_activations("scaled_gemm", a.x, a.x_scale, a.x_zero, scheme)
    check_output("scaled_gemm", a.dtype, a.function, a.y_scale)
    check_weight("scaled_gemm", a.x.shape[-1], a.packed, a.scale, a.zero, a.bias, scheme)
    check_one_device("scaled_gemm", a.x, a.x_scale, a.packed, a.scale, a.zero, a.bias, a.x_zero, a.y_scale)
    return scheme


def _scaled_gemm(a: ScaledGemmArguments) -> Tensor:
    return scaled_gemm_blocked(*a._replace(scheme=_check(a)))  # type: ignore[arg-type]


def _fake(a: ScaledGemmArguments) -> Tensor:
    _check(a)
    return a.x.new_empty((*a.x.shape[:-1], a.packed.shape[0]), dtype=a.dtype)


register(
    "scaled_gemm(Tensor x, Tensor x_scale, Tensor packed, Tensor scale, Tensor? zero, Tensor? bias, str scheme,"
    " ScalarType dtype, Tensor? x_zero=None, str function='none', Tensor? y_scale=None) -> Tensor",
    cuda=_scaled_gemm,
    cpu=_scaled_gemm,
    fake=_fake,
    arguments=ScaledGemmArguments,
)
