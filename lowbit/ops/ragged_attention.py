"""Variable-length attention of prompts whose lengths are only on the device, and the operator `lowbit::gather_kv`.

`gather_kv` copies keys and values from the pages of a layer (pack/kv_pages.py) into one tensor each, in 16 bits and without the
Hadamard rotation that their format may have. Then torch's flash attention computes all sequences in one call.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.formats.kv import KVScheme, parse_kv
from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.attention import PAGE, AttentionShape, shape_refusals
from lowbit.kernels.reference.attention import gather_reference, ragged_reference
from lowbit.ops.operands import TensorSpec, meta_tensors, spec_of, triton_refusals
from lowbit.ops.register import register
from lowbit.pack.kv_pages import KVPages, head_bytes, kv_refusals

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.gather_kv import GatherKvPlan


def gather_kv(pages: KVPages, where: Tensor, count: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns keys and values [T, kv_heads, head_dim] in `dtype` of tokens of a layer's pages.

    `where` int64 [T] is page * kv_heads * PAGE + index within the page of each token. Only the first tokens are copied, as many
    as `count` int32 [1] says; the other rows of the result are uninitialised. Page numbers are not checked. Packed keys and
    values are dequantized, their rotation is undone, and the result is rounded once to `dtype`; 16-bit ones have this type
    already. On a GPU types are fp16 or bf16. Raises ValueError for tensors that do not fit together.
    """
    return torch.ops.lowbit.gather_kv(*pages.tensors, where, count, str(pages.scheme), pages.head_dim, dtype)


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_begins: Tensor, k_begins: Tensor, shape: AttentionShape, sinks: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Returns the causal attention [T, heads * head_dim] of packed sequences q [T, heads, head_dim], k and v [K, kv_heads,
    head_dim].

    Sequence i has the tokens q_begins[i] to q_begins[i + 1] of q and k_begins[i] to k_begins[i + 1] of k and v, both int32
    [sequences + 1]; its tokens of q are its last ones. Rows outside all sequences are uninitialised. On a GPU torch's flash
    attention computes it; the bits of a sequence do not depend on other sequences. The host only reads the sizes of tensors, so
    a CUDA graph can capture the call. `sinks` [heads] are as in `decode_attention`. They are applied after flash attention
    (`with_sinks`), which rounds the output a second time. Raises ValueError for a soft cap, which flash attention does not
    have.
    """
    reasons = shape_refusals(shape)
    if shape.softcap:
        reasons = (*reasons, f"scores are not capped here, got softcap {shape.softcap}")
    expected = (shape.heads, shape.kv_heads, shape.kv_heads)
    if any(x.shape[1:] != (heads, shape.head_dim) for x, heads in zip((q, k, v), expected, strict=True)) or len(k) != len(v):
        reasons = (*reasons, f"q, k and v are [.., {expected}, {shape.head_dim}]")
    if sinks is not None and (tuple(sinks.shape) != (shape.heads,) or not sinks.is_floating_point()):
        reasons = (*reasons, f"sinks are floating [{shape.heads}], not {sinks.dtype} {tuple(sinks.shape)}")
    if reasons:
        raise ValueError(f"ragged_attention: {'; '.join(reasons)}; got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if not q.is_cuda:
        return ragged_reference(q, k, v, q_begins, k_begins, shape, sinks)
    # torch.nn.attention.varlen calls the same operator. That module is not used, since torch 2.9 does not have it and its
    # arguments have changed since. If the maximum number of keys were at most the window, another kernel would be chosen, with
    # other tiles on some GPUs; the bits of a sequence would then depend on other sequences.
    most_keys = max(len(k), shape.window)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, q_begins, k_begins, len(q), most_keys, 0.0, True, False, scale=shape.scale,
        window_size_left=shape.window - 1 if shape.window else None, window_size_right=0,
    )  # fmt: skip
    return (out if sinks is None else with_sinks(out, lse, sinks)).flatten(1)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns the attention output for a softmax with one more score per head, `sinks` [heads], in its denominator.

    out [T, heads, head_dim] is the output without sinks, and lse float32 [heads, T] is the logarithm of its denominator. The
    output is multiplied by 1 / (1 + exp(sink - lse)), the share of the softmax that does not go to the sink."""
    heads, tokens = out.shape[1], len(out)
    kept = torch.sigmoid(lse.reshape(heads, tokens) - sinks.float().unsqueeze(1))
    return (out * kept.T.unsqueeze(2)).to(out.dtype)


