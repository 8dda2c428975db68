"""What a layer does to the channels of x before the product: rotates them, scales them, brings them into the codes' order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.formats import check_block, rotate_blocks
from lowbit.hardware.machine import machine_of, machine_refusals
from lowbit.ops.operands import Described, described, triton_refusals

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.rotate import RotatePlan

torch.library.define("lowbit::rotate_channels", "(Tensor x, int block) -> Tensor")

PRE_QUANT_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_channels(operator: str, k: int, order: Tensor | None, pre_quant_scale: Tensor | None) -> None:
    """Raises ValueError, naming the operator, unless both belong to K channels. What `order` holds is not looked at."""
    if order is not None and (tuple(order.shape) != (k,) or order.dtype != torch.int32):
        raise ValueError(f"{operator}: order is int32 [{k}], got {order.dtype} {tuple(order.shape)}")
    if pre_quant_scale is not None and (
        tuple(pre_quant_scale.shape) != (k,) or pre_quant_scale.dtype not in PRE_QUANT_SCALE_DTYPES
    ):
        raise ValueError(
            f"{operator}: pre_quant_scale is fp16, bf16 or fp32 [{k}], "
            f"got {pre_quant_scale.dtype} {tuple(pre_quant_scale.shape)}"
        )


def channels_of_codes(x: Tensor, order: Tensor | None, pre_quant_scale: Tensor | None) -> Tensor:
    """x [.., K] times `pre_quant_scale` in float32, rounded once to x's dtype, its channels in the order of the codes."""
    if pre_quant_scale is not None:
        x = (x.float() * pre_quant_scale.float()).to(x.dtype)
    return x if order is None else x.index_select(-1, order)


def rotate_channels(x: Tensor, block: int) -> Tensor:
    """x [.., K], fp16, bf16 or fp32, each block of so many channels rotated by a Hadamard matrix, summed up in float32 and
    rounded once: one pass over memory on NVIDIA GPUs (kernels/elementwise/rotate.py), a product of torch elsewhere
    (`formats.rotate_blocks`). Raises ValueError for a `block` that has no matrix or does not divide K."""
    rotated: Tensor = torch.ops.lowbit.rotate_channels(x, block)
    return rotated


@torch.library.impl("lowbit::rotate_channels", "CPU")
def _on_cpu(x: Tensor, block: int) -> Tensor:
    return rotate_blocks(x, block)


@torch.library.impl("lowbit::rotate_channels", "CUDA")
def _on_gpu(x: Tensor, block: int) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    plan = _plan(block, rows.stride(0) % 8 == 0, described(rows))
    if plan is None:
        return rotate_blocks(x, block)
    with torch.cuda.device(x.device):
        return plan(rows).view(x.shape)


@functools.lru_cache(maxsize=4096)
def _plan(block: int, stride: bool, rows: Described) -> RotatePlan | None:
    """The plan of a call, None where the kernel does not run; `stride` is one of whole pieces. Raises ValueError as
    `rotate_channels` does."""
    (m, k), dtype, on, aligned = rows
    check_block(block, k)
    if machine_refusals(on) or triton_refusals() or dtype not in PRE_QUANT_SCALE_DTYPES:
        return None
    from lowbit.kernels.elementwise.rotate import RotatePlan

    return RotatePlan(m, k, block, aligned and stride, machine_of(on))


@torch.library.register_fake("lowbit::rotate_channels")
def _rotated_fake(x: Tensor, block: int) -> Tensor:
    check_block(block, x.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format)
