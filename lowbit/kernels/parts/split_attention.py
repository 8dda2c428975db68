"""Attention of one token over a split of keys and values in 16-bit pages, thread by thread, for a kernel's math warps.

A worker is a group of lanes that share tokens: a lane has 8 elements of a head, so a key is one load of 16 bytes a lane.
A warp computes the heads of one set (at most 4) for the tokens of its workers; different sets read the same tokens. Each worker
keeps maxima, totals and sums of its tokens (online softmax in base 2). They are merged within the warp and then, through
shared memory, over all warps, in a fixed order.

C is a kernel's configuration: a `SplitAttention` whose `C.table` has warps, lanes, head_sets, set_heads, workers and x_start,
where sums are merged in shared memory (choose/decode_step.py). `C.head_norms`: heads of q and k are normed. `C.windows`: some
layers have a window.

Exact   q and k are rounded to 16 bits after norm and RoPE; all else is float32
Tested  tests/kernels/parts/test_split_attention.py
Source  online softmax: Milakov and Gimelshein (2018)
"""

from __future__ import annotations

import math

from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.kernels.parts.gluon import Scalar, aggregate, asm, gl, gluon, ptx, run
from lowbit.kernels.parts.head_rows import exchanged

NOTHING = gl.constexpr(-1e30)
"""Maximum of no scores. Finite, so that differences of maxima are no NaN."""

PAGE_TOKENS = gl.constexpr(PAGE)

LOG2_E = gl.constexpr(math.log2(math.e))


class SplitAttention:
    """The PTX of attention, for a kernel's configuration to inherit."""

    @property
    def dtype(self) -> HalfType:
        """Type of q, k and v."""
        raise NotImplementedError

    @property
    def shape(self) -> AttentionShape:
        raise NotImplementedError

    @property
    def scale_log2(self) -> float:
        """Factor from q . k to scores in base 2: softmax uses 2 ** score."""
        return self.shape.scale * math.log2(math.e)

    @property
    def unpack(self) -> str:
        """PTX that converts 4 words to 8 float32."""
        lines = [".reg .b16 lo, hi; .reg .b32 a;"]
        for i in range(4):
            if self.dtype == "fp16":
                lines.append(f"mov.b32 {{lo, hi}}, ${8 + i}; cvt.f32.f16 ${2 * i}, lo; cvt.f32.f16 ${2 * i + 1}, hi;")
            else:
                lines.append(f"shl.b32 a, ${8 + i}, 16; mov.b32 ${2 * i}, a;")
                lines.append(f"and.b32 a, ${8 + i}, 0xffff0000; mov.b32 ${2 * i + 1}, a;")
        return "{\n" + "\n".join(lines) + "\n}"

    unpack_constraints = ",".join(["=&f"] * 8 + ["r"] * 4)
    unpack_types = (gl.float32,) * 8

    @property
    def pack(self) -> str:
        """PTX that rounds 8 float32 to the halves of 4 words."""
        pair = "f16x2" if self.dtype == "fp16" else "bf16x2"
        return "\n".join(f"cvt.rn.{pair}.f32 ${i}, ${5 + 2 * i}, ${4 + 2 * i};" for i in range(4))

    pack_constraints = ",".join(["=&r"] * 4 + ["f"] * 8)

    load_token = (
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;\n"
        "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    )
    """PTX that loads 8 halves at $4, or zeros if $5 is 0."""
    load_token_constraints = "=&r,=&r,=&r,=&r,l,r"
    store_token = "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
    store_words = "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
    load_float = "ld.shared.f32 $0, [$1];"
    store_float = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.f32 [$1], $2; mov.b32 $0, 0; }"


@aggregate
class Worker:
    """A group of lanes that reads its own tokens, for one set of query heads: its number, its set, its first element of a
    head; row, kv head and split of its task; the row's position, its first token (0 without a window) and its page table."""

    number: gl.tensor
    heads: gl.tensor
    element: gl.tensor
    row: Scalar
    kv_head: Scalar
    split: Scalar
    position: Scalar
    first: Scalar
    table: Scalar


@gluon.jit
def is_attended(token, worker, end, C: gl.constexpr):
    """Returns whether a token is before `end` and in the window."""
    there = token < end
    if C.windows:
        there = there & (token >= worker.first)
    return there


