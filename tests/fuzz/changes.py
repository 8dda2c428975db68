"""Random changes of files as hypothesis strategies: of JSON fields and of bytes."""

from __future__ import annotations

import copy

from hypothesis import strategies as st

GONE = "(gone)"
"""Used as a value: deletes the key."""
ODD = (
    None, True, False, 0, 1, -1, 2, 3, 64, 1.5, 0.0, -0.0, 1e-320, 1e308, 2**31, 2**32, 2**40, 2**63, -(2**63), 2**64, 10**30,
    float("nan"), float("inf"), float("-inf"), "", "64", "x", "None", "[/b]\x1b[2J", "\ud800", "a" * 5000, "../x", "\0", "(?<",
    "(a*)*b", [], {}, [1, 2], ["x"], [None], [[]], [[["x", "y"]]], {"a": 1}, {"type": "x"}, [0, 2**63], [-1, 8], {"id": 10**9},
    GONE,
)  # fmt: skip
"""Values that are unexpected in most fields."""
VALUES = st.sampled_from(ODD)


def places(value, path=()):
    """The path of every field of a JSON document, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(document, changes):
    """A copy of a JSON document with each (path, value) of `changes` applied, if the path still exists."""
    document = copy.deepcopy(document)
    for path, value in changes:
        holder = document
        try:
            for key in path[:-1]:
                holder = holder[key]
            if value == GONE:
                del holder[path[-1]]
            else:
                holder[path[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue
    return document


def changes_of(document, values=VALUES, most=3):
    """A strategy for changes of a document. It samples a depth first, then a field of that depth, so long tables do not
    dominate.
    """
    by_depth: dict[int, list[tuple]] = {}
    for place in places(document):
        by_depth.setdefault(len(place), []).append(place)
    place = st.sampled_from(sorted(by_depth)).flatmap(lambda depth: st.sampled_from(by_depth[depth]))
    return st.lists(st.tuples(place, values), min_size=1, max_size=most).map(tuple)


BYTES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=8), st.integers(0, 8)), min_size=1, max_size=3)
"""Changes of bytes: (position as a share of the length, new bytes, number of replaced bytes)."""


def with_bytes(data, changes):
    """`data` after applying `changes`, a value of the strategy `BYTES`."""
    found = bytearray(data)
    for where, new, old in changes:
        at = int(where * len(found))
        found[at : at + old] = new
    return bytes(found)
