"""The correction takes away exactly the largest singular components of the error."""

from __future__ import annotations

import pytest
import torch

from lowbit.quantize import gptq, lorc, rtn
from tests.quantize.data import inputs, weights


@pytest.mark.parametrize("rank", [1, 4, 24])
@pytest.mark.parametrize("name", ["w3a16_g16", "w4a16_pc", "w6e3m2a16"])
def test_the_error_left_is_the_tail_of_the_singular_values(rank, name):
    w = weights(24, 64)
    q = rtn(w, name)
    error = w.double() - q.dequantize(torch.float64)
    tail = torch.linalg.svdvals(error)[rank:].square().sum()
    left = (error - lorc(w, q, rank, dtype=torch.float64).dense(torch.float64)).square().sum()
    assert abs(left - tail) <= 1e-5 * error.square().sum()
    half = lorc(w, q, rank)
    assert half.up.dtype == half.down.dtype == torch.float16 and half.nbytes == 2 * rank * (24 + 64)
    rounded = (error - half.dense(torch.float64)).square().sum()
    assert rounded <= tail + 1e-3 * error.square().sum()


def test_corrects_weights_with_an_order():
    x, w = inputs(64), weights(24, 64)
    q = gptq(w, x.T @ x, "w3a16_g16", act_order=True)
    assert q.order is not None
    assert (w - q.dequantize() - lorc(w, q, 8).dense()).square().sum() < (w - q.dequantize()).square().sum()


def test_wrong_ranks_and_shapes():
    w = weights(6, 8)
    q = rtn(w, "w4a16_pc")
    for rank in (0, 7):
        with pytest.raises(ValueError, match=f"is 1 to 6, got {rank}"):
            lorc(w, q, rank)
    with pytest.raises(ValueError, match=r"is \(6, 8\), got a weight \(8, 6\)"):
        lorc(w.T, q, 2)
