"""The command line, from its first moment: `--help` needs no torch, and Ctrl-C is answered while a command imports its layers.

__init__.py   the entry point, and what Ctrl-C does before a command begins
terminal.py   what commands share: consoles, mistakes as one line, results as JSON
stderr.py     standard error that does not block, for `lowbit serve`
commands.py   quantize, convert, generate, explain, schemes, demo, and the whole of `lowbit`
recommend.py, eval.py, inspect.py, serve.py, chat.py, tune.py, bench.py

A module here declares arguments and help at its top and imports the layers inside its functions.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Entry point of the `lowbit` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)
    from lowbit.cli.commands import app

    app()


def begin() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, for a command that has something to put in order."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once: an exception could be swallowed by whatever is being imported."""
    os.write(2, b"interrupted; nothing was begun\n")
    os._exit(130)
