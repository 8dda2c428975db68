"""Which tile a block computes next, which share of K, and how the shares of a tile are added up.

A persistent block computes the tiles with its number, and each as many further on as there are blocks. With splits, as many
blocks in a row share a tile, each a stretch of K. The functions take the configuration C of a kernel, which has `splits`,
`token_group`, `last_is_full`, the tile's `rows`, `columns` and `accumulator`.

With 0 splits (stream-K) all blocks compute equally many whole tiles first, and of the tiles that are left over, fewer than
blocks, each an equal share: their iterations along K, one tile after the other, are dealt in stretches, the last one to the
first block. A stretch lies in one tile, or ends one and begins the next. There are at least as many iterations as blocks.
Source: Osama, Merrill, Cecka, Garland, Owens, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
Multiplication on the GPU" (arXiv:2301.03598).
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import Scalar, aggregate, asm, barrier, gl, gluon, run

WAIT_COUNT = gl.constexpr(
    "{ .reg .pred early; WAIT: ld.acquire.gpu.global.b32 $0, [$1]; setp.lt.s32 early, $0, $2; @early bra WAIT; }"
)
"""Until the counter $1 is at least $2."""

ADD_LOADED = gl.constexpr("{ .reg .f32 before; ld.global.cg.f32 before, [$1]; add.rn.f32 $0, before, $2; }")
"""$2 behind what lies at $1. As one: all loads before all sums take the registers of two tiles."""


@aggregate
class TileGrid:
    """How many tiles there are of tokens and of channels, how many iterations of a main loop cover K, and how many tokens
    there are."""

    of_tokens: Scalar
    of_channels: Scalar
    iterations: Scalar
    tokens: Scalar


@aggregate
class SplitKWorkspace:
    """Where the parts of a tile meet: sums float32 or int32, and a counter int32 for each tile, zero before and after."""

    partial: Scalar
    arrived: Scalar


@gluon.jit
def tile_count(tiles, C: gl.constexpr):
    """Tiles times splits; of stream-K what it would be if all blocks had as many turns as this one."""
    if C.splits == 0:
        whole, begin, end = stream_k_range(tiles)
        return whole + ((end - 1) // tiles.iterations - begin // tiles.iterations + 1) * gl.num_programs(0)
    return tiles.of_tokens * tiles.of_channels * C.splits


@gluon.jit
def tile_at(index, tiles, C: gl.constexpr):
    """(tile of tokens, of channels, split) of the index-th tile: all channels for a group of tokens, then the next group. With
    a C.token_group of 0 all tokens are in one tile, and a kernel starts without the divisions. Of stream-K the split is the
    index, which says with the block's number what it computes of the tile."""
    if C.token_group == 0:  # of PTX, since of a constant too much would be worked out before a kernel's loop, and kept
        return asm("mov.b32 $0, 0;", "=r", [], gl.int32), index // C.splits, index % C.splits
    if C.splits == 0:
        split = index
        whole, begin, _end = stream_k_range(tiles)
        shared = whole + begin // tiles.iterations + (index - whole) // gl.num_programs(0)
        index = gl.where(index < whole, index, shared)
    else:
        split = index % C.splits
        index = index // C.splits
    group = index // (C.token_group * tiles.of_channels)
    first = group * C.token_group
    size = gl.minimum(tiles.of_tokens - first, C.token_group)
    inside = index % (C.token_group * tiles.of_channels)
    return first + inside % size, inside // size, split


@gluon.jit
def first_token_of(token_tile, tiles, C: gl.constexpr):
    """Where a tile of tokens begins. With C.last_is_full the last one begins where it is full, if there are so many tokens: the
    copy engine takes long over rows that do not exist. Tokens of two tiles are stored twice, with the same bits."""
    if C.last_is_full:
        return gl.minimum(token_tile * C.tile_tokens, gl.maximum(tiles.tokens - C.tile_tokens, 0))
    else:
        return token_tile * C.tile_tokens


