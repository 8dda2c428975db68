"""How far long work is: a bar where stderr is a terminal, a plain line every ten seconds where it is a file or a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from lowbit.printable import printable

INTERVAL_S = 10.0
"""Seconds between two lines, and before the first."""

LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {elapsed} passed, {remaining} left{postfix}"


def on_terminal() -> bool:
    """Whether stderr is a terminal, on which a bar can be drawn over itself."""
    return sys.stderr.isatty()


@contextmanager
def through_long_steps() -> Iterator[None]:
    """A block in which lines are written every INTERVAL_S also while a single step takes longer, by a thread."""
    done = threading.Event()

    def write() -> None:
        while not done.wait(INTERVAL_S / 10 or 0.01):
            for each in list(Progress._instances):
                if isinstance(each, Progress):
                    each.still()

    thread = threading.Thread(target=write, name="progress", daemon=True)
    if not on_terminal():
        thread.start()
    try:
        yield
    finally:
        done.set()


class Progress(tqdm):
    """tqdm's bar, removed at its end, where stderr is a terminal. Elsewhere lines of plain text: the first update that comes
    INTERVAL_S after the line before it writes one, so that shorter work writes nothing; `through_long_steps` needs no update.

    unit: in the plural, such as "layers". shown: False writes nothing anywhere.
    """

    monitor_interval = 0  # no thread that redraws: each update writes by itself
    disable: bool
    last_print_t: float

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

    def at(self, done: float, total: float | None, desc: str) -> None:
        """Sets how much of how much is done, and of what."""
        self.total = total
        self.set_description_str(_one_line(desc), refresh=False)
        self.update(done - self.n)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Adds words to the bar, or to the next line."""
        super().set_postfix_str(s, refresh=refresh and not self.lines)

    def still(self) -> None:
        """Writes a line where INTERVAL_S passed since the one before, although nothing was done since."""
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
        """Removes the bar; lines stay."""
        if not self.lines:
            super().clear(nolock)

    def close(self) -> None:
        """Removes the bar; lines stay."""
        if not self.lines:
            super().close()
        elif not self.disable:
            self.disable = True
            self._decr_instances(self)


def _one_line(desc: str) -> str:
    """Names of layers and models come from files and servers."""
    return printable(desc).replace("\n", " ")
