"""Mixed precision of experts, an experiment: a scheme for each expert of a layer within a budget of bits.

An expert that many tokens reach adds more to the error of the layer's output, since its errors are added more often. It is
worth more bits only if its error falls fast enough with the bits; `expert_costs` measures error and bits of each scheme. Three
choices are compared for one budget: the same scheme for all, bits by the number of tokens alone (`by_hits`), and the least sum
of measured errors (`quantize.mixed.choose`). Checkpoints cannot hold such a mixture, because the product of all experts of a
layer takes one scheme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from lowbit.formats import Scheme
from lowbit.quantize.expert_layer import ExpertMatrices, RoutedInputs
from lowbit.quantize.mixed import SchemeCost, choose, stored_bits
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
    """Returns a scheme for each expert with at most `budget_bits` in all, chosen by the number of its tokens alone.

    The error of an expert is taken to be proportional to its tokens and to fall by a factor of 4 per bit, as the squared error
    of rounding does; `choose` then minimises the sum. Raises ValueError if even the fewest bits exceed the budget.
    """
    expected = {
        name: [replace(cost, error=tokens[name] * 4.0**-cost.scheme.weight.bits) for cost in own] for name, own in costs.items()
    }
    chosen = choose(expected, budget_bits)
    return {name: next(c for c in own if c.scheme == chosen[name].scheme) for name, own in costs.items()}