@gluon.jit
def load_tokens(pages, worker, begin, end, C: gl.constexpr):
    """Loads a thread's elements of keys or values of its worker's two tokens of an iteration; zeros beyond `end`."""
    A: gl.constexpr = C.shape
    page = gl.load(worker.table + begin // PAGE_TOKENS, mask=begin < end, other=0).to(gl.int64)
    first = (page * A.kv_heads + worker.kv_head) * PAGE_TOKENS + begin % PAGE_TOKENS
    words = ()
    for i in gl.static_range(2):
        token = worker.number + i * C.table.workers
        address = pages + ((first + token) * A.head_dim + worker.element) * 2
        there = is_attended(begin + token, worker, end, C).to(gl.int32)
        words = words + asm(C.load_token, C.load_token_constraints, [address, there], ptx(C.words_types, 4))
    return words


@gluon.jit
def turn_head(words, gamma, cos, sin, C: gl.constexpr):
    """Returns a thread's 8 elements of a head after norm and RoPE, as 4 words."""
    T: gl.constexpr = C.table
    STEPS: gl.constexpr = T.lanes.bit_length() - 1
    values = asm(C.unpack, C.unpack_constraints, words, C.unpack_types)
    if C.head_norms:
        total = values[0] * values[0]
        for i in gl.static_range(1, 8):
            total += values[i] * values[i]
        for step in gl.static_range(STEPS):
            total += exchanged(total, 1 << step)
        root = gl.rsqrt(total / C.shape.head_dim + C.shape.norm_eps)
        normed = ()
        for i in gl.static_range(8):
            normed = normed + (values[i] * root * gamma[i],)
        values = normed
    turned = ()
    for i in gl.static_range(8):
        turned = turned + (values[i] * cos[i] + exchanged(values[i], T.lanes // 2) * sin[i],)
    return asm(C.pack, C.pack_constraints, turned, ptx(C.words_types, 4))


@gluon.jit
def dot(a, b, C: gl.constexpr):
    """Returns the product of two heads, whose elements the lanes of a worker share."""
    STEPS: gl.constexpr = C.table.lanes.bit_length() - 1
    total = a[0] * b[0]
    for i in gl.static_range(1, 8):
        total += a[i] * b[i]
    for step in gl.static_range(STEPS):
        total += exchanged(total, 1 << step)
    return total


@gluon.jit
def attend_new(q, k, v, own, C: gl.constexpr):
    """Returns (maxima, totals, sums) after the new token alone, for threads whose `own` is True; of nothing for others."""
    HEADS: gl.constexpr = C.table.set_heads
    keys = asm(C.unpack, C.unpack_constraints, k, C.unpack_types)
    values = asm(C.unpack, C.unpack_constraints, v, C.unpack_types)
    tops = ()
    totals = ()
    sums = ()
    for h in gl.static_range(HEADS):
        score = dot(asm(C.unpack, C.unpack_constraints, q[4 * h : 4 * h + 4], C.unpack_types), keys, C) * C.scale_log2
        tops = tops + (gl.where(own, score, NOTHING),)
        totals = totals + (gl.where(own, 1.0, 0.0),)
        for i in gl.static_range(8):
            sums = sums + (gl.where(own, values[i], 0.0),)
    return tops, totals, sums


@gluon.jit
def attend_sinks(sinks, tops, totals, sums, worker, own, C: gl.constexpr):
    """Adds the sinks float32 [heads], scores of nothing, to (maxima, totals, sums) for threads whose `own` is True."""
    HEADS: gl.constexpr = C.table.set_heads
    G: gl.constexpr = C.shape.group
    new_tops = ()
    new_totals = ()
    new_sums = ()
    for h in gl.static_range(HEADS):
        sink = gl.load(sinks + (worker.kv_head * G + gl.minimum(worker.heads * HEADS + h, G - 1))) * LOG2_E
        sink = gl.where(own, sink, NOTHING * 2)
        top = gl.maximum(tops[h], sink)
        fade = gl.exp2(tops[h] - top)
        new_tops = new_tops + (top,)
        new_totals = new_totals + (totals[h] * fade + gl.exp2(sink - top),)
        for i in gl.static_range(8):
            new_sums = new_sums + (sums[8 * h + i] * fade,)
    return new_tops, new_totals, new_sums


@gluon.jit
def attend_tokens(q, k, v, tops, totals, sums, worker, begin, end, C: gl.constexpr):
    """Adds the two tokens of an iteration to (maxima, totals, sums)."""
    T: gl.constexpr = C.table
    HEADS: gl.constexpr = T.set_heads
    token = begin + worker.number
    keys0 = asm(C.unpack, C.unpack_constraints, k[0:4], C.unpack_types)
    keys1 = asm(C.unpack, C.unpack_constraints, k[4:8], C.unpack_types)
    scores = ()
    for h in gl.static_range(HEADS):
        of_q = asm(C.unpack, C.unpack_constraints, q[4 * h : 4 * h + 4], C.unpack_types)
        first = gl.where(is_attended(token, worker, end, C), dot(of_q, keys0, C) * C.scale_log2, NOTHING * 2)
        second = dot(of_q, keys1, C) * C.scale_log2
        second = gl.where(is_attended(token + T.workers, worker, end, C), second, NOTHING * 2)
        scores = scores + (first, second)
    values0 = asm(C.unpack, C.unpack_constraints, v[0:4], C.unpack_types)
    values1 = asm(C.unpack, C.unpack_constraints, v[4:8], C.unpack_types)
    new_tops = ()
    new_totals = ()
    new_sums = ()
    for h in gl.static_range(HEADS):
        top = gl.maximum(tops[h], gl.maximum(scores[2 * h], scores[2 * h + 1]))
        fade, p0, p1 = gl.exp2(tops[h] - top), gl.exp2(scores[2 * h] - top), gl.exp2(scores[2 * h + 1] - top)
        new_tops = new_tops + (top,)
        new_totals = new_totals + (totals[h] * fade + (p0 + p1),)
        for i in gl.static_range(8):
            new_sums = new_sums + (sums[8 * h + i] * fade + (p0 * values0[i] + p1 * values1[i]),)
    return new_tops, new_totals, new_sums


@gluon.jit
def merge_lanes(tops, totals, sums, C: gl.constexpr):
    """Merges the workers of a warp; all have the result."""
    T: gl.constexpr = C.table
    HEADS: gl.constexpr = T.set_heads
    STEPS: gl.constexpr = (32 // T.lanes).bit_length() - 1
    for step in gl.static_range(STEPS):
        new_tops = ()
        new_totals = ()
        new_sums = ()
        for h in gl.static_range(HEADS):
            top = gl.maximum(tops[h], exchanged(tops[h], T.lanes << step))
            fade = gl.exp2(tops[h] - top)
            total = totals[h] * fade
            new_tops = new_tops + (top,)
            new_totals = new_totals + (total + exchanged(total, T.lanes << step),)
            for i in gl.static_range(8):
                part = sums[8 * h + i] * fade
                new_sums = new_sums + (part + exchanged(part, T.lanes << step),)
        tops = new_tops
        totals = new_totals
        sums = new_sums
    return tops, totals, sums


@gluon.jit
def sums_to_shared(at, worker, tops, totals, sums, C: gl.constexpr):
    """Stores the sums [warp][head of the set][element], then maxima and totals [warp][head of the set][2], of each warp. Of the
    8 elements of each lane the first 4 come before the last 4 of all lanes, so that stores have few bank conflicts."""
    T: gl.constexpr = C.table
    HEADS: gl.constexpr = T.set_heads
    DIM: gl.constexpr = C.shape.head_dim
    start = at.start + T.x_start
    tops_start = start + T.warps * HEADS * DIM * 4
    own = (at.lane < T.lanes).to(gl.int32)
    for h in gl.static_range(HEADS):
        place = at.warp * HEADS + h
        for i in gl.static_range(2):
            to = start + (place * DIM + i * (DIM // 2) + worker.element // 2) * 4
            run(C.store_words, "=r,r,f,f,f,f,r", (to,) + sums[8 * h + 4 * i : 8 * h + 4 * i + 4] + (own,))
        run(C.store_float, "=r,r,f,r", [tops_start + place * 8, tops[h], (at.lane == 0).to(gl.int32)])
        run(C.store_float, "=r,r,f,r", [tops_start + place * 8 + 4, totals[h], (at.lane == 0).to(gl.int32)])


@gluon.jit
def merge_warps(at, head, element, C: gl.constexpr):
    """Returns (maximum, total, sum) of all warps for an element of a query head of the task's kv head."""
    T: gl.constexpr = C.table
    HEADS: gl.constexpr = T.set_heads
    SETS: gl.constexpr = T.head_sets
    COUNT: gl.constexpr = T.warps // SETS
    DIM: gl.constexpr = C.shape.head_dim
    start = at.start + T.x_start
    tops_start = start + T.warps * HEADS * DIM * 4
    stored = element // 4 % 2 * (DIM // 2) + element // 8 * 4 + element % 4
    top = at.lane.to(gl.float32) * 0.0 + NOTHING
    for i in gl.static_range(COUNT):
        top = gl.maximum(top, asm(C.load_float, "=f,r", [tops_start + (head + i * SETS * HEADS) * 8], gl.float32))
    total = top * 0.0
    sum_ = top * 0.0
    for i in gl.static_range(COUNT):
        place = head + i * SETS * HEADS  # the first warp of a set has the set's number
        fade = gl.exp2(asm(C.load_float, "=f,r", [tops_start + place * 8], gl.float32) - top)
        total += asm(C.load_float, "=f,r", [tops_start + place * 8 + 4], gl.float32) * fade
        sum_ += asm(C.load_float, "=f,r", [start + (place * DIM + stored) * 4], gl.float32) * fade
    return top, total, sum_


@gluon.jit
def append(pages_k, pages_v, worker, k, v, own, C: gl.constexpr):
    """Stores the new token's key and value in its page."""
    A: gl.constexpr = C.shape
    page = gl.load(worker.table + worker.position // PAGE_TOKENS).to(gl.int64)
    place = (page * A.kv_heads + worker.kv_head) * PAGE_TOKENS + worker.position % PAGE_TOKENS
    at = (place * A.head_dim + worker.element) * 2
    run(C.store_token, "=r,l,r,r,r,r,r", (pages_k + at,) + k + (own,))
    run(C.store_token, "=r,l,r,r,r,r,r", (pages_v + at,) + v + (own,))
