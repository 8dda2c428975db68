"""Kernels in Triton's interpreter, which must be asked for before they are defined: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable


def interpreted(*checks: Callable[[], None]) -> None:
    """Calls functions of one test file where all kernels are interpreted."""
    (module,) = {check.__module__ for check in checks}
    calls = "; ".join(f"tests.{check.__name__}()" for check in checks)
    code = f"import {module} as tests; {calls}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
