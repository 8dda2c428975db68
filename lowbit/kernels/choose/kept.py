"""Tiles that `lowbit tune` found to be the fastest on this machine, kept in a file of the user's cache.

The model of costs knows an H200 well and other GPUs by their data sheets; here are products that somebody measured where they
run. A file is read once in a process, so the same file gives the same tiles. One that cannot be read, or that another version
of the library wrote, is left aside with a warning: then the model decides, as it does for all that is not in it.
"""

from __future__ import annotations

import functools
import json
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


@dataclass(frozen=True)
class Kept:
    """What was measured of a product of `m` tokens: its fastest tile took `us`, the modelled choice `modelled_us`."""

    m: int
    tile: str
    us: float
    modelled_us: float
    date: str

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
    if row is None or tile is None:
        return None
    found = candidate(tile)
    least = min((each.cost_us for each in rows if not each.reasons), default=found.cost_us)
    if found.reasons or (row.m > shape.m and found.cost_us > NO_SLOWER * least):
        return None
    return [replace(found, measured=row), *(each for each in rows if each.tile != tile)]


@functools.lru_cache(maxsize=8)
def _rows(file: str) -> dict[str, tuple[Kept, ...]]:
    try:
        document = json.loads(Path(file).read_text())
        if (document["result"], document["schema"]) != (KEPT, SCHEMA):
            raise ValueError("it is no file of `lowbit tune`")
        if document["lowbit"] != __version__:
            raise ValueError(f"lowbit {document['lowbit']} measured it, this is {__version__}")
        return {problem: tuple(Kept(**row) for row in rows) for problem, rows in document["products"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"{file}: {error}; tiles are chosen by the model of costs. `lowbit tune` measures them anew", stacklevel=2
        )
        return {}


def forget() -> None:
    """Has files read again, by whoever has written one."""
    _rows.cache_clear()


LATER = {"slots": 0, "sections": 1, "stream_k": 0}
"""What tiles got later than result files, last of their fields, and the number that says nothing: slots of a ring that has one
for each step, K in one part, no equal shares of it."""


def written(tile: Any, kinds: Mapping[str, type[Any]]) -> str:
    """A tile in a result file: its kernel and its numbers, such as "wgmma 64 2 8 4 2", without those of LATER that say nothing;
    `read` is the inverse."""
    name = next(name for name, kind in kinds.items() if isinstance(tile, kind))
    numbers = {each.name: int(getattr(tile, each.name)) for each in fields(tile)}
    while (last := next(reversed(numbers))) in LATER and LATER[last] == numbers[last]:
        del numbers[last]
    return " ".join([name, *map(str, numbers.values())])


def read(text: str, kinds: Mapping[str, type[Any]]) -> Any:
    """The tile that `written` wrote; None if it is of no kind among `kinds`, or of one that has other fields today."""
    name, *numbers = text.split()
    if name not in kinds:
        return None
    types = [each.type for each in fields(kinds[name])]
    try:
        return kinds[name](*(bool(int(n)) if kind == "bool" else int(n) for n, kind in zip(numbers, types, strict=False)))
    except (TypeError, ValueError):
        return None
