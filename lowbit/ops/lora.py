"""The torch operator `lowbit::lora`: what low-rank adapters (LoRA) add to a product, another adapter or none for each row.

Two launches on a GPU, which a CUDA graph may capture; plain torch on a CPU. The result is the bias of tokens of a product
(ops/fragment_gemm.py, ops/fused_gemm.py), whose epilogue adds it before norm, gate and residual.

`lowbit::lora_sums` computes the first of both matrices alone, in one launch. Products of a decode step take its result
(`LoraSums`) and multiply by the second matrix in their epilogue.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowbit.hardware.machine import machine_of
from lowbit.kernels.reference.lora import lora_reference, lora_sums_reference, part_of_columns
from lowbit.ops.fragment_gemm import aligned_rows
from lowbit.ops.operands import check_one_device
from lowbit.ops.register import register

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.lora import LoraPlan
    from lowbit.kernels.sm80.lora_sums import LoraSumsPlan

LEAST_RANK = 16
"""Ranks are padded with zeros to a power of two from this one on, which mma.sync multiplies."""

MOST_RANK = 256

MOST_EPILOGUE_RANK = 64
"""Largest padded rank of which an epilogue multiplies by b: a thread holds half as many words of b for each output."""


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


@dataclass(frozen=True, eq=False)
class LoraSums:
    """What a product's epilogue adds for adapters, before it is multiplied by b: t float32 [splits, M, parts, R], whose splits
    are added up; undefined for rows whose adapter_of int32 [M] is -1."""

    t: Tensor
    weight: LoraWeight
    adapter_of: Tensor

    @property
    def passed(self) -> tuple[Tensor, Tensor, Tensor, list[int], bool]:
        """Arguments of the products' operators."""
        return self.t, self.weight.b, self.adapter_of, list(self.weight.widths), self.weight.alternates


def epilogue_refusals(weight: LoraWeight, on: torch.device) -> tuple[str, ...]:
    """Returns the reasons why no epilogue of a product of up to 64 tokens adds an adapter; empty if one does."""
    reasons = []
    if on.type != "cuda":
        reasons.append("is a kernel for GPUs")
    if weight.a.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"takes adapters in fp16 or bf16, not {weight.a.dtype}")
    if weight.a.shape[2] > MOST_EPILOGUE_RANK:
        reasons.append(f"takes ranks of up to {MOST_EPILOGUE_RANK}, not {weight.a.shape[2]}")
    if weight.a.shape[3] % 8:
        reasons.append(f"takes rows of a of whole 16-byte vectors, not of {weight.a.shape[3]} elements")
    return tuple(reasons)


def lora_sums(
    x: Tensor, weight: LoraWeight, adapter_of: Tensor, *, squares: Tensor | None = None, width: int = 1, eps: float = 0.0,
    factor: float = 1.0,
) -> LoraSums:  # fmt: skip
    """Returns a x of each row's adapter for a product's epilogue (`ops.fused_gemm`); x [M, K] and the other arguments as in
    `lora`.

    On a GPU a row's bits do not depend on other rows, but on whether M is up to 8, and `adapter_of` must be older than the
    launch before this one. Raises ValueError for tensors that do not fit together, and for adapters that `epilogue_refusals`
    names.
    """
    t = torch.ops.lowbit.lora_sums(x, weight.a, adapter_of, squares, width, eps, factor)
    return LoraSums(t, weight, adapter_of)


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
    _check_first("lora", v.x, v.a, v.adapter_of, v.squares)
    n = v.b.shape[1]
    if v.bias is not None and tuple(v.bias.shape) != (n,):
        raise ValueError(f"lora: bias is [{n}], got {tuple(v.bias.shape)}")
    check_one_device("lora", v.x, v.a, v.b, v.adapter_of, v.squares, v.bias)


