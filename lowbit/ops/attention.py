"""Attention over a paged KV cache: the operators `lowbit::decode_attention` and `lowbit::append_kv`, and attention of prompts.

Keys and values of a layer are stored in pages of PAGE tokens (`KVPages`, pack/kv_pages.py), in 16 bits or packed with a scale
per token and head. `tables` int32 [slots, P] lists the pages of each slot in order. `positions` int32 [slots] is the position
of the token that the slot processes next. The contents of tables and positions are not checked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from lowbit.formats.kv import KVScheme, parse_kv
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.attention import PAGE, AttentionShape, attention_refusals, choose_decode, shape_refusals
from lowbit.kernels.choose.packed_attention import choose_packed
from lowbit.kernels.reference.attention import append_reference, attend, decode_reference, gathered, read_type
from lowbit.ops.operands import TensorSpec, device_of, meta_tensors, spec_of, triton_refusals
from lowbit.ops.ragged_attention import gather_kv
from lowbit.ops.register import register
from lowbit.ops.workspace import workspace
from lowbit.pack.kv_pages import KVPages, head_bytes, kv_refusals

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.append import AppendPlan
    from lowbit.kernels.sm80.packed_attention import PackedAttentionPlan
    from lowbit.kernels.sm80.paged_attention import PagedAttentionPlan

_SHAPE = (
    "str kv, SymInt heads, SymInt kv_heads, SymInt head_dim, float scale, SymInt rotary_dim, float softcap, SymInt window,"
    " float norm_eps, float norm_offset"
)
_CACHE = "Tensor qkv, Tensor(a!) k, Tensor(b!) v, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor tables"
_attention_shape = functools.lru_cache(maxsize=256)(AttentionShape)
_scheme = functools.lru_cache(maxsize=64)(parse_kv)

Tensors = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None
]
"""The tensor arguments of the two operators: qkv, k, v, k_scale, v_scale, tables, then positions and rows (`decode_attention`)
or slot_of and position_of (`append_kv`), then cos_sin, q_norm, k_norm."""

_TENSORS = 11


def decode_attention(
    qkv: Tensor, pages: KVPages, tables: Tensor, positions: Tensor, rows: Tensor, cos_sin: Tensor, shape: AttentionShape,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, *, sinks: Tensor | None = None, batch_invariant: bool = False,
    longest: int = 0, verify: bool = False,
) -> Tensor:  # fmt: skip
    """Returns the attention [B, heads * head_dim] of one new token for each of B rows over its slot's pages.

    qkv [B, (heads + 2 kv_heads) head_dim] holds each row's heads of q, then k, then v; `rows` int32 [B] is the slot of each
    row. Heads of q and k are RMS-normed if q_norm and k_norm [head_dim] are given. Then RoPE rotates them by cos_sin float32
    [positions, rotary_dim], which has the cosines of all pairs, then the sines. The new k and v are written at the slot's
    position. The token attends to all positions up to its own, with keys and values as they are stored. `sinks` [heads], of any
    float type, adds for each head a score to the softmax that has no value (gpt-oss); neither `shape.scale` nor `shape.softcap`
    applies to it. On a GPU, types are fp16 or bf16, and there is one launch. It reads rows, positions, tables, cos_sin, gammas,
    sinks and older keys before the preceding kernel has finished, so neither that kernel nor any other running kernel may write
    them. With `batch_invariant` a row has the same bits in every batch; otherwise the number of splits of a row depends on the
    batch. `longest` is the longest context, in tokens, for which the tile is chosen (default: the capacity of the tables);
    longer contexts are computed correctly, but more slowly.

    With `verify`, rows of one slot may be several new tokens of a sequence. `positions` int32 [B] is then the position of each
    row. The keys and values of all rows are written before any is read, which takes one more launch. If the same tile is
    chosen, a row has the same bits as if it were the only new token of its slot, after the same tokens. With `batch_invariant`
    the same tile is always chosen. Only the dummy slot may have several rows of the same position. Raises ValueError for
    tensors that do not fit together and for a shape that no kernel supports.
    """
    return torch.ops.lowbit.decode_attention(
        qkv,
        *pages.tensors,
        tables,
        positions,
        rows,
        cos_sin,
        q_norm,
        k_norm,
        str(pages.scheme),
        *_fields(shape),
        batch_invariant,
        longest,
        sinks,
        verify,
    )


def append_kv(
    qkv: Tensor, pages: KVPages, tables: Tensor, slot_of: Tensor, position_of: Tensor, cos_sin: Tensor, shape: AttentionShape,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns q [T, heads, head_dim] of T prompt tokens after norm and RoPE; writes their k and v to the pages of their slots.
    If the format of the keys has a Hadamard rotation, q does not get it, since `gather_kv` undoes the rotation of the keys.

    slot_of and position_of int32 [T] are the slot and the position of each token; other arguments as in `decode_attention`.
    """
    return torch.ops.lowbit.append_kv(
        qkv, *pages.tensors, tables, slot_of, position_of, cos_sin, q_norm, k_norm, str(pages.scheme), *_fields(shape)
    )


