"""The torch operator `lowbit::lora`: what low-rank adapters (LoRA) add to a product, another adapter or none for each row.

Two launches on a GPU, which a CUDA graph may capture; plain torch on a CPU. The result is the bias of tokens of a product
(ops/fragment_gemm.py, ops/fused_gemm.py), whose epilogue adds it before norm, gate and residual.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowbit.hardware.machine import machine_of
from lowbit.kernels.reference.lora import lora_reference, part_of_columns
from lowbit.ops.operands import check_one_device
from lowbit.ops.register import register

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.lora import LoraPlan

LEAST_RANK = 16
"""Ranks are padded with zeros to a power of two from this one on, which mma.sync multiplies."""

MOST_RANK = 256


@dataclass(frozen=True, eq=False)
class LoraWeight:
    """The adapters of one product whose columns are those of one or several linear layers, its parts.

    a [adapters, parts, R, K]: the first matrices of each layer. b [adapters, N, R]: the second ones, times their scaling, in
    the order of the product's columns. R is a power of two from 16 to 256. widths: columns of each part, side by side; with
    `alternates` two parts alternate by 8 columns (pack/gated.py). Raises ValueError for tensors that do not fit together.
    """

    a: Tensor
    b: Tensor
    widths: tuple[int, ...]
    alternates: bool = False

    def __post_init__(self) -> None:
        a, b, n, parts = self.a, self.b, sum(self.widths), len(self.widths)
        rank = a.shape[2] if a.dim() == 4 else 0
        fits = a.dim() == 4 and a.shape[1] == parts and tuple(b.shape) == (a.shape[0], n, rank) and a.dtype == b.dtype
        fits = fits and LEAST_RANK <= rank <= MOST_RANK and rank & (rank - 1) == 0
        if not fits or not (a.is_contiguous() and b.is_contiguous()) or (self.alternates and (parts != 2 or n % 16)):
            raise ValueError(
                f"adapters of {n} columns in {parts} parts are a [adapters, {parts}, R, K] and b [adapters, {n}, R] of one "
                f"type, contiguous, R a power of two from {LEAST_RANK} to {MOST_RANK}; got {a.dtype} {tuple(a.shape)} and "
                f"{b.dtype} {tuple(b.shape)}"
            )


def lora(
    x: Tensor, weight: LoraWeight, adapter_of: Tensor, bias: Tensor | None = None, *, squares: Tensor | None = None,
    width: int = 1, eps: float = 0.0, factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Returns y [M, N] = b (a x) + bias [N] in the dtype of x [M, K], which is that of the adapters; adapter_of int32 [M] is
    the adapter of each row, -1 for none.

    On a GPU x is fp16 or bf16. With `squares` float32 [parts, M], x is h * gamma * factor and the sums are divided by
    the rows' RMS times `factor`, as in `ops.fused_gemm.norm_gemm`; the bias is not. A row's bits do not depend on other rows.
    On a GPU `adapter_of` must be older than the launch before this one. Raises ValueError for tensors that do not fit together.
    """
    return torch.ops.lowbit.lora(
        x, weight.a, weight.b, adapter_of, squares, bias, list(weight.widths), weight.alternates, width, eps, factor
    )


class LoraArguments(NamedTuple):
    """The arguments of `lowbit::lora`."""

    x: Tensor
    a: Tensor
    b: Tensor
    adapter_of: Tensor
    squares: Tensor | None
    bias: Tensor | None
    widths: list[int]
    alternates: bool
    width: int
    eps: float
    factor: float


def _check(v: LoraArguments) -> None:
    """Raises ValueError unless the tensors fit together."""
    m, n = v.x.shape[0], v.b.shape[1]
    if v.x.dim() != 2 or v.x.shape[1] != v.a.shape[3] or v.x.dtype != v.a.dtype or v.x.stride(1) != 1:
        raise ValueError(
            f"lora: x is {v.a.dtype} [M, {v.a.shape[3]}] with contiguous rows, got {v.x.dtype} {tuple(v.x.shape)}, strides "
            f"{tuple(v.x.stride())}"
        )
    if tuple(v.adapter_of.shape) != (m,) or v.adapter_of.dtype != torch.int32 or not v.adapter_of.is_contiguous():
        raise ValueError(f"lora: adapter_of is int32 [{m}], got {v.adapter_of.dtype} {tuple(v.adapter_of.shape)}")
    if v.bias is not None and tuple(v.bias.shape) != (n,):
        raise ValueError(f"lora: bias is [{n}], got {tuple(v.bias.shape)}")
    if v.squares is not None and (v.squares.dim() != 2 or v.squares.shape[1] != m or v.squares.dtype != torch.float32):
        raise ValueError(f"lora: squares are float32 [parts, {m}], got {v.squares.dtype} {tuple(v.squares.shape)}")
    check_one_device("lora", v.x, v.a, v.b, v.adapter_of, v.squares, v.bias)


def _on_cpu(v: LoraArguments) -> Tensor:
    _check(v)
    part_of = part_of_columns(tuple(v.widths), v.alternates)
    y = lora_reference(
        v.x, v.a, v.b, v.adapter_of, part_of, v.squares, v.bias, width=v.width, eps=v.eps, factor=v.factor, dtype=torch.float32
    )
    return y.to(v.x.dtype)


def _on_gpu(v: LoraArguments) -> Tensor:
    _check(v)
    if v.x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"lora: x is fp16 or bf16 on a GPU, got {v.x.dtype}")
    parts = 0 if v.squares is None else v.squares.shape[0]
    aligned = v.x.data_ptr() % 16 == 0 and v.x.stride(0) % 8 == 0
    plan = _plan(
        *v.x.shape, v.x.dtype, aligned, tuple(v.widths), v.alternates, v.a.shape[0], v.a.shape[2], parts,
        None if v.bias is None else v.bias.dtype, v.x.device,
    )  # fmt: skip
    squares = None if v.squares is None else v.squares.contiguous()
    return plan(v.x, v.a, v.b, v.adapter_of, squares, v.bias, 1.0 / v.width, v.eps, v.factor)


@functools.lru_cache(maxsize=4096)
def _plan(
    m: int, k: int, dtype: torch.dtype, aligned: bool, widths: tuple[int, ...], alternates: bool, adapters: int, rank: int,
    norm_parts: int, bias: torch.dtype | None, on: torch.device,
) -> LoraPlan:  # fmt: skip
    from lowbit.kernels.elementwise.lora import LoraPlan

    return LoraPlan(m, k, widths, alternates, adapters, rank, norm_parts, machine_of(on))


def _fake(v: LoraArguments) -> Tensor:
    return v.x.new_empty((v.x.shape[0], v.b.shape[1]))


register(
    "lora(Tensor x, Tensor a, Tensor b, Tensor adapter_of, Tensor? squares, Tensor? bias, int[] widths, bool alternates,"
    " int width, float eps, float factor) -> Tensor",
    cuda=_on_gpu,
    cpu=_on_cpu,
    fake=_fake,
    arguments=LoraArguments,
)
