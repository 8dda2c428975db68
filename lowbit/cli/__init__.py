"""The command line. `--help` does not import torch, and Ctrl-C works while a command imports torch.

__init__.py   the entry point, and the signal handler during imports
terminal.py   shared by the commands: consoles, errors as one line, results as JSON
stderr.py     a standard error whose writes do not block, for `lowbit serve`
start_times.py  times of the phases of a start, for `lowbit serve`
commands.py   the typer app; quantize, convert, generate, explain, schemes
recommend.py, eval.py, inspect.py, serve.py, chat.py, compile.py, export.py, demo.py, tune.py, bench.py: one command each

Importing a module of this package only declares arguments and help. Its functions import torch and the other layers.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Entry point of the `lowbit` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise SIGINT is ignored, as under nohup
        signal.signal(signal.SIGINT, _exit)
    from lowbit.cli.commands import app

    app()


def restore_keyboard_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, so that a command can clean up."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    """Ends the process at once. An exception could be swallowed by a module that is being imported."""
    os.write(2, b"interrupted; nothing was started\n")
    os._exit(130)
