"""A weight in TensorRT-LLM's lines as a form: its bytes are those of the layout, its scales those of fragments."""

from __future__ import annotations

import pytest
import torch

from lowbit.ops import UnsupportedProblem, gemm, pack_for
from lowbit.pack import ColumnMajorTileInterleave, FragmentWeight, InterleavedWeight, interleaved_refusals
from lowbit.quantize import rtn

SCHEMES = ["w4a16_g128", "w4a16_pc", "w8a16", "w8a16_g64", "w4a16_g64_z", "w4a16_g32_fz", "w4a16_t"]


def quantized(scheme, n=48, k=192):
    return rtn(torch.randn(n, k, generator=torch.Generator().manual_seed(n)), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_and_back(scheme):
    q = quantized(scheme)
    w, other = InterleavedWeight.pack(q), FragmentWeight.pack(q)
    bits = q.scheme.weight.bits
    (plane,) = ColumnMajorTileInterleave().pack(q.codes, bits)
    assert w.codes.dtype == torch.int32 and torch.equal(w.codes.view(torch.uint8), plane)
    assert w.codes.shape == (48 * bits // 16, 192 // 2)
    for name in ("scale", "channel_scale"):
        mine, theirs = getattr(w, name), getattr(other, name)
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))
    back, expected = w.unpack(), other.unpack()
    assert torch.equal(back.codes, q.codes) and torch.equal(back.scale, expected.scale)
    assert torch.equal(back.dequantize(), expected.dequantize())
    assert w.nbytes == sum(t.nbytes for t in w._tensors.values()) and torch.equal(w.clone().codes, w.codes)


def test_bytes_of_a_file_are_taken_as_they_are():
    q = quantized("w4a16_g64")
    (plane,) = ColumnMajorTileInterleave().pack(q.codes, 4)
    w = InterleavedWeight.pack(q, plane)
    assert w.codes.data_ptr() == plane.data_ptr()


@pytest.mark.parametrize(
    ("scheme", "n", "k", "reason"),
    [
        ("w6e3m2a16", 48, 192, "hold integers of 4 and 8 bits, not fp6_e3m2"),
        ("w6a16", 48, 192, "hold integers of 4 and 8 bits, not int6"),
        ("w4a16_g64", 40, 192, "16 channels of TensorRT-LLM's lines at a time, N 40"),
        ("w8a16", 48, 200, "K must be a multiple of 64"),
    ],
)
def test_what_the_lines_do_not_hold(scheme, n, k, reason):
    q = quantized(scheme, n, k)
    assert any(reason in why for why in interleaved_refusals(q.scheme, (n, k)))
    with pytest.raises(ValueError, match=reason):
        InterleavedWeight.pack(q)


def test_a_cpu_has_no_kernel_for_it():
    q = quantized("w4a16_g64")
    with pytest.raises(UnsupportedProblem, match="interleaved_gemm: runs on NVIDIA GPUs, x is on a CPU"):
        pack_for(q, form="interleaved")
    with pytest.raises(UnsupportedProblem, match="interleaved_gemm: runs on NVIDIA GPUs, x is on a CPU"):
        gemm(torch.ones(2, 192, dtype=torch.float16), InterleavedWeight.pack(q))
