"""Round-to-nearest against a plain torch simulation, on unusual shapes and weights."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.formats import IntFormat, PerGroup, Scheme, ZeroPoint, code_values, parse_scheme, uint_format
from lowbit.quantize import rtn
from lowbit.quantize.awq import clipped
from lowbit.quantize.gptq import gptq
from lowbit.quantize.learned import LearnedRounding
from tests.formats import FLOAT_FORMATS, INT_FORMATS

SYMMETRIC = [f for f in INT_FORMATS if f.signed] + FLOAT_FORMATS


def random(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fmt", SYMMETRIC, ids=lambda f: f.name)
@pytest.mark.parametrize("group", [None, 128, 16])
def test_every_weight_takes_the_nearest_value(fmt, group):
    """Brute force: no code of the format is nearer to w / scale than the chosen one."""
    scheme = Scheme(fmt, None, PerGroup(group)) if group else Scheme(fmt)
    w = random(6, 200)
    q = rtn(w, scheme)
    values = code_values(fmt)
    values = values[values.isfinite()].double()
    blocks = [slice(i, i + (group or 200)) for i in range(0, 200, group or 200)]
    for i, block in enumerate(blocks):
        scale = q.scale[:, i : i + 1].double()
        grid = (scale * values).unsqueeze(1)
        nearest = (w[:, block].double().unsqueeze(2) - grid).abs().amin(dim=2)
        chosen = (w[:, block].double() - q.dequantize(torch.float64)[:, block]).abs()
        # w / scale is rounded to float32 before the choice, so a near-tie may fall either way.
        assert (chosen <= nearest + 1e-6 * w[:, block].abs().max()).all()
        assert torch.allclose(q.scale[:, i].double(), w[:, block].abs().amax(1).double() / fmt.max, rtol=2**-8)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("zero", [ZeroPoint.INTEGER, ZeroPoint.FLOAT])
def test_zero_points_bound_the_error(bits, zero):
    w = random(5, 96) + 0.7
    q = rtn(w, Scheme(uint_format(bits), None, PerGroup(32), zero))
    step = q.scale.float().repeat_interleave(32, dim=1)
    # Rounding a weight costs half a step. Integer zeros may cut off another half at one end. The rest is rounding to fp16.
    limit = step * (1.0 if zero is ZeroPoint.INTEGER else 0.5) + 2e-3 * w.abs().max()
    assert ((w - q.dequantize()).abs() <= limit).all()


def test_weights_on_a_grid_with_float_zeros_come_back_exactly():
    """What GGUF's Q4_1 holds (fp16 step and minimum, groups of 32) is reproduced by w4a16_g32_fz without loss."""
    g = torch.Generator().manual_seed(1)
    step = (torch.rand(8, 4, 1, generator=g) * 0.02 + 0.001).half().float()
    low = (torch.randn(8, 4, 1, generator=g) * 0.1).half().float()
    codes = torch.randint(0, 16, (8, 4, 32), generator=g)
    codes[..., 0], codes[..., 1] = 0, 15
    w = (codes * step + low).reshape(8, 128)
    q = rtn(w, "w4a16_g32_fz")
    assert torch.equal(q.codes.reshape(8, 4, 32), codes.to(torch.uint8))
    assert torch.allclose(q.dequantize(), w, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["w4a16_g128", "w8a16", "w6e3m2a16", "w4a16_g32_z", "w4a16_g32_fz", "w8e4m3a16_b128x128", "w5a16_t"]
)
def test_ragged_groups_zero_channels_and_single_values(name):
    w = random(7, 576)
    w[0] = 0
    w[1, 512:] = 0
    w[2] = 0.37
    w[3, :128] = -1e-12
    q = rtn(w, name)
    got = q.dequantize()
    assert got.isfinite().all()
    assert q.codes.shape == w.shape
    if "b128" not in name and "_t" not in name:
        assert (got[0] == 0).all()
        assert torch.allclose(got[2], w[2], rtol=1e-2)
    # The last group is ragged (64 of 128 weights) and is quantized by its own largest weight. Scales are bf16 because of the
    # tiny weights in row 3.
    if name == "w4a16_g128":
        assert q.scale.shape == (7, 5)
        assert q.scale[4, 4] == (w[4, 512:].abs().max() / 7).bfloat16()
        assert torch.allclose(got[3, :128], w[3, :128], rtol=1e-2, atol=0)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    k=st.integers(1, 70),
    size=st.integers(1, 80),
    seed=st.integers(0, 10**6),
    fmt=st.sampled_from(SYMMETRIC),
)
def test_any_shape_and_group(n, k, size, seed, fmt):
    w = random(n, k, seed)
    q = rtn(w, Scheme(fmt, None, PerGroup(size)))
    assert q.shape == (n, k)
    assert q.dequantize().isfinite().all()
    # Requantizing the result changes nothing: it lies on its own grid and its extremes are kept.
    if isinstance(fmt, IntFormat) and fmt.bits >= 3:
        again = rtn(q.dequantize(), q.scheme)
        assert torch.allclose(again.dequantize(), q.dequantize(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["w3a16_g64", "w4a16", "w4a16_g64_z", "w4a16_g64_fz", "w5e2m2a16", "w6e3m2a16"])
def test_mse_search_never_does_worse(name):
    w = random(32, 256).pow(3)  # heavy tails, where clipping pays
    plain, searched = rtn(w, name), rtn(w, name, search="mse")
    error = lambda q: (q.dequantize() - w).square().sum()  # noqa: E731
    assert error(searched) <= error(plain)
    if name == "w3a16_g64":
        assert error(searched) < 0.9 * error(plain)


@pytest.mark.parametrize("name", ["w3a16_g48", "w3a16_g48_z", "w3a16_g48_fz"])
def test_a_ragged_group_is_searched_as_if_alone(name):
    w = random(16, 64).pow(3)
    whole, alone = rtn(w, name, search="mse"), rtn(w[:, 48:].contiguous(), name.replace("g48", "g16"), search="mse")
    assert torch.equal(whole.scale[:, 1], alone.scale[:, 0]) and torch.equal(whole.codes[:, 48:], alone.codes)


def test_deterministic_and_input_untouched():
    w = random(16, 64)
    before = w.clone()
    a, b = rtn(w, "w4a16_g32"), rtn(w, "w4a16_g32")
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)
    assert torch.equal(w, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    w = random(4, 64).to(dtype)
    assert torch.equal(rtn(w, "w8a16").codes, rtn(w.float(), "w8a16").codes)


def test_bad_weights_are_refused():
    w = random(4, 8)
    w[1, 2] = float("inf")
    with pytest.raises(ValueError, match="1 of 32 weights are not finite"):
        rtn(w, "w8a16")
    with pytest.raises(ValueError, match=r"matrix \[N, K\], got torch.float32 \(8,\)"):
        rtn(torch.zeros(8), "w8a16")
    with pytest.raises(ValueError, match="'max' or 'mse'"):
        rtn(random(2, 2), "w8a16", search="min")


def test_scheme_may_be_an_object_or_a_name():
    w = random(4, 64)
    assert torch.equal(rtn(w, parse_scheme("wf6af16")).codes, rtn(w, "w6e3m2a16").codes)


@pytest.mark.parametrize("name", ["w4a16_g32_fz", "w6e3m2a16", "w8a16_b8x16", "w8a16_t", "w4a16_g48_z"])
def test_working_in_pieces_changes_nothing(name, monkeypatch):
    w = random(50, 96)
    whole = rtn(w, name)
    monkeypatch.setattr(sys.modules["lowbit.quantize.rtn"], "WEIGHTS_AT_ONCE", 96 * 7)
    pieces = rtn(w, name)
    assert torch.equal(pieces.codes, whole.codes) and torch.equal(pieces.scale, whole.scale)
    assert whole.zero is None or torch.equal(pieces.zero, whole.zero)


def test_pieces_wait_for_a_device_once_each(monkeypatch):
    """A number read by the host waits until the GPU is idle, so only one is read for each piece, and two for the matrix."""
    waits = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            waits.extend([function] * (function is torch.ops.aten._local_scalar_dense.default))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(sys.modules["lowbit.quantize.rtn"], "WEIGHTS_AT_ONCE", 128 * 8)
    with Count():
        rtn(random(80, 128), "w4a16_g32")
    assert len(waits) == 10 + 2  # the other two: whether all weights are finite, and the type of the scales


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_that_are_not_finite_are_counted_wherever_they_are(value, dtype):
    w = random(8, 64).to(dtype)
    w[3, 5] = w[7, 63] = value
    with pytest.raises(ValueError, match="2 of 512 weights are not finite"):
        rtn(w, "w4a16_g32")


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [("w2a16_g64", torch.bfloat16), ("w4a16_g128", torch.bfloat16), ("w7a16_g32_z", torch.bfloat16),
     ("w6e3m2a16_g128", torch.bfloat16), ("w8a16_g32", torch.float16), ("w4a16_g32_fz", torch.float16),
     ("w4a16_pc", torch.float32)],
)  # fmt: skip
def test_scales_of_weights_stored_in_bf16(scheme, expected):
    """Every method chooses the scales' type by the type of the stored weights, not of the computation; bf16 scales raise the
    error by 0.6 % at most.
    """
    w = (random(32, 256) * 0.02).bfloat16()
    hessian, parsed = torch.eye(256), parse_scheme(scheme)
    found = [rtn(w, scheme), rtn(w.float(), scheme, stored=torch.bfloat16), rtn(w, scheme, stored=torch.float16)]
    assert [q.scale.dtype for q in found] == [expected, expected, torch.float16 if expected == torch.bfloat16 else expected]
    calibrated = [gptq(w.float(), hessian, scheme, stored=torch.bfloat16), clipped(w.float(), parsed, hessian, torch.bfloat16)]
    learned = LearnedRounding(w.float(), parsed, torch.bfloat16).quantized()
    assert {q.scale.dtype for q in (*calibrated, learned)} == {expected}
    errors = [float((q.dequantize(torch.float64) - w.double()).norm()) for q in (found[0], found[2])]
    assert errors[0] <= 1.006 * errors[1]
