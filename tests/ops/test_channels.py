"""GEMMs with act-order and pre_quant_scale against the float64 product with the weights in x's channel order."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops import gemm, pack_for
from lowbit.ops.channels import gather_channels
from lowbit.quantize import rtn
from tests.tiny import with_channels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [(True, None), (False, torch.float32), (True, torch.float16), (True, torch.bfloat16)]


def problem(name, m=5, n=50, k=205, dtype=torch.float32, device="cpu", order=True, pre_quant_scale=None):
    g = torch.Generator().manual_seed(0)
    w = with_channels(rtn(torch.randn(n, k, generator=g), name), order, pre_quant_scale).to(device)
    return torch.randn(m, k, generator=g).to(device, dtype), w


def run(x, w):
    of_x = w.input_transform
    return gemm(gather_channels(x, of_x.order, of_x.pre_quant_scale), pack_for(w.without_input(), x.dtype))


def test_by_hand():
    x = torch.tensor([[1.0, 2.0, 3.0]])
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    scale = torch.tensor([10.0, 100.0, 1000.0])
    assert gather_channels(x, order, None).tolist() == [[3, 1, 2]]
    assert gather_channels(x, None, scale).tolist() == [[10, 200, 3000]]
    assert gather_channels(x, order, scale).tolist() == [[3000, 10, 200]]
    # x * scale is rounded to fp16. The scale itself is not rounded to fp16: it would become 1.
    x, scale = torch.tensor([[1 + 2.0**-10]]).half(), torch.tensor([1 + 2.0**-11])
    assert gather_channels(x, None, scale).item() == 1 + 2.0**-9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("order", "pre_quant_scale"), KINDS)
@pytest.mark.parametrize("name", ["w4a16_g64", "w3a16_g48_z", "w4a16_g32_fz", "w6e3m2a16", "w8a16", "w4a16_z"])
def test_against_float64(name, order, pre_quant_scale, dtype, device):
    for m in (1, 70):
        x, w = problem(name, m, 48, 576, dtype, device, order, pre_quant_scale)
        y, exact = run(x, w), mixed_gemm_reference(x, w)
        size = x.double().abs() @ w.dequantize(torch.float64).abs().T
        rounded = 4 if dtype == torch.bfloat16 and device == "cpu" else 2  # torch's int4 GEMM has bf16 scales
        assert y.dtype == dtype
        assert bool(((y.double() - exact).abs() <= rounded * torch.finfo(dtype).eps * (size + 1)).all())


def test_one_hot_activations_return_the_permuted_weights_bit_exactly():
    for name in ("w4a16_g64", "w5e2m2a16"):
        _, w = problem(name, k=64)
        assert torch.equal(run(torch.eye(64), w).T.contiguous(), w.dequantize())


@pytest.mark.parametrize("device", DEVICES)
def test_leading_dimensions_and_no_tokens(device):
    x, w = problem("w4a16_g64", 6, k=64, dtype=torch.float16, device=device, pre_quant_scale=torch.float32)
    of_x = (w.input_transform.order, w.input_transform.pre_quant_scale)
    assert torch.equal(gather_channels(x.view(2, 3, 64), *of_x), gather_channels(x, *of_x).view(2, 3, 64))
    assert gather_channels(x[:0], *of_x).shape == (0, 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [64, 75])
def test_opcheck_and_compile(device, k):
    x, w = problem("w8a16", 3, 16, k, torch.bfloat16, device, True, torch.float32)
    of_x = (w.input_transform.order, w.input_transform.pre_quant_scale)
    if device == "cuda":
        torch.library.opcheck(torch.ops.lowbit.gather_channels.default, (x, *of_x))
    compiled = torch.compile(lambda x: gather_channels(x, *of_x) * 2, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(x), gather_channels(x, *of_x) * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(order=torch.arange(64)), r"order is int32 \[64\], got torch.int64 \(64,\)"),
        (dict(order=torch.arange(63, dtype=torch.int32)), r"order is int32 \[64\], got torch.int32 \(63,\)"),
        (dict(factors=torch.ones(1)), r"factors are fp16, bf16 or fp32 \[64\], got torch.float32 \(1,\)"),
        (dict(factors=torch.ones(64).double()), r"factors are fp16, bf16 or fp32 \[64\], got torch.float64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    x, w = problem("w4a16_g64", 2, 16, 64)
    given = dict(order=w.input_transform.order, factors=None) | change
    with pytest.raises(ValueError, match=f"gather_channels: {message}"):
        gather_channels(x, **given)
    with FakeTensorMode() as mode:
        given = {name: None if t is None else mode.from_tensor(t) for name, t in given.items()}
        with pytest.raises((ValueError, RuntimeError), match=f"gather_channels: {message}"):
            torch.ops.lowbit.gather_channels(torch.empty(2, 64, dtype=torch.float16), **given)


def test_an_order_beyond_the_channels_is_no_read_beyond_memory():
    x, w = problem("w4a16_g64", 2, 16, 64)
    w = w.with_input(order=w.input_transform.order + 1)
    with pytest.raises((RuntimeError, IndexError), match="out of"):
        run(x, w)
