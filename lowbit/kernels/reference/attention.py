"""Attention over a paged KV cache in plain torch: the reference of the kernels, and the CPU implementation.

Pages hold PAGE tokens of one layer (pack/kv_pages.py), in 16 bits or packed; a row of the page table lists the pages of one
slot in order. Page content beyond a slot's tokens does not affect results. Keys and values are quantized when they are
appended. Attention always reads the stored ones, also those of the query's own token. Sums are float32 (float64 for float64
inputs); stored and returned values are rounded once. Keys and values of packed pages are not rounded to 16 bits on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.pack.kv_pages import KVPages

SCORES = 1 << 26
"""Limit of attention scores in memory at a time: 256 MiB in float32."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def turned_heads(
    qkv: Tensor, position_of: Tensor, cos_sin: Tensor, shape: AttentionShape, q_norm: Tensor | None, k_norm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [T, heads, head_dim], k and v [T, kv_heads, head_dim] of qkv [T, ..], q and k after RMSNorm (if there is a
    gamma) and RoPE."""
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    cos, sin = _wide(cos_sin)[position_of.long()][:, None, :].chunk(2, dim=-1)
    turned = []
    for x, gamma in ((_wide(q), q_norm), (_wide(k), k_norm)):
        if gamma is not None:
            x = x * (x.square().mean(dim=-1, keepdim=True) + shape.norm_eps).rsqrt() * (_wide(gamma) + shape.norm_offset)
        low, high, rest = x.split([cos.shape[-1], cos.shape[-1], shape.head_dim - shape.rotary_dim], dim=-1)
        turned.append(torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1).to(qkv.dtype))
    return turned[0], turned[1], v


def append_reference(
    qkv: Tensor, pages: KVPages, tables: Tensor, slot_of: Tensor, position_of: Tensor, cos_sin: Tensor, shape: AttentionShape,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns q [T, heads, head_dim] of tokens qkv [T, ..] and writes their keys and values into the pages of their slots."""
    q, new_k, new_v = turned_heads(qkv, position_of, cos_sin, shape, q_norm, k_norm)
    position = position_of.long()
    page = tables[slot_of.long(), position // PAGE].long()
    pages.write(page, position % PAGE, new_k, new_v)
    return q


def gathered(pages: KVPages, table_row: Tensor, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns keys and values of the first `tokens` tokens of a slot, [kv_heads, tokens, head_dim]. Those of packed pages are
    in `dtype`, others in their own type."""
    if pages.scheme.quantized:
        token = torch.arange(tokens, device=table_row.device)
        keys, values = pages.read(table_row[token // PAGE].long(), token % PAGE, dtype)
        return keys.transpose(0, 1), values.transpose(0, 1)
    own = [t.transpose(0, 1).index_select(1, table_row[: -(-tokens // PAGE)]) for t in (pages.k, pages.v)]
    keys, values = (t.reshape(pages.kv_heads, -1, pages.head_dim)[:, :tokens] for t in own)
    return keys, values


def read_type(q: Tensor) -> torch.dtype:
    """Returns the type in which keys and values of packed pages are read for attention of q. On a GPU it is q's type, which
    tensor cores multiply; on a CPU it is float32, or float64 for a q of float64."""
    return q.dtype if q.is_cuda else torch.float64 if q.dtype == torch.float64 else torch.float32


def attend(
    q: Tensor, keys: Tensor, values: Tensor, first: int, shape: AttentionShape, sinks: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Causal attention of q [T, heads, head_dim] at positions first, first + 1, .. over keys and values [kv_heads, first + T,
    head_dim], limited to the last `window` tokens if there is a window. Returns [T, heads * head_dim]. `sinks` [heads]: an
    additional score per head, without a value."""
    tokens, group = len(q), shape.heads // shape.kv_heads
    y = torch.empty_like(q)
    rows = max(1, SCORES // (shape.heads * (first + tokens)))
    for start in range(0, tokens, rows):
        part = q[start : start + rows]
        low = max(0, first + start - shape.window + 1) if shape.window else 0
        high = first + start + len(part)
        query = (
            part.view(-1, shape.kv_heads, group, shape.head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        )  # [kv_heads, group T, ..]
        scores = _product(query, keys[:, low:high].transpose(1, 2)).view(shape.kv_heads, group, len(part), -1) * shape.scale
        if shape.softcap:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        ahead = torch.arange(low, high, device=q.device) - torch.arange(first + start, high, device=q.device)[:, None]
        hidden = (ahead > 0) | (ahead <= -shape.window) if shape.window else ahead > 0
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.to(scores.dtype).view(shape.kv_heads, group, 1, 1).expand(-1, -1, len(part), 1)
            scores = torch.cat([scores, sink], dim=-1)
        p = scores.softmax(dim=-1)[..., : high - low].flatten(1, 2)
        seen = values[:, low:high]
        out = _product(p if p.dtype == torch.float64 or not q.is_cuda else p.to(q.dtype), seen)
        y[start : start + rows] = out.view(shape.kv_heads, group, len(part), -1).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return y.flatten(1)


def gather_reference(pages: KVPages, where: Tensor, count: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns keys and values [T, kv_heads, head_dim] in `dtype` of the tokens `where` (ops/ragged_attention.py); rows from
    `count` on are NaN."""
    real = where[: int(count)]
    rows = pages.read(real // (pages.kv_heads * PAGE), real % PAGE, dtype)
    k, v = (t.new_full((len(where), *t.shape[1:]), torch.nan) for t in rows)
    k[: len(real)], v[: len(real)] = rows
    return k, v


def ragged_reference(
    q: Tensor, k: Tensor, v: Tensor, q_begins: Tensor, k_begins: Tensor, shape: AttentionShape, sinks: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Computes `ops.ragged_attention.ragged_attention`, sequence by sequence; rows that belong to no sequence are NaN."""
    y = q.new_full((len(q), shape.heads * shape.head_dim), torch.nan)
    bounds, of_keys = q_begins.tolist(), k_begins.tolist()
    for begin, end, low, high in zip(bounds, bounds[1:], of_keys, of_keys[1:], strict=False):
        if end > begin:
            keys, values = (x[low:high].transpose(0, 1) for x in (k, v))
            y[begin:end] = attend(q[begin:end], keys, values, high - low - (end - begin), shape, sinks)
    return y


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a . b with float32 sums that are not rounded to a's dtype: by tensor cores on a GPU, in float32 or float64 on a CPU."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(_wide(a), _wide(b))


def decode_reference(
    qkv: Tensor, pages: KVPages, tables: Tensor, positions: Tensor, rows: Tensor, cos_sin: Tensor, shape: AttentionShape,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, sinks: Tensor | None = None, *, verify: bool = False,
) -> Tensor:  # fmt: skip
    """Computes `lowbit.ops.attention.decode_attention`."""
    slots = rows.long()
    position_of = positions if verify else positions[slots]
    q = append_reference(qkv, pages, tables, rows, position_of, cos_sin, shape, q_norm, k_norm)
    y = q.new_empty(len(q), shape.heads * shape.head_dim)
    for row, (slot, position) in enumerate(zip(slots.tolist(), position_of.tolist(), strict=True)):
        # With a window, only the pages within it are read.
        skipped = max(0, position - shape.window + 1) // PAGE if shape.window else 0
        seen = position + 1 - skipped * PAGE
        keys, values = gathered(pages, tables[slot, skipped:], seen, read_type(q))
        y[row] = attend(q[row : row + 1], keys, values, seen - 1, shape, sinks)
    return y
