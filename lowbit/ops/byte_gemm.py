"""The torch operator `lowbit::byte_gemm`: 8-bit activations on the tensor cores, with weights in the form of pack/scaled.py.

Like `lowbit::fragment_gemm` it is opaque to torch.compile and has little overhead per call. It chooses the kernel by shapes,
dtypes and the GPU, never by values. `lowbit::scaled_gemm` computes the same on any device from weights in the form on disk.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowbit.formats import PerBlock, PerGroup, Scheme
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.scaled_gemm import ScaledShape, ScaledTile, choose_scaled
from lowbit.ops.operands import TensorSpec, check_weight_places, meta_tensors, scheme_of, spec_of
from lowbit.ops.register import register
from lowbit.ops.scaled_gemm import check_activations, check_output
from lowbit.ops.table import scaled_shape
from lowbit.ops.workspace import workspace
from lowbit.pack import OperandWeight, scaled_refusals
from lowbit.pack.fragment import LANES, ROW_BLOCK, k_tiles, row_blocks
from lowbit.pack.scaled import GROUP, ROW_BYTES

if TYPE_CHECKING:
    from lowbit.kernels.parts.scaled_epilogue import XScale
    from lowbit.kernels.sm80.scaled_gemm import PlainPlan
    from lowbit.kernels.sm90.scaled_gemm import ScaledPlan
    from lowbit.kernels.sm90.sub_byte_scaled_gemm import NarrowPlan


def byte_gemm(
    x: Tensor, x_scale: Tensor, w: OperandWeight, bias: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16,
    x_zero: Tensor | None = None, function: str = "none", y_scale: Tensor | None = None, batch_invariant: bool = False,
    fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Returns y [.., N] = function(((x [.., K] - x_zero) * x_scale) . dequant(w)[N, K]^T + bias [N]) in `dtype`.

    All arguments except w are as in `scaled_gemm`. Scales of x in blocks of 128 require 8-bit weights. Scales, bias and
    function are applied in float32, with one rounding to `dtype`. With `batch_invariant`, a row of y has the same bits in every
    batch. With `fast_accum`, on sm_90, sums of fp8 x times fp8 w stay in the tensor core if scales do not change along K. This
    is what `torch._scaled_mm(use_fast_accum=True)` does, at 10 to 600 times the error (docs/internals/numerics.md); in all
    other cases it changes nothing. Raises ValueError for tensors that do not fit together, and for `batch_invariant` and
    `fast_accum` together.
    """
    return torch.ops.lowbit.byte_gemm(
        x, x_scale, w.codes, w.scale, w.channel_scale, w.sums, bias, w.scheme.name, w.shape[0], dtype, x_zero, function,
        y_scale, batch_invariant, fast_accum,
    )  # fmt: skip


class ByteGemmArguments(NamedTuple):
    """The arguments of `lowbit::byte_gemm`."""

    x: Tensor
    x_scale: Tensor
    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    sums: Tensor
    bias: Tensor | None
    scheme: str
    n: int
    dtype: torch.dtype
    x_zero: Tensor | None = None
    function: str = "none"
    y_scale: Tensor | None = None
    batch_invariant: bool = False
    fast_accum: bool = False


