"""Gate and up of an MLP as one matrix, for a product with the gate in its epilogue (kernels/parts/epilogue.py).

Each row block of 16 rows has 8 gate rows, then the corresponding 8 up rows. A lane of mma.sync holds rows g and g + 8, so it
has both the gate and its up.

    row of the matrix   16 s + g           8 s + g of gate      0 <= g < 8
                        16 s + 8 + g       8 s + g of up
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats import PerBlock, PerChannel, PerGroup, PerTensor, QuantTensor, spread
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.pack.fragment import ROW_BLOCK, FragmentOrder, row_blocks_at_once
from lowbit.pack.weight import FragmentWeight, Scaling

HALF = ROW_BLOCK // 2


def alternate(gate: Tensor, up: Tensor) -> Tensor:
    """Returns [2 I, ..] of gate and up [I, ..], alternating 8 gate rows and 8 up rows. Raises ValueError unless 8 divides I."""
    if gate.shape != up.shape or gate.shape[0] % HALF:
        raise ValueError(f"gate and up have the same shape, a multiple of {HALF} rows; got {[*gate.shape]} and {[*up.shape]}")
    return torch.stack([gate.unflatten(0, (-1, HALF)), up.unflatten(0, (-1, HALF))], dim=1).flatten(0, 2)


def gated_refusals(gate: QuantTensor, up: QuantTensor) -> tuple[str, ...]:
    """Returns the reasons why gate and up cannot be one matrix; empty if they can."""
    reasons = []
    if gate.scheme != up.scheme:
        reasons.append(f"gate and up have one scheme, got {gate.scheme} and {up.scheme}")
    if gate.shape != up.shape:
        reasons.append(f"gate and up have one shape, got {gate.shape} and {up.shape}")
    if gate.shape[0] % HALF:
        reasons.append(f"row blocks have {HALF} rows of gate and {HALF} of up, {gate.shape[0]} rows are no multiple of {HALF}")
    for q in (gate, up):
        if q.low_rank is not None:
            reasons.append("a low-rank correction is no part of a product")
        reasons += [f"x is the norm's own output: no {what}" for what in q.input_transform.parts.words()]
    return tuple(dict.fromkeys(reasons))


def pack_gated(gate: QuantTensor, up: QuantTensor, scaling: Scaling | None = None) -> FragmentWeight:
    """Packs gate and up [I, K] as one matrix (2 I, K), with rows as in the module docstring. Raises ValueError with
    `gated_refusals`, if there are any.

    A scale per tensor becomes a scale per row, and scales of blocks become scales of groups; weights do not change. `scaling`
    as in `FragmentWeight.pack`.
    """
    reasons = gated_refusals(gate, up)
    if reasons:
        raise ValueError(f"gate and up cannot be packed as one matrix: {'; '.join(reasons)}")
    gate, up = with_scales_of_rows(gate), with_scales_of_rows(up)
    zero = None if gate.zero is None or up.zero is None else alternate(gate.zero, up.zero)
    codes = torch.empty((2 * gate.shape[0], gate.shape[1]), dtype=torch.uint8, device="meta")
    q = QuantTensor(codes, alternate(gate.scale, up.scale), zero, gate.scheme)
    return FragmentWeight.pack(q, _plane(gate, up), scaling)


def _plane(gate: QuantTensor, up: QuantTensor) -> Tensor:
    """Returns the codes of gate and up in fragment order. They are packed some rows at a time, since a concatenated matrix
    would be a second copy."""
    order, bits = FragmentOrder(MMA_M16N8K16_F16, gate.scheme.weight), gate.scheme.weight.bits
    (n, k), step = gate.shape, row_blocks_at_once(gate.shape[1], gate.codes.device)
    plane = torch.empty(order.plane_shapes(bits, (2 * n, k))[0], dtype=torch.int32, device=gate.codes.device)
    for target, *parts in zip(plane.split(step), *(q.codes.split(step * HALF) for q in (gate, up)), strict=True):
        target.copy_(order.pack(alternate(*parts), bits)[0])
    return plane


def with_scales_of_rows(q: QuantTensor) -> QuantTensor:
    """Returns the same weights with separate scales (and zeros) for each row."""
    granularity = q.scheme.granularity
    if not isinstance(granularity, (PerTensor, PerBlock)):
        return q
    rows = PerChannel() if isinstance(granularity, PerTensor) else PerGroup(granularity.k)
    block = rows.block(q.shape)[1]
    scale, zero = (None if t is None else spread(t, granularity, q.shape)[:, ::block] for t in (q.scale, q.zero))
    assert scale is not None
    return QuantTensor(q.codes, scale.contiguous(), zero, replace(q.scheme, granularity=rows))
