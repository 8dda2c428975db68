"""Weights of any magnitude: scales on disk, the CPU GEMM and the kernels' packed form keep the precision of their formats.

Magnitudes are powers of two from about 1e-8 to 1e6, equal for all rows or mixed. Powers of two keep the relative error of a
format that of magnitude 1.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from lowbit.formats import FloatFormat, QuantTensor, ZeroPoint, decode, parse_scheme, spread
from lowbit.kernels.reference.gemm import mixed_gemm_reference
from lowbit.nn import QuantLinear
from lowbit.ops import fragment_gemm
from lowbit.pack import FragmentWeight, OperandWeight, kernel_group, unpack_scales
from lowbit.quantize import gptq, hqq, lorc, rtn
from lowbit.quantize.rtn import scale_dtype

FORMATS = ["w2a16", "w4a16", "w8a16", "w4e2m1a16", "w5e2m2a16", "w6e3m2a16", "w6e2m3a16", "w8e4m3a16", "w8e5m2a16"]
KINDS = ["", "_t", "_g32", "_g128", "_b48x64"]
ZEROS = ["", "_z", "_fz"]
N, K = 96, 320


def schemes():
    for name in (f + k + z for f in FORMATS for k in KINDS for z in ZEROS):
        try:
            parse_scheme(name)
        except ValueError:  # float formats have no integer zeros
            continue
        yield name


SCHEMES = list(schemes())
SIZES = [2.0**-27, 2.0**-20, 2.0**-13, 2.0**-6, 1.0, 2.0**13, 2.0**20]
"""Magnitudes from about 1e-8 to 1e6."""
HALVES = [torch.float16, torch.bfloat16]
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def weights(size=1.0, mean=0.3):
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(0)) + mean) * size


def row_sizes(scheme):
    """A magnitude for each row, equal for rows that share a scale."""
    rows = parse_scheme(scheme).granularity.block((N, K))[0]
    sizes = torch.tensor(SIZES)[torch.randperm(-(-N // rows), generator=torch.Generator().manual_seed(1)) % len(SIZES)]
    return sizes.repeat_interleave(rows)[:N, None]


def worst_row(found, expected):
    """The largest relative error of any row."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@functools.cache
def at_size_one(scheme):
    w = weights()
    return worst_row(rtn(w, scheme).dequantize(torch.float64), w.double())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounding_loses_the_same_of_weights_of_any_size(scheme):
    for size in (*SIZES, row_sizes(scheme)):
        w = weights(size)
        assert worst_row(rtn(w, scheme).dequantize(torch.float64), w.double()) <= 1.1 * at_size_one(scheme)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["w4a16_g32_z", "w8a16_g32", "w4a16_g32_fz", "w6e3m2a16_g32"])
def test_other_algorithms_too(scheme, size):
    one, w = weights(), weights(size)
    bound = 1.2 * at_size_one(scheme)
    assert worst_row(rtn(w, scheme, search="mse").dequantize(torch.float64), w.double()) <= bound
    assert worst_row(gptq(w, torch.eye(K), scheme).dequantize(torch.float64), w.double()) <= bound
    if scheme.endswith("_fz"):
        assert worst_row(hqq(w, scheme).dequantize(torch.float64), w.double()) <= 2 * bound
    corrected = []
    for weight in (one, w):
        q = rtn(weight, scheme)
        corrected.append(worst_row((q.dequantize() + lorc(weight, q, 4).dense()).double(), weight.double()))
    assert corrected[1] <= 1.05 * corrected[0] < 1.05 * at_size_one(scheme)


def test_which_type_scales_have():
    def of(scheme, w):
        parsed = parse_scheme(scheme)
        assert rtn(w, scheme).scale.dtype == scale_dtype(parsed, w)
        return scale_dtype(parsed, w)

    ordinary = weights(0.02)
    assert of("w4a16_pc", ordinary * 1e-9) == torch.float32
    assert of("w4a16_g32", ordinary) == of("w8a16_g128_z", ordinary) == of("w4a16_g32_fz", ordinary) == torch.float16
    assert of("w8e4m3a16_g128", ordinary) == torch.bfloat16
    assert of("w4a16_g32", ordinary * 1e-4) == of("w4a16_g32", ordinary * 1e9) == torch.bfloat16
    with_dead_groups = ordinary.clone()
    with_dead_groups[3, 32:64] = 0
    assert of("w4a16_g32", with_dead_groups) == torch.float16, "zeros have a scale of 1"
    with_dead_groups[3, 33] = 1e-9
    assert of("w4a16_g32", with_dead_groups) == torch.bfloat16
    constant = torch.full((16, 64), 1e-7)
    assert of("w4a16_g32_fz", constant) == torch.bfloat16 and of("w4a16_g32_fz", constant + 0.1) == torch.float16
    assert of("w4a16_g32_fz", ordinary + 1e5) == torch.bfloat16, "zeros beyond fp16"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_product_on_a_cpu(scheme):
    """x is scaled so that results are in the middle of the dtype's range."""
    made = {size: rtn(weights(size), scheme) for size in SIZES}
    for (size, q), dtype in itertools.product(made.items(), [torch.float32, *HALVES]):
        x = (torch.randn(5, K, generator=torch.Generator().manual_seed(2)) * min(1 / size, 2.0**13)).to(dtype)
        y = QuantLinear.from_quant_tensor(q)(x)
        bound = EPS.get(dtype, 2.0**-20)
        absolute = x.double().abs() @ q.dequantize(torch.float64).abs().T
        smallest = 2.0**-24 if dtype == torch.float16 else 0.0
        assert bool(((y.double() - mixed_gemm_reference(x, q)).abs() <= 2 * bound * absolute + smallest).all()), dtype


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_az", "w4a8_g128", "fp8", "fp8_block", "w4a8e4m3_g128", "w6e3m2a8e4m3"])
def test_the_product_of_quantized_activations(scheme):
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(2))

    def error(size, times):
        w = weights(size)
        y = QuantLinear.from_quant_tensor(rtn(w, scheme))(x * times)
        assert torch.allclose(OperandWeight.pack(rtn(w, scheme)).sums, _row_sums(rtn(w, scheme)), rtol=1e-4)
        return worst_row(y.double(), (x * times).double() @ w.double().T)

    for size in SIZES:
        assert error(size, 1.0) <= 1.1 * error(1.0, 1.0) and error(1.0, size) <= 1.1 * error(1.0, 1.0)


