"""Helpers for rows in registers, each in a small kernel run by Triton's interpreter, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import interpreted

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")
import triton.language as tl  # noqa: E402

from lowbit.kernels.parts.rows import add_and_store, floats, loaded, moments, row_of, sigmoid, squares_of  # noqa: E402


@triton.jit
def rows_kernel(
    sums, squares, gates, x, beside, stride, K: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr,
    CHUNKS: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Stores x + beside, the sum of its squares and its sigmoid."""
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    halves = loaded(row_of(x, row, stride, VECTORS), i, K, STEP, CHUNKS)
    others = loaded(row_of(beside, row, stride, VECTORS), i, K, STEP, CHUNKS)
    values = floats(add_and_store(sums, row, halves, others, i, K, STEP, CHUNKS), CHUNKS)
    tl.store(squares + row, tl.sum(squares_of(values, CHUNKS), axis=0))
    for c in tl.static_range(CHUNKS):
        tl.store(row_of(gates, row, K, False) + c * STEP + i, sigmoid(values[c]), mask=c * STEP + i < K)


@triton.jit
def moments_kernel(means, variances, x, K: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, CHUNKS: tl.constexpr):
    """Stores the mean and the variance of a row."""
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    values = floats(loaded(row_of(x, row, K, False), i, K, STEP, CHUNKS), CHUNKS)
    mean, variance = moments(values, i, K, THREADS, STEP, CHUNKS)
    tl.store(means + row, mean)
    tl.store(variances + row, variance)


def check_moments():
    """Checks rows with a large mean, where sums of squares would cancel, and short rows that leave some warps without
    elements.
    """
    for k, threads, chunks in ((64, 32, 1), (203, 32, 1), (512, 64, 1), (576, 64, 2), (520, 128, 1)):
        x = 1000 + torch.randn(3, k, generator=torch.Generator().manual_seed(k))
        x[2] = 7
        means, variances = torch.full((3,), float("nan")), torch.full((3,), float("nan"))
        moments_kernel[(3,)](means, variances, x, k, threads, 8, chunks)
        torch.testing.assert_close(means, x.double().mean(1).float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(variances, x.double().var(1, correction=0).float(), rtol=1e-4, atol=0)
        assert variances[2] == 0


def check_without_a_gpu():
    check_moments()
    for k, threads, chunks, vectors in ((64, 4, 2, True), (56, 4, 2, True), (203, 8, 4, False), (8, 32, 1, True)):
        generator = torch.Generator().manual_seed(k)
        wide = (100 * torch.randn(2, 3, k + 8, generator=generator)).half()
        wide[:, :, k:] = float("nan")
        x, beside = wide[0, :, :k], wide[1, :, :k]
        sums, squares = torch.full((3, k), float("nan")).half(), torch.empty(3)
        gates = torch.full((4, k), float("nan"))
        stride = x.stride(0) // 8 if vectors else x.stride(0)
        rows_kernel[(3,)](sums, squares, gates, x, beside, stride, k, threads, 8, chunks, vectors)
        assert torch.equal(sums, x + beside)
        torch.testing.assert_close(squares, sums.float().square().sum(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(gates[:3], sums.float().sigmoid(), rtol=1e-5, atol=1e-30)
        assert gates[3].isnan().all()


def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_without_a_gpu)
