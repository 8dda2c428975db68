"""Mixed bits stay within the budget and are given where they help most. The result is as good as trying everything."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.quantize import rtn
from lowbit.quantize.mixed import SchemeCost, choose, sensitivity, stored_bits
from tests.quantize.data import weights

SCHEMES = [parse_scheme(name) for name in ("w2a16_g32", "w3a16_g32", "w4a16_g32", "w8a16_g32")]


def test_sensitivity_by_hand():
    ws = [weights(16, 64), weights(8, 64, 2)]
    fisher = [weights(16, 64, 3).square(), weights(8, 64, 4).square()]
    rows = sensitivity(ws, fisher, SCHEMES)
    for row, scheme in zip(rows, SCHEMES, strict=True):
        qs = [rtn(w, scheme, search="mse") for w in ws]
        differences = [(q.dequantize() - w).double() for q, w in zip(qs, ws, strict=True)]
        expected = sum(float((f * d * d).sum()) / 2 for d, f in zip(differences, fisher, strict=True))
        assert row.scheme == scheme and row.bits == 8 * sum(q.nbytes for q in qs)
        assert abs(row.error / expected - 1) < 1e-5
    corrected = sensitivity(ws, fisher, SCHEMES, low_rank=3)
    assert [c.bits - r.bits for c, r in zip(corrected, rows, strict=True)] == [16 * 3 * (16 + 64 + 8 + 64)] * len(SCHEMES)


@pytest.mark.parametrize(
    "name", ["w4a16_g32", "w3a16_g48_z", "w4a16_g16_fz", "w8a16", "w5e2m2a16", "w8e4m3a16_b16x16", "w4a16_t"]
)
def test_stored_bits_are_those_of_a_rounded_weight(name):
    q = rtn(weights(20, 75), name)
    assert stored_bits((20, 75), q.scheme) == 8 * q.nbytes
    assert stored_bits((20, 75), q.scheme, 2) == 8 * q.nbytes + 16 * 2 * 95


def test_the_sensitive_layer_gets_the_bits():
    one = torch.ones(16, 64)
    units = {
        "calm": sensitivity([weights(16, 64)], [0.01 * one], SCHEMES),
        "sensitive": sensitivity([weights(16, 64)], [one], SCHEMES),
    }
    budget = 5.5 * 2 * 16 * 64
    chosen = choose(units, budget)
    assert sum(c.bits for c in chosen.values()) <= budget
    assert chosen["sensitive"].scheme.weight.bits > chosen["calm"].scheme.weight.bits


@pytest.mark.parametrize("seed", range(20))
def test_within_a_step_of_the_best(seed):
    g = torch.Generator().manual_seed(seed)
    units = {}
    for name in "abcdef":
        bits = (torch.randperm(20, generator=g)[:4] + 1).sort().values.tolist()
        errors = torch.rand(4, generator=g).sort(descending=True).values.tolist()
        units[name] = [SchemeCost(s, e, b) for s, e, b in zip(SCHEMES, errors, bits, strict=True)]
    budget = sum(min(c.bits for c in unit) for unit in units.values()) + 25
    chosen = choose(units, budget)
    assert sum(c.bits for c in chosen.values()) <= budget
    every = itertools.product(*units.values())
    best = min(sum(c.error for c in row) for row in every if sum(c.bits for c in row) <= budget)
    # The relaxed problem is at least as good as `best`, and greedy is at most one step of one unit from it.
    largest = max(a.error - b.error for unit in units.values() for a, b in itertools.combinations(unit, 2))
    assert best <= sum(c.error for c in chosen.values()) <= best + largest


def test_a_candidate_that_is_larger_and_worse_is_never_taken():
    a, b, c, _ = SCHEMES
    units = {"x": [SchemeCost(a, 1.0, 10), SchemeCost(b, 2.0, 20), SchemeCost(c, 0.5, 30)]}
    assert choose(units, 100)["x"].bits == 30 and choose(units, 29)["x"].bits == 10


def test_too_small_a_budget_is_said():
    with pytest.raises(ValueError, match="smallest candidates take 10 bits, the budget is 9"):
        choose({"x": [SchemeCost(SCHEMES[0], 1.0, 10)]}, 9)
