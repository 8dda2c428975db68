"""Attention of one token over a split of keys and values in 16-bit pages, on tensor cores, for a kernel's math warps.

A warp computes tiles of 8 tokens for all query heads of a kv head, at most 8, by mma.sync.m16n8k16. The first product is the
scores q . k^T, whose rows 0 to 7 are heads and whose rows 8 to 15 are zero. The second one is v^T . p^T of values and
probabilities, whose columns are heads. Lane 4g + t holds

    q, k     of each 32 elements of q of head g, and of k of token g, the 8 elements from 8t on. So loads have 16 bytes, and
             RoPE rotates elements of the same lane. Scores do not depend on the order of elements
    scores   of head g, for tokens 2t and 2t + 1; their probabilities are a fragment of p^T
    v        of each 64 elements of tokens 2t and 2t + 1, elements 8g to 8g + 7
    sums     of these elements, for heads 2t and 2t + 1

Each warp keeps the maxima, totals and sums of its tiles (online softmax in base 2). They are merged through shared memory, in a
fixed order.

C is a kernel's configuration: a `SplitAttention`. `C.table` (choose/decode_step.py) has `tile_warps`, the number of warps that
compute tiles, and `x_start`, where sums are merged in shared memory. `C.head_norms`: heads of q and k are normed. `C.windows`:
some layers have a window.

Exact   q and k are rounded to 16 bits after norm and RoPE, probabilities before they are multiplied; all else is float32
Tested  tests/kernels/parts/test_split_attention.py
Source  online softmax: Milakov and Gimelshein (2018); fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16"
"""

from __future__ import annotations

import math

from lowbit.hardware.half import HalfType
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.kernels.parts.gluon import Scalar, aggregate, asm, gl, gluon, ptx, run
from lowbit.kernels.parts.head_rows import exchanged
from lowbit.kernels.parts.k_block import mma, operands_of

NOTHING = gl.constexpr(-1e30)
"""Maximum before the first score. It is finite, so that a difference of two maxima is not NaN."""

PAGE_TOKENS = gl.constexpr(PAGE)

TILE_TOKENS = gl.constexpr(8)
"""Tokens of a tile."""

OF_LANE = gl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;")
"""PTX that returns $1 of the lane $2."""

LOG2_E = gl.constexpr(math.log2(math.e))


