"""Additions that the compiler must neither move nor fuse. Each sum takes one instruction and is rounded only there."""

from __future__ import annotations

import pytest

from tests.kernels.sass import compile_kernel

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.promote import add_here, add_scaled_here


@gluon.jit
def kernel(out, sums, scale, C: gl.constexpr):
    """out [32, 4] += sums [* scale [32]]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, layout))
    place = row[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    if C:
        total = add_scaled_here(gl.load(out + place), gl.load(sums + place), gl.load(scale + row)[:, None])
    else:
        total = add_here(gl.load(out + place), gl.load(sums + place))
    gl.store(out + place, total)


@pytest.mark.parametrize(("scaled", "instruction"), [(False, "FADD"), (True, "FFMA")])
@pytest.mark.parametrize("kind", ["fp32", "i32"])
def test_one_instruction_for_each_sum(scaled, instruction, kind):
    signature = {"out": "*fp32", "sums": "*" + kind, "scale": "*fp32"}
    code = compile_kernel(kernel, signature, scaled, tuple(signature), 1, 90)
    assert code.count(instruction) == 4 and code.count("FADD") + code.count("FFMA") + code.count("FMUL") == 4
    assert code.count("I2F") == (4 if kind == "i32" else 0)
