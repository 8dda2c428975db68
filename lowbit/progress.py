"""Progress of long work: a bar if stderr is a terminal, else a plain line every ten seconds."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from lowbit.printable import printable

INTERVAL_S = 10.0
"""Seconds between two lines, and before the first one."""

LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {elapsed} passed, {remaining} left{postfix}"


def on_terminal() -> bool:
    """Returns whether stderr is a terminal."""
    return sys.stderr.isatty()


@contextmanager
def periodic_lines() -> Iterator[None]:
    """Runs a block with a thread that writes a line every INTERVAL_S, even if a single step takes longer."""
    done = threading.Event()

    def write() -> None:
        while not done.wait(INTERVAL_S / 10 or 0.01):
            for each in list(Progress._instances):
                if isinstance(each, Progress):
                    each.write_if_due()

    thread = threading.Thread(target=write, name="progress", daemon=True)
    if not on_terminal():
        thread.start()
    try:
        yield
    finally:
        done.set()


class Progress(tqdm):
    """A tqdm bar on a terminal, removed at its end; elsewhere plain lines.

    An update writes a line if INTERVAL_S has passed since the previous one, so work shorter than that writes nothing. Inside
    `periodic_lines`, a thread also writes lines while no update comes.

    unit: plural, such as "layers". shown: False writes nothing.
    """

    monitor_interval = 0  # no tqdm monitor thread
    # Defaults until `__init__` has run: `write_if_due` may be called before, since tqdm lists an object when it is created.
    disable: bool = True
    lines: bool = False
    last_print_t: float = math.inf

    def __init__(
        self, iterable: Iterable[Any] | None = None, *, desc: str, unit: str, total: float | None = None, shown: bool = True,
        unit_scale: bool = False,
    ) -> None:  # fmt: skip
        self.lines = shown and not on_terminal()
        slow = {"mininterval": INTERVAL_S, "miniters": 1, "delay": INTERVAL_S, "bar_format": LINE} if self.lines else {}
        super().__init__(
            iterable,
            desc=_one_line(desc),
            unit=unit,
            total=total,
            disable=not shown,
            unit_scale=unit_scale,
            leave=False,
            **slow,
        )

    def __iter__(self) -> Iterator[Any]:
        """Yields the items and counts them. tqdm's own loop counts items twice if `write_if_due` writes between two updates."""
        with self:
            for item in self.iterable:
                yield item
                self.update(1)

    def at(self, done: float, total: float | None, desc: str) -> None:
        """Sets the amount done, the total and the description."""
        self.total = total
        self.set_description_str(_one_line(desc), refresh=False)
        self.update(done - self.n)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Sets the postfix of the bar or of the next line."""
        super().set_postfix_str(s, refresh=refresh and not self.lines)

    def write_if_due(self) -> None:
        """Writes a line if INTERVAL_S has passed since the previous one."""
        now = time.time()
        if self.lines and not self.disable and now - self.last_print_t >= INTERVAL_S:
            self.last_print_t = now
            self.display()

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Draws the bar, or writes the line."""
        if not self.lines:
            return super().display(msg, pos)
        self.fp.write(f"{self}\n" if msg is None else msg)
        self.fp.flush()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Removes the bar; printed lines stay."""
        if not self.lines:
            super().clear(nolock)

    def close(self) -> None:
        """Removes the bar; printed lines stay."""
        if not self.lines:
            super().close()
        elif not self.disable:
            self.disable = True
            self._decr_instances(self)


def _one_line(desc: str) -> str:
    """Returns `desc` escaped and on one line; names of layers and models come from files and servers."""
    return printable(desc).replace("\n", " ")