class SplitAttention:
    """Base class of kernel configurations, with the PTX of attention."""

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
    def key_vectors(self) -> int:
        """Vectors of 16 bytes of a lane's q, and of its k."""
        return self.shape.head_dim // 32

    @property
    def value_vectors(self) -> int:
        """Vectors of 16 bytes of a lane's v of one token."""
        return self.shape.head_dim // 64

    @property
    def sums(self) -> int:
        """Number of a lane's sums."""
        return self.shape.head_dim // 4

    @property
    def sums_types(self) -> tuple[gl.dtype, ...]:
        return (gl.float32,) * self.sums

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

    @property
    def scores(self) -> str:
        """PTX of a lane's two scores, of head g for tokens 2t and 2t + 1. Outputs: the scores. Inputs: words of q, words of k.
        Even and odd steps are summed separately, since independent sums take half the time."""
        out, q, k = operands_of(2, 4 * self.key_vectors, 4 * self.key_vectors)
        lines = [".reg .b32 none; .reg .f32 c<8>; mov.b32 none, 0;", *(f"mov.f32 c{i}, 0f00000000;" for i in range(8))]
        for step in range(2 * self.key_vectors):
            a, b, first = q[2 * step : 2 * step + 2], k[2 * step : 2 * step + 2], 4 * (step % 2)
            sums = [f"c{first + i}" for i in range(4)]
            lines.append(mma(self.dtype, sums, [a[0], "none", a[1], "none"], b, sums))
        return "{\n" + "\n".join([*lines, *(f"add.f32 {out[i]}, c{i}, c{4 + i};" for i in range(2))]) + "\n}"

    @property
    def scores_constraints(self) -> str:
        return ",".join(["=&f"] * 2 + ["r"] * (8 * self.key_vectors))

    scores_types = (gl.float32,) * 2

    @property
    def weigh(self) -> str:
        """PTX that adds v times its probabilities to 16 sums: number 4m + 2i + h is of element 2m + i of the lane's 8 and of
        head 2t + h. Outputs: sums. Inputs: probabilities of tokens 2t and 2t + 1 as float32, words of v of token 2t, of 2t + 1,
        sums."""
        out, p, first, second, sums = operands_of(16, 2, 4, 4, 16)
        pair = "f16x2" if self.dtype == "fp16" else "bf16x2"
        lines = [f".reg .b32 none, a, b, c; mov.b32 none, 0; cvt.rn.{pair}.f32 c, {p[1]}, {p[0]};"]
        for m in range(4):
            lines.append(f"prmt.b32 a, {first[m]}, {second[m]}, 0x5410; prmt.b32 b, {first[m]}, {second[m]}, 0x7632;")
            four = slice(4 * m, 4 * m + 4)
            lines.append(mma(self.dtype, out[four], ["a", "b", "none", "none"], ["c", "none"], sums[four]))
        return "{\n" + "\n".join(lines) + "\n}"

    weigh_constraints = ",".join(["=&f"] * 16 + ["f"] * 2 + ["r"] * 8 + ["f"] * 16)
    weigh_types = (gl.float32,) * 16

    load_token = (
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;\n"
        "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
    )
    """PTX that loads 8 halves at $4, or zeros if $5 is 0."""
    load_token_constraints = "=&r,=&r,=&r,=&r,l,r"
    prefetch = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
    touch = "ld.global.b32 $0, [$1];"
    load_floats = "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];"
    load_floats_constraints = "=&f,=&f,=&f,=&f,l"
    load_floats_types = (gl.float32,) * 4
    store_token = "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
    store_words = "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
    load_words = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    store_two = "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }"
    load_two = "ld.shared.v2.f32 {$0, $1}, [$2];"
    load_two_types = (gl.float32,) * 2
    load_float = "ld.shared.f32 $0, [$1];"
    store_float = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.f32 [$1], $2; mov.b32 $0, 0; }"


@aggregate
class SplitTask:
    """A split of a row and kv head, and the row's position, first token (0 without a window) and page table."""

    row: Scalar
    kv_head: Scalar
    split: Scalar
    position: Scalar
    first: Scalar
    table: Scalar


@gluon.jit
def is_attended(token, task, end, C: gl.constexpr):
    """Returns whether a token is before `end` and in the window."""
    there = token < end
    if C.windows:
        there = there & (token >= task.first)
    return there