@gluon.jit
def iterations_of(split, tiles, C: gl.constexpr):
    """The first iteration along K of a split, and the one after its last."""
    if C.splits == 0:
        whole, begin, end = stream_k_range(tiles)
        start = (begin // tiles.iterations + (split - whole) // gl.num_programs(0)) * tiles.iterations
        begin = gl.where(split < whole, 0, gl.maximum(begin - start, 0))
        return begin, gl.where(split < whole, tiles.iterations, gl.minimum(end - start, tiles.iterations))
    return k_range_of(split, tiles, C.splits)


@gluon.jit
def stream_k_range(tiles):
    """Of stream-K: how many tiles blocks compute whole, and this block's first iteration of all those of the other tiles, with
    the one after its last."""
    blocks = gl.num_programs(0)
    of_all = tiles.of_tokens * tiles.of_channels
    dealt = of_all % blocks * tiles.iterations
    place = blocks - 1 - gl.program_id(0)
    return of_all // blocks * blocks, dealt * place // blocks, dealt * (place + 1) // blocks


@gluon.jit
def k_range_of(part, tiles, parts: gl.constexpr):
    """The same of one of so many parts."""
    return tiles.iterations * part // parts, tiles.iterations * (part + 1) // parts


@gluon.jit
def workspace_offsets(C: gl.constexpr):
    """Where the sums of a tile lie in memory: neighbouring lanes, which hold rows g and pairs of columns 2t (hardware/mma.py),
    have neighbouring words."""
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    columns = gl.arange(0, C.columns, gl.SliceLayout(0, C.accumulator))
    of_row = rows % 8 * 4 + rows // 16 * 32 + rows // 8 % 2 * (2 * C.rows)
    of_column = columns % 8 // 2 + columns % 2 * (4 * C.rows) + columns // 8 * (8 * C.rows)
    return of_row[:, None] + of_column[None, :]


@gluon.jit
def reduce_splits(at, acc, tile, split, C: gl.constexpr):
    """Leaves the sums of one split to the block that comes last for this tile; that one gets True and the total."""
    place = workspace_offsets(C)
    SPLITS: gl.constexpr = C.splits
    base = at.partial + tile.to(gl.int64) * (C.splits * C.rows * C.columns)
    gl.store(base + split * (C.rows * C.columns) + place, acc)
    barrier()
    last = gl.atomic_add(at.arrived + tile, 1, sem="acq_rel") == C.splits - 1
    total = acc
    if last:
        gl.store(at.arrived + tile, 0)
        total = gl.load(base + place)
        for i in gl.static_range(1, SPLITS):  # unrolled, so that all loads are under way at once
            total += gl.load(base + i * (C.rows * C.columns) + place)
    return last, total


@gluon.jit
def workspace_pointers(base, C: gl.constexpr):
    """Pointers to `workspace_offsets` behind `base`: one address for each thread, to which constants are added last. With an address for
    each sum Triton 3.6 leaves registers for 9 loads of 128 at a time, so for 75."""
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    columns = gl.arange(0, C.columns, gl.SliceLayout(0, C.accumulator))
    of_thread = (base + (rows % 8 * 4 + rows // 16 * 32))[:, None] + (columns % 8 // 2)[None, :]
    of_column = columns % 2 * (4 * C.rows) + columns // 8 * (8 * C.rows)
    return of_thread + (rows // 8 % 2 * (2 * C.rows))[:, None] + of_column[None, :]


@gluon.jit
def reduce_stream_k(at, acc, index, tiles, C: gl.constexpr):
    """The same of stream-K, for the block that begins a tile: it waits for those that have the rest, and adds theirs to its own
    sums in the order of K. Their stretches come later, so that they are blocks of smaller numbers, which are under way: blocks
    start in that order. Each leaves one part at most, since all but the first of a stretch begin their tiles."""
    SIZE: gl.constexpr = C.rows * C.columns
    begin, end = iterations_of(index, tiles, C)
    whole, first, _end = stream_k_range(tiles)
    if end - begin < tiles.iterations:
        blocks = gl.num_programs(0)
        own = blocks - 1 - gl.program_id(0)
        tile = first // tiles.iterations + (index - whole) // blocks
        part = at.partial + own.to(gl.int64) * SIZE
        if begin > 0:
            gl.store(workspace_pointers(part, C), acc)
            barrier()
            gl.atomic_add(at.arrived + tile, 1, sem="acq_rel")
        else:
            dealt = tiles.of_tokens * tiles.of_channels % blocks * tiles.iterations
            last = ((tile + 1) * tiles.iterations * blocks - 1) // dealt
            run(WAIT_COUNT, "=&r,l,r", [at.arrived + tile, last - own])
            barrier()
            gl.store(at.arrived + tile, 0)
            for _ in range(own, last):
                part += SIZE
                theirs = workspace_pointers(part, C).to(gl.int64)
                acc = gl.inline_asm_elementwise(ADD_LOADED, "=f,l,f", [theirs, acc], dtype=gl.float32, is_pure=False, pack=1)
    return begin == 0, acc


@gluon.jit
def reduce_splits_serially(at, acc, tile, split, C: gl.constexpr):
    """The same sums in the same order, one block after the other: each waits for the split before it, adds what that has left
    and leaves the sum. Of a tile, memory holds one sum, not one for each split. Blocks start in the order of their numbers, so
    that what a block waits for is under way."""
    place = workspace_offsets(C)
    base = at.partial + tile.to(gl.int64) * (C.rows * C.columns)
    if split > 0:
        run(WAIT_COUNT, "=&r,l,r", [at.arrived + tile, split])
        barrier()
        acc = gl.inline_asm_elementwise(
            ADD_LOADED, "=&f,l,f", [(base + place).to(gl.int64), acc], dtype=gl.float32, is_pure=False, pack=1
        )
    last = split == C.splits - 1
    if last:
        gl.store(at.arrived + tile, 0)
    else:
        gl.store(base + place, acc)
        barrier()
        gl.atomic_add(at.arrived + tile, 1, sem="acq_rel")
    return last, acc
