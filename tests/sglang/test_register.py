"""The entry point with an unsupported version of SGLang."""

from __future__ import annotations

import sys
import types

from lowbit.sglang import register


def test_another_sglang_is_left_alone(monkeypatch):
    """The entry point does nothing. An error would write a traceback into every process's log, even when serving other
    checkpoints.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    register()
