"""Tile scheduler: the tile and the range of K that a block computes next, and the reduction of a tile's partial sums.

A persistent block first computes the work item with the block's index, then steps by the number of blocks. A work item is a
tile. With split-K, C.splits consecutive work items are ranges of K of one tile. The functions take the configuration C of a
kernel, which has `splits`, `token_group`, `last_is_full`, and the tile's `rows`, `columns` and `accumulator`.

`splits` = 0 means stream-K. All blocks first compute the same number of whole tiles. The remaining tiles are fewer than blocks;
their iterations along K, in the order of tiles, are divided equally among all blocks; the first block gets the last range. A
range lies within one tile, or contains the end of one tile and the beginning of the next. There are at least as many iterations
as blocks. Source: Osama, Merrill, Cecka, Garland, Owens, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
Multiplication on the GPU" (arXiv:2301.03598).
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import Scalar, aggregate, asm, barrier, gl, gluon, run

WAIT_COUNT = gl.constexpr(
    "{ .reg .pred early; WAIT: ld.acquire.gpu.global.b32 $0, [$1]; setp.lt.s32 early, $0, $2; @early bra WAIT; }"
)
"""PTX that waits until the counter at $1 is at least $2."""

ADD_LOADED = gl.constexpr("{ .reg .f32 before; ld.global.cg.f32 before, [$1]; add.rn.f32 $0, before, $2; }")
"""PTX that loads the float32 at $1 and adds $2 to it. Load and addition are one block of PTX, because separate loads would all
be moved before the additions and take the registers of two tiles."""


@aggregate
class TileGrid:
    """Numbers of token tiles, of channel tiles, of main-loop iterations that cover K, and of tokens."""

    of_tokens: Scalar
    of_channels: Scalar
    iterations: Scalar
    tokens: Scalar


@aggregate
class SplitKWorkspace:
    """Partial sums of tiles, float32 or int32, and an int32 counter for each tile. Counters are zero before and after the
    kernel."""

    partial: Scalar
    arrived: Scalar


@gluon.jit
def tile_count(tiles, C: gl.constexpr):
    """Number of work items: tiles times splits. For stream-K, this block's number of work items times the number of blocks."""
    if C.splits == 0:
        whole, begin, end = stream_k_range(tiles)
        return whole + ((end - 1) // tiles.iterations - begin // tiles.iterations + 1) * gl.num_programs(0)
    return tiles.of_tokens * tiles.of_channels * C.splits


@gluon.jit
def tile_at(index, tiles, C: gl.constexpr):
    """Returns (token tile, channel tile, split) of a work item: all channel tiles for a group of token tiles come before the
    next group.

    C.token_group is 0 if there is only one token tile; the kernel then starts without divisions. For stream-K the split is the
    index itself, from which `iterations_of` computes the range of K.
    """
    if C.token_group == 0:  # PTX returns the 0: values derived from a constant would be hoisted and kept in registers
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
    """First token of a token tile. With C.last_is_full the last of several tiles begins early enough to be full, since TMA is
    slow on rows that do not exist. Tokens that are in two tiles are then stored twice, with the same bits."""
    if C.last_is_full:
        return gl.minimum(token_tile * C.tile_tokens, gl.maximum(tiles.tokens - C.tile_tokens, 0))
    else:
        return token_tile * C.tile_tokens


@gluon.jit
def iterations_of(split, tiles, C: gl.constexpr):
    """Returns the range (first, one after last) of iterations along K of a split."""
    if C.splits == 0:
        whole, begin, end = stream_k_range(tiles)
        start = (begin // tiles.iterations + (split - whole) // gl.num_programs(0)) * tiles.iterations
        begin = gl.where(split < whole, 0, gl.maximum(begin - start, 0))
        return begin, gl.where(split < whole, tiles.iterations, gl.minimum(end - start, tiles.iterations))
    return k_range_of(split, tiles, C.splits)


@gluon.jit
def stream_k_range(tiles):
    """Stream-K: number of tiles that are computed whole, and this block's range (first, one after last) of the iterations of
    the other tiles."""
    blocks = gl.num_programs(0)
    of_all = tiles.of_tokens * tiles.of_channels
    dealt = of_all % blocks * tiles.iterations
    place = blocks - 1 - gl.program_id(0)
    return of_all // blocks * blocks, dealt * place // blocks, dealt * (place + 1) // blocks


@gluon.jit
def k_range_of(part, tiles, parts: gl.constexpr):
    """Returns the range of iterations (first, one after last) of one of `parts` equal ranges of K."""
    return tiles.iterations * part // parts, tiles.iterations * (part + 1) // parts


@gluon.jit
def workspace_offsets(C: gl.constexpr):
    """Offsets of a tile's sums in the workspace. A warp's stores are coalesced: neighbouring lanes, which hold neighbouring
    column pairs 2t of a row g (hardware/mma.py), have neighbouring words."""
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    columns = gl.arange(0, C.columns, gl.SliceLayout(0, C.accumulator))
    of_row = rows % 8 * 4 + rows // 16 * 32 + rows // 8 % 2 * (2 * C.rows)
    of_column = columns % 8 // 2 + columns % 2 * (4 * C.rows) + columns // 8 * (8 * C.rows)
    return of_row[:, None] + of_column[None, :]


@gluon.jit
def reduce_splits(at, acc, tile, split, C: gl.constexpr):
    """Split-K reduction by the last block: stores a split's sums; returns (True, total) in the block that arrives last."""
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
        for i in gl.static_range(1, SPLITS):  # unrolled, so that all loads are in flight at once
            total += gl.load(base + i * (C.rows * C.columns) + place)
    return last, total


@gluon.jit
def workspace_pointers(base, C: gl.constexpr):
    """Pointers `base` + `workspace_offsets`: one address per thread, constants added last. With an address per sum, Triton 3.6
    has registers for only 9 of 128 loads in flight; with constant offsets, for 75."""
    rows = gl.arange(0, C.rows, gl.SliceLayout(1, C.accumulator))
    columns = gl.arange(0, C.columns, gl.SliceLayout(0, C.accumulator))
    of_thread = (base + (rows % 8 * 4 + rows // 16 * 32))[:, None] + (columns % 8 // 2)[None, :]
    of_column = columns % 2 * (4 * C.rows) + columns // 8 * (8 * C.rows)
    return of_thread + (rows // 8 % 2 * (2 * C.rows))[:, None] + of_column[None, :]


@gluon.jit
def reduce_stream_k(at, acc, index, tiles, C: gl.constexpr):
    """Stream-K reduction by the block that begins a tile: it waits for the other blocks' partial sums and adds them in the
    order of K.

    Later ranges belong to blocks of lower index, which are already running, since blocks start in index order. Each block
    stores at most one partial tile: of the two tiles in a range, the second one begins in it.
    """
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
    """Serial split-K: each block waits for the block of the previous split, adds the sum of that block to its own and stores
    the result. So sums are added in the order of K.

    The workspace holds one sum per tile, not one per split. Blocks start in index order, so the block waited for is already
    running.
    """
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
