"""Measures the phases of a start in seconds, beginning with the start of the process."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age_s() -> float:
    """Returns the seconds since this process was started, or its CPU time on systems without Linux's /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.process_time()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since the machine was booted
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


class StartTimes:
    """Seconds by phase, in the order in which phases end. The first phase begins with the process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._before_s = 0.0

    def end(self, phase: str) -> None:
        """Adds the time since the end of the last phase to `phase`."""
        now_s = process_age_s()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now_s - self._before_s
        self._before_s = now_s

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        return f"started in {self._before_s:.1f} s: {phases}"
