"""The torch operator `lowbit::gated_gemm`: gate and up of an MLP as one product with the gate in its epilogue.

It is opaque to torch.compile and has the same checks and choice of tile as `lowbit::fragment_gemm`. For small batches it runs
two kernels, one for the product and one for the gate. In a decode step, ops/fused_gemm.py computes both in one kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape, RingTile
from lowbit.kernels.reference.elementwise import GATES, Gate
from lowbit.ops.elementwise import gate
from lowbit.ops.fragment_gemm import aligned_rows, check_product, fragment_gemm, is_of_tokens, plan_for
from lowbit.ops.operands import TensorSpec, meta_tensors, scheme_of, spec_of
from lowbit.ops.register import register
from lowbit.ops.workspace import workspace
from lowbit.pack import FragmentWeight, weight_form


def gated_gemm(
    x: Tensor, w: FragmentWeight, bias: Tensor | None, gated: str, *, batch_invariant: bool = False
) -> Tensor:  # fmt: skip
    """Returns y [M, N / 2] = f(gate) * up in x's dtype, fp16 or bf16, where gate and up are the columns of x [M, K] .
    dequant(w)[N, K]^T + bias [N]; f is "silu", "gelu_tanh" or "relu".

    w is a result of `pack.gated.pack_gated`, and bias has the order of its rows. bias may also be [M, N], with a row for each
    row of x. With `batch_invariant` a row of y has the same bits in every batch; otherwise gate and up are rounded before f in
    small batches, but not in large ones. Raises ValueError for tensors that do not fit together.
    """
    return torch.ops.lowbit.gated_gemm(
        x, w.codes, w.scale, w.channel_scale, bias, w.scheme.name, w.shape[0], gated, batch_invariant, w.subnormal
    )


def _check(
    x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None, scheme: str, n: int,
    gated: str, subnormal: bool,
) -> None:  # fmt: skip
    """Raises ValueError unless the tensors are operands of one gated product."""
    check_product("gated_gemm", x, codes, scale, channel_scale, bias, scheme_of(scheme), n, subnormal)
    if x.dim() != 2 or gated not in GATES or n % 16:
        raise ValueError(
            f"gated_gemm: x is [M, K], gated {', '.join(GATES)}, and row blocks have 8 gates and 8 ups; got x "
            f"{tuple(x.shape)}, {gated}, N {n}"
        )


def _gated_gemm(
    x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None, scheme: str, n: int,
    gated: Gate, batch_invariant: bool = False, subnormal: bool = False,
) -> Tensor:  # fmt: skip
    others = (spec_of(codes), spec_of(scale), spec_of(channel_scale), spec_of(bias))
    plan = _plan(scheme, x.shape, n, x.dtype, x.device, others, gated, batch_invariant, subnormal)
    if plan is None:
        w = FragmentWeight(codes, scale, channel_scale, scheme_of(scheme), (n, x.shape[1]), subnormal)
        return gate(fragment_gemm(x, w, bias, batch_invariant=batch_invariant), gated, alternate=True)
    bias = bias.contiguous() if bias is not None and is_of_tokens(bias) else bias
    return plan(aligned_rows(x), codes, scale, channel_scale, bias, *workspace(x.device, *plan.workspace))


@functools.lru_cache(maxsize=4096)
def _plan(
    scheme: str, size: torch.Size, n: int, dtype: torch.dtype, on: torch.device, others: tuple[TensorSpec | None, ...],
    gated: Gate, batch_invariant: bool, subnormal: bool,
) -> Any:  # fmt: skip
    """Returns the plan of a product with the gate in its epilogue; None if two kernels compute it. Raises ValueError for
    tensors that do not fit together."""
    codes, scale, channel_scale, bias = meta_tensors(others)
    parsed = scheme_of(scheme)
    _check(torch.empty(size, dtype=dtype, device="meta"), codes, scale, channel_scale, bias, scheme, n, gated, subnormal)
    if batch_invariant or gated == "relu" or 0 in (size[0], n):
        return None
    machine, shape = machine_of(on), GemmShape(size[0], n, size[1], parsed.weight.bits)
    tile = choose(shape, machine)
    whole = len({on, *(t[2] for t in others if t is not None)}) == 1 and all(t is None or t[3] for t in others[:3])
    if isinstance(tile, RingTile) or not whole:  # `fragment_gemm` raises the error
        return None
    form = weight_form(parsed, None if scale is None else scale.dtype, channel_scale is not None, subnormal)
    of_tokens = is_of_tokens(bias)
    return plan_for(tile, shape, form, dtype, bias is not None, machine, gate=gated, bias_of_tokens=of_tokens)


def _fake(
    x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None, scheme: str, n: int,
    gated: str, batch_invariant: bool = False, subnormal: bool = False,
) -> Tensor:  # fmt: skip
    _check(x, codes, scale, channel_scale, bias, scheme, n, gated, subnormal)
    return x.new_empty((x.shape[0], n // 2))


register(
    "gated_gemm(Tensor x, Tensor codes, Tensor? scale, Tensor? channel_scale, Tensor? bias, str scheme, SymInt n, str gated,"
    " bool batch_invariant=False, bool subnormal=False) -> Tensor",
    cuda=_gated_gemm,
    fake=_fake,
)
