"""Weights in every form, concatenated and split by rows."""

from __future__ import annotations

import pytest
import torch

from lowbit.ops.cpu_gemm import pack_for_cpu
from lowbit.pack import DenseWeight, FragmentWeight, OperandWeight
from lowbit.pack.cpu import block_rows
from lowbit.pack.gemm_weight import RowWeight
from lowbit.quantize import rtn

FRAGMENTS = ["w4a16_g128", "w4a16_g32_z", "w4a16_g64_fz", "w8a16", "w6e3m2a16", "w4a16_z"]
OPERANDS = ["w8a8", "w8e4m3a8e4m3", "w4a8_g128", "fp8_block", "w6e3m2a8e4m3"]
CASES = [
    *((FragmentWeight, scheme, 32) for scheme in FRAGMENTS),
    *((OperandWeight, scheme, 128) for scheme in OPERANDS),
    *((RowWeight, scheme, 128) for scheme in ("w4a16_g64_z", "w8a16", "fp8_block", "w3a16_g32")),
    ("int8", "w8a8_az", 48),
    ("decoded", "w4a16_g64", 48),
]


def quantized(scheme, n, k=256, seed=0):
    return rtn(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16(), scheme)


def pack(kind, q):
    return pack_for_cpu(q, kind, torch.bfloat16) if isinstance(kind, str) else kind.pack(q)


def tensors_equal(one, other):
    return one.tensors().keys() == other.tensors().keys() and all(
        torch.equal(t.view(torch.uint8), other.tensors()[name].view(torch.uint8)) for name, t in one.tensors().items()
    )


@pytest.mark.parametrize(("kind", "scheme", "n"), CASES, ids=str)
def test_concat_and_split_are_inverses(kind, scheme, n):
    """Splitting a concatenation returns the original bits. If N is the first dimension, the parts are views."""
    parts = [pack(kind, quantized(scheme, rows, seed=i)) for i, rows in enumerate((n, 2 * n, 24))]
    whole = type(parts[0]).concat(parts)
    assert whole.shape == (3 * n + 24, 256) and whole.scheme == parts[0].scheme
    split = whole.split([part.shape[0] for part in parts])
    assert all(tensors_equal(one, other) and one.shape == other.shape for one, other in zip(split, parts, strict=True))
    assert split[1].codes.untyped_storage().data_ptr() == whole.codes.untyped_storage().data_ptr()
    if kind != "decoded":
        assert torch.equal(whole.unpack_codes(), torch.cat([part.unpack_codes() for part in parts]))
    assert whole.nbytes == sum(part.nbytes for part in parts) and tensors_equal(whole.clone(), whole)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no int4 product of torch")
def test_blocks_of_torchs_int4_product():
    n = block_rows()
    first, last = (quantized("w4a16_g64", rows, seed=rows) for rows in (n, 16))
    parts = [pack("int4", first), pack("int4", last)]
    whole = type(parts[0]).concat(parts)
    q = type(first)(torch.cat([first.codes, last.codes]), torch.cat([first.scale, last.scale]), None, first.scheme)
    assert tensors_equal(whole, pack("int4", q)), "the form of all rows at once"
    assert all(map(tensors_equal, whole.split([n, 16]), parts))
    with pytest.raises(ValueError, match=f"N of all but the last is a multiple of {n}, got 16"):
        type(whole).concat(parts[::-1])


def test_one_scale_per_tensor_becomes_one_per_channel():
    parts = [FragmentWeight.pack(quantized("w8a16_t", 16, seed=i)) for i in range(2)]
    whole = FragmentWeight.concat(parts)
    assert whole.scheme.name == "w8a16"
    assert torch.equal(whole.unpack().dequantize(), torch.cat([part.unpack().dequantize() for part in parts]))
    with pytest.raises(ValueError, match="one scale for the whole tensor"):
        RowWeight.concat([RowWeight.pack(quantized("w8a16_t", 16))] * 2)


def test_what_cannot_be_concatenated():
    w = FragmentWeight.pack(quantized("w4a16_g64", 16))
    for other, reason in (
        (FragmentWeight.pack(quantized("w4a16_g128", 16)), "one scheme, got w4a16_g64 and w4a16_g128"),
        (FragmentWeight.pack(quantized("w4a16_g64", 16, 128)), "one K, got 256 and 128"),
    ):
        with pytest.raises(ValueError, match=reason):
            FragmentWeight.concat([w, other])
    wide = quantized("w4a16_g64", 16)
    wide.scale[3, 1] = wide.scale[3].amax() * 2.0**-9  # too small relative to the row's largest scale for subnormal codes
    assert w.subnormal and not FragmentWeight.pack(wide).subnormal
    with pytest.raises(ValueError, match="one subnormal, got True and False"):
        FragmentWeight.concat([w, FragmentWeight.pack(wide)])
    with pytest.raises(ValueError, match="multiple of 16, got 8"):
        FragmentWeight.concat([FragmentWeight.pack(quantized("w4a16_g64", 8)), w])
    with pytest.raises(ValueError, match=r"add up to 16, all but the last in multiples of 16, got \[8, 8\]"):
        w.split([8, 8])


def test_dense():
    values = torch.randn(40, 64).half()
    w = DenseWeight.pack(values)
    one, other = w.split([24, 16])
    assert w.unpack() is values and one.values.data_ptr() == values.data_ptr() and other.shape == (16, 64)
    assert torch.equal(DenseWeight.concat([one, other]).values, values) and w.nbytes == 40 * 64 * 2
    with pytest.raises(ValueError, match=r"one type, got torch.float16 and torch.bfloat16"):
        DenseWeight.concat([one, DenseWeight(other.values.bfloat16())])
