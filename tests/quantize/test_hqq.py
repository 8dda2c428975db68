"""HQQ lowers its own objective and the mean error, and refuses schemes whose zeros cannot move."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.quantize import hqq, rtn
from tests.quantize.data import weights


def heavy(n=48, k=256):
    return weights(n, k).pow(3) * 0.02 + 0.01


@pytest.mark.parametrize("name", ["w4a16_g64_fz", "w3a16_g32_fz", "w2a16_g16_fz", "w4a16_g48_fz", "w8a16_fz", "w4a16_b4x64_fz"])
def test_lowers_its_objective_and_the_mean_error(name):
    w = heavy()
    before, after = (q.dequantize(torch.float64) - w.double() for q in (rtn(w, name), hqq(w, name)))
    assert after.abs().pow(0.7).sum() < before.abs().pow(0.7).sum()
    assert after.abs().mean() < before.abs().mean()
    if name == "w2a16_g16_fz":
        assert after.abs().mean() < 0.95 * before.abs().mean()


def test_no_group_is_worse_than_rounding():
    w, name = heavy(), "w3a16_g64_fz"
    before, after = ((q.dequantize() - w).abs().pow(0.7).reshape(48, 4, 64).sum(2) for q in (rtn(w, name), hqq(w, name)))
    assert (after <= before * (1 + 1e-5)).all() and (after < 0.99 * before).any()


def test_scales_stay_and_the_nearest_codes_are_taken():
    w, name = heavy(), "w4a16_g64_fz"
    q = hqq(w, name)
    assert torch.equal(q.scale, rtn(w, name).scale)
    # No other code is nearer for the scale and zero that are stored.
    step = q.scale.float().repeat_interleave(64, dim=1)
    inside = (q.codes > 0) & (q.codes < 15)
    assert ((q.dequantize() - w).abs() <= 0.5001 * step + 1e-6)[inside].all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_zeros_and_determinism(dtype):
    w = heavy().to(dtype)
    w[0], w[1] = 0, 0.25
    a, b = hqq(w, "w4a16_g64_fz"), hqq(w, "w4a16_g64_fz")
    assert torch.equal(a.codes, b.codes) and torch.equal(a.zero, b.zero)
    assert (a.dequantize()[0] == 0).all() and torch.allclose(a.dequantize()[1], torch.tensor(0.25))


@pytest.mark.parametrize("name", ["w4a16_g64", "w4a16_g64_z", "w6e3m2a16"])
def test_refuses_zeros_that_cannot_move(name):
    with pytest.raises(ValueError, match=f"moves floating-point zeros, which {parse_scheme(name)} does not have"):
        hqq(heavy(), name)
