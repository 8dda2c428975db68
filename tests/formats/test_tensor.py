from __future__ import annotations

import pytest
import torch

from lowbit.formats import (
    InputTransform,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    QuantTensor,
    parse_scheme,
    scale_shape,
    spread,
)


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        (PerTensor(), (1, 1)),
        (PerChannel(), (6, 1)),
        (PerGroup(4), (6, 3)),
        (PerGroup(128), (6, 1)),
        (PerBlock(4, 4), (2, 3)),
    ],
)
def test_scale_shapes_and_spread(granularity, expected):
    shape = (6, 10)
    assert scale_shape(granularity, shape) == expected
    scale = torch.arange(expected[0] * expected[1]).reshape(expected).float()
    full = spread(scale, granularity, shape).expand(shape)
    n, k = granularity.block(shape)
    for i in range(6):
        for j in range(10):
            assert full[i, j] == scale[i // n, j // k]


def test_dequantize_by_hand():
    codes = torch.tensor([[0, 15, 8, 3]], dtype=torch.uint8)
    scale = torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    symmetric = QuantTensor(codes, scale, None, parse_scheme("w4a16_g2"))
    assert symmetric.dequantize().tolist() == [[-4.0, 3.5, 0.0, -10.0]]
    integer = QuantTensor(codes, scale, torch.tensor([[1, 3]], dtype=torch.uint8), parse_scheme("w4a16_g2_z"))
    assert integer.dequantize().tolist() == [[-0.5, 7.0, 10.0, 0.0]]
    floating = QuantTensor(codes, scale, torch.tensor([[0.25, -1.0]]).half(), parse_scheme("w4a16_g2_fz"))
    assert floating.dequantize().tolist() == [[0.25, 7.75, 15.0, 5.0]]


def test_bits_per_weight_counts_scales_and_zeros():
    q = QuantTensor(
        torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2).half(), torch.ones(4, 2).half(), parse_scheme("w4a16_g32_fz")
    )
    assert q.bits_per_weight == 4 + 2 * 16 / 32


def test_wrong_shapes_are_refused():
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales \(4, 2\), got torch.float32 \(4, 1\)"):
        QuantTensor(codes, torch.ones(4, 1), None, parse_scheme("w4a16_g32"))
    with pytest.raises(ValueError, match="needs zeros"):
        QuantTensor(codes, torch.ones(4, 2), None, parse_scheme("w4a16_g32_z"))
    with pytest.raises(ValueError, match="has no zeros"):
        QuantTensor(codes, torch.ones(4, 2), torch.ones(4, 2), parse_scheme("w4a16_g32"))
    with pytest.raises(ValueError, match="zeros are torch.uint8"):
        QuantTensor(codes, torch.ones(4, 2), torch.ones(4, 2), parse_scheme("w4a16_g32_z"))


def test_order_and_pre_quant_scale_are_of_the_input():
    """x @ dequantize().T equals the product with a permuted and scaled input."""
    codes = torch.tensor([[0, 15, 8, 3], [1, 2, 3, 4]], dtype=torch.uint8)
    scale = torch.tensor([[0.5, 2.0], [1.0, 4.0]])
    order = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    pre_quant_scale = torch.tensor([1.0, 2.0, 0.5, 4.0])
    q = QuantTensor(codes, scale, None, parse_scheme("w4a16_g2"), InputTransform(order, pre_quant_scale))
    x = torch.tensor([[1.0, 3.0, -2.0, 0.5]])
    expected = (x * pre_quant_scale)[:, order.long()] @ q.dequantize_codes().T
    assert torch.equal(x @ q.dequantize().T, expected)
    assert q.nbytes == 2 * 2 + 4 * 4 + 4 * 4 + 4 * 4
    with pytest.raises(ValueError, match=r"order is \[4\], got \(3,\)"):
        QuantTensor(codes, scale, None, parse_scheme("w4a16_g2"), InputTransform(order[:3]))
    with pytest.raises(ValueError, match="order is int32"):
        QuantTensor(codes, scale, None, parse_scheme("w4a16_g2"), InputTransform(order.long()))
