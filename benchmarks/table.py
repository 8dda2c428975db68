"""Result tables that fit a terminal of 80 columns: text left-aligned, figures right-aligned and never wrapped."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def narrow_table(texts: Sequence[str], figures: Sequence[str], title: str | None = None) -> Table:
    """Returns an empty table with text columns followed by figure columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, no_wrap=True, justify="right")
    return table
