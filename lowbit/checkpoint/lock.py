"""A lock on a folder or file, so that one process at a time writes it.

The lock is flock on a file beside the path: the OS releases it when its owner ends, even after kill -9. The file contains the
owner's identity, for messages to other processes and for file systems where flock has no effect between machines, such as NFS
mounted with nolock. There an owner counts as running while it renews the file's modification time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lowbit.checkpoint.schema import CheckpointError

try:
    import fcntl
except ImportError:  # not POSIX: the owner's identity alone decides
    fcntl = None  # type: ignore[assignment]

RENEWAL_SECONDS = 10
"""Seconds between updates of the lock file's modification time by its owner."""

SILENT_SECONDS = 120
"""Seconds without an update after which an owner on another machine counts as ended. It exceeds the clock difference of
machines and the longest time for which Python holds its global lock."""

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Owner:
    """The identity of a process: host name, PID, start in clock ticks after boot, boot id, PID namespace, and the time at
    which it acquired the lock in seconds since 1970. Strings are empty if the system does not state them."""

    host: str
    process: int
    started: str
    boot: str
    namespace: str
    since: float

    @staticmethod
    def current() -> Owner:
        """Returns the identity of this process."""
        process = os.getpid()
        boot = _read("/proc/sys/kernel/random/boot_id").strip() or platform.node()
        return Owner(platform.node(), process, _start_of(process), boot, _namespace(), time.time())

    @staticmethod
    def parse(text: str) -> Owner | None:
        """Returns the identity in a lock file's text; None if it is invalid."""
        try:
            owner = Owner(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        kinds: dict[str, type | tuple[type, ...]] = {"process": int, "since": (int, float)}
        return owner if all(isinstance(v, kinds.get(k, str)) for k, v in asdict(owner).items()) else None

    def runs(self, silent_seconds: float) -> bool:
        """Returns whether the process may still run, without flock: by its PID in the same PID namespace, else by the seconds
        since the last update of its lock file."""
        here = Owner.current()
        if (self.boot, self.namespace) == (here.boot, here.namespace) and self.started:
            return _start_of(self.process) == self.started
        return silent_seconds < SILENT_SECONDS

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(self.since, 0), 1e11)))
        more = f", PID namespace {self.namespace}" if self.namespace else ""
        return f"process {self.process} on host {self.host!r} (since {since}, boot {self.boot[:8]}{more})"


class Lock:
    """Lock of `path`, a folder or file that need not exist, for the length of a `with` block.

    While another process holds it, `say` gets one line that names that process, and entering waits; without `say` entering
    raises CheckpointError. The lock file `.NAME.lock` beside `path` is removed on leaving, and so are parent folders that
    entering made and that are still empty. Raises CheckpointError where the lock file cannot be written.
    """

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        self.path, self.file = path, path.with_name(f".{path.name}.lock")
        self._say = say
        self._handle = -1
        self._made: list[Path] = []
        self._released = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="lock", daemon=True)

    def __enter__(self) -> Lock:
        self._made = [p for p in self.file.parents if not p.exists()]
        reported = False
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            while (holder := self._take()) is not None:
                if self._say is None:
                    raise CheckpointError(f"{self.path}: {holder}; wait until it ends, or choose another folder")
                if not reported:
                    self._say(f"{self.path}: {holder}; waiting until it ends")
                    reported = True
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            self._remove_made()
            raise CheckpointError(f"{self.path}: cannot be written ({self.file}: {error.strerror or error})") from error
        except BaseException:
            self._remove_made()
            raise
        self._renewing.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._released.set()
        self._renewing.join()
        if self._is_ours():
            self.file.unlink(missing_ok=True)
        os.close(self._handle)
        self._remove_made()

    def require(self) -> None:
        """Raises CheckpointError if another process has acquired the lock. A process on another machine can acquire it if this
        one was stopped for SILENT_SECONDS."""
        if not self._is_ours():
            holder = _described(Owner.parse(_read(self.file)))
            raise CheckpointError(f"{self.path}: this process was stopped for {SILENT_SECONDS} s or more and {holder} now")

    def _take(self) -> str | None:
        """Takes the lock and returns None, or returns a description of the process that holds it."""
        for _ in range(100):
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            taken = False
            try:
                locked = _flock(handle)
                if not _same_file(handle, self.file):
                    continue  # its owner removed it since it was opened
                holder = self._holder(handle, locked)
                if holder is None:
                    self._write(handle, locked)
                    taken = locked is not None or self._still_ours()
                    if taken:
                        return None
                    holder = _described(Owner.parse(_read(self.file)))
                return holder
            finally:
                if not taken:
                    os.close(handle)
        raise CheckpointError(f"{self.path}: cannot be locked: {self.file} changes all the time; delete it")

    def _holder(self, handle: int, locked: bool | None) -> str | None:
        """Returns a description of the process that holds the lock; None if none does."""
        owner = Owner.parse(os.read(handle, 4096).decode(errors="replace"))
        if locked is False:
            until = time.monotonic() + 1
            while owner is None and time.monotonic() < until:  # the owner is about to write its identity
                time.sleep(0.01)
                owner = Owner.parse(_read(self.file))
            return _described(owner)
        if owner is None or (locked and owner.boot == Owner.current().boot):
            return None  # the kernel released the lock of an owner on this machine
        silent = time.time() - os.fstat(handle).st_mtime
        if not owner.runs(silent):
            return None
        rest = max(1, round(SILENT_SECONDS - silent))
        return f"{_described(owner)}; if it has ended, repeat this in {rest} s or delete {self.file}"

    def _write(self, handle: int, locked: bool | None) -> None:
        """Writes this process's identity."""
        self._handle, self._owner = handle, Owner.current()
        text = json.dumps(asdict(self._owner)).encode()
        try:
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, text)
            os.ftruncate(handle, len(text))
        except OSError:  # a full disk
            self.file.unlink(missing_ok=True)
            raise

    def _still_ours(self) -> bool:
        """Returns whether the lock is still ours. Without flock another process may take it at the same time; the pause lets
        that process write its identity before the file is read.
        """
        time.sleep(_POLL_SECONDS)
        return self._is_ours()

    def _is_ours(self) -> bool:
        return Owner.parse(_read(self.file)) == self._owner

    def _renew(self) -> None:
        while not self._released.wait(RENEWAL_SECONDS):
            with contextlib.suppress(OSError):
                if self._is_ours():
                    os.utime(self.file)

    def _remove_made(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):  # the folder is not empty
                folder.rmdir()


def _described(owner: Owner | None) -> str:
    return f"{owner or 'another process'} is writing it"


def _flock(handle: int) -> bool | None:
    """Returns True if the file is now locked by this handle, False if another one has the lock, None if flock is not
    supported.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            return None
        raise
    return True


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _read(path: str | Path) -> str:
    """Returns the text of a small file; empty if it cannot be read."""
    try:
        return Path(path).read_bytes()[:4096].decode(errors="replace")
    except OSError:
        return ""


def _start_of(process: int) -> str:
    """Returns the clock ticks after boot at which a process of this PID namespace started; empty if there is none."""
    fields = _read(f"/proc/{process}/stat").rpartition(")")[2].split()  # the process name may contain spaces
    return fields[19] if len(fields) > 19 else ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""
