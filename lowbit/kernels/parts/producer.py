"""The loader warp: fills the stages by TMA, weights before x, since the previous kernel may have written x.

A kernel passes `load_weights(loader_args, full, stage, channel_tile, k, C)`, which starts the copy of the `k`-th weight stage
along K to stage index `stage`. `loader_args` is an aggregate that the kernel defines, with `x_desc`, the stages `x`, `barriers`
and `tiles`. C is its configuration, with `stages`, `stages_ahead`, `stage_bytes`, `iteration_stages` (stages per main-loop
iteration) and `paired` (cluster split-K).
"""

from __future__ import annotations

from lowbit.kernels.parts.cluster_split_k import arrive_cluster
from lowbit.kernels.parts.gluon import gl, gluon, mbarrier, tma_load
from lowbit.kernels.parts.pipeline import acquire, advance
from lowbit.kernels.parts.prologue import launch_next_kernel, wait_for_previous_kernel
from lowbit.kernels.parts.schedule import first_token_of, iterations_of, tile_at, tile_count


@gluon.jit
def load(loader_args, load_weights: gl.constexpr, C: gl.constexpr):
    """Loads all stages of all tiles of a block.

    The first weights are loaded before the previous kernel has finished. Math warps need no separate wait for that kernel,
    since they read nothing but weights before x arrives.
    """
    TILE_K: gl.constexpr = C.x_block[1]
    STAGES: gl.constexpr = C.iteration_stages
    if C.paired:
        arrive_cluster(1, C)
    launch_next_kernel()
    tiles = tile_count(loader_args.tiles, C)
    token_tile, channel_tile, split = tile_at(gl.program_id(0), loader_args.tiles, C)
    begin, end = iterations_of(split, loader_args.tiles, C)
    ahead = gl.where(gl.program_id(0) < tiles, gl.minimum(end * STAGES - begin * STAGES, C.stages_ahead), 0)
    for i in range(0, ahead):
        full = loader_args.barriers.index(i)
        mbarrier.expect(full, C.stage_bytes)
        load_weights(loader_args, full, i, channel_tile, begin * STAGES + i, C)
    wait_for_previous_kernel()
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token_tile, channel_tile, split = tile_at(index, loader_args.tiles, C)
        first_token = first_token_of(token_tile, loader_args.tiles, C)
        begin, end = iterations_of(split, loader_args.tiles, C)
        for k in range(begin * STAGES, end * STAGES):
            full = loader_args.barriers.index(stage)
            if ahead == 0:
                acquire(loader_args.barriers, stage, phase, C)
                load_weights(loader_args, full, stage, channel_tile, k, C)
            ahead = gl.maximum(ahead - 1, 0)
            tma_load(loader_args.x_desc, [first_token, k * TILE_K], full, loader_args.x.index(stage))
            stage, phase = advance(stage, phase, 1, C)