def prompt_attention(
    q: Tensor, pages: KVPages, table_row: Tensor, first: int, shape: AttentionShape, sinks: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Returns the attention [T, heads * head_dim] of tokens q [T, heads, head_dim] at positions first, first + 1, .. of one
    slot. The keys and values of all these tokens must be in the slot's pages. They are used as stored, so results do not depend
    on how a prompt is divided into chunks.

    table_row int32 [P] is on the device of q. sinks [heads] as in `decode_attention`. torch's flash attention computes the
    result on a GPU, unless there are a soft cap, sinks, or a window that is shorter than the sequence. It does not copy keys
    for each of the query heads that share them. In all other cases `attend` computes the result.
    """
    reasons = shape_refusals(shape)
    tokens = first + len(q)
    if q.shape[1:] != (shape.heads, shape.head_dim) or first < 0 or tokens > PAGE * len(table_row):
        reasons = (*reasons, f"q is [T, {shape.heads}, {shape.head_dim}], its {tokens} tokens on {len(table_row)} pages")
    if reasons:
        raise ValueError(f"prompt_attention: {'; '.join(reasons)}; got q {tuple(q.shape)} and first {first}")
    keys, values = _of_slot(q, pages, table_row, tokens)
    if not q.is_cuda or shape.softcap or sinks is not None or 0 < shape.window < tokens:
        return attend(q, keys, values, first, shape, sinks)
    mask = causal_lower_right(len(q), tokens)
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=shape.scale, enable_gqa=shape.group > 1
    )
    return out[0].transpose(0, 1).flatten(1)


def _of_slot(q: Tensor, pages: KVPages, table_row: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns keys and values [kv_heads, tokens, head_dim] of the first tokens of a slot."""
    if not (q.is_cuda and pages.scheme.quantized):
        return gathered(pages, table_row, tokens, read_type(q))
    token = torch.arange(tokens, device=q.device)
    where = table_row[token // PAGE].long() * (pages.kv_heads * PAGE) + token % PAGE
    k, v = gather_kv(pages, where, torch.full((1,), tokens, dtype=torch.int32, device=q.device), q.dtype)
    return k.transpose(0, 1), v.transpose(0, 1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
    """Returns the causal attention [B * L, heads * head_dim] of q [B, L, heads, head_dim] over k and v [B, K, kv_heads,
    head_dim], computed by torch. The tokens of q are the last L of each sequence of K. Supports neither a soft cap nor a window
    shorter than K.
    """
    # With a shared prompt (L < K) a causal bias is needed. With it, a GPU uses flash attention and a CPU a mask in memory. For
    # L = K a CPU needs only is_causal, and torch chooses the method.
    whole = q.shape[1] == k.shape[1] and not q.is_cuda
    out = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=whole, scale=shape.scale, enable_gqa=shape.group > 1,
        attn_mask=None if whole else causal_lower_right(q.shape[1], k.shape[1]),
    )  # fmt: skip
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


def _fields(shape: AttentionShape) -> tuple[int | float, ...]:
    return (
        shape.heads, shape.kv_heads, shape.head_dim, shape.scale, shape.rotary_dim, shape.softcap, shape.window, shape.norm_eps,
        shape.norm_offset,
    )  # fmt: skip


def page_refusals(shape: AttentionShape, pages: KVPages, dtype: torch.dtype) -> list[str]:
    """Returns the reasons why pages cannot hold the keys and values of an attention shape and a dtype; empty if they can."""
    scheme, (k, v, k_scale, v_scale) = pages.scheme, pages.tensors
    own: list[tuple[str, Tensor, torch.dtype, tuple[int, ...]]]
    own = [("k", k, dtype, (PAGE, shape.head_dim)), ("v", v, dtype, (PAGE, shape.head_dim))]
    if scheme.quantized:
        own = [
            ("k", k, torch.uint8, (head_bytes(scheme.k, shape.head_dim),)),
            ("v", v, torch.uint8, (head_bytes(scheme.v, shape.head_dim),)),
            *((name, x, torch.float16, (PAGE,)) for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None),
        ]
    reasons = []
    for name, x, of_type, size in own:
        if tuple(x.shape) != (k.shape[0], shape.kv_heads, *size) or x.dtype != of_type:
            reasons.append(f"{name} is {of_type} {('pages', shape.kv_heads, *size)}, got {x.dtype} {tuple(x.shape)}")
    if {k_scale is not None, v_scale is not None} != {scheme.quantized}:
        reasons.append(f"packed pages, and only those, have k_scale and v_scale; {scheme} pages got {pages.tensors[2:]}")
    return reasons


def _check(
    operator: str, shape: AttentionShape, qkv: Tensor, pages: KVPages, tables: Tensor, of_slots: Tensor | None,
    of_rows: tuple[Tensor, ...], cos_sin: Tensor, norms: Sequence[Tensor | None], sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Raises ValueError unless the tensors fit together and have the given attention shape."""
    reasons = list(shape_refusals(shape))
    if qkv.dim() != 2 or qkv.shape[1] != shape.features:
        reasons.append(f"qkv is [B, {shape.features}], got {tuple(qkv.shape)}")
    reasons += page_refusals(shape, pages, qkv.dtype)
    if tables.dim() != 2 or tables.dtype != torch.int32:
        reasons.append(f"tables are int32 [slots, pages of a slot], got {tables.dtype} {tuple(tables.shape)}")
    lengths = [] if of_slots is None else [(of_slots, tables.shape[0])]
    for x, length in (*lengths, *((t, qkv.shape[0]) for t in of_rows)):
        if tuple(x.shape) != (length,) or x.dtype != torch.int32:
            named = "slots and positions are int32, one for each slot or row"
            reasons.append(f"{named}, [{length}], got {x.dtype} {tuple(x.shape)}")
    if cos_sin.dim() != 2 or cos_sin.shape[1] != shape.rotary_dim or cos_sin.dtype not in (torch.float32, torch.float64):
        reasons.append(f"cos_sin is float32 [positions, {shape.rotary_dim}], got {cos_sin.dtype} {tuple(cos_sin.shape)}")
    for gamma in norms:
        if gamma is not None and tuple(gamma.shape) != (shape.head_dim,):
            reasons.append(f"q_norm and k_norm are [{shape.head_dim}], got {tuple(gamma.shape)}")
    if sinks is not None and (tuple(sinks.shape) != (shape.heads,) or not sinks.is_floating_point()):
        reasons.append(f"sinks are floating [{shape.heads}], got {sinks.dtype} {tuple(sinks.shape)}")
    if reasons:
        raise ValueError(f"{operator}: {'; '.join(reasons)}")


def _check_cuda(operator: str, shape: AttentionShape, kv: KVScheme, tensors: tuple[TensorSpec | None, ...]) -> None:
    """Raises ValueError unless a kernel supports the shape and the tensors; the first tensor is qkv."""
    reasons = [*attention_refusals(shape), *kv_refusals(kv, shape.head_dim), *triton_refusals()]
    given = [t for t in tensors if t is not None]
    if given[0][1] not in (torch.float16, torch.bfloat16):
        reasons.append(f"the kernel takes fp16 and bf16, got {given[0][1]}: the reference on a CPU takes any")
    if len({t[2] for t in given}) > 1:
        reasons.append(f"all tensors must be on one device, got {sorted({str(t[2]) for t in given})}")
    if not all(t[3] for t in given):
        reasons.append("all tensors must start at multiples of 16 bytes; clone() those that do not")
    if reasons:
        raise ValueError(f"{operator}: {'; '.join(reasons)}")


def _split(arguments: tuple[Any, ...]) -> tuple[Tensors, KVScheme, AttentionShape, tuple[Any, ...]]:
    """Splits the arguments of an operator into tensors, formats of keys and values, shape and options."""
    kv, fields = arguments[_TENSORS], arguments[_TENSORS + 1 :]
    return arguments[:_TENSORS], _scheme(kv), _attention_shape(*fields[:9]), fields[9:]  # type: ignore[return-value]


def _pages(tensors: Sequence[Any], kv: KVScheme, shape: AttentionShape) -> KVPages:
    """Returns the pages among the tensors of an operator."""
    return KVPages(kv, shape.head_dim, *tensors[1:5])


def _contiguous(operator: str, tensors: Tensors) -> Tensors:
    """Returns contiguous tensors; tensors with gaps are copied. Raises ValueError for pages and tables with gaps: a kernel must
    write to the cache itself, not to a copy."""
    qkv, *cache, first, second, cos_sin, q_norm, k_norm = tensors
    if not all(t is None or t.is_contiguous() for t in cache):
        strides = [t.stride() for t in cache if t is not None]
        raise ValueError(f"{operator}: pages and tables are contiguous, got strides {strides}")
    return (  # type: ignore[return-value]
        qkv.contiguous(), *cache, first.contiguous(), second.contiguous(), cos_sin.contiguous(), q_norm, k_norm
    )  # fmt: skip


def _decode_options(
    batch_invariant: bool = False, longest: int = 0, sinks: Tensor | None = None, verify: bool = False
) -> Any:  # fmt: skip
    """Returns (batch_invariant, longest, verify), and the sinks as a contiguous tensor."""
    return (batch_invariant, longest, verify), sinks if sinks is None else sinks.contiguous()


def _decode(*arguments: Any) -> Tensor:
    given, kv, shape, rest = _split(arguments)
    tensors = _contiguous("decode_attention", given)
    options, sinks = _decode_options(*rest)
    plan = _decode_plan(kv, shape, tuple(spec_of(t) for t in (*tensors, sinks)), *options)
    if plan is None:
        return tensors[0].new_empty(0, shape.heads * shape.head_dim)
    return plan(
        tensors[0], _pages(tensors, kv, shape), *tensors[5:], sinks, *workspace(tensors[0].device, *plan.workspace)
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _decode_plan(
    kv: KVScheme, shape: AttentionShape, tensors: tuple[TensorSpec | None, ...], batch_invariant: bool = False,
    longest: int = 0, verify: bool = False,
) -> PagedAttentionPlan | PackedAttentionPlan | None:  # fmt: skip
    """Returns the plan of a step; None without rows. Raises ValueError if the tensors do not fit together."""
    on_meta = meta_tensors(tensors)
    _check_decode(on_meta, kv, shape, verify)
    tables, rows = on_meta[5], on_meta[7]
    if len(rows) == 0:
        return None
    _check_cuda("decode_attention", shape, kv, tensors)
    machine = machine_of(device_of("decode_attention", tensors))
    longest = longest or PAGE * tables.shape[1]
    if kv.quantized:
        packed = choose_packed(len(rows), shape, kv, longest, machine, batch_invariant)
        from lowbit.kernels.sm80.packed_attention import PackedAttentionPlan

        return PackedAttentionPlan(len(rows), shape, kv, packed, machine, verify=verify)
    tile = choose_decode(len(rows), shape, longest, machine, batch_invariant)
    from lowbit.kernels.sm80.paged_attention import PagedAttentionPlan

    return PagedAttentionPlan(len(rows), shape, tile, machine, verify=verify)


def _check_decode(tensors: Sequence[Any], kv: KVScheme, shape: AttentionShape, verify: bool) -> None:
    tables, positions, rows, cos_sin, q_norm, k_norm, sinks = tensors[5:]
    pages = _pages(tensors, kv, shape)
    of_slots, of_rows = (None, (rows, positions)) if verify else (positions, (rows,))
    _check("decode_attention", shape, tensors[0], pages, tables, of_slots, of_rows, cos_sin, (q_norm, k_norm), sinks)


def _decode_on_cpu(*arguments: Any) -> Tensor:
    tensors, kv, shape, rest = _split(arguments)
    (*_, verify), sinks = _decode_options(*rest)
    _check_decode((*tensors, sinks), kv, shape, verify)
    return decode_reference(
        tensors[0], _pages(tensors, kv, shape), *tensors[5:9], shape, *tensors[9:], sinks, verify=verify
    )  # fmt: skip


def _fake_decode(*arguments: Any) -> Tensor:
    qkv, heads, head_dim = arguments[0], arguments[_TENSORS + 1], arguments[_TENSORS + 3]
    return qkv.new_empty((qkv.shape[0], heads * head_dim))


register(
    f"decode_attention({_CACHE}, Tensor positions, Tensor rows, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, {_SHAPE},"
    " bool batch_invariant=False, int longest=0, Tensor? sinks=None, bool verify=False) -> Tensor",
    cuda=_decode,
    cpu=_decode_on_cpu,
    fake=_fake_decode,
)


def _append(*arguments: Any) -> Tensor:
    given, kv, shape, _ = _split(arguments)
    tensors = _contiguous("append_kv", given)
    plan = _append_plan(kv, shape, tuple(spec_of(t) for t in tensors))
    return plan(tensors[0], _pages(tensors, kv, shape), *tensors[5:])


@functools.lru_cache(maxsize=1024)
def _append_plan(kv: KVScheme, shape: AttentionShape, tensors: tuple[TensorSpec | None, ...]) -> AppendPlan:
    """Returns the plan of a prompt's tokens. Raises ValueError if the tensors do not fit together."""
    on_meta = meta_tensors(tensors)
    _check_append(on_meta, kv, shape)
    _check_cuda("append_kv", shape, kv, tensors)
    from lowbit.kernels.elementwise.append import AppendPlan

    return AppendPlan(len(on_meta[0]), shape, kv, machine_of(device_of("append_kv", tensors)))


def _check_append(tensors: Sequence[Any], kv: KVScheme, shape: AttentionShape) -> None:
    tables, slot_of, position_of, cos_sin, *norms = tensors[5:]
    pages = _pages(tensors, kv, shape)
    _check("append_kv", shape, tensors[0], pages, tables, None, (slot_of, position_of), cos_sin, norms)


def _append_on_cpu(*arguments: Any) -> Tensor:
    tensors, kv, shape, _ = _split(arguments)
    _check_append(tensors, kv, shape)
    return append_reference(tensors[0], _pages(tensors, kv, shape), *tensors[5:9], shape, *tensors[9:])


def _fake_append(*arguments: Any) -> Tensor:
    qkv, heads, head_dim = arguments[0], arguments[_TENSORS + 1], arguments[_TENSORS + 3]
    return qkv.new_empty((qkv.shape[0], heads, head_dim))


register(
    f"append_kv({_CACHE}, Tensor slot_of, Tensor position_of, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, {_SHAPE})"
    " -> Tensor",
    cuda=_append,
    cpu=_append_on_cpu,
    fake=_fake_append,
)