def _row_sums(q: QuantTensor):
    per_row = q.scale.shape[1] == 1 and q.scale.shape[0] in (1, N)
    return (decode(q.codes, q.scheme.weight) if per_row else q.dequantize()).sum(1)


def multiplied(w: FragmentWeight, dtype: torch.dtype):
    """The float64 values of the weights that the large-M kernels multiply by (kernels/parts/dequantize.py). Scales and codes in
    x's 16-bit dtype are multiplied and rounded once, then multiplied by the float32 channel scale.
    """
    fmt, (n, k) = w.scheme.weight, w.shape
    bf16_only = isinstance(fmt, FloatFormat) and dtype == torch.bfloat16
    shift = 2.0 ** (15 - fmt.bias) if isinstance(fmt, FloatFormat) and not bf16_only else 1.0
    values = decode(w.unpack().codes, fmt, torch.float64) / shift
    assert torch.equal(values.to(dtype).double(), values), "halves of codes are exact"
    if w.scale is not None:
        group = kernel_group(w.scheme)
        parts = [unpack_scales(p.flatten(-2), n).repeat_interleave(group, 1)[:, :k] for p in w.scale.split(2, dim=-1)]
        if dtype == torch.float16:  # scales are converted to x's dtype; only bf16 uses fp16 scales unconverted
            parts = [p.half() for p in parts]
            parts[0] = (parts[0].double() * shift).half()
        scale, zero = parts[0].double(), parts[1].double() if len(parts) > 1 else 0.0
        if w.channel_scale is not None and w.channel_scale.dtype == torch.bfloat16 and dtype == torch.float16:
            assert bool((scale.abs() <= 65504).all()), "scales times 2^24"
            return (values * scale * 2.0**-24).half().double() * (w.channel_scale.double() * 2.0**24)[:, None]
        if w.scheme.zero is ZeroPoint.FLOAT:
            values = values * scale + zero
        else:
            values = (values - zero).to(dtype).double() * scale
        values = values.to(dtype).double()
    else:
        values = values * shift
    return values if w.channel_scale is None else values * w.channel_scale.double()[:, None]


def wide_scales(q: QuantTensor) -> QuantTensor:
    """The same weight with float32 scales and zeros, as GGUF and fp8 block formats have them."""
    zero = q.zero if q.zero is None or q.zero.dtype == torch.uint8 else q.zero.float()
    return QuantTensor(q.codes, q.scale.float(), zero, q.scheme)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_form_of_the_kernels(scheme, wide):
    """Each weight's error is at most one rounding of x's dtype (plus one of fp16 if 32-bit scales were rounded), relative to
    the weight or to a small part of the row's largest weight. Without a power of two per row, half of fp16's smallest number is
    added. With a floating-point zero, code * scale and the zero are rounded separately, and both can be larger than their sum.
    """
    for size in (*SIZES, row_sizes(scheme)):
        q = rtn(weights(size), scheme)
        q = wide_scales(q) if wide else q
        w = FragmentWeight.pack(q)
        expected = q.dequantize(torch.float64)
        most = expected.abs()
        if q.scheme.zero is ZeroPoint.FLOAT:
            most = most + 2 * spread(q.zero.double(), q.scheme.granularity, q.shape).abs()
        for dtype in HALVES:
            bound = (EPS[dtype] + 2.0**-11) * most + 2.0**-23 * most.amax(dim=1, keepdim=True)
            bound += 2.0**-25 if w.channel_scale is None else 0.0
            assert bool(((multiplied(w, dtype) - expected).abs() <= bound).all()), dtype


@pytest.mark.parametrize("scheme", ["w8a16_g128", "w4a16_g32_z", "w6e3m2a16_g64", "w4a16_g32_fz", "w8e4m3a16_b48x64"])
def test_scales_of_ordinary_weights_stay_as_they_are(scheme):
    w = FragmentWeight.pack(rtn(weights(1.0 if "e4m3" in scheme else 0.05), scheme))
    assert w.channel_scale is None and w.scale.dtype == scale_dtype(parse_scheme(scheme))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("m", [1, 16, 300])
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if "_t" not in s and "_b48x64" not in s])
def test_the_kernels(scheme, m, dtype):
    """Rows of very different magnitudes; x is scaled so that their results are in the dtype's range."""
    for size in SIZES:
        q = rtn(weights(size).cuda(), scheme)
        x = (torch.randn(m, K, device="cuda") * min(1 / size, 2.0**13)).to(dtype)
        y = fragment_gemm(x, FragmentWeight.pack(q))
        most = q.dequantize(torch.float64).abs()
        if q.scheme.zero is ZeroPoint.FLOAT:
            most = most + 2 * spread(q.zero.double(), q.scheme.granularity, q.shape).abs()
        bound = 2 * (EPS[dtype] + 2.0**-11) * (x.double().abs() @ most.T)
        smallest = 2.0**-24 if dtype == torch.float16 else 0.0
        assert bool(((y.double() - mixed_gemm_reference(x, q)).abs() <= bound + smallest).all())
