"""Standard error that neither blocks nor fails the process that writes to it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import NoReturn

MOST_BYTES = 1 << 20
"""Maximum number of bytes that are queued while standard error is not read. Further writes are dropped and counted."""

LAST_SECONDS = 1.0
"""Maximum time for writing the rest of the queue at exit."""


class QueuedStream(io.TextIOBase):
    """A text stream whose writes return at once; a thread copies the text to a file descriptor.

    A full pipe blocks only that thread. Text that cannot be written (full disk, closed pipe) is dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        """Bytes in the queue and in the thread's current write."""
        self._dropped = 0
        """Number of writes dropped since the last one that was queued."""
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._copy, name="lowbit-stderr", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Returns "utf-8"."""
        return "utf-8"

    def fileno(self) -> int:
        """Returns the file descriptor of the output."""
        return self._descriptor

    def isatty(self) -> bool:
        """Returns True if the file descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, text: str) -> int:
        """Queues text; drops it if the queue would exceed MOST_BYTES."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._bytes + len(data) > MOST_BYTES:
                self._dropped += 1
                return len(text)
            if self._dropped:
                data = f"({self._dropped:,} writes are missing here: standard error was not read)\n".encode() + data
                self._dropped = 0
            self._queue.append(data)
            self._bytes += len(data)
            self._changed.notify()
        return len(text)

    def end(self) -> None:
        """Writes the rest of the queue, for at most LAST_SECONDS, and ends the thread."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(LAST_SECONDS)

    def _copy(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ending)
                if not self._queue:
                    return
                data = self._queue.popleft()
            left = memoryview(data)
            with contextlib.suppress(OSError):
                while left:
                    left = left[os.write(self._descriptor, left) :]
            with self._changed:
                self._bytes -= len(data)


@contextlib.contextmanager
def queued_stderr() -> Iterator[None]:
    """Replaces `sys.stderr` by a QueuedStream during the block; usable as a decorator."""
    before = sys.stderr
    try:
        descriptor = before.fileno()
    except (AttributeError, io.UnsupportedOperation):  # None if stderr was closed at start, or a stream in memory
        yield
        return
    sys.stderr = stream = QueuedStream(descriptor)
    try:
        yield
    finally:
        stream.end()
        sys.stderr = before


def exit_now(status: int) -> NoReturn:
    """Writes the queue of standard error and ends the process at once, without any other clean-up."""
    if isinstance(sys.stderr, QueuedStream):
        sys.stderr.end()
    os._exit(status)