def _check(a: ByteGemmArguments) -> None:
    """Raises ValueError unless the tensors are operands of one product under the scheme."""
    s, x, n = scheme_of(a.scheme), a.x, a.n
    codes, scale, channel, sums, bias = a[2:7]
    check_activations("byte_gemm", x, a.x_scale, a.x_zero, s)
    check_output("byte_gemm", a.dtype, a.function, a.y_scale)
    reasons = scaled_refusals(s)
    if reasons:
        raise ValueError(f"byte_gemm: the kernel {'; '.join(reasons)}")
    k = x.shape[-1]
    bits = s.weight.bits
    shape = (n, -(-k // ROW_BYTES) * ROW_BYTES) if bits == 8 else (row_blocks(n), k_tiles(k), LANES * bits)
    if tuple(codes.shape) != shape or codes.element_size() != (1 if bits == 8 else 4):
        raise ValueError(
            f"byte_gemm: {s} with N {n} and K {k} takes codes {shape} (OperandWeight.pack makes them), "
            f"got {codes.dtype} {tuple(codes.shape)}: another K, or another scheme"
        )
    groups = -(-k // GROUP)
    grouped, blocks = isinstance(s.granularity, PerGroup), isinstance(s.granularity, PerBlock)
    expected = (groups, -(-n // ROW_BLOCK) * ROW_BLOCK) if grouped else (-(-n // 128), groups)
    if (scale is not None) != (grouped or blocks) or (scale is not None and tuple(scale.shape) != expected):
        got = None if scale is None else tuple(scale.shape)
        raise ValueError(f"byte_gemm: {s} takes scale {expected if grouped or blocks else None}, got {got}")
    if (channel is None) != (grouped or blocks) or (channel is not None and tuple(channel.shape) != (n,)):
        raise ValueError(f"byte_gemm: {s} takes {'no channel_scale' if grouped or blocks else f'channel_scale [{n}]'}")
    if tuple(sums.shape) != (n,) or (bias is not None and tuple(bias.shape) != (n,)):
        raise ValueError(f"byte_gemm: sums and bias are [{n}], got {tuple(sums.shape)}, {None if bias is None else bias.shape}")
    if bits < 8 and k > GROUP and a.x_scale.dim() and a.x_scale.shape[-1] > 1:
        raise ValueError("byte_gemm: x with scales of blocks goes with 8-bit weights; `scaled_gemm` takes it with all")
    if a.batch_invariant and a.fast_accum:
        raise ValueError("byte_gemm: fast sums differ between small and large batches: batch_invariant or fast_accum, not both")


def _byte_gemm(a: ByteGemmArguments) -> Tensor:
    x, k = a.x, a.x.shape[-1]
    rows = _aligned_rows(x if x.dim() == 2 else x.reshape(-1, k))
    x_scale, x_zero = a.x_scale.contiguous(), a.x_zero
    if x_zero is not None:
        x_zero = x_zero.reshape(-1).expand(rows.shape[0]).contiguous()
    weight = (a.codes, a.scale, a.channel_scale, a.sums, a.bias)
    others = tuple(spec_of(t) for t in (*weight, x_scale, x_zero, a.y_scale))
    sums = a.batch_invariant, a.fast_accum
    plan = _plan(a.scheme, rows.shape[0], a.n, x.shape, x.dtype, x.device, a.dtype, a.function, others, *sums)
    if plan is None:
        return x.new_empty((*x.shape[:-1], a.n), dtype=a.dtype)
    y = plan(rows, x_scale, x_zero, *weight, *workspace(x.device, *plan.workspace), a.y_scale)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], a.n)


@functools.lru_cache(maxsize=4096)
def _plan(
    scheme: str, m: int, n: int, x_shape: torch.Size, x_type: torch.dtype, on: torch.device, dtype: torch.dtype,
    function: str, others: tuple[TensorSpec | None, ...], batch_invariant: bool, fast_accum: bool,
) -> ScaledPlan | NarrowPlan | PlainPlan | None:  # fmt: skip
    """Returns the plan of a product; None if there is nothing to compute. Raises ValueError if the tensors do not fit
    together."""
    parsed, k = scheme_of(scheme), x_shape[-1]
    codes, scale, channel, sums, bias, x_scale, x_zero, y_scale = meta_tensors(others)
    x = torch.empty(x_shape, dtype=x_type, device="meta")
    zero = None if x_zero is None else x_zero.new_empty((*x_shape[:-1], 1))
    weight = codes, scale, channel, sums, bias
    _check(ByteGemmArguments(x, x_scale, *weight, scheme, n, dtype, zero, function, y_scale, batch_invariant, fast_accum))
    check_weight_places("byte_gemm", on, others, 4, "OperandWeight.pack")
    if m == 0 or n == 0:
        return None
    blocks = x_scale.numel() > m
    kind: XScale = "block" if blocks else "tensor" if x_scale.numel() == 1 and m > 1 else "token"
    shape = scaled_shape(parsed, m, n, k, blocks, fast_accum)
    machine = machine_of(on)
    epilogue = kind, x_zero is not None, bias is not None
    if "wgmma" in machine.arch.features:
        tile = choose_scaled(shape, machine, batch_invariant)
        return plan_for_scaled(tile, shape, parsed, dtype, *epilogue, machine, function)
    from lowbit.kernels.sm80.scaled_gemm import PlainPlan

    return PlainPlan(shape, parsed, dtype, *epilogue, function)


def plan_for_scaled(
    tile: ScaledTile, shape: ScaledShape, scheme: Scheme, dtype: torch.dtype, x_scale: XScale, x_zero: bool,
    bias: bool, machine: Machine, function: str = "none",
) -> ScaledPlan | NarrowPlan:  # fmt: skip
    """Returns the plan of a product with a given tile on a Hopper GPU."""
    from lowbit.kernels.sm90.scaled_gemm import ScaledPlan, scaled_config
    from lowbit.kernels.sm90.sub_byte_scaled_gemm import NarrowPlan, narrow_config

    made = shape, tile, scheme, dtype, x_scale, x_zero, bias, function
    if shape.bits == 8:
        return ScaledPlan(shape, tile, scaled_config(*made), machine.sm_count)
    return NarrowPlan(shape, tile, narrow_config(*made), machine.sm_count)


def _fake(a: ByteGemmArguments) -> Tensor:
    _check(a)
    return a.x.new_empty((*a.x.shape[:-1], a.n), dtype=a.dtype)


register(
    "byte_gemm(Tensor x, Tensor x_scale, Tensor codes, Tensor? scale, Tensor? channel_scale, Tensor sums, Tensor? bias,"
    " str scheme, SymInt n, ScalarType dtype, Tensor? x_zero=None, str function='none', Tensor? y_scale=None,"
    " bool batch_invariant=False, bool fast_accum=False) -> Tensor",
    cuda=_byte_gemm,
    fake=_fake,
    arguments=ByteGemmArguments,
)


def _aligned_rows(x: Tensor) -> Tensor:
    """Returns x [M, K] with rows of whole, aligned 16-byte vectors and no gaps within rows; copies x only if necessary."""
    if x.stride(1) == 1 and x.stride(0) % ROW_BYTES == 0 and x.data_ptr() % 16 == 0:
        return x
    k = x.shape[1]
    padded = torch.zeros((x.shape[0], -(-k // ROW_BYTES) * ROW_BYTES), dtype=torch.uint8, device=x.device)
    padded[:, :k] = x.contiguous().view(torch.uint8)
    return padded.view(x.dtype)[:, :k]
