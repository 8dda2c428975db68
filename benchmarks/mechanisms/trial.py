"""One measurement: its row, the kernels to compile, and the measuring function."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.protocol import capture, relative_error
from benchmarks.tiles import REPLAYS, TOLERANCE
from lowbit.tune.timing import WrongResult

Row = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """`row` describes the measurement. `once` launches its kernels once, which compiles them. `measure` returns the other
    columns: us, figures, rel_err."""

    row: Row
    once: Callable[[], object]
    measure: Callable[[], Row]


def blank(part: str, case: str, way: str, **more: Any) -> Row:
    """Returns a row before it is measured. `figures` has the numbers of the part; the part's module explains their names."""
    row = {"part": part, "case": case, "way": way, "dtype": "fp16", "m": None, "n": None, "k": None}
    return {**row, "us": None, "figures": {}, "rel_err": None, "error": None, **more}


def timed(calls: Sequence[Callable[[], Tensor]], reference: Tensor, **figures: float) -> Row:
    """Returns a row with the microseconds per call and the given figures. All calls compute the same product, whose first rows
    are compared with `reference`."""
    graph = capture(calls)
    us = statistics.median(graph.times_us(REPLAYS))
    errors = [relative_error(y, reference) for y in graph.poisoned_outputs()[: len(calls)]]
    error = max(errors, default=math.nan)
    if not error <= TOLERANCE:
        raise WrongResult(f"relative error {error:.3g}")
    return {"us": us, "rel_err": error, "figures": figures}
