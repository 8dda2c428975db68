"""The warp that keeps the stages of a product full, by TMA: weights ahead of x, which the kernel before may have made.

A kernel says what a stage of weights is, by a function `load_weights(copies, full, stage, channel_tile, k, C)` that asks for
the `k`-th one to be copied to `stage`; the rest is one order for all. `copies` is the kernel's own aggregate, with `x_desc`,
the stages `x`, `barriers` and `tiles`; C is its configuration, with `stages`, `stages_ahead`, `stage_bytes`, the stages of an
iteration of its main loop, `iteration_stages`, and whether blocks are `paired`.

The copy engine takes about 12 cycles for each row that does not exist (docs/log.md). So x of a tile that is not full comes in
`x_pieces`, of which those without a token are not asked for: the tensor cores then multiply what happens to lie there, and
nobody reads those sums.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon, tma_load
from lowbit.kernels.parts.pair import say_ready
from lowbit.kernels.parts.pipeline import acquire, advance, expect
from lowbit.kernels.parts.prologue import await_previous, start_next
from lowbit.kernels.parts.schedule import count, first_token_of, iterations_of, tile_at


@gluon.jit
def absent_bytes(first_token, tiles, C: gl.constexpr):
    """Bytes of a stage of x that are not copied: those of pieces without a token."""
    if C.x_pieces == 1:
        return 0
    else:
        rows = gl.minimum(gl.cdiv(tiles.tokens - first_token, C.x_block[0]) * C.x_block[0], C.tile_tokens)
        return (C.tile_tokens - rows) * C.x_row_bytes


@gluon.jit
def load_x(copies, full, stage, first_token, k, C: gl.constexpr):
    """Asks for x of a stage."""
    PIECES: gl.constexpr = C.x_pieces
    ROWS: gl.constexpr = C.x_block[0]
    x = copies.x.index(stage)
    if PIECES == 1:
        tma_load(copies.x_desc, [first_token, k * C.x_block[1]], full, x)
    else:
        for piece in gl.static_range(PIECES):
            token = first_token + piece * ROWS
            if token < copies.tiles.tokens:
                tma_load(copies.x_desc, [token, k * C.x_block[1]], full, x.slice(piece * ROWS, ROWS))


@gluon.jit
def load(copies, load_weights: gl.constexpr, C: gl.constexpr):
    """The role of that warp, from the first tile of its block to the last.

    The first weights do not wait for the kernel before this one. Warps that multiply need no wait of their own: they do
    nothing but read weights before x is there.
    """
    STAGES: gl.constexpr = C.iteration_stages
    if C.paired:
        say_ready(1, C)
    start_next()
    tiles = count(copies.tiles, C)
    token_tile, channel_tile, split = tile_at(gl.program_id(0), copies.tiles, C)
    begin, end = iterations_of(split, copies.tiles, C)
    ahead = gl.where(gl.program_id(0) < tiles, gl.minimum(end * STAGES - begin * STAGES, C.stages_ahead), 0)
    absent = absent_bytes(first_token_of(token_tile, copies.tiles, C), copies.tiles, C)
    for i in range(0, ahead):
        expect(copies.barriers, i, absent, C)
        load_weights(copies, copies.barriers.index(i), i, channel_tile, begin * STAGES + i, C)
    await_previous()
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, channel_tile, split = tile_at(index, copies.tiles, C)
        first_token = first_token_of(token_tile, copies.tiles, C)
        absent = absent_bytes(first_token, copies.tiles, C)
        begin, end = iterations_of(split, copies.tiles, C)
        for k in range(begin * STAGES, end * STAGES):
            full = copies.barriers.index(stage)
            if ahead == 0:
                acquire(copies.barriers, stage, phase, absent, C)
                load_weights(copies, full, stage, channel_tile, k, C)
            ahead = gl.maximum(ahead - 1, 0)
            load_x(copies, full, stage, first_token, k, C)
            stage, phase = advance(stage, phase, 1, C)
