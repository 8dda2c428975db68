"""The tensor-core kernels against a float64 product of the same dequantized weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit.formats import QuantTensor, decode, parse_scheme
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.ops import fragment_gemm
from lowbit.ops.channels import gather_channels
from lowbit.ops.fragment_gemm import aligned_rows
from lowbit.pack import FragmentWeight
from lowbit.quantize import rtn
from tests.tiny import with_channels

gpu = pytest.mark.gpu
SCHEMES = [
    "w2a16_g64", "w3a16_g128", "w3a16", "w4a16_g128", "w4a16_g32", "w4a16_g48", "w4a16_pc", "w5a16_g32", "w6a16_g128",
    "w7a16_g64", "w8a16", "w8a16_g128", "w6e3m2a16", "w6e3m2a16_g128", "w6e2m3a16_g64", "w5e2m2a16", "w4e2m1a16_g32",
    "w7e3m3a16", "w8e4m3a16", "w8e4m3a16_b128x128", "w8e5m2a16_t", "w4a16_g128_z", "w4a16_g16_z", "w8a16_g128_z",
    "w4a16_g32_fz", "w4a16_g256", "w4a16_z", "w8a16_z", "w4a16_t_z",
]  # fmt: skip
HALVES = [torch.float16, torch.bfloat16]


def quantized(scheme, n, k, seed=0, device="cuda") -> QuantTensor:
    generator = torch.Generator(device).manual_seed(seed)
    return rtn(torch.randn(n, k, device=device, generator=generator) * 0.05, scheme)


def relative_error(y, reference) -> float:
    return float((y.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(64, 128), (100, 200), (33, 576)])
def test_weights_survive_packing(scheme, shape):
    q = quantized(scheme, *shape, device="cpu")
    back = FragmentWeight.pack(q).unpack()
    assert torch.equal(back.codes, q.codes) and torch.equal(back.scale, q.scale) and back.scheme == q.scheme
    assert (back.zero is None) == (q.zero is None) and (q.zero is None or torch.equal(back.zero, q.zero))


def test_what_cannot_be_packed_says_why():
    q = quantized("w4a16_g24", 32, 96, device="cpu")
    with pytest.raises(ValueError, match="groups of the kernels are multiples of 16, got 24"):
        FragmentWeight.pack(q)
    q = quantized("w4a16_g32", 32, 96, device="cpu")
    q.scale[3, 1] = float("nan")
    with pytest.raises(ValueError, match="scales must be finite"):
        FragmentWeight.pack(q)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 512, 1024), (13, 1000, 576), (40, 344, 1096), (300, 520, 2048)])
def test_against_float64(scheme, dtype, m, n, k):
    q = quantized(scheme, n, k)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    w = FragmentWeight.pack(q)
    torch.full((m, n), float("nan"), dtype=dtype, device="cuda")  # poisons memory to be reused
    y = fragment_gemm(x, w, bias)
    reference = mixed_gemm_reference(x, q, bias)
    plain = torch.nn.functional.linear(x, q.dequantize(dtype), bias)
    assert relative_error(y, reference) <= 1.5 * relative_error(plain, reference) + 1e-5
    assert torch.equal(y, fragment_gemm(x, w, bias)), "same input, same bits"


WIDE = ["w4a16_g32", "w6a16_g16", "w4a16_g32_fz", "w5a16_g32_fz", "w4a16_g64_z", "w8e4m3a16_b128x128", "w3a16_g48", "w4a16_fz"]


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scheme", WIDE)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 512, 1024), (13, 1000, 576), (40, 344, 1096), (300, 520, 2048)])
def test_scales_of_groups_in_32_bits(scheme, dtype, m, n, k):
    """Rows of very different magnitudes. The only extra error is the rounding of 32-bit scales documented in pack/weight.py."""
    q = quantized(scheme, n, k)
    sizes = torch.exp2(torch.randint(-12, 3, (len(q.scale), 1), device="cuda") + torch.rand(q.scale.shape, device="cuda"))
    zero = q.zero if q.zero is None or q.zero.dtype == torch.uint8 else q.zero.float() * sizes
    q = QuantTensor(q.codes, q.scale.float() * sizes, zero, q.scheme)
    x, w = torch.randn(m, k, device="cuda", dtype=dtype), FragmentWeight.pack(q)
    y = fragment_gemm(x, w)
    # code * scale and a floating-point zero are rounded separately, and can be larger than their sum.
    as_stated = 2**-11 if zero is None or zero.dtype == torch.uint8 else 2**-9
    for stored, slack in ((w.unpack(), 1e-5), (q, as_stated)):
        reference = mixed_gemm_reference(x, stored)
        plain = torch.nn.functional.linear(x, stored.dequantize(dtype))
        assert relative_error(y, reference) <= 1.5 * relative_error(plain, reference) + slack


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("m", [8, 32])
def test_one_hot_activations_return_the_weights(scheme, dtype, m):
    q = quantized(scheme, 200, 704)
    columns = torch.randperm(704, device="cuda")[:m]
    x = torch.nn.functional.one_hot(columns, 704).to(dtype)
    expected = q.dequantize(torch.float32)[:, columns].T.to(dtype)
    assert torch.equal(fragment_gemm(x, FragmentWeight.pack(q)), expected)


OF_BF16 = [
    "w2a16_g64",
    "w3a16_g128",
    "w4a16_g128",
    "w4a16_g32",
    "w5a16_g32",
    "w6a16_g128",
    "w7a16_g64",
    "w4a16_g128_z",
    "w6e3m2a16_g128",
]
"""Schemes that have bf16 scales if the weights are bf16."""


def quantized_bf16(scheme, n, k) -> QuantTensor:
    q = rtn(torch.randn(n, k, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16() * 0.05, scheme)
    assert q.scale.dtype == torch.bfloat16
    return q


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scheme", OF_BF16)
@pytest.mark.parametrize("m", [8, 32, 300])
def test_scales_in_bf16(scheme, dtype, m):
    """Integer codes are used as bf16 subnormals. Weights must be equal to the bit, and products correct."""
    q = quantized_bf16(scheme, 200, 704)
    w, columns = FragmentWeight.pack(q), torch.randint(704, (m,), device="cuda")
    one_hot = torch.nn.functional.one_hot(columns, 704).to(dtype)
    assert torch.equal(fragment_gemm(one_hot, w), q.dequantize(torch.float32)[:, columns].T.to(dtype))
    x = torch.randn(m, 704, device="cuda", dtype=dtype)
    reference, plain = mixed_gemm_reference(x, q), torch.nn.functional.linear(x, q.dequantize(dtype))
    assert relative_error(fragment_gemm(x, w), reference) <= 1.5 * relative_error(plain, reference) + 1e-5


@gpu
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    m=st.integers(1, 600), n=st.integers(1, 700), k=st.integers(1, 1500), seed=st.integers(0, 99),
    scheme=st.sampled_from(["w4a16_g128", "w6e3m2a16", "w8a16"]),
)  # fmt: skip
def test_random_shapes(m, n, k, seed, scheme):
    q = quantized(scheme, n, k, seed)
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    reference = mixed_gemm_reference(x, q)
    plain = x @ q.dequantize(torch.float16).T
    assert relative_error(fragment_gemm(x, FragmentWeight.pack(q)), reference) <= 1.5 * relative_error(plain, reference) + 1e-5


@gpu
def test_integers_are_exact():
    """Small integers: every product and sum is exact, so y equals the integer product to the last bit."""
    q = quantized("w4a16_pc", 256, 1024)
    q = QuantTensor(q.codes, torch.ones_like(q.scale), None, q.scheme)
    for m in (1, 16, 64, 256):
        x = torch.randint(-3, 4, (m, 1024), device="cuda").to(torch.float16)
        expected = x.double() @ decode(q.codes, parse_scheme("w4a16_pc").weight).double().T
        assert torch.equal(fragment_gemm(x, FragmentWeight.pack(q)).double(), expected.clamp(-65504, 65504).half().double())


@gpu
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w8a16"])
def test_rows_do_not_depend_on_the_batch(scheme):
    q = quantized(scheme, 1024, 2048)
    w = FragmentWeight.pack(q)
    x = torch.randn(700, 2048, device="cuda", dtype=torch.float16)
    whole = fragment_gemm(x, w, batch_invariant=True)
    for m in (1, 3, 17, 64, 129, 300):
        assert torch.equal(fragment_gemm(x[:m], w, batch_invariant=True), whole[:m])


@gpu
def test_opcheck_compile_and_graphs():
    q = quantized("w4a16_g128", 512, 1024)
    w = FragmentWeight.pack(q)
    x = torch.randn(2, 3, 1024, device="cuda", dtype=torch.float16)
    arguments = (x, w.codes, w.scale, w.channel_scale, None, "w4a16_g128", 512, False, w.subnormal)
    torch.library.opcheck(torch.ops.lowbit.fragment_gemm.default, arguments)

    def layer(x):
        return torch.nn.functional.silu(fragment_gemm(x * 2, w)) + 1

    assert torch.allclose(torch.compile(layer, fullgraph=True)(x), layer(x), atol=2e-2)
    for m in (1, 16, 64, 256):
        tokens = torch.randn(m, 1024, device="cuda", dtype=torch.float16)
        expected = fragment_gemm(tokens, w)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            fragment_gemm(tokens, w)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = fragment_gemm(fragment_gemm(tokens, w)[:, :512].repeat(1, 2) * 0 + tokens, w)
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, expected)


@gpu
def test_x_of_any_layout():
    q = quantized("w4a16_g128", 128, 1000)
    w = FragmentWeight.pack(q)
    wide = torch.randn(5, 2003, device="cuda", dtype=torch.float16)
    for x in (wide[:, 1:1001], wide[:, ::2][:, :1000], torch.randn(1000, 5, device="cuda", dtype=torch.float16).T):
        assert torch.equal(fragment_gemm(x, w), fragment_gemm(x.contiguous(), w))
    assert fragment_gemm(x[:0], w).shape == (0, 128)


def test_rows_have_zeros_behind_them():
    """The kernels copy x in vectors of 8. If x is a view of a wider matrix, the values after each row must not be multiplied by
    the padding's codes, which decode to nonzero weights.
    """
    wide = torch.full((5, 1008), float("nan"), dtype=torch.float16)
    x = wide[:, :1003]
    x.copy_(torch.randn(5, 1003))
    rows = aligned_rows(x)
    assert torch.equal(rows, x) and rows.stride(1) == 1 and rows.stride(0) % 8 == 0
    whole = rows.as_strided((5, rows.stride(0)), rows.stride())
    assert not whole[:, 1003:].any() and aligned_rows(wide[:, :1000]).data_ptr() == wide.data_ptr()


@gpu
@pytest.mark.parametrize("m", [1, 16, 100])
def test_x_that_ends_within_a_vector(m):
    q = quantized("w4a16_g128", 128, 1003)
    w = FragmentWeight.pack(q)
    wide = torch.full((m, 1008), float("nan"), device="cuda", dtype=torch.float16)
    wide[:, :1003] = torch.randn(m, 1003, device="cuda")
    assert torch.equal(fragment_gemm(wide[:, :1003], w), fragment_gemm(wide[:, :1003].contiguous(), w))


def product(x, q, w):
    """y for a weight with act-order or pre_quant_scale: gathers x, then multiplies."""
    return fragment_gemm(gather_channels(x, q.input_transform.order, q.input_transform.pre_quant_scale), w)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("order", "pre_quant_scale"), [(True, None), (False, torch.float32), (True, torch.float16)])
@pytest.mark.parametrize("scheme", ["w4a16_g128", "w6e3m2a16", "w4a16_g32_z", "w4a16_z"])
@pytest.mark.parametrize("k", [200, 203, 576, 4096])
def test_order_and_pre_quant_scale(scheme, order, pre_quant_scale, dtype, k):
    q = with_channels(quantized(scheme, 344, k), order, pre_quant_scale)
    w = FragmentWeight.pack(q.without_input())
    picked = slice(None) if q.input_transform.order is None else q.input_transform.order.long()
    for m in (1, 16, 100):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        scaled = (
            x
            if q.input_transform.pre_quant_scale is None
            else (x.float() * q.input_transform.pre_quant_scale.float()).to(dtype)
        )
        plain = torch.nn.functional.linear(scaled[:, picked], q.dequantize_codes(dtype))
        reference = mixed_gemm_reference(x, q)
        torch.full((m, k + 8), float("nan"), dtype=dtype, device="cuda")  # poisons memory to be reused
        y = product(x, q, w)
        assert relative_error(y, reference) <= 1.5 * relative_error(plain, reference) + 1e-5
        assert torch.equal(y, product(x, q, w)), "same input, same bits"
        wide = torch.randn(m, k + 5, device="cuda", dtype=dtype)
        wide[:, 3 : 3 + k] = x
        for same in (wide[:, 3 : 3 + k], x.T.contiguous().T, x.view(m, 1, k)):
            assert torch.equal(product(same, q, w).view(m, -1), y)
    assert product(x[:0], q, w).shape == (0, 344)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("m", [8, 100])
def test_one_hot_activations_find_their_column_through_an_order(dtype, m):
    q = with_channels(quantized("w4a16_g128", 200, 704), pre_quant_scale=None)
    channels = torch.randperm(704, device="cuda")[:m]
    x = torch.nn.functional.one_hot(channels, 704).to(dtype)
    assert torch.equal(
        product(x, q, FragmentWeight.pack(q.without_input())), q.dequantize(torch.float32)[:, channels].T.to(dtype)
    )


@gpu
@pytest.mark.parametrize("m", [1, 16, 100, 256])
def test_order_in_graphs_behind_a_kernel_that_writes_x(m):
    """Gather and GEMM start before previous kernels have finished, and must wait for their outputs."""
    q = with_channels(quantized("w4a16_g128", 1024, 1024), pre_quant_scale=torch.float32)
    w = FragmentWeight.pack(q.without_input())
    x = torch.randn(m, 1024, device="cuda", dtype=torch.float16)
    expected = x
    for _ in range(8):
        expected = product(expected * 0.5, q, w)
        torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product(x, q, w)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = x
            for _ in range(8):
                y = product(y * 0.5, q, w)
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.isfinite(y).all() and torch.equal(y, expected)


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w4a16_g128_z", "w4a16_g32_fz", "w8a16_g128", "w6e3m2a16_g128", "w4a16_pc"])
def test_which_weights_may_have_subnormal_codes(scheme):
    """Only symmetric integers of 2 to 7 bits may have subnormal codes. Their channel scales are bf16 then, otherwise
    float32.
    """
    w = FragmentWeight.pack(quantized(scheme, 128, 256, device="cpu"))
    x, channel = torch.empty(4, 256, dtype=torch.float16, device="meta"), torch.ones(128, dtype=torch.bfloat16)
    codes, scale, channel = (None if t is None else t.to("meta") for t in (w.codes, w.scale, channel))

    def product(channel, subnormal):
        return torch.ops.lowbit.fragment_gemm(x, codes, scale, channel, None, scheme, 128, False, subnormal)

    assert product(channel.float(), False).shape == (4, 128)
    with pytest.raises(ValueError, match=r"takes float32 scales \[128\], got torch.bfloat16"):
        product(channel, False)
    if scheme == "w4a16_g128":
        assert w.subnormal and w.channel_scale.dtype == torch.bfloat16 and product(channel, True).shape == (4, 128)
        with pytest.raises(ValueError, match=r"takes bf16 scales \[128\] with subnormal codes, got torch.float32"):
            product(channel.float(), True)
    else:
        with pytest.raises(ValueError, match="subnormal codes are symmetric integers of 2 to 7 bits"):
            product(channel, True)


@gpu
def test_bad_input():
    q = quantized("w4a16_g128", 128, 1024)
    w = FragmentWeight.pack(q)
    x = torch.randn(4, 1024, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"x is fp16 or bf16 \[\.\., K\], got torch.float32"):
        fragment_gemm(x.float(), w)
    with pytest.raises(ValueError, match=r"with N 128 and K 1000 takes codes int32 \(8, 16, 128\)|another K"):
        fragment_gemm(x[:, :960], w)
    with pytest.raises(ValueError, match=r"bias is \[128\] or \[4, 128\], got \(5,\)"):
        fragment_gemm(x, w, torch.zeros(5, device="cuda"))
    with pytest.raises((ValueError, NotImplementedError), match="one device|CPU"):
        fragment_gemm(x.cpu(), w)


@gpu
def test_packing_on_the_gpu_is_fast():
    """Packing takes at most 40 times as long as a copy of the source codes on the same GPU, each as the best of five, since
    other processes may use the GPU. It takes several passes over them, some with 32-bit intermediates.
    """
    codes = torch.randint(0, 16, (28672, 8192), dtype=torch.uint8, device="cuda")
    scale = torch.ones(28672, 64, dtype=torch.float16, device="cuda")
    q, copy = QuantTensor(codes, scale, None, parse_scheme("w4a16_g128")), torch.empty_like(codes)

    def best_ms(call) -> float:
        call()
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    assert best_ms(lambda: FragmentWeight.pack(q)) < 40 * best_ms(lambda: copy.copy_(codes))
