"""Products on a CPU of weights that were brought into one of its forms (pack/cpu.py), and which form a layer gets.

Plain functions rather than operators of their own: they are calls of torch's operators, which torch.compile knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme, ZeroPoint, pack_words
from lowbit.kernels.blocked import block_rows, decode_rows
from lowbit.kernels.torch_int4 import gemm_torch_int4, product_by_rows, product_dtype
from lowbit.kernels.torch_int8 import gemm_torch_int8, scaled_gemm_torch_int8
from lowbit.pack.cpu import CpuWeight, Form, int4_refusals, int8_refusals, pack_int4, pack_int8


def cpu_gemm(x: Tensor, w: CpuWeight, bias: Tensor | None = None) -> Tensor:
    """y [.., N] = x [.., K] . w[N, K]^T + bias [N], in x's dtype, which is that of `w`."""
    n, k = w.shape
    rows = x.reshape(-1, k)
    if w.form == "int4":
        y = gemm_torch_int4(rows.contiguous(), w)
    elif w.form == "int8":
        assert w.scale is not None
        y = gemm_torch_int8(rows.contiguous(), w.codes, w.scale)
    elif len(rows) == 1 and x.dtype != torch.float32:
        # Torch's product of 16-bit matrices reorders all of w at each call, which costs as much as one token's product.
        y = torch.mv(w.codes, rows[0])[None]
    elif x.dtype == torch.bfloat16 and product_dtype() != x.dtype:
        y = product_by_rows(rows, w.codes).to(x.dtype)
    else:
        y = torch.nn.functional.linear(rows, w.codes)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.reshape(*x.shape[:-1], n)


def scaled_cpu_gemm(
    x: Tensor, x_scale: Tensor, w: CpuWeight, bias: Tensor | None, dtype: torch.dtype, x_zero: Tensor | None
) -> Tensor:
    """y [.., N] of `dtype` for int8 x [.., K] with one scale (and zero) per token or for all, and weights of the form "int8"."""
    assert w.scale is not None
    zero_of_x = None if x_zero is None or w.sums is None else (x_zero, w.sums)
    y = scaled_gemm_torch_int8(x.reshape(-1, w.shape[1]).contiguous(), x_scale, w.codes, w.scale, zero_of_x)
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype).reshape(*x.shape[:-1], w.shape[0])


def choose_form(
    scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype, decode_bytes: int = 0
) -> tuple[Form | None, tuple[str, ...]]:
    """The form in which a CPU multiplies a matrix [N, K] by x of `dtype`, and why not by the faster ones; None: it stays as on
    disk and is decoded at every call. `decode_bytes`: bytes that a decoded weight may take."""
    if scheme.activation is not None:
        reasons = tuple(f"torch's int8 product {reason}" for reason in _scaled_refusals(scheme, shape))
        return (None if reasons else "int8"), reasons
    refused: list[str] = []
    fast: tuple[tuple[Form, tuple[str, ...]], ...] = (
        ("int4", int4_refusals(scheme, shape)),
        ("int8", int8_refusals(scheme, shape)),
    )
    of_x = () if dtype == torch.bfloat16 else (f"takes bfloat16 activations, not {str(dtype).removeprefix('torch.')}",)
    for form, reasons in fast:
        if not (*reasons, *of_x):
            return form, ()
        refused += [f"torch's {form} product {reason}" for reason in (*reasons, *of_x)]
    if dtype.itemsize <= decode_bytes:
        return "decoded", tuple(refused)
    return None, (*refused, f"decoded weights would take {dtype.itemsize} bytes each, which was not allowed")


def _scaled_refusals(scheme: Scheme, shape: tuple[int, int]) -> tuple[str, ...]:
    assert scheme.activation is not None
    of_x = () if scheme.activation.name == "int8" else (f"takes int8 activations, not {scheme.activation.name}",)
    zeros = () if scheme.zero is ZeroPoint.NONE else (f"takes weights without zero points, not {scheme}",)
    return (*of_x, *zeros, *int8_refusals(scheme, shape))


def pack_for_cpu(q: QuantTensor, form: Form, dtype: torch.dtype) -> CpuWeight:
    """`q`, which is on a CPU, in a form that `choose_form` gave; its correction, order and input scale are left out."""
    if form == "int4":
        return pack_int4(q)
    return pack_int8(q) if form == "int8" else _decoded(q, dtype)


def _decoded(q: QuantTensor, dtype: torch.dtype) -> CpuWeight:
    n, k = q.shape
    weights = torch.empty((n, k), dtype=dtype)
    step = block_rows(q.scheme, k, "cpu")
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        packed = pack_words(q.codes[rows], q.scheme.weight.bits)
        weights[rows] = decode_rows(packed, q.scale, q.zero, q.scheme, rows, k, dtype)
    return CpuWeight("decoded", weights, None, q.scheme, q.shape)
