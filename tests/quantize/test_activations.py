from __future__ import annotations

import torch

from lowbit.formats import parse_scheme
from lowbit.ops import quantize_activations
from lowbit.quantize.activations import static_range


def test_the_largest_value_becomes_the_largest_of_the_format():
    low, high = torch.tensor([-0.5, 0.0, -224.0]), torch.tensor([0.5, 100.0, 3.0])

    def found(scheme, *seen):
        return static_range(parse_scheme(scheme), *seen)

    assert found("fp8", low, high) == {"activation_scale": torch.tensor([0.5])}
    assert found("w8a8_t", low, high) == {"activation_scale": torch.tensor([224 / 127])}
    assert found("w8a8_t_ct", low, high) == {"activation_scale": torch.tensor([224 / 127.5])}, "as compressed-tensors does"
    assert found("w8e4m3a8e4m3_t_ct", low, high) == found("fp8", low, high)
    assert found("fp8", torch.zeros(3), torch.zeros(3)) == {"activation_scale": torch.ones(1)}, "nothing was seen"
    for scheme in ("w8a8", "w8a8_az", "fp8_dynamic", "fp8_block", "w4a8_g64", "w8a16_t"):
        assert found(scheme, low, high) == {}


def test_a_range_with_a_zero_point_covers_what_was_seen():
    """The range -51 to 204 has 255 steps of 1: -51 becomes code -128, so 0 becomes -77."""
    found = static_range(parse_scheme("w8a8_t_az"), torch.tensor([-51.0, 0.0]), torch.tensor([0.0, 204.0]))
    assert found["activation_scale"].tolist() == [1.0] and found["activation_zero"].tolist() == [-77]
    assert found["activation_zero"].dtype == torch.int32
    codes = quantize_activations(
        torch.tensor([-51.0, 0.0, 204.0, 300.0]), "int8", scale=found["activation_scale"], symmetric=False,
        zero=found["activation_zero"],
    ).codes  # fmt: skip
    assert codes.tolist() == [-128, -77, 127, 127]
    nothing = static_range(parse_scheme("w8a8_t_az"), torch.zeros(1), torch.zeros(1))
    assert (nothing["activation_scale"].item(), nothing["activation_zero"].item()) == (1.0, -128)
