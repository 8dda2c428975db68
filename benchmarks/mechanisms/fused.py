"""One kernel that dequantizes and multiplies, compared with two (dequantize to fp16, then cuBLAS), and with cuBLAS alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.ceilings import cublas
from benchmarks.limits import Ceilings, problem_bytes
from benchmarks.mechanisms.products import K, N, Product, trial_of
from benchmarks.mechanisms.trial import Row, Trial, blank, timed
from lowbit.formats import QuantTensor, parse_scheme
from lowbit.kernels.parts.launch import Launcher
from lowbit.tune.timing import copies_needed, gaussian, l2_bytes

SCHEME = "w4a16_g128"
TOKENS = (1, 8, 16, 64, 128, 256, 1024, 4096)
CUBLAS_TOKENS = (8, 16, 32, 64, 128)
GROUP = 128
BLOCK = 8
"""Number of groups that a program dequantizes."""


@triton.jit
def dequantize_kernel(w, codes, scale, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dequantizes int4 codes to w fp16 [N, K]. An int32 word has eight codes along k, lowest bits first; scales are fp16 [N, K
    / GROUP].
    """
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    word = tl.arange(0, GROUP // 8)[None, :]
    words = tl.load(codes + group * (GROUP // 8) + word)
    number = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    value = (number - 8).to(tl.float16) * tl.load(scale + group)[:, :, None]
    place = group[:, :, None] * GROUP + word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(w + place, value)


class TwoKernels:
    """Codes in rows that are dequantized to fp16 before each product."""

    def __init__(self, q: QuantTensor) -> None:
        self.n, self.k = q.shape
        shifts = torch.arange(0, 32, 4, device=q.codes.device)
        self.codes = (q.codes.view(self.n, -1, 8).long() << shifts).sum(-1).to(torch.int32)
        self.scale = q.scale.half()
        programs = self.n * self.k // (GROUP * BLOCK)
        self.launch = Launcher(dequantize_kernel, (programs, 1, 1), 4)

    def weights(self) -> Tensor:
        """Returns the fp16 weights [N, K]."""
        w = torch.empty(self.n, self.k, dtype=torch.float16, device=self.codes.device)
        self.launch(w, self.codes, self.scale, GROUP, BLOCK)
        return w

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weights().T

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def clone(self) -> TwoKernels:
        """Returns a copy in separate memory."""
        other = object.__new__(TwoKernels)
        other.__dict__ = {**self.__dict__, "codes": self.codes.clone(), "scale": self.scale.clone()}
        return other


@functools.lru_cache(maxsize=1)
def two_kernels() -> TwoKernels:
    """Returns the weight in the form that the two kernels read."""
    return TwoKernels(Product(SCHEME, 1, None).q)


@functools.lru_cache(maxsize=1)
def halves() -> Tensor:
    """Returns an fp16 weight of the same size."""
    return gaussian(N, K, 1, torch.float16)


def trials(ceilings: Ceilings) -> Iterator[Trial]:
    """Returns the trials of one kernel, of two kernels, and of cuBLAS with fp16 weights. Figures are the megabytes that each
    must move.
    """
    scheme = parse_scheme(SCHEME)
    for m in TOKENS:
        one = problem_bytes(scheme, N, K, m) / 1e6
        row = functools.partial(blank, "fused", SCHEME, m=m, n=N, k=K)
        yield trial_of(row("one kernel"), functools.partial(Product, SCHEME, m, None), must_move_mb=one)
        yield Trial(row("two kernels"), _decode_once, functools.partial(_measured_two, m, one + 2 * 2 * N * K / 1e6))
    for m in sorted({*TOKENS, *CUBLAS_TOKENS}):
        yield Trial(
            blank("cublas", "fp16", "cuBLAS", m=m, n=N, k=K), lambda: None, functools.partial(_measured_cublas, m, ceilings)
        )


def _decode_once() -> None:
    two_kernels().weights()


def _measured_two(m: int, megabytes: float) -> Row:
    x, first = gaussian(m, K, 2, torch.float16), two_kernels()
    copies = [first, *(first.clone() for _ in range(copies_needed(first.nbytes, l2_bytes()) - 1))]
    rows = x[:64].double()
    reference = torch.cat([rows @ part.T for part in Product(SCHEME, 1, None).q.dequantize(torch.float64).split(2048)], dim=-1)
    return timed([functools.partial(each, x) for each in copies], reference, must_move_mb=megabytes)


def _measured_cublas(m: int, ceilings: Ceilings) -> Row:
    """Returns the megabytes that must move, and the shares of bandwidth and fp16 rate, measured in the same run."""
    contender = cublas(halves())
    x = gaussian(m, K, 2, torch.float16)
    weights = [contender.weight, *(contender.weight.clone() for _ in range(copies_needed(contender.nbytes, l2_bytes()) - 1))]
    row = timed([functools.partial(torch.matmul, x, w.T) for w in weights], contender.truth(x[:64]))
    moved = problem_bytes(None, N, K, m)
    row["figures"] = {
        "must_move_mb": moved / 1e6,
        "memory_percent": 100 * moved / ceilings.read_bytes_per_s / (row["us"] * 1e-6),
        "tensor_percent": 100 * 2 * m * N * K / ceilings.fp16_flops / (row["us"] * 1e-6),
    }
    return row
