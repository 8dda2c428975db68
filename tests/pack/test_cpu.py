"""Packed forms for torch's CPU GEMMs: codes unpack bit for bit, and unsupported weights are refused with reasons."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.pack.cpu import (
    VECTOR_CPUS,
    int4_group,
    int4_refusals,
    int8_refusals,
    pack_int4,
    pack_int8,
    row_blocks,
)
from lowbit.quantize import rtn

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in VECTOR_CPUS, reason="torch's int4 and int8 products need AVX2 or AVX-512"
)

INT4 = ["w4a16_g32", "w4a16_g128", "w4a16_pc", "w3a16_g64", "w2a16_g32", "w4a16_g96_z", "w3a16_g64_fz", "w2a16_z", "w4a16_t"]
INT8 = ["w8a16", "w7a16", "w6a16", "w5a16_t", "w8a8", "w8a8_az"]
SHAPES = [(16, 32), (80, 96), (64, 64), (208, 576), (304, 384)]


def quantized(name, n, k):
    return rtn(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)), name)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("name", INT4)
def test_int4_codes_come_back(name, n, k):
    q = quantized(name, n, k)
    w = pack_int4(q)
    assert torch.equal(w.unpack_codes(), q.codes)
    assert w.codes.nbytes == n * k // 2 and w.scale.shape == (k // w.group, n, 2)


def test_pieces_lie_as_the_whole(monkeypatch):
    q = quantized("w4a16_g32", 304, 384)
    whole = pack_int4(q)
    monkeypatch.setattr("lowbit.pack.cpu.WEIGHTS_AT_ONCE", 384 * 70)
    assert torch.equal(pack_int4(q).codes, whole.codes) and torch.equal(whole.unpack_codes(), q.codes)


@pytest.mark.parametrize("name", ["w4a16_g32", "w4a16_g32_z", "w2a16_g32_z"])
def test_every_int4_code_in_every_place(name):
    q = quantized(name, 112, 64)
    for step in range(16):
        codes = (torch.arange(112 * 64).view(112, 64) * 7 + step) % (1 << q.scheme.weight.bits)
        moved = type(q)(codes.to(torch.uint8), q.scale, q.zero, q.scheme)
        assert torch.equal(pack_int4(moved).unpack_codes(), moved.codes)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("name", INT8)
def test_int8_codes_come_back(name, n, k):
    q = quantized(name, n, k)
    w = pack_int8(q)
    assert torch.equal(w.unpack_codes(), q.codes)
    assert torch.equal(w.codes.float() * w.scale.float()[:, None], q.dequantize()) or w.scale.dtype == torch.bfloat16


def test_groups_are_divided_into_torchs():
    for name, k, group in (
        ("w4a16_g128", 576, 64), ("w4a16_g128", 1024, 128), ("w4a16_g96", 576, 32), ("w4a16_pc", 1536, 256),
        ("w4a16_pc", 200, 0), ("w4a16_g40", 640, 0), ("w4a16_g16", 64, 0), ("w4a16_b24x32", 64, 32),
    ):  # fmt: skip
        assert int4_group(parse_scheme(name), (48, k)) == group, name


def test_what_torch_cannot_take_is_refused_with_every_reason():
    scheme = parse_scheme("w6e3m2a16")
    assert int4_refusals(scheme, (50, 72)) == (
        "takes integers of 2 to 4 bits, not fp6_e3m2",
        "takes groups that are multiples of 32 and divide K, not w6e3m2a16 with K 72",
        "takes N of multiples of 16, N is 50",
    )
    assert int8_refusals(parse_scheme("w8a16_g64"), (50, 72)) == (
        "takes integers of 5 to 8 bits with one scale per channel or tensor, not w8a16_g64",
        "reads beyond its operands unless K is a multiple of 16, K is 72",
    )
    with pytest.raises(ValueError, match="torch's int4 product takes integers of 2 to 4 bits, not int8"):
        pack_int4(quantized("w8a16", 16, 64))
    with pytest.raises(ValueError, match="torch's int8 product takes integers of 5 to 8 bits"):
        pack_int8(quantized("w4a16_pc", 16, 64))


def test_other_cpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    reason = "is fast with AVX2 or AVX-512 only, torch reports DEFAULT here"
    assert int4_refusals(parse_scheme("w4a16_g64"), (64, 64)) == int8_refusals(parse_scheme("w8a16"), (64, 64)) == (reason,)


def test_an_order_that_is_not_known_is_an_error(monkeypatch):
    from lowbit.pack import cpu

    torchs = cpu._pack_with_torch
    q = quantized("w4a16_g32", 64, 64)
    cpu.block_rows(), cpu._column_order(cpu.block_rows()), cpu._column_order(64)
    monkeypatch.setattr(cpu, "_pack_with_torch", lambda codes: torchs(codes).flip(0))
    with pytest.raises(ValueError, match="orders the weights of its int4 product in an unknown way"):
        pack_int4(q)


def test_pieces_of_rows_cover_the_matrix():
    for n in (16, 48, 64, 80, 640):
        for blocks in (1, 3, 100):
            ranges = row_blocks(n, blocks)
            assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])] and ranges[-1][1] == n
