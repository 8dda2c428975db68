"""The kernels' form of a weight: zeros beside scales per channel, and what belongs to the input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit.formats import QuantTensor, ZeroPoint, parse_scheme
from lowbit.pack import pack_weight, scale_refusals, unpack_scales, unpack_weight, weight_form
from lowbit.quantize import rtn
from tests.tiny import with_channels


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", ["w4a16_z", "w8a16_z", "w4a16_t_z"])
def test_float32_scales_per_channel_stay_exact_beside_integer_zeros(scheme):
    """(code - zero) * 1 in the groups, the scale at the end: what the kernels compute is the weight itself."""
    q = rtn(random(40, 300) + 0.3, scheme)
    w = pack_weight(q)
    assert w.channel_scale.dtype == torch.float32 and w.channel_scale.shape == (40,)
    assert torch.equal(w.channel_scale, q.scale.expand(40, 1).reshape(-1))
    ones, zeros = (unpack_scales(part.flatten(-2), 40) for part in w.scale.split(2, dim=-1))
    groups = torch.arange(300) // 128
    assert torch.equal(ones[:, groups], torch.ones(40, 300, dtype=ones.dtype))
    weights = (q.codes.float() - zeros[:, groups].float()) * ones[:, groups].float() * w.channel_scale[:, None]
    assert torch.equal(weights, q.dequantize())
    back = unpack_weight(w)
    assert torch.equal(back.zero, q.zero) and torch.equal(back.scale, q.scale) and torch.equal(back.codes, q.codes)
    form = weight_form(q.scheme, w.scale.dtype)
    assert form.channel_scale and form.group == 128 and form.zero == "integer"


def test_which_scales_wait_for_the_end():
    def kind(scheme):
        form = weight_form(parse_scheme(scheme), torch.float16)
        return form.group, form.channel_scale

    assert kind("w8a16") == (0, True) and kind("w8a16_t") == (0, True)
    assert kind("w4a16_g128") == (128, False) and kind("w4a16_g128_z") == (128, False)
    assert kind("w4a16_z") == (128, True) and kind("w4a16_fz") == (128, False)


def test_float_zeros_of_whole_channels_need_16_bit_scales():
    """scale * (code + zero / scale) is not code * scale + zero, so nothing can wait for the end."""
    q = rtn(random(32, 64), "w4a16_fz")
    with pytest.raises(ValueError, match="the kernels take scales that go with floating-point zeros in fp16 or bf16, w4a16_fz"):
        pack_weight(q)
    half = QuantTensor(q.codes, q.scale.half(), q.zero.half(), q.scheme)
    assert torch.equal(unpack_weight(pack_weight(half)).dequantize(), half.dequantize())
    assert scale_refusals(parse_scheme("w4a16_g32"), torch.float32) == (
        "take scales of groups in fp16 or bf16, w4a16_g32 has them in float32 here",
    )
    assert parse_scheme("w4a16_fz").zero is ZeroPoint.FLOAT


def test_order_and_input_scale_travel_with_the_weight():
    q = with_channels(rtn(random(33, 200), "w4a16_g64"), input_scale=torch.bfloat16)
    w = pack_weight(q)
    assert w.nbytes == pack_weight(replace(q, order=None, input_scale=None)).nbytes + 4 * 200 + 2 * 200
    for other in (w, w.clone()):
        back = unpack_weight(other)
        assert torch.equal(back.order, q.order) and torch.equal(back.input_scale, q.input_scale)
        assert torch.equal(back.dequantize(), q.dequantize())
    assert w.clone().order.data_ptr() != w.order.data_ptr()


@pytest.mark.parametrize("spoil", [lambda order: order.fill_(0), lambda order: order.sub_(1), lambda order: order.add_(1)])
def test_an_order_that_is_no_permutation_is_refused(spoil):
    q = with_channels(rtn(random(16, 64), "w4a16_g64"))
    spoil(q.order)
    with pytest.raises(ValueError, match="order is a permutation of 0 to 63, this one is not"):
        pack_weight(q)
    q = with_channels(rtn(random(16, 64), "w4a16_g64"))
    q.input_scale[5] = float("inf")
    with pytest.raises(ValueError, match="input scales must be finite"):
        pack_weight(q)
