"""A measured number with its standard error and sample size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """The `value` of a `metric`, measured over `count` items of a `unit` such as tokens, problems or documents.
    `standard_error` is None if it is undefined."""

    metric: str
    value: float
    standard_error: float | None
    count: int
    unit: str
    better: Literal["lower", "higher"]


def mean_of_windows(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None]:
    """Returns the mean over all tokens and its standard error, from the sum and the number of tokens of each window.

    Tokens of one window share their context, so windows are the sampling units. With W windows of sums s and counts n, the mean
    is m = sum(s) / sum(n), and by the delta method its variance is W / (W - 1) * sum((s - m n)^2) / sum(n)^2 (Cochran,
    Sampling Techniques, 3rd edition, section 6.4, without the correction for finite populations). The error is None for a
    single window. It covers other parts of the same text, not other texts.
    """
    total = sum(counts)
    mean = sum(sums) / total
    if len(sums) < 2:
        return mean, None
    squares = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return mean, math.sqrt(len(sums) / (len(sums) - 1) * squares) / total


def mean_of_items(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean of independent items and its standard error, deviation / sqrt(n); None for a single item."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def share(right: int, count: int) -> tuple[float, float]:
    """Returns p = right / count and its binomial standard error sqrt(p (1 - p) / count), which is 0 for p = 0 and p = 1."""
    p = right / count
    return p, math.sqrt(p * (1 - p) / count)
