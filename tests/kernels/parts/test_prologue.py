"""The machine instructions of programmatic dependent launch."""

from __future__ import annotations

import pytest

from tests.kernels.sass import compile_kernel

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.prologue import launch_next_and_wait_for_previous, launch_next_kernel, wait_for_previous_kernel


@gluon.jit
def kernel(out, C: gl.constexpr):
    """Stores one number after the wait for the previous kernel."""
    if C:
        launch_next_and_wait_for_previous()
    else:
        launch_next_kernel()
        wait_for_previous_kernel()
    gl.store(out, 7)


@pytest.mark.parametrize("at_once", [False, True])
def test_nothing_is_written_before_the_kernel_ahead_is_through(at_once):
    lines = compile_kernel(kernel, {"out": "*i32"}, at_once, ("out",), 1, 90).lines
    start, wait, store = (next(i for i, line in enumerate(lines) if name in line) for name in ("PREEXIT", "ACQBULK", "STG"))
    assert start < wait < store
