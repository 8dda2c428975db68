"""FlashAttention-3 over fp8 pages, as vLLM calls it in a decode step; the rival of benchmarks.tuning.attention.

The call is that of vllm/v1/attention/backends/flash_attn.py (0.25.1) within a CUDA graph: queries, keys and values in e4m3 with
a scale for each row and kv head, and a schedule that is computed before the graph, once for all layers of a step. vLLM allows
at most 32 splits; FlashAttention's own choice of splits is timed too. Pages have 16 tokens, vLLM's default, or 128.
Other kernels of vLLM apply RoPE, quantize queries and append keys and values; they are not timed. This library's kernel does
all of that too.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import REPLAYS, capture
from benchmarks.under_load import monitor
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.tune.timing import WrongResult, copies_needed, failures, l2_bytes, reason

MODULE = "vllm.vllm_flash_attn"

SPLITS = (32, 0)
"""Largest numbers of splits: vLLM's, and 0 for FlashAttention's own choice."""

PAGES = (16, 128)
"""Sizes of pages in tokens."""

FP8_TOLERANCE = 0.06
"""Largest relative error. FlashAttention-3 rounds the weights of the softmax to e4m3, which has 4 significant bits."""

DESCALE = 1 / 0.7
"""Scale of codes: random codes of magnitudes below 2 then have elements of about 1."""


@dataclass(frozen=True)
class Fp8Batch:
    """A batch of one new token per row. q e4m3 [rows, heads, head_dim]; caches: pairs of keys and values, each e4m3 [pages,
    page, kv_heads, head_dim]; tables int32 [rows, pages of a row]; used int32 [rows], tokens of a row; descale float32 [rows,
    kv_heads] of q, k and v."""

    q: Tensor
    caches: tuple[tuple[Tensor, Tensor], ...]
    tables: Tensor
    used: Tensor
    descale: Tensor


@dataclass(frozen=True)
class Fa3Time:
    """The time of one variant; `us` is None where it failed, with the reason in `error`."""

    page: int
    splits: int
    us: float | None
    rel_err: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    error: str | None = None

    @property
    def variant(self) -> str:
        """The variant in words."""
        splits = f"at most {self.splits} splits" if self.splits else "its own choice of splits"
        return f"pages of {self.page} tokens, {splits}"


def refusals() -> tuple[str, ...]:
    """Returns the reasons why FlashAttention-3 cannot be timed here; empty if it can."""
    try:
        package = importlib.import_module(MODULE)
    except ImportError as error:
        return (f"--fa3 needs vLLM 0.25.1's {MODULE}: {error}",)
    return () if package.FA3_AVAILABLE else ("vLLM's build of FlashAttention-3 (_vllm_fa3_C.abi3.so) cannot be loaded",)


def make_fp8_batch(rows: int, context: int, shape: AttentionShape, page: int, copies: int, device: str) -> Fp8Batch:
    """Returns a batch of rows with `context` tokens each, whose pages are in random order."""
    generator = torch.Generator(device).manual_seed(rows + context)
    each = -(-context // page)
    order = torch.randperm(rows * each, generator=generator, device=device).to(torch.int32)

    def codes(*size: int) -> Tensor:
        random = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
        return random.bitwise_and_(0xBE).view(torch.float8_e4m3fn)  # magnitudes below 2, no NaN

    size = (rows * each, page, shape.kv_heads, shape.head_dim)
    return Fp8Batch(
        codes(rows, shape.heads, shape.head_dim),
        tuple((codes(*size), codes(*size)) for _ in range(copies)),
        order.view(rows, each),
        torch.full((rows,), context, dtype=torch.int32, device=device),
        torch.full((rows, shape.kv_heads), DESCALE, device=device),
    )


def fp8_reference(batch: Fp8Batch, copy: int, rows: int, shape: AttentionShape) -> Tensor:
    """Returns the result of the first `rows` rows in float64 [rows, heads, head_dim]."""
    found = []
    for row in range(rows):
        tokens, scale = int(batch.used[row]), batch.descale[row].double()
        pages = batch.tables[row].long()
        k, v = (
            t[pages].flatten(0, 1)[:tokens].double() * scale[:, None] for t in batch.caches[copy]
        )  # [tokens, kv_heads, head_dim]
        q = batch.q[row].double().unflatten(0, (shape.kv_heads, shape.group)) * scale[:, None, None]
        weights = (torch.einsum("hgd,nhd->hgn", q, k) * shape.scale).softmax(-1)
        found.append(torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1))
    return torch.stack(found)


def fa3_call(
    batch: Fp8Batch, context: int, splits: int, page: int, shape: AttentionShape, package: Any
) -> Callable[[int], Tensor]:  # fmt: skip
    """Returns a function of the number of a copy that launches FlashAttention-3. The schedule is computed here."""
    rows = len(batch.q)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=batch.q.device)
    schedule = package.get_scheduler_metadata(
        batch_size=rows, max_seqlen_q=1, max_seqlen_k=context, num_heads_q=shape.heads, num_heads_kv=shape.kv_heads,
        headdim=shape.head_dim, cache_seqlens=batch.used, qkv_dtype=torch.float8_e4m3fn, cu_seqlens_q=starts, page_size=page,
        causal=True, num_splits=splits,
    )  # fmt: skip

    def call(copy: int) -> Tensor:
        k, v = batch.caches[copy]
        out: Tensor = package.flash_attn_varlen_func(
            q=batch.q, k=k, v=v, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=context, seqused_k=batch.used,
            softmax_scale=shape.scale, causal=True, block_table=batch.tables, scheduler_metadata=schedule, fa_version=3,
            q_descale=batch.descale, k_descale=batch.descale, v_descale=batch.descale, num_splits=splits,
        )  # fmt: skip
        return out

    return call


def time_fa3(rows: int, context: int, shape: AttentionShape, checked: int) -> Iterator[Fa3Time]:
    """Times and checks every variant for `rows` rows of `context` tokens; `checked` rows are compared with float64."""
    package = importlib.import_module(MODULE)
    nbytes = 2 * rows * context * shape.kv_heads * shape.head_dim
    checked = min(checked, rows)
    for page in PAGES:
        batch = make_fp8_batch(rows, context, shape, page, copies_needed(nbytes, l2_bytes()), "cuda")
        expected = fp8_reference(batch, 0, checked, shape)
        for splits in SPLITS:
            try:
                call = fa3_call(batch, context, splits, page, shape, package)
                graph = capture([lambda i=i, call=call: call(i) for i in range(len(batch.caches))])  # type: ignore[misc]
                us = statistics.median(graph.times_us(REPLAYS))
                watched = monitor(torch.cuda.current_device())
                load = watched.while_running(lambda graph=graph: graph.times_us(2, warm=0))  # type: ignore[misc]
                y = graph.poisoned_outputs()[0][:checked].double()
                error = float((y - expected).norm() / expected.norm())
                if not error <= FP8_TOLERANCE:  # NaN too
                    raise WrongResult(f"relative error {error:.3g}")
            except failures() as failure:
                yield Fa3Time(page, splits, None, error=reason(failure))
            else:
                yield Fa3Time(page, splits, us, error, load.sm_clock_mhz, load.power_w)
        del batch
        torch.cuda.empty_cache()