def _check_first(operator: str, x: Tensor, a: Tensor, adapter_of: Tensor, squares: Tensor | None) -> None:
    """Raises ValueError unless x, the first matrices and the numbers of the rows fit together."""
    if x.dim() != 2 or x.shape[1] != a.shape[3] or x.dtype != a.dtype or x.stride(1) != 1:
        raise ValueError(
            f"{operator}: x is {a.dtype} [M, {a.shape[3]}] with contiguous rows, got {x.dtype} {tuple(x.shape)}, strides "
            f"{tuple(x.stride())}"
        )
    m = x.shape[0]
    if tuple(adapter_of.shape) != (m,) or adapter_of.dtype != torch.int32 or not adapter_of.is_contiguous():
        raise ValueError(f"{operator}: adapter_of is int32 [{m}], got {adapter_of.dtype} {tuple(adapter_of.shape)}")
    if squares is not None and (squares.dim() != 2 or squares.shape[1] != m or squares.dtype != torch.float32):
        raise ValueError(f"{operator}: squares are float32 [parts, {m}], got {squares.dtype} {tuple(squares.shape)}")


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


class LoraSumsArguments(NamedTuple):
    """The arguments of `lowbit::lora_sums`."""

    x: Tensor
    a: Tensor
    adapter_of: Tensor
    squares: Tensor | None
    width: int
    eps: float
    factor: float


def _check_sums(v: LoraSumsArguments) -> None:
    """Raises ValueError unless the tensors fit together."""
    if v.a.dim() != 4 or v.a.shape[2] % LEAST_RANK or not v.a.is_contiguous():
        raise ValueError(
            f"lora_sums: a is contiguous [adapters, parts, R, K], R a multiple of {LEAST_RANK}; got {tuple(v.a.shape)}"
        )
    _check_first("lora_sums", v.x, v.a, v.adapter_of, v.squares)
    check_one_device("lora_sums", v.x, v.a, v.adapter_of, v.squares)


def _sums_on_cpu(v: LoraSumsArguments) -> Tensor:
    _check_sums(v)
    return lora_sums_reference(v.x, v.a, v.adapter_of, v.squares, width=v.width, eps=v.eps, factor=v.factor).float()[None]


def _sums_on_gpu(v: LoraSumsArguments) -> Tensor:
    _check_sums(v)
    if v.x.dtype not in (torch.float16, torch.bfloat16) or v.x.shape[1] % 8 or v.a.data_ptr() % 16:
        raise ValueError(
            f"lora_sums: on a GPU x and a are fp16 or bf16 with rows of whole 16-byte vectors, got {v.x.dtype} "
            f"{tuple(v.x.shape)}"
        )
    x = aligned_rows(v.x)
    plan = _sums_plan(*x.shape, *v.a.shape[:3], 0 if v.squares is None else v.squares.shape[0], x.dtype, x.device)
    squares = None if v.squares is None else v.squares.contiguous()
    return plan(x, v.a, v.adapter_of, squares, 1.0 / v.width, v.eps, v.factor)


@functools.lru_cache(maxsize=4096)
def _sums_plan(
    m: int, k: int, adapters: int, parts: int, rank: int, norm_parts: int, dtype: torch.dtype, on: torch.device
) -> LoraSumsPlan:  # fmt: skip
    from lowbit.kernels.sm80.lora_sums import LoraSumsPlan

    return LoraSumsPlan(m, k, parts, rank, adapters, norm_parts, dtype, machine_of(on))


def _sums_fake(v: LoraSumsArguments) -> Tensor:
    splits = 1
    if v.x.device.type == "cuda":
        from lowbit.kernels.sm80.lora_sums import splits_of

        splits = splits_of(int(v.x.shape[0]), int(v.x.shape[1]))
    return v.x.new_empty((splits, v.x.shape[0], v.a.shape[1], v.a.shape[2]), dtype=torch.float32)


register(
    "lora_sums(Tensor x, Tensor a, Tensor adapter_of, Tensor? squares, int width, float eps, float factor) -> Tensor",
    cuda=_sums_on_gpu,
    cpu=_sums_on_cpu,
    fake=_sums_fake,
    arguments=LoraSumsArguments,
)
