"""The loads that the producer warp issues and their order, run as Python and compared with the list of all stages of its
block.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.pipeline import advance
from lowbit.kernels.parts.producer import load
from lowbit.kernels.parts.schedule import first_token_of, iterations_of, k_range_of, tile_at, tile_count
from tests.kernels.parts.plain import GL, plain


class Stages(list):
    """Stages or barriers; an index stands for each."""

    def index(self, i):
        return self[i]


def asked_for(block, blocks, tiles, C):
    """Returns the operations that `load` issues in a block, in order, each a tuple (name, ..)."""
    log: list[tuple] = []
    note = {
        name: lambda *_, name=name: log.append((name,))
        for name in ("arrive_cluster", "launch_next_kernel", "wait_for_previous_kernel")
    }
    gl = SimpleNamespace(
        **{
            **vars(GL),
            "program_id": lambda axis: block,
            "num_programs": lambda axis: blocks,
            "maximum": max,
            "constexpr": object,
        }
    )
    copies = SimpleNamespace(x_desc="x", x=Stages(range(C.stages)), barriers=Stages(range(C.stages)), tiles=tiles)
    plain(
        load,
        gl=gl,
        **note,
        mbarrier=SimpleNamespace(expect=lambda full, size: log.append(("expect", full, size))),
        acquire=lambda barriers, stage, phase, C: log.append(("acquire", stage, phase)),
        tma_load=lambda desc, at, full, stage: log.append(("x", full, stage, *at)),
        tile_count=plain(tile_count),
        tile_at=plain(tile_at, gl=gl),
        first_token_of=plain(first_token_of, gl=gl),
        iterations_of=plain(iterations_of, k_range_of=plain(k_range_of)),
        advance=plain(advance, gl=gl),
    )(copies, lambda copies, full, stage, channel_tile, k, C: log.append(("w", full, stage, channel_tile, k)), C)
    return log


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("of_tokens", "of_channels", "iterations", "splits", "per_iteration", "stages_ahead"),
    [(1, 1, 9, 1, 1, 6), (3, 5, 7, 1, 2, 2), (2, 3, 5, 3, 2, 6), (1, 2, 1, 1, 1, 6)],
)
def test_every_stage_of_every_tile_once(of_tokens, of_channels, iterations, splits, per_iteration, stages_ahead, paired):
    C = SimpleNamespace(
        stages=6, stages_ahead=stages_ahead, stage_bytes=4096, iteration_stages=per_iteration, splits=splits, token_group=2,
        tile_tokens=32, x_block=(32, 64), paired=paired, last_is_full=True,
    )  # fmt: skip
    tiles, blocks = SimpleNamespace(of_tokens=of_tokens, of_channels=of_channels, iterations=iterations), 4
    # with one tile, it is partial; with several, the last is shifted back so that it is full
    tiles.tokens = max(20, of_tokens * 32 - 5)
    for block in range(blocks):
        log = asked_for(block, blocks, tiles, C)
        of_tiles = []
        for index in range(block, of_tokens * of_channels * splits, blocks):
            token_tile, channel_tile, split = plain(tile_at, gl=GL)(index, tiles, C)
            begin, end = plain(iterations_of, k_range_of=plain(k_range_of))(split, tiles, C)
            token = min(token_tile * 32, max(tiles.tokens - 32, 0))
            of_tiles.append([(channel_tile, token, k) for k in range(begin * per_iteration, end * per_iteration)])
        wanted = [stage for tile in of_tiles for stage in tile]
        w, x = ([entry for entry in log if entry[0] == name] for name in "wx")
        places = [(i % 6, i % 6) for i in range(len(wanted))]
        assert w == [("w", *place, channel, k) for place, (channel, _, k) in zip(places, wanted, strict=True)]
        assert x == [("x", *place, token, k * 64) for place, (_, token, k) in zip(places, wanted, strict=True)]

        # Before the wait for the previous kernel only weights are loaded, into the `stages_ahead` first stages.
        await_at, ahead = log.index(("wait_for_previous_kernel",)), min(stages_ahead, len(of_tiles[0]) if of_tiles else 0)
        assert [entry[0] for entry in log[:await_at]] == ["arrive_cluster"] * paired + ["launch_next_kernel"] + [
            "expect",
            "w",
        ] * ahead
        assert [entry[1:] for entry in log if entry[0] == "expect"] == [(i, 4096) for i in range(ahead)]
        # All later loads wait until their stage is free, with the parity of the previous pass over the ring.
        assert [entry[1:] for entry in log if entry[0] == "acquire"] == [
            (i % 6, 1 - i // 6 % 2) for i in range(ahead, len(wanted))
        ]
