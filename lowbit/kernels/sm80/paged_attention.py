"""out[b] = softmax(scale q[b] . K^T) . V for one new token per row over a paged KV cache, with RoPE and append; sm_80 and
newer.

Reads   qkv fp16 or bf16 [B, (heads + 2 kv_heads) head_dim]; pages k, v [pages, kv_heads, 128, head_dim]; page tables,
        positions, rows; cos and sin; gammas of norms of heads of q and k, or None; sinks [heads], or None
Writes  the new k and v at the row's position; out [B, heads * head_dim]
Grid    kv heads x rows x splits; it stays the same while contexts change. A program computes the number of active splits from
        the row's position (choose/attention.py, `DecodeTile.active`) and exits at once if its split has no work; splits are the
        slowest dimension
Program one split of one kv head, whose query heads are 16 rows of mma.sync. While a block of keys and values is multiplied, the
        next one is loaded to registers, or several to shared memory (`DecodeTile.stages`). Split 0 includes the new token,
        without reading it back from memory
Overlap page tables, positions, gammas (in programs of four warps) and, with one stage, the first block of old keys and values
        are read before the wait for the previous kernel (sm_90). No kernel of this step writes them. The previous step is
        complete, because the first kernel of a step lets the next one start only after it has waited itself
Verify  with several new tokens of a sequence among the rows (`task`), a launch of its own stores the keys and values of all
        rows: the same kernel up to the append. The next launch waits for it, then reads all keys before the row's position
        from the pages. Each row gets the same bits as in a step with this token alone
Combine the last split to arrive for a row and kv head adds all splits in order; a counter, which is zero afterwards, identifies
        it
Sinks   an additional score per head without a value: split 0 starts with it and the new token
Window  only blocks within the sliding window are read
Exact   q and k are rounded to 16 bits after RoPE, p before its product with V; sums and softmax in fp32, one rounding at the
        store. Tested: tests/kernels/sm80/test_paged_attention.py
Source  splits of keys and values: Dao et al., Flash-Decoding (2023); online softmax: Milakov and Gimelshein (2018)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.attention import PAGE, AttentionShape, DecodeTask, DecodeTile, combine_round
from lowbit.kernels.parts.gluon import source_digest
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rotary import angles, gammas, normed, pairs, turned
from lowbit.pack.kv_pages import KVPages


@dataclass(frozen=True)
class PagedAttention:
    """The kernel's compile-time configuration."""

    shape: AttentionShape
    tile: DecodeTile
    overlap: bool
    task: DecodeTask = DecodeTask.STEP
    page: int = PAGE
    digest: str = source_digest()

    @property
    def lanes(self) -> int:
        return self.shape.lanes

    @property
    def group(self) -> int:
        return self.shape.group

    @property
    def group_rows(self) -> int:
        """Number of query heads per kv head, padded to a power of two."""
        return 1 << (self.group - 1).bit_length()

    @property
    def scale_log2(self) -> float:
        """Factor from q . k to scores in base 2: softmax uses 2 ** score."""
        return self.shape.scale * math.log2(math.e)

    @property
    def into_cap(self) -> float:
        """Factor from q . k to the exponent of 2 in tanh(x) = 1 - 2 / (1 + 2 ** (2 log2(e) x)), where x = q . k * scale /
        softcap. The formula is as accurate as float32."""
        return 2 * math.log2(math.e) * self.shape.scale / self.shape.softcap

    @property
    def cap_log2(self) -> float:
        return self.shape.softcap * math.log2(math.e)

    @property
    def chunk_blocks(self) -> int:
        return self.tile.chunk // self.tile.block

    @property
    def copies(self) -> int:
        """Number of equal rows in which a program holds RoPE angles and the new token. With several warps a single row would be
        converted between layouts, which takes two barriers each time. A single warp needs no barriers, and has no registers for
        more rows."""
        return 1 if self.tile.warps == 1 else 16

    @property
    def early_gammas(self) -> bool:
        """True if gammas are loaded before the wait for the previous kernel, as far as registers suffice."""
        return self.tile.warps == 4

    @property
    def few_heads(self) -> bool:
        """True if `combine` adds the splits, which computes weights head by head; False: `combine_wide`."""
        return self.group_rows <= 4

    @property
    def ahead(self) -> bool:
        """True if registers suffice to load the next splits' results while the weights of all splits are computed and previous
        results are added."""
        few = self.few_heads and self.lanes <= 32 * self.tile.warps
        return few and self.copies > 1 and self.tile.stages == 1

    @property
    def round(self) -> int:
        """Number of splits that are added at a time."""
        return combine_round(self.tile.warps, self.shape)


