"""Mixed precision of experts, an experiment: a scheme for each expert of a layer within a budget of bits.

An expert that many tokens reach adds more to the error of the layer's output, since its errors are added more often. Whether it
is worth more bits is a question of how that error falls with the bits; `expert_costs` measures both. Three answers are compared
for one budget: the same scheme for all, more bits for the experts that are hit most (`by_hits`), and the least sum of errors
(`quantize.mixed.choose`). The product of all experts of a layer takes one scheme, so checkpoints hold no such mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lowbit.formats import Scheme
from lowbit.quantize.expert_layer import ExpertMatrices, RoutedInputs
from lowbit.quantize.mixed import SchemeCost, stored_bits
from lowbit.quantize.rtn import rtn


@torch.no_grad()
def expert_costs(matrices: ExpertMatrices, inputs: RoutedInputs, schemes: Sequence[Scheme]) -> list[list[SchemeCost]]:
    """Returns the cost of each scheme for each expert of a layer, whose weights are rounded to nearest.

    The error is the squared error of the expert's outputs times the router's weights, summed over its tokens and divided by the
    squared outputs of all experts. An expert that no token reaches has the error 0.
    """
    errors, sizes = [], 0.0
    for e in range(matrices.experts):
        x, weights = inputs.of(e)
        expected = matrices.output(e, matrices.hidden(e, x)) * weights
        sizes += float(expected.double().square().sum())
        own = []
        for scheme in schemes:
            gate_up, down = (rtn(w[e], scheme).dequantize() for w in (matrices.gate_up, matrices.down))
            actual = matrices.output(e, matrices.hidden(e, x, gate_up), down) * weights
            own.append(float((actual - expected).double().square().sum()))
        errors.append(own)
    shapes = [(weight.shape[1], weight.shape[2]) for weight in (matrices.gate_up, matrices.down)]
    bits = [sum(stored_bits(shape, scheme) for shape in shapes) for scheme in schemes]
    return [
        [SchemeCost(scheme, error / max(sizes, 1e-30), size) for scheme, error, size in zip(schemes, own, bits, strict=True)]
        for own in errors
    ]


def by_hits(costs: Mapping[str, Sequence[SchemeCost]], tokens: Mapping[str, int], budget_bits: float) -> dict[str, SchemeCost]:
    """Returns a scheme for each expert with at most `budget_bits` in all: more bits for experts that more tokens reach.

    Starts with the fewest bits everywhere. The experts in the order of their tokens, most first, take the next scheme while it
    fits; then all take the one after it. Raises ValueError if even the fewest bits exceed the budget.
    """
    sorted_costs = {name: sorted(own, key=lambda cost: cost.bits) for name, own in costs.items()}
    chosen = {name: own[0] for name, own in sorted_costs.items()}
    used = sum(cost.bits for cost in chosen.values())
    if used > budget_bits:
        raise ValueError(f"the smallest schemes take {used:,} bits, the budget is {budget_bits:,.0f}; allow more bits")
    order = sorted(costs, key=lambda name: (-tokens[name], name))
    for step in range(1, max(len(own) for own in sorted_costs.values())):
        for name in order:
            own = sorted_costs[name]
            more = own[step].bits - chosen[name].bits if step < len(own) else 0
            if 0 < more <= budget_bits - used and chosen[name] is own[step - 1]:
                chosen[name], used = own[step], used + more
    return chosen
