"""Variable-length attention of prompts whose lengths are only on the device, and the operator `lowbit::gather_kv`.

`gather_kv` copies keys and values from the pages of a layer (ops/attention.py) into one tensor, then torch's flash attention
computes all sequences in one call.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.attention import PAGE, AttentionShape, shape_refusals
from lowbit.kernels.reference.attention import gather_reference, ragged_reference
from lowbit.ops.operands import TensorSpec, meta_tensors, spec_of, triton_refusals
from lowbit.ops.register import register

if TYPE_CHECKING:
    from lowbit.kernels.elementwise.gather_kv import GatherKvPlan


def gather_kv(k: Tensor, v: Tensor, where: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values [T, kv_heads, head_dim] of tokens from pages k and v [pages, kv_heads, PAGE, head_dim].

    `where` int64 [T] is page * kv_heads * PAGE + index within the page, for the first `count` int32 [1] tokens; the other rows
    of the result are uninitialised. Page numbers are not checked. On a GPU types are fp16 or bf16. Raises ValueError for
    tensors that do not fit together.
    """
    return torch.ops.lowbit.gather_kv(k, v, where, count)


def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, q_begins: Tensor, k_begins: Tensor, shape: AttentionShape, sinks: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Returns the causal attention [T, heads * head_dim] of packed sequences q [T, heads, head_dim], k and v [K, kv_heads,
    head_dim].

    Sequence i has the tokens q_begins[i] to q_begins[i + 1] of q and k_begins[i] to k_begins[i + 1] of k and v, both int32
    [sequences + 1]; its tokens of q are its last ones. Rows outside all sequences are uninitialised. On a GPU torch's flash
    attention computes it; the bits of a sequence do not depend on other sequences. The host only reads the sizes of tensors, so
    a CUDA graph can capture it. `sinks` [heads] as in `decode_attention`: flash attention's output is multiplied by the share
    that the sink leaves of the softmax, 1 / (1 + exp(sink - lse)), and rounded again. Raises ValueError for a soft cap, which
    flash attention does not have.
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
    # This is the operator that torch.nn.attention.varlen calls. torch 2.9 does not have that module, and its arguments have
    # changed since. If the maximum number of keys were at most the window, another kernel would be chosen, with other tiles on
    # some GPUs; the bits of a sequence would then depend on other sequences.
    most_keys = max(len(k), shape.window)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, q_begins, k_begins, len(q), most_keys, 0.0, True, False, scale=shape.scale,
        window_size_left=shape.window - 1 if shape.window else None, window_size_right=0,
    )  # fmt: skip
    return (out if sinks is None else with_sinks(out, lse, sinks)).flatten(1)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output of a softmax with one more score, `sinks` [heads], in its denominator.

    out [T, heads, head_dim] is the output without it, and lse float32 [heads, T] the logarithm of its denominator."""
    heads, tokens = out.shape[1], len(out)
    kept = torch.sigmoid(lse.reshape(heads, tokens) - sinks.float().unsqueeze(1))
    return (out * kept.T.unsqueeze(2)).to(out.dtype)


def _check(k: Tensor, v: Tensor, where: Tensor, count: Tensor) -> None:
    """Raises ValueError unless the tensors fit together."""
    if k.dim() != 4 or k.shape[2] != PAGE or k.shape != v.shape or k.dtype != v.dtype:
        found = f"{k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}"
        raise ValueError(f"gather_kv: k and v are pages [pages, kv_heads, {PAGE}, head_dim] of one type, got {found}")
    if (where.dim(), where.dtype, count.shape, count.dtype) != (1, torch.int64, (1,), torch.int32):
        found = f"{where.dtype} {tuple(where.shape)} and {count.dtype} {tuple(count.shape)}"
        raise ValueError(f"gather_kv: where is int64 [T] and count int32 [1], got {found}")


def _gather(k: Tensor, v: Tensor, where: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    plan = _plan(*(spec_of(t) for t in (k, v, where)), count.device)
    if not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError(f"gather_kv: pages are contiguous, got strides {k.stride()} and {v.stride()}")
    return plan(k, v, where.contiguous(), count)


@functools.lru_cache(maxsize=1024)
def _plan(k: TensorSpec, v: TensorSpec, where: TensorSpec, counted: torch.device) -> GatherKvPlan:
    """Returns the plan of a call. Raises ValueError if the tensors do not fit together."""
    meta_k, meta_v, meta_where = meta_tensors((k, v, where))
    _check(meta_k, meta_v, meta_where, torch.empty(1, dtype=torch.int32, device="meta"))
    reasons = [*triton_refusals()]
    if k[1] not in (torch.float16, torch.bfloat16):
        reasons.append(f"the kernel takes fp16 and bf16, got {k[1]}: the reference on a CPU takes any")
    if len({k[2], v[2], where[2], counted}) > 1:
        reasons.append(f"all tensors must be on one device, got {k[2]}, {v[2]}, {where[2]} and {counted}")
    if not (k[3] and v[3]) or meta_k.shape[3] % 8:
        reasons.append("pages start at multiples of 16 bytes, and so does each head: head_dim is a multiple of 8")
    if reasons:
        raise ValueError(f"gather_kv: {'; '.join(reasons)}")
    from lowbit.kernels.elementwise.gather_kv import GatherKvPlan

    return GatherKvPlan(len(meta_where), meta_k.shape[1], meta_k.shape[3], machine_of(k[2]))


def _gather_on_cpu(k: Tensor, v: Tensor, where: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    _check(k, v, where, count)
    return gather_reference(k, where, count), gather_reference(v, where, count)


def _fake(k: Tensor, v: Tensor, where: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    size = (where.shape[0], k.shape[1], k.shape[3])
    return k.new_empty(size), v.new_empty(size)


register(
    "gather_kv(Tensor k, Tensor v, Tensor where, Tensor count) -> (Tensor, Tensor)",
    cuda=_gather,
    cpu=_gather_on_cpu,
    fake=_fake,
)
