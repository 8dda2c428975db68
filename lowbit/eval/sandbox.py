"""Runs generated programs, Python and JavaScript, each in a process that the kernel isolates from the machine.

The isolation is bubblewrap's (`bwrap`) where it is installed, else that of `namespaces.py`. Both give the program namespaces of
its own (user, mount, process, network), a read-only root folder with the interpreter's files, and one folder in memory. Inside,
`guard.py` sets resource limits and a system-call filter. `docs/internals/evaluate.md` says what is enforced, by what, and what
is not."""

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
"""Stands in the place of an isolation where a program runs with resource limits and the system-call filter alone."""

MACHINES = ("x86_64", "aarch64")
"""Machines whose numbers of system calls `guard.py` has."""

_FOLDER = "/lowbit-program"
_SYSTEM = ("/usr", "/lib", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/alternatives")
"""Where programs' shared libraries are, beside the interpreter's own folders."""
_PREFIX = "lowbit-generated-"
_REASON_LENGTH = 80
_OUTPUT_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """What one program may take: wall time in seconds, address space, size of a file, open files; size and number of all its
    files and folders together (not without an isolation). CPU time has 1 to 2 s more than wall time."""

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
    """Whether a program ran to its end; `reason` says why not, "" if it did: at most 80 printable ASCII characters, an
    exception's type and never its text."""

    passed: bool
    reason: str


def choose_isolation(unsafe: bool = False) -> str:
    """Returns the first of `ISOLATIONS` that works on this machine, found out by running an empty program in it.

    Without any: `UNSAFE` if `unsafe`, else raises ValueError with the reason of each.
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
        f"generated code runs only in an isolation that the kernel enforces, and none works here ({reasons}): install "
        "bubblewrap (apt install bubblewrap), allow user namespaces, or run it unprotected with --unsafe"
    )


def run_untrusted(program: str, limits: Limits = STANDARD, language: str = PYTHON, isolation: str | None = None) -> Outcome:
    """Runs source in "python" or "javascript" in an isolated process and says whether it ran to its end without an exception.

    The process has an empty folder as its current one, no variables from outside, no input, and its output goes nowhere. It
    reads the interpreter's files and nothing else, and writes to its folder alone. `sys.exit`, a signal and a limit count as
    failed; in JavaScript so does every `require` of more than the modules of `guard.js`. `isolation` is that of
    `choose_isolation()` when None. Raises ValueError on other systems than Linux on x86-64 or ARM64, for JavaScript where there
    is no Node.js (`find_node`) and as `choose_isolation` does; OSError when the process cannot be started.
    """
    _require_linux()
    if language not in LANGUAGES:
        raise ValueError(f"programs are written in {' or '.join(LANGUAGES)}, got {language!r}")
    node = find_node() if language == JAVASCRIPT else None
    return _run(program, limits, node, choose_isolation() if isolation is None else isolation)


def enforcement(language: str = PYTHON, isolation: str | None = None) -> dict[str, str]:
    """What contains a program on this machine, for reports, beside the results. Raises ValueError when none can be run."""
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
    """The path of Node.js, by which JavaScript is run. Raises ValueError when there is none, or an older one than 20."""
    path = shutil.which("node")
    if path is None:
        raise ValueError(
            "generated JavaScript is run by Node.js, 20 or newer, and there is no `node` on the PATH: install it "
            "(https://nodejs.org), or leave JavaScript problems out"
        )
    return _node(path)


@functools.cache
def _node(path: str) -> str:
    """The program behind the command at `path`, which may be a script that starts it."""
    done = subprocess.run(
        [path, "-p", "process.versions.node + ' ' + process.execPath"], capture_output=True, text=True, check=False
    )
    version, _, real = done.stdout.strip().partition(" ")
    if done.returncode or not version.split(".")[0].isdigit() or int(version.split(".")[0]) < 20:
        said = version or done.stderr.strip() or f"ended with status {done.returncode}"
        raise ValueError(f"generated JavaScript is run by Node.js, 20 or newer; {path} is {said}: install a newer one")
    return real


def _require_linux() -> None:
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        system = sys.platform if sys.platform != "linux" else os.uname().machine
        raise ValueError(f"generated code is run on Linux only, on {' or '.join(MACHINES)}; this is {system}")


@functools.cache
def _refusal(isolation: str) -> str:
    """Why an isolation does not work on this machine; "" if it does."""
    if isolation == BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not on the PATH"
    try:
        outcome = _run("", _PROBE, None, isolation)
    except OSError as error:
        return str(error)
    return outcome.reason


@functools.cache
def _version() -> str:
    """Name and version of bubblewrap."""
    return subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def _run(program: str, limits: Limits, node: str | None, isolation: str) -> Outcome:
    """Runs a program, in JavaScript by `node`. Raises OSError when the isolation cannot be set up."""
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
            told = os.read(reading, 1 << 16)
        except BlockingIOError:
            told = b""
    finally:
        os.close(reading)
        os.close(writing)
    reports = _reports(told, token)
    if ended is None:
        return Outcome(False, f"took longer than {limits.seconds:g} s")
    if not reports:
        said = output.decode(errors="replace").strip().splitlines()[-1:] or [f"ended with status {ended}"]
        raise OSError(f"could not be set up: {said[0]}")
    outcome, reason = reports[-1]
    if outcome == "failed" or (outcome == "passed" and ended == 0):
        return Outcome(outcome == "passed", _printable(reason))
    # A signal comes back as 128 plus its number through what starts the isolation.
    number = -ended if ended < 0 else ended - 128
    if number in signal.valid_signals():
        return Outcome(False, f"ended by {signal.Signals(number).name}")
    return Outcome(False, f"left with status {ended} before its end")


def _command(isolation: str, node: str | None) -> list[str]:
    """The command line that runs `guard.py` in an isolation."""
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
    """Pairs (path without symbolic links, path at which a program sees it) of what it may read: the system's programs and
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
    """Return code of a command, negative for a signal, None if it was ended for its time; and the beginning of its output."""
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
        with process.stdout:  # at its end once the guard and what started it have closed it
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
    """Kills whatever is left: also after Ctrl-C. What an isolation has started dies with the process that started it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder for a program without an isolation, inside one that is locked as long as it is used; removed at the end.
    Folders of runs that were killed are removed first."""
    _sweep()
    while True:
        outer = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(outer, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(outer):  # else another run has removed it before it was locked
                break
            os.close(lock)
    try:
        inner = os.path.join(outer, "0")
        os.mkdir(inner)
        yield inner
    finally:
        with contextlib.suppress(OSError):  # something that could not be ended is still writing there
            _remove(outer)
        os.close(lock)


def _sweep() -> None:
    """Removes the folders of this user that no run holds locked."""
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
    """Removes a folder of folders of any depth: inner ones are moved up beside the outer ones, so that no path is too long."""
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


def _reports(told: bytes, token: str) -> list[tuple[str, str]]:
    """Pairs (outcome, reason) that the guard sent. Other lines in its pipe do not begin with the token; a program can write
    such a line only if it searches the guard's memory for the token."""
    lines = (line.decode(errors="replace").split("\t", 2) for line in told.splitlines())
    return [(fields[1], fields[2]) for fields in lines if len(fields) == 3 and fields[0] == token]


def _printable(reason: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in reason[:_REASON_LENGTH])