@gluon.jit
def first_vector(task, start, end, C: gl.constexpr):
    """Returns the index of token `start`, a tile's first, in the pages: among the tokens of all pages and kv heads."""
    page = gl.load(task.table + start // PAGE_TOKENS, mask=start < end, other=0).to(gl.int64)
    return (page * C.shape.kv_heads + task.kv_head) * PAGE_TOKENS + start % PAGE_TOKENS


@gluon.jit
def load_keys(pages, task, at, start, end, C: gl.constexpr):
    """Loads a lane's words of the keys of the tile that begins at token `start`; zeros from token `end` on."""
    COUNT: gl.constexpr = C.key_vectors
    number = at.lane >> 2
    there = is_attended(start + number, task, end, C).to(gl.int32)
    address = pages + ((first_vector(task, start, end, C) + number) * C.shape.head_dim + (at.lane & 3) * 8) * 2
    words = ()
    for j in gl.static_range(COUNT):
        words = words + asm(C.load_token, C.load_token_constraints, [address + 64 * j, there], ptx(C.words_types, 4))
    return words


@gluon.jit
def value_address(pages, task, at, start, end, C: gl.constexpr):
    """Returns the address of a lane's first vector of the values of the tile that begins at token `start`."""
    number = (at.lane & 3) * 2
    return pages + ((first_vector(task, start, end, C) + number) * C.shape.head_dim + (at.lane >> 2) * 8) * 2


@gluon.jit
def prefetch_values(pages, task, at, start, end, C: gl.constexpr):
    """Prefetches the values of the tile that begins at token `start` into L2."""
    COUNT: gl.constexpr = C.value_vectors
    address = value_address(pages, task, at, start, end, C)
    for i in gl.static_range(2):
        there = is_attended(start + (at.lane & 3) * 2 + i, task, end, C).to(gl.int32)
        for j in gl.static_range(COUNT):
            run(C.prefetch, "=r,l,r", [address + i * C.shape.head_dim * 2 + 128 * j, there])


@gluon.jit
def load_values(pages, task, at, start, end, C: gl.constexpr):
    """Loads a lane's words of the values of the tile that begins at token `start`: of token 2t, then of 2t + 1."""
    COUNT: gl.constexpr = C.value_vectors
    number = (at.lane & 3) * 2
    address = value_address(pages, task, at, start, end, C)
    words = ()
    for i in gl.static_range(2):
        there = is_attended(start + number + i, task, end, C).to(gl.int32)
        for j in gl.static_range(COUNT):
            inputs = [address + i * C.shape.head_dim * 2 + 128 * j, there]
            words = words + asm(C.load_token, C.load_token_constraints, inputs, ptx(C.words_types, 4))
    return words


@gluon.jit
def load_eight(source, at, C: gl.constexpr):
    """Loads a lane's 8 float32 of 32 elements at address `source`."""
    address = source + (at.lane & 3).to(gl.int64) * 32
    first = asm(C.load_floats, C.load_floats_constraints, [address], C.load_floats_types)
    return first + asm(C.load_floats, C.load_floats_constraints, [address + 16], C.load_floats_types)


@gluon.jit
def angles_row(cos_sin, position, C: gl.constexpr):
    """Returns the address of the cosines at a position, which its sines follow; `cos_sin`: address of the table."""
    return cos_sin + position.to(gl.int64) * (4 * C.shape.rotary_dim)


@gluon.jit
def touch_angles(row, at, C: gl.constexpr):
    """Loads the cosines and sines at `row` into L1, from where `turn_head` loads them again."""
    run(C.touch, "=r,l", [row + at.lane * (C.shape.rotary_dim // 8)])


@gluon.jit
def root_of_head(words, C: gl.constexpr):
    """Returns 1 / rms of a head, of which a lane has words."""
    COUNT: gl.constexpr = C.key_vectors
    total = None
    for j in gl.static_range(COUNT):
        values = asm(C.unpack, C.unpack_constraints, words[4 * j : 4 * j + 4], C.unpack_types)
        for i in gl.static_range(8):
            square = values[i] * values[i]
            total = square if total is None else total + square
    for step in gl.static_range(2):
        total += exchanged(total, 1 << step)
    return gl.rsqrt(total / C.shape.head_dim + C.shape.norm_eps)


@gluon.jit
def normed_eight(words, root, gamma, at, C: gl.constexpr):
    """Returns 8 elements of a head after its norm, if it has one; `gamma`: address of the norm's weights of 32 elements."""
    values = asm(C.unpack, C.unpack_constraints, words, C.unpack_types)
    normed = ()
    if C.head_norms:
        weights = load_eight(gamma, at, C)
        for i in gl.static_range(8):
            normed = normed + (values[i] * root * (weights[i] + C.shape.norm_offset),)
    else:
        normed = values
    return normed


@gluon.jit
def turn_head(words, gamma, row, at, C: gl.constexpr):
    """Returns a lane's words of a head after norm, by weights at address `gamma`, and RoPE by the angles at `row`. Few elements
    are in registers at a time."""
    PAIRS: gl.constexpr = C.key_vectors // 2
    root = words[0].to(gl.float32)
    if C.head_norms:
        root = root_of_head(words, C)
    low = ()
    high = ()
    for j in gl.static_range(PAIRS):
        first = normed_eight(words[4 * j : 4 * j + 4], root, gamma + 128 * j, at, C)
        second = normed_eight(words[4 * (j + PAIRS) : 4 * (j + PAIRS) + 4], root, gamma + 128 * (j + PAIRS), at, C)
        cos, sin = load_eight(row + 128 * j, at, C), load_eight(row + 128 * (j + PAIRS), at, C)
        turned = ()
        for i in gl.static_range(8):
            turned = turned + (first[i] * cos[i] - second[i] * sin[i],)
        low = low + asm(C.pack, C.pack_constraints, turned, ptx(C.words_types, 4))
        turned = ()
        for i in gl.static_range(8):
            turned = turned + (second[i] * cos[i] + first[i] * sin[i],)
        high = high + asm(C.pack, C.pack_constraints, turned, ptx(C.words_types, 4))
    return low + high


@gluon.jit
def of_row(words, row: gl.constexpr, at, count: gl.constexpr):
    """Returns in each lane 4g + t the words that lane 4 row + t has."""
    found = ()
    for i in gl.static_range(count):
        found = found + (asm(OF_LANE, "=r,r,r", [words[i], 4 * row + (at.lane & 3)], gl.int32),)
    return found


@gluon.jit
def chosen(condition, one, other, count: gl.constexpr):
    """Returns `one` where the condition holds, else `other`: tuples of `count` words."""
    words = ()
    for i in gl.static_range(count):
        words = words + (gl.where(condition, one[i], other[i]),)
    return words


@gluon.jit
def attend_nothing(sinks, task, at, own, C: gl.constexpr):
    """Returns (maximum, total, sums) before the first token. If there are sinks (float32 [heads], scores without a value),
    warps whose `own` is True start with them."""
    G: gl.constexpr = C.shape.group
    COUNT: gl.constexpr = C.sums
    zero = at.lane.to(gl.float32) * 0.0
    top = zero + NOTHING
    total = zero
    if C.sinks:
        sink = gl.load(sinks + (task.kv_head * G + gl.minimum(at.lane >> 2, G - 1)))
        top = gl.where(own, sink * LOG2_E, top)
        total = gl.where(own & ((at.lane & 3) == 0), 1.0, 0.0)
    sums = ()
    for _ in gl.static_range(COUNT):
        sums = sums + (zero,)
    return top, total, sums


@gluon.jit
def store_query(q, at, place, C: gl.constexpr):
    """Stores a lane's words of q in shared memory at `place`; all warps store the same."""
    COUNT: gl.constexpr = C.key_vectors
    for j in gl.static_range(COUNT):
        inputs = (at.start + place + at.lane * 16 + 512 * j,) + q[4 * j : 4 * j + 4] + (at.lane * 0 + 1,)
        run(C.store_words, "=r,r,r,r,r,r,r", inputs)


@gluon.jit
def load_query(at, place, C: gl.constexpr):
    """Returns what `store_query` stored."""
    COUNT: gl.constexpr = C.key_vectors
    q = ()
    for j in gl.static_range(COUNT):
        q = q + asm(C.load_words, "=&r,=&r,=&r,=&r,r", [at.start + place + at.lane * 16 + 512 * j], ptx(C.words_types, 4))
    return q


@gluon.jit
def tile_scores(q, k, task, at, start, end, C: gl.constexpr):
    """Returns a lane's two scores of the tile that begins at token `start`."""
    token = start + (at.lane & 3) * 2
    first, second = asm(C.scores, C.scores_constraints, q + k, C.scores_types)
    first = gl.where(is_attended(token, task, end, C), first * C.scale_log2, NOTHING * 2)
    second = gl.where(is_attended(token + 1, task, end, C), second * C.scale_log2, NOTHING * 2)
    return first, second


@gluon.jit
def add_tile(first, second, v, top, total, sums, at, C: gl.constexpr):
    """Adds a tile to (maximum, total, sums), from the lane's two scores and its words of v. The total includes only the
    probabilities of the lane's own tokens."""
    COUNT: gl.constexpr = C.value_vectors
    new_top = gl.maximum(first, second)
    for step in gl.static_range(2):
        new_top = gl.maximum(new_top, exchanged(new_top, 1 << step))
    new_top = gl.maximum(top, new_top)
    fade, p0, p1 = gl.exp2(top - new_top), gl.exp2(first - new_top), gl.exp2(second - new_top)
    fades = ()
    for i in gl.static_range(2):  # of heads 2t and 2t + 1
        fades = fades + (asm(OF_LANE, "=f,f,r", [fade, (at.lane & 3) * 8 + 4 * i], gl.float32),)
    new_sums = ()
    for j in gl.static_range(COUNT):
        faded = ()
        for i in gl.static_range(16):
            faded = faded + (sums[16 * j + i] * fades[i % 2],)
        words = v[4 * j : 4 * j + 4] + v[4 * (COUNT + j) : 4 * (COUNT + j) + 4]
        new_sums = new_sums + asm(C.weigh, C.weigh_constraints, (p0, p1) + words + faded, C.weigh_types)
    return new_top, total * fade + (p0 + p1), new_sums


@gluon.jit
def sums_to_shared(at, top, total, sums, C: gl.constexpr):
    """Stores the sums [warp][head][element], then maxima and totals [warp][head][2], of the warps that have tiles."""
    A: gl.constexpr = C.shape
    COUNT: gl.constexpr = C.value_vectors
    WARPS: gl.constexpr = C.table.tile_warps
    for step in gl.static_range(2):
        total += exchanged(total, 1 << step)
    start, warp = at.start + C.table.x_start, gl.minimum(at.warp, WARPS - 1)
    exists = at.warp < WARPS
    for h in gl.static_range(2):
        head = (at.lane & 3) * 2 + h
        own = (exists & (head < A.group)).to(gl.int32)
        to = start + ((warp * A.group + gl.minimum(head, A.group - 1)) * A.head_dim + (at.lane >> 2) * 8) * 4
        for j in gl.static_range(COUNT):
            for i in gl.static_range(2):
                four = sums[16 * j + 8 * i + h : 16 * j + 8 * i + h + 7 : 2]
                run(C.store_words, "=r,r,f,f,f,f,r", (to + (256 * j + 16 * i),) + four + (own,))
    head = at.lane >> 2
    own = (exists & (head < A.group) & ((at.lane & 3) == 0)).to(gl.int32)
    to = start + WARPS * A.group * A.head_dim * 4 + (warp * A.group + gl.minimum(head, A.group - 1)) * 8
    run(C.store_two, "=r,r,f,f,r", [to, top, total, own])


@gluon.jit
def nothing_to_shared(at, C: gl.constexpr):
    """As `sums_to_shared`, for a warp without tiles."""
    COUNT: gl.constexpr = C.sums
    zero = at.lane.to(gl.float32) * 0.0
    sums = ()
    for _ in gl.static_range(COUNT):
        sums = sums + (zero,)
    sums_to_shared(at, zero + NOTHING, zero, sums, C)


@gluon.jit
def merge_warps(at, head, element, C: gl.constexpr):
    """Returns (maximum, total, sum) of all warps for an element of a query head of the task's kv head."""
    A: gl.constexpr = C.shape
    WARPS: gl.constexpr = C.table.tile_warps
    start = at.start + C.table.x_start
    tops_start = start + (WARPS * A.group * A.head_dim + head * 2) * 4
    tops = ()
    totals = ()
    top = at.lane.to(gl.float32) * 0.0 + NOTHING
    for i in gl.static_range(WARPS):
        own, total = asm(C.load_two, "=&f,=&f,r", [tops_start + i * (A.group * 8)], C.load_two_types)
        tops = tops + (own,)
        totals = totals + (total,)
        top = gl.maximum(top, own)
    total = top * 0.0
    sum_ = top * 0.0
    for i in gl.static_range(WARPS):
        fade = gl.exp2(tops[i] - top)
        total += totals[i] * fade
        sum_ += asm(C.load_float, "=f,r", [start + ((i * A.group + head) * A.head_dim + element) * 4], gl.float32) * fade
    return top, total, sum_


@gluon.jit
def append(pages_k, pages_v, task, at, k, v, own, C: gl.constexpr):
    """Stores the new token's key and value in its page, by the warps whose `own` is True."""
    KEYS: gl.constexpr = C.key_vectors
    VALUES: gl.constexpr = C.value_vectors
    group, pair = at.lane >> 2, at.lane & 3
    place = first_vector(task, task.position, task.position + 1, C) * (C.shape.head_dim * 2)
    of_k, of_v = (own & (group == 0)).to(gl.int32), (own & (pair == 0)).to(gl.int32)
    for j in gl.static_range(KEYS):
        run(C.store_token, "=r,l,r,r,r,r,r", (pages_k + place + pair * 16 + 64 * j,) + k[4 * j : 4 * j + 4] + (of_k,))
    for j in gl.static_range(VALUES):
        run(C.store_token, "=r,l,r,r,r,r,r", (pages_v + place + group * 16 + 128 * j,) + v[4 * j : 4 * j + 4] + (of_v,))
