"""Runs generated programs, Python and JavaScript, each in a process that the kernel isolates from the machine.

The isolation is bubblewrap's (`bwrap`) where it is installed, else that of `namespaces.py`. Both give the program namespaces of
its own (user, mount, process, network), a read-only root folder with the interpreter's files, and one folder in memory. Inside,
`guard.py` sets resource limits and a system-call filter. `docs/internals/evaluate.md` lists what is enforced, by which
mechanism, and what is not enforced.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_NAMESPACES = Path(__file__).with_name("namespaces.py")
LANGUAGES = PYTHON, JAVASCRIPT = "python", "javascript"
ISOLATIONS = BUBBLEWRAP, NAMESPACES = "bubblewrap", "namespaces"
UNSAFE = "none"
"""Value for no isolation: a program runs with resource limits and the system-call filter only."""

MACHINES = ("x86_64", "aarch64")
"""Supported machines: `guard.py` has their system-call numbers."""

_FOLDER = "/lowbit-program"
_SYSTEM = ("/usr", "/lib", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/alternatives")
"""Folders of shared libraries, in addition to the interpreter's own folders."""
_PREFIX = "lowbit-generated-"
_REASON_LENGTH = 80
_OUTPUT_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """Limits of one program. seconds: wall time. memory_bytes: address space, or data of Node.js. file_bytes: size of a file.
    open_files: files open at once. disk_bytes, entries: total size and number of its files and folders, with an isolation. CPU
    time is limited to 1 to 2 s more than wall time."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    open_files: int = 64
    disk_bytes: int = 1 << 26
    entries: int = 1000


STANDARD = Limits()
_PROBE = Limits(seconds=60.0)


@dataclass(frozen=True)
class Outcome:
    """`passed`: True if the program completed. Otherwise `reason` says why it did not, in at most 80 printable ASCII
    characters. It contains an exception's type, never its text."""

    passed: bool
    reason: str


def choose_isolation(unsafe: bool = False) -> str:
    """Returns the first of `ISOLATIONS` in which an empty program runs on this machine.

    If none works, returns `UNSAFE` if `unsafe` is True; otherwise raises ValueError with the reason of each.
    """
    _require_linux()
    refusals = {name: _refusal(name) for name in ISOLATIONS}
    for name, refusal in refusals.items():
        if not refusal:
            return name
    if unsafe:
        return UNSAFE
    reasons = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    raise ValueError(
        f"generated code needs isolation by the kernel, and none works on this machine ({reasons}): install bubblewrap "
        "(apt install bubblewrap), allow user namespaces, or run the code unprotected with --unsafe"
    )


def run_untrusted(program: str, limits: Limits = STANDARD, language: str = PYTHON, isolation: str | None = None) -> Outcome:
    """Runs a program in "python" or "javascript" in an isolated process; returns whether it completed without an exception.

    The process has an empty working directory, no variables of its parent's shell and no input; its output is discarded. It
    can only read the interpreter's files and only write to its folder. `sys.exit`, a signal and an exceeded limit count as
    failures. In JavaScript a `require` of a module that `guard.js` does not allow is a failure too. `isolation` None means
    `choose_isolation()`.

    Raises ValueError on systems other than Linux on x86-64 or ARM64, for JavaScript without Node.js (`find_node`), and where
    `choose_isolation` does; OSError if the process cannot be started.
    """
    _require_linux()
    if language not in LANGUAGES:
        raise ValueError(f"language {language!r}: must be {' or '.join(LANGUAGES)}")
    node = find_node() if language == JAVASCRIPT else None
    return _run(program, limits, node, choose_isolation() if isolation is None else isolation)


