"""Order and input scale on the way into the product: against the float64 product with the weights as x sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lowbit.formats import pack_words
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops import mixed_gemm
from lowbit.ops.channels import channels_of_codes
from lowbit.quantize import rtn
from tests.tiny import with_channels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [(True, None), (False, torch.float32), (True, torch.float16), (True, torch.bfloat16)]


def problem(name, m=5, n=50, k=205, dtype=torch.float32, device="cpu", order=True, pre_quant_scale=None):
    g = torch.Generator().manual_seed(0)
    w = with_channels(rtn(torch.randn(n, k, generator=g), name), order, pre_quant_scale).to(device)
    return torch.randn(m, k, generator=g).to(device, dtype), w


def run(x, w):
    packed = pack_words(w.codes, w.scheme.weight.bits)
    return mixed_gemm(x, packed, w.scale, w.zero, None, w.scheme.name, w.order, w.pre_quant_scale)


def test_by_hand():
    x = torch.tensor([[1.0, 2.0, 3.0]])
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    scale = torch.tensor([10.0, 100.0, 1000.0])
    assert channels_of_codes(x, order, None).tolist() == [[3, 1, 2]]
    assert channels_of_codes(x, None, scale).tolist() == [[10, 200, 3000]]
    assert channels_of_codes(x, order, scale).tolist() == [[3000, 10, 200]]
    # The product is rounded to fp16, not the scale before it, which would be 1.
    x, scale = torch.tensor([[1 + 2.0**-10]]).half(), torch.tensor([1 + 2.0**-11])
    assert channels_of_codes(x, None, scale).item() == 1 + 2.0**-9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("order", "pre_quant_scale"), KINDS)
@pytest.mark.parametrize("name", ["w4a16_g64", "w3a16_g48_z", "w4a16_g32_fz", "w6e3m2a16", "w8a16", "w4a16_z"])
def test_against_float64(name, order, pre_quant_scale, dtype, device):
    for m in (1, 70):
        x, w = problem(name, m, 48, 576, dtype, device, order, pre_quant_scale)
        y, exact = run(x, w), mixed_gemm_reference(x, w)
        size = x.double().abs() @ w.dequantize(torch.float64).abs().T
        assert y.dtype == dtype and bool(((y.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * (size + 1)).all())


def test_one_hot_activations_return_the_permuted_weights_bit_exactly():
    for name in ("w4a16_g64", "w5e2m2a16"):
        _, w = problem(name, k=64)
        assert torch.equal(run(torch.eye(64), w).T.contiguous(), w.dequantize())


def test_leading_dimensions_and_no_tokens():
    x, w = problem("w4a16_g64", 6, k=64, pre_quant_scale=torch.float32)
    assert torch.equal(run(x.view(2, 3, 64), w), run(x, w).view(2, 3, 50))
    assert run(x[:0], w).shape == (0, 50)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_and_compile(device):
    x, w = problem("w4a16_g64", 3, 16, 64, torch.bfloat16, device, True, torch.float32)
    arguments = (x, pack_words(w.codes, 4), w.scale, None, None, "w4a16_g64", w.order, w.pre_quant_scale)
    torch.library.opcheck(torch.ops.lowbit.mixed_gemm.default, arguments)
    compiled = torch.compile(lambda x: mixed_gemm(x, *arguments[1:]) * 2, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(x), run(x, w) * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(order=torch.arange(64)), r"order is int32 \[64\], got torch.int64 \(64,\)"),
        (dict(order=torch.arange(63, dtype=torch.int32)), r"order is int32 \[64\], got torch.int32 \(63,\)"),
        (dict(pre_quant_scale=torch.ones(1)), r"pre_quant_scale is fp16, bf16 or fp32 \[64\], got torch.float32 \(1,\)"),
        (dict(pre_quant_scale=torch.ones(64).double()), r"pre_quant_scale is fp16, bf16 or fp32 \[64\], got torch.float64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    x, w = problem("w4a16_g64", 2, 16, 64)
    given = dict(order=w.order, pre_quant_scale=None) | change
    with pytest.raises(ValueError, match=f"mixed_gemm: {message}"):
        mixed_gemm(x, pack_words(w.codes, 4), w.scale, None, None, "w4a16_g64", **given)
    with FakeTensorMode() as mode:
        codes, scale = torch.empty(1, 1, 128, dtype=torch.int32), torch.empty(1, 2, 8, 2, dtype=torch.float16)
        given = {name: None if t is None else mode.from_tensor(t) for name, t in given.items()}
        with pytest.raises((ValueError, RuntimeError), match=f"fragment_gemm: {message}"):
            torch.ops.lowbit.fragment_gemm(
                torch.empty(2, 64, dtype=torch.float16), codes, scale, None, None, "w4a16_g64", 16, False, **given
            )


def test_an_order_beyond_the_channels_is_no_read_beyond_memory():
    x, w = problem("w4a16_g64", 2, 16, 64)
    w = replace(w, order=w.order + 1)
    with pytest.raises((RuntimeError, IndexError), match="out of"):
        run(x, w)
