"""One measured number with what it takes to judge it: its standard error and how much it was measured on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """`value` of `metric` over `count` tokens, problems or documents (`unit`); `standard_error` is None where undefined."""

    metric: str
    value: float
    standard_error: float | None
    count: int
    unit: str
    better: Literal["lower", "higher"]


def mean_of_windows(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None]:
    """Mean over all tokens, and its standard error, from the sum and the number of tokens of each window.

    Tokens of one window share their context and are not independent, so windows are the units: with W windows of sums s and
    counts n, the mean is m = sum(s) / sum(n), a ratio, and by the delta method its variance is W / (W - 1) *
    sum((s - m n)^2) / sum(n)^2 (Cochran, Sampling Techniques, 3rd edition, section 6.4, without its correction for finite
    populations). None for a single window. Windows of one text are not independent either: the error is that of another
    stretch of the same text, not of another text.
    """
    total = sum(counts)
    mean = sum(sums) / total
    if len(sums) < 2:
        return mean, None
    squares = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return mean, math.sqrt(len(sums) / (len(sums) - 1) * squares) / total


def mean_of_items(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of independent items and its standard error: deviation over sqrt(n); None for a single one."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def share(right: int, count: int) -> tuple[float, float]:
    """right / count = p and its binomial standard error sqrt(p (1 - p) / count), which is 0 where p is 0 or 1."""
    p = right / count
    return p, math.sqrt(p * (1 - p) / count)