def enforcement(language: str = PYTHON, isolation: str | None = None) -> dict[str, str]:
    """Returns how each resource of a program is restricted, for reports. Raises ValueError if no program can run."""
    isolation = choose_isolation() if isolation is None else isolation
    outcome = run_untrusted("", STANDARD, language, isolation)
    if not outcome.passed:
        raise ValueError(f"generated {language} code cannot be run on this machine: {outcome.reason}")
    isolated = isolation != UNSAFE
    return {
        "isolation": _version() if isolation == BUBBLEWRAP else isolation,
        "network": "no interface (network namespace), " * isolated + "no sockets (system-call filter)",
        "processes": "none visible (process namespace), " * isolated + "none started (system-call filter)",
        "files outside its folder": "read-only, the interpreter's alone (mount namespace)" if isolated else "not protected",
        "time, memory, file size": "resource limits",
        "all files together": "a file system in memory of bounded size" if isolated else "not limited",
    }


def find_node() -> str:
    """Returns the path of Node.js. Raises ValueError if it is missing or older than 20."""
    path = shutil.which("node")
    if path is None:
        raise ValueError(
            "generated JavaScript needs Node.js 20 or newer, and there is no `node` on the PATH: install it "
            "(https://nodejs.org), or leave the JavaScript problems out"
        )
    return _node(path)


@functools.cache
def _node(path: str) -> str:
    """Returns the path of Node.js's own executable. The command at `path` may be a script that starts it."""
    done = subprocess.run(
        [path, "-p", "process.versions.node + ' ' + process.execPath"], capture_output=True, text=True, check=False
    )
    version, _, real = done.stdout.strip().partition(" ")
    if done.returncode or not version.split(".")[0].isdigit() or int(version.split(".")[0]) < 20:
        actual = version or done.stderr.strip() or f"ended with status {done.returncode}"
        raise ValueError(f"generated JavaScript needs Node.js 20 or newer; {path} is {actual}: install a newer one")
    return real


def _require_linux() -> None:
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        system = sys.platform if sys.platform != "linux" else os.uname().machine
        raise ValueError(f"generated code runs only on Linux on {' or '.join(MACHINES)}; this is {system}")


@functools.cache
def _refusal(isolation: str) -> str:
    """Returns the reason why an isolation does not work on this machine; "" if it works."""
    if isolation == BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not on the PATH"
    try:
        outcome = _run("", _PROBE, None, isolation)
    except OSError as error:
        return str(error)
    return outcome.reason


@functools.cache
def _version() -> str:
    """Returns name and version of bubblewrap."""
    return subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def _run(program: str, limits: Limits, node: str | None, isolation: str) -> Outcome:
    """Runs a program, which is in JavaScript if `node` is given. Raises OSError if the isolation cannot be set up."""
    token = secrets.token_hex(16)
    reading, writing = os.pipe()
    try:
        with contextlib.nullcontext(_FOLDER) if isolation != UNSAFE else _folder() as folder:
            request = {
                "program": program, "token": token, "channel": writing, "folder": folder, "isolated": isolation != UNSAFE,
                "parent": os.getpid(), "cpu_seconds": math.ceil(limits.seconds) + 1, "memory_bytes": limits.memory_bytes,
                "file_bytes": limits.file_bytes, "open_files": limits.open_files, "disk_bytes": limits.disk_bytes,
                "entries": limits.entries,
            }  # fmt: skip
            if node is not None:
                request |= {"node": node, "guard": _GUARD.with_suffix(".js").read_text(encoding="utf-8")}
            ended, output = _execute(_command(isolation, node), json.dumps(request), writing, limits.seconds)
        os.set_blocking(reading, False)
        try:
            sent = os.read(reading, 1 << 16)
        except BlockingIOError:
            sent = b""
    finally:
        os.close(reading)
        os.close(writing)
    reports = _reports(sent, token)
    if ended is None:
        return Outcome(False, f"took longer than {limits.seconds:g} s")
    if not reports:
        last_line = output.decode(errors="replace").strip().splitlines()[-1:] or [f"ended with status {ended}"]
        raise OSError(f"could not be set up: {last_line[0]}")
    outcome, reason = reports[-1]
    if outcome == "failed" or (outcome == "passed" and ended == 0):
        return Outcome(outcome == "passed", _printable(reason))
    # The isolation's launcher returns 128 plus the number of a signal.
    number = -ended if ended < 0 else ended - 128
    if number in signal.valid_signals():
        return Outcome(False, f"ended by {signal.Signals(number).name}")
    return Outcome(False, f"left with status {ended} before its end")


