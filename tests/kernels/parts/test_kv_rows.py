"""Rows of packed keys and values in Triton's interpreter: scales, codes and bytes equal those of formats/kv.py and
pack/kv_pages.py to the last bit, special rows included."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.kv import KV16, parse_kv
from lowbit.pack.kv_pages import KVPages
from tests.kernels.interpreter import interpreted

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton
import triton.language as tl

from lowbit.kernels.parts.kv_rows import KVRows, load_rows, store_rows

ROWS = 16


@triton.jit
def store_and_load(k, v, k_scale, v_scale, x, out, place, LANES: tl.constexpr, C: tl.constexpr):
    """Stores 16 rows as keys and as values of token `place` of 16 heads of page 1, and loads both again."""
    row, d = tl.arange(0, 16), tl.arange(0, LANES)
    mask = (row[:, None] < 15) & (d < C.head_dim)[None, :]
    given = tl.load(x + row[:, None] * C.head_dim + d[None, :], mask=mask, other=0.0)
    start, exist = 16 + row.to(tl.int64), row < 15
    places = place + row * 0
    store_rows(k, k_scale, given, start, place, exist, C.k, C.k_rotated, False, C)
    store_rows(v, v_scale, given, start, place, exist, C.v, C.v_rotated, True, C)
    at = out + row[:, None] * C.head_dim + d[None, :]
    tl.store(at, load_rows(k, k_scale, start, places, exist, LANES, C.k, C.k_rotated, False, C), mask=mask)
    values = load_rows(v, v_scale, start, places, exist, LANES, C.v, C.v_rotated, True, C)
    tl.store(at + 16 * C.head_dim, values, mask=mask)


def check(kv, head_dim, place):
    generator = torch.Generator().manual_seed(place)
    x = torch.randn(ROWS, head_dim, generator=generator) * torch.logspace(-6, 6, ROWS)[:, None]
    x[3], x[4, 5], x[5, 1], x[6] = 0, torch.inf, torch.nan, x[6] * 1e9
    x[7] = torch.randint(-3, 4, (head_dim,), generator=generator) * 0.5  # has ties
    found, expected = (KVPages.make(parse_kv(kv), 2, ROWS, head_dim, torch.float32, "cpu") for _ in range(2))
    for pages in (found, expected):
        for t in pages.tensors:
            t.fill_(1)
    out = torch.zeros(2, ROWS, head_dim)
    lanes = 1 << (head_dim - 1).bit_length()
    store_and_load[(1,)](*found.tensors, x, out, place, lanes, KVRows.of(parse_kv(kv), head_dim))
    where = torch.tensor([1]), torch.tensor([place])
    expected.write(*where, x[None], x[None])
    rows = expected.read(*where, torch.float32)
    for t in range(2):
        fmt = (expected.scheme.k, expected.scheme.v)[t]
        scales, of_scales = found.tensors[2 + t], expected.tensors[2 + t]
        assert torch.equal(scales[1, :15].nan_to_num(-1), of_scales[1, :15].nan_to_num(-1)), (kv, fmt)
        finite = [i for i in range(15) if i not in (4, 5)]  # rows 4 and 5 have NaN, so their codes may have any value
        assert torch.equal(found.tensors[t][1, finite], expected.tensors[t][1, finite]), (kv, fmt)
        assert torch.equal(out[t, :15].nan_to_num(-1), rows[t][0, :15].nan_to_num(-1)), (kv, fmt)
        for tensor in (found.tensors[t], scales):
            assert (tensor[0] == 1).all() and (tensor[1, 15] == 1).all(), "wrote where nothing was to be written"


def check_all():
    for i, kv in enumerate(("fp8", "int8", "int4", "k8v4", "kint4-plainvint8-rotated", "fp8-rotated")):
        for head_dim in (64, 80, 96, 128)[i % 2 :: 2]:
            check(kv, head_dim, (5 + 37 * i) % 128)
    check("int4", 256, 127)


def test_rows_in_tritons_interpreter():
    interpreted(check_all)


def test_sixteen_bits_have_no_rows():
    assert KVRows.of(KV16, 64) is None
