"""Gate and up are packed as one matrix, in which 8 rows of gate and 8 rows of up alternate. The weights are unchanged."""

from __future__ import annotations

import pytest
import torch

from lowbit.pack.gated import alternate, gated_refusals, pack_gated
from lowbit.quantize import rtn
from tests.tiny import with_channels

SCHEMES = [
    "w4a16_g128",
    "w4a16_g32_z",
    "w4a16_g64_fz",
    "w6e3m2a16",
    "w8a16",
    "w8e5m2a16_t",
    "w8e4m3a16_b128x128",
    "w4a16_t_z",
    "w3a16_g48",
]


def pair(scheme, rows=40, k=200):
    generator = torch.Generator().manual_seed(rows)
    return [rtn(torch.randn(rows, k, generator=generator) * size, scheme) for size in (0.05, 0.3)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [8, 40, 136])
def test_the_weights_are_the_same(scheme, rows):
    gate, up = pair(scheme, rows)
    w = pack_gated(gate, up)
    assert w.shape == (2 * rows, 200) and w.codes.shape[0] == rows // 8, "whole row blocks"
    values = w.unpack().dequantize()
    for i, q in enumerate((gate, up)):
        expected = q.dequantize()
        for first in range(0, rows, 8):
            found = values[2 * first + 8 * i :][:8]
            # 32-bit scales are rounded to 16 bits, as documented in `FragmentWeight.pack`.
            assert torch.allclose(found, expected[first : first + 8], rtol=2**-10, atol=2**-10 * float(expected.abs().max()))


def test_rows_alternate():
    gate, up = torch.arange(16), torch.arange(100, 116)
    assert alternate(gate, up).tolist() == [*range(8), *range(100, 108), *range(8, 16), *range(108, 116)]
    with pytest.raises(ValueError, match="a multiple of 8 rows"):
        alternate(gate[:12], up[:12])


def test_refusals():
    gate, up = pair("w4a16_g32", 44, 64)
    assert gated_refusals(gate, up) == ("row blocks have 8 rows of gate and 8 of up, 44 rows are no multiple of 8",)
    gate, _ = pair("w4a16_g32")
    _, up = pair("w8a16", 48)
    reasons = gated_refusals(gate, up)
    assert reasons[0] == "gate and up have one scheme, got w4a16_g32 and w8a16" and "one shape" in reasons[1]
    with pytest.raises(ValueError, match="cannot be packed as one matrix: gate and up have one scheme"):
        pack_gated(gate, up)
    gate, up = pair("w4a16_g32")
    assert gated_refusals(with_channels(gate), up) == (
        "x is the norm's own output: no scale of the input's channels",
        "x is the norm's own output: no channel order (act-order)",
    )
    assert gated_refusals(gate, up) == ()
