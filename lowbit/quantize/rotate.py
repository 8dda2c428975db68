"""Rotations by Hadamard matrices: x R, with R = S H / sqrt(n), S random signs and H of ones and minus ones with H H^T = n I.

A rotation spreads outlier channels over all channels, so that a group of weights or a token of activations has a smaller range
for the same sum of squares. Sources: S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
arXiv:2404.00456; Z. Liu et al., "SpinQuant: LLM Quantization with Learned Rotations", arXiv:2405.16406. H is the Kronecker
product of one matrix of Paley's (R. Paley, "On Orthogonal Matrices", 1933) and of Sylvester's, so x R costs no n x n product.
"""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENTS_AT_ONCE = 1 << 22
"""Elements that are rotated at a time, in float64."""
LARGEST = 128
"""Paley's matrix has a larger order than this only if no smaller one exists, since order n takes n products per element."""


class Rotation:
    """An orthogonal matrix R [n, n] determined by a seed.

    n = 2^i * m, where m is one of: 1; q + 1 for a prime q = 4k + 3; 2 (q + 1) for a prime q = 4k + 1. Raises ValueError for
    other n.
    """

    def __init__(self, n: int, seed: int) -> None:
        self.factors = rotation_factors(n)
        bits = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed))
        self.signs = (2 * bits - 1).double()

    def apply(self, x: Tensor, dim: int = -1) -> Tensor:
        """Returns x R along `dim` in float32, computed in float64; for a weight [N, K] and dim 0 that is R^T x."""
        moved = x.movedim(dim, -1)
        rows = moved.reshape(-1, moved.shape[-1])
        out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
        for block, target in zip(rows.split(step := max(1, ELEMENTS_AT_ONCE // rows.shape[1])), out.split(step), strict=True):
            target.copy_(self._product(block.double()))
        return out.reshape(moved.shape).movedim(-1, dim).contiguous()

    def _product(self, rows: Tensor) -> Tensor:
        y = (rows * self.signs.to(rows.device)).reshape(-1, *(len(factor) for factor in self.factors))
        for axis, factor in enumerate(self.factors, 1):
            y = torch.tensordot(y, factor.to(y.device), dims=([axis], [0])).movedim(-1, axis)
        return y.reshape(rows.shape) / rows.shape[1] ** 0.5


def rotation_factors(n: int) -> list[Tensor]:
    """Returns matrices of ones and minus ones, float64, whose Kronecker product is a Hadamard matrix of order n.

    The first is Paley's, the largest of at most `LARGEST` or else the smallest; the others are Sylvester's, at most of order
    64. Raises ValueError if there is none.
    """
    size = n & -n  # the largest power of two in n
    first = None
    for rest in (n // size << i for i in range(size.bit_length())):
        if first is not None and rest > LARGEST:
            break
        paley = _paley(rest)
        first = paley if paley is not None else first
    if first is None:
        raise ValueError(f"no Hadamard matrix of order {n:,} is known here, by which {n:,} channels could be rotated")
    factors, left = [first], n // len(first)
    while left > 1:
        size = min(left, 64)
        factors.append(_sylvester(size))
        left //= size
    return factors


def _paley(n: int) -> Tensor | None:
    """Returns a Hadamard matrix of order n by one of Paley's constructions from the quadratic residues of a prime, or [[1]] for
    n = 1; None if neither construction has this order."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    one = _conference(n - 1) if n % 4 == 0 and (n - 1) % 4 == 3 else None
    if one is not None:
        return one + torch.eye(n, dtype=torch.float64)
    two = _conference(n // 2 - 1) if n % 4 == 0 and (n // 2 - 1) % 4 == 1 else None
    if two is None:
        return None
    sums = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    own = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(two, sums) + torch.kron(torch.eye(n // 2, dtype=torch.float64), own)


def _conference(q: int) -> Tensor | None:
    """Returns C [q + 1, q + 1] with C C^T = q I, zeros on the diagonal and ones or minus ones elsewhere; None if q is no odd
    prime. C is symmetric for q = 4k + 1 and skew for q = 4k + 3."""
    if q < 3 or q % 2 == 0 or any(q % d == 0 for d in range(3, int(q**0.5) + 1, 2)):
        return None
    residue = torch.full((q,), -1.0, dtype=torch.float64)
    residue[torch.arange(1, q) ** 2 % q] = 1
    residue[0] = 0
    i = torch.arange(q)
    c = torch.ones(q + 1, q + 1, dtype=torch.float64)
    c[0, 0], c[1:, 1:] = 0, residue[(i[:, None] - i) % q]
    if q % 4 == 3:
        c[1:, 0] = -1
    return c


def _sylvester(n: int) -> Tensor:
    """Returns Sylvester's Hadamard matrix of order n, a power of two."""
    h = torch.ones(1, 1, dtype=torch.float64)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(h) < n:
        h = torch.kron(h, pair)
    return h
