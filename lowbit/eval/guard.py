"""Runs one generated program inside limits. `lowbit.eval.sandbox` starts this file as a process; nothing imports it.

It imports the standard library only and reads a JSON request on standard input. `sandbox.py` starts it inside an isolation. The
guard completes the isolation: it mounts the program's folder, of bounded size, and drops all capabilities. Then it sets
resource limits and a seccomp filter, so that the program can start no process, open no socket and enter no other namespace.

A Python program is executed here. Only a program that ran to its end is reported as passed. A report has a random token, so
that a program does not write one by accident. The token is not a secret: program and guard share one interpreter, so a program
that searches this module's memory can find it and report anything.

For a JavaScript program this process becomes Node.js (`request["node"]`), which runs `guard.js` under the same limits.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import types
from typing import Any, NoReturn

# linux/mount.h, linux/prctl.h, linux/capability.h
_NOSUID, _NODEV = 2, 4
_MOUNT_SETATTR, _AT_FDCWD, _ATTR_RDONLY = 442, -100, 1
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
_CAPABILITY_VERSION = 0x20080522

# linux/audit.h: the value that identifies the machine to a filter; asm/unistd.h: numbers of system calls.
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3, _CLONE_THREAD = 435, 0x10000
_REFUSED = {
    "x86_64": {
        **{"fork": 57, "vfork": 58, "ptrace": 101, "socket": 41, "io_uring_setup": 425, "unshare": 272, "setns": 308},
        **{"shmget": 29, "msgget": 68, "semget": 64},
    },
    "aarch64": {
        **{"ptrace": 117, "socket": 198, "io_uring_setup": 425, "unshare": 97, "setns": 268},
        **{"shmget": 194, "msgget": 186, "semget": 190},
    },
}
"""System calls that are refused in addition to clone, and why. `socket`: a network namespace does not confine vsock. io_uring:
it opens sockets that the filter does not see. `unshare` and `setns`: a new user namespace could mount memory without a limit.
System V shared memory, queues and semaphores: no resource limit counts them.
"""
_X32 = 0x40000000  # x86_64's x32 interface, whose system calls have other numbers

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Executes the program of the request, as the module's docstring describes."""
    request = json.load(sys.stdin)
    channel, token = request["channel"], request["token"]
    if request["isolated"]:
        _finish_isolation(request)
    else:
        _call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != request["parent"]:
            sys.exit(1)
    os.chdir(request["folder"])
    if "node" in request:
        _replace_stdin(request)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2) if "node" in request else (0, 1, 2):
        os.dup2(null, stream)
    os.closerange(3, channel)
    os.closerange(channel + 1, 1 << 16)
    _limit(request, resource.RLIMIT_DATA if "node" in request else resource.RLIMIT_AS)
    _filter()
    os.write(channel, f"{token}\tstarted\t\n".encode())
    if "node" in request:
        _become_node(request)

    def report(outcome: str, reason: str, write: Any = os.write) -> None:
        write(channel, f"{token}\t{outcome}\t{reason}\n".encode(errors="replace"))

    def failed(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        report("failed", _named(kind, error))

    program = types.ModuleType("generated")
    sys.modules["generated"] = program
    sys.excepthook = failed
    sys.setrecursionlimit(2000)
    exec(compile(request["program"], "<generated>", "exec"), program.__dict__)
    report("passed", "")


def _named(kind: type[BaseException], error: BaseException) -> str:
    """Returns the name of the exception's type, or of its built-in base type; for an OSError with the errno. The exception's
    text is never included."""
    name = next(base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)
    code = errno.errorcode.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{name} {code}" if code else name


def _finish_isolation(request: dict[str, Any]) -> None:
    """Makes the metadata of /dev/null read-only (writing to it still works), mounts the program's folder, and drops all
    capabilities.
    """
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, os.devnull.encode(), 0, attributes, len(attributes))
    options = f"size={request['disk_bytes']},nr_inodes={request['entries'] + 1},mode=700"  # the folder itself is one entry
    _call("mount", b"tmpfs", request["folder"].encode(), b"tmpfs", _NOSUID | _NODEV, options.encode())
    _call("capset", struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))


def _replace_stdin(request: dict[str, Any]) -> None:
    """Writes the input of `guard.js` to standard input, so that it needs no file."""
    passed = {name: request[name] for name in ("program", "token", "channel")}
    with open(os.memfd_create("request"), "w", encoding="utf-8") as memory:
        json.dump(passed, memory)
        memory.seek(0)
        os.dup2(memory.fileno(), 0)


def _become_node(request: dict[str, Any]) -> NoReturn:
    """Replaces this process by Node.js. Node.js reserves far more address space than it uses, so its limit is RLIMIT_DATA."""
    node = request["node"]
    os.set_inheritable(request["channel"], True)
    heap = f"--max-old-space-size={request['memory_bytes'] // 2 >> 20}"
    os.execve(node, [node, "--no-warnings", heap, "--eval", request["guard"]], {})


def _limit(request: dict[str, Any], memory: int) -> None:
    """Sets soft and hard resource limits; `memory` is the limit to use, RLIMIT_AS or RLIMIT_DATA."""
    for what, value in (
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (memory, request["memory_bytes"]),
        (resource.RLIMIT_FSIZE, request["file_bytes"]),
        (resource.RLIMIT_NOFILE, request["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def _filter() -> None:
    """Installs the seccomp filter. Starting a process and the calls of `_REFUSED` fail with EPERM; threads are allowed."""
    machine = os.uname().machine
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    steps = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT[machine]), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), refuse,
        (_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | errno.ENOSYS),  # the C library then calls clone
    ]  # fmt: skip
    for number in _REFUSED[machine].values():
        steps += [(_EQUAL, 0, 1, number), refuse]
    steps += [
        (_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, 16), (_BITS, 1, 0, _CLONE_THREAD), refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _SET_SECCOMP, _FILTER, program, 0, 0)


def _call(function: str, *arguments: object) -> None:
    """Calls a C function. Raises OSError with the function's name if it fails."""
    converted = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    if getattr(_libc, function)(*converted) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")


if __name__ == "__main__":
    main()
