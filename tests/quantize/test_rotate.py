"""Hadamard matrices of every supported order, and rotations that are orthogonal and reproducible from a seed."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from lowbit.quantize.rotate import ELEMENTS_AT_ONCE, Rotation, rotation_factors

HIDDEN = (
    64,
    80,
    96,
    128,
    576,
    768,
    896,
    960,
    1024,
    1152,
    1280,
    1408,
    1536,
    2048,
    2560,
    3072,
    3584,
    4096,
    4608,
    5120,
    5376,
    6144,
    6656,
    7168,
    8192,
)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 12, 20, 24, 28, 36, 40, 44, 60, 64, 76, 80, 128, 576, 896])
def test_rows_are_orthogonal_signs(n):
    h = reduce(torch.kron, rotation_factors(n))
    assert h.shape == (n, n) and bool((h.abs() == 1).all())
    assert torch.equal(h @ h.T, n * torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("n", HIDDEN)
def test_channels_of_known_models_can_be_rotated(n):
    factors = rotation_factors(n)
    assert torch.tensor([len(f) for f in factors]).prod() == n
    assert all(len(f) <= 256 for f in factors)  # per number, a rotation takes as many products as the sum of these lengths
    assert all(torch.equal(f @ f.T, len(f) * torch.eye(len(f), dtype=torch.float64)) for f in factors)


@pytest.mark.parametrize("n", [3, 7, 18, 92, 100])
def test_orders_without_a_known_matrix(n):
    with pytest.raises(ValueError, match=f"no Hadamard matrix of order {n} is known"):
        rotation_factors(n)


@pytest.mark.parametrize("n", [1, 2, 12, 28, 64, 96, 576])
def test_a_rotation_is_orthogonal(n):
    r = Rotation(n, 5)
    matrix = r.apply(torch.eye(n)).double()
    assert (matrix @ matrix.T - torch.eye(n)).abs().max() <= 1e-6
    assert torch.allclose(matrix.abs() * n**0.5, torch.ones(()).double(), atol=1e-6)
    x = torch.randn(3, 5, n, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(r.apply(x).double(), x.double() @ matrix, atol=1e-5)
    w = torch.randn(n, 7, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(r.apply(w, 0).double(), matrix.T @ w.double(), atol=1e-5)
    assert torch.allclose(r.apply(x) @ r.apply(w, 0), x @ w, atol=1e-4)


def test_a_seed_is_a_rotation():
    x = torch.randn(4, 576, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Rotation(576, 1).apply(x), Rotation(576, 1).apply(x))
    assert not torch.equal(Rotation(576, 1).apply(x), Rotation(576, 2).apply(x))


def test_rows_go_in_pieces(monkeypatch):
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    whole = Rotation(64, 0).apply(x)
    monkeypatch.setattr("lowbit.quantize.rotate.ELEMENTS_AT_ONCE", 128)
    assert torch.equal(Rotation(64, 0).apply(x), whole) and x.numel() < ELEMENTS_AT_ONCE


def test_an_outlier_is_spread():
    x = torch.zeros(1, 576)
    x[0, 17] = 100.0
    spread = Rotation(576, 0).apply(x)
    assert torch.allclose(spread.abs(), torch.tensor(100 / 24.0)) and spread.norm() == pytest.approx(100)
