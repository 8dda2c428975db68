"""Shards of a quantized matrix for tensor parallelism, and the concatenation of matrices that read one x.

Each of R ranks has a shard of the output channels (rows of w) or of the input channels (columns). The partial sums of column
shards are added. A shard is a `QuantTensor` with exactly the weights of its rows or columns:

- If the group size does not divide K / R, groups become smaller, of gcd(group size, K / R) columns, and scales are repeated.
  This takes more bytes and leaves the weights as they are. Blocks are treated in the same way.
- Columns in act-order (GPTQ) are scattered over all channels. A rank has the columns that multiply its channels, and an index
  from its columns to its channels. Each group is padded to a multiple of `ORDERED_GROUP` with codes of weight 0. With one scale
  per row or per tensor the columns are sorted instead.
- A calibrated scale of x is kept, as it applies to all of x. A dynamic scale is computed from the shard of x, so it is at most
  as large as that of x.
- A low-rank correction is split along the same dimension.
- If x is rotated in blocks of channels, shards consist of whole blocks; rotated columns in act-order cannot be split.
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
"""Groups in act-order are padded to a multiple of this number of columns, the smallest group size of the kernels."""

Range = tuple[int, int]
"""(begin, end), as in a slice."""


def part_range(total: int, part: int, rank: int, ranks: int) -> Range:
    """Returns the range of channels of `rank`, if each of `ranks` ranks has `part` of `total` channels.

    Shards are in order of the ranks. If `part` times `ranks` exceeds `total`, consecutive ranks have the same shard, for
    example if there are fewer KV heads than ranks. Raises ValueError if the shards cannot be equal.
    """
    if part < 1 or total % part or ranks % (total // part):
        raise ValueError(f"{total} channels cannot be split into parts of {part} for {ranks} ranks")
    begin = rank // (ranks // (total // part)) * part
    return begin, begin + part


def rows_of(q: QuantTensor, ranges: Sequence[Range]) -> QuantTensor:
    """Returns the output channels in `ranges`, concatenated; blocks of scales become smaller if a range ends within a block."""
    n = q.shape[0]
    if list(ranges) == [(0, n)]:
        return q
    taken = [slice(*each) for each in ranges]
    fields: dict[str, Any] = {"codes": torch.cat([q.codes[rows] for rows in taken])}
    scheme, granularity = q.scheme, q.scheme.granularity
    if not isinstance(granularity, PerTensor):
        at = torch.cat([torch.arange(*each, device=q.scale.device) for each in ranges])
        if isinstance(granularity, PerBlock):
            ends = [end for begin, end in ranges[:-1]] + [end for _, end in ranges[-1:] if end < n]
            size = math.gcd(granularity.n, *(begin for begin, _ in ranges), *ends)
            scheme = replace(scheme, granularity=PerBlock(size, granularity.k))
            at = at[::size] // granularity.n
        fields |= {"scale": q.scale[at], "zero": None if q.zero is None else q.zero[at]}
    if q.low_rank is not None:
        fields["low_rank"] = LowRank(torch.cat([q.low_rank.up[rows] for rows in taken]), q.low_rank.down)
    return replace(q, scheme=scheme, **fields)


def columns_refusals(q: QuantTensor, ranks: int) -> tuple[str, ...]:
    """Returns why the input channels of a matrix cannot be split over `ranks`; empty if they can."""
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
    """Returns the shard of `rank` with K' columns, and an index int64 [K'] into its K / ranks channels of x.

    The shard multiplies `x[:, index]`, or x itself if the index is None.

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
        return _column_range(q, begin, end), None
    columns_of_rank = ((order >= begin) & (order < end)).nonzero()[:, 0]
    if int(columns_of_rank[0]) == begin and int(columns_of_rank[-1]) == end - 1:  # consecutive columns
        return _column_range(q, begin, end).with_input(order=order[begin:end] - begin), None
    return _scattered(q, columns_of_rank, begin, end)


def _column_range(q: QuantTensor, begin: int, end: int) -> QuantTensor:
    """Returns the columns from `begin` up to `end` (exclusive), without the order. All ranks have the same number of columns,
    so they compute the same group size."""
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
    fields: dict[str, Any] = {"input_transform": q.input_transform.select(slice(begin, end))}
    if q.low_rank is not None:
        fields["low_rank"] = LowRank(q.low_rank.up, q.low_rank.down[:, begin:end])
    return replace(q, codes=q.codes[:, begin:end], scale=scale, zero=zero, scheme=scheme, **fields)


