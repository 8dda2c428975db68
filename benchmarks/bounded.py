"""Measurements of rivals in a process of their own, which is ended after a limit of seconds: torch.compile may not return."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from lowbit.tune.timing import failures, reason

HEARTBEAT_S = 10.0
"""Seconds between two progress lines of a process that reports nothing."""

Report = Callable[[str], None]
Measurement = Callable[..., Any]


def in_process(
    measure: Measurement, arguments: tuple[Any, ...], seconds: float, name: str, say: Report, heartbeat_s: float = HEARTBEAT_S
) -> Any:
    """Returns measure(*arguments, say), called in a new process: a picklable function of a module.

    Progress lines of `measure` go to `say` with `name` before them, and so does the elapsed time every `heartbeat_s`. Raises
    RuntimeError with the reason if `measure` fails or its process dies, and TimeoutError if it has not returned after
    `seconds`; its process group is killed then.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, measure, arguments), daemon=False)
    start = time.monotonic()
    process.start()
    sender.close()
    try:
        while (left := start + seconds - time.monotonic()) > 0:
            if not receiver.poll(min(left, heartbeat_s)):
                say(f"{name}: {time.monotonic() - start:.0f} s")
                continue
            try:
                kind, value = receiver.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"the process of {name} ended with status {process.exitcode}") from None
            if kind == "line":
                say(f"{name}, {time.monotonic() - start:.0f} s: {value}")
            elif kind == "error":
                raise RuntimeError(value)
            else:
                return value
        raise TimeoutError(f"{name} did not end within {seconds:.0f} s")
    finally:
        receiver.close()
        with suppress(ProcessLookupError):  # the process has ended, or is not a group leader yet
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.kill()
        process.join()


def _child(sender: Connection, measure: Measurement, arguments: tuple[Any, ...]) -> None:
    os.setpgrp()  # compilers that it starts are ended with it
    try:
        value = measure(*arguments, lambda line: sender.send(("line", line)))
    except failures() as error:
        sender.send(("error", reason(error)))
    else:
        sender.send(("value", value))
