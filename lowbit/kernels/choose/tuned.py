"""Tiles that `lowbit tune` measured to be the fastest on this machine, stored in a file of the user's cache.

The cost model was fitted on an H200 and uses data-sheet numbers for other GPUs; these rows were measured on the GPU that uses
them. A file is read once per process, so tiles do not change while it runs. A file that cannot be read, or that another version
of the library wrote, is ignored with a warning; the cost model then decides.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from lowbit._version import __version__

RESULT = "lowbit tune"
SCHEMA = 1
NO_SLOWER = 1.05
"""A measured tile is also used for fewer tokens than it was measured with. Its modelled cost there may be at most this factor
times that of the cheapest tile."""

MOST_SPLITS = 64
"""Largest number of splits that a tile in the file may have."""


@dataclass(frozen=True)
class TunedRow:
    """A measurement: at `m` tokens the fastest tile took `us`, the modelled choice `modelled_us`."""

    m: int
    tile: str
    us: float
    modelled_us: float
    date: str

    def __post_init__(self) -> None:
        """Raises ValueError for a field of another type, or a time that is not a positive number."""
        if type(self.m) is not int or not 0 < self.m < 1 << 31:
            raise ValueError(f"m is a number of tokens, got {self.m!r}")
        for name in ("us", "modelled_us"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name} is a time in microseconds, got {value!r}")
        for name in ("tile", "date"):
            if type(getattr(self, name)) is not str:
                raise ValueError(f"{name} is a text, got {getattr(self, name)!r}")

    def __str__(self) -> str:
        gain = 100 * (1 - self.us / self.modelled_us)
        return f"measured here by `lowbit tune`, {self.date}, M {self.m}: {self.us:g} us, {gain:.0f} % less than modelled"


def problem_of(shape: Any) -> str:
    """Name of a problem in the file: class and fields of its shape, except m."""
    assert is_dataclass(shape)
    numbers = [int(getattr(shape, each.name)) for each in fields(shape) if each.name != "m"]
    return " ".join([type(shape).__name__, *map(str, numbers)])


def tuned_row_for(file: str, shape: Any) -> TunedRow | None:
    """The row of the file for this number of tokens; else the row for the next larger number, if it is less than twice as many;
    else None. File "" has no rows."""
    if not file:
        return None
    rows = [row for row in _rows(file).get(problem_of(shape), ()) if shape.m <= row.m < 2 * shape.m]
    return min(rows, key=lambda row: row.m, default=None)


def first(rows: list[Any], file: str, shape: Any, kinds: Mapping[str, type[Any]], candidate: Any) -> list[Any] | None:
    """Returns `rows` with the file's tile as a measured candidate, built by `candidate(tile)`; None if the file has no usable
    row.

    A row that is no faster than the modelled choice is not used. A row for more tokens is used only if the modelled cost of its
    tile is at most NO_SLOWER times the cheapest, since fewer tokens may hardly fill the tile.
    """
    row = tuned_row_for(file, shape)
    tile = None if row is None or row.us >= row.modelled_us else read(row.tile, kinds)
    if row is None or tile is None or not _plausible(tile, [each.tile for each in rows]):
        return None
    found = candidate(tile)
    least = min((each.cost_us for each in rows if not each.reasons), default=found.cost_us)
    if found.reasons or (row.m > shape.m and found.cost_us > NO_SLOWER * least):
        return None
    return [replace(found, measured=row), *(each for each in rows if each.tile != tile)]


def read_rows(file: Path) -> dict[str, tuple[TunedRow, ...]]:
    """Reads the rows of a file by problem. Raises OSError if it cannot be read, ValueError if it is no file of this version's
    `lowbit tune`, in one line that names the problem and the field."""
    if not file.is_file():
        raise ValueError("it is no file")
    try:
        document = json.loads(file.read_bytes())
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(document, dict) or (document.get("result"), document.get("schema")) != (RESULT, SCHEMA):
        raise ValueError("it is no file of `lowbit tune`")
    if document.get("lowbit") != __version__:
        raise ValueError(f"lowbit {document.get('lowbit')} measured it, this is {__version__}")
    products = document.get("products")
    if not isinstance(products, dict) or not all(isinstance(rows, list) for rows in products.values()):
        raise ValueError("its products are no object with a list of measurements for each")
    return {problem: tuple(_row(problem, row) for row in rows) for problem, rows in products.items()}


def _row(problem: str, row: Any) -> TunedRow:
    names = {each.name for each in fields(TunedRow)}
    if not isinstance(row, dict) or set(row) != names:
        raise ValueError(f"{problem!r}: a measurement has the fields {', '.join(sorted(names))}, got {str(row)[:80]}")
    try:
        return TunedRow(**row)
    except ValueError as error:
        raise ValueError(f"{problem!r}: {error}") from error


def _plausible(tile: Any, considered: list[Any]) -> bool:
    """True if every number of a tile, except its splits of K, occurs in the same field of some candidate of its kind. Kernels
    and cost model support no other numbers."""
    alike = [each for each in considered if type(each) is type(tile)]
    numbers = {each.name: {getattr(other, each.name) for other in alike} for each in fields(tile)}
    numbers["splits"].update(range(1, 1 + MOST_SPLITS))
    return all(getattr(tile, name) in known for name, known in numbers.items())


@functools.lru_cache(maxsize=8)
def _rows(file: str) -> dict[str, tuple[TunedRow, ...]]:
    try:
        return read_rows(Path(file))
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{file}: {error}; tiles are chosen by the model of costs. `lowbit tune` measures them anew", stacklevel=2
        )
        return {}


def forget() -> None:
    """Clears the cache of files; to be called after a file was written."""
    _rows.cache_clear()


LATER = {"slots": 0, "sections": 1}
"""Fields that were added to tiles after the first result files were written, and their defaults. They are the last fields of
their tiles."""


def written(tile: Any, kinds: Mapping[str, type[Any]]) -> str:
    """A tile in a result file: its kernel and its numbers, such as "wgmma 64 2 8 4 2", without default values of LATER; `read`
    is the inverse."""
    name = next(name for name, kind in kinds.items() if isinstance(tile, kind))
    numbers = {each.name: int(getattr(tile, each.name)) for each in fields(tile)}
    kept = [number for field, number in numbers.items() if LATER.get(field) != number]
    return " ".join([name, *map(str, kept)])


def read(text: str, kinds: Mapping[str, type[Any]]) -> Any:
    """Parses the text that `written` returned. None if its kind is not in `kinds`, or if the fields of that kind have changed
    since."""
    name, *numbers = text.split() or [""]
    if name not in kinds or not all(number.isascii() and number.isdigit() and len(number) < 6 for number in numbers):
        return None
    types = [each.type for each in fields(kinds[name])]
    if len(numbers) > len(types):
        return None
    try:
        return kinds[name](*(bool(int(n)) if kind == "bool" else int(n) for n, kind in zip(numbers, types, strict=False)))
    except (TypeError, ValueError):
        return None
