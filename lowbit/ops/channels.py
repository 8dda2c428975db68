"""Rotation, scaling and reordering of the channels of x before a product (`formats.InputTransform`)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.formats import check_block, rotate_blocks
from lowbit.hardware.machine import machine_of, machine_refusals
from lowbit.ops.operands import TensorSpec, device_of, meta_tensors, spec_of, triton_refusals
from lowbit.ops.register import register

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.gather import GatherPlan
    from lowbit.kernels.elementwise.rotate import RotatePlan

FACTOR_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def gather_channels(x: Tensor, order: Tensor | None, factors: Tensor | None) -> Tensor:
    """Returns x [.., K] times `factors` float [K], with channels permuted by `order` int32 [K]. The result is computed in
    float32 and rounded once to x's dtype.

    On NVIDIA GPUs one kernel computes fp16 and bf16 (kernels/elementwise/gather.py); torch computes all else. The values of
    `order` are not checked here; `InputTransform.check_values` checks them. Raises ValueError for tensors that do not fit x.
    """
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        return torch.ops.lowbit.gather_channels(x, order, factors)
    _check_channels(x.shape[-1], order, factors)
    return _gather_with_torch(x, order, factors)


def _gather_with_torch(x: Tensor, order: Tensor | None, factors: Tensor | None) -> Tensor:
    if factors is not None:
        x = (x.float() * factors.float()).to(x.dtype)
    return x if order is None else x.index_select(-1, order)


def _check_channels(k: int, order: Tensor | None, factors: Tensor | None) -> None:
    """Raises ValueError unless factors and order are for K channels."""
    if order is not None and (tuple(order.shape) != (k,) or order.dtype != torch.int32):
        raise ValueError(f"gather_channels: order is int32 [{k}], got {order.dtype} {tuple(order.shape)}")
    if factors is not None and (tuple(factors.shape) != (k,) or factors.dtype not in FACTOR_DTYPES):
        raise ValueError(f"gather_channels: factors are fp16, bf16 or fp32 [{k}], got {factors.dtype} {tuple(factors.shape)}")


def _gather_on_gpu(x: Tensor, order: Tensor | None, factors: Tensor | None) -> Tensor:
    """Runs the kernel. Rows of the result start at multiples of 16 bytes, with zeros from K up to the next multiple, as the
    GEMM kernels require."""
    if machine_refusals(x.device) or triton_refusals():
        _check_channels(x.shape[-1], order, factors)
        return _gather_with_torch(x, order, factors)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    order = None if order is None else order.contiguous()
    factors = None if factors is None else factors.contiguous()
    aligned = (rows.stride(0) % 8 == 0, rows.data_ptr() % 16 == 0)
    plan = _gather_plan(*rows.shape, x.dtype, x.device, aligned, spec_of(order), spec_of(factors))
    return plan(rows, order, factors).view(x.shape)


@functools.lru_cache(maxsize=4096)
def _gather_plan(
    m: int, k: int, dtype: torch.dtype, on: torch.device, aligned: tuple[bool, bool], order: TensorSpec | None,
    factors: TensorSpec | None,
) -> GatherPlan:  # fmt: skip
    """Returns the plan of a call. Raises ValueError if the tensors do not fit together."""
    _check_channels(k, *meta_tensors((order, factors)))
    device_of("gather_channels", (order, factors), on)
    from lowbit.kernels.elementwise.gather import GatherPlan

    vectors = k % 8 == 0 and all(aligned) and all(t is None or t[3] for t in (order, factors))
    return GatherPlan(m, k, order is not None, vectors, machine_of(on))


def _gathered_fake(x: Tensor, order: Tensor | None, factors: Tensor | None) -> Tensor:
    _check_channels(x.shape[-1], order, factors)
    return x.new_empty((*x.shape[:-1], -(-x.shape[-1] // 8) * 8))[..., : x.shape[-1]]


register("gather_channels(Tensor x, Tensor? order, Tensor? factors) -> Tensor", cuda=_gather_on_gpu, fake=_gathered_fake)


def rotate_channels(x: Tensor, block: int) -> Tensor:
    """Returns x [.., K] (fp16, bf16 or fp32) with each block of `block` channels rotated by a Hadamard matrix. Sums are
    float32, rounded once. On NVIDIA GPUs this is one pass over memory (kernels/elementwise/rotate.py), elsewhere a matrix
    product of torch (`formats.rotate_blocks`). Raises ValueError for an unsupported `block`, or one that does not divide K."""
    return torch.ops.lowbit.rotate_channels(x, block)


def _on_gpu(x: Tensor, block: int) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    plan = _plan(block, rows.stride(0) % 8 == 0, spec_of(rows))
    if plan is None:
        return rotate_blocks(x, block)
    return plan(rows).view(x.shape)


@functools.lru_cache(maxsize=4096)
def _plan(block: int, stride: bool, rows: TensorSpec) -> RotatePlan | None:
    """Returns the plan of a call; None if the kernel does not support it. `stride`: True if the row stride is a multiple of 8
    elements. Raises ValueError as `rotate_channels` does."""
    (m, k), dtype, on, aligned = rows
    check_block(block, k)
    if machine_refusals(on) or triton_refusals() or dtype not in FACTOR_DTYPES:
        return None
    from lowbit.kernels.elementwise.rotate import RotatePlan

    return RotatePlan(m, k, block, aligned and stride, machine_of(on))


def _rotated_fake(x: Tensor, block: int) -> Tensor:
    check_block(block, x.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format)


register("rotate_channels(Tensor x, int block) -> Tensor", cuda=_on_gpu, cpu=rotate_blocks, fake=_rotated_fake)
