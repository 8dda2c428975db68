"""Inputs and weights for the tests of algorithms that look at inputs."""

from __future__ import annotations

import torch

from lowbit.quantize import InputStatistics


def inputs(k, rows=300, seed=0):
    """x [rows, k] with correlated channels of different sizes."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=g) * torch.linspace(0.2, 2, k)[torch.randperm(k, generator=g)]
    return torch.randn(rows, k, generator=g) @ mixing


def weights(n, k, seed=1):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def statistics(x, keep=0):
    s = InputStatistics(x.shape[1], keep=keep)
    for part in x.split(70):
        s.add(part)
    return s


def output_error(difference, x):
    """Squared norm of x . difference^T, computed in float64 by multiplying."""
    return float((x.double() @ difference.double().T).square().sum())
