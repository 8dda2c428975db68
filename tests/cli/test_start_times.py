"""Seconds by phase of a start."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lowbit.cli import start_times
from lowbit.cli.start_times import StartTimes, process_age_s


def test_phases_add_up(monkeypatch):
    now = iter([2.0, 3.5, 4.0, 4.25, 6.0])
    monkeypatch.setattr(start_times, "process_age_s", lambda: next(now))
    times = StartTimes()
    for phase in ("imports", "load", "compile", "capture", "compile"):
        times.end(phase)
    assert times.seconds == {"imports": 2.0, "load": 1.5, "compile": 2.25, "capture": 0.25}
    assert str(times) == "started in 6.0 s: imports 2.0, load 1.5, compile 2.2, capture 0.2"


def test_a_process_counts_from_its_start():
    """A process that sleeps before it measures its age has an age of the sleep and its own start, not the age of the
    machine."""
    code = "import time; time.sleep(0.5); from lowbit.cli.start_times import process_age_s; print(process_age_s())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.45 <= float(done.stdout) <= time.monotonic() - began + 0.1


def test_without_proc_it_is_cpu_time(monkeypatch):
    monkeypatch.setattr(start_times.Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError(2, "no /proc")))
    assert process_age_s() == pytest.approx(time.process_time(), abs=0.5)


def test_a_command_ends_without_a_word():
    """A command must end silently. Without care, nanobind (part of Triton) reports objects that the collector did not see: 40
    lines."""
    code = "from lowbit.cli.terminal import load_layers; load_layers()"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "" and "nanobind" not in done.stderr
