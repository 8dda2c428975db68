"""What one of several GPUs holds of a quantized matrix, and several matrices that read one x as one.

Tensor parallelism gives each of R ranks a part of the output channels (rows of w) or of the input channels (columns), whose
partial sums are added. A part is a `QuantTensor` of its own that means exactly what these rows or columns mean in the whole:

- K / R that is no multiple of the group gets scales repeated at gcd(group, K / R): more bytes, the same weights. Blocks too.
- Columns in another order (GPTQ's act-order) are scattered over all channels. A rank takes those that meet its channels, each
  group filled up to a multiple of `ORDERED_GROUP` with codes of weight 0, and an index that says which of its channels each of
  them meets. With one scale for each row or for all weights there is nothing to keep together: the columns are sorted instead.
- A calibrated scale of x stays that of the whole x; one found at each call is that of the rank's part, at most as large.
- A low-rank correction is split with the side that is split.
- x that is rotated in blocks of channels is split between blocks, and not where columns are scattered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.granularity import PerBlock, PerChannel, PerGroup, PerTensor, scale_shape
from lowbit.formats.number import IntFormat
from lowbit.formats.scheme import ZeroPoint
from lowbit.formats.tensor import LowRank, QuantTensor

ORDERED_GROUP = 16
"""Columns to a multiple of which groups are filled up where act-order is split: the smallest group of the kernels."""

Range = tuple[int, int]
"""Begin and end, as of a slice."""


def part_range(total: int, part: int, rank: int, ranks: int) -> Range:
    """Which of `total` channels `rank` holds when each of `ranks` holds `part` of them.

    Ranks hold different parts in order; where `part` times `ranks` is more than `total`, each part is held by as many ranks
    that follow each other (heads of keys and values, of which there are fewer than ranks). Raises ValueError for other sizes.
    """
    if part < 1 or total % part or ranks % (total // part):
        raise ValueError(f"{total} channels cannot be split into parts of {part} for {ranks} ranks")
    begin = rank // (ranks // (total // part)) * part
    return begin, begin + part


def rows_of(q: QuantTensor, ranges: Sequence[Range]) -> QuantTensor:
    """The output channels in `ranges`, one after the other; of blocks too, which become smaller where a range cuts one."""
    n = q.shape[0]
    if list(ranges) == [(0, n)]:
        return q
    taken = [slice(*each) for each in ranges]
    held: dict[str, Any] = {"codes": torch.cat([q.codes[rows] for rows in taken])}
    scheme, granularity = q.scheme, q.scheme.granularity
    if not isinstance(granularity, PerTensor):
        at = torch.cat([torch.arange(*each, device=q.scale.device) for each in ranges])
        if isinstance(granularity, PerBlock):
            ends = [end for begin, end in ranges[:-1]] + [end for _, end in ranges[-1:] if end < n]
            size = math.gcd(granularity.n, *(begin for begin, _ in ranges), *ends)
            scheme = replace(scheme, granularity=PerBlock(size, granularity.k))
            at = at[::size] // granularity.n
        held |= {"scale": q.scale[at], "zero": None if q.zero is None else q.zero[at]}
    if q.low_rank is not None:
        held["low_rank"] = LowRank(torch.cat([q.low_rank.up[rows] for rows in taken]), q.low_rank.down)
    return replace(q, scheme=scheme, **held)


def columns_refusals(q: QuantTensor, ranks: int) -> tuple[str, ...]:
    """Why the input channels of a matrix cannot be split over so many ranks; empty if they can."""
    k = q.shape[1]
    if k % ranks:
        return (f"{k} input channels are no multiple of {ranks} ranks",)
    block, order = q.input_transform.hadamard, q.input_transform.order
    if ranks > 1 and block and (order is not None or k // ranks % block):
        return (f"inputs that are rotated in blocks of {block} channels are split between blocks, and without an order",)
    if ranks == 1 or order is None or not isinstance(q.scheme.granularity, (PerGroup, PerBlock)):
        return ()
    reasons = []
    if isinstance(q.scheme.granularity, PerBlock):
        reasons.append(f"{q.scheme} has blocks whose columns are in another order, which are not split over ranks")
    if q.scheme.zero is ZeroPoint.FLOAT:
        reasons.append(
            f"{q.scheme} has no code for the weight 0, with which groups in another order are filled up for each rank"
        )
    elif q.zero is not None and bool((q.zero >= 1 << q.scheme.weight.bits).any()):
        reasons.append(
            f"zero points of {q.scheme} that no code stands for leave nothing to fill up groups in another order with"
        )
    return tuple(reasons)


def columns_of(q: QuantTensor, rank: int, ranks: int) -> tuple[QuantTensor, Tensor | None]:
    """What `rank` multiplies its K / ranks channels of x by, and int64 [K'], the channel of its own that each of the K' columns
    meets: `x[:, index]` is what is multiplied. None where x is multiplied as it is.

    Raises ValueError with `columns_refusals`.
    """
    reasons = columns_refusals(q, ranks)
    if reasons:
        raise ValueError("; ".join(reasons))
    if ranks == 1:
        return q, None
    order = q.input_transform.order
    if order is not None and isinstance(q.scheme.granularity, (PerChannel, PerTensor)):
        q = replace(q.with_input(order=None), codes=torch.empty_like(q.codes).index_copy_(1, order.long(), q.codes))
        order = None
    begin, end = part_range(q.shape[1], q.shape[1] // ranks, rank, ranks)
    if order is None:
        return _neighbours(q, begin, end), None
    meets = ((order >= begin) & (order < end)).nonzero()[:, 0]
    if int(meets[0]) == begin and int(meets[-1]) == end - 1:  # as many as there are between: no others among them
        return _neighbours(q, begin, end).with_input(order=order[begin:end] - begin), None
    return _scattered(q, meets, begin, end)


def _neighbours(q: QuantTensor, begin: int, end: int) -> QuantTensor:
    """Columns `begin` to `end` without their order; they are 1 / ranks of all, so that all ranks find the same group."""
    scheme, granularity = q.scheme, q.scheme.granularity
    scale, zero = q.scale, q.zero
    if isinstance(granularity, (PerGroup, PerBlock)):
        size = granularity.size if isinstance(granularity, PerGroup) else granularity.k
        own = math.gcd(size, end - begin)
        at = torch.arange(begin, end, own, device=scale.device) // size
        scale, zero = scale[:, at], None if zero is None else zero[:, at]
        scheme = replace(
            scheme, granularity=PerGroup(own) if isinstance(granularity, PerGroup) else replace(granularity, k=own)
        )
    beside: dict[str, Any] = {"input_transform": q.input_transform.select(slice(begin, end))}
    if q.low_rank is not None:
        beside["low_rank"] = LowRank(q.low_rank.up, q.low_rank.down[:, begin:end])
    return replace(q, codes=q.codes[:, begin:end], scale=scale, zero=zero, scheme=scheme, **beside)


def _scattered(q: QuantTensor, meets: Tensor, begin: int, end: int) -> tuple[QuantTensor, Tensor]:
    """Columns `meets`, which meet channels `begin` to `end` of x, each group filled up with columns of weight 0."""
    order = q.input_transform.order
    assert isinstance(q.scheme.granularity, PerGroup) and order is not None
    groups = meets // q.scheme.granularity.size
    counts = torch.bincount(groups, minlength=q.scale.shape[1])
    filled = -(-counts // ORDERED_GROUP) * ORDERED_GROUP
    # The place of each column: where its group begins, and how many of the group are before it.
    place = (filled.cumsum(0) - filled)[groups] + torch.arange(len(meets), device=meets.device)
    place -= (counts.cumsum(0) - counts)[groups]
    group_of = torch.arange(len(counts), device=meets.device).repeat_interleave(filled // ORDERED_GROUP)
    scale, zero = q.scale[:, group_of], None if q.zero is None else q.zero[:, group_of]
    n, columns = q.shape[0], int(filled.sum())
    if zero is not None:
        codes = zero.repeat_interleave(ORDERED_GROUP, dim=1)
    else:
        codes = torch.full((n, columns), _code_of_zero(q), dtype=torch.uint8, device=q.codes.device)
    codes[:, place] = q.codes[:, meets]
    index = torch.zeros(columns, dtype=torch.int64, device=meets.device)
    index[place] = order[meets].long() - begin
    beside: dict[str, Any] = {"input_transform": q.input_transform.select(begin + index)}
    if q.low_rank is not None:
        down = torch.zeros((q.low_rank.rank, columns), dtype=q.low_rank.down.dtype, device=q.codes.device)
        down[:, place] = q.low_rank.down[:, order[meets].long()]
        beside["low_rank"] = LowRank(q.low_rank.up, down)
    scheme = replace(q.scheme, granularity=PerGroup(ORDERED_GROUP))
    return replace(q, codes=codes, scale=scale, zero=zero, scheme=scheme, **beside), index


def _code_of_zero(q: QuantTensor) -> int:
    return q.scheme.weight.offset if isinstance(q.scheme.weight, IntFormat) else 0


def by_channel(q: QuantTensor) -> QuantTensor:
    """A matrix with one scale for all as one with a scale for each row, all alike; any other as it is."""
    if not isinstance(q.scheme.granularity, PerTensor):
        return q
    n = q.shape[0]
    zero = None if q.zero is None else q.zero.expand(n, 1).contiguous()
    return replace(q, scale=q.scale.expand(n, 1).contiguous(), zero=zero, scheme=replace(q.scheme, granularity=PerChannel()))


def stack_refusals(first: QuantTensor, second: QuantTensor) -> tuple[str, ...]:
    """Why the rows of two matrices that read one x cannot be those of one; empty if they can."""
    one, other = by_channel(first), by_channel(second)
    if one.scheme != other.scheme:
        return (f"schemes differ, {first.scheme} and {second.scheme}",)
    reasons = []
    if one.shape[1] != other.shape[1] or one.scale.dtype != other.scale.dtype:
        reasons.append("input channels or types of scales differ")
    reasons += one.input_transform.differences(other.input_transform)
    if one.low_rank is not None or other.low_rank is not None:
        reasons.append("low-rank corrections are of one matrix each")
    if isinstance(one.scheme.granularity, PerBlock) and one.shape[0] % one.scheme.granularity.n:
        reasons.append("the first ends within a block")
    return tuple(reasons)


def stacked(parts: Sequence[QuantTensor]) -> QuantTensor:
    """The rows of all parts, one after the other, as one matrix; `stack_refusals` of neighbours must be empty."""
    if len(parts) == 1:
        return parts[0]
    rows = [by_channel(q) for q in parts]
    zeros = [q.zero for q in rows if q.zero is not None]
    codes, scale = torch.cat([q.codes for q in rows]), torch.cat([q.scale for q in rows])
    return replace(rows[0], codes=codes, scale=scale, zero=torch.cat(zeros) if zeros else None)


def filled_up(q: QuantTensor, rows: int) -> QuantTensor:
    """The matrix with rows of weight 0 at its end, `rows` in all."""
    missing = rows - q.shape[0]
    if missing == 0:
        return q
    q, pad = by_channel(q), torch.nn.functional.pad
    more = missing
    if isinstance(q.scheme.granularity, PerBlock):
        q = q if q.zero is None else _without_cut_blocks(q)
        more = scale_shape(q.scheme.granularity, (rows, q.shape[1]))[0] - q.scale.shape[0]
    held: dict[str, Any] = {
        "codes": pad(q.codes, (0, 0, 0, missing), value=_code_of_zero(q)),
        "scale": pad(q.scale, (0, 0, 0, more)),
        "zero": None if q.zero is None else pad(q.zero, (0, 0, 0, more)),
    }
    if q.low_rank is not None:
        held["low_rank"] = LowRank(pad(q.low_rank.up, (0, 0, 0, missing)), q.low_rank.down)
    return replace(q, **held)


def _without_cut_blocks(q: QuantTensor) -> QuantTensor:
    """Blocks so small that none reaches beyond the last row."""
    assert isinstance(q.scheme.granularity, PerBlock)
    size = math.gcd(q.scheme.granularity.n, q.shape[0])
    at = torch.arange(0, q.shape[0], size, device=q.scale.device) // q.scheme.granularity.n
    scheme = replace(q.scheme, granularity=replace(q.scheme.granularity, n=size))
    return replace(q, scheme=scheme, scale=q.scale[at], zero=None if q.zero is None else q.zero[at])
