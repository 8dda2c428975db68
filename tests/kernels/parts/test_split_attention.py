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
    SplitAttention,
    Worker,
    append,
    attend_new,
    attend_tokens,
    load_tokens,
    merge_lanes,
    merge_warps,
    sums_to_shared,
)
from lowbit.kernels.sm90.decode_step import MathThread


@dataclass(frozen=True)
class Attention(Polled, SplitAttention):
    table: StepTable
    dtype: str = "fp16"
    head_norms: bool = False
    windows: bool = False
    limit: int = 1

    @property
    def shape(self) -> AttentionShape:
        return self.table.shape.attention


@gluon.jit
def attention(out, q, k, v, table, position, begin, end, C: gl.constexpr):
    """out float32 [group, head_dim + 2]: sums, maximum and total of each head for tokens begin to end and the new token, whose
    key is the first head of q and whose value the last."""
    T: gl.constexpr = C.table
    A: gl.constexpr = C.shape
    HEADS: gl.constexpr = T.set_heads
    THREADS: gl.constexpr = 32 * T.warps
    WARPS: gl.constexpr = T.warps
    TURNS: gl.constexpr = (A.group * A.head_dim + THREADS - 1) // THREADS
    shared = gl.allocate_shared_memory(gl.int32, [T.shared_bytes // 128 + 1, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    index = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    shared.index(0).store(gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    start = asm("mov.u32 $0, global_smem;", "=r", [], gl.int32) + index * 0
    at = MathThread(index, index & 31, index >> 5, start)
    number = at.warp // T.head_sets * (32 // T.lanes) + at.lane // T.lanes
    worker = Worker(number, at.warp % T.head_sets, at.lane % T.lanes * 8, 0, 0, 0, position, 0, table)
    base = q.to(gl.int64) + worker.element * 2
    one = index * 0 + 1
    words = ()
    for h in gl.static_range(HEADS):
        head = gl.minimum(worker.heads * HEADS + h, A.group - 1)
        words = words + asm(
            C.load_token, C.load_token_constraints, [base + head * (A.head_dim * 2), one], ptx(C.words_types, 4)
        )  # fmt: skip
    new_k = asm(C.load_token, C.load_token_constraints, [base, one], ptx(C.words_types, 4))
    last = base + (A.group - 1) * (A.head_dim * 2)
    new_v = asm(C.load_token, C.load_token_constraints, [last, one], ptx(C.words_types, 4))
    own = worker.number == 0
    pages_k, pages_v = k.to(gl.int64), v.to(gl.int64)
    append(pages_k, pages_v, worker, new_k, new_v, (own & (worker.heads == 0)).to(gl.int32), C)
    tops, totals, sums = attend_new(words, new_k, new_v, own, C)
    for n in range(begin, end, T.tokens_at_once):
        keys = load_tokens(pages_k, worker, n, end, C)
        values = load_tokens(pages_v, worker, n, end, C)
        tops, totals, sums = attend_tokens(words, keys, values, tops, totals, sums, worker, n, end, C)
    tops, totals, sums = merge_lanes(tops, totals, sums, C)
    barrier()
    sums_to_shared(at, worker, tops, totals, sums, C)
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
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 64), (4, 128), (6, 64), (7, 128)])
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 1), (64, 151)])
def test_a_split(begin, end, heads, head_dim, dtype):
    C = Attention(small_table(heads=heads, kv_heads=1, head_dim=head_dim), "fp16" if dtype == torch.float16 else "bf16")
    position, scale = 151, head_dim**-0.5
    q = torch.randn(heads, head_dim).to(dtype)
    k, v = (torch.randn(4, 1, PAGE, head_dim).to(dtype) for _ in range(2))
    table = torch.tensor([3, 1], dtype=torch.int32)
    tokens = torch.arange(begin, end)
    keys, values = (pages[table[tokens // PAGE].long(), 0, tokens % PAGE].double() for pages in (k, v))
    kind = f"*{C.dtype}"
    signature = {
        "out": "*fp32",
        "q": kind,
        "k": kind,
        "v": kind,
        "table": "*i32",
        "position": "i32",
        "begin": "i32",
        "end": "i32",
    }
    kernel = compile_kernel(attention, signature, C, ["out", "q", "k", "v", "table"], C.table.warps, 90)
    out = torch.full((heads, head_dim + 2), torch.nan)
    execute(kernel.ptx, kernel.shared_bytes, (out, q, k, v, table, position, begin, end), 1, 32 * C.table.warps)
    keys, values = torch.cat([keys, q[:1].double()]), torch.cat([values, q[-1:].double()])
    assert torch.equal(k[1, 0, position % PAGE], q[0]) and torch.equal(v[1, 0, position % PAGE], q[-1])
    scores = q.double() @ keys.T * scale
    found = out[:, :head_dim].double() / out[:, head_dim + 1 :].double()
    torch.testing.assert_close(found, scores.softmax(1) @ values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[:, head_dim].double() / 1.4426950408889634, scores.amax(1), atol=1e-5, rtol=1e-5)
