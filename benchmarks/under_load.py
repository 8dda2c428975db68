"""The GPU's clock and power while a kernel runs, read by one nvidia-smi for the whole process."""

from __future__ import annotations

import atexit
import functools
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

QUERIED = "clocks.sm,power.draw.instant"
EACH_MS = 20
"""Milliseconds between two readings of nvidia-smi."""
MOST_S = 0.5
"""Longest time that `while_running` waits for a reading, in seconds."""


@dataclass(frozen=True)
class Reading:
    """SM clock in MHz and power in W at a time (`time.monotonic`); None where nvidia-smi reports none."""

    at: float
    sm_clock_mhz: float | None
    power_w: float | None


NOTHING = Reading(0.0, None, None)


class Monitor:
    """Reads what `command` prints line by line, in a thread, until the process ends."""

    def __init__(self, command: list[str]) -> None:
        self.last = NOTHING
        self.process: subprocess.Popen[str] | None = None
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:  # no nvidia-smi
            return
        atexit.register(self.process.kill)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            clock, _, power = line.partition(",")
            self.last = Reading(time.monotonic(), _number(clock), _number(power))

    def while_running(self, replay: Callable[[], object]) -> Reading:
        """Returns a reading that was taken while `replay` was called again and again; `NOTHING` if none comes."""
        begun = time.monotonic()
        while self.process is not None and self.process.poll() is None and time.monotonic() < begun + MOST_S:
            replay()
            if self.last.at > begun + 2e-3 * EACH_MS:  # an earlier reading may be of the time before the call
                return self.last
        return NOTHING


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


@functools.cache
def monitor(device: int) -> Monitor:
    """Returns the monitor of a GPU, by nvidia-smi's number; it is started at the first call."""
    command = ["nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader,nounits", "-i", str(device), "-lms", str(EACH_MS)]
    return Monitor(command)