@triton.jit
def block_base(table, n0, end, head, C: tl.constexpr):
    """Returns the element offset of the block of tokens that begins at n0, in the keys (or values) of a kv head. A block lies
    within one page."""
    page = tl.load(table + n0 // C.page, mask=n0 < end, other=0).to(tl.int64)
    return ((page * C.shape.kv_heads + head) * C.page + n0 % C.page) * C.shape.head_dim


@triton.jit
def visible(n0, oldest, end, C: tl.constexpr):
    """Returns a mask of the tokens of a block that the row attends to."""
    n = n0 + tl.arange(0, C.tile.block)
    seen = n < end
    if C.shape.window > 0:
        seen = seen & (n >= oldest)
    return seen


@triton.jit
def load_block(pages, base, n0, oldest, end, C: tl.constexpr):
    """Loads keys or values [block, lanes] from token n0 on; zeros for tokens that the row does not attend to."""
    n, d = tl.arange(0, C.tile.block)[:, None], tl.arange(0, C.lanes)[None, :]
    seen = visible(n0, oldest, end, C)[:, None]
    if C.lanes != C.shape.head_dim:
        seen = seen & (d < C.shape.head_dim)
    return tl.load(pages + base + (n * C.shape.head_dim + d), mask=seen, other=0.0)


@triton.jit
def powers(dots, C: tl.constexpr):
    """Returns base-2 scores of products q . k, with scale and softcap."""
    if C.shape.softcap > 0:
        return (1.0 - 2.0 / (1.0 + tl.exp2(dots * C.into_cap))) * C.cap_log2
    else:
        return dots * C.scale_log2


@triton.jit
def scores(q, keys, n0, oldest, end, C: tl.constexpr):
    """Returns the base-2 scores of a block; -inf for tokens that the row does not attend to."""
    s = powers(tl.dot(q, tl.trans(keys)), C)
    return tl.where(visible(n0, oldest, end, C)[None, :], s, float("-inf"))


@triton.jit
def with_sink(score, sinks, head, C: tl.constexpr):
    """Returns (larger of score and sink, weight of the score, sum of both weights) [16], for the new token's score and the sink
    of each head."""
    r = tl.arange(0, 16)
    sink = tl.load(sinks + head * C.group + r % C.group).to(tl.float32) * 1.4426950408889634
    top = tl.maximum(score, sink)
    own = tl.exp2(score - top)
    return top, own, own + tl.exp2(sink - top)


@triton.jit
def append(k, v, qkv_row, table, position, head, part, cos, sin, k_gammas, C: tl.constexpr):
    """In split 0, stores the new token's k (after RoPE) and v in the pages, and returns both as they are stored, [C.copies,
    lanes]. In other splits, returns zeros and stores nothing. If all rows are in the pages already, nothing is stored."""
    d, r = tl.arange(0, C.lanes), tl.arange(0, C.copies)[:, None]
    own = part + r * 0 == 0
    rows = qkv_row + (C.shape.heads + head + r * 0) * C.shape.head_dim
    exist = (d < C.shape.head_dim)[None, :] & own
    new_k, other = pairs(rows, own, d, C, C.copies > 1)
    new_v = tl.load(rows + C.shape.kv_heads * C.shape.head_dim + d[None, :], mask=exist, other=0.0)
    if k_gammas is not None:
        new_k, other = normed(new_k, other, k_gammas, C)
    new_k = turned(new_k, other, cos, sin, C).to(k.dtype.element_ty)
    if C.task.appends:
        to = block_base(table, position, position + 1, head, C) + r * 0 + d[None, :]
        tl.store(k + to, new_k, mask=(r == 0) & exist)
        tl.store(v + to, new_v, mask=(r == 0) & exist)
    return new_k, new_v


@triton.jit
def parts_from(sums, tops, first, active, C: tl.constexpr):
    """Loads the results of C.round splits from split `first` on, all in flight at once: sums [rows, lanes] and the maximum of
    each row. Maxima are loaded as scalars, since vectors would be converted between layouts at two barriers per split."""
    GROUP: tl.constexpr = C.group
    ROUND: tl.constexpr = C.round
    ROWS: tl.constexpr = C.group_rows
    LANES: tl.constexpr = C.lanes
    r, d = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    exist = (r < GROUP) & (d < C.shape.head_dim)
    values, relative = (), ()
    for i in tl.static_range(ROUND):
        part = tl.minimum(first + i, active - 1)
        values += (tl.load(sums + (part * GROUP + r) * C.shape.head_dim + d, mask=exist, other=0.0, cache_modifier=".cg"),)
        for row in tl.static_range(GROUP):
            relative += (tl.load(tops + (part * GROUP + row) * 2, cache_modifier=".cg"),)
    return values, relative


@triton.jit
def add_parts(y, values, relative, highest, factor, left, C: tl.constexpr):
    """Adds the sums of C.round splits, each times its weight, to y; only the first `left` exist."""
    GROUP: tl.constexpr = C.group
    ROUND: tl.constexpr = C.round
    ROWS: tl.constexpr = C.group_rows
    LANES: tl.constexpr = C.lanes
    r = tl.arange(0, ROWS)[:, None]
    for i in tl.static_range(ROUND):
        weight = tl.zeros([ROWS, LANES], tl.float32)
        for row in tl.static_range(GROUP):
            one = tl.exp2(relative[i * GROUP + row] - highest[row]) * factor[row]
            weight = tl.where((r == row) & (i < left), one, weight)
        y += values[i] * weight
    return y


@triton.jit
def combine(out, sums, tops, active, C: tl.constexpr):
    """Adds the active splits of one kv head and row in order: `sums` [splits, group, head_dim], `tops` [splits, group, 2]."""
    GROUP: tl.constexpr = C.group
    ROUND: tl.constexpr = C.round
    ROWS: tl.constexpr = C.group_rows
    LANES: tl.constexpr = C.lanes
    if C.ahead:
        values, relative = parts_from(sums, tops, 0, active, C)
    part = tl.arange(0, C.tile.splits)
    highest, factor = (), ()
    for row in tl.static_range(GROUP):
        at = tops + (part * GROUP + row) * 2
        top = tl.load(at, mask=part < active, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(at + 1, mask=part < active, other=0.0, cache_modifier=".cg")
        high = tl.max(top, 0)
        highest += (high,)
        factor += (1.0 / tl.sum(total * tl.exp2(top - high), 0),)
    y = tl.zeros([ROWS, LANES], tl.float32)
    for first in range(0, active, ROUND):
        if not C.ahead:
            values, relative = parts_from(sums, tops, first, active, C)
        y = add_parts(y, values, relative, highest, factor, active - first, C)
        if C.ahead:  # the last iteration loads the same splits again
            values, relative = parts_from(sums, tops, first + ROUND, active, C)
    r, d = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    exist = (r < GROUP) & (d < C.shape.head_dim)
    tl.store(out + r * C.shape.head_dim + d, y.to(out.dtype.element_ty), mask=exist)


@triton.jit
def combine_wide(out, sums, tops, active, C: tl.constexpr):
    """As `combine`, for many heads. The weights of C.round splits are computed as one tile [splits, rows]. Head by head, as in
    `add_parts`, they would take C.round * group scalar loads and exponentials in every thread."""
    GROUP: tl.constexpr = C.group
    ROUND: tl.constexpr = C.round
    ROWS: tl.constexpr = C.group_rows
    LANES: tl.constexpr = C.lanes
    SPLITS: tl.constexpr = C.tile.splits
    r, d = tl.arange(0, ROWS), tl.arange(0, LANES)
    part = tl.arange(0, SPLITS)[:, None]
    exist = (part < active) & (r < GROUP)[None, :]
    at = tops + (part * GROUP + r[None, :]) * 2
    top = tl.load(at, mask=exist, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(at + 1, mask=exist, other=0.0, cache_modifier=".cg")
    highest = tl.where(r < GROUP, tl.max(top, 0), 0.0)
    factor = 1.0 / tl.where(r < GROUP, tl.sum(total * tl.exp2(top - highest[None, :]), 0), 1.0)
    y = tl.zeros([ROWS, LANES], tl.float32)
    i = tl.arange(0, ROUND)[:, None]
    for first in range(0, active, ROUND):
        here = (first + i < active) & (r < GROUP)[None, :]
        place = (first + i) * GROUP + r[None, :]
        lanes = here[:, :, None] & (d < C.shape.head_dim)[None, None, :]
        values = tl.load(
            sums + place[:, :, None] * C.shape.head_dim + d[None, None, :], mask=lanes, other=0.0, cache_modifier=".cg"
        )
        relative = tl.load(tops + place * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(relative - highest[None, :]) * factor[None, :]
        y += tl.sum(values * weight[:, :, None], 0)
    exist = (r < GROUP)[:, None] & (d < C.shape.head_dim)[None, :]
    tl.store(out + r[:, None] * C.shape.head_dim + d[None, :], y.to(out.dtype.element_ty), mask=exist)


@triton.jit
def finish(out, partial, arrived, y, top, total, b, head, part, active, C: tl.constexpr):
    """Stores the result of a row that has a single split. With several splits, stores this split's partial result; the last
    split to arrive combines all of them."""
    G: tl.constexpr = C.group
    d, r = tl.arange(0, C.lanes), tl.arange(0, 16)
    place = b * C.shape.kv_heads + head
    out = out + (b.to(tl.int64) * C.shape.heads + head * G) * C.shape.head_dim
    exist = (r < G)[:, None] & (d < C.shape.head_dim)[None, :]
    if active == 1:
        tl.store(out + r[:, None] * C.shape.head_dim + d[None, :], (y / total[:, None]).to(out.dtype.element_ty), mask=exist)
    elif C.tile.splits > 1:
        tops = partial + tl.num_programs(1) * (C.shape.heads * C.tile.splits * C.shape.head_dim)
        tops += place * (C.tile.splits * G * 2)
        sums = partial + place * (C.tile.splits * G * C.shape.head_dim)
        at = part * G + r
        tl.store(sums + at[:, None] * C.shape.head_dim + d[None, :], y, mask=exist)
        tl.store(tops + at * 2, top, mask=r < G)
        tl.store(tops + at * 2 + 1, total, mask=r < G)
        tl.debug_barrier()  # all threads' stores are visible before the counter
        if tl.atomic_add(arrived + place, 1, sem="acq_rel") == active - 1:
            tl.store(arrived + place, 0)
            if C.few_heads:
                combine(out, sums, tops, active, C)
            else:
                combine_wide(out, sums, tops, active, C)


@triton.jit(do_not_specialize=["table_stride"])
def paged_attention(
    out, qkv, k, v, tables, positions, rows, cos_sin, q_norm, k_norm, sinks, partial, arrived, table_stride, C: tl.constexpr
):  # fmt: skip
    """One split of the tokens of one row, for one kv head."""
    G: tl.constexpr = C.group
    BLOCK: tl.constexpr = C.tile.block
    LANES: tl.constexpr = C.lanes
    STAGES: tl.constexpr = C.tile.stages
    head, b, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(rows + b)
    position = tl.load(positions + (b if C.task.of_rows else slot))
    oldest = position * 0
    if C.shape.window > 0:
        oldest = tl.maximum(position - C.shape.window + 1, 0)
    first = oldest // BLOCK
    blocks = tl.cdiv(position, BLOCK) - first
    active = tl.maximum(tl.minimum(tl.cdiv(blocks, C.chunk_blocks), C.tile.splits), 1)
    per = tl.maximum(tl.cdiv(blocks, active), 1)
    active = tl.maximum(tl.cdiv(blocks, per), 1)
    if part >= active:
        return
    begin = (first + part * per) * BLOCK
    end = tl.minimum(begin + per * BLOCK, position)
    table = tables + slot.to(tl.int64) * table_stride
    if C.overlap and not C.task.appends:  # the previous kernel stores keys that are read below
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    base = block_base(table, begin, end, head, C)
    if STAGES == 1:
        keys = load_block(k, base, begin, oldest, end, C)
        values = load_block(v, base, begin, oldest, end, C)
        base = block_base(table, begin + BLOCK, end, head, C)
    d, r = tl.arange(0, C.lanes), tl.arange(0, 16)
    cos, sin = angles(cos_sin, position + tl.arange(0, C.copies)[:, None] * 0, d[None, :], C)
    q_gammas, k_gammas = None, None
    if C.early_gammas and q_norm is not None and C.task.attends:
        q_gammas = gammas(q_norm, d, C)
    if C.early_gammas and k_norm is not None:
        k_gammas = gammas(k_norm, d, C)
    if C.overlap and C.task.appends:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()

    qkv_row = qkv + b.to(tl.int64) * C.shape.features
    if not C.task.attends:
        if not C.early_gammas and k_norm is not None:
            k_gammas = gammas(k_norm, d, C)
        append(k, v, qkv_row, table, position, head, part, cos, sin, k_gammas, C)
        return
    q, other = pairs(qkv_row + (head * G + r % G)[:, None] * C.shape.head_dim, (r >= 0)[:, None], d, C, C.copies > 1)
    if not C.early_gammas and q_norm is not None:
        q_gammas = gammas(q_norm, d, C)
    if C.copies > 1:  # the new token is loaded together with q
        if not C.early_gammas and k_norm is not None:
            k_gammas = gammas(k_norm, d, C)
        new_k, new_v = append(k, v, qkv_row, table, position, head, part, cos, sin, k_gammas, C)
    if q_norm is not None:
        q, other = normed(q, other, q_gammas, C)
    q = turned(q, other, cos, sin, C).to(k.dtype.element_ty)
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    y = tl.zeros([16, LANES], tl.float32)
    if C.copies > 1:
        score = powers(tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1), C)
        if sinks is None:
            top = tl.where(part == 0, score, top)
            total += tl.where(part == 0, 1.0, 0.0)
            y += new_v.to(tl.float32)
        else:
            higher, own, both = with_sink(score, sinks, head, C)
            top = tl.where(part == 0, higher, top)
            total += tl.where(part == 0, both, 0.0)
            y += new_v.to(tl.float32) * own[:, None]
    elif part == 0:
        if k_norm is None:
            new_k, new_v = append(k, v, qkv_row, table, position, head, part, cos, sin, None, C)
        else:
            new_k, new_v = append(k, v, qkv_row, table, position, head, part, cos, sin, gammas(k_norm, d, C), C)
        top = powers(tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1), C)
        if sinks is None:
            total += 1.0
            y += new_v.to(tl.float32)
        else:
            top, own, both = with_sink(top, sinks, head, C)
            total += both
            y += new_v.to(tl.float32) * own[:, None]
    if STAGES == 1:
        for n0 in tl.range(begin, end, BLOCK, num_stages=1):
            s = scores(q, keys, n0, oldest, end, C)
            keys = load_block(k, base, n0 + BLOCK, oldest, end, C)
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(p, 1)
            y = tl.dot(p.to(k.dtype.element_ty), values, y * fade[:, None])
            values = load_block(v, base, n0 + BLOCK, oldest, end, C)
            base = block_base(table, n0 + 2 * BLOCK, end, head, C)
            top = higher
    else:
        for n0 in tl.range(begin, end, BLOCK, num_stages=STAGES):
            s = scores(q, load_block(k, base, n0, oldest, end, C), n0, oldest, end, C)
            higher = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(p, 1)
            y = tl.dot(p.to(k.dtype.element_ty), load_block(v, base, n0, oldest, end, C), y * fade[:, None])
            base = block_base(table, n0 + BLOCK, end, head, C)
            top = higher
    finish(out, partial, arrived, y, top, total, b, head, part, active, C)


class PagedAttentionPlan:
    """The plan of a decode step's attention: created once, called many times.

    A plan serves one GPU, one type of q, k and v and one type of gammas; all tensors are contiguous and start at multiples of
    16 bytes. verify: rows may be several new tokens of a sequence, and positions are those of rows; takes two launches.
    """

    def __init__(
        self, rows: int, shape: AttentionShape, tile: DecodeTile, machine: Machine, *, verify: bool = False
    ) -> None:  # fmt: skip
        self.rows, self.shape, self.tile = rows, shape, tile
        overlap = machine.arch.sm >= 90
        self.config = PagedAttention(shape, tile, overlap, DecodeTask.VERIFY if verify else DecodeTask.STEP)
        self.append: Launcher | None = None
        if verify:
            self.append_config = replace(self.config, task=DecodeTask.APPEND)
            self.append = Launcher(paged_attention, (shape.kv_heads, rows, 1), tile.warps, overlap=overlap)
        grid = (shape.kv_heads, rows, tile.splits)
        # Without a limit ptxas uses at most 168 registers, with which 12 warps share an SM, and spills a little. Tiles with one
        # stage may have all 255; tiles with several stages need no more than 168.
        most = 255 if tile.stages == 1 else 168
        self.launch = Launcher(paged_attention, grid, tile.warps, overlap=self.config.overlap, registers=most)

    @property
    def workspace(self) -> tuple[int, int]:
        """Number of elements of the two workspaces: float32 sums, and int32 counters, which are zero before and after a
        launch."""
        if self.tile.splits == 1:
            return 0, 0
        return self.rows * self.shape.heads * self.tile.splits * (self.shape.head_dim + 2), self.rows * self.shape.kv_heads

    def __call__(
        self, qkv: Tensor, pages: KVPages, tables: Tensor, positions: Tensor, rows: Tensor, cos_sin: Tensor,
        q_norm: Tensor | None, k_norm: Tensor | None, sinks: Tensor | None, partial: Tensor, arrived: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns out [B, heads * head_dim]; all tensors on the current device."""
        out = torch.empty((self.rows, self.shape.heads * self.shape.head_dim), dtype=qkv.dtype, device=qkv.device)
        given = (
            out, qkv, pages.k, pages.v, tables, positions, rows, cos_sin, q_norm, k_norm, sinks, partial, arrived,
            tables.stride(0),
        )  # fmt: skip
        if self.append is not None:
            self.append(*given, self.append_config)
        self.launch(*given, self.config)
        return out