def _command(isolation: str, node: str | None) -> list[str]:
    """Returns the command line that runs `guard.py` in an isolation."""
    guard = [sys.executable, "-I", "-B", "-X", "utf8", str(_GUARD)]
    mounts = _mounts((str(_GUARD), *([] if node is None else [node])))
    if isolation == BUBBLEWRAP:
        options = [
            *(shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"),
            *("--unshare-uts", "--unshare-cgroup-try"),
            *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
        ]
        for source, target in mounts:
            options += ["--dev-bind" if source == os.devnull else "--ro-bind", source, target]
        return [*options, "--dir", _FOLDER, "--remount-ro", "/", "--", *guard]
    if isolation == NAMESPACES:
        request = json.dumps({"parent": os.getpid(), "mounts": mounts, "folder": _FOLDER})
        return [sys.executable, "-I", "-S", "-B", str(_NAMESPACES), request, *guard]
    return guard


def _mounts(files: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns pairs (resolved path, path inside the isolation) of all that a program may read: the system's programs and
    libraries, the interpreter's folders, `files` and /dev/null."""
    folders = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    paths = {*_SYSTEM, *folders, *files, os.path.realpath(sys.executable), os.devnull}
    paths |= {os.path.realpath(path) for path in (*folders, *files)}
    chosen: list[str] = []
    for path in sorted(path for path in paths if os.path.exists(path) and path != "/"):
        if not any(path.startswith(f"{other}/") for other in chosen):
            chosen.append(path)
    return [(os.path.realpath(path), path) for path in chosen]


def _execute(command: list[str], request: str, channel: int, seconds: float) -> tuple[int | None, bytes]:
    """Runs a command. Returns its return code and the end of its output. The code is negative for a signal, None for a
    timeout."""
    end = time.monotonic() + seconds
    with open(os.memfd_create("request"), "wb+") as given:
        given.write(request.encode())
        given.seek(0)
        process = subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(channel,), start_new_session=True,
            cwd="/", env={"OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
    assert process.stdout is not None
    output = b""
    try:
        with process.stdout:  # the output ends when the guard and its launcher have closed it
            while (left := end - time.monotonic()) > 0:
                if not select.select([process.stdout], [], [], left)[0]:
                    break
                block = os.read(process.stdout.fileno(), _OUTPUT_BYTES)
                if not block:
                    break
                output = (output + block)[-_OUTPUT_BYTES:]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(end - time.monotonic(), 0)), output
        return None, output
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group, also after Ctrl-C. Processes inside an isolation die with its launcher."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Yields an empty folder for a program without an isolation. It is inside a locked folder, which is removed at the end.

    Folders that killed runs have left behind are removed first.
    """
    _sweep()
    while True:
        outer = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(outer, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(outer):  # else another run removed it before it was locked
                break
            os.close(lock)
    try:
        inner = os.path.join(outer, "0")
        os.mkdir(inner)
        yield inner
    finally:
        with contextlib.suppress(OSError):  # a process that could not be killed still writes there
            _remove(outer)
        os.close(lock)


def _sweep() -> None:
    """Removes this user's folders that no run has locked."""
    for entry in os.scandir(tempfile.gettempdir()):
        with contextlib.suppress(OSError):  # BlockingIOError: in use
            if entry.name.startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(entry.path)
                finally:
                    os.close(lock)


def _remove(outer: str) -> None:
    """Removes nested folders of any depth. Inner folders are moved up first, so that no path becomes too long."""
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


def _reports(sent: bytes, token: str) -> list[tuple[str, str]]:
    """Returns the pairs (outcome, reason) that the guard sent, which begin with the token.

    A program could forge a report only by searching the guard's memory for the token.
    """
    lines = (line.decode(errors="replace").split("\t", 2) for line in sent.splitlines())
    return [(fields[1], fields[2]) for fields in lines if len(fields) == 3 and fields[0] == token]


def _printable(reason: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in reason[:_REASON_LENGTH])
