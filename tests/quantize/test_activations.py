from __future__ import annotations

import torch

from lowbit.formats import parse_scheme
from lowbit.quantize.activations import static_scale


def test_the_largest_value_becomes_the_largest_of_the_format():
    seen = torch.tensor([0.5, 224.0, 3.0])
    assert torch.equal(static_scale(parse_scheme("fp8"), seen), torch.tensor([0.5]))
    assert torch.equal(static_scale(parse_scheme("w8a8_t"), seen), torch.tensor([224 / 127]))
    assert torch.equal(static_scale(parse_scheme("fp8"), torch.zeros(3)), torch.ones(1)), "nothing was seen"
    for scheme in ("w8a8", "fp8_dynamic", "fp8_block", "w4a8_g64", "w8a16_t"):
        assert static_scale(parse_scheme(scheme), seen) is None
