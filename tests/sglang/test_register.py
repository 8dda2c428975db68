"""The entry point beside an SGLang of another version."""

from __future__ import annotations

import sys
import types

from lowbit.sglang import register


def test_another_sglang_is_left_alone(monkeypatch):
    """It would write a traceback into the log of each process of whoever serves other checkpoints."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    register()
