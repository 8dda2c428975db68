"""Runs one generated program inside limits; the child process of `lowbit.eval.sandbox`, never imported by anything else.

It imports the standard library only and reads a JSON request on standard input. It gives up the rights to write outside the
current folder, to start programs and to use TCP (Landlock, Linux 5.13 and newer; TCP from 6.7) and sets resource limits.

A Python program is executed here, after an audit hook was installed, which cannot be removed. Only a program that ran to its
end and tried nothing that the hook refuses is reported as passed, with a token that nobody writes by accident. It is no secret:
program and guard share one interpreter, so a program that searches this module's memory finds it and can report what it likes.

For a JavaScript program this process becomes Node.js (`request["node"]`), which runs `guard.js` and keeps limits and Landlock.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import struct
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# Landlock: linux/landlock.h; the three calls have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _REFER, _TRUNCATE = 1 << 0, 1 << 1, 1 << 13, 1 << 14
_MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_PT_INTERP = 3  # elf.h

_REFUSED = (
    *("socket.", "subprocess.", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.posix_spawn", "os.spawn", "os.system"),
    *("pty.", "ctypes.", "signal.pthread_kill", "resource.set", "resource.prlimit", "syslog."),
)
_CHANGES = (
    *("os.chmod", "os.chown", "os.chflags", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"),
    *("os.truncate", "os.utime", "os.setxattr", "os.removexattr", "sqlite3.connect"),
)
"""Audit events (https://docs.python.org/3/library/audit_events.html) whose first arguments are paths that change."""
_UNSEEN = {
    "_posixsubprocess": ("fork_exec",),
    "os": ("mkfifo", "mknod"),
    "posix": ("mkfifo", "mknod"),
    "_signal": ("pidfd_send_signal",),
    "signal": ("pidfd_send_signal",),
}
"""Functions by module that start programs, signal processes or make files without an audit event."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Executes the program of the request; see the module."""
    request = json.load(sys.stdin)
    folder, channel, token = os.path.realpath(os.curdir), request["channel"], request["token"]
    if "node" in request:
        _become_node(request, folder)
    landlock = _restrict(folder)
    _limit(request, resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # not for root, from whom the kernel lifts it
    attempts: list[str] = []

    def report(passed: bool, reason: str, write: Any = os.write) -> None:
        said = " ".join(reason[:500].split())
        write(channel, f"{token}\t{'passed' if passed else 'failed'}\t{landlock}\t{said}\n".encode(errors="replace"))

    def failed(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        report(False, attempts[0] if attempts else f"{kind.__name__}: {error}")

    program = types.ModuleType("generated")
    sys.modules["generated"] = program
    for name in ("ctypes", "_ctypes"):
        sys.modules.pop(name, None)
    sys.excepthook = failed
    sys.setrecursionlimit(2000)
    _replace_unseen(attempts)
    sys.addaudithook(_hook(folder, attempts))
    exec(compile(request["program"], "<generated>", "exec"), program.__dict__)
    report(not attempts, attempts[0] if attempts else "")


def _become_node(request: dict[str, Any], folder: str) -> NoReturn:
    """Node.js in the place of this process: it has `guard.js` on its command line and the request on standard input, so that no
    file need be readable. It reserves far more address space than it uses: its limit is on memory that can be written."""
    node = request["node"]
    source = Path(__file__).with_name("guard.js").read_text(encoding="utf-8")
    passed = {name: request[name] for name in ("program", "token", "channel")} | {
        "landlock": _restrict(folder, _programs(node))
    }
    with open(os.memfd_create("request"), "w", encoding="utf-8") as memory:
        json.dump(passed, memory)
        memory.seek(0)
        os.dup2(memory.fileno(), 0)
    _limit(request, resource.RLIMIT_DATA)
    heap = f"--max-old-space-size={request['memory_bytes'] // 2 >> 20}"
    os.execve(node, [node, request["permission"], "--no-warnings", heap, "--eval", source], {})


def _programs(path: str) -> list[str]:
    """A program and, where it has one, the loader that its ELF header names (PT_INTERP): what executing it takes."""
    with open(path, "rb") as file:
        head = file.read(1 << 12)
    start, size, count = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
    for kind, offset, length in (struct.unpack_from("<I4xQ16xQ", head, start + size * i) for i in range(count)):
        if kind == _PT_INTERP:
            return [path, head[offset : offset + length - 1].decode()]
    return [path]


def _limit(request: dict[str, Any], memory: int) -> None:
    """Resource limits, soft and hard; `memory`: what is limited of it."""
    for what, value in (
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (memory, request["memory_bytes"]),
        (resource.RLIMIT_FSIZE, request["file_bytes"]),
        (resource.RLIMIT_NOFILE, request["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def _restrict(folder: str, programs: Sequence[str] = ()) -> str:
    """Landlock: what it refuses from now on, "" when the kernel has none or has it switched off; `programs` may start."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return ""
    changing = _WRITE_FILE | _MAKE_AND_REMOVE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    network = _BIND_TCP | _CONNECT_TCP if version >= 4 else 0
    attribute = struct.pack("=QQ", changing | _EXECUTE, network) if network else struct.pack("=Q", changing | _EXECUTE)
    rules = libc.syscall(_CREATE_RULESET, attribute, len(attribute), 0)
    if rules < 0:
        return ""
    # Files under the program's folder may change, and it may throw output away.
    allowed = ((folder, changing), (os.devnull, changing & (_WRITE_FILE | _TRUNCATE)), *((path, _EXECUTE) for path in programs))
    for path, rights in allowed:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, handle), 0):
            return ""
        os.close(handle)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_RESTRICT_SELF, rules, 0):
        return ""
    os.close(rules)
    return "files, programs, TCP" if network else "files, programs"


def _replace_unseen(attempts: list[str]) -> None:
    """Puts functions that refuse in the place of `_UNSEEN`."""
    for module, names in _UNSEEN.items():
        for name in names:

            def refused(*arguments: object, what: str = f"refused: {module}.{name}", **named: object) -> None:
                attempts.append(what)
                raise PermissionError(what)

            setattr(importlib.import_module(module), name, refused)


def _hook(folder: str, attempts: list[str]) -> Any:
    """The audit hook: refuses what a solution to a programming problem never does, and notes it in `attempts`."""
    # Held here, so that a program that replaces functions of these modules changes nothing.
    real, join, decode, null = os.path.realpath, os.path.join, os.fsdecode, os.devnull
    inside, start = folder + os.sep, str.startswith
    permission, missing = PermissionError, ImportError

    def outside(path: object) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # a file that is open already
        whole = real(join(folder, decode(path)))
        return not (whole in (folder, null) or start(whole, inside))

    def refuse(what: str) -> None:
        attempts.append(what)
        raise permission(what)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and arguments[0] in ("ctypes", "_ctypes"):
            raise missing("ctypes is not available to generated code")
        if start(event, _REFUSED):
            refuse(f"refused: {event}")
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING and outside(arguments[0]):
            refuse(f"refused: writing {arguments[0]!r}")
        if event == "open" and isinstance(arguments[0], (str, bytes)) and start(real(decode(arguments[0])), "/proc/"):
            refuse(f"refused: {arguments[0]!r}, which tells of processes")
        if event in _CHANGES and any(outside(path) for path in arguments[:2]):
            refuse(f"refused: {event} {arguments[0]!r}")

    return hook


if __name__ == "__main__":
    main()
