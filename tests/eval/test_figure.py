"""Standard errors against textbook cases and against a bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lowbit.eval.figure import mean_of_items, mean_of_windows, share


def test_equal_windows_are_a_plain_mean():
    means = np.array([1.0, 2.0, 4.0, 9.0])
    mean, error = mean_of_windows(list(10 * means), [10] * 4)
    assert mean == 4.0
    assert error == pytest.approx(means.std(ddof=1) / 2)
    assert mean_of_windows([3.0], [2]) == (1.5, None)


def test_unequal_windows_agree_with_a_bootstrap_over_windows():
    random = np.random.default_rng(0)
    counts = random.integers(5, 50, 200)
    sums = counts * random.normal(3, 0.5, 200) + random.normal(0, 2, 200)
    drawn = random.integers(0, 200, (4000, 200))
    bootstrap = (sums[drawn].sum(1) / counts[drawn].sum(1)).std()
    mean, error = mean_of_windows(sums.tolist(), counts.tolist())
    assert mean == pytest.approx(sums.sum() / counts.sum())
    assert error == pytest.approx(bootstrap, rel=0.08)


def test_items_and_shares():
    assert mean_of_items([1.0]) == (1.0, None)
    assert mean_of_items([1.0, 3.0]) == (2.0, pytest.approx(1.0))
    assert share(3, 12) == (0.25, pytest.approx(math.sqrt(0.25 * 0.75 / 12)))
    assert share(5, 5) == (1.0, 0.0)
