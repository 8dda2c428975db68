"""The weights of experts are stacked bit for bit. Experts that differ in more than their values are refused."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import ExpertTensor, parse_scheme
from lowbit.quantize import rtn
from lowbit.quantize.experts import quantize_experts

SCHEMES = ("w4a16_g32", "w3a16_g48_z", "w4a16_g32_fz", "w6e3m2a16", "w8a8", "w8e4m3a16_b16x16", "w2a16_t")


def weights(experts=3, n=20, k=72, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(experts, n, k, generator=generator).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_expert_comes_back_bit_for_bit(scheme):
    matrices = [rtn(weight, scheme) for weight in weights()]
    stacked = ExpertTensor.stack(iter(matrices), 3)
    assert (stacked.experts, stacked.shape, stacked.scheme) == (3, (20, 72), parse_scheme(scheme))
    assert stacked.nbytes == sum(q.nbytes for q in matrices)
    dense = stacked.dequantize()
    for e, q in enumerate(matrices):
        found = stacked.expert(e)
        assert torch.equal(found.codes, q.codes) and torch.equal(found.scale, q.scale)
        assert (found.zero is None) == (q.zero is None) and (q.zero is None or torch.equal(found.zero, q.zero))
        assert torch.equal(dense[e], q.dequantize())


def test_experts_share_the_transform_of_their_input():
    factors = torch.rand(72) + 0.5
    own = [rtn(weight, "w4a16_g24").with_input(pre_quant_scale=factors.clone()) for weight in weights()]
    stacked = ExpertTensor.stack(own, 3)
    assert torch.equal(stacked.input_transform.pre_quant_scale, factors)
    assert torch.equal(stacked.expert(2).dequantize(), own[2].dequantize())
    own[1] = own[1].with_input(pre_quant_scale=2 * factors)
    with pytest.raises(ValueError, match=r"share the transform of their input; in expert 1: pre_quant_scale differs"):
        ExpertTensor.stack(own, 3)


def test_experts_that_differ_are_refused():
    one, two = (rtn(weight, "w8a16") for weight in weights(2))
    with pytest.raises(ValueError, match=r"expert 0 has w8a16 \(20, 72\) .*, expert 1 has w4a16_g128 \(20, 72\)"):
        ExpertTensor.stack([one, rtn(weights(1)[0], "w4a16")], 2)
    with pytest.raises(ValueError, match="2 experts are expected, there are 1"):
        ExpertTensor.stack([one], 2)
    with pytest.raises(ValueError, match="1 experts are expected, there are more"):
        ExpertTensor.stack([one, two], 1)
    q = ExpertTensor.stack([one, two], 2)
    with pytest.raises(ValueError, match=r"uint8 \[E, 20, 72\], got torch.uint8 \(2, 20, 71\)"):
        ExpertTensor(q.packed[..., 1:], q.scale, None, q.scheme, q.shape)
    with pytest.raises(ValueError, match="have floating-point scales"):
        ExpertTensor(q.packed, q.scale[1:], None, q.scheme, q.shape)


def test_scales_of_all_experts_have_one_type():
    """fp16 cannot hold the scales of tiny weights. If one expert has such scales, those of all experts are bf16, with the
    nearest codes for them."""
    stacked = weights()
    stacked[1] *= 1e-7
    scheme = parse_scheme("w4a16_g24")
    assert [rtn(weight, scheme).scale.dtype for weight in stacked] == [torch.float16, torch.bfloat16, torch.float16]
    q = quantize_experts(3, lambda e, scale_type: rtn(stacked[e], scheme, scale_type=scale_type))
    assert q.scale.dtype == torch.bfloat16
    for e in range(3):
        expected = rtn(stacked[e], scheme, scale_type=torch.bfloat16)
        assert torch.equal(q.expert(e).codes, expected.codes) and torch.equal(q.scale[e], expected.scale)