def _scattered(q: QuantTensor, columns_of_rank: Tensor, begin: int, end: int) -> tuple[QuantTensor, Tensor]:
    """Returns the columns that multiply the channels of x from `begin` up to `end` (exclusive), and the index of their channels
    as `columns_of` returns it. Each group is padded with columns of weight 0."""
    order = q.input_transform.order
    assert isinstance(q.scheme.granularity, PerGroup) and order is not None
    groups = columns_of_rank // q.scheme.granularity.size
    counts = torch.bincount(groups, minlength=q.scale.shape[1])
    padded = -(-counts // ORDERED_GROUP) * ORDERED_GROUP
    # The position of each column: the start of its group plus its index in the group.
    position = (padded.cumsum(0) - padded)[groups] + torch.arange(len(columns_of_rank), device=columns_of_rank.device)
    position -= (counts.cumsum(0) - counts)[groups]
    group_of = torch.arange(len(counts), device=columns_of_rank.device).repeat_interleave(padded // ORDERED_GROUP)
    scale, zero = q.scale[:, group_of], None if q.zero is None else q.zero[:, group_of]
    n, columns = q.shape[0], int(padded.sum())
    if zero is not None:
        codes = zero.repeat_interleave(ORDERED_GROUP, dim=1)
    else:
        codes = torch.full((n, columns), _code_of_zero(q), dtype=torch.uint8, device=q.codes.device)
    codes[:, position] = q.codes[:, columns_of_rank]
    index = torch.zeros(columns, dtype=torch.int64, device=columns_of_rank.device)
    index[position] = order[columns_of_rank].long() - begin
    fields: dict[str, Any] = {"input_transform": q.input_transform.select(begin + index)}
    if q.low_rank is not None:
        down = torch.zeros((q.low_rank.rank, columns), dtype=q.low_rank.down.dtype, device=q.codes.device)
        down[:, position] = q.low_rank.down[:, order[columns_of_rank].long()]
        fields["low_rank"] = LowRank(q.low_rank.up, down)
    scheme = replace(q.scheme, granularity=PerGroup(ORDERED_GROUP))
    return replace(q, codes=codes, scale=scale, zero=zero, scheme=scheme, **fields), index


def _code_of_zero(q: QuantTensor) -> int:
    return q.scheme.weight.offset if isinstance(q.scheme.weight, IntFormat) else 0


def by_channel(q: QuantTensor) -> QuantTensor:
    """Converts a scale per tensor to equal scales per row; returns other matrices unchanged."""
    if not isinstance(q.scheme.granularity, PerTensor):
        return q
    n = q.shape[0]
    zero = None if q.zero is None else q.zero.expand(n, 1).contiguous()
    return replace(q, scale=q.scale.expand(n, 1).contiguous(), zero=zero, scheme=replace(q.scheme, granularity=PerChannel()))


def stack_refusals(first: QuantTensor, second: QuantTensor) -> tuple[str, ...]:
    """Returns why two matrices that read one x cannot be concatenated along N; empty if they can."""
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
    """Returns all parts concatenated along N; `stack_refusals` of neighbours must be empty."""
    if len(parts) == 1:
        return parts[0]
    rows = [by_channel(q) for q in parts]
    zeros = [q.zero for q in rows if q.zero is not None]
    codes, scale = torch.cat([q.codes for q in rows]), torch.cat([q.scale for q in rows])
    return replace(rows[0], codes=codes, scale=scale, zero=torch.cat(zeros) if zeros else None)


def filled_up(q: QuantTensor, rows: int) -> QuantTensor:
    """Returns the matrix padded with rows of weight 0 to `rows` rows."""
    missing = rows - q.shape[0]
    if missing == 0:
        return q
    q, pad = by_channel(q), torch.nn.functional.pad
    more = missing
    if isinstance(q.scheme.granularity, PerBlock):
        q = q if q.zero is None else _without_cut_blocks(q)
        more = scale_shape(q.scheme.granularity, (rows, q.shape[1]))[0] - q.scale.shape[0]
    fields: dict[str, Any] = {
        "codes": pad(q.codes, (0, 0, 0, missing), value=_code_of_zero(q)),
        "scale": pad(q.scale, (0, 0, 0, more)),
        "zero": None if q.zero is None else pad(q.zero, (0, 0, 0, more)),
    }
    if q.low_rank is not None:
        fields["low_rank"] = LowRank(pad(q.low_rank.up, (0, 0, 0, missing)), q.low_rank.down)
    return replace(q, **fields)


def _without_cut_blocks(q: QuantTensor) -> QuantTensor:
    """Returns the matrix with blocks of scales made so small that no block extends beyond the last row."""
    assert isinstance(q.scheme.granularity, PerBlock)
    size = math.gcd(q.scheme.granularity.n, q.shape[0])
    at = torch.arange(0, q.shape[0], size, device=q.scale.device) // q.scheme.granularity.n
    scheme = replace(q.scheme, granularity=replace(q.scheme.granularity, n=size))
    return replace(q, scheme=scheme, scale=q.scale[at], zero=None if q.zero is None else q.zero[at])
