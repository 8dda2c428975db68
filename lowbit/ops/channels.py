"""What a layer does to the channels of x before the product: rotates them, scales them, brings them into the codes' order."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import check_block, rotate_blocks

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
    """x [.., K], fp16, bf16 or fp32, each block of so many channels rotated by a Hadamard matrix (`formats.rotate_blocks`)."""
    rotated: Tensor = torch.ops.lowbit.rotate_channels(x, block)
    return rotated


@torch.library.impl("lowbit::rotate_channels", ("CPU", "CUDA"))
def _rotate_channels(x: Tensor, block: int) -> Tensor:
    return rotate_blocks(x, block)


@torch.library.register_fake("lowbit::rotate_channels")
def _rotated_fake(x: Tensor, block: int) -> Tensor:
    check_block(block, x.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format)
