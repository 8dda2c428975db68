"""Rows with 8-bit activations: the inputs of all contenders, and the error bound."""

from __future__ import annotations

import pytest
import torch

from benchmarks.limits import Ceilings, compute_us, problem_bytes
from benchmarks.protocol import blank_row, reference_product
from benchmarks.quantized_x import this_library, torch_bytes, truth
from benchmarks.request import make_request
from lowbit.formats import parse_scheme
from lowbit.quantize import rtn
from lowbit.tune.trials import STATIC_LARGEST, quantized_x

REQUEST = make_request("w8a8,fp8,fp8_dynamic,w4a8_g128", "64x256", "1,16")


def weight(scheme):
    return rtn(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) / 16, scheme)


@pytest.mark.parametrize(
    ("scheme", "error"), [("w8a8", 0.012), ("w8a8_az", 0.012), ("fp8", 0.04), ("fp8_dynamic", 0.04), ("w4a8_g128", 0.012)]
)
def test_the_reference_is_the_product_of_x_as_quantized(scheme, error):
    q, x = weight(scheme), torch.randn(20, 256)
    plain = reference_product(x, q)
    assert 0 < (truth(x, q) - plain).norm() / plain.norm() < error
    given = quantized_x(x, q.scheme)
    assert given.scale.shape == ((1,) if scheme == "fp8" else (20, 1))
    rows = quantized_x(x[:3], q.scheme)
    assert torch.equal(rows.codes.view(torch.uint8), given.codes[:3].view(torch.uint8)), "no row depends on the others"
    if scheme == "fp8":
        assert given.scale.item() == pytest.approx(STATIC_LARGEST / 448)


def test_contenders():
    q = weight("w8a8")
    x = torch.randn(2, 256)
    integers = torch_bytes(q, REQUEST)
    assert integers.prepare(x).shape == (32, 256), "torch._int_mm wants more than 16 rows"
    codes = quantized_x(x, q.scheme)
    assert torch.allclose(integers.truth(x) * codes.scale.double() * q.scale.double().T, truth(x, q))
    own = this_library(q, REQUEST)
    assert own.nbytes == 64 * 256 + 64 * 4 * 2 and len(own.products(16)) == 1
    assert len(torch_bytes(weight("fp8"), REQUEST).products(1)) == 2, "with and without fast sums"
    with pytest.raises(ValueError, match="int8 by int8 and e4m3 by e4m3"):
        torch_bytes(weight("w4a8_g128"), REQUEST)


def test_rows_and_limits():
    scheme = parse_scheme("w8a8")
    assert blank_row("lowbit", scheme, (64, 256), 1, "float16")["activation"] == "int8"
    assert problem_bytes(scheme, 64, 256, 10) == 64 * 256 + 64 * 4 + 10 * (256 + 2 * 64)
    ceilings = Ceilings(4e12, 8e14)
    assert compute_us(64, 256, 10, ceilings, scheme) == compute_us(64, 256, 10, ceilings) / 2
