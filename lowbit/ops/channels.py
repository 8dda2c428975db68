"""What a layer does to the channels of x before the product: multiply them by `input_scale`, put them in the codes' `order`."""

from __future__ import annotations

import torch
from torch import Tensor

INPUT_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_channels(operator: str, k: int, order: Tensor | None, input_scale: Tensor | None) -> None:
    """Raises ValueError, naming the operator, unless both belong to K channels. What `order` holds is not looked at."""
    if order is not None and (tuple(order.shape) != (k,) or order.dtype != torch.int32):
        raise ValueError(f"{operator}: order is int32 [{k}], got {order.dtype} {tuple(order.shape)}")
    if input_scale is not None and (tuple(input_scale.shape) != (k,) or input_scale.dtype not in INPUT_SCALE_DTYPES):
        raise ValueError(
            f"{operator}: input_scale is fp16, bf16 or fp32 [{k}], got {input_scale.dtype} {tuple(input_scale.shape)}"
        )


def channels_of_codes(x: Tensor, order: Tensor | None, input_scale: Tensor | None) -> Tensor:
    """x [.., K] times `input_scale` in float32, rounded once to x's dtype, its channels in the order of the codes."""
    if input_scale is not None:
        x = (x.float() * input_scale.float()).to(x.dtype)
    return x if order is None else x.index_select(-1, order)
