"""Products on a CPU, with weights in one of the CPU forms (pack/cpu.py).

They call torch's operators directly, since calling an operator written in Python takes as long as some of these products. There
are different methods for few and for many rows of 16-bit x. Under torch.compile a 16-bit product therefore calls
`lowbit::cpu_gemm`, which chooses the method when it runs, not when it is traced. In float32 there is only one method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, ZeroPoint, pack_words
from lowbit.kernels.cpu import torch_int4, torch_int8
from lowbit.kernels.cpu.blocked import block_rows, decode_rows
from lowbit.ops.register import register
from lowbit.pack.cpu import CpuForm, CpuWeight, pack_int4, pack_int8


def _fake_cpu_gemm(x: Tensor, codes: Tensor, scale: Tensor | None, form: str, group: int, zeros: bool) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))


def cpu_gemm(x: Tensor, w: CpuWeight, bias: Tensor | None = None) -> Tensor:
    """Returns y [.., N] = x [.., K] . w[N, K]^T + bias [N] in x's dtype, which must be the dtype of `w`."""
    of_weight = (w.codes, w.scale, w.form, w.group, w.scheme.zero is not ZeroPoint.NONE)
    opaque = torch.compiler.is_compiling() and x.dtype != torch.float32
    product = torch.ops.lowbit.cpu_gemm if opaque else _product
    y: Tensor = product(x.reshape(-1, w.shape[1]).contiguous(), *of_weight)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], w.shape[0])


def _product(x: Tensor, codes: Tensor, scale: Tensor | None, form: str, group: int, zeros: bool) -> Tensor:
    m = x.shape[0]
    if form == "int4":
        assert scale is not None
        if m <= torch_int4.MAX_M:
            return torch_int4.int4_gemm(x, codes, scale, group)
        return torch_int4.int4_gemm_decoding(x, codes, scale, group, zeros)
    if form == "int8":
        assert scale is not None
        if m <= torch_int8.MAX_M:
            return torch_int8.int8_gemm(x, codes, scale)
        return (torch_int4.product_by_rows(x, codes).float() * scale.float()).to(x.dtype)
    if x.dtype == torch.float32:
        return torch.nn.functional.linear(x, codes)
    # torch's product of 16-bit matrices reorders all of w at each call, which costs as much as the product of one token.
    return torch.mv(codes, x[0])[None] if m == 1 else torch_int4.product_by_rows(x, codes)


register(
    "cpu_gemm(Tensor x, Tensor codes, Tensor? scale, str form, int group, bool zeros) -> Tensor",
    cpu=_product,
    fake=_fake_cpu_gemm,
)


def scaled_cpu_gemm(
    x: Tensor, x_scale: Tensor, w: CpuWeight, bias: Tensor | None, dtype: torch.dtype, x_zero: Tensor | None
) -> Tensor:
    """Returns y [.., N] in `dtype` for int8 x [.., K] and weights of the form "int8". x has one scale (and zero) per token, or
    one for all tokens."""
    assert w.scale is not None
    zero_of_x = None if x_zero is None or w.sums is None else (x_zero, w.sums)
    y = torch_int8.scaled_int8_gemm(x.reshape(-1, w.shape[1]).contiguous(), x_scale, w.codes, w.scale, zero_of_x)
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype).reshape(*x.shape[:-1], w.shape[0])


def pack_for_cpu(q: QuantTensor, form: CpuForm, dtype: torch.dtype) -> CpuWeight:
    """Packs `q`, which is on a CPU, in a form that ops/table.py chose for x of `dtype`. Raises ValueError if `q` has an input
    transform or a low-rank correction (`QuantTensor.require_product`)."""
    q.require_product()
    return pack_int4(q) if form == "int4" else pack_int8(q) if form == "int8" else _decoded(q, dtype)


def _decoded(q: QuantTensor, dtype: torch.dtype) -> CpuWeight:
    n, k = q.shape
    weights = torch.empty((n, k), dtype=dtype)
    step = block_rows(q.scheme, k, "cpu")
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        packed = pack_words(q.codes[rows], q.scheme.weight.bits)
        weights[rows] = decode_rows(packed, q.scale, q.zero, q.scheme, rows, k, dtype)
    return CpuWeight("decoded", weights, None, q.scheme, q.shape)
