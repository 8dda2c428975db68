"""The torch operator `lowbit::fragment_gemm`: the tensor-core kernels for 16-bit activations, with weights in the form of
pack/weight.py.

Like `lowbit::mixed_gemm` it is opaque to torch.compile and has little overhead per call. The operator chooses the kernel, by
shapes alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import Scheme
from lowbit.hardware.machine import Machine, machine_of
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape, MmaTile, RingTile, Tile
from lowbit.ops.operands import TensorSpec, check_weight_places, meta_tensors, scheme_of, spec_of
from lowbit.ops.register import register
from lowbit.ops.workspace import workspace
from lowbit.pack import FragmentWeight, WeightForm, has_channel_scale, kernel_group, may_be_subnormal, weight_form
from lowbit.pack.fragment import LANES, k_tiles, row_blocks


def fragment_gemm(x: Tensor, w: FragmentWeight, bias: Tensor | None = None, *, batch_invariant: bool = False) -> Tensor:
    """Returns y [.., N] = x [.., K] . dequant(w)[N, K]^T + bias [N], in x's dtype, fp16 or bf16.

    bias may also be [M, N], one for each of the M rows of x. With `batch_invariant`, a row of y has the same bits in every
    batch; else the order of summation differs between small and large batches. Raises ValueError for tensors that do not fit
    together.
    """
    return torch.ops.lowbit.fragment_gemm(
        x, w.codes, w.scale, w.channel_scale, bias, w.scheme.name, w.shape[0], batch_invariant, w.subnormal
    )


def check_product(
    operator: str, x: Tensor, codes: Tensor, scale: Tensor | None, channel: Tensor | None, bias: Tensor | None,
    s: Scheme, n: int, subnormal: bool = False, *, of_experts: bool = False,
) -> None:  # fmt: skip
    """Raises ValueError with the name `operator` unless the tensors are operands of one product under the scheme. of_experts:
    the bias is of channels, not of tokens."""
    if x.dtype not in (torch.float16, torch.bfloat16) or x.dim() < 1:
        raise ValueError(f"{operator}: x is fp16 or bf16 [.., K], got {x.dtype} {tuple(x.shape)}")
    k = x.shape[-1]
    expected = (row_blocks(n), k_tiles(k), LANES * s.weight.bits)
    if tuple(codes.shape) != expected or codes.dtype != torch.int32:
        raise ValueError(
            f"{operator}: {s} with N {n} and K {k} takes codes int32 {expected} (FragmentWeight.pack makes them), "
            f"got {codes.dtype} {tuple(codes.shape)}: another K, another scheme, or packed for another kernel"
        )
    group, of_channels = kernel_group(s), has_channel_scale(s)
    if (group == 0) != (scale is None) or (of_channels and channel is None):
        kinds = (["scales per group"] if group else []) + (["scales per channel"] if of_channels else [])
        raise ValueError(f"{operator}: {s} takes {' and '.join(kinds)}, FragmentWeight.pack makes them")
    if scale is not None:
        pair = 2 if s.zero.value == "" else 4
        shape = (row_blocks(n), -(-k // 128) * (128 // group), 8, pair)
        if tuple(scale.shape) != shape or scale.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"{operator}: {s} takes fp16 or bf16 scales {shape}, got {scale.dtype} {tuple(scale.shape)}")
    if subnormal and (channel is None or not may_be_subnormal(s)):
        raise ValueError(
            f"{operator}: subnormal codes are symmetric integers of 2 to 7 bits with both kinds of scales, not {s}"
        )
    expected_type = torch.bfloat16 if subnormal else torch.float32
    if channel is not None and (tuple(channel.shape) != (n,) or channel.dtype != expected_type):
        kind = f"{'bf16' if subnormal else 'float32'} scales [{n}]{' with subnormal codes' if subnormal else ''}"
        raise ValueError(f"{operator}: {s} takes {kind}, got {channel.dtype} {tuple(channel.shape)}")
    if not of_experts:
        check_bias(operator, bias, x[..., 0].numel(), n)
    elif bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"{operator}: bias is [{n}], got {tuple(bias.shape)}")


def check_bias(operator: str, bias: Tensor | None, m: int, n: int) -> None:
    """Raises ValueError with the name `operator` unless a bias is of channels, [n], or of tokens, [m, n], or None."""
    if bias is not None and tuple(bias.shape) not in ((n,), (m, n)):
        raise ValueError(f"{operator}: bias is [{n}] or [{m}, {n}], got {tuple(bias.shape)}")


def is_of_tokens(bias: Tensor | None) -> bool:
    """True for a bias [M, N], of each token."""
    return bias is not None and bias.dim() == 2


def _fragment_gemm(
    x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None, scheme: str, n: int,
    batch_invariant: bool = False, subnormal: bool = False,
) -> Tensor:  # fmt: skip
    rows = aligned_rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    others = (spec_of(codes), spec_of(scale), spec_of(channel_scale), spec_of(bias))
    plan = _plan(scheme, rows.shape[0], n, rows.shape[1], x.dtype, x.device, others, batch_invariant, subnormal)
    if plan is None:
        return x.new_empty((*x.shape[:-1], n))
    bias = bias.contiguous() if bias is not None and is_of_tokens(bias) else bias
    y = plan(rows, codes, scale, channel_scale, bias, *workspace(x.device, *plan.workspace))
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], n)


@functools.lru_cache(maxsize=4096)
def _plan(
    scheme: str, m: int, n: int, k: int, dtype: torch.dtype, on: torch.device, others: tuple[TensorSpec | None, ...],
    batch_invariant: bool, subnormal: bool,
) -> Any:  # fmt: skip
    """Returns the plan of a product; None if there is nothing to compute. Raises ValueError if the tensors do not fit
    together."""
    parsed = scheme_of(scheme)
    codes, scale, channel_scale, bias = meta_tensors(others)
    x = torch.empty((m, k), dtype=dtype, device="meta")
    check_product("fragment_gemm", x, codes, scale, channel_scale, bias, parsed, n, subnormal)
    check_weight_places("fragment_gemm", on, others, 3, "FragmentWeight.pack")
    if m == 0 or n == 0:
        return None
    machine = machine_of(on)
    shape = GemmShape(m, n, k, parsed.weight.bits)
    form = weight_form(parsed, None if scale is None else scale.dtype, channel_scale is not None, subnormal)
    tile = choose(shape, machine, batch_invariant)
    return plan_for(tile, shape, form, dtype, bias is not None, machine, bias_of_tokens=is_of_tokens(bias))


def plan_for(
    tile: Tile, shape: GemmShape, form: WeightForm, dtype: torch.dtype, bias: bool, machine: Machine, **epilogue: Any
) -> Any:
    """Returns the plan of a product with a given tile on a machine; `epilogue`: further fields of `Epilogue`."""
    from lowbit.kernels.parts.epilogue import Epilogue

    fused = Epilogue(form.channel_scale, bias, **epilogue)
    if isinstance(tile, RingTile):
        from lowbit.kernels.sm80.small_m_gemm import RingPlan

        return RingPlan(shape, tile, form, dtype, fused, machine.arch)
    if isinstance(tile, MmaTile):
        from lowbit.kernels.sm80.large_m_gemm import MmaPlan

        return MmaPlan(shape, tile, form, dtype, fused)
    from lowbit.kernels.sm90.large_m_gemm import WgmmaPlan

    return WgmmaPlan(shape, tile, form, dtype, fused, machine.sm_count)


def _fake(
    x: Tensor, codes: Tensor, scale: Tensor | None, channel_scale: Tensor | None, bias: Tensor | None, scheme: str, n: int,
    batch_invariant: bool = False, subnormal: bool = False,
) -> Tensor:  # fmt: skip
    check_product("fragment_gemm", x, codes, scale, channel_scale, bias, scheme_of(scheme), n, subnormal)
    return x.new_empty((*x.shape[:-1], n))


register(
    "fragment_gemm(Tensor x, Tensor codes, Tensor? scale, Tensor? channel_scale, Tensor? bias, str scheme, SymInt n,"
    " bool batch_invariant=False, bool subnormal=False) -> Tensor",
    cuda=_fragment_gemm,
    fake=_fake,
)


def aligned_rows(x: Tensor) -> Tensor:
    """Returns x [M, K] with rows of whole, aligned 16-byte vectors, no gaps within rows, and zeros from K up to the next row;
    copies x only if necessary."""
    k = x.shape[1]
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and k % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    padded = x.new_zeros((x.shape[0], -(-k // 8) * 8))
    padded[:, :k] = x
    return padded[:, :k]