def _check(pages: KVPages, where: Tensor, count: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError unless the tensors fit together."""
    k, v, k_scale, v_scale = pages.tensors
    if pages.scheme.quantized:
        sizes = [(*k.shape[:2], head_bytes(fmt, pages.head_dim)) for fmt in (pages.scheme.k, pages.scheme.v)]
        scales = [(tuple(t.shape), t.dtype) for t in (k_scale, v_scale) if t is not None]
        fits = [(tuple(t.shape), t.dtype) for t in (k, v)] == [(size, torch.uint8) for size in sizes]
        if not fits or scales != 2 * [((*k.shape[:2], PAGE), torch.float16)]:
            found = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in (k, v, k_scale, v_scale) if t is not None)
            expected = f"uint8 {sizes[0]} and {sizes[1]} with fp16 scales [pages, kv_heads, {PAGE}]"
            raise ValueError(f"gather_kv: {pages.scheme} pages of heads of {pages.head_dim} are {expected}, got {found}")
    elif k.dim() != 4 or k.shape[2] != PAGE or k.shape != v.shape or {k.dtype, v.dtype} != {dtype}:
        found = f"{k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}"
        raise ValueError(f"gather_kv: k and v are {dtype} pages [pages, kv_heads, {PAGE}, head_dim] of one type, got {found}")
    if (where.dim(), where.dtype, count.shape, count.dtype) != (1, torch.int64, (1,), torch.int32):
        found = f"{where.dtype} {tuple(where.shape)} and {count.dtype} {tuple(count.shape)}"
        raise ValueError(f"gather_kv: where is int64 [T] and count int32 [1], got {found}")


_scheme = functools.lru_cache(maxsize=64)(parse_kv)


def _gather(*arguments: Any) -> tuple[Tensor, Tensor]:
    *cache, where, count, kv, head_dim, dtype = arguments
    specs = tuple(spec_of(t) for t in (*cache, where))
    plan = _plan(_scheme(kv), head_dim, dtype, specs, count.device)
    if not all(t is None or t.is_contiguous() for t in cache):
        raise ValueError(f"gather_kv: pages are contiguous, got strides {[t.stride() for t in cache if t is not None]}")
    return plan(KVPages(_scheme(kv), head_dim, *cache), where.contiguous(), count)


@functools.lru_cache(maxsize=1024)
def _plan(
    kv: KVScheme, head_dim: int, dtype: torch.dtype, specs: tuple[TensorSpec | None, ...], counted: torch.device
) -> GatherKvPlan:
    """Returns the plan of a call. Raises ValueError if the tensors do not fit together."""
    *cache, where = meta_tensors(specs)
    _check(KVPages(kv, head_dim, *cache), where, torch.empty(1, dtype=torch.int32, device="meta"), dtype)
    reasons = [*kv_refusals(kv, head_dim), *triton_refusals()]
    given = [spec for spec in specs if spec is not None]
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"the kernel takes fp16 and bf16, got {dtype}: the reference on a CPU takes any")
    if len(devices := {*(spec[2] for spec in given), counted}) > 1:
        reasons.append(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    if not all(spec[3] for spec in given[:-1]) or head_dim % 8:
        reasons.append("pages start at multiples of 16 bytes, and so does each head: head_dim is a multiple of 8")
    if reasons:
        raise ValueError(f"gather_kv: {'; '.join(reasons)}")
    from lowbit.kernels.elementwise.gather_kv import GatherKvPlan

    return GatherKvPlan(len(where), cache[0].shape[1], head_dim, kv, dtype, machine_of(given[0][2]))


def _gather_on_cpu(*arguments: Any) -> tuple[Tensor, Tensor]:
    *cache, where, count, kv, head_dim, dtype = arguments
    pages = KVPages(_scheme(kv), head_dim, *cache)
    _check(pages, where, count, dtype)
    return gather_reference(pages, where, count, dtype)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    k, where, head_dim, dtype = arguments[0], arguments[4], arguments[7], arguments[8]
    size = (where.shape[0], k.shape[1], head_dim)
    return k.new_empty(size, dtype=dtype), k.new_empty(size, dtype=dtype)


register(
    "gather_kv(Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor where, Tensor count, str kv, int head_dim,"
    " ScalarType dtype) -> (Tensor, Tensor)",
    cuda=_gather,
    cpu=_gather_on_cpu,
    fake=_fake,
)
