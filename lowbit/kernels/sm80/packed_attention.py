"""out[b] = softmax(scale q[b] . K^T) . V for one new token per row over packed pages of fp8, int8 or int4, with norm, RoPE,
rotation, quantization and append of the token; sm_80 and newer.

Reads   qkv fp16 or bf16 [B, (heads + 2 kv_heads) head_dim]; packed pages and scales (pack/kv_pages.py); page tables, positions,
        rows; cos and sin; gammas of norms of heads of q and k, or None; sinks [heads], or None
Writes  codes and scales of the new k and v at the row's position; out [B, heads * head_dim]
Grid    kv heads times groups of 8 query heads x rows x splits, as in paged_attention.py; a split is whole pages
Program 4 warps. Of each page of 128 tokens, warp w has the 32 tokens of block w, with an online softmax and sums of its own, so
        the main loop has no barrier. Codes are loaded in vectors of 16 bytes that are fragments of operand A; the next block is
        loaded to registers while this one is multiplied: K after the scores, V after the sums (parts/kv_block.py)
Lanes   lane 4g + t of a warp belongs to lane group g and has index t in it. It computes scores of the tokens 8r + g of the
        warp's 32 tokens, for r from 0 to 3, and the query heads 2t and 2t + 1
Scales  K's scale multiplies the score, V's the softmax weight p = 2^(score - maximum). p * scale is rounded to fp16. The
        maximum is chosen so that the largest p * scale is 2^14, whatever the size of V; relative to the largest, products down
        to 2^-28 are then as exact as fp16
Token   every program applies RoPE to q, rotates it if keys are rotated, and divides it by its largest element. Split 0 also
        quantizes and stores the new k and v, and uses them as stored
Overlap page tables, positions and the first block are read before the wait for the previous kernel (sm_90), as in
        paged_attention.py
Verify  as in paged_attention.py: a launch of its own stores the keys and values of all rows
Smem    largest scores and sums of p of each thread; q; its largest elements; the sums of the 4 warps
Combine warps are added in shared memory, splits by the last one to arrive, both in order: same input, same bits. A rotation of
        V is undone on the result
Exact   codes are multiplied exactly; q and p * scale are rounded to fp16, whose errors are relative to their largest element;
        sums and softmax in fp32; one rounding at the store. Tested: tests/kernels/sm80/test_packed_attention.py
Source  splits of keys and values: Dao et al., Flash-Decoding (2023); scales outside the products and codes in the order of
        fragments: QServe, arXiv:2405.04532, and BitDecoding, arXiv:2503.18773
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.formats.kv import KVFormat, KVScheme, head_block
from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.attention import PAGE, AttentionShape, DecodeTask
from lowbit.kernels.choose.packed_attention import PackedTile
from lowbit.kernels.parts.gluon import aggregate, asm, barrier, gl, gluon, ptx, run, source_digest
from lowbit.kernels.parts.head_rows import (
    THREADS,
    angles,
    code_values,
    element_index,
    elements_of,
    exchanged,
    rotated,
    row_codes,
    row_max,
    row_scale,
    row_sum,
    rows_layout,
    turned_rows,
)
from lowbit.kernels.parts.kv_block import HEADS, KVBlock
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.prologue import launch_next_kernel, wait_for_previous_kernel
from lowbit.pack.kv_pages import KVPages, padded_head

WARPS = THREADS // 32

LOWEST = gl.constexpr(-1e30)
"""Initial value of the maximum of scores. It is finite, so that a difference of two maxima is not NaN."""

LARGEST_WEIGHT = gl.constexpr(14.0)
"""log2 of the largest p * scale, which is stored in fp16."""

LEAST_SCALE = gl.constexpr(2.0**-25)
"""Half of the smallest positive fp16 scale; stands for a scale of 0 in logarithms."""


def _dummies(text: str) -> str:
    """PTX of `text` with a predicate register `some`; then sets the outputs $0 to $7 to 0."""
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(8))
    return f"{{ .reg .pred some; {text} {zeros} }}"


def _chunk_loads() -> str:
    """PTX that loads 8 float32 from shared memory at $8, or zeros if $16 is 0."""
    loads = " ".join(
        f"@some ld.shared.v4.f32 {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}}, [$8+{4 * i}];" for i in (0, 4)
    )  # fmt: skip
    return _dummies("setp.ne.s32 some, $16, 0;").replace(" }", f" {loads} }}")


def _word_stores(bits: int) -> str:
    """PTX that stores 8 codes $8 to $15 of keys at the address $16, if $24 is not 0: elements 2j and 2j + 1 in field j of both
    halves of a word."""
    per_word, lines = 32 // bits, []
    for word in range(8 // per_word):
        lines.append(f".reg .b32 w{word}, t{word}; mov.b32 w{word}, 0;")
        for e in range(per_word):
            shift = bits * (e // 2) + 16 * (e % 2)
            lines.append(f"shl.b32 t{word}, ${8 + word * per_word + e}, {shift}; or.b32 w{word}, w{word}, t{word};")
    width, words = ("", "w0") if bits == 4 else (".v2", "{w0, w1}")
    return _dummies(f"setp.ne.s32 some, $24, 0; {' '.join(lines)} @some st.global{width}.b32 [$16], {words};")


@dataclass(frozen=True)
class PackedAttention:
    """The kernel's compile-time configuration. `k` and `v` are formats; `k_rotated` and `v_rotated` say which of them are
    rotated. The number of splits is not part of it, so batches and contexts share a kernel. `early_keys`: see PackedTile."""

    shape: AttentionShape
    k: str
    v: str
    k_rotated: bool
    v_rotated: bool
    overlap: bool
    task: DecodeTask = DecodeTask.STEP
    early_keys: bool = False
    page: int = PAGE
    digest: str = source_digest()

    start_of_shared = "{ .reg .b32 start; mov.u32 start, global_smem; add.u32 $0, start, $1; }"
    """PTX that returns the address $1 bytes after the start of the kernel's only allocation, whose offset is 0."""
    low_half = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    high_half = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, high; }"
    transposed_pair = "{ .reg .b32 t; cvt.rn.f16x2.f32 t, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, t; }"
    """PTX that transposes 8 x 8 numbers, rounded to fp16. Lane 4g + t passes elements 2t and 2t + 1 of row g, and gets elements
    2t and 2t + 1 of column g."""
    load_pair = "ld.volatile.shared.v2.f32 {$0, $1}, [$2];"
    load_float = "ld.shared.f32 $0, [$1];"
    load_four = "ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    store_pair = "st.volatile.shared.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0;"
    store_shared = "st.shared.f32 [$1], $2; mov.b32 $0, 0;"

    # The following instructions move 8 neighbouring elements of a thread. Outputs are $0 to $7; those of stores are dummies.
    store_chunk = _dummies("setp.ne.s32 some, $20, 0; @some st.shared.v4.b32 [$12], {$8, $9, $10, $11};")
    store_chunk_constraints = ",".join(["=r"] * 8 + ["r"] * 4 + ["r"] * 16)
    store_floats = _dummies(
        "setp.ne.s32 some, $24, 0; @some st.shared.v4.f32 [$16], {$8, $9, $10, $11};"
        " @some st.shared.v4.f32 [$16+16], {$12, $13, $14, $15};"
    )
    store_floats_constraints = ",".join(["=r"] * 8 + ["f"] * 8 + ["r"] * 16)
    load_chunk = _chunk_loads()
    load_chunk_constraints = ",".join(["=&f"] * 8 + ["r"] * 16)

    @property
    def group(self) -> int:
        return self.shape.group

    @property
    def subgroups(self) -> int:
        """Number of programs that share a kv head."""
        return -(-self.group // HEADS)

    @property
    def block(self) -> KVBlock:
        return KVBlock(self.k, self.v, self.head_dim)

    @property
    def head_dim(self) -> int:
        """Number of elements of a head, padded."""
        return padded_head(self.shape.head_dim)

    @property
    def elements(self) -> int:
        return elements_of(self.head_dim)

    @property
    def threads_layout(self) -> gl.BlockedLayout:
        return gl.BlockedLayout([1], [32], [WARPS], [0])

    @property
    def rows_layout(self) -> gl.BlockedLayout:
        return rows_layout(self.head_dim)

    @property
    def rotation_steps(self) -> int:
        return head_block(self.shape.head_dim).bit_length() - 1

    @property
    def rotation_factor(self) -> float:
        return head_block(self.shape.head_dim) ** -0.5

    @property
    def k_largest(self) -> float:
        return KVFormat(self.k, 4 if self.k == "int4" else 8).largest

    @property
    def v_largest(self) -> float:
        return KVFormat(self.v, 4 if self.v == "int4" else 8).largest

    @property
    def store_words(self) -> str:
        return _word_stores(4 if self.k == "int4" else 8)

    store_words_constraints = ",".join(["=r"] * 8 + ["r"] * 8 + ["l"] * 8 + ["r"] * 8)

    @property
    def score_factor(self) -> float:
        """Factor from q . k to the argument of `powers`. This is a score in base 2, or with a softcap the exponent of 2 in
        tanh(x) = 1 - 2 / (1 + 2 ** (2 log2(e) x)), where x = q . k * scale / softcap."""
        softcap = self.shape.softcap
        return self.shape.scale * math.log2(math.e) * (2 / softcap if softcap else 1.0)

    @property
    def cap_log2(self) -> float:
        return self.shape.softcap * math.log2(math.e)

    # ---- shared memory, in bytes

    @property
    def at_q(self) -> int:
        """Start of q fp16 [8, head_dim], after 4 rows of one float32 per thread."""
        return 4 * 4 * THREADS

    @property
    def q_row(self) -> int:
        """Bytes of a row of q; 16 more than its elements, so that lanes of a quarter of a warp use different banks."""
        return 2 * self.head_dim + 16

    @property
    def at_factor(self) -> int:
        """Start of the largest element of each row of q, float32 [8]."""
        return self.at_q + HEADS * self.q_row

    @property
    def at_start(self) -> int:
        """Start of the accumulators' first values, float32 [8] (`KVBlock.start_asm`)."""
        return self.at_factor + 4 * HEADS

    @property
    def at_score(self) -> int:
        """Start of the scores of the new token, float32 [8]."""
        return self.at_start + 4 * HEADS

    @property
    def at_value(self) -> int:
        """Start of the value of the new token, float32 [head_dim]."""
        return self.at_score + 4 * HEADS

    @property
    def at_sums(self) -> int:
        """Start of the sums float32 [warps, 8, head_dim]."""
        return self.at_value + 4 * self.head_dim

    @property
    def sums_row(self) -> int:
        """Bytes of a row of sums. Lanes 4g + t store element g of rows 2t. Two rows are 8 banks apart, so each of the 32 lanes
        uses another bank."""
        return 4 * (self.head_dim + 4)

    @property
    def shared_rows(self) -> int:
        """Size of shared memory in rows of one float32 per thread."""
        return -(-(self.at_sums + WARPS * HEADS * self.sums_row) // (4 * THREADS))

    # ---- registers

    @property
    def one_at_a_time(self) -> bool:
        """True if registers do not suffice for the codes of keys and of values at once. Then values are loaded after the
        scores, and the next keys after the sums."""
        block = self.block
        return 4 * (block.k_vectors + block.v_vectors) + block.accumulators + block.q_words > 170


@gluon.jit
def powers(dots, C: gl.constexpr):
    """Returns base-2 scores. `dots` are products q . k times C.score_factor."""
    if C.shape.softcap > 0:
        return (1.0 - 2.0 / (1.0 + gl.exp2(dots))) * C.cap_log2
    else:
        return dots


@aggregate
class Lanes:
    """A thread's lane and warp within the block, its lane group g and its index t within the group."""

    lane: gl.tensor
    warp: gl.tensor
    group: gl.tensor
    place: gl.tensor


@aggregate
class Row:
    """What a program computes: kv head, first of up to 8 query heads (counted within the kv head), row and its position, split,
    number of active splits and of all splits."""

    head: gl.tensor
    first: gl.tensor
    b: gl.tensor
    position: gl.tensor
    part: gl.tensor
    active: gl.tensor
    splits: gl.tensor


@gluon.jit
def load_block(pages, scales, page, head, live, at, VECTORS: gl.constexpr, C: gl.constexpr):
    """Loads a lane's words of its warp's block of a page, then 2 words with the scales of its tokens 8r + g, r from 0 to 3."""
    B: gl.constexpr = C.block
    start = page.to(gl.int64) * C.shape.kv_heads + head
    words = pages + (start * (VECTORS * 2048) + (at.warp * (VECTORS * 512) + at.lane * 16))
    scales = scales + (start * C.page + (at.warp * 32 + at.group * 4))
    places = [words.to(gl.int64), scales.to(gl.int64), live]
    return asm(ptx(B.load_asm, VECTORS), ptx(B.load_constraints, VECTORS), places, ptx(B.load_types, VECTORS))


@gluon.jit
def page_of(table, p, end):
    """Returns the number of a page of the row; 0 after the last one."""
    return gl.load(table + p, mask=p < end, other=0)


@gluon.jit
def has_tokens(p, end, oldest, position, at):
    """Returns 1 for threads whose block of a page has a token that the row attends to, else 0."""
    first = p * 128 + at.warp * 32
    return ((p < end) & (first < position) & (first + 32 > oldest)).to(gl.int32)


@gluon.jit
def octet_scale(words, r: gl.constexpr, C: gl.constexpr):
    """Returns the scale of a lane's token 8r + g."""
    text: gl.constexpr = C.low_half if r % 2 == 0 else C.high_half
    return asm(text, "=f,r", [words[r // 2]], gl.float32)


@gluon.jit
def over_groups(x, MAX: gl.constexpr):
    """Returns in each lane the maximum or the sum of x over the 8 lanes that have the same index t."""
    for step in gl.static_range(2, 5):
        other = exchanged(x, 1 << step)
        if MAX:
            x = gl.maximum(x, other)
        else:
            x += other
    return x


@gluon.jit
def weights(dots, k_scales, v_scales, factor, n, oldest, position, top, total, at, C: gl.constexpr):
    """One step of the online softmax, for tokens n + 8r + g and heads 2t, 2t + 1. Returns p * scale as operand B, the factors
    of earlier sums, the new shifted maxima and sums of p.

    A shifted maximum (`top`) is the largest score + log2(scale of v), minus LARGEST_WEIGHT."""
    powers_, scales, highest = (), (), (top[0], top[1])
    for r in gl.static_range(4):
        token = n + r * 8 + at.group
        seen = token < position
        if C.shape.window > 0:
            seen = seen & (token >= oldest)
        k_scale = octet_scale(k_scales, r, C)
        v_scale = gl.where(seen, octet_scale(v_scales, r, C), 0.0)
        scales = scales + (v_scale,)
        room = asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", [gl.maximum(v_scale, LEAST_SCALE)], gl.float32) - LARGEST_WEIGHT
        first = gl.where(seen, powers(dots[2 * r] * k_scale * factor[0], C), float("-inf"))
        second = gl.where(seen, powers(dots[2 * r + 1] * k_scale * factor[1], C), float("-inf"))
        powers_ = powers_ + (first, second)
        highest = (gl.maximum(highest[0], first + room), gl.maximum(highest[1], second + room))
    highest = (over_groups(highest[0], True), over_groups(highest[1], True))
    fade = (gl.exp2(top[0] - highest[0]), gl.exp2(top[1] - highest[1]))
    first_total, second_total, p = total[0] * fade[0], total[1] * fade[1], ()
    for r in gl.static_range(4):
        first = gl.exp2(powers_[2 * r] - highest[0])
        second = gl.exp2(powers_[2 * r + 1] - highest[1])
        first_total += first
        second_total += second
        p = p + (asm(C.transposed_pair, "=r,f,f", [first * scales[r], second * scales[r]], gl.int32),)
    return p, fade, highest, (first_total, second_total)


@gluon.jit
def read_q(at, C: gl.constexpr):
    """Returns the words of q that a lane needs as operand B. The main loop reads them again for each block, which saves
    registers: 16 of 128 for heads of 128 elements."""
    CHUNKS: gl.constexpr = C.block.chunks
    q = ()
    for i in gl.static_range(CHUNKS):
        place = start_of(C.at_q + at.group * C.q_row + (i * 4 + at.place) * 16, C)
        q = q + asm(C.load_four, "=r,=r,=r,=r,r", [place], (gl.int32, gl.int32, gl.int32, gl.int32))
    return q


@gluon.jit
def read_factors(at, C: gl.constexpr):
    """Returns the factors of a lane's scores, for its heads 2t and 2t + 1, t = lane % 4. Scores are computed from q divided by
    its largest element, which is part of the factor."""
    return asm(C.load_pair, "=f,=f,r", [start_of(C.at_factor + at.place * 8, C)], (gl.float32, gl.float32))


@gluon.jit
def attend_to_pages(k, v, k_scale, v_scale, table, begin, end, oldest, row, loaded_k, loaded_v, now, page, at, C: gl.constexpr):
    """Attends to a warp's blocks of the pages `begin` to `end`. Returns its accumulators and sums of weights
    (`KVBlock.value_asm`), its shifted maxima and its sums of p, both of heads 2t and 2t + 1. The first block is loaded already;
    `now` and `page` are the numbers of the first two pages."""
    B: gl.constexpr = C.block
    K_WORDS: gl.constexpr = 4 * B.k_vectors
    V_WORDS: gl.constexpr = 4 * B.v_vectors
    FLOATS: gl.constexpr = B.accumulators + 2
    start = asm(B.start_asm, B.start_constraints, read_q(at, C), (gl.float32, gl.float32))
    # Threads that share an address write the same values, so each can read them back without a barrier.
    kept = start_of(C.at_start + at.place * 8, C)
    run(C.store_pair, "=r,r,f,f", [kept, start[0], start[1]])
    zero = start[0] * 0.0
    y = ()
    for _ in gl.static_range(FLOATS):
        y = y + (zero,)
    top, total = (zero + LOWEST, zero + LOWEST), (zero, zero)
    for p in range(begin, end):
        start = asm(C.load_pair, "=f,=f,r", [start_of(C.at_start + at.place * 8, C)], (gl.float32, gl.float32))
        dots = asm(B.score_asm, B.score_constraints, loaded_k[0:K_WORDS] + read_q(at, C) + start, B.score_types)
        k_scales = loaded_k[K_WORDS : K_WORDS + 2]
        live = has_tokens(p + 1, end, oldest, row.position, at)
        if C.one_at_a_time:
            block_v = load_block(v, v_scale, now, row.head, has_tokens(p, end, oldest, row.position, at), at, B.v_vectors, C)
            now = page
        else:
            loaded_k = load_block(k, k_scale, page, row.head, live, at, B.k_vectors, C)
            if C.early_keys:  # ptxas moves no load of memory past a barrier; it would move these behind the softmax
                run("bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [page])
            block_v = loaded_v
        v_scales = block_v[V_WORDS : V_WORDS + 2]
        n = p * 128 + at.warp * 32
        factor = read_factors(at, C)
        pairs, fade, top, total = weights(dots, k_scales, v_scales, factor, n, oldest, row.position, top, total, at, C)
        y = asm(B.value_asm, B.value_constraints, block_v[0:V_WORDS] + pairs + fade + y, B.value_types)
        if C.one_at_a_time:
            loaded_k = load_block(k, k_scale, page, row.head, live, at, B.k_vectors, C)
        else:
            loaded_v = load_block(v, v_scale, page, row.head, live, at, B.v_vectors, C)
        page = page_of(table, p + 2, end)
    return y, top, total


@gluon.jit
def start_of(offset, C: gl.constexpr):
    """Returns addresses in shared memory of byte offsets."""
    return gl.inline_asm_elementwise(C.start_of_shared, "=r,r", [offset], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def share_q(q, most, d, C: gl.constexpr):
    """Stores in shared memory q [128, elements], which is divided by the largest element of its row, and the largest elements
    `most` [128], times the factor of scores."""
    LAYOUT: gl.constexpr = C.rows_layout
    head = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)) // 16
    odd = d // 2 % 2 == 1
    halves = gl.where(odd, q * C.block.q_odd, q).to(gl.float16)
    exists = (d < C.head_dim).to(gl.int32)
    to = start_of(C.at_q + head[:, None] * C.q_row + d * 2, C)
    gl.inline_asm_elementwise(
        C.store_chunk, C.store_chunk_constraints, [halves, to, exists], dtype=gl.int32, is_pure=False, pack=8
    )  # fmt: skip
    to = start_of(C.at_factor + head * 4, C)
    factor = most * (C.score_factor * C.block.score_factor)
    gl.inline_asm_elementwise(C.store_shared, "=r,r,f", [to, factor], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_codes(pages, codes, scales, scale, page, place, head, d, VALUES: gl.constexpr, C: gl.constexpr):
    """Stores the codes and the scale of a token. All rows of `codes` [128, elements] and all of `scale` [128] are equal; the
    threads of the first row store them."""
    LAYOUT: gl.constexpr = C.rows_layout
    VECTORS: gl.constexpr = C.block.v_vectors if VALUES else C.block.k_vectors
    WORDS: gl.constexpr = VECTORS // C.block.chunks  # words of a lane for 8 elements of a token
    thread = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    octet, inside, chunk = place % 32 // 8, place % 8, d // 8
    start = page.to(gl.int64) * C.shape.kv_heads + head
    to = pages + start * (VECTORS * 2048)
    exists = (thread < 16)[:, None] & (d < C.head_dim)
    if VALUES:
        word = (octet * C.block.chunks + chunk // 4) * WORDS
        field = chunk % 4
        if WORDS == 1:  # two elements 8 apart share a byte
            codes = codes | exchanged(codes, 1) << 4
            exists = exists & (field % 2 == 0)
            field = field // 2
        else:
            word, field = word + field // 2, field % 2
        lane = d % 8 * 4 + inside // 2
        at = ((place // 32 * VECTORS + word // 4) * 32 + lane) * 16 + word % 4 * 4 + inside % 2 * 2 + field
        gl.store(to + at, codes.to(gl.uint8), mask=exists)
    else:
        word = (octet * C.block.chunks + chunk // 4) * WORDS
        at = ((place // 32 * VECTORS + word // 4) * 32 + inside * 4 + chunk % 4) * 16 + word % 4 * 4
        gl.inline_asm_elementwise(
            C.store_words, C.store_words_constraints, [codes, to + at, exists.to(gl.int32)], dtype=gl.int32, is_pure=False,
            pack=8,
        )  # fmt: skip
    at = start * C.page + (place // 32 * 32 + inside * 4 + octet)
    gl.store(scales + (thread * 0 + at), scale, mask=thread == 0)


@gluon.jit
def new_token(qkv_row, k, v, k_scale, v_scale, table, row, q, most, k_norm, cos, sin, d, C: gl.constexpr):
    """Quantizes the new key and value, and stores them unless they are in the pages already. If the launch attends, also stores
    in shared memory the token's score for each row of q and its value, both computed from the codes. q is already divided by
    its largest element `most` [128]."""
    LAYOUT: gl.constexpr = C.rows_layout
    K: gl.constexpr = C.k
    V: gl.constexpr = C.v
    page = gl.load(table + row.position // C.page)
    place = row.position % C.page
    exist = d >= 0
    keys = qkv_row + (C.shape.heads + row.head) * C.shape.head_dim + d * 0
    x = turned_rows(keys, exist, k_norm, cos, sin, d, C)
    if C.k_rotated:
        x = rotated(x, C)
    scale = row_scale(x, C.k_largest)
    codes = row_codes(x, scale, K)
    if C.task.appends:
        store_codes(k, codes, k_scale, scale, page, place, row.head, d, False, C)
    if C.task.attends:
        score = row_sum(q * gl.where(d < C.shape.head_dim, code_values(codes, K), 0.0)) * scale.to(gl.float32)
    values = qkv_row + (C.shape.heads + C.shape.kv_heads + row.head) * C.shape.head_dim + d
    x = gl.load(values, mask=d < C.shape.head_dim, other=0.0).to(gl.float32)
    if C.v_rotated:
        x = rotated(x, C)
    scale = row_scale(x, C.v_largest)
    codes = row_codes(x, scale, V)
    if C.task.appends:
        store_codes(v, codes, v_scale, scale, page, place, row.head, d, True, C)
    if C.task.attends:
        thread = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
        to = start_of(C.at_score + thread // 16 * 4, C)
        score = powers(score * most * C.score_factor, C)
        gl.inline_asm_elementwise(C.store_shared, "=r,r,f", [to, score], dtype=gl.int32, is_pure=False, pack=1)
        value = code_values(codes, V) * scale.to(gl.float32)[:, None]
        exists = ((thread < 16)[:, None] & (d < C.head_dim)).to(gl.int32)
        gl.inline_asm_elementwise(
            C.store_floats, C.store_floats_constraints, [value, start_of(C.at_value + d * 4, C), exists], dtype=gl.int32,
            is_pure=False, pack=8,
        )  # fmt: skip


@gluon.jit
def share_sums(shared, y, top, total, at, C: gl.constexpr):
    """Stores a warp's sums, from which the offsets of codes are subtracted, its maxima and its sums of p in shared memory."""
    B: gl.constexpr = C.block
    COUNT: gl.constexpr = B.accumulators
    for i in gl.static_range(2):
        shared.index(i).store(top[i])
        shared.index(2 + i).store(over_groups(total[i], False))
    for i in gl.static_range(COUNT):
        x = y[i] * ptx(B.value_factor, i) - y[COUNT + i % 2] * B.v_offset
        row = at.warp * 8 + at.place * 2 + i % 2
        element = at.group + (i // 4 * 16 + i // 2 % 2 * 8)
        to = start_of(C.at_sums + row * C.sums_row + element * 4, C)
        run(C.store_shared, "=r,r,f", [to, x])


@gluon.jit
def loaded_floats(at, d, C: gl.constexpr):
    """Loads float32 [128, elements] from shared memory; zeros for elements beyond the head."""
    exists = (d < C.head_dim).to(gl.int32)
    return gl.inline_asm_elementwise(
        C.load_chunk, C.load_chunk_constraints, [start_of(at, C), exists], dtype=gl.float32, is_pure=False, pack=8
    )  # fmt: skip


@gluon.jit
def loaded_float(at, C: gl.constexpr):
    """Loads float32 [128] from shared memory."""
    return gl.inline_asm_elementwise(
        C.load_float, "=f,r", [start_of(at, C)], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def add_warps(sinks, row, d, C: gl.constexpr):
    """Adds the sums of all warps, in order, and in split 0 the new token and the sink. Returns sums [128, elements] of a row
    for each query head, its maximum and its sum of p [128]."""
    LAYOUT: gl.constexpr = C.rows_layout
    head = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)) // 16
    new_score, new_value = head.to(gl.float32) * 0.0 + LOWEST, d.to(gl.float32) * 0.0
    if row.part == 0:
        new_score = loaded_float(C.at_score + head * 4, C)
        new_value = loaded_floats(C.at_value + d * 4, d, C)
    top, tops, totals = new_score, (), ()
    sink = new_score
    if sinks is not None:
        exists = (row.first + head < C.group) & (row.part == 0)
        of_head = row.head * C.group + gl.minimum(row.first + head, C.group - 1)
        sink = gl.load(sinks + of_head, mask=exists, other=0.0).to(gl.float32) * 1.4426950408889634
        sink = gl.where(exists, sink, LOWEST)
        top = gl.maximum(top, sink)
    for warp in gl.static_range(4):
        place = head % 2 * 512 + (warp * 32 + head // 2) * 4
        tops = tops + (loaded_float(place, C),)
        totals = totals + (loaded_float(place + 1024, C),)
        top = gl.maximum(top, tops[warp])
    own = gl.where(row.part == 0, gl.exp2(new_score - top), 0.0)
    total = own
    if sinks is not None:
        total += gl.where(row.part == 0, gl.exp2(sink - top), 0.0)
    y = new_value * own[:, None]
    for warp in gl.static_range(4):
        weight = gl.exp2(tops[warp] - top)
        total += totals[warp] * weight
        y += loaded_floats(C.at_sums + (warp * 8 + head)[:, None] * C.sums_row + d * 4, d, C) * weight[:, None]
    return y, top, total


@gluon.jit
def store_result(out, y, row, d, C: gl.constexpr):
    """Undoes the rotation of values and stores the result of a row's query heads."""
    LAYOUT: gl.constexpr = C.rows_layout
    head = (row.first + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)) // 16)[:, None]
    y = gl.where(d < C.shape.head_dim, y, 0.0)
    if C.v_rotated:
        y = rotated(y, C)
    to = out + (row.b.to(gl.int64) * C.shape.heads + row.head * C.group + head) * C.shape.head_dim + d
    gl.store(to, y.to(out.dtype.element_ty), mask=(head < C.group) & (d < C.shape.head_dim))


@gluon.jit
def combine(out, sums, tops, row, d, C: gl.constexpr):
    """Adds the active splits of one row and kv head in order: `sums` [splits, group, head_dim], `tops` [splits, group, 2]."""
    LAYOUT: gl.constexpr = C.rows_layout
    thread = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    head = gl.minimum(row.first + thread // 16, C.group - 1)
    # The 16 threads of a row share its splits to find the maximum and the sum of p.
    high = thread.to(gl.float32) * 0.0 + LOWEST
    total = high * 0.0
    for first in range(0, row.active, 16):
        part = first + thread % 16
        top = gl.load(tops + (part * C.group + head) * 2, mask=part < row.active, other=LOWEST, cache_modifier=".cg")
        p = gl.load(tops + (part * C.group + head) * 2 + 1, mask=part < row.active, other=0.0, cache_modifier=".cg")
        higher = gl.maximum(high, top)
        total = total * gl.exp2(high - higher) + p * gl.exp2(top - higher)
        high = higher
    most = row_max(high[:, None])
    total = row_sum((total * gl.exp2(high - most))[:, None])
    y = (d * 0).to(gl.float32)
    for first in range(0, row.active, 4):
        values, weight = (), ()
        for i in gl.static_range(4):
            part = gl.minimum(first + i, row.active - 1)
            at = (part * C.group + head)[:, None] * C.head_dim + d
            values = values + (gl.load(sums + at, mask=d < C.head_dim, other=0.0, cache_modifier=".cg"),)
            top = gl.load(tops + (part * C.group + head) * 2, cache_modifier=".cg")
            weight = weight + (gl.where(first + i < row.active, gl.exp2(top - most), 0.0),)
        for i in gl.static_range(4):
            y += values[i] * weight[i][:, None]
    store_result(out, y / total[:, None], row, d, C)


@gluon.jit
def finish(out, partial, arrived, y, top, total, row, d, C: gl.constexpr):
    """Stores the result of a row that has a single split. With several splits, stores this split's sums; the last split to
    arrive combines all of them."""
    LAYOUT: gl.constexpr = C.rows_layout
    if row.active == 1:
        store_result(out, y / total[:, None], row, d, C)
    else:
        place = row.b * C.shape.kv_heads + row.head
        thread = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
        head = row.first + thread // 16
        exists = head < C.group
        tops = partial + gl.num_programs(1) * (row.splits * (C.shape.heads * C.head_dim))
        tops += place * (row.splits * (C.group * 2))
        sums = partial + place.to(gl.int64) * (row.splits * (C.group * C.head_dim))
        at = row.part * C.group + head
        gl.store(sums + at[:, None] * C.head_dim + d, y, mask=exists[:, None] & (d < C.head_dim))
        gl.store(tops + at * 2, top, mask=exists & (thread % 16 == 0))
        gl.store(tops + at * 2 + 1, total, mask=exists & (thread % 16 == 0))
        barrier()  # all threads' stores are visible before the counter
        counter = arrived + (place * C.subgroups + row.first // 8)
        if gl.atomic_add(counter, 1, sem="acq_rel") == row.active - 1:
            gl.store(counter, 0)
            combine(out, sums, tops, row, d, C)


@gluon.jit(do_not_specialize=["table_stride", "splits", "chunk_pages"])
def packed_attention(
    out, qkv, k, v, k_scale, v_scale, tables, positions, rows, cos_sin, q_norm, k_norm, sinks, partial, arrived, table_stride,
    splits, chunk_pages, C: gl.constexpr,
):  # fmt: skip
    """One split of the tokens of one row, for up to 8 query heads of one kv head."""
    B: gl.constexpr = C.block
    LAYOUT: gl.constexpr = C.rows_layout
    b, part = gl.program_id(1), gl.program_id(2)
    slot = gl.load(rows + b)
    position = gl.load(positions + (b if C.task.of_rows else slot))
    oldest = position * 0
    if C.shape.window > 0:
        oldest = gl.maximum(position - C.shape.window + 1, 0)
    first = oldest // C.page
    pages = (position + C.page - 1) // C.page - first
    active = gl.maximum(gl.minimum((pages + chunk_pages - 1) // chunk_pages, splits), 1)
    per = gl.maximum((pages + active - 1) // active, 1)
    active = gl.maximum((pages + per - 1) // per, 1)
    if part < active:
        shared = gl.allocate_shared_memory(gl.float32, [C.shared_rows, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        thread = gl.arange(0, 128, C.threads_layout)
        at = Lanes(thread & 31, thread >> 5, (thread & 31) >> 2, thread & 3)
        row = Row(gl.program_id(0) // C.subgroups, gl.program_id(0) % C.subgroups * 8, b, position, part, active, splits)
        begin = first + part * per
        end = gl.minimum(begin + per, first + pages)
        table = tables + slot.to(gl.int64) * table_stride
        if C.overlap and not C.task.appends:  # the previous kernel stores keys that are read below
            wait_for_previous_kernel()
            launch_next_kernel()
        page = page_of(table, begin, end)
        loaded_k, loaded_v = (), ()
        if C.task.attends:
            live = has_tokens(begin, end, oldest, position, at)
            loaded_k = load_block(k, k_scale, page, row.head, live, at, B.k_vectors, C)
            if not C.one_at_a_time:
                loaded_v = load_block(v, v_scale, page, row.head, live, at, B.v_vectors, C)
        later = page_of(table, begin + 1, end)
        d = element_index(C)
        cos, sin = angles(cos_sin, position, d, C)
        if C.overlap and C.task.appends:
            wait_for_previous_kernel()
            launch_next_kernel()

        qkv_row = qkv + b.to(gl.int64) * C.shape.features
        head = (row.first + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)) // 16)[:, None]
        queries = qkv_row + (row.head * C.group + head) * C.shape.head_dim
        q = turned_rows(queries, head < C.group, q_norm, cos, sin, d, C)
        if C.k_rotated:
            q = rotated(q, C)
        most = row_max(gl.abs(q))
        most += row_sum(q * 0.0)  # NaN for rows that are not finite
        q = q * gl.where(most > 0, 1.0 / most, most)[:, None]
        if C.task.attends:
            share_q(q, most, d, C)
        if part == 0:
            new_token(qkv_row, k, v, k_scale, v_scale, table, row, q, most, k_norm, cos, sin, d, C)
        if C.task.attends:
            barrier()
            y, top, total = attend_to_pages(
                k, v, k_scale, v_scale, table, begin, end, oldest, row, loaded_k, loaded_v, page, later, at, C
            )  # fmt: skip
            share_sums(shared, y, top, total, at, C)
            barrier()
            y, top, total = add_warps(sinks, row, d, C)
            finish(out, partial, arrived, y, top, total, row, d, C)


class PackedAttentionPlan:
    """The plan of a decode step's attention over packed pages: created once, called many times.

    A plan serves one GPU, one type of q and one type of gammas; all tensors are contiguous and start at multiples of 16 bytes.
    verify: rows may be several new tokens of a sequence, and positions are those of rows; takes two launches.
    """

    def __init__(
        self, rows: int, shape: AttentionShape, kv: KVScheme, tile: PackedTile, machine: Machine, *, verify: bool = False
    ) -> None:
        self.rows, self.shape, self.tile = rows, shape, tile
        overlap = machine.arch.sm >= 90
        task = DecodeTask.VERIFY if verify else DecodeTask.STEP
        formats = kv.k.name, kv.v.name, kv.k.rotated, kv.v.rotated
        self.config = PackedAttention(shape, *formats, overlap, task, tile.early_keys)
        grid = (shape.kv_heads * self.config.subgroups, rows, tile.splits)
        self.append: Launcher | None = None
        if verify:
            self.append_config = replace(self.config, task=DecodeTask.APPEND)
            self.append = Launcher(packed_attention, (*grid[:2], 1), WARPS, overlap=overlap, registers=tile.registers)
        self.launch = Launcher(packed_attention, grid, WARPS, overlap=overlap, registers=tile.registers)

    @property
    def workspace(self) -> tuple[int, int]:
        """Number of elements of the two workspaces: float32 sums, and int32 counters, which are zero before and after a
        launch."""
        if self.tile.splits == 1:
            return 0, 0
        sums = self.rows * self.shape.heads * self.tile.splits * (self.config.head_dim + 2)
        return sums, self.rows * self.shape.kv_heads * self.config.subgroups

    def __call__(
        self, qkv: Tensor, pages: KVPages, tables: Tensor, positions: Tensor, rows: Tensor, cos_sin: Tensor,
        q_norm: Tensor | None, k_norm: Tensor | None, sinks: Tensor | None, partial: Tensor, arrived: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns out [B, heads * head_dim]; all tensors on the current device."""
        out = torch.empty((self.rows, self.shape.heads * self.shape.head_dim), dtype=qkv.dtype, device=qkv.device)
        given = (
            out, qkv, *pages.tensors, tables, positions, rows, cos_sin, q_norm, k_norm, sinks, partial, arrived,
            tables.stride(0), self.tile.splits, self.tile.chunk // PAGE,
        )  # fmt: skip
        if self.append is not None:
            self.append(*given, self.append_config)
        self.launch(*given, self.config)
        return out
