"""Formats of keys and values: names, rotations, codes against a search over all codes, special rows."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.kv import (
    KV16,
    KVFormat,
    KVScheme,
    dequantize_rows,
    head_block,
    parse_kv,
    quantize_rows,
    rotate_heads,
)

FORMATS = [parse_kv(name).k for name in ("fp8", "int8", "int4", "int4-plain", "fp8-rotated", "int8-rotated")]


@pytest.mark.parametrize(
    ("text", "k", "v"),
    [
        ("16", KVFormat("16", 16), KVFormat("16", 16)),
        ("fp8", KVFormat("fp8", 8), KVFormat("fp8", 8)),
        ("int4", KVFormat("int4", 4, True), KVFormat("int4", 4, True)),
        ("int4-plain", KVFormat("int4", 4), KVFormat("int4", 4)),
        ("k8v4", KVFormat("int8", 8), KVFormat("int4", 4, True)),
        ("kfp8vint4", KVFormat("fp8", 8), KVFormat("int4", 4, True)),
        ("kint8-rotatedvfp8", KVFormat("int8", 8, True), KVFormat("fp8", 8)),
    ],
)
def test_names(text, k, v):
    scheme = parse_kv(text)
    assert (scheme.k, scheme.v) == (k, v) and parse_kv(str(scheme)) == scheme
    assert scheme.quantized == (text != "16")


@pytest.mark.parametrize("text", ["", "8", "int5", "k16v4", "kfp8", "vint4", "fp16", "int4-turned", "16-plain", "k8v4v8"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r"formats of keys and values are 16 .*got"):
        parse_kv(text)


def test_formats_that_do_not_exist():
    with pytest.raises(ValueError, match=r"got 'int4', 8 bits"):
        KVFormat("int4", 8)
    with pytest.raises(ValueError, match="both quantized or both in 16 bits"):
        KVScheme(KV16.k, KVFormat("fp8", 8))
    with pytest.raises(ValueError, match="have no codes"):
        quantize_rows(torch.zeros(1, 16), KV16.k)


@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (80, 16), (96, 32), (128, 128), (256, 256)])
def test_a_rotation_is_a_hadamard_matrix_and_its_own_inverse(head_dim, block):
    assert head_block(head_dim) == block
    x = torch.randn(3, head_dim, dtype=torch.float64)
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < block:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    expected = (x.unflatten(-1, (-1, block)) @ (h / block**0.5)).flatten(-2)
    torch.testing.assert_close(rotate_heads(x, block), expected)
    torch.testing.assert_close(rotate_heads(rotate_heads(x, block), block), x)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_codes_are_the_nearest(fmt):
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    codes, scale = quantize_rows(x, fmt)
    wide = rotate_heads(x, 32) if fmt.rotated else x
    ideal = wide.abs().amax(-1) / fmt.largest
    torch.testing.assert_close(scale.float(), ideal, rtol=2**-10, atol=2**-24)
    every = torch.arange(16 if fmt.bits == 4 else 256, dtype=torch.uint8)
    every = every[
        dequantize_rows(every[:, None], torch.ones(256).half()[: len(every)], plain(fmt), torch.float32)[:, 0].isfinite()
    ]
    if fmt.name == "int8":
        every = every[1:]  # int8 does not use the lowest code
    values = dequantize_rows(every[:, None], torch.ones(len(every)).half(), plain(fmt), torch.float64)[:, 0]
    nearest = (wide.double()[..., None] - values * scale.double()[:, None, None]).abs().amin(-1)
    found = dequantize_rows(codes, scale, plain(fmt), torch.float64)
    torch.testing.assert_close((found - wide.double()).abs(), nearest, rtol=1e-3, atol=1e-9)
    back = dequantize_rows(codes, scale, fmt, torch.float32)
    assert back.dtype == torch.float32
    assert ((back - x).norm(dim=1) < {"fp8": 0.05, "int8": 0.02, "int4": 0.2}[fmt.name] * x.norm(dim=1)).all()


def plain(fmt):
    """The format without its rotation."""
    return KVFormat(fmt.name, fmt.bits)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_special_rows(fmt):
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    rows[1], rows[2, 5], rows[3, 7], rows[4] = 0, torch.inf, torch.nan, rows[4] * 1e9
    codes, scale = quantize_rows(rows, fmt)
    back = dequantize_rows(codes, scale, fmt, torch.float32)
    assert (back[1] == 0).all() and back[2:4].isnan().all() and scale[2:4].isnan().all()
    assert back[4].isfinite().all() and scale[4] == 65504, "rows saturate"
    alone, of_alone = quantize_rows(rows[[0, 5]], fmt)
    assert torch.equal(codes[[0, 5]], alone) and torch.equal(scale[[0, 5]], of_alone)


def test_an_outlier_costs_less_with_a_rotation():
    x = torch.randn(100, 128, generator=torch.Generator().manual_seed(0))
    x[:, 3] *= 30
    errors = [
        (dequantize_rows(*quantize_rows(x, fmt), fmt, torch.float32) - x).norm()
        for fmt in (KVFormat("int4", 4), KVFormat("int4", 4, True))
    ]
    assert errors[1] < 0.5 * errors[0]
