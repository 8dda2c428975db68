"""Peak of a process's own memory while it runs something, from outside of the test's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

_FRAME = """
import sys, threading, time, torch
{setup}
peak, stop = 0, False
def rss():
    return int(next(line for line in open('/proc/self/status') if line.startswith('RssAnon')).split()[1]) * 1024
base = rss()
def watch():
    global peak
    while not stop:
        peak = max(peak, rss())
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
{measured}
stop = True; thread.join()
print(peak - base)
"""


def peak_bytes(setup: str, measured: str, *arguments: object) -> int:
    """Bytes of anonymous memory that the code `measured` takes at most above what `setup` left, each in `sys.argv[1:]`'s words.

    Whatever is freed goes back to the system at once: with glibc's own threshold, which grows, repeated runs of one program
    differ by 24 MB, so by 0.2 MB.
    """
    done = subprocess.run(
        [sys.executable, "-c", _FRAME.format(setup=setup, measured=measured), *map(str, arguments)],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    return int(done.stdout.split()[-1])
