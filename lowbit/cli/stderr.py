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
"""Text that is kept while nobody reads standard error; what comes after that is dropped and counted."""

LAST_SECONDS = 1.0
"""Time to write what is left at the end."""


class QueuedStream(io.TextIOBase):
    """A text stream whose writes return at once: a thread copies the text to a file descriptor.

    A pipe that nobody reads blocks that thread alone. What cannot be written (a full disk, a closed pipe) is dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        """Of the queue and of what the thread is writing."""
        self._dropped = 0
        """Writes that found the queue full since the last one that did not."""
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._copy, name="lowbit-stderr", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    def fileno(self) -> int:
        """The file descriptor that the text is copied to."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the file descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Queues text, or drops it if MOST_BYTES are queued already."""
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
        """Writes what is queued, for at most LAST_SECONDS, and ends the thread."""
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
    """Makes `sys.stderr` a QueuedStream meanwhile, for consoles, logging, warnings and tracebacks; usable as a decorator."""
    before = sys.stderr
    try:
        descriptor = before.fileno()
    except (AttributeError, io.UnsupportedOperation):  # None, if closed when Python started, and streams in memory
        yield
        return
    sys.stderr = stream = QueuedStream(descriptor)
    try:
        yield
    finally:
        stream.end()
        sys.stderr = before


def exit_now(status: int) -> NoReturn:
    """Ends the process at once, with what is queued for standard error written; nothing else is cleaned up."""
    if isinstance(sys.stderr, QueuedStream):
        sys.stderr.end()
    os._exit(status)
