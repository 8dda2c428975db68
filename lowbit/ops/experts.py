"""The experts of a mixture: y of each token is the sum of the outputs of its experts' MLPs, weighted by the router.

On a GPU, weights are in the form of pack/expert.py, or for 8-bit activations of pack/expert_operand.py. Two products then
compute all experts together; only the weights of experts that have tokens are read. In all other cases the experts that have
tokens are computed one by one, with weights in the same forms as those of dense layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from lowbit.ops.gemm import gemm
from lowbit.ops.quantize_activations import Activations
from lowbit.ops.table import UnsupportedProblem
from lowbit.pack.gemm_weight import GemmWeight

if TYPE_CHECKING:
    from lowbit.ops.route import Routing
    from lowbit.pack.expert import ExpertWeight
    from lowbit.pack.expert_operand import ExpertOperandWeight

Gate = Literal["none", "silu", "gelu_tanh", "clamped_swiglu"]
"""The function of gate and up that a product computes in its epilogue. "silu": silu(gate) * up. "gelu_tanh": the same with
GELU. "clamped_swiglu": that of gpt-oss, (up + 1) * gate * sigmoid(1.702 gate), with gate clamped to at most 7 and up to -7..7.
"none": the product has no gate, and another function computes it."""

Input = Tensor | Activations
Stacked: TypeAlias = "ExpertWeight | ExpertOperandWeight"
"""The weights of all experts of a layer, for x in 16 bits or quantized."""

Multiply = Callable[[int, Input], Tensor]
"""A function (expert, rows) that returns the product of the rows with the matrix of the expert, plus its bias."""


def expert_mlp(
    x: Input, experts: Tensor, weights: Tensor, gate_up: Stacked | Sequence[GemmWeight],
    down: Stacked | Sequence[GemmWeight], *, gate: Gate = "silu", apply_gate: Callable[[Tensor], Tensor] | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, inner: Callable[[Tensor], Input] | None = None,
    residual: Tensor | None = None, routing: Routing | None = None, batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Returns y [T, N]: y[t] = sum over s of weights[t, s] * (down_e . gate(gate_up_e . x[t] + bias_e) + bias_e), where e is
    experts[t, s].

    x [T, K] is in 16 or 32 bits or quantized; the input transform of the weights must be applied already. experts: int
    [T, top_k]; an index that belongs to no expert here, such as one of another rank, adds nothing. weights: float [T, top_k],
    from the router. gate_up and down: the weights of all experts in one object, or a sequence with a matrix for each. gate: the
    function in the epilogue of the first product. It requires an `ExpertWeight` whose rows of gate and up alternate
    (pack/gated.py), and a bias in the same order. apply_gate: the function that is applied to the output of the first product
    if the epilogue has none, as with a matrix for each expert; rows of gate and up then have the model's order. inner: the
    transform of the second product's input. residual [T, N] is added. routing: the result of `ops.route` for these experts and
    weights, if there is one. batch_invariant: a row of y has the same bits in every batch; requires weights in one object.

    Slots are summed in the order s = 0, 1, .. in float32 and rounded once. Raises ValueError for tensors that do not fit
    together.
    """
    _check(x, experts, weights)
    if batch_invariant and (isinstance(gate_up, Sequence) or isinstance(down, Sequence)):
        raise UnsupportedProblem("experts: one after another, their products are not batch-invariant")
    if isinstance(gate_up, Sequence) or isinstance(down, Sequence):
        if not isinstance(gate_up, Sequence) or not isinstance(down, Sequence) or apply_gate is None:
            raise ValueError("experts: gate_up and down have one form, and a matrix for each expert goes with apply_gate")
        return multiply_experts(
            x, experts, weights, len(gate_up), _products(gate_up, gate_up_bias), apply_gate, _products(down, down_bias),
            inner=inner, residual=residual,
        )  # fmt: skip
    from lowbit.kernels.choose.experts import tile_rows_for
    from lowbit.ops.expert_gemm import sum_slots
    from lowbit.ops.route import group

    tokens, top_k = experts.shape
    absent = None
    if routing is None:
        tile_rows = tile_rows_for(tokens, top_k, gate_up.experts, gate_up.scheme.weight.bits, batch_invariant)
        routing = group(experts.contiguous(), weights.contiguous(), gate_up.experts, tile_rows=tile_rows)
        absent = routing.experts
    h = multiply_slots(x, gate_up, routing, gate_up_bias, gate=gate, batch_invariant=batch_invariant)
    if gate == "none":
        assert apply_gate is not None
        h = apply_gate(h)
    y = multiply_slots(
        h if inner is None else inner(h), down, routing, down_bias, per_slot=True, weighted=True,
        routed_before=True, batch_invariant=batch_invariant,
    )  # fmt: skip
    return sum_slots(y, top_k, residual, experts=absent)


