"""How far long work is: a bar where stderr is a terminal, a plain line every ten seconds where it is a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

INTERVAL_S = 10.0
"""Seconds between two lines, and before the first."""

LINE = "{desc}: {n_fmt} of {total_fmt} {unit}, {elapsed} passed, {remaining} left"


def on_terminal() -> bool:
    """Whether stderr is a terminal, on which a bar can be drawn over itself."""
    return sys.stderr.isatty()


class Progress(tqdm):
    """tqdm's bar, removed at its end, where stderr is a terminal. Elsewhere lines of plain text: the first update that comes
    INTERVAL_S after the line before it writes one, so that shorter work writes nothing.

    unit: in the plural, such as "layers". shown: False writes nothing anywhere.
    """

    monitor_interval = 0  # no thread that redraws: each update writes by itself
    disable: bool

    def __init__(
        self, iterable: Iterable[Any] | None = None, *, desc: str, unit: str, total: float | None = None, shown: bool = True,
        unit_scale: bool = False,
    ) -> None:  # fmt: skip
        self.lines = shown and not on_terminal()
        slow = {"mininterval": INTERVAL_S, "miniters": 1, "delay": INTERVAL_S, "bar_format": LINE} if self.lines else {}
        super().__init__(
            iterable, desc=desc, unit=unit, total=total, disable=not shown, unit_scale=unit_scale, leave=False, **slow
        )

    def at(self, done: float, total: float | None, desc: str) -> None:
        """Sets how much of how much is done, and of what."""
        self.total = total
        self.set_description_str(desc, refresh=False)
        self.update(done - self.n)

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
