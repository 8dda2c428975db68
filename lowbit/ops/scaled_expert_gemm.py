"""The torch operator `lowbit::scaled_expert_gemm`: 8-bit activations times the weights of a mixture of experts.

It is like `lowbit::expert_gemm` (ops/expert_gemm.py), but x is a result of `quantize_activations`, and weights are in the form
of pack/expert_operand.py. The host never reads which experts the router chose. On a CPU the weights of the experts with slots
are dequantized, one expert at a time.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.experts import ExpertShape
from lowbit.kernels.reference.experts import expert_gemm_reference
from lowbit.ops.expert_gemm import check_routing
from lowbit.ops.operands import TensorSpec, check_one_device, device_of, meta_tensors, scheme_of, spec_of
from lowbit.ops.quantize_activations import Activations
from lowbit.ops.register import register
from lowbit.ops.route import Routing
from lowbit.ops.scaled_gemm import check_activations
from lowbit.pack import ExpertOperandWeight, scaled_refusals

if TYPE_CHECKING:
    from lowbit.kernels.parts.scaled_epilogue import XScale
    from lowbit.kernels.sm80.expert_scaled_gemm import ExpertScaledPlan

X_BLOCK = 128
"""Number of columns of x that share a scale, if a row has several scales."""


def scaled_expert_gemm(
    x: Activations, w: ExpertOperandWeight, routing: Routing, bias: Tensor | None = None, *, per_slot: bool = False,
    weighted: bool = False,
) -> Tensor:  # fmt: skip
    """Returns y [T * top_k, N] in the type that x had before quantization. The row of a slot is its row of x times the weight
    [N, K] of its expert, plus the expert's row of bias [E, N].

    Args:
        x: codes [T, K] of the scheme's activation format, or with `per_slot` [T * top_k, K], a row for each slot; scale float32
            [1], [rows, 1] or [rows, ceil(K / 128)]; zero int32 [rows, 1], [1] or None, with int8.
        weighted: rows of y are multiplied by the router weight of their slot before they are rounded.

    Sums of int8 x are exact; sums of fp8 x are computed in float32, K in order. A row of y has the same bits in every batch and
    for every `tile_rows` of the routing. Raises ValueError for tensors that do not fit together.
    """
    y: Tensor = torch.ops.lowbit.scaled_expert_gemm(
        x.codes, x.scale, x.zero, w.codes, w.scale, w.channel_scale, w.sums, bias, routing.experts, routing.weights,
        routing.order, routing.tiles, routing.tile_count, routing.tile_rows, w.scheme.name, w.shape[0], x.dtype, per_slot,
        weighted,
    )  # fmt: skip
    return y


class ScaledExpertArguments(NamedTuple):
    """The arguments of `lowbit::scaled_expert_gemm`."""

    x: Tensor
    x_scale: Tensor
    x_zero: Tensor | None
    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    sums: Tensor
    bias: Tensor | None
    experts: Tensor
    weights: Tensor
    order: Tensor
    tiles: Tensor
    tile_count: Tensor
    tile_rows: int
    scheme: str
    n: int
    dtype: torch.dtype
    per_slot: bool = False
    weighted: bool = False

    @property
    def weight(self) -> ExpertOperandWeight:
        """The weights of all experts."""
        shape = self.n, self.x.shape[1]
        return ExpertOperandWeight(self.codes, self.scale, self.channel_scale, self.sums, scheme_of(self.scheme), shape)


def _check(a: ScaledExpertArguments) -> Scheme:
    """Returns the scheme. Raises ValueError unless the arguments are of one product."""
    scheme = scheme_of(a.scheme)
    if reasons := scaled_refusals(scheme, None if a.scale is None else a.scale.dtype):
        raise ValueError(f"scaled_expert_gemm: {'; '.join(reasons)}")
    check_activations("scaled_expert_gemm", a.x, a.x_scale, a.x_zero, scheme)
    check_routing("scaled_expert_gemm", a.experts, a.weights, a.order, a.tiles, a.tile_count, a.tile_rows)
    rows = a.experts.numel() if a.per_slot else a.experts.shape[0]
    if a.x.dim() != 2 or a.x.shape[0] != rows:
        kind = "slots (per_slot)" if a.per_slot else "tokens"
        raise ValueError(f"scaled_expert_gemm: x of {rows} {kind} is [{rows}, K], got {tuple(a.x.shape)}")
    k, narrow = a.x.shape[1], scheme.weight.bits < 8
    of_one = (-(-a.n // 16), -(-k // 64), 32 * scheme.weight.bits) if narrow else (a.n, -(-k // 16) * 16)
    count = a.codes.shape[0] if a.codes.dim() else 0
    rows_of = (("sums", a.sums), ("channel_scale", a.channel_scale), ("bias", a.bias))
    for name, t, shape in (("codes", a.codes, (count, *of_one)), *((name, t, (count, a.n)) for name, t in rows_of)):
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(
                f"scaled_expert_gemm: {name} of {count} experts [{a.n}, {k}] under {scheme} is {shape} "
                f"(ExpertOperandWeight.pack makes it), got {tuple(t.shape)}"
            )
    if (a.scale is None) == (a.channel_scale is None) or (a.scale is not None and len(a.scale) != count):
        raise ValueError(f"scaled_expert_gemm: {count} experts have a scale or a channel_scale each, of pack/expert_operand.py")
    if a.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"scaled_expert_gemm: y is fp16, bf16 or fp32, got {a.dtype}")
    return scheme


def _scaled_expert_gemm(a: ScaledExpertArguments) -> Tensor:
    x = a.x
    if x.dim() == 2 and (x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16):
        x = x.contiguous()
        x = x.clone() if x.data_ptr() % 16 else x
    if a.x_zero is not None and a.x_zero.dim() < 2:  # the kernel loads one for each row
        a = a._replace(x_zero=a.x_zero.expand(x.shape[0]).contiguous()[:, None])
    contiguous = all(t is None or t.is_contiguous() for t in a[1:13])  # type: ignore[union-attr]
    plan = _plan(tuple(spec_of(t) for t in (x, *a[1:13])), contiguous, a[13:])  # type: ignore[arg-type]
    if plan is None:
        return x.new_empty((a.experts.numel(), a.n), dtype=a.dtype)
    return plan(
        x, a.x_scale, a.x_zero, a.codes, a.scale, a.channel_scale, a.sums, a.bias, a.tiles, a.tile_count, a.order,
        a.weights if a.weighted else None,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _plan(tensors: tuple[TensorSpec | None, ...], contiguous: bool, options: tuple) -> ExpertScaledPlan | None:
    """Returns the plan of a product; None if there is nothing to compute. Raises ValueError if the tensors do not fit
    together."""
    from lowbit.kernels.sm80.expert_scaled_gemm import ExpertScaledPlan

    a = ScaledExpertArguments(*meta_tensors(tensors), *options)  # type: ignore[arg-type]
    scheme = _check(a)
    if not contiguous:
        raise ValueError(
            "scaled_expert_gemm: all tensors but x must be contiguous (ExpertOperandWeight.pack's and ops.route's are)"
        )
    on = device_of("scaled_expert_gemm", tensors)
    machine = machine_of(on)
    if a.x.dtype != torch.int8 and "mma_fp8" not in machine.arch.features:
        raise ValueError(
            f"scaled_expert_gemm: fp8 needs sm_89 or newer, {machine.product} is older; int8 activations run there"
        )
    tokens, top_k = a.experts.shape
    if tokens == 0 or a.n == 0:
        return None
    columns = a.x_scale.shape[-1] if a.x_scale.dim() == 2 else 0
    kind: XScale = "tensor" if columns == 0 else "token" if columns == 1 else "block"
    shape = ExpertShape(
        tokens, top_k, a.codes.shape[0], a.n, a.x.shape[1], scheme.weight.bits, a.tile_rows, a.per_slot
    )  # fmt: skip
    bias, zero = a.bias is not None, a.x_zero is not None
    return ExpertScaledPlan(shape, scheme, a.dtype, kind, zero, bias, weighted=a.weighted)


def _scaled_expert_gemm_on_cpu(a: ScaledExpertArguments) -> Tensor:
    check_one_device("scaled_expert_gemm", *(t for t in a[:13] if isinstance(t, Tensor)))
    _check(a)
    x = a.x.float() if a.x_zero is None else a.x.float() - a.x_zero
    scale = a.x_scale
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(X_BLOCK, dim=1)[:, : x.shape[1]]
    y = expert_gemm_reference(
        x * scale, a.weight, a.experts, a.weights, a.bias, weighted=a.weighted, dtype=torch.float32
    )  # fmt: skip
    return y.to(a.dtype)


def _fake(a: ScaledExpertArguments) -> Tensor:
    _check(a)
    return a.x.new_empty((a.experts.numel(), a.n), dtype=a.dtype)


register(
    "scaled_expert_gemm(Tensor x, Tensor x_scale, Tensor? x_zero, Tensor codes, Tensor? scale, Tensor? channel_scale,"
    " Tensor sums, Tensor? bias, Tensor experts, Tensor weights, Tensor order, Tensor tiles, Tensor tile_count, int tile_rows,"
    " str scheme, SymInt n, ScalarType dtype, bool per_slot=False, bool weighted=False) -> Tensor",
    cuda=_scaled_expert_gemm,
    cpu=_scaled_expert_gemm_on_cpu,
    fake=_fake,
    arguments=ScaledExpertArguments,
)
