"""Products of experts in plain torch: the reference of the kernels, and the CPU implementation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from lowbit.kernels.reference.elementwise import norm_reference
from lowbit.pack.expert import ExpertWeight
from lowbit.pack.expert_operand import ExpertOperandWeight

CLAMP, ALPHA = 7.0, 1.702
"""Constants of "clamped_swiglu": gpt-oss's `limit` and `alpha`."""


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=CLAMP)
    return (up.clamp(-CLAMP, CLAMP) + 1) * gate * torch.sigmoid(ALPHA * gate)


EXPERT_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": _clamped_swiglu,
}
"""Gates of an expert's MLP as functions of gate and up."""


def expert_gemm_reference(
    x: Tensor, w: ExpertWeight | ExpertOperandWeight, experts: Tensor, weights: Tensor | None = None,
    bias: Tensor | None = None, *, gate: str = "none", weighted: bool = False, dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """y [slots, N], or [slots, N / 2] with a gate, in `dtype`: for each slot its row of x times its expert's weights.

    A slot is one (token, choice) pair: slot t * top_k + s is the s-th expert of token t.
    x is [T, K], or [T * top_k, K] with a row for each slot; experts [T, top_k]; weights, with `weighted`, [T, top_k]; bias [E,
    N]. Gate and up alternate as pack/gated.py has them. Experts are dequantized one at a time; experts without slots are
    skipped.
    """
    flat = experts.flatten().long()
    of_slot = torch.arange(len(flat), device=x.device) // (len(flat) // max(len(x), 1) or 1)
    n = w.shape[0]
    y = torch.empty((len(flat), n if gate == "none" else n // 2), dtype=dtype, device=x.device)
    for e in flat.unique().tolist():
        slots = torch.nonzero(flat == e).flatten()
        made = x[of_slot[slots]].to(dtype) @ w.expert(e).unpack().dequantize(dtype).T
        if bias is not None:
            made = made + bias[e].to(dtype)
        if gate != "none":
            made = EXPERT_GATES[gate](*(part.flatten(1) for part in made.unflatten(1, (-1, 2, 8)).unbind(2)))
        if weighted:
            assert weights is not None
            made = made * weights.flatten()[slots].to(dtype)[:, None]
        y[slots] = made
    return y


def sum_slots_reference(
    y: Tensor, top_k: int, residual: Tensor | None = None, experts: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Returns [T, N] in y's type: each token's slots are summed in float32 in order, without those of negative `experts`
    [T, top_k], then the residual [T, N] is added; one rounding."""
    if experts is not None:
        y = y.masked_fill(experts.reshape(-1, 1) < 0, 0)
    parts = y.unflatten(0, (-1, top_k)).float().unbind(1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return (total if residual is None else total + residual.float()).to(y.dtype)


def sum_norm_reference(
    h: Tensor, y: Tensor, top_k: int, gamma: Tensor, eps: float, shared: Tensor | None = None, share: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Adds the sum of the slots of y [T * top_k, N] to h [T, N] in place. Returns x [T, N], the RMSNorm of the new h by gamma.

    With `shared` [T, N], shared * sigmoid(share [T, 1]) is added too. Sums are in float32: slot 0 first, then the shared
    expert, h last. h is rounded once.
    """
    parts = list(y.unflatten(0, (-1, top_k)).float().unbind(1))
    if shared is not None:
        assert share is not None
        parts.append(shared.float() * share.float().sigmoid())
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    h.copy_(total + h.float())
    return norm_reference(h, gamma, eps, 0.0)
