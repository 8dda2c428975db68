"""The correction removes exactly the largest singular components of the error. With known inputs, it removes those of the error
of the outputs."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import LowRank
from lowbit.quantize import gptq, lorc, rtn
from lowbit.quantize.lorc import DAMPING
from tests.quantize.data import inputs, output_error, weights


@pytest.mark.parametrize("rank", [1, 4, 24])
@pytest.mark.parametrize("name", ["w3a16_g16", "w4a16_pc", "w6e3m2a16"])
@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_the_error_left_is_the_tail_of_the_singular_values(rank, name, shape):
    w = weights(*shape)
    q = rtn(w, name)
    error = w.double() - q.dequantize(torch.float64)
    tail = torch.linalg.svdvals(error)[rank:].square().sum()
    left = (error - lorc(w, q, rank, dtype=torch.float64).dense(torch.float64)).square().sum()
    assert abs(left - tail) <= 1e-5 * error.square().sum()
    half = lorc(w, q, rank)
    assert half.up.dtype == half.down.dtype == torch.float16 and half.nbytes == 2 * rank * (24 + 64) and half.rank == rank
    rounded = (error - half.dense(torch.float64)).square().sum()
    assert rounded <= tail + 1e-3 * error.square().sum()


@pytest.mark.parametrize("shape", [(24, 64), (64, 48)])
def test_with_a_hessian_the_error_of_the_outputs_is_least(shape):
    """The error of the outputs is the least possible one: the tail of the singular values of E R. E is the error of the
    weights. R is a square root of the damped Hessian; the test computes it from eigenvectors, unlike the code."""
    w, x = weights(*shape), inputs(shape[1])
    hessian = x.T @ x
    q = rtn(w, "w3a16_g16")
    damped = hessian.double() + DAMPING * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    values, vectors = torch.linalg.eigh(damped)
    root = vectors * values.sqrt()
    error = w.double() - q.dequantize(torch.float64)
    for rank in (2, 8):
        left = error - lorc(w, q, rank, hessian, dtype=torch.float64).dense(torch.float64)
        tail = torch.linalg.svdvals(error @ root)[rank:].square().sum()
        assert abs((left @ root).square().sum() / tail - 1) < 1e-4
        plain = error - lorc(w, q, rank, dtype=torch.float64).dense(torch.float64)
        assert output_error(left.float(), x) < 0.98 * output_error(plain.float(), x)


def test_corrects_weights_with_an_order():
    x, w = inputs(64), weights(24, 64)
    q = gptq(w, x.T @ x, "w3a16_g16", act_order=True)
    assert q.input_transform.order is not None
    assert (w - q.dequantize() - lorc(w, q, 8).dense()).square().sum() < (w - q.dequantize()).square().sum()


def test_nothing_to_correct():
    zero = torch.zeros(6, 8)
    assert not lorc(zero, rtn(zero, "w4a16_pc"), 2).dense().any()


def test_wrong_ranks_and_shapes():
    w = weights(6, 8)
    q = rtn(w, "w4a16_pc")
    for rank in (0, 7):
        with pytest.raises(ValueError, match=f"is 1 to 6, got {rank}"):
            lorc(w, q, rank)
    with pytest.raises(ValueError, match=r"is \(6, 8\), got a weight \(8, 6\)"):
        lorc(w.T, q, 2)
    with pytest.raises(ValueError, match=r"of 8 channels is \[8, 8\], got \(6, 6\)"):
        lorc(w, q, 2, torch.eye(6))
    with pytest.raises(ValueError, match="not positive definite"):
        lorc(w, q, 2, -torch.eye(8))
    with pytest.raises(ValueError, match=r"up \[N, r\] and down \[r, K\], got \(6, 2\) and \(3, 8\)"):
        LowRank(torch.zeros(6, 2), torch.zeros(3, 8))
