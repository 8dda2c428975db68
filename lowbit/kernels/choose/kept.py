"""Tiles that `lowbit tune` found to be the fastest on this machine, kept in a file of the user's cache.

The model of costs knows an H200 well and other GPUs by their data sheets; here are products that somebody measured where they
run. A file is read once in a process, so the same file gives the same tiles. One that cannot be read, or that another version
of the library wrote, is left aside with a warning: then the model decides, as it does for all that is not in it.
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

KEPT = "lowbit tune"
SCHEMA = 1
NO_SLOWER = 1.05
"""How much more than the cheapest tile one may be modelled to take for fewer tokens than it was measured with."""

MOST_SPLITS = 64
"""Parts of K that a tile in the file may have, beside those that are considered."""


@dataclass(frozen=True)
class Kept:
    """What was measured of a product of `m` tokens: its fastest tile took `us`, the modelled choice `modelled_us`."""

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
    """What a shape of any kind is called in the file: its class and its fields, without its tokens."""
    assert is_dataclass(shape)
    numbers = [int(getattr(shape, each.name)) for each in fields(shape) if each.name != "m"]
    return " ".join([type(shape).__name__, *map(str, numbers)])


def kept_for(file: str, shape: Any) -> Kept | None:
    """What the file says of a product: of as many tokens, or of the next larger number within twice as many. None for ""."""
    if not file:
        return None
    rows = [row for row in _rows(file).get(problem_of(shape), ()) if shape.m <= row.m < 2 * shape.m]
    return min(rows, key=lambda row: row.m, default=None)


def first(rows: list[Any], file: str, shape: Any, kinds: Mapping[str, type[Any]], candidate: Any) -> list[Any] | None:
    """`rows` of candidates with the kept tile of `file` as a measured one, made by `candidate(tile)`; None if it says nothing
    that can be used. Where no other tile gained, the model goes on deciding; and a tile that gained with more tokens is taken
    for fewer only if the model does not have it slower than others there: it may be one that they hardly fill."""
    row = kept_for(file, shape)
    tile = None if row is None or row.us >= row.modelled_us else read(row.tile, kinds)
    if row is None or tile is None or not _plausible(tile, [each.tile for each in rows]):
        return None
    found = candidate(tile)
    least = min((each.cost_us for each in rows if not each.reasons), default=found.cost_us)
    if found.reasons or (row.m > shape.m and found.cost_us > NO_SLOWER * least):
        return None
    return [replace(found, measured=row), *(each for each in rows if each.tile != tile)]


def kept_in(file: Path) -> dict[str, tuple[Kept, ...]]:
    """The rows of a file by problem. Raises OSError for one that cannot be read, ValueError for one that is no file of this
    version's `lowbit tune`, in one line that names the problem and the field."""
    if not file.is_file():
        raise ValueError("it is no file")
    try:
        document = json.loads(file.read_bytes())
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(document, dict) or (document.get("result"), document.get("schema")) != (KEPT, SCHEMA):
        raise ValueError("it is no file of `lowbit tune`")
    if document.get("lowbit") != __version__:
        raise ValueError(f"lowbit {document.get('lowbit')} measured it, this is {__version__}")
    products = document.get("products")
    if not isinstance(products, dict) or not all(isinstance(rows, list) for rows in products.values()):
        raise ValueError("its products are no object with a list of measurements for each")
    return {problem: tuple(_row(problem, row) for row in rows) for problem, rows in products.items()}


def _row(problem: str, row: Any) -> Kept:
    names = {each.name for each in fields(Kept)}
    if not isinstance(row, dict) or set(row) != names:
        raise ValueError(f"{problem!r}: a measurement has the fields {', '.join(sorted(names))}, got {str(row)[:80]}")
    try:
        return Kept(**row)
    except ValueError as error:
        raise ValueError(f"{problem!r}: {error}") from error


def _plausible(tile: Any, considered: list[Any]) -> bool:
    """Returns True if every number of a tile is one that a considered tile of its kind has in the same field: the model of
    costs and the kernels take no others, except for K, which can be split into any number of parts."""
    alike = [each for each in considered if type(each) is type(tile)]
    numbers = {each.name: {getattr(other, each.name) for other in alike} for each in fields(tile)}
    numbers["splits"].update(range(1, 1 + MOST_SPLITS))
    return all(getattr(tile, name) in known for name, known in numbers.items())


@functools.lru_cache(maxsize=8)
def _rows(file: str) -> dict[str, tuple[Kept, ...]]:
    try:
        return kept_in(Path(file))
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{file}: {error}; tiles are chosen by the model of costs. `lowbit tune` measures them anew", stacklevel=2
        )
        return {}


def forget() -> None:
    """Has files read again, by whoever has written one."""
    _rows.cache_clear()


LATER = {"slots": 0, "sections": 1}
"""What tiles got later than result files, last of their fields, and the number that says nothing: slots of a ring that has one
for each step, K in one part."""


def written(tile: Any, kinds: Mapping[str, type[Any]]) -> str:
    """A tile in a result file: its kernel and its numbers, such as "wgmma 64 2 8 4 2", without those of LATER that say nothing;
    `read` is the inverse."""
    name = next(name for name, kind in kinds.items() if isinstance(tile, kind))
    numbers = {each.name: int(getattr(tile, each.name)) for each in fields(tile)}
    kept = [number for field, number in numbers.items() if LATER.get(field) != number]
    return " ".join([name, *map(str, kept)])


def read(text: str, kinds: Mapping[str, type[Any]]) -> Any:
    """The tile that `written` wrote; None if it is of no kind among `kinds`, or of one that has other fields today."""
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
