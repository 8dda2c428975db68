"""Programmatic dependent launch, as the instructions that it becomes."""

from __future__ import annotations

import pytest

from tests.kernels.sass import compile_kernel

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.prologue import await_previous, start_next


@gluon.jit
def kernel(out, C: gl.constexpr):
    """Stores one number, once it may."""
    start_next()
    await_previous()
    gl.store(out, C)


def test_nothing_is_written_before_the_kernel_ahead_is_through():
    lines = [line.split()[-1] if "PREEXIT" in line else line for line in compile_kernel(
        kernel, {"out": "*i32"}, 7, ("out",), 1, 90, launch_pdl=True).lines]  # fmt: skip
    start, wait = (next(i for i, line in enumerate(lines) if name in line) for name in ("PREEXIT", "ACQBULK"))
    store = next(i for i, line in enumerate(lines) if "STG" in line)
    assert start < wait < store
