"""Roles of warpgroups. Tests the PTX that moves registers between warpgroups, and the PTX that reads a thread's own number and
warpgroup."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.warp_roles import LOADER_REGISTERS, OWN_THREAD, OWN_WARPGROUP, registers_of
from tests.kernels.parts.plain import check_operands


@pytest.mark.parametrize(("count", "direction"), [(24, "dec"), (128, "dec"), (136, "inc"), (232, "inc")])
def test_registers_move_in_the_right_direction(count, direction):
    text = registers_of.fn(count)
    assert f"setmaxnreg.{direction}.sync.aligned.u32 {count};" in text and count % 8 == 0
    check_operands(text, "=r")


def test_a_loader_gives_up_what_math_warps_get():
    """Four warpgroups start with 128 registers a thread. The loader gives registers up, and the three others receive them, in
    steps of 8."""
    assert LOADER_REGISTERS.value % 8 == 0 and 24 <= LOADER_REGISTERS.value < 128
    assert 128 + (128 - LOADER_REGISTERS.value) // 3 // 8 * 8 <= 255


def test_own_thread_and_warpgroup():
    for text in (OWN_THREAD.value, OWN_WARPGROUP.value):
        check_operands(text, "=r")
        assert "%tid.x" in text
    assert "shr.u32 t, t, 7;" in OWN_WARPGROUP.value, "128 threads each"
