"""Products of weights in TensorRT-LLM's lines, on a GPU: against float64, and bit for bit those of fragment order."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import QuantTensor, decode
from lowbit.kernels.choose.gemm import MmaTile
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops import gemm, pack_for
from lowbit.ops.fragment_gemm import aligned_rows, check_product, wide_plan
from lowbit.ops.workspace import workspace
from lowbit.pack import FragmentWeight, InterleavedWeight, weight_form
from tests.ops.test_fragment_gemm import quantized, relative_error
from tests.ops.test_large_m_gemm import A100, LARGE, SHARED, SMALL
from tests.tiny import with_channels

gpu = pytest.mark.gpu
SCHEMES = ["w4a16_g128", "w4a16_g64", "w4a16_g32", "w4a16_pc", "w8a16", "w8a16_g128", "w4a16_g128_z", "w4a16_g64_fz", "w8a16_z"]
HALVES = [torch.float16, torch.bfloat16]
RAGGED = [(1, 512, 1024), (13, 1008, 576), (129, 528, 1088), (300, 272, 2048), (700, 4096, 4096)]
"""Rows and tokens that end within a tile, K that no tile of several slices divides."""


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), RAGGED)
def test_against_float64(scheme, dtype, m, n, k):
    q = quantized(scheme, n, k)
    w, x = pack_for(q, dtype, form="interleaved"), torch.randn(m, k, device="cuda", dtype=dtype)
    assert isinstance(w, InterleavedWeight)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    torch.full((m, n), float("nan"), dtype=dtype, device="cuda")  # what the allocator hands out next is poisoned
    y = gemm(x, w, bias)
    reference = mixed_gemm_reference(x, q, bias)
    plain = torch.nn.functional.linear(x, q.dequantize(dtype), bias)
    assert relative_error(y, reference) <= 1.5 * relative_error(plain, reference) + 1e-5
    assert torch.equal(y, gemm(x, w, bias)), "same input, same bits"


def product(kind, q, x, tile, bias):
    """y of a tile, in memory that was NaN."""
    w = kind.pack(q)
    types = [None if t is None else t.dtype for t in (w.scale, w.channel_scale)]
    form = weight_form(q.scheme, *types, interleaved=kind is InterleavedWeight)
    from lowbit.kernels.choose.gemm import GemmShape

    plan = wide_plan(tile, GemmShape(len(x), *q.shape, q.scheme.weight.bits), form, x.dtype, True, A100)
    torch.full((len(x), plan.columns), float("nan"), dtype=x.dtype, device="cuda")
    return plan(aligned_rows(x), w.codes, w.scale, w.channel_scale, bias, *workspace(x.device, *plan.workspace))


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_bits_as_fragment_order(scheme, dtype):
    """The same weights at the same places of the same instructions: nothing may differ."""
    for m, n, k in RAGGED[1:4]:
        q, x = quantized(scheme, n, k), torch.randn(m, k, device="cuda", dtype=dtype)
        bias = torch.randn(n, device="cuda", dtype=dtype)
        for tile in (LARGE, SMALL, *SHARED, MmaTile(64, 1, 4, 2, 6, 2, in_turn=True)):
            mine, theirs = (product(kind, q, x, tile, bias) for kind in (InterleavedWeight, FragmentWeight))
            assert torch.equal(mine, theirs), (m, n, k, tile)


@gpu
@pytest.mark.parametrize("scheme", ["w4a16_pc", "w8a16"])
def test_integers_are_exact(scheme):
    q = quantized(scheme, 272, 1024)
    q = QuantTensor(q.codes, torch.ones_like(q.scale), None, q.scheme)
    for m in (1, 64, 256):
        x = torch.randint(-1, 2, (m, 1024), device="cuda").to(torch.float16)
        expected = x.double() @ decode(q.codes, q.scheme.weight).double().T
        assert torch.equal(gemm(x, InterleavedWeight.pack(q)).double(), expected.clamp(-65504, 65504).half().double())


@gpu
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w8a16"])
def test_order_and_factors_of_x_and_batches(scheme):
    q = with_channels(quantized(scheme, 512, 1024))
    w, x = InterleavedWeight.pack(q), torch.randn(300, 1024, device="cuda", dtype=torch.float16)
    whole = gemm(x, w, batch_invariant=True)
    assert relative_error(whole, mixed_gemm_reference(x, q)) < 2e-3
    for m in (1, 17, 64, 129):
        assert torch.equal(gemm(x[:m], w, batch_invariant=True), whole[:m]), m


@gpu
def test_opcheck():
    q = quantized("w4a16_g128", 256, 512)
    w, x = InterleavedWeight.pack(q), torch.randn(20, 512, device="cuda", dtype=torch.float16)
    call = (x, w.codes, w.scale, w.channel_scale, None, q.scheme.name, 256, False, None, None, True)
    torch.library.opcheck(torch.ops.lowbit.fragment_gemm, call)


def test_what_does_not_fit_is_said():
    q = quantized("w4a16_g128", 64, 128, device="cpu")
    w, x = InterleavedWeight.pack(q), torch.ones(2, 128, dtype=torch.float16)
    check_product("f", x, w.codes, w.scale, w.channel_scale, None, q.scheme, 64, interleaved=True)
    with pytest.raises(ValueError, match=r"takes codes int32 \(16, 64\) \(InterleavedWeight.pack makes them\)"):
        check_product("f", x, FragmentWeight.pack(q).codes, w.scale, w.channel_scale, None, q.scheme, 64, interleaved=True)
    with pytest.raises(ValueError, match=r"FragmentWeight.pack makes them\), got torch.int32 \(16, 64\)"):
        check_product("f", x, w.codes, w.scale, w.channel_scale, None, q.scheme, 64)
    with pytest.raises(ValueError, match="N 60 is no multiple"):
        check_product("f", x, w.codes, w.scale, w.channel_scale, None, q.scheme, 60, interleaved=True)
