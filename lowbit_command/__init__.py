"""The `lowbit` command from its first moment: Ctrl-C is answered while the library, which takes seconds, is still imported.

It stands apart from the package `lowbit` because importing any module of that imports all of it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Entry point of the `lowbit` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)
    from lowbit.cli import main as run

    run()


def begin() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, for a command that has something to put in order."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once: an exception could be swallowed by whatever is being imported."""
    os.write(2, b"interrupted; nothing was begun\n")
    os._exit(130)
