"""References in plain torch of a language model's small operations: embedding, norm, residual addition, gate.

They round where Transformers' modules round, so that a step composed of them equals the forward pass of Transformers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu, silu

Gate = Literal["silu", "gelu_tanh", "relu"]
GATES: tuple[Gate, ...] = ("silu", "gelu_tanh", "relu")
"""Activation functions of a gate, or of an MLP without a gate: x / (1 + exp(-x)), GELU by its tanh formula (Transformers'
gelu_pytorch_tanh), max(x, 0)."""

ZERO_CODE = 128
"""The 8-bit code of 0: codes are stored with an offset, as int8 in `formats`."""


def embed_rows_reference(
    tokens: Tensor, rows: Tensor | None, codes: Tensor, row_scale: Tensor | None, dtype: torch.dtype, scale: float,
    positions: Tensor | None = None, position_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns h [B, H] of `dtype`. Row b is row tokens[rows[b]] (without `rows`: tokens[b]) of `codes`, times `row_scale` [V]
    if given. It is multiplied by `scale`, rounded to `dtype`, and then, if `position_table` [P, H] is given, its position's row
    is added. The result of each of these three operations is rounded to `dtype`."""
    picked = tokens if rows is None else tokens[rows.long()]
    values = codes[picked.long()]
    if row_scale is not None:
        values = (values.float() - ZERO_CODE) * row_scale[picked.long()].float()[:, None]
    values = values.to(dtype)
    if scale != 1.0:
        values = values * torch.tensor(scale, dtype=dtype, device=values.device)
    if positions is None or position_table is None:
        return values
    return values + position_table[(positions if rows is None else positions[rows.long()]).long()]


def norm_reference(h: Tensor, gamma: Tensor, eps: float, offset: float, bias: Tensor | None = None) -> Tensor:
    """RMSNorm of h [.., H] in h's type. With offset 0 the normalised value is rounded, multiplied by gamma and rounded again
    (Llama and most later models). Else it is multiplied by (offset + gamma) in float32 and rounded once (Gemma). With a `bias`
    [H]: torch's LayerNorm, (h - mean) / sqrt(variance + eps) * gamma + bias in float32, rounded once."""
    if bias is not None:
        kind = torch.promote_types(h.dtype, torch.promote_types(gamma.dtype, bias.dtype))
        return layer_norm(h.to(kind), h.shape[-1:], gamma.to(kind), bias.to(kind), eps).to(h.dtype)
    values = h.float()
    normed = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    if offset == 0:
        return (gamma.float() * normed.to(h.dtype).float()).to(h.dtype)
    return (normed * (offset + gamma.float())).to(h.dtype)


def add_reference(h: Tensor, delta: Tensor | None, eps: float, offset: float, post_gamma: Tensor | None) -> None:
    """Adds delta to h in place, rounded to h's dtype. With `post_gamma` delta is first RMS-normed."""
    if delta is not None:
        h += delta if post_gamma is None else norm_reference(delta, post_gamma, eps, offset)


def scaled_reference(h: Tensor, gamma: Tensor, offset: float, factor: float) -> tuple[Tensor, Tensor]:
    """x = h * (offset + gamma) * factor, rounded once, and the sums of squares of h, float32 [1, B]."""
    values = h.float()
    return (values * (offset + gamma.float()) * factor).to(h.dtype), values.square().sum(dim=-1)[None]


def gate_reference(gate: Tensor, up: Tensor | None, function: str) -> Tensor:
    """f(gate), rounded to its type, times up, rounded again; without `up`, f(gate) alone."""
    if function == "relu":
        made = relu(gate)
    else:
        made = (silu(gate.float()) if function == "silu" else gelu(gate.float(), approximate="tanh")).to(gate.dtype)
    return made if up is None else made * up
