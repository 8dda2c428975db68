"""Bits for each expert: by the tokens that reach it, and by its error."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.quantize.expert_bits import by_hits, expert_costs
from lowbit.quantize.mixed import choose
from lowbit.quantize.rtn import rtn
from tests.quantize.test_expert_layer import HIDDEN, INNER, E, matrices, routed

SCHEMES = [parse_scheme(f"w{bits}a16_g16") for bits in (3, 4, 5)]


def test_costs_are_errors_of_the_output():
    costs, of, inputs = expert_costs(matrices(), routed(), SCHEMES), matrices(), routed()
    assert len(costs) == E and all([cost.scheme for cost in own] == SCHEMES for own in costs)
    sizes, errors = 0.0, []
    for e in range(E):
        x, p = inputs.of(e)
        y = of.output(e, of.hidden(e, x)) * p
        rounded = [rtn(w[e], SCHEMES[1]).dequantize() for w in (of.gate_up, of.down)]
        errors.append(float((of.output(e, of.hidden(e, x, rounded[0]), rounded[1]) * p - y).square().sum()))
        sizes += float(y.square().sum())
    assert [own[1].error for own in costs] == pytest.approx([error / sizes for error in errors], rel=1e-4)
    weights = 3 * INNER * HIDDEN
    # each 16 weights have a 16-bit scale, one bit for each weight
    assert [cost.bits for cost in costs[0]] == [weights * (bits + 1) for bits in (3, 4, 5)]


def test_equal_budgets():
    costs = {str(e): own for e, own in enumerate(expert_costs(matrices(), routed(), SCHEMES))}
    tokens = {str(e): count for e, count in enumerate(routed().tokens)}
    budget = sum(own[1].bits for own in costs.values())
    hits, least = by_hits(costs, tokens, budget), choose(costs, budget)
    for chosen in (hits, least):
        assert sum(cost.bits for cost in chosen.values()) <= budget
    assert sum(cost.error for cost in least.values()) <= sum(own[1].error for own in costs.values()) * (1 + 1e-9)


def test_more_tokens_get_more_bits():
    costs = {str(e): own for e, own in enumerate(expert_costs(matrices(), routed(), SCHEMES))}
    one = costs["0"][1].bits - costs["0"][0].bits
    fewest = sum(own[0].bits for own in costs.values())
    tokens = {"0": 5, "1": 50, "2": 500, "3": 50}
    assert [cost.scheme.weight.bits for cost in by_hits(costs, tokens, fewest).values()] == [3, 3, 3, 3]
    assert [c.scheme.weight.bits for c in by_hits(costs, tokens, fewest + 2 * one).values()] == [3, 3, 5, 3]
    assert [c.scheme.weight.bits for c in by_hits(costs, tokens, fewest + 5 * one).values()] == [3, 5, 5, 4]
    assert all(cost in costs[name] for name, cost in by_hits(costs, tokens, fewest + 2 * one).items())  # measured errors
    with pytest.raises(ValueError, match=r"the smallest candidates take .* bits, the budget is 10"):
        by_hits(costs, tokens, 10)


def test_an_expert_without_tokens_costs_nothing():
    costs = expert_costs(matrices(), routed(300, only=2), SCHEMES)
    assert [cost.error for cost in costs[3]] == [0, 0, 0] and costs[0][0].error > costs[0][2].error > 0
    assert torch.tensor([[cost.error for cost in own] for own in costs]).isfinite().all()