def multiply_slots(
    x: Input, w: Stacked, routing: Routing, bias: Tensor | None, *, gate: Gate = "none", per_slot: bool = False,
    weighted: bool = False, routed_before: bool = False, batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Returns y [T * top_k, N], a row for each slot. `expert_gemm` computes it for x in 16 bits, `scaled_expert_gemm` for
    quantized x.

    Rows of quantized x have the same bits in every batch, with or without `batch_invariant`. Raises ValueError for a weight in
    the other form, and UnsupportedProblem for a gate with quantized x.
    """
    from lowbit.ops.expert_gemm import expert_gemm
    from lowbit.ops.scaled_expert_gemm import scaled_expert_gemm
    from lowbit.pack.expert_operand import ExpertOperandWeight

    if isinstance(w, ExpertOperandWeight) == isinstance(x, Tensor):
        raise ValueError("experts: an ExpertWeight is multiplied by x in 16 bits, an ExpertOperandWeight by quantized x")
    if isinstance(x, Tensor):
        assert not isinstance(w, ExpertOperandWeight)
        return expert_gemm(
            x, w, routing, bias, gate=gate, per_slot=per_slot, weighted=weighted, routed_before=routed_before,
            batch_invariant=batch_invariant,
        )  # fmt: skip
    assert isinstance(w, ExpertOperandWeight)
    if gate != "none":
        raise UnsupportedProblem("experts: products with 8-bit activations have no gate")
    return scaled_expert_gemm(x, w, routing, bias, per_slot=per_slot, weighted=weighted)


@torch.compiler.disable(reason="the experts that are hit depend on the data")
def multiply_experts(
    x: Input, experts: Tensor, weights: Tensor, count: int, gate_up: Multiply, gate: Callable[[Tensor], Tensor],
    down: Multiply, *, inner: Callable[[Tensor], Input] | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the same as `expert_mlp` for `count` experts, given functions that multiply the rows of one expert. The result is
    differentiable if these functions are.

    It synchronizes with a GPU, since the host reads how many rows each expert has.
    """
    _check(x, experts, weights)
    top_k = experts.shape[1]
    order, rows = _slots_by_expert(experts, count)
    parts = []
    for e, slots in rows:
        h = gate(gate_up(e, take_rows(x, slots // top_k)))
        parts.append(down(e, h if inner is None else inner(h)))
    if not parts:  # there are no tokens, or none that use these experts
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual.clone()
    y = torch.cat(parts).float()
    factors = weights.reshape(-1).float()[order][:, None]
    summed = residual.float() if residual is not None else y.new_zeros((x.shape[0], y.shape[1]))
    by_slot = y.new_zeros((experts.numel(), y.shape[1])).index_copy(0, order, y * factors).view(-1, top_k, y.shape[1])
    for s in range(top_k):
        summed = summed + by_slot[:, s]
    return summed.to(x.dtype)


def take_rows(x: Input, rows: Tensor) -> Input:
    """Returns the rows of x [T, K] with the indices `rows`. Scales and zeros per token are selected in the same way."""
    if isinstance(x, Tensor):
        return x[rows]

    def own(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.dim() < 2 else t[rows]

    scale = own(x.scale)
    assert scale is not None
    return Activations(x.codes[rows], scale, own(x.zero), None, x.dtype)


def _slots_by_expert(experts: Tensor, count: int) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Returns the slots sorted by expert, in ascending order within an expert, and (expert, its slots) for each expert that has
    slots."""
    numbers = experts.reshape(-1).long()
    valid = (numbers >= 0) & (numbers < count)
    order = torch.where(valid, numbers, count).argsort(stable=True)
    sizes = torch.bincount(numbers[valid], minlength=count).tolist()
    order = order[: sum(sizes)]
    parts = order.split([size for size in sizes if size])
    return order, list(zip((e for e, size in enumerate(sizes) if size), parts, strict=True))


def _products(matrices: Sequence[GemmWeight], bias: Tensor | None) -> Multiply:
    """Returns a function (expert, rows) that multiplies rows by the matrix of an expert."""
    return lambda e, x: gemm(x, matrices[e], None if bias is None else bias[e])


def _check(x: Input, experts: Tensor, weights: Tensor) -> None:
    """Raises ValueError unless x is [T, K], and experts and weights are [T, top_k]."""
    shapes = [tuple(t.shape) for t in (x, experts, weights)]
    fits = all(len(shape) == 2 for shape in shapes) and shapes[1] == shapes[2] and shapes[0][0] == shapes[1][0]
    if not fits or experts.is_floating_point():
        raise ValueError(
            f"experts: x is [T, K], experts (integers) and weights are [T, top_k]; got {shapes[0]}, {experts.dtype} "
            f"{shapes[1]} and {shapes[2]}"
        )
