"""Measurements in a process of their own return, fail or are ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.bounded import in_process


def doubled(number, say):
    say("half done")
    return 2 * number


def failing(say):
    raise ValueError("no such mode")


def dying(say):
    os._exit(3)


def endless(path, say):
    if os.fork() == 0:  # a compiler that the measurement starts
        time.sleep(600)
    path.write_text(str(os.getpid()))
    time.sleep(600)


def test_values_and_lines_come_back():
    lines = []
    assert in_process(doubled, (21,), 60, "a rival", lines.append) == 42
    assert any(line.startswith("a rival") and line.endswith("half done") for line in lines)


@pytest.mark.parametrize(("measure", "why"), [(failing, "ValueError: no such mode"), (dying, "a rival ended with status 3")])
def test_failures_are_named(measure, why):
    with pytest.raises(RuntimeError, match=why):
        in_process(measure, (), 60, "a rival", lambda line: None)


def test_what_does_not_end_is_ended(tmp_path):
    """The whole process group is ended, and the elapsed time was reported before."""
    path, lines = tmp_path / "pid", []
    with pytest.raises(TimeoutError, match="a rival did not end within 20 s"):
        in_process(endless, (path,), 20, "a rival", lines.append, heartbeat_s=1.0)
    assert len(lines) >= 5 and all(line.startswith("a rival: ") for line in lines)
    group, end = path.read_text(), time.monotonic() + 60
    while living(group):  # a busy machine ends killed processes late
        assert time.monotonic() < end
        time.sleep(0.05)


def living(group):
    """Processes of a group that have not ended."""
    return [f for f in map(fields, Path("/proc").glob("[0-9]*/stat")) if f[2:3] == [group] and f[0] not in "ZX"]


def fields(stat):
    """State, parent and process group of a process; nothing if it has ended."""
    try:
        return stat.read_text().rpartition(") ")[2].split()[:3]
    except OSError:
        return ["X"]
