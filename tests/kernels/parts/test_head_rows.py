"""Heads in registers. The PTX is executed; rotation, scale and codes equal those of formats/kv.py to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lowbit.formats.kv import head_block, parse_kv, quantize_rows, rotate_heads
from tests.kernels.ptx import execute
from tests.kernels.sass import compile_kernel

pytest.importorskip("triton", reason="the parts are written in Gluon")

from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.head_rows import (
    code_values,
    element_index,
    elements_of,
    rotated,
    row_codes,
    row_max,
    row_scale,
    rows_layout,
)


@dataclass(frozen=True)
class Rows:
    """The configuration that the parts read."""

    head_dim: int
    fmt: str
    largest: float
    turns: bool

    @property
    def elements(self):
        return elements_of(self.head_dim)

    @property
    def rows_layout(self):
        return rows_layout(self.head_dim)

    @property
    def rotation_steps(self):
        return head_block(self.head_dim).bit_length() - 1

    @property
    def rotation_factor(self):
        return head_block(self.head_dim) ** -0.5


@gluon.jit
def quantize(x, turned, codes, scale, values, most, C: gl.constexpr):
    """Quantizes 8 rows."""
    LAYOUT: gl.constexpr = C.rows_layout
    FMT: gl.constexpr = C.fmt
    row = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)) // 16
    d = element_index(C)
    mask = d < C.head_dim
    at = row[:, None] * C.head_dim + d
    given = gl.load(x + at, mask=mask, other=0.0)
    if C.turns:
        given = rotated(given, C)
    gl.store(turned + at, given, mask=mask)
    of_row = row_scale(given, C.largest)
    made = row_codes(given, of_row, FMT)
    gl.store(codes + at, made.to(gl.uint8), mask=mask)
    gl.store(values + at, code_values(made, FMT), mask=mask)
    gl.store(scale + row, of_row)
    gl.store(most + row, row_max(given))


@pytest.mark.parametrize(("kv", "head_dim"), [("int4", 128), ("int8", 96), ("fp8", 64), ("fp8-rotated", 256), ("int4", 32)])
def test_rows_by_executed_ptx(kv, head_dim):
    fmt = parse_kv(kv).k
    pointers = {"x": "*fp32", "turned": "*fp32", "codes": "*u8", "scale": "*fp16", "values": "*fp32", "most": "*fp32"}
    config = Rows(head_dim, fmt.name, fmt.largest, fmt.rotated)
    kernel = compile_kernel(quantize, pointers, config, [*pointers], 4, 90)
    assert kernel.count("BAR") == 0 and kernel.count("SHFL") > 0
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, head_dim, generator=generator) * torch.logspace(-5, 5, 8)[:, None]
    x[2], x[3, 9], x[4, 1], x[5] = 0, torch.inf, torch.nan, x[5] * 1e9
    turned, values, most = (torch.full(size, torch.nan) for size in ((8, head_dim), (8, head_dim), (8,)))
    codes, scale = torch.zeros(8, head_dim, dtype=torch.uint8), torch.zeros(8, dtype=torch.float16)
    execute(kernel.ptx, kernel.shared_bytes, [x, turned, codes, scale, values, most], (1, 1, 1), 128)
    expected = rotate_heads(x, head_block(head_dim)) if fmt.rotated else x
    assert torch.equal(turned.nan_to_num(7), expected.nan_to_num(7))
    of_codes, of_scale = quantize_rows(x, fmt)
    finite = [0, 1, 2, 5, 6, 7]
    assert torch.equal(scale.nan_to_num(-1), of_scale.nan_to_num(-1)) and scale[3:5].isnan().all()
    assert torch.equal(codes[finite], of_codes[finite])
    plain = of_codes.view(torch.float8_e4m3fn).float() if fmt.name == "fp8" else of_codes.float() - fmt.offset
    assert torch.equal(values[finite], plain[finite]) and torch.equal(most[finite], expected[finite].amax(1))
