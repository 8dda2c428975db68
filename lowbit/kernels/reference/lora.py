"""What low-rank adapters (LoRA) add to a product, in plain torch: the reference of their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.kernels.reference.fused_gemm import rms_reference


def part_of_columns(widths: tuple[int, ...], alternates: bool) -> Tensor:
    """Returns the part of each column of a product, int64 [N]. Parts of `widths` columns lie side by side, or with `alternates`
    two parts alternate every 8 columns (pack/gated.py)."""
    if alternates:
        return torch.arange(sum(widths)) // 8 % 2
    return torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))


def lora_reference(
    x: Tensor, a: Tensor, b: Tensor, adapter_of: Tensor, part_of: Tensor, squares: Tensor | None = None,
    bias: Tensor | None = None, *, width: int = 1, eps: float = 0.0, factor: float = 1.0, dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """Returns [M, N] in `dtype`: for each row the product b (a x) with its adapter, or 0 without an adapter, plus bias [N].

    x [M, K]; a [adapters, parts, R, K]; b [adapters, N, R]; adapter_of int [M], -1 for no adapter; part_of int [N]: the part of
    a by which a column of y is computed. With `squares` float32 [.., M] the sums are divided by rms * factor, as in
    `norm_gemm_reference`.
    """
    y = x.new_zeros((x.shape[0], b.shape[1]), dtype=dtype)
    for adapter in range(len(a)):
        rows = (adapter_of == adapter).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        inner = torch.einsum("mk,prk->pmr", x[rows].to(dtype), a[adapter].to(dtype))
        if squares is not None:
            inner = inner / (rms_reference(squares[:, rows], width, eps).to(dtype) * factor)[None, :, None]
        for part, each in enumerate(inner):
            columns = (part_of.to(x.device) == part).nonzero()[:, 0]
            y[rows[:, None], columns] = each @ b[adapter, columns].to(dtype).T
    return y if bias is None else y + bias.to(dtype)


def lora_sums_reference(
    x: Tensor, a: Tensor, adapter_of: Tensor, squares: Tensor | None = None, *, width: int = 1, eps: float = 0.0,
    factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Returns a x of each row's adapter float64 [M, parts, R], 0 for rows without one; arguments as in `lora_reference`."""
    t = torch.einsum("mk,mprk->mpr", x.double(), a.double()[adapter_of.clamp(min=0).long()])
    t = t * (adapter_of >= 0)[:, None, None]
    return t if squares is None else t / (rms_reference(squares, width, eps) * factor)[:, None, None]


def lora_terms_reference(t: Tensor, b: Tensor, adapter_of: Tensor, part_of: Tensor) -> Tensor:
    """Returns b t float64 [M, N] of each row's adapter, 0 for rows without one. t float32 [splits, M, parts, R] is added up and
    rounded to the type of b [adapters, N, R]; part_of as in `lora_reference`."""
    own = adapter_of >= 0
    rounded = torch.where(own[:, None, None], t.double().sum(0), 0.0).to(b.dtype).double()
    terms = torch.einsum("mnr,mnr->mn", rounded[:, part_of.to(t.device)], b.double()[adapter_of.clamp(min=0).long()])
    return torch.where(own[:, None], terms, 0.0)
