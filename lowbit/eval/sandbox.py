"""Runs generated programs, Python and JavaScript, in processes of their own that can do little harm: mistakes, not attacks.

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
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_NAMESPACES = ("--user", "--net", "--pid", "--ipc", "--fork", "--kill-child")
LANGUAGES = PYTHON, JAVASCRIPT = "python", "javascript"

PAUSE_S = 0.005
"""How often the folder of a program is looked through. Programs that wrote as fast as they could were ended with 76 to 85 MB
where 64 MiB are the limit, and with 1,090 to 1,410 files and folders instead of 1,000 (2 cores of a Xeon, 2026-11-22)."""

_DEEPEST = 32


@dataclass(frozen=True)
class Limits:
    """What one program may take: wall time in seconds, address space, size of a file, open files; size and number of all its
    files and folders together, which may be passed by what is made in a few milliseconds. CPU time has 1 to 2 s more than
    wall time: the wall's limit ends a busy loop and says so, the CPU's is there for whoever escapes it."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    open_files: int = 64
    disk_bytes: int = 1 << 26
    entries: int = 1000


STANDARD = Limits()


@dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end; `reason` says why not, "" if it did."""

    passed: bool
    reason: str


def run_untrusted(program: str, limits: Limits = STANDARD, language: str = PYTHON) -> Outcome:
    """Runs source in "python" or "javascript" in a locked-down process and says whether it ran to its end without an exception.

    The process has an empty temporary folder as its current one, no variables from outside, no input, and its output goes
    nowhere. `sys.exit`, a signal, a limit, or an attempt to reach the network, to start a process, or to write outside its
    folder count as failed, even where the program catches the error; in JavaScript, which has no way to any of them, nor to
    reading files, so does every `require` of more than the modules of `guard.js`. Raises OSError when the process cannot be
    started, and ValueError on systems other than Linux and for JavaScript where there is no Node.js (`find_node`).
    """
    return _run(program, limits, language)[0]


def enforcement(language: str = PYTHON) -> dict[str, str]:
    """What contains a program on this machine, found out by running one: for reports, beside the results. Raises ValueError
    when none can be run."""
    outcome, landlock = _run("", STANDARD, language)
    if not outcome.passed:
        raise ValueError(f"generated {language} code cannot be run on this machine: {outcome.reason}")
    spaces = bool(_namespaces())
    network, processes, files = ("audit hook",) * 3
    if language == JAVASCRIPT:
        network, processes, files = "no names for it", *("Node.js's permission model",) * 2
    if landlock:
        others = ", no other programs (Landlock)" if language == PYTHON else ""  # Node.js needs its loader, which starts any
        processes, files = f"{processes}{others}", f"{files}, read-only (Landlock)"
    return {
        "network": "no interface (network namespace)" if spaces else network + ", no TCP (Landlock)" * ("TCP" in landlock),
        "processes": processes + ", ended with the program (process namespace)" * spaces,
        "files outside its folder": files,
        "time, memory, file size": "resource limits",
        "all files together": f"looked through every {1000 * PAUSE_S:g} ms",
    }


def find_node() -> tuple[str, str]:
    """The path of Node.js, by which JavaScript is run, and its option for the permission model. Raises ValueError when there is
    none, or an older one than 20, which has no such model."""
    path = shutil.which("node")
    if path is None:
        raise ValueError(
            "generated JavaScript is run by Node.js, 20 or newer, and there is no `node` on the PATH: install it "
            "(https://nodejs.org), or leave JavaScript problems out"
        )
    return _node(path)


@functools.cache
def _node(path: str) -> tuple[str, str]:
    """Of the command at `path`, which may be a script that starts it."""
    done = subprocess.run(
        [path, "-p", "process.versions.node + ' ' + process.execPath"], capture_output=True, text=True, check=False
    )
    version, _, real = done.stdout.strip().partition(" ")
    if done.returncode or not version.split(".")[0].isdigit() or int(version.split(".")[0]) < 20:
        said = version or done.stderr.strip() or f"ended with status {done.returncode}"
        raise ValueError(f"generated JavaScript is run by Node.js, 20 or newer; {path} is {said}: install a newer one")
    return real, "--permission" if int(version.split(".")[0]) >= 24 else "--experimental-permission"


def _run(program: str, limits: Limits, language: str) -> tuple[Outcome, str]:
    """The outcome, and what Landlock refuses (see `guard.py`)."""
    if sys.platform != "linux":
        raise ValueError(f"generated code is run on Linux only, this is {sys.platform}")
    if language not in LANGUAGES:
        raise ValueError(f"programs are written in {' or '.join(LANGUAGES)}, got {language!r}")
    runner = dict(zip(("node", "permission"), find_node(), strict=True)) if language == JAVASCRIPT else {}
    token = secrets.token_hex(16)
    reading, writing = os.pipe()
    try:
        with _folder() as folder:
            request = {
                "program": program, "token": token, "channel": writing, "cpu_seconds": math.ceil(limits.seconds) + 1,
                "memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes, "open_files": limits.open_files, **runner,
            }  # fmt: skip
            ended = _execute(json.dumps(request), folder, writing, limits)
        os.set_blocking(reading, False)
        try:
            told = os.read(reading, 1 << 16)
        except BlockingIOError:
            told = b""
    finally:
        os.close(reading)
        os.close(writing)
    if isinstance(ended, str):
        return Outcome(False, ended), ""
    return _outcome(ended, told, token)


def _execute(request: str, folder: str, channel: int, limits: Limits) -> int | str:
    """Return code of the guard, negative for a signal; the limit that was passed when it was ended for one."""
    process = subprocess.Popen(
        [*_namespaces(), sys.executable, "-I", "-B", "-X", "utf8", str(_GUARD)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, pass_fds=(channel,),
        # One thread for NumPy's linear algebra, which may not start others.
        env={"OPENBLAS_NUM_THREADS": "1"}, start_new_session=True, text=True,
    )  # fmt: skip
    end = time.monotonic() + limits.seconds
    unsent: str | None = request
    try:
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(unsent, timeout=min(PAUSE_S, left))
            unsent = None  # the process object holds what is left of it
            if over := _over(folder, limits):
                return over
            if process.returncode is not None:
                return process.returncode
        return f"took longer than {limits.seconds:g} s"
    finally:
        _end(process)


def _over(folder: str, limits: Limits) -> str:
    """The limit on files and folders that a program is over, "" if none; looks no further than to that."""
    number = size = 0
    try:
        for bytes_of_one in _sizes(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), _DEEPEST):
            number, size = number + 1, size + bytes_of_one
            if number > limits.entries:
                return f"made more than {limits.entries:,} files and folders"
            if size > limits.disk_bytes:
                return f"wrote more than {limits.disk_bytes:,} bytes"
    except RecursionError:
        return f"made folders more than {_DEEPEST} deep"
    except PermissionError:
        return "made a folder that cannot be looked into"
    return ""


def _sizes(folder: int, depth: int) -> Iterator[int]:
    """Bytes of each file and folder in an open folder, which is closed in the end; RecursionError below `depth` folders."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:  # anything may be removed or replaced while this looks
                    found = entry.stat(follow_symlinks=False)
                    yield found.st_size
                    if stat.S_ISDIR(found.st_mode):
                        if depth == 0:
                            raise RecursionError
                        inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                        yield from _sizes(inner, depth - 1)
                except (FileNotFoundError, NotADirectoryError):
                    continue
    finally:
        os.close(folder)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder for a program, inside one that it may not change; both are gone at the end."""
    outer = tempfile.mkdtemp(prefix="lowbit-generated-")
    try:
        inner = os.path.join(outer, "0")
        os.mkdir(inner)
        yield inner
    finally:
        with contextlib.suppress(OSError):  # something that could not be ended is still writing there
            _remove(outer)


def _remove(outer: str) -> None:
    """Removes a folder of folders, however deep they are: those inside one of them are moved beside it, so that no path becomes
    too long."""
    moved = 0
    while folders := os.listdir(outer):
        for folder in (os.path.join(outer, name) for name in folders):
            os.chmod(folder, 0o700)
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    moved += 1
                    os.chmod(entry.path, 0o700)
                    os.rename(entry.path, os.path.join(outer, str(moved)))
                else:
                    os.unlink(entry.path)
            os.rmdir(folder)
    os.rmdir(outer)


def _end(process: subprocess.Popen[str]) -> None:
    """Kills whatever is left of the process group: also after Ctrl-C, and children of a program that has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(ended: int, told: bytes, token: str) -> tuple[Outcome, str]:
    """What the guard says. What else is in its pipe does not begin with the token; only who searches the guard's memory for it
    can write such a line."""
    report: tuple[Outcome, str] | None = None
    for line in told.splitlines():
        fields = line.decode(errors="replace").split("\t", 3)
        if len(fields) == 4 and fields[0] == token:
            report = Outcome(fields[1] == "passed", fields[3]), fields[2]
    if report is not None and (ended == 0 or not report[0].passed):
        return report
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
