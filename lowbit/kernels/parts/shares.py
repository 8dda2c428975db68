"""Equal shares of K for all blocks (stream-K): which tile a block works on next, and at which part of it.

Where tiles do not fill the GPU a whole number of times, its last turn leaves SMs without work. Here the first tiles, as many as
one turn and what is left over, are cut differently: their iterations along K, one tile after the other, are dealt to all
blocks in equal stretches. A stretch ends one tile, may hold whole ones, and begins another; after it a block has whole tiles.
Parts of a tile meet in parts/schedule.py.

`tiles` are its `Tiles`. A block's turns are its tiles in their order, whole or not.
Source: Osama, Merrill, Cecka, Garland, Owens, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
Multiplication on the GPU" (arXiv:2301.03598).
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import Scalar, aggregate, gl, gluon


@aggregate
class Share:
    """A block's stretch of the iterations that are dealt, the first tile in it and how many turns it takes; the first tile
    after it that is the block's, and all its turns."""

    begin: Scalar
    end: Scalar
    first_tile: Scalar
    stretch_turns: Scalar
    whole_tile: Scalar
    turns: Scalar


@gluon.jit
def dealt_of(tiles):
    """How many iterations are dealt, and how many turns follow: one less than fill the GPU, if there are any."""
    of_all = tiles.of_tokens * tiles.of_channels
    turns = gl.maximum(of_all // gl.num_programs(0) - 1, 0)
    return (of_all - turns * gl.num_programs(0)) * tiles.iterations, turns


@gluon.jit
def share_of(tiles):
    """The share of this block. At least one iteration is dealt to each."""
    block, blocks = gl.program_id(0), gl.num_programs(0)
    dealt, turns = dealt_of(tiles)
    begin, end = dealt * block // blocks, dealt * (block + 1) // blocks
    first = begin // tiles.iterations
    of_stretch = (end - 1) // tiles.iterations - first + 1
    return Share(begin, end, first, of_stretch, dealt // tiles.iterations + block, of_stretch + turns)


@gluon.jit
def tile_of(turn, share):
    """The tile of a turn."""
    whole = share.whole_tile + (turn - share.stretch_turns) * gl.num_programs(0)
    return gl.where(turn < share.stretch_turns, share.first_tile + turn, whole)


@gluon.jit
def stretch_of(turn, share, tiles):
    """The first iteration along K of a turn, and the one after its last."""
    start = tile_of(turn, share) * tiles.iterations
    begin = gl.where(turn < share.stretch_turns, gl.maximum(share.begin - start, 0), 0)
    end = gl.where(turn < share.stretch_turns, gl.minimum(share.end - start, tiles.iterations), tiles.iterations)
    return begin, end


@gluon.jit
def blocks_of(tile, tiles):
    """The first block that has a part of a tile whose iterations are dealt, and the last one. A block has an iteration if it is
    the last one that begins there or before."""
    dealt, _turns = dealt_of(tiles)
    start = tile * tiles.iterations
    first = ((start + 1) * gl.num_programs(0) - 1) // dealt
    return first, ((start + tiles.iterations) * gl.num_programs(0) - 1) // dealt
