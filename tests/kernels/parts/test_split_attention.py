"""Attention of one token over a split of pages, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.kernels.choose.decode_step import StepTable
from tests.kernels.sass import compile_kernel
from tests.kernels.sm90.decode_step_case import small_table
from tests.kernels.warps import execute

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.gluon import asm, barrier, gl, gluon, ptx
from lowbit.kernels.parts.polled import Polled
from lowbit.kernels.parts.split_attention import (
    TILE_TOKENS,
    SplitAttention,
    SplitTask,
    add_tile,
    append,
    attend_nothing,
    chosen,
    load_keys,
    load_query,
    load_values,
    merge_warps,
    prefetch_values,
    store_query,
    sums_to_shared,
    tile_scores,
)
from lowbit.kernels.sm90.decode_step import MathThread


@dataclass(frozen=True)
class Attention(Polled, SplitAttention):
    table: StepTable
    dtype: str = "fp16"
    head_norms: bool = False
    windows: bool = False
    sinks: bool = False
    limit: int = 1

    @property
    def shape(self) -> AttentionShape:
        return self.table.shape.attention


@gluon.jit
def attention(out, q, k, v, sinks, table, position, begin, end, C: gl.constexpr):
    """Stores out float32 [group, head_dim + 2]: sums, maximum and total of each head, for tokens `begin` to `end` and the new
    token. The key of the new token is the first head of q, its value the last head."""
    T: gl.constexpr = C.table
    A: gl.constexpr = C.shape
    KEYS: gl.constexpr = C.key_vectors
    VALUES: gl.constexpr = C.value_vectors
    THREADS: gl.constexpr = 32 * T.warps
    WARPS: gl.constexpr = T.warps
    TILES: gl.constexpr = T.tile_warps
    TURNS: gl.constexpr = (A.group * A.head_dim + THREADS - 1) // THREADS
    shared = gl.allocate_shared_memory(gl.int32, [T.shared_bytes // 128 + 1, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    index = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    shared.index(0).store(gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32) + index * 0
    at = MathThread(index, index & 31, index >> 5, start)
    task = SplitTask(0, 0, 0, position, 0, table)
    group, pair = at.lane >> 2, at.lane & 3
    base, one = q.to(gl.int64), index * 0 + 1
    head = base + gl.minimum(group, A.group - 1) * (A.head_dim * 2) + pair * 16
    words = ()
    new_k = ()
    new_v = ()
    for j in gl.static_range(KEYS):
        words = words + asm(C.load_token, C.load_token_constraints, [head + 64 * j, one], ptx(C.words_types, 4))
        new_k = new_k + asm(C.load_token, C.load_token_constraints, [base + pair * 16 + 64 * j, one], ptx(C.words_types, 4))
    for j in gl.static_range(VALUES):
        last = base + (A.group - 1) * (A.head_dim * 2) + group * 16 + 128 * j
        new_v = new_v + asm(C.load_token, C.load_token_constraints, [last, one], ptx(C.words_types, 4))
    own = at.warp == TILES - 1
    pages_k, pages_v = k.to(gl.int64), v.to(gl.int64)
    append(pages_k, pages_v, task, at, new_k, new_v, own, C)
    store_query(words, at, T.sums_start, C)
    tile = gl.where(own | (at.warp >= TILES), position, begin + TILE_TOKENS * at.warp)
    keys = chosen(own, new_k, load_keys(pages_k, task, at, tile, end, C), 4 * KEYS)
    first, second = tile_scores(words, keys, task, at, tile, gl.where(own, position + 1, end), C)
    values = load_values(pages_v, task, at, tile, end, C)
    values = chosen(own, new_v, values, 4 * VALUES) + values[4 * VALUES : 8 * VALUES]
    top, total, sums = attend_nothing(sinks, task, at, own, C)
    top, total, sums = add_tile(first, second, values, top, total, sums, at, C)
    for later in range(begin + TILE_TOKENS * (TILES - 1), end, TILE_TOKENS * TILES):
        tile = gl.where(at.warp >= TILES, position, later + TILE_TOKENS * at.warp)
        prefetch_values(pages_v, task, at, tile, end, C)
        keys = load_keys(pages_k, task, at, tile, end, C)
        first, second = tile_scores(load_query(at, T.sums_start, C), keys, task, at, tile, end, C)
        top, total, sums = add_tile(first, second, load_values(pages_v, task, at, tile, end, C), top, total, sums, at, C)
    barrier()
    sums_to_shared(at, top, total, sums, C)
    barrier()
    for i in gl.static_range(TURNS):
        output = gl.minimum(index + i * THREADS, A.group * A.head_dim - 1)
        head, element = output // A.head_dim, output % A.head_dim
        top, total, sum_ = merge_warps(at, head, element, C)
        row = out + head * (A.head_dim + 2)
        gl.store(row + element, sum_)
        gl.store(row + A.head_dim + element * 0, top)
        gl.store(row + A.head_dim + 1 + element * 0, total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "sinks"), [(1, 64, False), (3, 64, True), (4, 128, False), (6, 64, False), (7, 128, True)]
)
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (64, 151)])
def test_a_split(begin, end, heads, head_dim, sinks, dtype):
    half, table = "fp16" if dtype == torch.float16 else "bf16", small_table(heads=heads, kv_heads=1, head_dim=head_dim)
    C = Attention(table, half, sinks=sinks)
    position, scale = 151, head_dim**-0.5
    q = torch.randn(heads, head_dim).to(dtype)
    k, v = (torch.randn(4, 1, PAGE, head_dim).to(dtype) for _ in range(2))
    sink = torch.randn(heads)
    table = torch.tensor([3, 1], dtype=torch.int32)
    tokens = torch.arange(begin, end)
    keys, values = (pages[table[tokens // PAGE].long(), 0, tokens % PAGE].double() for pages in (k, v))
    pointers = {"out": "*fp32", "q": f"*{half}", "k": f"*{half}", "v": f"*{half}", "sinks": "*fp32", "table": "*i32"}
    signature = pointers | {"position": "i32", "begin": "i32", "end": "i32"}
    kernel = compile_kernel(attention, signature, C, list(pointers), C.table.warps, 90)
    out = torch.full((heads, head_dim + 2), torch.nan)
    execute(kernel.ptx, kernel.shared_bytes, (out, q, k, v, sink, table, position, begin, end), 1, 32 * C.table.warps)
    keys, values = torch.cat([keys, q[:1].double()]), torch.cat([values, q[-1:].double()])
    assert torch.equal(k[1, 0, position % PAGE], q[0]) and torch.equal(v[1, 0, position % PAGE], q[-1])
    scores = q.double() @ keys.T * scale
    if sinks:
        scores = torch.cat([scores, sink.double()[:, None]], 1)
    found = out[:, :head_dim].double() / out[:, head_dim + 1 :].double()
    rounding = 2e-3 if dtype == torch.float16 else 2e-2  # the rounding of probabilities
    torch.testing.assert_close(found, scores.softmax(1)[:, : len(keys)] @ values, atol=rounding, rtol=rounding)
    torch.testing.assert_close(out[:, head_dim].double() / 1.4426950408889634, scores.amax(1), atol=1e-5, rtol=1e-5)
