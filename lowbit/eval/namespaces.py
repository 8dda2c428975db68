"""Starts a command in its own namespaces if bubblewrap is missing. `lowbit.eval.sandbox` runs this file; nothing imports it.

It imports the standard library only and creates the namespaces by system calls: user, mount, process, network, IPC and host
name. The command sees its own read-only root folder with only the given paths. It is process 1 of its namespace and has that
namespace's root capabilities, which `guard.py` drops. It is killed when the process that started this one ends. Needs Linux
5.12 (mount_setattr) and the right to make user namespaces.

Arguments: JSON, then the command. The JSON has "parent" (process id of the starter), "mounts" (pairs of a path without symbolic
links and the path at which the command sees it) and "folder" (an empty folder to create).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys

# linux/sched.h, linux/mount.h, linux/prctl.h, asm/unistd.h
_NEW_MOUNTS, _NEW_CGROUP, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = (
    *(0x20000, 0x2000000, 0x4000000, 0x8000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
_NOSUID, _NODEV, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_DETACH = 2
_SET_PDEATHSIG = 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2

_BASE, _OLD = b"/usr", "/old"
"""Mount point of the new root before the switch, and of the old root until it is unmounted."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Enters the namespaces, builds the root folder and runs the command. Exits with the command's status, or with 128 + n if
    signal n ended it."""
    request, command = json.loads(sys.argv[1]), sys.argv[2:]
    _die_with_parent()
    if os.getppid() != request["parent"]:
        sys.exit("the process that started this one has ended")
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_PROCESSES | _NEW_NETWORK | _NEW_IPC | _NEW_UTS | _NEW_CGROUP)
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(status if status >= 0 else 128 - status)
    os.close(writing)
    _die_with_parent()
    os.set_blocking(reading, False)
    try:  # reads the end of the pipe if the parent died before this process was set to die with it
        os.read(reading, 1)
        sys.exit(1)
    except BlockingIOError:
        os.close(reading)
    _build_root(request["mounts"], request["folder"])
    os.execv(command[0], command)


def _die_with_parent() -> None:
    _call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _build_root(mounts: list[tuple[str, str]], folder: str) -> None:
    """Replaces the root folder by a read-only one that consists of these mounts."""
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
    _call("mount", b"tmpfs", _BASE, b"tmpfs", _NOSUID | _NODEV, b"mode=755")
    os.chdir(_BASE)
    os.mkdir(_OLD[1:])
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", _OLD[1:].encode())
    os.chdir("/")
    for source, target in mounts:
        if os.path.isdir(_OLD + source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
        _call("mount", os.fsencode(_OLD + source), os.fsencode(target), None, _BIND | _RECURSIVE, None)
    os.mkdir(folder)
    _call("umount2", os.fsencode(_OLD), _DETACH)
    os.rmdir(_OLD)
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))


def _call(function: str, *arguments: object) -> None:
    """Calls a C function. Raises OSError with the function's name if it fails."""
    converted = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    if getattr(_libc, function)(*converted) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")


if __name__ == "__main__":
    main()
