"""Which kernel runs a problem, and why the others do not.

A back end states its refusals as data: a tuple of reasons, empty when it takes the problem. The first back end in
`BACKENDS` without a reason runs. None without a reason is an error that lists them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import PerBlock, PerChannel, Scheme, ZeroPoint, int_format
from lowbit.kernels.cpu.blocked import mixed_gemm_blocked
from lowbit.kernels.cpu.scaled_blocked import X_BLOCK
from lowbit.kernels.cpu.torch_int8 import MAX_M, int8_gemm
from lowbit.kernels.reference.activations import CODE_DTYPES
from lowbit.pack.cpu import INT8_K_STEP

Kernel = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", Scheme], Tensor]


@dataclass(frozen=True)
class Problem:
    """One product: y[M, N] = x[M, K] . w[N, K]^T with its scheme, the dtype of x and the device ("cpu" or "cuda")."""

    scheme: Scheme
    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.scheme} M {self.m} N {self.n} K {self.k}, x {dtype} on {self.device}"


@dataclass(frozen=True)
class Backend:
    """A named kernel with its refusals."""

    name: str
    where: str
    refusals: Callable[[Problem], tuple[str, ...]]
    run: Kernel


class UnsupportedProblem(RuntimeError):
    """No back end takes the problem; the message has every back end's reasons."""


def _torch_int8_refusals(p: Problem) -> tuple[str, ...]:
    reasons = []
    if p.device != "cpu":
        reasons.append(f"runs on a CPU, x is on {p.device}")
    if p.scheme.weight != int_format(8) or not isinstance(p.scheme.granularity, PerChannel):
        reasons.append(f"takes int8 weights with one scale per channel, not {p.scheme}")
    if p.dtype != torch.bfloat16:
        reasons.append(f"takes bfloat16 activations, not {str(p.dtype).removeprefix('torch.')}")
    if p.k % INT8_K_STEP:
        reasons.append(f"reads beyond its operands unless K is a multiple of {INT8_K_STEP}, K is {p.k}")
    if p.m > MAX_M:
        reasons.append(f"is slower than blocked decoding beyond M {MAX_M}, M is {p.m}")
    return (*reasons, *_activation_refusals(p))


def _blocked_refusals(p: Problem) -> tuple[str, ...]:
    return _activation_refusals(p)


def _activation_refusals(p: Problem) -> tuple[str, ...]:
    if p.scheme.activation is None:
        return ()
    return (f"multiplies 16- or 32-bit activations, the scheme asks for {p.scheme.activation.name}",)


def _run_torch_int8(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, scheme: Scheme
) -> Tensor:
    assert zero is None and scheme.zero is ZeroPoint.NONE  # an int8 format has no zero points
    # Codes on disk are offset by 128, which is the top bit; the form of pack/cpu.py saves this pass over the bytes.
    y = int8_gemm(x.reshape(-1, x.shape[-1]), (packed ^ 0x80).view(torch.int8), scale[:, 0].to(x.dtype))
    return (y if bias is None else y + bias.to(x.dtype)).reshape(*x.shape[:-1], packed.shape[0])


BACKENDS: tuple[Backend, ...] = (
    Backend("torch_int8", "kernels/cpu/torch_int8.py", _torch_int8_refusals, _run_torch_int8),
    Backend("blocked", "kernels/cpu/blocked.py", _blocked_refusals, mixed_gemm_blocked),
)
"""In order of preference."""


def candidates(problem: Problem) -> list[tuple[Backend, tuple[str, ...]]]:
    """Every back end with its reasons against the problem."""
    return [(backend, backend.refusals(problem)) for backend in BACKENDS]


def scheme_refusals(scheme: Scheme, n: int, k: int) -> tuple[str, ...]:
    """Why a layer [n, k] of a scheme cannot run anywhere; empty if it can, at least on a CPU in float32."""
    if scheme.activation is None:
        rows = candidates(Problem(scheme, 1, n, k, torch.float32, "cpu"))
        if any(not reasons for _, reasons in rows):
            return ()
        return tuple(f"{backend.name} {', '.join(reasons)}" for backend, reasons in rows)
    reasons = []
    if scheme.activation.name not in CODE_DTYPES:
        known = ", ".join(CODE_DTYPES)
        reasons.append(f"scaled_gemm multiplies activations of {known}, the scheme asks for {scheme.activation.name}")
    if isinstance(scheme.granularity, PerBlock) and scheme.granularity.k != X_BLOCK:
        reasons.append(f"scaled_gemm takes blocks of {X_BLOCK} columns together with quantized activations, not {scheme}")
    return tuple(reasons)


@functools.lru_cache(maxsize=4096)
def choose_backend(problem: Problem) -> Backend:
    """The back end that will run `problem`; raises UnsupportedProblem with everybody's reasons when there is none."""
    rows = candidates(problem)
    for backend, reasons in rows:
        if not reasons:
            return backend
    listed = "\n".join(f"  {backend.name}: {'; '.join(reasons)}" for backend, reasons in rows)
    raise UnsupportedProblem(f"no kernel for {problem}:\n{listed}")
