"""Runs generated Python programs in a process of their own that can do little harm. For mistakes, not for attackers.

What a language model writes is run here to be tested, so it must not be able to hang, to fill memory or disk, to reach the
network or to change files by accident. Who must run code that is written to do harm needs a virtual machine around all
of this; `docs/evaluate.md` says what is enforced, by what, and what is not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GUARD = Path(__file__).with_name("guard.py")
_NAMESPACES = ("--user", "--net", "--pid", "--ipc", "--fork", "--kill-child")


@dataclass(frozen=True)
class Limits:
    """What one program may take: wall time (and so much CPU time) in seconds, address space, size of a file, open files."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    open_files: int = 64


STANDARD = Limits()


@dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end; `reason` says why not, "" if it did."""

    passed: bool
    reason: str


def run_untrusted(program: str, limits: Limits = STANDARD) -> Outcome:
    """Runs Python source in a locked-down process and says whether it ran to its end without an exception.

    The process has an empty temporary folder as its current one, no variables from outside, no input, and its output goes
    nowhere. `sys.exit`, a signal, a limit, or an attempt to reach the network, to start a process, or to write outside its
    folder count as failed, even where the program catches the error. Raises OSError when the process cannot be started, and
    ValueError on systems other than Linux.
    """
    return _run(program, limits)[0]


def enforcement() -> dict[str, str]:
    """What contains a program on this machine, found out by running one: for reports, beside the results."""
    outcome, landlock = _run("pass", STANDARD)
    if not outcome.passed:
        raise ValueError(f"generated code cannot be run on this machine: {outcome.reason}")
    spaces = bool(_namespaces())
    return {
        "network": "no interface (network namespace)" if spaces else "audit hook" + ", no TCP (Landlock)" * ("TCP" in landlock),
        "processes": "audit hook" + ", ended with the program (process namespace)" * spaces,
        "files outside its folder": "read-only (Landlock)" if landlock else "audit hook",
        "time, memory, file size": "resource limits",
    }  # fmt: skip


def _run(program: str, limits: Limits) -> tuple[Outcome, str]:
    """The outcome, and what Landlock refuses (see `guard.py`)."""
    if sys.platform != "linux":
        raise ValueError(f"generated code is run on Linux only, this is {sys.platform}")
    token = secrets.token_hex(16)
    reading, writing = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="lowbit-generated-", ignore_cleanup_errors=True) as folder:
            request = {
                "program": program, "token": token, "channel": writing, "cpu_seconds": math.ceil(limits.seconds),
                "memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes, "open_files": limits.open_files,
            }  # fmt: skip
            ended = _execute(json.dumps(request), folder, writing, limits.seconds)
        os.set_blocking(reading, False)
        try:
            told = os.read(reading, 1 << 16)
        except BlockingIOError:
            told = b""
    finally:
        os.close(reading)
        os.close(writing)
    if ended is None:
        return Outcome(False, f"took longer than {limits.seconds:g} s"), ""
    return _outcome(ended, told, token)


def _execute(request: str, folder: str, channel: int, seconds: float) -> int | None:
    """Return code of the guard, negative for a signal; None when its time ran out."""
    process = subprocess.Popen(
        [*_namespaces(), sys.executable, "-I", "-B", "-X", "utf8", str(_GUARD)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, pass_fds=(channel,),
        # One thread for NumPy's linear algebra, which may not start others.
        env={"OPENBLAS_NUM_THREADS": "1"}, start_new_session=True, text=True,
    )  # fmt: skip
    try:
        process.communicate(request, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)
    return process.returncode


def _end(process: subprocess.Popen[str]) -> None:
    """Kills whatever is left of the process group: also after Ctrl-C, and children of a program that has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(ended: int, told: bytes, token: str) -> tuple[Outcome, str]:
    """What the guard says; a program that writes into the guard's pipe does not know the token."""
    report: dict[str, Any] | None = None
    for line in told.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("token") == token:
            report = value
    if report is not None and (ended == 0 or not report["passed"]):
        return Outcome(report["passed"], report["reason"]), report["landlock"]
    # Through `unshare`, a signal comes back as 128 plus its number.
    number = -ended if ended < 0 else ended - 128
    if number in signal.valid_signals():
        return Outcome(False, f"ended by {signal.Signals(number).name}"), ""
    return Outcome(False, f"left with status {ended} before its end"), ""


@functools.cache
def _namespaces() -> tuple[str, ...]:
    """The command that gives a program namespaces of its own; empty where there is no `unshare` or it is not allowed."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, *_NAMESPACES)
    done = subprocess.run([*command, sys.executable, "-I", "-c", ""], capture_output=True, check=False)
    return () if done.returncode else command
