"""Kernels in Triton's interpreter, which must be asked for before they are defined: in a process of their own."""

from __future__ import annotations

from collections.abc import Callable

from tests.forks import forked


def interpreted(*checks: Callable[[], None]) -> None:
    """Calls functions of one test file where all kernels are interpreted."""
    (module,) = {check.__module__ for check in checks}
    calls = "; ".join(f"tests.{check.__name__}()" for check in checks)
    imported = ("torch", "triton.experimental.gluon", "lowbit.ops", "tests.kernels.sass")
    forked(f"import {module} as tests; {calls}", imported=imported, TRITON_INTERPRET="1")
