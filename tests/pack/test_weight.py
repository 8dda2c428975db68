"""FragmentWeight: zeros with per-channel scales, rounding of scales, and the input transform."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import NO_PARTS, QuantTensor, parse_scheme
from lowbit.pack import FragmentWeight, has_channel_scale, unpack_scales, weight_form
from lowbit.quantize import rtn
from tests.tiny import with_channels


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", ["w4a16_z", "w8a16_z", "w4a16_t_z"])
def test_float32_scales_per_channel_stay_exact_beside_integer_zeros(scheme):
    """Groups compute (code - zero) * 1 and the epilogue applies the float32 scale, so the weight is exact."""
    q = rtn(random(40, 300) + 0.3, scheme)
    w = FragmentWeight.pack(q)
    assert w.channel_scale.dtype == torch.float32 and w.channel_scale.shape == (40,)
    assert torch.equal(w.channel_scale, q.scale.expand(40, 1).reshape(-1))
    ones, zeros = (unpack_scales(part.flatten(-2), 40) for part in w.scale.split(2, dim=-1))
    groups = torch.arange(300) // 128
    assert torch.equal(ones[:, groups], torch.ones(40, 300, dtype=ones.dtype))
    weights = (q.codes.float() - zeros[:, groups].float()) * ones[:, groups].float() * w.channel_scale[:, None]
    assert torch.equal(weights, q.dequantize())
    back = w.unpack()
    assert torch.equal(back.zero, q.zero) and torch.equal(back.scale, q.scale) and torch.equal(back.codes, q.codes)
    form = w.form
    assert form.channel_scale and form.group == 128 and form.zero == "integer"


def test_which_scales_wait_for_the_end():
    def kind(scheme):
        parsed = parse_scheme(scheme)
        form = weight_form(parsed, torch.float16, has_channel_scale(parsed))
        return form.group, form.channel_scale

    assert kind("w8a16") == (0, True) and kind("w8a16_t") == (0, True)
    assert kind("w4a16_g128") == (128, False) and kind("w4a16_g128_z") == (128, False)
    assert kind("w4a16_z") == (128, True) and kind("w4a16_fz") == (128, False)


WIDE = ["w4a16_g32", "w6a16_g16", "w4a16_g32_fz", "w5a16_g32_fz", "w4a16_g32_z", "w8e4m3a16_b48x128", "w4a16_fz", "w4a16_t_fz"]


@pytest.mark.parametrize("scheme", WIDE)
def test_scales_of_groups_in_32_bits_are_rounded_as_stated(scheme):
    """Rows of very different magnitudes, with scales of many magnitudes in each, negative scales, zeros, and a row of zeros
    only.
    """
    q = rtn(random(100, 300), scheme)
    g = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-60, 40, (len(q.scale), 1), generator=g) + 6 * torch.rand(q.scale.shape, generator=g))
    scale = sizes * torch.randn(q.scale.shape, generator=g).sign()
    scale[-1] = 0
    if scale.shape[1] > 1:
        scale[0, 1] = 0
    zero = q.zero if q.zero is None or q.zero.dtype == torch.uint8 else sizes * torch.randn(sizes.shape, generator=g)
    q = QuantTensor(q.codes, scale, zero, q.scheme)
    w = FragmentWeight.pack(q)
    assert w.scale.dtype == torch.float16 and bool(w.scale.isfinite().all())
    mantissa, _ = torch.frexp(w.channel_scale)
    assert bool((mantissa == 0.5).all()), "powers of two"
    back = w.unpack()
    assert torch.equal(back.codes, q.codes) and back.scale.dtype == torch.float32
    for ours, stored in ((q.scale, back.scale), (q.zero, back.zero)):
        if ours is None or ours.dtype == torch.uint8:
            assert ours is stored is None or torch.equal(ours, stored)
            continue
        largest = torch.maximum(*(t.abs().amax(dim=1, keepdim=True) for t in (q.scale, ours)))
        assert bool(((stored - ours).abs() <= torch.maximum(ours.abs() * 2**-11, largest * 2**-24)).all())
    assert w.form.channel_scale
    half = QuantTensor(q.codes, torch.ones_like(q.scale).half(), None if zero is None else torch.ones_like(zero).to(
        torch.uint8 if zero.dtype == torch.uint8 else torch.float16), q.scheme)  # fmt: skip
    if not has_channel_scale(q.scheme):
        packed, subnormal = FragmentWeight.pack(half), scheme in ("w4a16_g32", "w6a16_g16")
        assert (packed.channel_scale is not None) == subnormal, "scales of 16 bits stay as they are"


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_that_wait_for_codes_as_subnormal_numbers(bits, dtype):
    """Scales for subnormal codes are stored exactly, the largest of a row just below 2^16. Rows with a scale that is too small,
    and 8-bit codes, are stored otherwise.
    """
    q = rtn(random(100, 512), f"w{bits}a16_g64")
    g = torch.Generator().manual_seed(bits)
    scale = torch.exp2((2 + bits) * torch.rand(q.scale.shape, generator=g) - 9).to(dtype)
    scale[3, 1] = scale[7] = 0
    q = QuantTensor(q.codes, scale, None, q.scheme)
    w = FragmentWeight.pack(q)
    form = w.form
    assert form.subnormal == form.scaled_twice == (bits < 8) and w.scale.dtype == dtype
    assert torch.equal(w.unpack().scale.float(), scale.float()) and torch.equal(w.unpack().codes, q.codes)
    if bits < 8:
        largest = unpack_scales(w.scale.flatten(-2), 100).float().amax(1)
        assert bool((((largest >= 2**15) & (largest <= 65504)) | (scale.amax(1) == 0)).all())
    scale[5, 2] = scale[5].amax() * 2.0 ** -(4 + bits)
    assert FragmentWeight.pack(QuantTensor(q.codes, scale, None, q.scheme)).channel_scale is None


def test_a_scale_that_fp16_rounds_up_stays_finite():
    q = rtn(random(16, 128), "w4a16_g64")
    scale = torch.full(q.scale.shape, 1 - 2.0**-13)
    w = FragmentWeight.pack(QuantTensor(q.codes, scale, None, q.scheme))
    assert w.channel_scale.dtype == torch.bfloat16 and bool(w.scale.isfinite().all()) and bool((w.unpack().scale == 1).all())


def test_what_is_done_to_x_is_no_part_of_the_product():
    q = with_channels(rtn(random(33, 200), "w4a16_g64"))
    with pytest.raises(
        ValueError, match=r"scale of the input's channels, channel order \(act-order\) is no part of the product"
    ):
        FragmentWeight.pack(q)
    assert FragmentWeight.pack(q.without_input()).unpack().input_transform.parts == NO_PARTS


@pytest.mark.parametrize("spoil", [lambda order: order.fill_(0), lambda order: order.sub_(1), lambda order: order.add_(1)])
def test_an_order_that_is_no_permutation_is_refused(spoil):
    q = with_channels(rtn(random(16, 64), "w4a16_g64"))
    spoil(q.input_transform.order)
    with pytest.raises(ValueError, match="order is a permutation of 0 to 63, this one is not"):
        q.input_transform.check_values()
    q = with_channels(rtn(random(16, 64), "w4a16_g64"))
    q.input_transform.pre_quant_scale[5] = float("inf")
    with pytest.raises(ValueError, match="factors of x must be finite"):
        q.input_transform.check_values()
